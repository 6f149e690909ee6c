"""`bench.py compare`: one training step, split in different ways, in turns.

Every contestant starts from the same weights and is given the same batch. So their losses agree,
and what differs is the price: time, memory, and what is sent.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from cost import check_split, describe, device_room, memory
from data import Batch
from lora import LoRA
from measure import (
    Counted,
    Live,
    interleaved,
    megabytes,
    on_meta,
    quartiles,
    ratios,
    step_of,
    table,
)
from model import PRESETS, Llama, LlamaConfig, UserError
from parallel import Split, World, arrange, set_up
from train import show, write_whole

STRATEGIES = "one ddp fsdp fsdp-none fsdp-adapters hsdp wrong tp selective full compiled".split()


@dataclass(frozen=True)
class Cost:
    """What a strategy's step costs besides time, and what it computes."""

    loss: float = 0.0  # mean over the batch, of the first step
    sent: dict[tuple[str, str], tuple[int, int]] | None = None  # as Counted has it; None: unknown
    peak: int | None = None  # most bytes of tensors on a rank; None: unknown


def measure_compare(args: argparse.Namespace) -> str:
    """Seconds of each strategy's step in turn, its memory, what it sends, and whether it computes
    what the others do. All of them stay in memory together."""
    base, config = set_up(), PRESETS[args.model]
    if problem := base.from_first(partial(problem_with_files, args)):
        raise UserError(problem)
    steps, costs = {}, {}
    for name in choose_strategies(args, config, base):
        world = lay_out(name, base)
        if name == "one" and base.rank > 0:
            steps[name], costs[name] = lambda: None, Cost()
        else:
            steps[name] = split_step(config, args, world, LoRA() if args.lora else None)
            costs[name] = try_out(steps[name], world)
    seconds = interleaved(steps, args.repeats)
    costs = with_highest_peaks(costs, base)
    if base.rank > 0:
        return ""
    if args.json:
        write_whole(args.json, json.dumps(record(args, base, seconds, costs), indent=1) + "\n")
    if args.plot:
        plot(args, seconds, costs)
    return report(args, seconds, costs)


def problem_with_files(args: argparse.Namespace) -> str | None:
    """Why --json or --plot could not be written in the end: better known before all the work."""
    for flag, file in {"--json": args.json, "--plot": args.plot}.items():
        if file and not file.parent.is_dir():
            return f"{flag} {file}: there is no directory {file.parent}; make it first"
        if file and file.is_dir():
            return f"{flag} {file} is a directory: give a file in it"
    if args.plot and args.plot.suffix not in (".png", ".svg", ".pdf"):
        return f"--plot {args.plot}: give a name that ends in .png, .svg or .pdf"
    try:
        if args.plot:
            import matplotlib  # noqa: F401
    except ImportError:
        return "--plot needs matplotlib: pip install matplotlib"
    return None


# -------------------------------------------------------------------------------- what to compare


def choose_strategies(args: argparse.Namespace, config: LlamaConfig, base: World) -> list[str]:
    """Those that were named, all of which must be possible; or all that are possible and fit."""
    if args.seq_len > config.max_seq_len:
        raise UserError(
            f"--seq-len {args.seq_len}: with --model {args.model}, --seq-len goes to "
            f"{config.max_seq_len}"
        )
    if args.strategies:
        for name in args.strategies:
            check_strategy(name, args, config, base)
        return args.strategies
    needs, left_out = {}, {}
    model = on_meta(config, LoRA() if args.lora else None)
    for name in worth_a_row(args, base):
        try:
            check_strategy(name, args, config, base)
            needs[name] = memory_needed(model, split_of(name, base), args)
        except UserError as error:
            left_out[name] = str(error)
    chosen, too_large = those_that_fit(needs, device_room(base.device, base.per_node))
    if left_out := left_out | too_large:
        reasons = "; ".join(f"{name} ({why})" for name, why in left_out.items())
        if not chosen:
            raise UserError(f"nothing is left to compare: without {reasons}")
        show(f"left out: {reasons}", file=sys.stderr)
    return chosen


def worth_a_row(args: argparse.Namespace, base: World) -> list[str]:
    """What differs from the rest on these processes."""
    several = base.size > 1
    worth = {
        "one": not several,
        "ddp": several,
        "fsdp": several,
        "fsdp-none": several,
        "fsdp-adapters": several and args.lora,
        "hsdp": base.size > base.per_node > 1,
        "tp": several,
        "selective": True,
        "full": True,
        "compiled": base.device.type == "cuda",
    }
    return [name for name, so in worth.items() if so]


def check_strategy(name: str, args: argparse.Namespace, config: LlamaConfig, base: World) -> None:
    """Refuse a strategy that these processes, this model or this batch cannot have."""
    split = split_of(name, base)
    parts = split.replicate * split.shard
    if split.reshard == "adapters" and not args.lora:
        raise UserError(f"{name} is for --lora: without it nothing is frozen, and it would be fsdp")
    check_split(split, split.shard if split.dp == "hsdp" else None, config, base)
    if args.batch % (parts * args.microbatch):
        raise UserError(
            f"{name}: {parts} parts of a batch, and --microbatch {args.microbatch}, must divide "
            f"--batch {args.batch}"
        )
    if args.seq_len % split.tp and torch.__version__ < "2.13":
        raise UserError(
            f"{name}: torch {torch.__version__} cuts --seq-len {args.seq_len} over {split.tp} "
            f"processes only if it can do so evenly"
        )


def memory_needed(model: Llama, split: Split, args: argparse.Namespace) -> tuple[int, int]:
    """Bytes that a strategy keeps on a rank, and those that it needs besides while it computes."""
    share = args.batch // (split.replicate * split.shard)
    tokens = args.microbatch * args.seq_len
    fused = split.compile or torch.cuda.is_available()
    held = memory(model, split, tokens, share // args.microbatch, fused)
    keeps = held["parameters"] + held["optimizer"]
    return keeps, held["peak"] - keeps


def those_that_fit(
    needs: dict[str, tuple[int, int]], room: int
) -> tuple[list[str], dict[str, str]]:
    """Of strategies that keep and need so many bytes those that have room together, in this order,
    and why each other has not. All keep what they keep; one at a time computes."""
    chosen, too_large, kept, most = [], {}, 0, 0
    for name, (keeps, computes) in needs.items():
        if kept + keeps + max(most, computes) <= room:
            chosen.append(name)
            kept, most = kept + keeps, max(most, computes)
        else:
            too_large[name] = (
                f"it takes {(keeps + computes) / 1e9:.3g} GB, those before it keep "
                f"{kept / 1e9:.3g}, and a process has {room / 1e9:.3g}"
            )
    return chosen, too_large


def split_of(name: str, base: World) -> Split:
    """The split of one of STRATEGIES. `wrong` is HSDP in a mesh whose shards lie across nodes and
    whose replicas within."""
    size, node = base.size, base.per_node
    if name == "one":
        return Split()
    if name in ("hsdp", "wrong"):
        return Split(dp="hsdp", replicate=size // node, shard=node)
    if name.startswith("fsdp"):
        reshard = name.removeprefix("fsdp-") if "-" in name else "weights"
        return Split(dp="fsdp", shard=size, reshard=reshard)
    if name == "tp":
        return Split(tp=size)
    checkpointing = name if name in ("selective", "full") else "none"
    return Split(replicate=size, checkpointing=checkpointing, compile=name == "compiled")


def lay_out(name: str, base: World) -> World:
    """The world of one of STRATEGIES."""
    split, names = split_of(name, base), base.mesh.mesh_dim_names
    if name == "one":
        ranks = torch.zeros(1, 1, 1, dtype=torch.int)
        mesh = DeviceMesh(base.device.type, ranks, mesh_dim_names=names)
        return replace(base, size=1, split=split, mesh=mesh, group=dist.new_group([0]))
    if name == "wrong":  # neighbours are replicas, and shards are gathered from all nodes
        ranks = torch.arange(base.size).view(split.shard, split.replicate, 1).transpose(0, 1)
        mesh = DeviceMesh(base.device.type, ranks, mesh_dim_names=names)
        return replace(base, split=split, mesh=mesh)
    return arrange(base, split)


# -------------------------------------------------------------------------------------- the steps


def split_step(
    config: LlamaConfig, args: argparse.Namespace, world: World, lora: LoRA | None
) -> Callable:
    """A step on this rank's rows of a batch that is one and the same for all strategies."""
    same = torch.Generator().manual_seed(0)
    tokens = torch.randint(config.vocab_size, (args.batch, args.seq_len + 1), generator=same)
    mine = tokens.chunk(world.data_size)[world.data_rank].to(world.device)
    batch = Batch(mine[:, :-1], mine[:, 1:].contiguous(), None, text_bytes=1)
    return step_of(config, batch, args.microbatch, world, lora)


def try_out(step: Callable, world: World) -> Cost:
    """The first steps of a strategy, and what is counted in them."""
    loss = step().mean_loss
    step()  # DDP settles its buckets in the first two
    if world.split.compile:  # nothing is counted: what a mode sees first is never compiled
        return Cost(loss)
    with Live() as live:
        step()  # which shows it all that stays: AdamW's moments come last, and count at any peak
        with Counted(world) as counted:
            step()
    sent = {key: sums for key, sums in counted.sent.items() if key[0] != "nobody"}
    return Cost(loss, sent, live.peak)


def with_highest_peaks(costs: dict[str, Cost], base: World) -> dict[str, Cost]:
    """The same with the memory of the rank that needs most: slices differ by what is rounded."""
    peaks = base.gather([cost.peak or 0 for cost in costs.values()]).amax(0).tolist()
    return {
        name: cost if cost.peak is None else replace(cost, peak=round(peak))
        for (name, cost), peak in zip(costs.items(), peaks)
    }


# ------------------------------------------------------------------------------------ the results


def report(
    args: argparse.Namespace, seconds: dict[str, list[float]], costs: dict[str, Cost]
) -> str:
    """A table, whether the losses agree, and what is sent in detail."""
    columns = {
        "peak memory": [megabytes(cost.peak) for cost in costs.values()],
        "sends": [total_sent(cost) for cost in costs.values()],
        "loss": [f"{cost.loss:.5f}" for cost in costs.values()],
    }
    details = [
        f"{name} sends {'(not counted)' if cost.sent is None else describe(cost.sent) or 'nothing'}"
        for name, cost in costs.items()
        if name != "one"
    ]
    rows = table(seconds, args.batch * args.seq_len, columns)
    return "\n".join([rows, "", agreement(costs), *details])


def bytes_sent(cost: Cost) -> int | None:
    return None if cost.sent is None else sum(nbytes for _, nbytes in cost.sent.values())


def total_sent(cost: Cost) -> str:
    if not cost.sent:
        return "-" if cost.sent is None else "nothing"
    return f"{megabytes(bytes_sent(cost))}, {sum(n for n, _ in cost.sent.values())} calls"


def agreement(costs: dict[str, Cost]) -> str:
    """Whether strategies that began with the same weights saw the same loss, as they must: in
    float32 they differ by what the order of summing rounds."""
    (first, reference), *_ = costs.items()
    off = {name: abs(cost.loss / reference.loss - 1) for name, cost in costs.items()}
    if wrong := [name for name, deviation in off.items() if deviation > 1e-4]:
        losses = ", ".join(f"{name} {costs[name].loss:.5f}" for name in wrong)
        return f"losses of the first step DO NOT AGREE: {losses}, but {first} {reference.loss:.5f}"
    return f"losses of the first step agree to {max(off.values()):.0e}"


def record(
    args: argparse.Namespace,
    base: World,
    seconds: dict[str, list[float]],
    costs: dict[str, Cost],
) -> dict:
    """All that was measured, for --json."""
    on_gpu = base.device.type == "cuda"
    strategies = {}
    for name, cost in costs.items():
        sends = cost.sent and {" ".join(key): list(sums) for key, sums in cost.sent.items()}
        strategies[name] = {
            "seconds": seconds[name],
            "tokens_per_second": args.batch * args.seq_len / statistics.median(seconds[name]),
            "ratio": statistics.median(ratios(seconds, name)),
            "peak_bytes": cost.peak,
            "sends": sends,
            "loss": cost.loss,
        }
    return {
        "model": args.model,
        "batch": args.batch,
        "microbatch": args.microbatch,
        "seq_len": args.seq_len,
        "ranks": base.size,
        "per_node": base.per_node,
        "device": torch.cuda.get_device_name() if on_gpu else "cpu",
        "torch": torch.__version__,
        "date": datetime.now().astimezone().isoformat(timespec="seconds"),
        "lora": args.lora,
        "strategies": strategies,
    }


def plot(args: argparse.Namespace, seconds: dict[str, list[float]], costs: dict[str, Cost]) -> None:
    """A bar of tokens/s for each strategy with its quartiles, and beside it the bytes it sends."""
    from matplotlib.figure import Figure

    tokens = args.batch * args.seq_len
    speeds = [quartiles([tokens / time for time in times]) for times in seconds.values()]
    middle = [median for _, median, _ in speeds]
    below, above = zip(*((median - low, high - median) for low, median, high in speeds))
    figure = Figure(figsize=(7, 1 + 0.4 * len(seconds)), layout="constrained")
    axes = figure.subplots()
    bars = axes.barh(
        list(seconds), middle, xerr=(below, above), color="#7a9cc6", ecolor="#444", capsize=3
    )
    axes.bar_label(bars, [total_sent(cost) for cost in costs.values()], padding=5, fontsize=8)
    axes.invert_yaxis()  # the first on top, as in the table
    axes.margins(x=0.25)  # room for the labels
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_xlabel("tokens/s, with quartiles; beside it what a rank sends a step")
    axes.set_title(f"{args.model}, {args.batch} x {args.seq_len} tokens a step")
    figure.savefig(args.plot, dpi=150)
