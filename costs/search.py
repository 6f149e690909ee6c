"""Which ways to split a model fit in memory: `--dp auto`, and what to change where none does."""

import itertools
import math
import os
from collections.abc import Callable
from dataclasses import replace

import torch

from config import STRATEGIES, ParallelConfig, Work, flags_of
from costs.page import holds
from parallel import World, refusal
from plumbing.messages import print_rank_zero
from plumbing.processes import Process, memory_of_others, processes_on_this_node

USABLE_FRACTION = 0.9  # of a device's memory, for tensors
CLOSE = 0.85  # of the room: a step that is predicted to need more of it is counted
# How activations are kept: the later, the less memory and the more time.
ACTIVATIONS = {
    "all saved": dict(checkpointing="none", offload_activations=False),
    "products": dict(checkpointing="products", offload_activations=False),
    "selective": dict(checkpointing="selective", offload_activations=False),
    "full": dict(checkpointing="full", offload_activations=False),
    "full, on CPU": dict(checkpointing="full", offload_activations=True),
}


def usable_memory(device: torch.device) -> int:
    """Return the bytes that this process may fill: of its GPU, or of its share of CPU memory."""
    if device.type == "cuda":
        return int(USABLE_FRACTION * torch.cuda.get_device_properties(device).total_memory)
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return int(USABLE_FRACTION * total / processes_on_this_node())


def with_mesh_sizes(
    parallel: ParallelConfig, size: int, per_node: int, shard: int | None = None
) -> ParallelConfig:
    """Return a configuration with the sizes of replicate and shard that its strategy and its tp
    give on `size` processes. `shard`: the value of --shard, if given."""
    data_ranks = size // (parallel.tp * parallel.pp)
    in_node = shard or data_ranks_in_node(data_ranks, parallel.tp, per_node)
    shard = STRATEGIES[parallel.dp].shard_size(data_ranks, in_node)
    return replace(parallel, replicate=data_ranks // shard, shard=shard)


def data_ranks_in_node(data_ranks: int, tp: int, per_node: int) -> int:
    """Return how many of the ranks with different sequences share a node; in every node as many."""
    return math.gcd(data_ranks, max(1, per_node // tp))


def divisors(n: int) -> list[int]:
    return [i for i in range(1, n + 1) if n % i == 0]


# ---------------------------------------------------------------------------- a run chooses its own


def choose_parallel(
    work: Work, shard: int | None, process: Process, room: int, count: Callable = lambda work: 1.0
) -> tuple[ParallelConfig, str]:
    """Return the configuration of a step with its mesh sizes, and the reason in words.

    `work.parallel` is what the flags ask for: `dp` and `reshard` may be "auto". `shard` is the
    value of --shard, if given; `room` the memory in bytes that every rank may fill.
    --dp auto takes the first strategy whose step fits in memory: DDP where a whole copy fits on a
    device; on several nodes HSDP where a copy fits in a node; FSDP over all ranks otherwise.
    Gradients of several microbatches accumulate unsharded if there is room. Where little of it is
    left to --dp auto, `count` returns the counted peak of a step / the predicted one."""
    asked = work.parallel

    def split(dp: str) -> Work:
        parallel = replace(asked, dp=dp)
        parallel = with_mesh_sizes(parallel, process.size, process.per_node, shard)
        return replace(work, parallel=parallel)

    def fits(choice: Work) -> bool:
        peak = holds(choice)["peak"]
        if asked.dp == "auto" and CLOSE * room < peak <= room:
            peak *= count(choice)
        return peak <= room

    strategies = [asked.dp]
    if asked.dp == "auto":
        strategies = [dp for dp, strategy in STRATEGIES.items() if strategy.automatic]
    choices = []
    for dp in strategies:
        choice = split(dp)
        parallel = choice.parallel
        is_other = dp == "hsdp" and 1 in (parallel.replicate, parallel.shard)
        if asked.dp == "auto" and is_other:  # it would be DDP or FSDP
            continue
        reshards = [asked.reshard]
        if asked.reshard == "auto":
            differ = parallel.shard > 1 and choice.microbatches > 1
            reshards = ["weights", "all"] if differ else ["weights"]
        choices += [replace(choice, parallel=replace(parallel, reshard=name)) for name in reshards]
    copy = holds(split("ddp"))
    state = copy["parameters"] + copy["gradients"] + copy["optimizer"]
    reason = (
        f"weights, gradients and optimizer state of a copy take {state / 1e9:.3g} GB, with "
        f"activations {copy['peak'] / 1e9:.3g} GB; a process may use {room / 1e9:.3g} GB, and a "
        f"node has {process.per_node} of {process.size} processes"
    )
    for choice in choices:
        if fits(choice):
            return choice.parallel, reason
    reason += "; nothing is predicted to fit: try --checkpointing full or less --microbatch"
    return choices[-1].parallel, reason


def what_would_fit(work: Work, process: Process) -> str:
    """Return a sentence that names flags with which a step that ran out of memory is predicted to
    fit. What costs less time is tried first: a smaller microbatch, recomputation, offloaded
    activations, AdamW's moments in bfloat16, FSDP, context parallelism. A Work does not know
    --betas: with one above 0.99 a run refuses such moments."""
    before = work.parallel
    room = usable_memory(process.device) - memory_of_others(process.device)
    needed = holds(work)["peak"]
    limit = min(room, 0.9 * needed)  # a tenth less at least than what did not fit
    sharded = with_mesh_sizes(replace(before, dp="fsdp"), process.size, process.per_node)
    ranks = divisors(before.replicate * before.shard)
    shared = [replace(sharded, cp=n) for n in ranks if n % before.cp == 0]
    moments = dict.fromkeys((before.moments, "bfloat16"))  # each once
    present = {name: getattr(before, name) for name in ACTIVATIONS["full"]}
    activations = present, *ACTIVATIONS.values()
    sizes = [n for n in reversed(divisors(work.sequences)) if n <= work.microbatch]
    for base, dtype, way, size in itertools.product((before, *shared), moments, activations, sizes):
        parallel = replace(base, moments=dtype, **way)
        changed = replace(work, parallel=parallel, microbatch=size)
        if refusal(changed):
            continue
        peak = holds(changed)["peak"]
        if peak <= limit:
            flags = flags_of(parallel, before)
            if size != work.microbatch:
                flags += f" --microbatch {size}"
            return (
                f"a step is predicted to need {needed / 1e9:.3g} GB, and with {flags.strip()} "
                f"{peak / 1e9:.3g}"
            )
    return f"no flags make a step fit in {room / 1e9:.3g} GB: use more GPUs, or a shorter --seq-len"


def fits_unsharded(work: Work, world: World) -> bool:
    """Return whether every rank has room for all weights beside what it holds between steps; where
    FSDP has to gather them for each token of a sample, print what that sends."""
    parallel = world.parallel
    held = holds(work)
    unsharded = replace(parallel, dp="fsdp", reshard="none")
    whole = holds(replace(work, parallel=unsharded))["gathered"]
    room = world.minimum(usable_memory(world.device))
    fits = whole + held["parameters"] + held["optimizer"] + held["kept"] < room
    if parallel.shard > 1 and not fits:
        sent = whole * (parallel.shard - 1) / parallel.shard
        print_rank_zero(
            f"note: the weights do not fit on a rank at once, so that samples at evaluations "
            f"all-gather them for each token: a rank sends {sent / 1e9:.3g} GB"
        )
    return fits
