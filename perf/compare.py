"""`bench.py compare`: the same training step, distributed in different ways.

Contestants are the strategies of parallel.py and some variants of them. All start from the same
weights and train on the same batch: so their losses must agree, and they differ in time, memory and
communication. They run in turns and stay in memory together.
"""

import argparse
import importlib.util
import json
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from costs.memory import predict_memory
from costs.search import usable_memory, with_mesh_sizes
from costs.traffic import Traffic, describe_traffic, sent_bytes
from costs.work import Work
from model import PRESETS, Llama, LlamaConfig
from parallel import STRATEGIES, ParallelConfig, World, with_mesh
from perf.instruments import (
    Counted,
    Live,
    Seconds,
    adapters_of,
    build_on_meta,
    describe_machine,
    make_step,
    megabytes,
    problem_with_files,
    quartiles,
    random_batch,
    ratios_to_first,
    time_interleaved,
    timing_table,
)
from plumbing.processes import UserError, init_distributed, print_rank_zero
from runs.records import write_atomically
from runs.rules import check_parallel, check_work
from techniques.context_parallel import share_sequences
from techniques.float8 import has_kernel
from train import Totals

# Relative; sums in a different order differ by less, and those of products in 8 bits by less than
# is allowed in bfloat16.
LOSS_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 1e-2}

# ------------------------------------------------------------------------------- contestants


CONTESTANTS = {  # without the mesh sizes, which depend on the processes
    "one": ParallelConfig(),  # rank 0 alone, with the whole batch
    **{name: ParallelConfig(dp=name) for name in STRATEGIES},
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
}


def configure(name: str, base: World) -> ParallelConfig:
    """Return a contestant's configuration. `base` is the world of all processes, in any mesh, with
    the dtypes and the optimizer of the flags."""
    given = {key: getattr(base.parallel, key) for key in ("dtype", "optimizer", "moments")}
    parallel = replace(CONTESTANTS[name], **given)
    if name == "one":
        return parallel
    if name in ("tp", "async-tp"):
        return replace(parallel, tp=base.size)
    if name == "cp":
        parallel = replace(parallel, cp=base.per_node)
    if name.startswith("pp"):
        nodes = base.size // base.per_node
        parallel = replace(parallel, pp=nodes if nodes > 1 else base.size)
    return with_mesh_sizes(parallel, base.size, base.per_node)


def runs_by_default(name: str, args: argparse.Namespace, base: World) -> bool:
    """Return whether a contestant differs from the others on these processes."""
    if name == "one":
        return base.size == 1
    if name in ("selective", "full"):
        return True
    if name == "float8":
        return has_kernel(base.device, base.parallel.dtype, CONTESTANTS[name].float8)
    if name in ("offloaded", "compiled"):
        return base.device.type == "cuda"
    if name in ("wrong", "async-tp", "cp", "pp", "pp-zero-bubble") or (
        name == "fsdp-adapters" and not args.lora
    ):
        return False
    if STRATEGIES[CONTESTANTS[name].dp].copy_per == "node":
        # With one rank a node it is DDP, with one node FSDP.
        return 1 < base.per_node < base.size
    return base.size > 1


def contestant_name(text: str) -> str:
    """Argument type: a name in CONTESTANTS. `choices` would not do: some versions of argparse
    reject the empty list, which stands for no argument, as no choice."""
    if text not in CONTESTANTS:
        raise argparse.ArgumentTypeError(f"expected {', '.join(CONTESTANTS)}, got '{text}'")
    return text


def world_of(name: str, base: World) -> World:
    """Return the processes in the mesh of a contestant."""
    parallel, dim_names = configure(name, base), base.mesh.mesh_dim_names
    if name == "one":
        ranks = torch.zeros(1, 1, 1, 1, dtype=torch.int)
        mesh = DeviceMesh(base.device.type, ranks, mesh_dim_names=dim_names)
        return replace(base, size=1, parallel=parallel, mesh=mesh, group=dist.new_group([0]))
    if name == "wrong":  # the ranks of a node lie along replicate, and shard crosses nodes
        ranks = torch.arange(base.size).view(1, parallel.shard, parallel.replicate, 1)
        ranks = ranks.transpose(1, 2)
        mesh = DeviceMesh(base.device.type, ranks, mesh_dim_names=dim_names)
        return replace(base, parallel=parallel, mesh=mesh)
    return with_mesh(base, parallel)


# ---------------------------------------------------------------------------------- choosing


def choose_contestants(args: argparse.Namespace, config: LlamaConfig, base: World) -> list[str]:
    """Return the contestants that the user named; without names, the default ones that are possible
    and fit in memory together. Raises UserError where a named one is not possible."""
    if args.seq_len > config.max_seq_len:
        raise UserError(
            f"--seq-len {args.seq_len} is too long: --model {args.model} takes at most "
            f"--seq-len {config.max_seq_len}"
        )
    if args.contestants:
        for name in args.contestants:
            check_contestant(name, args, build_on_meta(config, *adapters_of(args)), base)
        return args.contestants
    needs, left_out = {}, {}
    model = build_on_meta(config, *adapters_of(args))
    for name in CONTESTANTS:
        if runs_by_default(name, args, base):
            try:
                check_contestant(name, args, model, base)
                needs[name] = memory_needed(work_of(model, configure(name, base), args))
            except UserError as error:
                left_out[name] = str(error)
    chosen, too_large = choose_fitting(needs, usable_memory(base.device, base.per_node))
    if left_out := left_out | too_large:
        reasons = "; ".join(f"{name} ({reason})" for name, reason in left_out.items())
        if not chosen:
            raise UserError(f"nothing is left to compare: without {reasons}")
        print_rank_zero(f"left out: {reasons}", file=sys.stderr)
    return chosen


def check_contestant(name: str, args: argparse.Namespace, model: Llama, base: World) -> None:
    """Raise UserError where a contestant cannot run on these processes, model or batch."""
    parallel = configure(name, base)
    data_ranks = parallel.replicate * parallel.shard // parallel.cp
    if parallel.reshard == "adapters" and not args.lora:
        raise UserError(f"{name} is for --lora: without frozen weights it is the same as fsdp")
    work = work_of(model, parallel, args)
    check_parallel(work, None, base)
    check_work(work)
    if args.batch % (data_ranks * args.microbatch):
        raise UserError(
            f"{name}: --batch {args.batch} must be a multiple of {data_ranks * args.microbatch}: "
            f"{data_ranks} data-parallel ranks x --microbatch {args.microbatch}"
        )
    if args.seq_len % parallel.tp and torch.__version__ < "2.13":
        raise UserError(
            f"{name}: with torch {torch.__version__}, --seq-len {args.seq_len} must be a multiple "
            f"of {parallel.tp} processes; torch 2.13 can shard it unevenly"
        )


def work_of(model: Llama, parallel: ParallelConfig, args: argparse.Namespace) -> Work:
    on_gpu = torch.cuda.is_available()
    return Work(model, parallel, args.batch, args.microbatch, args.seq_len, on_gpu=on_gpu)


def memory_needed(work: Work) -> tuple[int, int]:
    """Return the bytes that a contestant keeps on a rank between its steps, and those that it takes
    on top of them while it runs."""
    held, parallel = predict_memory(work), work.parallel
    keeps = held["parameters"] + held["optimizer"]
    if parallel.replicate > 1 and parallel.strategy.grads_in_buckets:
        keeps += held["gradients"]  # DDP's buckets stay
    return keeps, held["peak"] - keeps


def choose_fitting(
    needs: dict[str, tuple[int, int]], usable: int
) -> tuple[list[str], dict[str, str]]:
    """Return the contestants that fit in `usable` bytes together, and why each other one does not.

    needs: name -> bytes that it keeps, bytes that it takes on top while it runs. All contestants
    keep theirs at the same time, but they run one at a time. They are tried in order."""
    chosen, too_large, kept, largest_run = [], {}, 0, 0
    for name, (keeps, runs_with) in needs.items():
        if kept + keeps + max(largest_run, runs_with) <= usable:
            chosen.append(name)
            kept, largest_run = kept + keeps, max(largest_run, runs_with)
        else:
            too_large[name] = (
                f"it takes {(keeps + runs_with) / 1e9:.3g} GB, those before it keep "
                f"{kept / 1e9:.3g}, and a process has {usable / 1e9:.3g}"
            )
    return chosen, too_large


# --------------------------------------------------------------------------------- measuring


@dataclass(frozen=True)
class Cost:
    """What was counted in a contestant's steps."""

    parallel: ParallelConfig
    loss: float = 0.0  # of the first step, mean over the batch
    traffic: Traffic | None = None  # of a step; None: not counted
    peak: int | None = None  # bytes of tensors on a rank; None: not counted


def measure_compare(args: argparse.Namespace) -> str:
    """Run the contestants; return the results as text, and write them to --json and --plot."""
    process, config = init_distributed(), PRESETS[args.model]
    options = dict(dtype=getattr(torch, args.dtype), moments=args.moments)
    options |= dict(optimizer=args.optimizer or "adamw")
    base = with_mesh(process, ParallelConfig(replicate=process.size, **options))
    if problem := base.broadcast_from_rank_zero(partial(output_problem, args)):
        raise UserError(problem)
    names = choose_contestants(args, config, base)
    batch, adapters = random_batch(config, args.batch, args.seq_len), adapters_of(args)
    steps, costs = {}, {}
    for name in names:
        print_rank_zero(f"counting {name}", file=sys.stderr)
        world = world_of(name, base)
        if name == "one" and base.rank > 0:  # rank 0 runs it, the others wait
            steps[name], costs[name] = lambda: None, Cost(world.parallel)
        else:
            share = batch.microbatches(args.batch // world.data_size)[world.data_rank]
            local_batch = share_sequences(share, world).to(base.device)
            steps[name] = make_step(config, args, local_batch, args.microbatch, world, *adapters)
            costs[name] = count_costs(steps[name], world)
    seconds = time_interleaved(steps, args.repeats)
    costs = with_highest_peaks(costs, base)
    if base.rank > 0:
        return ""
    if args.json:
        results = json_report(args, base, seconds, costs)
        write_atomically(args.json, json.dumps(results, indent=1) + "\n")
    if args.plot:
        save_plot(args, seconds, costs)
    return text_report(args, seconds, costs)


def output_problem(args: argparse.Namespace) -> str | None:
    """Return why --json or --plot could not be written at the end, None if they can."""
    if args.plot and args.plot.suffix not in (".png", ".svg", ".pdf"):
        return f"--plot {args.plot}: give a name that ends in .png, .svg or .pdf"
    if args.plot and importlib.util.find_spec("matplotlib") is None:
        return "--plot needs matplotlib: pip install matplotlib"
    return problem_with_files({"--json": args.json, "--plot": args.plot})


def count_costs(step: Callable[[], Totals], world: World) -> Cost:
    """Run a contestant's first steps and count in the last of them."""
    loss = step().mean_loss
    step()  # DDP makes its final buckets in step 2
    if world.parallel.compile:  # a compiled block would run eagerly under Counted and Live
        return Cost(world.parallel, loss)
    with Live() as live:
        step()  # only at its end does Live see AdamW's moments, and count them from then on
        with Counted(world) as counted:
            step()
    return Cost(world.parallel, loss, counted.sent, live.peak)


def with_highest_peaks(costs: dict[str, Cost], base: World) -> dict[str, Cost]:
    """Return the costs with the highest peak of all ranks: uneven shards differ in size."""
    peaks = base.all_gather_scalars([cost.peak or 0 for cost in costs.values()]).amax(0).tolist()
    return {
        name: cost if cost.peak is None else replace(cost, peak=round(peak))
        for (name, cost), peak in zip(costs.items(), peaks)
    }


# --------------------------------------------------------------------------------- reporting


def text_report(args: argparse.Namespace, seconds: Seconds, costs: dict[str, Cost]) -> str:
    """Return a table, whether the losses agree, and each contestant's traffic."""
    columns = {
        "peak memory": [megabytes(cost.peak) for cost in costs.values()],
        "sends": [sent_text(cost) for cost in costs.values()],
        "loss": [f"{cost.loss:.5f}" for cost in costs.values()],
    }
    traffic = []
    for name, cost in costs.items():
        if name != "one":
            counted = "an unknown amount: blocks are compiled"
            if cost.traffic is not None:
                counted = describe_traffic(cost.traffic, cost.parallel)
            traffic.append(f"{name} sends {counted}")
    table = timing_table(seconds, args.batch * args.seq_len, columns)
    return "\n".join([*table, "", compare_losses(costs), *traffic])


def sent_text(cost: Cost) -> str:
    if not cost.traffic:
        return "-" if cost.traffic is None else "nothing"
    calls = sum(calls for calls, _ in cost.traffic.values())
    return f"{megabytes(sent_bytes(cost.traffic, cost.parallel))}, {calls} calls"


def compare_losses(costs: dict[str, Cost]) -> str:
    """Say whether all contestants computed the same loss in the first step, as they must."""
    (first, reference), *_ = costs.items()
    rounded = any(cost.parallel.float8 != "none" for cost in costs.values())
    tolerance = LOSS_TOLERANCE[torch.bfloat16 if rounded else reference.parallel.dtype]
    errors = {name: abs(cost.loss / reference.loss - 1) for name, cost in costs.items()}
    if different := [name for name, error in errors.items() if error > tolerance]:
        losses = ", ".join(f"{name} {costs[name].loss:.5f}" for name in different)
        return f"losses of the first step DO NOT AGREE: {losses}, but {first} {reference.loss:.5f}"
    return f"losses of the first step agree to {max(errors.values()):.0e}"


def json_report(
    args: argparse.Namespace, base: World, seconds: Seconds, costs: dict[str, Cost]
) -> dict:
    """Return all that was measured, for --json."""
    results = {}
    for name, cost in costs.items():
        traffic = cost.traffic or {}
        results[name] = {
            "seconds": seconds[name],
            "tokens_per_second": args.batch * args.seq_len / statistics.median(seconds[name]),
            "ratio": statistics.median(ratios_to_first(seconds, name)),
            "peak_bytes": cost.peak,
            "sends": cost.traffic and sent_bytes(cost.traffic, cost.parallel),
            "payload": {" ".join(key): list(value) for key, value in traffic.items()},
            "loss": cost.loss,
        }
    names = ("model", "batch", "microbatch", "seq_len", "lora", "rank", "dora", "base_bits")
    names += ("dtype", "optimizer", "moments")
    flags = {name: getattr(args, name) for name in names}
    return flags | describe_machine(base) | {"strategies": results}


def save_plot(args: argparse.Namespace, seconds: Seconds, costs: dict[str, Cost]) -> None:
    """Draw tokens/s of each contestant as a bar with quartiles, labelled with what it sends."""
    from matplotlib.figure import Figure

    tokens = args.batch * args.seq_len
    speeds = [quartiles([tokens / time for time in times]) for times in seconds.values()]
    medians = [median for _, median, _ in speeds]
    below, above = zip(*((median - lower, upper - median) for lower, median, upper in speeds))
    figure = Figure(figsize=(7, 1 + 0.4 * len(seconds)), layout="constrained")
    axes = figure.subplots()
    bars = axes.barh(
        list(seconds), medians, xerr=(below, above), color="#7a9cc6", ecolor="#444", capsize=3
    )
    axes.bar_label(bars, [sent_text(cost) for cost in costs.values()], padding=5, fontsize=8)
    axes.invert_yaxis()  # the first contestant on top, as in the table
    axes.margins(x=0.25)  # room for the labels
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_xlabel("tokens/s with quartiles; label: what a rank sends in a step")
    axes.set_title(f"{args.model}, {args.batch} x {args.seq_len} tokens per step")
    figure.savefig(args.plot, dpi=150)
