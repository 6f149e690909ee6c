"""Check a parallel configuration, and choose the one that fits in memory (`--dp auto`)."""

import argparse
import itertools
import math
import os
from dataclasses import replace
from functools import partial

import torch

from costs.memory import predict_memory
from costs.traffic import bytes_each, parts_of, predict_traffic, sent_bytes
from model import Llama
from parallel import STRATEGIES, ParallelConfig, World
from plumbing.processes import Process, memory_of_others, print_rank_zero
from techniques.schedules import has_w

USABLE_FRACTION = 0.9  # of a device's memory, for tensors
# --checkpointing, --offload-activations: the later, the less memory and the more time.
ACTIVATIONS = (("none", False), ("selective", False), ("full", False), ("full", True))


def choose_parallel(
    requested: ParallelConfig,
    shard: int | None,
    model: Llama,
    process: Process,
    tokens: int,
    microbatches: int,
    room: int,
    masked: int = 0,
) -> tuple[ParallelConfig, str]:
    """Return the configuration with its mesh sizes, and the reason in words. `requested.dp` and
    `requested.reshard` may be "auto"; `tokens` are those of a microbatch; `room` is the memory in
    bytes that every rank may fill; `masked` is mask_width.

    --dp auto takes the first strategy whose step fits in memory: DDP where a whole copy fits on a
    device; on several nodes HSDP where a copy fits in a node; FSDP over all ranks otherwise.
    Gradients of several microbatches accumulate unsharded if there is room."""
    fused = requested.compile or process.device.type == "cuda"
    predicted = partial(
        predict_memory, model, tokens=tokens, microbatches=microbatches, fused=fused, masked=masked
    )

    def configured(dp: str, reshard: str) -> ParallelConfig:
        parallel = replace(requested, dp=dp, reshard=reshard)
        return with_mesh_sizes(parallel, process.size, process.per_node, shard)

    def fits(parallel: ParallelConfig) -> bool:
        return predicted(parallel)["peak"] < room

    preferred = smallest = requested.reshard
    if requested.reshard == "auto":
        splits_backward = requested.pp > 1 and has_w(requested.schedule)
        preferred, smallest = "weights", "weights" if splits_backward else "all"
    candidates = [requested.dp]
    if requested.dp == "auto":
        data_ranks = process.size // (requested.tp * requested.pp)
        in_node = data_ranks_in_node(data_ranks, requested.tp, process.per_node)
        candidates = [
            name
            for name, strategy in STRATEGIES.items()
            if strategy.automatic and (strategy.copy_per != "node" or 1 < in_node < data_ranks)
        ]
    fitting = (dp for dp in candidates if fits(configured(dp, smallest)))
    dp = next(fitting, candidates[-1])
    parallel = configured(dp, preferred)
    if microbatches > 1 and parallel.strategy.uses_fsdp and not fits(parallel):
        parallel = configured(dp, smallest)

    copy = predicted(configured("ddp", "weights"))
    state = copy["parameters"] + copy["gradients"] + copy["optimizer"]
    reason = (
        f"weights, gradients and AdamW state of a copy take {state / 1e9:.3g} GB, with activations "
        f"{copy['peak'] / 1e9:.3g} GB; a process may use {room / 1e9:.3g} GB, and a node has "
        f"{process.per_node} of {process.size} processes"
    )
    if not fits(parallel):
        reason += (
            "; nothing is predicted to fit: try --checkpointing full or a smaller --microbatch"
        )
    return parallel, reason


def sent_by_strategy(
    requested: ParallelConfig, args: argparse.Namespace, model: Llama, process: Process
) -> str:
    """Return in words the megabytes that a rank would send in a step under each strategy."""
    share = args.batch * args.cp // (process.size // (args.tp * args.pp))
    microbatch = args.microbatch or share
    room = process.minimum(usable_memory(process.device, process.per_node))
    choices = {f"--dp {dp}": dict(dp=dp, reshard="auto") for dp in STRATEGIES}
    for reshard in ("none", "adapters"):
        choices[f"--dp fsdp --reshard {reshard}"] = dict(dp="fsdp", reshard=reshard)
    parts = []
    for flags, choice in choices.items():
        strategy = STRATEGIES[choice["dp"]]
        same_as_fsdp = strategy.copy_per == "node" and process.per_node == process.size
        if same_as_fsdp or (args.tp * args.pp > 1 and not strategy.splits_layers):
            continue
        parallel, _ = choose_parallel(
            replace(requested, **choice),
            args.shard if args.dp == choice["dp"] else None,
            model,
            process,
            tokens=microbatch * args.seq_len // args.cp,
            microbatches=share // microbatch,
            room=room,
        )
        traffic = predict_traffic(model, parallel, share // microbatch, microbatch, args.seq_len)
        parts.append(f"{flags} {sent_bytes(traffic, parallel) / 1e6:,.2f} MB")
    return "; ".join(parts)


def what_would_fit(
    args: argparse.Namespace,
    model: Llama,
    parallel: ParallelConfig,
    process: Process,
    masked: int = 0,
) -> str:
    """Return a sentence that names flags with which a step that ran out of memory is predicted to
    fit. What costs less time is tried first: a smaller microbatch, recomputation, offloaded
    activations, AdamW's moments in bfloat16, FSDP, context parallelism. `masked` is mask_width."""
    fused = parallel.compile or process.device.type == "cuda"
    data_ranks = parallel.replicate * parallel.shard
    room = usable_memory(process.device, process.per_node) - memory_of_others(process.device)

    def sequences(parallel: ParallelConfig) -> int:
        """Of a step, on each rank."""
        return args.batch * parallel.cp // data_ranks

    def peak(parallel: ParallelConfig, size: int) -> int:
        tokens, microbatches = size * args.seq_len // parallel.cp, sequences(parallel) // size
        return predict_memory(model, parallel, tokens, microbatches, fused, masked)["peak"]

    needed = peak(parallel, args.microbatch)
    limit = min(room, 0.9 * needed)  # a tenth less at least than what did not fit
    sizes = [n for n in reversed(divisors(sequences(parallel))) if n <= args.microbatch]
    present = parallel.checkpointing, parallel.offload_activations
    next_ones = ACTIVATIONS.index(present) + 1 if present in ACTIVATIONS else -1
    treatments = present, *(t for t in ACTIVATIONS[next_ones:] if not (t[1] and parallel.pp > 1))
    sharded = with_mesh_sizes(replace(parallel, dp="fsdp"), process.size, process.per_node)
    possible = (n for n in divisors(data_ranks) if args.seq_len % (2 * n) == 0 or n == 1)
    shared = replace(sharded, cp=max(n for n in possible if n % parallel.cp == 0))
    dtypes = (parallel.moments, "bfloat16")[: 1 + (parallel.optimizer == "adamw")]
    for base, moments, (checkpointing, offload), size in itertools.product(
        (parallel, sharded, shared), dtypes, treatments, sizes
    ):
        changed = replace(
            base, moments=moments, checkpointing=checkpointing, offload_activations=offload
        )
        if peak(changed, size) < limit:
            flags = {
                f"--dp {changed.dp}": changed.dp != parallel.dp,
                f"--cp {changed.cp}": changed.cp != parallel.cp,
                "--moments bfloat16": changed.moments != parallel.moments,
                f"--checkpointing {checkpointing}": checkpointing != parallel.checkpointing,
                "--offload-activations": offload and not parallel.offload_activations,
                f"--microbatch {size}": size != args.microbatch,
            }
            given = " ".join(flag for flag, is_new in flags.items() if is_new)
            return (
                f"a step is predicted to need {needed / 1e9:.3g} GB, and with {given} "
                f"{peak(changed, size) / 1e9:.3g}"
            )
    return f"no flags make a step fit in {room / 1e9:.3g} GB: use more GPUs, or a shorter --seq-len"


def divisors(n: int) -> list[int]:
    return [i for i in range(1, n + 1) if n % i == 0]


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


def usable_memory(device: torch.device, processes: int) -> int:
    """Return the bytes that a process may fill: of its GPU, or of its share of CPU memory."""
    if device.type == "cuda":
        return int(USABLE_FRACTION * torch.cuda.get_device_properties(device).total_memory)
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return int(USABLE_FRACTION * total / processes)


def fits_unsharded(model: Llama, world: World) -> bool:
    """Return whether every rank has room for all weights beside what it holds between steps; where
    FSDP has to gather them for each token of a sample, print what that sends."""
    parallel = world.parallel
    nbytes = max(
        sum(p.numel() * bytes_each(p, parallel) for p in part.parameters()) // parallel.tp
        for part in parts_of(model, parallel)
    )
    held = predict_memory(model, parallel, tokens=0, microbatches=1)
    room = world.minimum(usable_memory(world.device, world.per_node))
    fits = nbytes + held["parameters"] + held["optimizer"] < room
    if parallel.shard > 1 and not fits:
        sent = nbytes * (parallel.shard - 1) / parallel.shard
        print_rank_zero(
            f"note: the weights do not fit on a rank at once, so that samples at evaluations "
            f"all-gather them for each token: a rank sends {sent / 1e9:.3g} GB"
        )
    return fits
