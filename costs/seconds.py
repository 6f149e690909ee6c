"""Estimate the seconds of a step: a roofline for each part, and what is not hidden of messages.

    products   matrix products: FLOPs / (peak x the share of it that products reach). Attention is
               causal, so half of its square counts, and it reaches another share
    recompute  the same for what backward recomputes under activation checkpointing
    passes     what norms, RoPE, SwiGLU, residual sums, the loss and FSDP's copies read and write,
               recomputation included: bytes / memory bandwidth
    weights    what each microbatch reads and writes to round weights and to add up gradients. This
               does not shrink with the microbatch: it decides for experts, of which a token uses
               few
    optimizer  what clipping and the optimizer read and write; with Muon also the products that
               orthogonalize, and what ranks send each other for them
    cpu        by how much copies of offloaded activations to the CPU take longer than forward, and
               copies back longer than backward
    tp, cp, ep, shard, replicate    what is not hidden of the collectives over each dimension
    pp         the time that a rank of a pipeline waits for other stages: what the schedule leaves
               idle if all stages take as long as its own, and a message each way between each two
               ranks. Parts are the busiest rank's

Hidden is over `shard` as much as computation takes, since FSDP all-gathers the weights of the next
block, and reduce-scatters the gradients of the one before, while a block computes; but not the
first and the last call of each. Over `replicate` as much as the last microbatch's backward takes,
but not the last call, nor ZeRO-1's all-gather of updated weights, which comes after the optimizer.
Over `tp`, `cp` and `ep` nothing, as the next operation needs the result; but messages of --async-tp
as much as half of the products, beside which they travel. gloo hides nothing.

What products, attention and links reach is fitted to published steps (REACHED in machines.py); the
constants below are assumptions that such steps do not tell apart. Letters as in page.py.
"""

import functools
import math
from typing import NamedTuple

from config import OWN_GROUPS, PART_OF, ParallelConfig, Work
from costs.machines import Machine
from costs.page import Traffic, holds, is_of_muon, saved, sends
from costs.shapes import attended_by_layer, units
from model import LlamaConfig
from parallel import used_techniques
from techniques.muon import flops_of_muon
from techniques.pipeline import layers_of, part_of
from techniques.schedules import enough, make_schedule, simulate

EAGER_FACTOR = 2.0  # memory traffic of eager blocks / memory traffic of compiled blocks
LATENCY = 10e-6  # seconds to start a collective
HOP_IN_NODE, HOP_ACROSS = 1e-6, 5e-6  # seconds from a rank to the next: in its node, in another
CPU_LINK = 50e9  # bytes/s between a GPU and the CPU's memory, of the 64e9 of PCIe 5 with 16 lanes
# Of attention backward has 2.5 times the FLOPs of forward, since it recomputes the scores.
ATTENTION_BACKWARD = 2.5

# ----------------------------------------------------------------- what a token takes in a block


class Flops(NamedTuple):
    """Floating-point operations. Matrix products and attention reach different rates."""

    products: float
    attention: float


def forward_flops(work: Work) -> Flops:
    """Return the FLOPs of forward: 2 for each element of a matrix; of attention, scores and
    weighted sums over half of the square."""
    c = work.model.config
    D = c.dim
    F = c.ffn_dim * c.ffn_uses
    products = 2 * (weights_of_attention(c) + 3 * D * F)
    length = work.document or work.seq_len
    twice = attended_by_layer(c, length, times=2)  # in a long text a window is always full
    attention = 2 * sum(twice) / c.n_layers * c.q_dim
    return Flops(products, attention)


def weights_of_attention(c: LlamaConfig) -> int:
    return c.attention_weights or 2 * c.dim * (c.q_dim + c.kv_dim)


def recomputed_flops(work: Work) -> Flops:
    """Return the FLOPs that backward repeats. Selective checkpointing repeats wq, wv and w1, full
    all; but compiled, neither w2 nor attention (uncompiled, w2 is not repeated either, which is
    left out here). Several feed-forwards are repeated whole."""
    c = work.model.config
    D = c.dim
    F = c.ffn_dim * c.ffn_uses
    several = c.ffn_uses > 1  # feed-forwards of a token
    of_matrix = 2 * D * F  # of w1, w2 or w3
    forward = forward_flops(work)
    checkpointing = work.parallel.checkpointing
    if checkpointing == "full":
        if work.parallel.repeats_attention:
            return forward
        return Flops(forward.products - of_matrix * (not several), 0)
    if checkpointing == "selective":
        of_ffn = 3 * of_matrix if several else of_matrix
        return Flops(weights_of_attention(c) + of_ffn, 0)  # half of attention's products
    if checkpointing == "products" and several:
        return Flops(3 * of_matrix, 0)
    return Flops(0, 0)


def moved_bytes(work: Work) -> float:
    """Return the bytes that operations between the products read and write, in all passes."""
    c = work.model.config
    p = work.parallel
    D = c.dim
    several = c.ffn_uses > 1
    elements = 10 * D  # norms 4 D, residual sums 6 D
    elements += 2 * (c.q_dim + c.kv_dim)  # RoPE
    elements += 2 * c.normed_dim
    elements += 3 * c.ffn_dim * c.ffn_uses  # SwiGLU
    if several:
        elements += 8 * D * c.ffn_uses  # rows that are copied to experts, and added up again
    passes = 4 if p.recomputes else 3  # backward moves twice as many as forward
    passes += work.references
    has_kernel = D % 8 == c.ffn_dim % 8 == 0  # see GroupedLinear in experts.py
    one_graph = has_kernel and p.fixes_shapes(work.on_gpu)  # experts, too, are compiled
    # As stays_uncompiled in recompute.py decides.
    is_compiled = p.compile and (one_graph or not several or not p.recomputes)
    factor = 1.0 if is_compiled else EAGER_FACTOR
    return passes * p.weight_bytes * elements * factor


# ------------------------------------------------------------------------------ the time of a step


def backwards(work: Work) -> int:
    """Return how many times the products of forward backward has: 2, or 1 beside a frozen base."""
    return 2 if work.model.tok_embeddings.weight.requires_grad else 1


def compute_time(work: Work, machine: Machine, pp_rank: int = 0) -> dict[str, float]:
    """Return the seconds of forward and backward of a microbatch on rank `pp_rank` along pp, by
    part, without communication."""
    c = work.model.config
    p = work.parallel
    stages = p.pp * p.stages_per_rank
    own = range(pp_rank, stages, p.pp)
    L = sum(len(layers_of(stage, stages, c.n_layers)) for stage in own)
    V = c.vocab_size if pp_rank == p.pp - 1 else 0
    w = p.weight_bytes
    gain = math.prod(technique.gain for technique in used_techniques(p))
    rate = machine.peak * machine.matmul_fraction
    by_flash = work.document or p.cp > 1
    fraction = machine.flash_fraction if by_flash else machine.attention_fraction
    attention_rate = machine.peak * fraction

    forward = forward_flops(work)
    output = 2 * c.dim * V
    runs = 1 + backwards(work) + work.references
    products = runs * (L * forward.products / gain + output) / rate
    attention_runs = 1 + ATTENTION_BACKWARD + work.references
    products += attention_runs * L * forward.attention / attention_rate
    again = recomputed_flops(work)
    recompute = L * (again.products / gain / rate + again.attention / attention_rate)
    recompute += work.references * output / rate  # the loss of pairs computes its logits again
    # Softmax, exponential and gradient of the loss: each reads and writes V, in float32 but for two
    # of them; compiled, three reads and a write.
    of_logit = 4 * w if p.compiles_loss(work.on_gpu) else 2 * w + 16
    moved = L * moved_bytes(work) + of_logit * V
    tokens = work.tokens / p.tp  # tp ranks divide the work of each token evenly
    return {
        "products": tokens * products,
        "recompute": tokens * recompute,
        "passes": tokens * moved / machine.bandwidth,
    }


def step_time(work: Work, machine: Machine) -> dict[str, float]:
    """Return the seconds of a training step by part, as listed at the top of this file."""
    p = work.parallel
    m = work.microbatches
    rate = machine.peak * machine.matmul_fraction
    # No rank has more blocks than the first, and the last has the logits: one of them is busiest.
    of_ranks = {rank: compute_time(work, machine, rank) for rank in (0, p.pp - 1)}
    busiest = max(of_ranks, key=lambda rank: sum(of_ranks[rank].values()))
    parts = {name: m * seconds for name, seconds in of_ranks[busiest].items()}

    traffic = sends(work, busiest)
    parts["passes"] += 2 * copied_bytes(traffic) / machine.bandwidth
    parts["weights"] = bytes_over_weights(work, busiest) / machine.bandwidth
    # The norm reads gradients, clipping reads and writes them; the optimizer reads them, and reads
    # and writes as many weights, and its state.
    state = holds(work, busiest)
    updated = 6 * state["gradients"] + 2 * state["optimizer"]
    parts["optimizer"] = updated / machine.bandwidth
    if p.optimizer == "muon":
        part = part_of(work.model, busiest, p.pp, p.stages_per_rank)
        parts["optimizer"] += flops_of_muon(part, p) / rate

    forward = (parts["products"] + parts["passes"]) / (1 + backwards(work))
    backward = backwards(work) * forward + parts["recompute"] + parts["weights"]
    parts["cpu"] = 0.0
    if p.offload_activations:
        L = work.model.config.n_layers  # all of them: there is no pipeline beside offloading
        seconds = saved(work).kept * work.tokens * p.weight_bytes * L * m / CPU_LINK
        parts["cpu"] = max(0.0, seconds - forward) + max(0.0, seconds - backward)

    hidden_by = {  # seconds of computation beside which messages over a dimension can travel
        "tp": parts["products"] / 2,
        "shard": forward + backward,
        "replicate": backward / m,
    }
    hideable = dict.fromkeys(hidden_by, 0.0)
    parts |= dict.fromkeys((*hidden_by, *OWN_GROUPS), 0.0)
    for (dim, collective), (calls, nbytes) in traffic.items():
        seconds = collective_time(collective, nbytes / calls, dim, p, machine)
        part = PART_OF.get(dim, dim)
        if is_of_muon(dim, collective):
            parts["optimizer"] += calls * seconds
        elif dim != "pp":
            parts[part] += calls * seconds
        if part in hideable:
            hideable[part] += hideable_calls(dim, collective, calls) * seconds
    if machine.overlaps:
        for dim, seconds in hidden_by.items():
            parts[dim] -= min(hideable[dim], seconds)
    if p.pp > 1:
        waits = parts["tp"] + sum(parts[dim] for dim in OWN_GROUPS)
        parts["pp"] = bubble_time(work, forward + backward, waits, traffic, machine)
    return parts


def bytes_over_weights(work: Work, pp_rank: int) -> float:
    """Return the bytes that microbatches read and write to round weights for the products, and
    their gradients back, and to add gradients up."""
    p = work.parallel
    m = work.microbatches
    wide = p.grad_bytes
    part = part_of(work.model, pp_rank, p.pp, p.stages_per_rank)
    trained = sum(unit.copies * unit.trained for unit in units(part, p, 1))
    roundings = m * (1 + p.recomputes) / p.shard  # FSDP rounds shards
    sums = 0
    if p.shard == 1 or (m > 1 and p.reshard != "all"):  # else FSDP's copies round gradients
        roundings += m
        sums = m - 1
    narrows = p.weight_bytes < wide
    return trained * (roundings * narrows * (wide + p.weight_bytes) + sums * 3 * wide)


def copied_bytes(traffic: Traffic) -> float:
    """Return the payload that is copied between tensors and buffers: FSDP's; and keys and values,
    which are put in order."""
    copied = 0
    for (dim, collective), (_, nbytes) in traffic.items():
        if PART_OF.get(dim) in ("shard", "cp") and collective != "all-to-all":
            copied += nbytes
    return copied


def hideable_calls(dim: str, collective: str, calls: float) -> float:
    """Return how many calls of a collective over a mesh dimension computation can hide."""
    if is_of_muon(dim, collective):
        return 0
    if dim == "tp":  # the messages of --async-tp
        return calls if collective == "send" else 0
    if PART_OF[dim] == "shard":
        return max(0, calls - 2)
    if collective == "all-gather":  # ZeRO-1's, of updated weights
        return 0
    return max(0, calls - 1)


def bubble_time(work: Work, busy: float, waits: float, traffic: Traffic, machine: Machine) -> float:
    """Return the seconds that a rank of a pipeline waits for other stages, where it computes for
    `busy` seconds and `waits` for tp and cp: by the schedule, if all stages took as long as its
    own, and for messages. A link may have more to do than any rank."""
    p = work.parallel
    m = work.microbatches
    idle = idle_forwards(p.schedule, p.pp, m, p.stages_per_rank, backwards(work))
    forwards = m * p.stages_per_rank * (1 + backwards(work))  # as long as a rank computes
    idle *= (busy + waits) / forwards
    calls, nbytes = traffic.get(("pp", "send"), (1, 0))
    message = collective_time("send", nbytes / calls, "pp", p, machine)
    by_schedule = idle + 2 * (p.pp - 1) * message
    by_link = calls * message - busy - waits
    return max(by_schedule, by_link)


@functools.lru_cache(1024)
def idle_forwards(name: str, p: int, m: int, v: int, backwards: int) -> float:
    """Return for how many forwards of a stage a rank waits, if a backward takes `backwards` as
    long."""
    seconds = {"F": 1, "B": backwards}
    m = enough(name, p, m)  # of more, no rank waits longer
    schedule = make_schedule(name, p, m, v)
    spans = simulate(schedule, lambda action: seconds[action.kind])
    end = max(rank_spans[-1].end for rank_spans in spans)
    return end - m * v * (1 + backwards)


# --------------------------------------------------------------------------------------- the links


def collective_time(
    collective: str, nbytes: float, dim: str, parallel: ParallelConfig, machine: Machine
) -> float:
    """Return the seconds of one collective with a payload of `nbytes` over a mesh dimension: a
    latency, and then its bytes over each link.

    In a ring of n ranks each rank sends (n - 1)/n of the payload to the next, in an all-reduce
    twice; in an all-to-all an equal part of the payload to each of the others. Where several ranks
    of a group share a node, they divide what goes to the next node among their links. labs/ring
    writes a ring."""
    n, in_node = group_shape(dim, parallel, machine.per_node)
    nodes = n / in_node
    if collective == "send":  # to one other rank, which may be in another node
        link = machine.node_link if nodes == 1 else machine.link
        return LATENCY + nbytes / link
    if collective == "all-to-all":
        if not is_of_muon(dim, collective):  # of Muon's, only what leaves counts
            nbytes *= (n - 1) / n
        to_node = (in_node - 1) / (n - 1) * nbytes
        across = (n - in_node) / (n - 1) * nbytes
        return LATENCY + max(to_node / machine.node_link, across / machine.link)
    speed = machine.node_link
    hops = (n - nodes) * HOP_IN_NODE  # in seconds
    if nodes > 1:
        across = in_node * machine.link
        speed = min(across, machine.node_link) if in_node > 1 else across
        hops += nodes * HOP_ACROSS
    rounds = 2 if collective == "all-reduce" else 1
    return LATENCY + rounds * (hops + (n - 1) / n * nbytes / speed)


def group_shape(dim: str, parallel: ParallelConfig, per_node: int) -> tuple[int, int]:
    """Return how many ranks a group along a mesh dimension has, and how many of them in a node."""
    n = parallel.group_size(dim)
    stride = parallel.stride(dim)
    return n, max(1, math.gcd(n * stride, per_node) // stride)
