"""`bench.py step`: measure where the time of a training step goes, and which flag would shorten it.

    torchrun --nproc-per-node 2 bench.py step --model small --dp fsdp     and train.py's other flags
    torchrun --nproc-per-node 2 bench.py step --lora --init out/tiny      and finetune_lora.py's

It trains as the script would, but writes no files. Four variants of a step are measured:

    plain       train.py's step                                  its time, and the wait for data
    marked      the same with time stamps                        the optimizer's time
    silenced    forward and backward, while collectives over     the time of computation, and of
                some mesh dimensions return at once              communication that it does not hide
    counted     one step under counters                          payload, memory, forward runs of
                                                                 attention, graph breaks

Collectives run beside computation, so time stamps around them would say little. What matters is
how much sooner a step ends without them: their exposed time. The mesh dimensions are silenced one
after the other, beginning with the one whose ranks are farthest apart. What each saves is its
exposed time; what is left when all are silent is computation. So the parts add up to the step. A
negative part is noise. What ZeRO-1 and Muon all-gather counts as the optimizer's time.

With a pipeline, ranks wait for other stages, which is its bubble. It is told in three shares of the
time of forward and backward:

    by the schedule alone      if all stages take equally long, and messages no time
    with measured times        if messages take no time: more than the first, as stages are uneven
    measured                   more than the second, as messages take time

The last lines say which parts take long, and which flags would shorten them (perf/verdict.py).
"""

import contextlib
import itertools
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from config import DIMS, Work
from costs.machines import peak_flops
from costs.page import holds
from costs.search import usable_memory
from costs.shapes import flops_per_token
from parallel import World
from perf.instruments import (
    Counted,
    Live,
    markdown_table,
    megabytes,
    quartiles,
    silenced,
    state_bytes,
    state_tensors,
    traffic_in_words,
    write_json,
)
from perf.verdict import EXPOSED, Facts, alternatives, percent, verdict
from plumbing.processes import print_rank_zero, with_progress
from runs.changed import prediction_note
from runs.setup import Job
from techniques import schedules
from techniques.pipeline import Pipeline
from techniques.recompute import is_attention
from techniques.schedules import Action
from text.batch import Batch
from train import accumulate, train_step, update, zero_gradients

Rounds = dict[str, list[dict[str, float]]]  # variant -> in each round, part of a step -> seconds
WARM_UP_STEPS = 3  # DDP makes its final buckets, AdamW its moments; blocks are compiled


@dataclass(frozen=True)
class Training:
    """A training as train.py sets it up."""

    world: World
    job: Job
    runner: nn.Module  # what `build` returned
    optimizer: torch.optim.Optimizer
    batches: Iterator[Batch]  # this rank's sequences of each step
    work: Work
    clip: float

    @property
    def dims(self) -> list[str]:
        """Dimensions with more than one rank; ranks along the first are farthest apart."""
        return [dim for dim in DIMS if getattr(self.world.parallel, dim) > 1]


def measure_step(training: Training, repeats: int, json_file: Path | None) -> str:
    """Return tables and the verdict; write figures to --json. All ranks call it together."""
    print_rank_zero(f"{WARM_UP_STEPS} steps to warm up", file=sys.stderr)
    for _ in range(WARM_UP_STEPS):
        plain_step(training, next(training.batches))
    memory, counted = count_step(training)
    attentions = counted.attentions if counted else profile_attention(training)
    rounds = time_variants(training, repeats)
    text, figures = report(training, rounds, memory, counted, attentions)
    write_json(json_file, figures)
    return text


# ------------------------------------------------------------------------------------- time stamps


class TimeStamps:
    """Time stamps at the beginning and the end of parts of a step, read when the step is over.

    On a GPU a stamp is an event that the GPU records when it gets there: nothing waits for it."""

    def __init__(self, device: torch.device):
        self.on_gpu = device.type == "cuda"
        self.open = {}  # part -> stamp of its beginning
        self.closed = defaultdict(list)  # part -> pairs of stamps

    def stamp(self) -> float | torch.cuda.Event:
        if not self.on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def begin(self, part: str) -> None:
        self.open[part] = self.stamp()

    def end(self, part: str) -> None:
        self.closed[part].append((self.open.pop(part), self.stamp()))

    @contextlib.contextmanager
    def of(self, part: str | Action) -> Iterator[None]:
        """Stamp what runs within the context."""
        self.begin(part)
        try:
            yield
        finally:
            self.end(part)

    def between(self, a: float | torch.cuda.Event, b: float | torch.cuda.Event) -> float:
        """Return the seconds from stamp a to stamp b. On a GPU, synchronize before."""
        return a.elapsed_time(b) / 1e3 if self.on_gpu else b - a

    def seconds(self) -> dict[str | Action, float]:
        """Return the total seconds of each part, and of each action of a pipeline."""
        seconds = {}
        for part, pairs in self.closed.items():
            seconds[part] = sum(self.between(begin, end) for begin, end in pairs)
        return seconds


@contextlib.contextmanager
def time_stamped(training: Training) -> Iterator[TimeStamps]:
    """Record time stamps of forward, recompute, optimizer, and the actions of a pipeline, in the
    steps within the context."""
    stamps, optimizer = TimeStamps(training.world.device), training.optimizer
    hooks = [
        optimizer.register_step_pre_hook(lambda *_: stamps.begin("optimizer")),
        optimizer.register_step_post_hook(lambda *_: stamps.end("optimizer")),
    ]

    def stamped_forward(forward: Callable, *args, **kwargs):
        recomputes = "forward" not in stamps.open
        # An exception ends a recomputation, as soon as checkpoint has enough.
        with stamps.of("recompute") if recomputes else contextlib.nullcontext():
            return forward(*args, **kwargs)

    def stamped_compute(action: Action, *given):
        with stamps.of(action):  # what it waits for has arrived
            return Pipeline.compute(runner, action, *given)

    runner = training.runner
    for stage in runner.stages.values() if isinstance(runner, Pipeline) else [runner]:
        # prepend: before FSDP's own hook, which all-gathers weights
        begin = stage.register_forward_pre_hook(lambda *_: stamps.begin("forward"), prepend=True)
        hooks += [begin, stage.register_forward_hook(lambda *_: stamps.end("forward"))]
    with contextlib.ExitStack() as undo:
        for hook in hooks:
            undo.callback(hook.remove)
        for block in training.job.model.layers.values():
            # Blocks that parallel.recompute has wrapped; a compiled block cannot be stamped within.
            if getattr(forward := block.forward, "func", None) is checkpoint:
                stamped = partial(stamped_forward, *forward.args)
                block.forward = partial(checkpoint, stamped, **forward.keywords)
                undo.callback(setattr, block, "forward", forward)
        if isinstance(runner, Pipeline):
            runner.compute = stamped_compute
            undo.callback(delattr, runner, "compute")  # the attribute, which hides the method
        yield stamps


# ---------------------------------------------------------------------------------- timed variants


def plain_step(training: Training, batch: Batch) -> None:
    """Run train.py's step."""
    runner, optimizer, world = training.runner, training.optimizer, training.world
    train_step(runner, optimizer, batch, training.work.microbatch, training.clip, world, step=1)


def marked_step(training: Training, silent: list[str], batch: Batch) -> TimeStamps:
    """Run the same step with time stamps: `pass` is forward and backward, including the
    communication of gradients. Without collectives over the dimensions `silent`, if there are any,
    gradients are garbage: then discard them in place of the update."""
    world, optimizer = training.world, training.optimizer
    with time_stamped(training) as stamps:
        with silenced(training.runner, world, silent), stamps.of("pass"):
            loss = accumulate(training.runner, batch, training.work.microbatch, world)
        if silent:
            zero_gradients(optimizer, world)
        else:
            update(optimizer, loss, batch, training.clip, world, step=1)
    return stamps


def time_variants(training: Training, repeats: int) -> Rounds:
    """Run each variant once in each of `repeats` rounds, after one that warms up. The last variant
    silences all dimensions.

    The parts are those with time stamps, `data` (waiting for a batch) and `step` (everything).
    `plain` comes after another whole step, during which its batch is read ahead, as in training."""
    marked = partial(marked_step, training)
    variants = {"marked": partial(marked, []), "plain": partial(plain_step, training)}
    for n in range(1, len(training.dims) + 1):
        silent = training.dims[:n]
        variants[f"without {' '.join(silent)}"] = partial(marked, silent)
    rounds = {name: [] for name in variants}
    for _ in with_progress(range(repeats + 1), "rounds"):
        for name, variant in variants.items():
            dist.barrier()  # a rank that still runs the previous variant would disturb
            start = time.perf_counter()
            batch = next(training.batches)
            data = time.perf_counter() - start
            stamps = variant(batch)
            if training.world.device.type == "cuda":
                torch.cuda.synchronize()
            seconds = {"data": data, "step": time.perf_counter() - start}
            rounds[name].append(seconds | (stamps.seconds() if stamps else {}))
    return {name: of_rounds[1:] for name, of_rounds in rounds.items()}


def median(rounds: Rounds, variant: str, part: str) -> float:
    return statistics.median(seconds.get(part, 0.0) for seconds in rounds[variant])


def parts_of_step(rounds: Rounds, dims: list[str]) -> dict[str, float]:
    """Divide the median plain step of a rank into parts. Return part -> seconds.

    Forward, backward and recompute are those with all dimensions silenced. Exposed communication is
    what silencing one more of `dims` saves, and `other` the rest of the plain step."""
    variants = [name for name in rounds if name != "plain"]  # each silences one more dimension
    passes = [median(rounds, name, "pass") for name in variants]
    forward, recompute = (median(rounds, variants[-1], part) for part in ("forward", "recompute"))
    parts = {"forward": forward, "backward": passes[-1] - forward - recompute}
    if recompute:
        parts["recompute"] = recompute
    for dim, (before, after) in zip(dims, itertools.pairwise(passes)):
        parts[EXPOSED + dim] = before - after
    parts["optimizer"] = median(rounds, "marked", "optimizer")
    parts["data"] = median(rounds, "plain", "data")
    parts["other"] = median(rounds, "plain", "step") - sum(parts.values())
    return parts


# ---------------------------------------------------------------------------------------- counting


def count_step(training: Training) -> tuple[dict[str, int | None], Counted | None]:
    """Run one step under counters. Return kind of memory -> bytes, and the counted collectives.

    The bytes are those of the rank that holds most. None stands for unknown: under counters
    compiled blocks would run uncompiled."""
    world, optimizer = training.world, training.optimizer
    on_gpu = world.device.type == "cuda"
    batch, counted, live = next(training.batches), None, None
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    with contextlib.ExitStack() as counters:
        if not world.parallel.compile:
            held = tree_leaves(state_tensors(training.job.model, optimizer))
            counted, live = map(counters.enter_context, (Counted(world), Live(held)))
        loss = accumulate(training.runner, batch, training.work.microbatch, world)
        state = state_bytes(training.job.model, optimizer)
    peak = torch.cuda.max_memory_allocated() if on_gpu else live.peak if live else 0
    hooks = []
    if counted:  # what the optimizer sends counts, but not the scalars that an update all-gathers
        stack = contextlib.ExitStack()
        hooks = [
            optimizer.register_step_pre_hook(lambda *_: stack.enter_context(counted) and None),
            optimizer.register_step_post_hook(lambda *_: stack.close()),
        ]
    update(optimizer, loss, batch, training.clip, world, step=1)
    for hook in hooks:
        hook.remove()

    *state_maxima, peak = world.all_gather_scalars([*state.values(), peak]).amax(0).tolist()
    memory = dict(zip(state, map(round, state_maxima)))
    # With --offload the state is in CPU memory, and the peak is the GPU's.
    apart = world.parallel.offload and on_gpu
    rest = round(peak) - sum(memory.values()) if peak and not apart else None
    return memory | {"activations and the rest": rest, "peak": round(peak) or None}, counted


def profile_attention(training: Training) -> int:
    """Return how often attention runs forward in a step with compiled blocks.

    Use when blocks are compiled, into which the profiler can see. Avoid otherwise: it also counts
    the calls that selective checkpointing replaces by a saved result."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        plain_step(training, next(training.batches))
    counts = {event.key: event.count for event in profile.key_averages()}
    of_chunks = counts.get("flatllama::scaled_dot_product_lower_right")  # which runs kernels, too
    kernels = [name for name in counts if "::_" in name and is_attention(name)]
    return of_chunks or sum(counts[name] for name in kernels)  # not what chooses a kernel


# ------------------------------------------------------------------------------------------ report


def report(
    training: Training,
    rounds: Rounds,
    memory: dict[str, int | None],
    counted: Counted | None,
    attentions: int,
) -> tuple[str, dict]:
    """Return all results in Markdown, and the figures for --json."""
    world, work = training.world, training.work
    parallel, microbatches, on_gpu = work.parallel, work.microbatches, work.on_gpu
    parts = parts_of_step(rounds, training.dims)
    parts = dict(zip(parts, world.all_gather_scalars(list(parts.values())).mean(0).tolist()))
    step_quartiles = quartiles([seconds["step"] for seconds in rounds["plain"]])
    lower, step, upper = world.all_gather_scalars(step_quartiles).mean(0).tolist()
    speed = work.batch * work.seq_len / step
    flops = flops_per_token(work.model, work.seq_len)
    peak = peak_flops(torch.cuda.get_device_name()) if on_gpu else None
    mfu = peak and flops * speed / (peak * world.size)
    chunks = 2 if parallel.cp > 1 else 1  # for each of which attention runs
    compiler = torch._dynamo.utils.counters
    facts = Facts(
        shares={part: seconds / step for part, seconds in parts.items()},
        work=work,
        per_node=world.per_node,
        usable_memory=usable_memory(world.device, world.per_node),
        peaks={
            name: holds(replace(work, parallel=other))["peak"]
            for name, other in alternatives(parallel, world.per_node).items()
        },
        attentions=attentions / (len(training.job.model.layers) * microbatches * chunks),
        graph_breaks=sum(compiler["graph_break"].values()),
        mfu=mfu,
        device=world.device,
    )
    memory = memory | {"predicted peak": facts.peaks["this"]}
    # How much longer a marked step takes than a plain one. On a shared machine two steps may differ
    # by more for other reasons.
    marked, plain = ([s["step"] - s["data"] for s in rounds[name]] for name in ("marked", "plain"))
    overheads = quartiles([100 * (m / p - 1) for m, p in zip(marked, plain)])
    graphs = compiler["stats"]["unique_graphs"]
    table = [
        [part, f"{seconds:.4f}", f"{100 * seconds / step:.1f} %"]
        for part, seconds in [*parts.items(), ("the step", step)]
    ]
    held = [[kind, megabytes(nbytes)] for kind, nbytes in memory.items()]
    lines = [
        f"{speed:,.0f} tokens/s, {step:.4g} s a step (quartiles {lower:.4g}-{upper:.4g} s), "
        f"MFU {'unknown' if mfu is None else percent(mfu)}",
        "",
        *markdown_table(["part", "seconds", "share"], table),
    ]
    if parallel.checkpointing != "none" and "recompute" not in parts:
        lines.append("recompute is compiled into backward")
    lines += [
        "time stamps cost {1:.1f} % of a step (quartiles {0:.1f} to {2:.1f} %)".format(*overheads),
        "",
        *markdown_table(["held on a rank", "bytes"], held),
        "",
        f"counted: per step, {'each rank' if parallel.pp == 1 else 'rank 0'} sends "
        f"{traffic_in_words(counted and counted.sent, parallel)}",
        *filter(None, [prediction_note()]),
        f"attention runs forward {facts.attentions:g} time(s) a layer and microbatch",
        *([describe_bubble(world, microbatches, rounds)] if parallel.pp > 1 else []),
        f"{graphs} graph(s) compiled, {facts.graph_breaks} graph break(s)"
        if parallel.compile
        else "blocks are not compiled",
        "",
    ]
    if min(facts.shares.values()) < -0.05:
        lines.append("these times are too noisy: use a quieter machine or more --repeats")
    figures = {
        "tokens_per_second": speed,
        "seconds": [lower, step, upper],
        "mfu": mfu,
        "parts": parts,
    } | {f"{kind.replace(' ', '_')}_bytes": nbytes for kind, nbytes in memory.items()}
    return "\n".join(lines + [f"- {sentence}" for sentence in verdict(facts)]), figures


# ---------------------------------------------------------------------------------- the bubble


def describe_bubble(world: World, microbatches: int, rounds: Rounds) -> str:
    """Return the three shares of the bubble in words. All ranks call it together."""
    parallel, times = world.parallel, defaultdict(list)
    for seconds in rounds["marked"]:
        for part, time_of_action in seconds.items():
            if isinstance(part, Action):
                times[part.kind, part.stage].append(time_of_action)
    own = {key: statistics.median(values) for key, values in times.items()}
    of_ranks = [None] * parallel.pp
    dist.all_gather_object(of_ranks, own, world.mesh.get_group("pp"))
    typical = {key: s for of_rank in of_ranks for key, s in of_rank.items()}
    shape = parallel.pp, microbatches, parallel.stages_per_rank
    schedule = schedules.make_schedule(parallel.schedule, *shape)
    even = schedules.check_schedule(schedule, microbatches, parallel.pp * parallel.stages_per_rank)
    timed = schedules.simulate(schedule, lambda action: typical[action.kind, action.stage])
    own_share = 1 - median(rounds, "without pp", "pass") / median(rounds, "marked", "pass")
    measured = world.all_gather_scalars([own_share]).mean().item()
    return (
        f"of forward and backward, ranks wait for other stages {schedules.bubble(even):.1%} by the "
        f"schedule alone, {schedules.bubble(timed):.1%} with the measured time of each stage, "
        f"{measured:.1%} measured"
    )
