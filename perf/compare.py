"""`bench.py compare`: the same training step, distributed in different ways.

Contestants are the strategies of parallel.py and some variants of them. All start from the same
weights and train on the same batch: so their losses must agree, and they differ in time, memory and
communication. Two are for scale: the bare matrix products of a step, and transformers' step with
weights of its own. They run in turns and stay in memory together.
"""

import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from config import STRATEGIES, ParallelConfig
from costs.page import Traffic, holds
from costs.search import SAME_TRAINING, with_mesh_sizes
from costs.seconds import sent_bytes
from lora import adapter_settings
from parallel import World, with_mesh
from perf.instruments import (
    Counted,
    Live,
    Seconds,
    Task,
    check_writable,
    describe_machine,
    make_step,
    megabytes,
    random_batch,
    ratios_to_first,
    time_interleaved,
    timing_table,
    traffic_in_words,
    write_json,
)
from perf.limit import bare_step, transformers_step
from plumbing.processes import UserError, print_rank_zero
from runs.rules import check_parallel, check_work
from techniques.context_parallel import share_sequences
from techniques.float8 import has_float8

# Relative; sums in a different order differ by less, and those of products in 8 bits by less than
# is allowed in bfloat16.
LOSS_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 1e-2}

# ------------------------------------------------------------------------------- contestants


CONTESTANTS = {  # without the mesh sizes, which depend on the processes
    "one": ParallelConfig(),
    **{name: ParallelConfig(dp=name) for name in SAME_TRAINING},
    "fsdp-none": ParallelConfig(dp="fsdp", reshard="none"),
    "fsdp-adapters": ParallelConfig(dp="fsdp", reshard="adapters"),
    "wrong": ParallelConfig(dp="hsdp"),  # all-gathers weights across nodes, all-reduces in them
    "tp": ParallelConfig(),  # over all processes
    "async-tp": ParallelConfig(tp=2, async_tp=True),  # likewise
    "cp": ParallelConfig(dp="fsdp"),  # over the processes of a node
    "pp": ParallelConfig(dp="fsdp"),  # over all nodes; on one node, over all processes
    "pp-zero-bubble": ParallelConfig(dp="fsdp", schedule="zero-bubble"),
    "selective": ParallelConfig(checkpointing="selective"),
    "full": ParallelConfig(checkpointing="full"),
    "offloaded": ParallelConfig(checkpointing="full", offload_activations=True),
    "compiled": ParallelConfig(compile=True),
    "float8": ParallelConfig(compile=True, float8="tensorwise"),
    "bare": ParallelConfig(),  # the matrix products and the attention of a step
    "transformers": ParallelConfig(),  # with peft's adapters
}
ON_REQUEST = "wrong async-tp cp pp pp-zero-bubble bare transformers".split()  # never by default
# Those that rank 0 runs alone, with the whole batch -> what makes their step.
ALONE = {"one": make_step, "bare": bare_step, "transformers": transformers_step}


def configure(name: str, base: World) -> ParallelConfig:
    """Return a contestant's configuration. `base` is the world of all processes, in any mesh, with
    the dtypes and the optimizer of the flags."""
    given = {key: getattr(base.parallel, key) for key in ("dtype", "optimizer", "moments")}
    parallel, nodes = replace(CONTESTANTS[name], **given), base.size // base.per_node
    if name in ALONE:
        return parallel
    if name in ("tp", "async-tp"):
        parallel = replace(parallel, tp=base.size)
    if name == "cp":
        parallel = replace(parallel, cp=base.per_node)
    if name.startswith("pp"):
        parallel = replace(parallel, pp=nodes if nodes > 1 else base.size)
    return with_mesh_sizes(parallel, base.size, base.per_node)


def runs_by_default(name: str, lora: bool, base: World) -> bool:
    """Return whether a contestant differs from the others on these processes."""
    on_gpu, parallel = base.device.type == "cuda", CONTESTANTS[name]
    # With one rank a node HSDP is DDP, with one node FSDP.
    is_another = STRATEGIES[parallel.dp].copy_per != "node" or 1 < base.per_node < base.size
    exceptions = {
        **dict.fromkeys(ON_REQUEST, False),
        "one": base.size == 1,
        "fsdp-adapters": lora and base.size > 1,
        "selective": True,
        "full": True,
        "offloaded": on_gpu,
        "compiled": on_gpu,
        "float8": has_float8(base.device, base.parallel.dtype, CONTESTANTS["float8"].float8),
    }
    return exceptions.get(name, base.size > 1 and is_another)


def world_of(name: str, base: World) -> World:
    """Return the processes in the mesh of a contestant."""
    parallel, group = configure(name, base), {}
    if name in ALONE:
        ranks, group = torch.zeros(1, 1, 1, 1), dict(size=1, group=dist.new_group([0]))
    elif name == "wrong":  # the ranks of a node lie along replicate, and shard crosses nodes
        ranks = torch.arange(base.size).view(1, parallel.shard, parallel.replicate, 1)
        ranks = ranks.transpose(1, 2)
    else:
        return with_mesh(base, parallel)
    mesh = DeviceMesh(base.device.type, ranks.int(), mesh_dim_names=base.mesh.mesh_dim_names)
    return replace(base, parallel=parallel, mesh=mesh, **group)


# ---------------------------------------------------------------------------------- choosing


def choose_contestants(names: list[str], task: Task, base: World) -> list[str]:
    """Return the contestants that the user named; without names, the default ones that are
    possible. Raises UserError where a named one is not. All are in memory at the same time."""
    if task.seq_len > task.model.config.max_seq_len:
        raise UserError(
            f"--seq-len {task.seq_len} is too long: --model {task.name} takes at most "
            f"--seq-len {task.model.config.max_seq_len}"
        )
    for name in names:
        check_contestant(name, task, base)
    if names:
        return names
    chosen, left_out = [], []
    for name in CONTESTANTS:
        if runs_by_default(name, adapter_settings(task.model) is not None, base):
            try:
                check_contestant(name, task, base)
                chosen.append(name)
            except UserError as error:
                left_out.append(f"{name} ({error})")
    reasons = "; ".join(left_out)
    if not chosen:
        raise UserError(f"nothing is left to compare: without {reasons}")
    if reasons:
        print_rank_zero(f"left out: {reasons}", file=sys.stderr)
    return chosen


def check_contestant(name: str, task: Task, base: World) -> None:
    """Raise UserError where a contestant cannot run on these processes, model or batch."""
    parallel = configure(name, base)
    work = replace(task, parallel=parallel)
    data_ranks = parallel.replicate * parallel.shard // parallel.cp
    if parallel.reshard == "adapters" and not adapter_settings(task.model):
        raise UserError(f"{name} is for --lora: without frozen weights it is the same as fsdp")
    check_parallel(work, None, base)
    check_work(work)
    if task.batch % (data_ranks * task.microbatch):
        raise UserError(
            f"{name}: --batch {task.batch} must be a multiple of {data_ranks * task.microbatch}: "
            f"{data_ranks} data-parallel ranks x --microbatch {task.microbatch}"
        )


# --------------------------------------------------------------------------------- measuring


@dataclass(frozen=True)
class Cost:
    """What was counted in a contestant's steps. None: not counted."""

    parallel: ParallelConfig
    loss: float | None = None  # of the first step, mean over the batch
    traffic: Traffic | None = None  # of a step
    peak: int | None = None  # bytes of tensors on a rank


def measure_compare(
    names: list[str], task: Task, repeats: int, flags: dict, json_file: Path | None
) -> str:
    """Run the contestants; return the results as text, and write them to --json with the flags."""
    base = task.start_world()
    check_writable("--json", json_file)
    batch, steps, costs = random_batch(task.model.config, task.batch, task.seq_len), {}, {}
    for name in choose_contestants(names, task, base):
        print_rank_zero(f"counting {name}", file=sys.stderr)
        world, make = world_of(name, base), ALONE.get(name, make_step)
        if name in ALONE and base.rank > 0:  # rank 0 runs it, the others wait
            steps[name], costs[name] = lambda: None, Cost(world.parallel)
            continue
        share = batch.microbatches(task.batch // world.data_size)[world.data_rank]
        before = torch.cuda.memory_allocated() if base.device.type == "cuda" else 0
        steps[name] = make(task, world, share_sequences(share, world).to(base.device))
        costs[name] = count_costs(steps[name], make is make_step, world, before)
    seconds = time_interleaved(steps, repeats)
    if base.rank > 0:
        return ""
    strategies = {"strategies": results_of(task, seconds, costs)}
    write_json(json_file, flags | describe_machine(base) | strategies)
    return text_report(task.batch * task.seq_len, seconds, costs)


def count_costs(step: Callable[[], object], is_ours: bool, world: World, before: int) -> Cost:
    """Run a contestant's first steps and count in the last of them. The peak is that of the rank
    with most: uneven shards differ in size. `before` are the bytes that the GPU held already."""
    first = step()
    loss = first.mean_loss if is_ours else None
    step()  # DDP makes its final buckets in step 2
    traffic = None
    if is_ours and not world.parallel.compile:  # whose block would run eagerly under Counted, Live
        with Live() as live:
            step()  # only at its end does Live see AdamW's moments, and count them from then on
            with Counted(world) as counted:
                step()
        traffic, peak = counted.sent, live.peak
    elif world.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        step()
        peak = torch.cuda.max_memory_allocated() - before
    else:
        return Cost(world.parallel, loss)
    peak = world.all_gather_scalars([peak]).amax().item()
    return Cost(world.parallel, loss, traffic, round(peak))


# --------------------------------------------------------------------------------- reporting


def text_report(tokens: int, seconds: Seconds, costs: dict[str, Cost]) -> str:
    """Return a table, whether the losses agree, and each contestant's traffic."""
    columns = {
        "peak memory": [megabytes(cost.peak) for cost in costs.values()],
        "sends": [sent_text(cost) for cost in costs.values()],
        "loss": ["-" if cost.loss is None else f"{cost.loss:.5f}" for cost in costs.values()],
    }
    traffic = [
        f"{name} sends {traffic_in_words(cost.traffic, cost.parallel)}"
        for name, cost in costs.items()
        if name not in ALONE
    ]
    table = timing_table(seconds, tokens, columns)
    return "\n".join([*table, "", compare_losses(costs), *traffic])


def sent_text(cost: Cost) -> str:
    if not cost.traffic:
        return "-" if cost.traffic is None else "nothing"
    calls = sum(calls for calls, _ in cost.traffic.values())
    return f"{megabytes(sent_bytes(cost.traffic, cost.parallel))}, {calls} calls"


def compare_losses(costs: dict[str, Cost]) -> str:
    """Say whether all contestants computed the same loss in the first step, as they must."""
    costs = {name: cost for name, cost in costs.items() if cost.loss is not None}
    if not costs:
        return "no contestant trains flatllama's model"
    (first, reference), *_ = costs.items()
    rounded = any(cost.parallel.float8 != "none" for cost in costs.values())
    tolerance = LOSS_TOLERANCE[torch.bfloat16 if rounded else reference.parallel.dtype]
    errors = {name: abs(cost.loss / reference.loss - 1) for name, cost in costs.items()}
    if different := [name for name, error in errors.items() if error > tolerance]:
        losses = ", ".join(f"{name} {costs[name].loss:.5f}" for name in different)
        return f"losses of the first step DO NOT AGREE: {losses}, but {first} {reference.loss:.5f}"
    return f"losses of the first step agree to {max(errors.values()):.0e}"


def results_of(task: Task, seconds: Seconds, costs: dict[str, Cost]) -> dict:
    """Return what was measured of each contestant, for --json."""
    results = {}
    for name, cost in costs.items():
        traffic = cost.traffic or {}
        predicted = holds(replace(task, parallel=cost.parallel))["peak"]
        results[name] = {
            "seconds": seconds[name],
            "tokens_per_second": task.batch * task.seq_len / statistics.median(seconds[name]),
            "ratio": statistics.median(ratios_to_first(seconds, name)),
            "peak_bytes": cost.peak,
            "predicted_peak_bytes": predicted if cost.loss is not None else None,
            "sends": cost.traffic and sent_bytes(cost.traffic, cost.parallel),
            "payload": {" ".join(key): list(value) for key, value in traffic.items()},
            "loss": cost.loss,
        }
    return results
