"""Estimate the time of a step from a roofline model, for `bench.py plan`.

The estimate is a sum of parts:

    products     matrix products: FLOPs / (peak x the share of it that products reach). Attention is
                 causal, so half of its square counts, and it reaches another share
    recompute    the same for what backward recomputes under activation checkpointing
    passes       memory-bound operations: bytes that norms, RoPE, SwiGLU, residual sums, the loss,
                 FSDP's copies and, in eager blocks, rounding to 8 bits read and write,
                 recomputation included / memory bandwidth
    handling     overhead of FSDP's own code, where `bench.py comm` has measured it
    optimizer    bytes that clipping and AdamW read and write / memory bandwidth; with Muon also the
                 products that orthogonalize, and what ranks send each other for them
    to the CPU   time by which copies of offloaded activations to the CPU's memory take longer than
                 forward, and copies back longer than backward
    tp, cp, shard, replicate
                 for each of these dimensions, the exposed time of its collectives: the time that is
                 not hidden behind computation
    pp           the time that a rank of a pipeline waits for other stages: the schedule is
                 simulated with the time of each action and message. Parts are the busiest rank's

A collective takes a latency, and then its bytes over each link at the speed of the link. Hidden is:

    shard        as much as computation takes. While a block computes, FSDP all-gathers the weights
                 of the next block and reduce-scatters the gradients of the one before. The first
                 and the last all-gather are exposed, and the first and the last reduce-scatter
    replicate    as much as the last microbatch's backward takes, beside which the gradients are
                 all-reduced or reduce-scattered. The last call is exposed; so is ZeRO-1's
                 all-gather of updated weights, which comes after the optimizer
    tp, cp       nothing: the next operation always needs the result. With --async-tp, a message as
                 much as the product beside it takes: a rank's share of wq, wo, w1 or w2

gloo hides nothing at all. What products, attention and links reach is fitted to published steps
(REACHED in machines.py); the constants below are assumptions that such steps do not tell apart. A
file written by `bench.py comm --model NAME --out FILE` replaces rates and links by measurements.

Times are in seconds, rates per second. Letters: D model width, F feed-forward width, V vocabulary,
L layers; w bytes of a weight in computation.
"""

import functools
import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from config import ParallelConfig, Work
from costs.machines import Machine
from costs.memory import of_adapters, saved_elements, trainable_elements
from costs.traffic import (
    first_block,
    group_size,
    parts_of,
    predict_outer_traffic,
    predict_traffic,
)
from lora import LoRA, adapter_settings
from model import Llama, LlamaConfig
from parallel import used_techniques
from plumbing.processes import UserError
from techniques import optimizers
from techniques.optimizers import flops_of_muon
from techniques.pipeline import layers_of
from techniques.schedules import has_w, make_schedule, simulate

EAGER_FACTOR = 2.0  # memory traffic of eager blocks / memory traffic of compiled blocks
COLLECTIVE_LATENCY = 10e-6  # seconds to start a collective
HOP_IN_NODE, HOP_ACROSS = 1e-6, 5e-6  # seconds from a rank to the next: in its node, in another
CPU_LINK = 50e9  # bytes/s between a GPU and the CPU's memory, of the 64e9 of PCIe 5 with 16 lanes


def update_bytes(moment: int) -> int:
    """Return the bytes per parameter of an update with moments of `moment` bytes: the norm reads 4;
    clipping reads 4, writes 4; AdamW reads weight, gradient and moments, writes weight and moments.
    """
    return 4 + 8 + 12 + 4 * moment


# ------------------------------------------------------------------------------------- the machine


def read_measurement(file: Path) -> dict:
    """Return the report that `bench.py comm --model NAME --out FILE` wrote.

    Raises UserError where the file is no such report."""
    try:
        report = json.loads(file.read_text())
        if report["compute"]:
            measured_machine(report)  # fails where something is missing
            return report
        problem = "it was written without --model"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        problem = repr(error)
    raise UserError(f"{file} is no result of bench.py comm --model NAME --out FILE: {problem}")


def measured_machine(report: dict) -> Machine:
    """Return the machine that `bench.py comm` measured.

    Two times give two rates. The optimizer's update is memory-bound: its time gives the memory
    bandwidth, and with that the time of `passes`. What forward and backward take beyond `passes` is
    the time of the matrix products, and gives their rate."""
    computed = report["compute"]
    config = LlamaConfig(**computed["config"])
    parallel = ParallelConfig(dtype=getattr(torch, computed["dtype"]))
    moment = getattr(torch, computed.get("moments", "float32")).itemsize
    with torch.device("meta"):
        parameters = sum(p.numel() for p in Llama(config).parameters())
    machine = Machine(
        report["device"],
        peak=1.0,
        memory=report["memory"],
        bandwidth=update_bytes(moment) * parameters / computed["update"],
        node_link=math.inf,
        per_node=report["per_node"],
        matmul_fraction=1.0,
        attention_fraction=1.0,
        overlaps=report["backend"] == "nccl",
        fsdp_overhead=max(0.0, computed["forward_backward_in_fsdp"] - computed["forward_backward"]),
        measured=report["groups"],
    )
    tokens, seq_len = computed["tokens"], computed["seq_len"]
    parts = compute_time(config, parallel, tokens, seq_len, machine)
    flops, passes = parts["products"], parts["passes"]  # at 1 FLOP/s, products take FLOPs seconds
    # In a noisy measurement the passes may leave no time for products: keep the rate positive.
    products = max(computed["forward_backward"] - passes, 0.1 * passes)
    return replace(machine, peak=flops / products)


# ------------------------------------------------------------------------------ the time of a step


def compute_time(
    config: LlamaConfig,
    parallel: ParallelConfig,
    tokens: int,
    seq_len: int,
    machine: Machine,
    stage: int | None = None,
    lora: LoRA | None = None,
    in_4_bits: bool = False,
) -> dict[str, float]:
    """Return seconds of forward and backward of a microbatch of `tokens` on one rank, by part,
    without communication: of the whole model, or of a `stage` of a pipeline; with adapters beside a
    frozen base, which may be `in_4_bits`."""
    D, F, V = config.dim, config.ffn_dim, config.vocab_size
    L, w = config.n_layers, parallel.weight_bytes
    stages = parallel.pp * parallel.stages_per_rank
    if stage is not None:
        L = len(layers_of(stage, stages, L))
    has_output = stage in (None, stages - 1)
    q_dim, kv_dim = config.q_dim, config.kv_dim
    checkpointing = parallel.checkpointing

    # Forward FLOPs per token: 2 per element of a matrix.
    block = 2 * (2 * D * (q_dim + kv_dim) + 3 * D * F)
    attention = 2 * seq_len * q_dim  # scores and weighted sums, over half of the square
    output = 2 * D * V * has_output
    selective = 2 * D * (q_dim + kv_dim + F)  # wq, wv and w1: recompute.py saves the others
    block_again = {"none": 0, "selective": selective, "full": block}[checkpointing]
    attention_again = attention if checkpointing == "full" else 0

    # Bytes per token read and written. Elements: norms 4 D, residual sums 6 D, RoPE, and norms of q
    # and k if there are any, 2 (q_dim + kv_dim) each, SwiGLU 3 F. Backward moves twice as many.
    elements = 10 * D + 2 * (1 + config.qk_norm) * (q_dim + kv_dim) + 3 * F
    forward = w * elements * (1.0 if parallel.compile else EAGER_FACTOR)
    # Softmax, exponential and cast to the gradient: each reads and writes V, in float32 but for the
    # logits and the gradient.
    loss = (2 * w + 16) * V * has_output
    passes = L * forward * (3 if checkpointing == "none" else 4) + loss

    matmul_rate = machine.peak * machine.matmul_fraction
    attention_rate = machine.peak * machine.attention_fraction
    # Backward takes twice the FLOPs of forward, and as many where weights are frozen. Attention's
    # also recomputes the scores: 2.5 times.
    block_rate = matmul_rate * gain(parallel)
    products = (2 if lora else 3) * (L * block / block_rate + output / matmul_rate)
    products += 3.5 * L * attention / attention_rate
    recompute = L * (block_again / block_rate + attention_again / attention_rate)
    tokens_of_rank = tokens / parallel.tp  # tp ranks divide the work of each token evenly
    weights = L * block / 2 / parallel.tp  # of the blocks on this rank
    bytes_of_weights = 0.0
    forwards = 1 if checkpointing == "none" else 2
    if in_4_bits:  # read, and written as numbers for a product that reads them, by each pass
        bytes_of_weights += weights * (0.52 + w) * (forwards + 1)
    if lora and lora.dora:  # W, B A, their sum and its squares, for norms in float32
        bytes_of_weights += weights * ((0.52 if in_4_bits else w) + 16) * forwards
    if lora:  # counted as if all seven matrices were targets
        widths = 7 * D + 2 * (q_dim + kv_dim) + 3 * F  # of their inputs and outputs
        products += 6 * L * widths * lora.rank / matmul_rate
        passes += L * widths * w * 2.5 * (lora.dora + (lora.dropout > 0))  # of outputs, of inputs
    return {
        "products": tokens_of_rank * products,
        "recompute": tokens_of_rank * recompute,
        "passes": (tokens_of_rank * passes + bytes_of_weights) / machine.bandwidth,
    }


def gain(parallel: ParallelConfig) -> float:
    """Return how many times as fast the blocks' products are by the techniques that are used."""
    return math.prod(technique.gain for technique in used_techniques(parallel))


def step_time(work: Work, machine: Machine) -> dict[str, float]:
    """Return seconds of a training step by part, as listed at the top of this file."""
    model, parallel = work.model, work.parallel
    tokens, microbatches = work.tokens, work.microbatches
    block = first_block(model)
    lora = adapter_settings(block)
    in_4_bits = any(not parameter.is_floating_point() for parameter in block.parameters())
    documents = work.document or work.seq_len
    if machine.flash_fraction and (work.document or parallel.cp > 1):
        machine = replace(machine, attention_fraction=machine.flash_fraction)
    of_stages = [
        compute_time(model.config, parallel, tokens, documents, machine, stage, lora, in_4_bits)
        for stage in (range(parallel.pp * parallel.stages_per_rank) if parallel.pp > 1 else [None])
    ]
    of_ranks = [of_stages[rank :: parallel.pp] for rank in range(parallel.pp)]
    busiest = max(range(parallel.pp), key=lambda r: sum(sum(s.values()) for s in of_ranks[r]))
    parts = {name: microbatches * sum(stage[name] for stage in of_ranks[busiest])
             for name in of_stages[0]}  # fmt: skip
    rate = machine.peak * machine.matmul_fraction
    of_rank = parts_of(model, parallel)[busiest]
    updated = trainable_elements(of_rank, parallel, "gradients")
    parts["optimizer"] = update_bytes(parallel.moment_bytes) * updated / machine.bandwidth
    if parallel.optimizer == "muon":
        parts["optimizer"] += flops_of_muon(of_rank, parallel) / rate
        for dim, collective, calls, nbytes in optimizers.TECHNIQUE.sends(of_rank, work):
            if calls and nbytes:
                parts["optimizer"] += collective_time(collective, nbytes, dim, parallel, machine)
    parts["handling"] = machine.fsdp_overhead * microbatches * parallel.strategy.uses_fsdp
    by_adamw = replace(work, parallel=replace(parallel, optimizer="adamw"))
    traffic = predict_traffic(by_adamw, busiest)
    # FSDP copies each payload between parameters and buffers; keys and values are put in order.
    copied = sum(nbytes for (dim, _), (_, nbytes) in traffic.items() if dim in ("shard", "cp"))
    parts["passes"] += 2 * copied / machine.bandwidth

    of_backward = 1 if lora else 2  # times forward, of products and passes: beside a frozen base, 1
    forward = (parts["products"] + parts["passes"]) / (1 + of_backward)
    backward = parts["products"] + parts["passes"] - forward + parts["recompute"]
    saved, _ = saved_elements(model.config, parallel)
    saved += of_adapters(model, parallel, fused=True)[0] * (parallel.checkpointing == "none")
    moved = saved * tokens * parallel.weight_bytes * model.config.n_layers * microbatches / CPU_LINK
    parts["to the CPU"] = max(0.0, moved - forward) + max(0.0, moved - backward)
    parts["to the CPU"] *= parallel.offload_activations
    computation = {  # seconds behind which collectives over a dimension can hide
        "tp": microbatches * beside_messages(model.config, parallel, tokens, machine),
        "cp": 0.0,
        "shard": parts["products"] + parts["recompute"] + parts["passes"],
        "replicate": backward / microbatches,
    }
    exposed_calls = {"tp": 0, "cp": 0, "shard": 2, "replicate": 1}  # of each kind of collective
    total, hideable = dict.fromkeys(computation, 0.0), dict.fromkeys(computation, 0.0)
    for (dim, collective), (calls, nbytes) in traffic.items():
        if dim == "pp":
            continue
        seconds = collective_time(collective, nbytes / calls, dim, parallel, machine)
        total[dim] += calls * seconds
        follows_update = (dim, collective) == ("replicate", "all-gather")  # ZeRO-1's
        if not follows_update and (dim != "tp" or collective == "send"):
            hideable[dim] += max(0, calls - exposed_calls[dim]) * seconds
    for (dim, collective), (calls, nbytes) in predict_outer_traffic(work).items():
        seconds = collective_time(collective, nbytes / calls, dim, parallel, machine)
        total[dim] += calls * seconds / parallel.every
    for dim in total:
        hidden = min(hideable[dim], computation[dim]) if machine.overlaps else 0.0
        parts[dim] = total[dim] - hidden
    waits = parts["tp"] + parts["cp"]  # of forward and backward
    if parallel.pp > 1:
        messages = traffic.get(("pp", "send"), (0, 0))
        parts["pp"] = bubble_time(
            of_stages, of_backward, waits, messages, parallel, microbatches, machine
        )
    return parts


def beside_messages(
    config: LlamaConfig, parallel: ParallelConfig, tokens: int, machine: Machine
) -> float:
    """Return the seconds of those products of a microbatch beside which asynchronous tensor
    parallelism has a message under way: of wq, wo, w1 and w2, with all but one of the n chunks."""
    if not parallel.async_tp:
        return 0.0
    n, layers = parallel.tp, config.n_layers // parallel.pp
    flops = 3 * 2 * (2 * config.dim**2 + 2 * config.dim * config.ffn_dim) * layers
    rate = machine.peak * machine.matmul_fraction * gain(parallel)
    return (n - 1) / n * flops * tokens / n / rate


def bubble_time(
    of_stages: list[dict[str, float]],
    of_backward: int,
    waits: float,
    messages: tuple[int, float],
    parallel: ParallelConfig,
    microbatches: int,
    machine: Machine,
) -> float:
    """Return seconds that the busiest rank of a pipeline waits for other stages. `of_stages` are
    what compute_time returned for each, and backward takes `of_backward` times as long as forward;
    a rank `waits` so many seconds for tp and cp in a step, and sends `messages`, (calls, bytes)."""
    p, v = parallel.pp, parallel.stages_per_rank
    # A frozen matrix has no gradient, which W would compute.
    splits, seconds = has_w(parallel.schedule) and of_backward == 2, {}
    waits /= 3 * microbatches * v  # of a forward; a backward waits twice as long
    for stage, parts in enumerate(of_stages):
        forward = (parts["products"] + parts["passes"]) / (1 + of_backward)
        weights = splits * parts["products"] / 3
        seconds["F", stage] = forward + waits
        backward = of_backward * forward + 2 * waits + parts["recompute"]
        seconds["B", stage] = backward - weights
        seconds["W", stage] = weights
    calls, nbytes = messages
    message = collective_time("send", nbytes / calls, "pp", parallel, machine)

    def end_and_work(m: int) -> np.ndarray:
        schedule = parallel.schedule, p, m, v
        return np.array(_end_and_work(schedule, tuple(seconds.items()), message))

    few, more = p, 2 * p  # of more microbatches each takes as long as the last p on average
    end, work = end_and_work(min(microbatches, more))
    if microbatches > more:
        each = (np.array([end, work]) - end_and_work(few)) / p
        end, work = (end, work) + each * (microbatches - more)
    return max(end, calls * message) - work  # a link may have more to do than any rank


@functools.lru_cache(1024)  # plans that differ in how they shard wait equally long
def _end_and_work(schedule: tuple, items: tuple, message: float) -> tuple[float, float]:
    """Return when a pipeline is done, and for how long its busiest rank computes. `schedule` is
    what make_schedule takes, `items` are ((kind, stage), seconds of such an action)."""
    seconds = dict(items)
    spans = simulate(make_schedule(*schedule), lambda action: seconds[action[::2]], message)
    work = (sum(span.end - span.start for span in of_rank) for of_rank in spans)
    return max(of_rank[-1].end for of_rank in spans), max(work)


def collective_time(
    collective: str, nbytes: float, dim: str, parallel: ParallelConfig, machine: Machine
) -> float:
    """Return seconds of one collective with a payload of `nbytes` over a mesh dimension.

    In a ring of n ranks each rank sends (n - 1)/n of the payload to the next, in an all-reduce
    twice; in an all-to-all an equal part of the payload to each of the others. Where several ranks
    of a group share a node, they divide what goes to the next node among their links. labs/ring
    writes a ring. Raises KeyError on a measured machine without a group of this shape."""
    n, in_node = group_shape(dim, parallel, machine)
    if machine.measured:
        group = machine.measured[find_measured_group(n, in_node, machine)]
        if collective in ("send", "all-to-all"):  # as an all-gather in which a rank sends as much
            return interpolate(group["times"]["all-gather"], nbytes * n / (n - 1))
        return interpolate(group["times"][collective], nbytes)
    nodes = n / in_node
    speed = machine.node_link if nodes == 1 else in_node * machine.link
    if in_node > 1:
        speed = min(speed, machine.node_link)
    if collective == "send":  # to one other rank, which may be in another node
        return COLLECTIVE_LATENCY + nbytes / (machine.node_link if nodes == 1 else machine.link)
    if collective == "all-to-all":
        to_node, across = ((part / (n - 1)) * nbytes for part in (in_node - 1, n - in_node))
        return COLLECTIVE_LATENCY + max(to_node / machine.node_link, across / machine.link)
    rounds = 2 if collective == "all-reduce" else 1
    hops = (n - nodes) * HOP_IN_NODE + (nodes if nodes > 1 else 0) * HOP_ACROSS  # seconds
    return COLLECTIVE_LATENCY + rounds * (hops + (n - 1) / n * nbytes / speed)


def group_shape(dim: str, parallel: ParallelConfig, machine: Machine) -> tuple[int, int]:
    """Return how many ranks a group along a mesh dimension has, and how many of them in a node."""
    n = group_size(dim, parallel)
    # The ranks of a group are `stride` apart, as ranks are in row-major order of the mesh.
    stride = parallel.size // parallel.pp if dim == "pp" else 1
    if dim in ("shard", "replicate", "cp"):
        stride = parallel.tp * (parallel.shard if dim == "replicate" else 1)
    return n, max(1, math.gcd(n * stride, machine.per_node) // stride)


def find_measured_group(n: int, in_node: int, machine: Machine) -> str | None:
    """Return the name of the measured group with n ranks, of which `in_node` share a node; None if
    there is none. bench.py comm measures the world, a node, and one rank of each node (across)."""
    for name, group in machine.measured.items():
        # A group of as many ranks as the world is the world.
        measured_in_node = {"world": in_node, "node": n, "across": 1}[name]
        if (group["ranks"], measured_in_node) == (n, in_node):
            return name
    return None


def interpolate(points: list[tuple[int, float]], nbytes: float) -> float:
    """Return seconds for a payload, given measured points (bytes, seconds) in ascending order.

    Linear between points. A payload smaller than the first point takes as long as that, its
    latency; one larger than the last is transferred at the last point's bytes per second."""
    sizes, seconds = zip(*points)
    return float(np.interp(nbytes, sizes, seconds)) * max(1.0, nbytes / sizes[-1])
