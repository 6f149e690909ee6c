"""Check a parallel configuration, and choose the one that fits in memory (`--dp auto`)."""

import math
import os
from dataclasses import replace

import torch

from model import Llama, LlamaConfig
from parallel import STRATEGIES, ParallelConfig
from perf.cost import predict_memory
from plumbing.processes import Process, UserError

USABLE_FRACTION = 0.9  # of a device's memory, for tensors


def check_parallel(
    requested: ParallelConfig, shard: int | None, config: LlamaConfig, process: Process
) -> None:
    """Raise UserError for a configuration that these processes or this model cannot have.

    `requested.dp` may be "auto"; `shard` is the value of --shard, if given."""
    dp, tp, reshard = requested.dp, requested.tp, requested.reshard
    strategy = STRATEGIES.get(dp)  # None for auto
    if (shareable := math.gcd(config.n_kv_heads, config.ffn_dim)) % tp:
        raise UserError(
            f"--tp {tp} cannot shard {config.n_kv_heads} key/value heads and a feed-forward width "
            f"of {config.ffn_dim} evenly: --tp must divide {shareable}"
        )
    data_ranks, rest = divmod(process.size, tp)
    if rest:
        raise UserError(f"{process.size} processes are no multiple of --tp {tp}")
    if strategy and tp > 1 and not strategy.with_tp:
        raise UserError(f"--dp {dp} does not combine with --tp: use --dp fsdp --reshard none")
    if requested.offload and not (strategy and strategy.uses_fsdp):
        raise UserError(f"--offload is for {_dp_flags(uses_fsdp=True)}")
    if requested.offload and reshard == "adapters":
        raise UserError("--offload and --reshard adapters exclude each other: give one of them")
    if reshard in ("none", "adapters", "all") and strategy and not requested.uses_fsdp:
        raise UserError(
            f"--reshard {reshard} is for {_dp_flags(uses_fsdp=True)}: {dp} shards no weights"
        )
    if shard and not (strategy and strategy.copy_per == "node"):
        raise UserError(f"--shard {shard} is for {_dp_flags(copy_per='node')}")
    if shard and data_ranks % shard:
        raise UserError(
            f"--shard {shard} must divide the {data_ranks} ranks with different sequences "
            f"({process.size} processes with --tp {tp})"
        )


def _dp_flags(**fields) -> str:
    """Name the strategies whose fields have these values, as `--dp X or --dp Y`."""
    chosen = (
        name
        for name, strategy in STRATEGIES.items()
        if all(getattr(strategy, field) == value for field, value in fields.items())
    )
    return " or ".join(f"--dp {name}" for name in chosen)


def choose_parallel(
    requested: ParallelConfig,
    shard: int | None,
    model: Llama,
    process: Process,
    tokens: int,
    microbatches: int,
    room: int,
) -> tuple[ParallelConfig, str]:
    """Return the configuration with its mesh sizes, and the reason in words. `requested.dp` and
    `requested.reshard` may be "auto"; `tokens` are those of a microbatch; `room` is the memory in
    bytes that every rank may fill.

    --dp auto takes the first strategy whose step fits in memory: DDP where a whole copy fits on a
    device; on several nodes HSDP where a copy fits in a node; FSDP over all ranks otherwise.
    Gradients of several microbatches accumulate unsharded if there is room."""
    data_ranks = process.size // requested.tp
    in_node = data_ranks_in_node(data_ranks, requested.tp, process.per_node)
    fused = requested.compile or process.device.type == "cuda"

    def configured(dp: str, reshard: str) -> ParallelConfig:
        size = STRATEGIES[dp].shard_size(data_ranks, shard or in_node)
        sizes = dict(replicate=data_ranks // size, shard=size)
        return replace(requested, dp=dp, reshard=reshard, **sizes)

    def fits(parallel: ParallelConfig) -> bool:
        return predict_memory(model, parallel, tokens, microbatches, fused)["peak"] < room

    auto_reshard = requested.reshard == "auto"
    preferred, smallest = ("weights", "all") if auto_reshard else (requested.reshard,) * 2
    candidates = [requested.dp]
    if requested.dp == "auto":
        candidates = [
            name
            for name, strategy in STRATEGIES.items()
            if strategy.automatic and (strategy.copy_per != "node" or 1 < in_node < data_ranks)
        ]
    least = {dp: smallest if STRATEGIES[dp].uses_fsdp else "weights" for dp in candidates}
    fitting = (dp for dp in candidates if fits(configured(dp, least[dp])))
    dp = next(fitting, candidates[-1])
    parallel = configured(dp, preferred)
    if auto_reshard and microbatches > 1 and parallel.uses_fsdp and not fits(parallel):
        parallel = configured(dp, smallest)

    copy = predict_memory(model, configured("ddp", "weights"), tokens, microbatches, fused)
    state = copy["parameters"] + copy["gradients"] + copy["optimizer"]
    reason = (
        f"weights, gradients and AdamW state of a copy take {state / 1e9:.3g} GB, with activations "
        f"{copy['peak'] / 1e9:.3g} GB; a process may use {room / 1e9:.3g} GB, and a node has "
        f"{process.per_node} of {process.size} processes"
    )
    return parallel, reason


def data_ranks_in_node(data_ranks: int, tp: int, per_node: int) -> int:
    """Return how many of the ranks with different sequences lie within a node, such that all nodes
    have as many."""
    return math.gcd(data_ranks, max(1, per_node // tp))


def usable_memory(device: torch.device, processes: int) -> int:
    """Return the bytes that a process may fill: of its GPU, or of its part of the CPU's memory."""
    if device.type == "cuda":
        return int(USABLE_FRACTION * torch.cuda.get_device_properties(device).total_memory)
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return int(USABLE_FRACTION * total / processes)
