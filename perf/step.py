"""`bench.py step`: measure where the time of a training step goes, and which flag would shorten it.

    torchrun --nproc-per-node 2 bench.py step --model small --dp fsdp     and train.py's other flags
    torchrun --nproc-per-node 2 bench.py step-lora --init out/tiny        and finetune_lora.py's

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

The last lines say which parts take long, and which flags would shorten them (perf/verdict.py).
"""

import argparse
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

import finetune_lora
from costs.machines import peak_flops
from costs.memory import predict_memory, prediction_caveat
from costs.search import usable_memory
from costs.traffic import DIMS, describe_traffic, flops_per_token
from costs.work import Work
from data import read_ahead
from model import Llama
from parallel import World
from perf.bubble import actions_stamped, draw, shares_of_bubble
from perf.instruments import (
    Counted,
    Live,
    count_rounds,
    markdown_table,
    megabytes,
    problem_with_files,
    quartiles,
    silenced,
    state_bytes,
    state_tensors,
)
from perf.verdict import EXPOSED, Facts, alternatives, percent, verdict
from plumbing.processes import Process, UserError, print_rank_zero
from runs.setup import Job, build, setup
from techniques.float8 import has_kernel
from techniques.pipeline import Pipeline
from techniques.recompute import is_attention
from techniques.schedules import Action, Span
from text.batch import Batch
from train import (
    accumulate,
    learning_rate,
    local_batch,
    make_optimizer,
    prepare,
    train_step,
    update,
    zero_gradients,
)

Rounds = dict[str, list[dict[str, float]]]  # variant -> in each round, part of a step -> seconds
WARM_UP_STEPS = 3  # DDP makes its final buckets, AdamW its moments; blocks are compiled


@dataclass(frozen=True)
class Training:
    """A training as train.py sets it up."""

    args: argparse.Namespace
    world: World
    model: Llama
    runner: nn.Module  # what parallelize returned
    optimizer: torch.optim.Optimizer
    batches: Iterator[Batch]
    work: Work | None = None  # for predictions

    @property
    def microbatches(self) -> int:
        return self.args.batch // self.world.data_size // self.args.microbatch

    @property
    def stages(self) -> list[nn.Module]:
        """The modules whose forward a step calls."""
        is_pipeline = isinstance(self.runner, Pipeline)
        return list(self.runner.stages.values()) if is_pipeline else [self.runner]

    @property
    def dims(self) -> list[str]:
        """Dimensions with more than one rank; ranks along the first are farthest apart."""
        return [dim for dim in DIMS if getattr(self.world.parallel, dim) > 1]


def measure_lora_step(args: argparse.Namespace) -> str:
    """Return the output of `bench.py step-lora`."""
    return measure_step(
        finetune_lora.complete(args), lambda *given: finetune_lora.prepare(*given)[0]
    )


def measure_step(
    args: argparse.Namespace, prepare: Callable[[argparse.Namespace, Process], Job] = prepare
) -> str:
    """Return the output of `bench.py step`: tables and the verdict. `prepare` is the script's."""
    # Nothing is written, so OUT may be another run's directory, which --resume accepts.
    args.out, args.resume = args.out or Path("out"), True
    if args.plot and args.pp == 1:
        raise UserError("--plot draws a pipeline: give --pp 2 or more, or leave it out")
    if problem := problem_with_files({"--plot": args.plot}):
        raise UserError(problem)
    process = setup(args)
    # A silenced collective leaves its output uninitialized: often denormal floats, with which a CPU
    # computes slowly. Threads inherit this setting, so it comes before they are started.
    torch.set_flush_denormal(True)
    job = prepare(args, process)
    world, runner, work = build(args, job, process)
    # The learning rate of step 1 throughout, so that the loss stays finite.
    lr = learning_rate(1, args)
    optimizer = make_optimizer(job.model, args)
    for group in optimizer.param_groups:
        group["lr"] = lr
    read = partial(local_batch, args, world, job.train_set)
    with contextlib.closing(read_ahead(read, itertools.count(1), world.device)) as batches:
        training = Training(args, world, job.model, runner, optimizer, batches, work)
        print_rank_zero(f"{WARM_UP_STEPS} steps to warm up", file=sys.stderr)
        for _ in range(WARM_UP_STEPS):
            plain_step(training, next(batches))
        memory, counted = count_step(training)
        attentions = counted.attentions if counted else profile_attention(training)
        rounds = time_variants(training)
        if args.plot and args.pp > 1:
            batch = next(batches)
            dist.barrier()  # the spans of all ranks begin now
            draw(args, world, marked_step(training, batch).spans())
    return report(training, rounds, memory, counted, attentions)


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

    def between(self, a: float | torch.cuda.Event, b: float | torch.cuda.Event) -> float:
        """Return the seconds from stamp a to stamp b. On a GPU, synchronize before."""
        return a.elapsed_time(b) / 1e3 if self.on_gpu else b - a

    def seconds(self) -> dict[str | Action, float]:
        """Return the total seconds of each part, and of each action of a pipeline."""
        return {part: sum(self.between(*pair) for pair in pairs)
                for part, pairs in self.closed.items()}  # fmt: skip

    def spans(self) -> list[Span]:
        """Return when each action of a pipeline was computed, since the pass began."""
        ((start, _),) = self.closed["pass"]
        return [Span(part, self.between(start, a), self.between(start, b))
                for part, pairs in self.closed.items() if isinstance(part, Action)
                for a, b in pairs]  # fmt: skip


@contextlib.contextmanager
def time_stamped(training: Training) -> Iterator[TimeStamps]:
    """Record time stamps of forward, recompute and optimizer in the steps within the context."""
    stamps = TimeStamps(training.world.device)
    runner, optimizer = training.runner, training.optimizer
    hooks = [
        optimizer.register_step_pre_hook(lambda *_: stamps.begin("optimizer")),
        optimizer.register_step_post_hook(lambda *_: stamps.end("optimizer")),
    ]
    for stage in training.stages:
        # prepend: before FSDP's own hook, which all-gathers weights
        begin = stage.register_forward_pre_hook(lambda *_: stamps.begin("forward"), prepend=True)
        hooks += [begin, stage.register_forward_hook(lambda *_: stamps.end("forward"))]
    # Blocks that parallel.recompute has wrapped; within a compiled block it cannot be stamped.
    blocks = training.model.layers.values()
    originals = {b: b.forward for b in blocks if getattr(b.forward, "func", None) is checkpoint}
    for block, forward in originals.items():
        (inner,) = forward.args
        block.forward = partial(checkpoint, stamp_recompute(inner, stamps), **forward.keywords)
    is_pipeline = isinstance(runner, Pipeline)
    actions = actions_stamped(runner, stamps.begin, stamps.end)
    try:
        with actions if is_pipeline else contextlib.nullcontext():
            yield stamps
    finally:
        for block, forward in originals.items():
            block.forward = forward
        for hook in hooks:
            hook.remove()


def stamp_recompute(forward: Callable, stamps: TimeStamps) -> Callable:
    """Return a checkpointed forward that stamps its runs in backward."""

    def stamped_forward(*args, **kwargs):
        if "forward" in stamps.open:
            return forward(*args, **kwargs)
        stamps.begin("recompute")
        try:
            return forward(*args, **kwargs)
        finally:  # checkpoint ends a recomputation by an exception, as soon as it has enough
            stamps.end("recompute")

    return stamped_forward


# ---------------------------------------------------------------------------------- timed variants


def plain_step(training: Training, batch: Batch) -> None:
    """Run train.py's step."""
    args, world = training.args, training.world
    train_step(
        training.runner, training.optimizer, batch, args.microbatch, args.clip, world, step=1
    )


def marked_step(training: Training, batch: Batch) -> TimeStamps:
    """Run the same step with time stamps."""
    with time_stamped(training) as stamps:
        loss = forward_and_backward(training, batch, stamps)
        update(training.optimizer, loss, batch, training.args.clip, training.world, step=1)
    return stamps


def silenced_pass(training: Training, dims: list[str], batch: Batch) -> TimeStamps:
    """Run forward and backward with time stamps, without collectives over `dims`, and discard the
    gradients."""
    with time_stamped(training) as stamps, silenced(training.runner, training.world, dims):
        forward_and_backward(training, batch, stamps)
    zero_gradients(training.optimizer, training.world)
    return stamps


def forward_and_backward(training: Training, batch: Batch, stamps: TimeStamps) -> torch.Tensor:
    """Stamp one `pass`, including the communication of gradients. Return the sum of the losses."""
    stamps.begin("pass")
    loss = accumulate(training.runner, batch, training.args.microbatch, training.world)
    stamps.end("pass")
    return loss


def time_variants(training: Training) -> Rounds:
    """Run each variant once in each of --repeats rounds; the last silences all dimensions.

    The parts are those with time stamps, `data` (waiting for a batch) and `step` (everything).
    `plain` comes after another whole step, during which its batch is read ahead, as in training."""
    variants = {"marked": partial(marked_step, training), "plain": partial(plain_step, training)}
    for n in range(1, len(training.dims) + 1):
        dims = training.dims[:n]
        variants[f"without {' '.join(dims)}"] = partial(silenced_pass, training, dims)
    rounds = {name: [] for name in variants}
    for round_number in count_rounds(training.args.repeats):
        for name, variant in variants.items():
            dist.barrier()  # a rank that still runs the previous variant would disturb
            start = time.perf_counter()
            batch = next(training.batches)
            data = time.perf_counter() - start
            stamps = variant(batch)
            if training.world.device.type == "cuda":
                torch.cuda.synchronize()
            seconds = {"data": data, "step": time.perf_counter() - start}
            if round_number > 0:  # round 0 is for warming up
                rounds[name].append(seconds | (stamps.seconds() if stamps else {}))
    return rounds


def parts_of_step(rounds: Rounds, dims: list[str]) -> dict[str, float]:
    """Divide the median plain step of a rank into parts. Return part -> seconds.

    Forward, backward and recompute are those with all dimensions silenced. Exposed communication is
    what silencing one more of `dims` saves, and `other` the rest of the plain step."""

    def median(variant: str, part: str) -> float:
        return statistics.median(seconds.get(part, 0.0) for seconds in rounds[variant])

    variants = [name for name in rounds if name != "plain"]  # each silences one more dimension
    passes = [median(name, "pass") for name in variants]
    all_silent = variants[-1]
    parts = {"forward": median(all_silent, "forward"), "backward": passes[-1]}
    if "recompute" in rounds[all_silent][0]:
        parts["recompute"] = median(all_silent, "recompute")
    parts["backward"] -= parts["forward"] + parts.get("recompute", 0.0)
    for dim, (before, after) in zip(dims, itertools.pairwise(passes)):
        parts[EXPOSED + dim] = before - after
    parts["optimizer"] = median("marked", "optimizer")
    parts["data"] = median("plain", "data")
    parts["other"] = median("plain", "step") - sum(parts.values())
    return parts


# ---------------------------------------------------------------------------------------- counting


def count_step(training: Training) -> tuple[dict[str, int | None], Counted | None]:
    """Run one step under counters. Return kind of memory -> bytes, and the counted collectives.

    The bytes are those of the rank that holds most. None stands for unknown: under counters
    compiled blocks would run uncompiled."""
    args, world, optimizer = training.args, training.world, training.optimizer
    on_gpu = world.device.type == "cuda"
    counted = live = None
    batch = next(training.batches)
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    with contextlib.ExitStack() as counters:
        if not world.parallel.compile:
            counted = counters.enter_context(Counted(world))
            tensors = tree_leaves(state_tensors(training.model, optimizer))
            live = counters.enter_context(Live(tensors))
        loss = accumulate(training.runner, batch, args.microbatch, world)
        state = state_bytes(training.model, optimizer)
    peak = torch.cuda.max_memory_allocated() if on_gpu else live.peak if live else 0
    hooks = []
    if counted:  # what the optimizer sends counts, but not the scalars that an update all-gathers
        stack = contextlib.ExitStack()
        hooks = [
            optimizer.register_step_pre_hook(lambda *_: stack.enter_context(counted) and None),
            optimizer.register_step_post_hook(lambda *_: stack.close()),
        ]
    update(optimizer, loss, batch, args.clip, world, step=1)
    for hook in hooks:
        hook.remove()

    *state_maxima, peak = world.all_gather_scalars([*state.values(), peak]).amax(0).tolist()
    memory = dict(zip(state, map(round, state_maxima)))
    peak = round(peak) or None
    # With --offload the state is in CPU memory, and the peak is the GPU's.
    known = peak is not None and not (world.parallel.offload and on_gpu)
    rest = peak - sum(memory.values()) if known else None
    return memory | {"activations and the rest": rest, "peak": peak}, counted


def profile_attention(training: Training) -> int:
    """Return how often attention runs forward in a step with compiled blocks.

    Use when blocks are compiled, into which the profiler can see. Avoid otherwise: it also counts
    the calls that selective checkpointing replaces by a saved result."""
    batch = next(training.batches)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        plain_step(training, batch)
    counts = {event.key: event.count for event in profile.key_averages()}
    of_chunks = counts.get("flatllama::scaled_dot_product_lower_right")  # which runs kernels, too
    return of_chunks or sum(
        count
        for operator, count in counts.items()
        if "::_" in operator and is_attention(operator)  # a kernel, not what chooses it
    )


# ------------------------------------------------------------------------------------------ report


def report(
    training: Training,
    rounds: Rounds,
    memory: dict[str, int | None],
    counted: Counted | None,
    attentions: int,
) -> str:
    """Return all results in Markdown. Every rank must call it, since times are averaged."""
    args, world, parallel = training.args, training.world, training.world.parallel
    on_gpu = world.device.type == "cuda"
    parts = parts_of_step(rounds, training.dims)
    parts = dict(zip(parts, world.all_gather_scalars(list(parts.values())).mean(0).tolist()))
    step_quartiles = quartiles([seconds["step"] for seconds in rounds["plain"]])
    lower, step, upper = world.all_gather_scalars(step_quartiles).mean(0).tolist()
    speed = args.batch * args.seq_len / step
    peak = peak_flops(torch.cuda.get_device_name()) if on_gpu else None
    flops = flops_per_token(training.work.model, args.seq_len, parallel)
    mfu = peak and flops * speed / (peak * world.size)
    whole = training.work.model
    chunks = 2 if parallel.cp > 1 else 1  # for each of which attention runs
    compiler = torch._dynamo.utils.counters
    graph_breaks = sum(compiler["graph_break"].values())
    facts = Facts(
        shares={part: seconds / step for part, seconds in parts.items()},
        parallel=parallel,
        size=world.size,
        per_node=world.per_node,
        sequences=args.batch // world.data_size,
        microbatches=training.microbatches,
        usable_memory=usable_memory(world.device, world.per_node),
        peaks={
            name: predict_memory(replace(training.work, parallel=other))["peak"]
            for name, other in alternatives(parallel, world.per_node).items()
        },
        frozen=any(not p.requires_grad for p in whole.parameters()),
        attentions=attentions / (len(training.model.layers) * training.microbatches * chunks),
        graph_breaks=graph_breaks,
        on_gpu=on_gpu,
        mfu=mfu,
        can_round=has_kernel(world.device, parallel.dtype, "tensorwise"),
    )
    bubble = []
    if parallel.pp > 1:
        actions = [{part: time for part, time in seconds.items() if isinstance(part, Action)}
                   for seconds in rounds["marked"]]  # fmt: skip
        passes = [statistics.median(seconds["pass"] for seconds in rounds[variant])
                  for variant in ("marked", "without pp")]  # fmt: skip
        bubble = [shares_of_bubble(world, training.microbatches, actions, *passes)]
    lines = [
        f"{speed:,.0f} tokens/s, {step:.4g} s a step (quartiles {lower:.4g}-{upper:.4g} s), "
        f"MFU {'unknown' if mfu is None else percent(mfu)}",
        "",
        *markdown_table(
            ["part", "seconds", "share"],
            [
                [part, f"{seconds:.4f}", f"{100 * seconds / step:.1f} %"]
                for part, seconds in (parts | {"the step": step}).items()
            ],
        ),
    ]
    if parallel.checkpointing != "none" and "recompute" not in parts:
        lines.append("recompute is compiled into backward")
    memory = memory | {"predicted peak": facts.peaks["this"]}
    # How much longer a marked step takes than a plain one. On a shared machine two steps may differ
    # by more for other reasons.
    overheads = [
        100 * ((marked["step"] - marked["data"]) / (plain["step"] - plain["data"]) - 1)
        for marked, plain in zip(rounds["marked"], rounds["plain"])
    ]
    lower, overhead, upper = quartiles(overheads)
    traffic = "an unknown amount: blocks are compiled"
    if counted:
        traffic = describe_traffic(counted.sent, parallel)
    compiled = "blocks are not compiled"
    if parallel.compile:
        graphs = compiler["stats"]["unique_graphs"]
        compiled = f"{graphs} graph(s) compiled, {graph_breaks} graph break(s)"
    lines += [
        f"time stamps cost {overhead:.1f} % of a step (quartiles {lower:.1f} to {upper:.1f} %)",
        "",
        *markdown_table(
            ["held on a rank", "bytes"], [[kind, megabytes(n)] for kind, n in memory.items()]
        ),
        "",
        f"counted: per step, {'each rank' if parallel.pp == 1 else 'rank 0'} sends {traffic}",
        *filter(None, [prediction_caveat(whole)]),
        f"attention runs forward {facts.attentions:g} time(s) a layer and microbatch",
        *bubble,
        compiled,
        "",
    ]
    if min(facts.shares.values()) < -0.05:
        lines.append("these times are too noisy: use a quieter machine or more --repeats")
    return "\n".join(lines + [f"- {sentence}" for sentence in verdict(facts)])
