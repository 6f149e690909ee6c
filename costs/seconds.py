"""Estimate the seconds of a step: a roofline for each part, and what is not hidden of messages.

    products   matrix products: FLOPs / (peak x the share of it that products reach). Attention is
               causal, so half of its square counts, and it reaches another share
    recompute  the same for what backward recomputes under activation checkpointing
    passes     what norms, RoPE, SwiGLU, residual sums, the loss and FSDP's copies read and write,
               recomputation included: bytes / memory bandwidth
    handling   overhead of FSDP's own code, where `bench.py comm` has measured it
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

from config import OWN_GROUPS, PART_OF, ParallelConfig, Work
from costs.machines import Machine
from costs.page import Traffic, holds, saved, sends
from parallel import used_techniques
from techniques.muon import flops_of_muon
from techniques.pipeline import layers_of, part_of
from techniques.schedules import STEADY, make_schedule, simulate

EAGER_FACTOR = 2.0  # memory traffic of eager blocks / memory traffic of compiled blocks
HOP_IN_NODE, HOP_ACROSS = 1e-6, 5e-6  # seconds from a rank to the next: in its node, in another
CPU_LINK = 50e9  # bytes/s between a GPU and the CPU's memory, of the 64e9 of PCIe 5 with 16 lanes

# ------------------------------------------------------------------------------ the time of a step


def backwards(work: Work) -> int:
    """Return how many times the products of forward backward has: 2, or 1 beside a frozen base."""
    return 2 if work.model.tok_embeddings.weight.requires_grad else 1


def compute_time(work: Work, machine: Machine, stage: int = 0) -> dict[str, float]:
    """Return the seconds of forward and backward of a microbatch on one rank, by part, without
    communication: of a `stage` of a pipeline, which is the whole model where there is none."""
    c, p = work.model.config, work.parallel
    D, F, V, Q, KV = c.dim, c.ffn_dim * c.ffn_uses, c.vocab_size, c.q_dim, c.kv_dim
    w, several = p.weight_bytes, c.ffn_uses > 1  # feed-forwards of a token
    stages, gain = p.pp * p.stages_per_rank, math.prod(t.gain for t in used_techniques(p))
    L = len(layers_of(stage, stages, c.n_layers))
    V = V if stage == stages - 1 else 0

    # FLOPs of forward per token: 2 per element of a matrix; scores and weighted sums over half of
    # the square. Selective checkpointing repeats wq, wv and w1, full all; but compiled, neither w2
    # nor attention (uncompiled, w2 is not repeated either, which is left out here). Several
    # feed-forwards are repeated whole.
    block, output = 2 * (2 * D * (Q + KV) + 3 * D * F), 2 * D * V
    attention = 2 * (work.document or work.seq_len) * Q
    full = (block, attention) if p.repeats_attention else (block - 2 * D * F, 0)
    of_several = 2 * D * 3 * F * several
    selective = 2 * D * (Q + KV) + (of_several or 2 * D * F)
    again = {"products": (of_several, 0), "selective": (selective, 0), "full": full}
    block_again, attention_again = again.get(p.checkpointing, (0, 0))
    # Bytes per token. Elements: norms 4 D, residual sums 6 D, RoPE, and norms of q and k if there
    # are any, 2 (Q + KV) each, SwiGLU 3 F; rows that are copied to experts and added up again, 8 D
    # for each. Backward moves twice as many. Softmax, exponential and gradient of the loss: each
    # reads and writes V, in float32 but for two of them; compiled, three reads and a write of V.
    elements = 10 * D + (4 if c.qk_norm else 2) * (Q + KV) + 3 * F + 8 * D * c.ffn_uses * several
    passes = (3 if p.checkpointing == "none" else 4) + work.references
    is_whole = not several or p.checkpointing == "none" or p.fixes_shapes(work.on_gpu)
    is_compiled = p.compile and is_whole  # see stays_uncompiled in recompute.py
    moved = L * passes * w * elements * (1.0 if is_compiled else EAGER_FACTOR)
    moved += (4 * w if p.compiles_loss(work.on_gpu) else 2 * w + 16) * V

    rate = machine.peak * machine.matmul_fraction
    by_flash = work.document or p.cp > 1
    attention_rate = machine.peak * (
        machine.flash_fraction if by_flash else machine.attention_fraction
    )
    # Backward of attention recomputes the scores: it takes 2.5 times the FLOPs of forward.
    products = (1 + backwards(work) + work.references) * (L * block / gain + output) / rate
    products += (3.5 + work.references) * L * attention / attention_rate
    recompute = L * (block_again / gain / rate + attention_again / attention_rate)
    recompute += work.references * output / rate  # the loss of pairs computes its logits again
    tokens = work.tokens / p.tp  # tp ranks divide the work of each token evenly
    return {
        "products": tokens * products,
        "recompute": tokens * recompute,
        "passes": tokens * moved / machine.bandwidth,
    }


def step_time(work: Work, machine: Machine) -> dict[str, float]:
    """Return the seconds of a training step by part, as listed at the top of this file."""
    p, m, L = work.parallel, work.microbatches, work.model.config.n_layers
    of_stages = [compute_time(work, machine, i) for i in range(p.pp * p.stages_per_rank)]
    of_ranks = [of_stages[rank :: p.pp] for rank in range(p.pp)]
    busiest = max(range(p.pp), key=lambda r: sum(sum(s.values()) for s in of_ranks[r]))
    parts = {name: m * sum(s[name] for s in of_ranks[busiest]) for name in of_stages[0]}
    parts["handling"] = machine.fsdp_overhead * m if p.strategy.uses_fsdp else 0.0
    traffic, state = sends(work, busiest), holds(work, busiest)
    # FSDP copies each payload between parameters and buffers; keys and values are put in order.
    messages = {key: nbytes for key, (_, nbytes) in traffic.items() if key[1] != "all-to-all"}
    copied = sum(n for (dim, _), n in messages.items() if PART_OF.get(dim) in ("shard", "cp"))
    parts["passes"] += 2 * copied / machine.bandwidth
    parts["optimizer"] = updated_bytes(state) / machine.bandwidth
    if p.optimizer == "muon":
        flops = flops_of_muon(part_of(work.model, busiest, p.pp, p.stages_per_rank), p)
        parts["optimizer"] += flops / (machine.peak * machine.matmul_fraction)

    forward = (parts["products"] + parts["passes"]) / (1 + backwards(work))
    backward = backwards(work) * forward + parts["recompute"]
    copies = saved(work)[0] * work.tokens * p.weight_bytes * L * m / CPU_LINK
    waits = max(0.0, copies - forward) + max(0.0, copies - backward)
    parts["cpu"] = waits if p.offload_activations else 0.0
    hides = {  # seconds behind which the collectives of a dimension can hide
        "tp": parts["products"] / 2,  # messages of --async-tp alone
        "shard": forward + backward,
        "replicate": backward / m,
    }
    exposed_calls = {"tp": 0, "shard": 2, "replicate": 1}  # of each kind of collective
    parts |= dict.fromkeys((*hides, *OWN_GROUPS), 0.0)
    hideable = dict.fromkeys(hides, 0.0)
    for (dim, collective), (calls, nbytes) in traffic.items():
        seconds = collective_time(collective, nbytes / calls, dim, p, machine)
        part = PART_OF.get(dim, dim)
        if collective == "all-to-all" and dim not in OWN_GROUPS:  # Muon's
            parts["optimizer"] += calls * seconds
        elif dim != "pp":
            parts[part] += calls * seconds
            follows_update = (dim, collective) == ("replicate", "all-gather")  # ZeRO-1's
            hides_at_all = part in hides and (dim != "tp" or collective == "send")
            if hides_at_all and not follows_update:
                hideable[part] += max(0, calls - exposed_calls[part]) * seconds
    for dim in hides if machine.overlaps else ():
        parts[dim] -= min(hideable[dim], hides[dim])
    if p.pp > 1:
        waits = parts["tp"] + sum(parts[dim] for dim in OWN_GROUPS)
        parts["pp"] = bubble_time(work, forward + backward, waits, traffic, machine)
    return parts


def updated_bytes(state: dict[str, float]) -> float:
    """Return what an update reads and writes: the norm reads gradients, clipping reads and writes
    them; the optimizer reads them, and reads and writes as many weights, and its state."""
    return 6 * state["gradients"] + 2 * state["optimizer"]


def bubble_time(work: Work, busy: float, waits: float, traffic: Traffic, machine: Machine) -> float:
    """Return the seconds that a rank of a pipeline waits for other stages, where it computes for
    `busy` seconds and `waits` for tp and cp: by the schedule, if all stages took as long as its
    own, and for messages. A link may have more to do than any rank."""
    p, m = work.parallel, work.microbatches
    few = min(m, 2 * p.pp) if p.schedule in STEADY else m  # of more, no rank waits longer
    calls, nbytes = traffic.get(("pp", "send"), (1, 0))
    message = collective_time("send", nbytes / calls, "pp", p, machine)
    idle = idle_forwards(p.schedule, p.pp, few, p.stages_per_rank, backwards(work))
    idle *= (busy + waits) / (m * p.stages_per_rank * (1 + backwards(work)))
    return max(idle + 2 * (p.pp - 1) * message, calls * message - busy - waits)


@functools.lru_cache(1024)
def idle_forwards(name: str, p: int, m: int, v: int, backwards: int) -> float:
    """Return for how many forwards of a stage a rank waits, if a backward takes `backwards` as
    long."""
    seconds = {"F": 1, "B": backwards}
    spans = simulate(make_schedule(name, p, m, v), lambda action: seconds[action.kind])
    end = max(of_rank[-1].end for of_rank in spans)
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
    speed = machine.node_link if nodes == 1 else in_node * machine.link
    if in_node > 1:
        speed = min(speed, machine.node_link)
    if collective == "send":  # to one other rank, which may be in another node
        return machine.latency + nbytes / (machine.node_link if nodes == 1 else machine.link)
    if collective == "all-to-all":
        nbytes *= (n - 1) / n if dim in OWN_GROUPS else 1  # of Muon's, only what leaves counts
        to_node, across = ((part / (n - 1)) * nbytes for part in (in_node - 1, n - in_node))
        return machine.latency + max(to_node / machine.node_link, across / machine.link)
    rounds = 2 if collective == "all-reduce" else 1
    hops = (n - nodes) * HOP_IN_NODE + (nodes if nodes > 1 else 0) * HOP_ACROSS  # seconds
    return machine.latency + rounds * (hops + (n - 1) / n * nbytes / speed)


def group_shape(dim: str, parallel: ParallelConfig, per_node: int) -> tuple[int, int]:
    """Return how many ranks a group along a mesh dimension has, and how many of them in a node."""
    n, stride = parallel.group_size(dim), parallel.stride(dim)
    return n, max(1, math.gcd(n * stride, per_node) // stride)
