"""`bench.py step`: measure where the time of a training step goes, and which flag would shorten it.

    torchrun --nproc-per-node 2 bench.py step --model small --dp fsdp     and train.py's other flags

It trains as train.py would, but writes no files. Four variants of a step are measured:

    plain       train.py's step                                  its time, and the wait for data
    marked      the same with time stamps                        the optimizer's time
    silenced    forward and backward, while collectives over     the time of computation, and of
                some mesh dimensions return at once              communication that it does not hide
    counted     one step under counters                          payload, memory, forward runs of
                                                                 attention, graph breaks

Collectives run beside computation, so time stamps around them would say little. What matters is
how much sooner a step ends without them: that is their exposed time. The mesh dimensions are
silenced one after the other, beginning with the one whose ranks are farthest apart. What each
saves is its exposed time, and what is left when all are silent is computation. So the parts add up
to the step. A negative part is noise: use more --repeats, or a quieter machine.

ZeRO-1's all-gather of updated weights is part of the optimizer's time.

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
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import FakeProcessGroup
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from data import Batch, read_ahead
from model import Llama
from parallel import ParallelConfig, World, all_gather_updates
from perf.choose import usable_memory
from perf.cost import describe_traffic, flops_per_token, peak_flops, predict_memory
from perf.measure import (
    Counted,
    Live,
    build_on_meta,
    megabytes,
    quartiles,
    state_bytes,
    state_tensors,
)
from perf.verdict import EXPOSED, Facts, alternatives, percent, too_noisy, verdict
from plumbing.processes import print_rank_zero
from train import (
    accumulate,
    build,
    learning_rate,
    local_batch,
    make_optimizer,
    prepare,
    setup,
    train_step,
    update,
    zero_gradients,
)

# DDP settles its buckets in two steps, AdamW allocates its moments, blocks are compiled.
WARM_UP_STEPS = 3


@dataclass(frozen=True)
class Training:
    """A training as train.py sets it up."""

    args: argparse.Namespace
    world: World
    model: Llama
    runner: nn.Module  # what a training step calls: the model, or its DDP or ZeRO-1 wrapper
    optimizer: torch.optim.Optimizer
    batches: Iterator[Batch]

    @property
    def microbatches(self) -> int:
        return self.args.batch // self.world.data_size // self.args.microbatch

    @property
    def dims(self) -> list[str]:
        """Mesh dimensions with more than one rank; ranks along the first are farthest apart."""
        mesh = self.world.mesh
        return [dim for dim in mesh.mesh_dim_names if mesh[dim].size() > 1]

    @property
    def recompute_is_compiled(self) -> bool:
        """Whether recomputation is part of a compiled backward, where it cannot be timed alone."""
        parallel = self.world.parallel
        return parallel.compile and parallel.checkpointing == "selective"

    @property
    def times_recompute(self) -> bool:
        """Whether recomputation is timed as a part of its own."""
        return self.world.parallel.checkpointing != "none" and not self.recompute_is_compiled


def measure_step(args: argparse.Namespace) -> str:
    """Return the output of `bench.py step`: tables and the verdict."""
    # Nothing is written, so OUT may be the directory of another run: --resume accepts it.
    args.out, args.resume = args.out or Path("out"), True
    process = setup(args)
    # A silenced collective leaves uninitialized memory, often denormal floats, with which a CPU
    # computes slowly. Threads inherit this setting, so it comes before they are started.
    torch.set_flush_denormal(True)
    job = prepare(args, process)
    world, runner = build(args, job, process)
    # The first learning rate of the warmup throughout, so that the loss stays finite.
    lr = learning_rate(1, args.lr, args.warmup, args.steps)
    optimizer = make_optimizer(job.model, lr, args.weight_decay)
    read = partial(local_batch, args, world, job.train_set)
    with contextlib.closing(read_ahead(read, itertools.count(1), world.device)) as batches:
        training = Training(args, world, job.model, runner, optimizer, batches)
        print_rank_zero(f"{WARM_UP_STEPS} steps to warm up", file=sys.stderr)
        for _ in range(WARM_UP_STEPS):
            plain_step(training, next(batches))
        memory, counted = count_step(training)
        attentions = counted.attentions if counted else profile_attention(training)
        rounds = time_variants(training)
    return report(training, rounds, memory, counted, attentions)


# ------------------------------------------------------------------------------------- time stamps


class TimeStamps:
    """Time stamps at the beginning and the end of parts of a step, read when the step is over.

    On a GPU a stamp is an event that the GPU records as it gets there, without waiting."""

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

    def seconds(self) -> dict[str, float]:
        """Return the total seconds of each part. On a GPU, synchronize before."""
        return {
            part: sum(a.elapsed_time(b) / 1e3 if self.on_gpu else b - a for a, b in pairs)
            for part, pairs in self.closed.items()
        }


@contextlib.contextmanager
def time_stamped(training: Training) -> Iterator[TimeStamps]:
    """Record time stamps of forward, recompute and optimizer in the steps within the context."""
    stamps = TimeStamps(training.world.device)
    runner, optimizer = training.runner, training.optimizer
    hooks = [
        # prepend: before FSDP's own hook, which all-gathers weights
        runner.register_forward_pre_hook(lambda *_: stamps.begin("forward"), prepend=True),
        runner.register_forward_hook(lambda *_: stamps.end("forward")),
        optimizer.register_step_pre_hook(lambda *_: stamps.begin("optimizer")),
        optimizer.register_step_post_hook(lambda *_: stamps.end("optimizer")),
    ]
    # Blocks that `recompute` of parallel.py has wrapped. A checkpoint within a compiled block
    # cannot be stamped.
    blocks = training.model.layers.values()
    originals = {b: b.forward for b in blocks if getattr(b.forward, "func", None) is checkpoint}
    for block, forward in originals.items():
        (inner,) = forward.args
        block.forward = partial(checkpoint, stamp_recompute(inner, stamps), **forward.keywords)
    try:
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
        finally:  # checkpoint stops a recomputation by an exception, as soon as it has enough
            stamps.end("recompute")

    return stamped_forward


# --------------------------------------------------------------------------------------- silencing


@contextlib.contextmanager
def silenced(runner: nn.Module, world: World, dims: list[str]) -> Iterator[None]:
    """Make collectives over the mesh dimensions `dims` return at once, without communicating.

    The process group of each dimension gets torch's fake backend for a while. Results are garbage:
    they may be timed, and must never reach the weights. DDP's C++ code does not accept a fake
    backend, but `no_sync` stops its collectives."""
    if isinstance(runner, DistributedDataParallel):
        with runner.no_sync() if dims else contextlib.nullcontext():
            yield
        return
    device, backend_types = world.device, dist.ProcessGroup.BackendType
    groups = [world.mesh.get_group(dim) for dim in dims]
    real_backends = [group._get_backend(device) for group in groups]
    try:
        for group in groups:
            options = FakeProcessGroup.Options()
            fake = FakeProcessGroup._create_internal(group.rank(), group.size(), options)
            group._register_backend(device, backend_types.CUSTOM, fake)
        yield
    finally:
        for group, real in zip(groups, real_backends):
            group._register_backend(device, getattr(backend_types, real.name().upper()), real)


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


def time_variants(training: Training) -> dict[str, list[dict[str, float]]]:
    """Return variant -> for each of --repeats rounds, part of a step -> seconds.

    The parts are those with time stamps, `data` (waiting for a batch) and `step` (everything). Each
    round runs all variants; the last one silences all dimensions. `plain` comes after another whole
    step, during which its batch is read ahead, as in training."""
    variants = {"marked": partial(marked_step, training), "plain": partial(plain_step, training)}
    for n in range(1, len(training.dims) + 1):
        dims = training.dims[:n]
        variants[f"without {' '.join(dims)}"] = partial(silenced_pass, training, dims)
    rounds = {name: [] for name in variants}
    for round_number in range(training.args.repeats + 1):
        print_rank_zero(f"round {round_number} of {training.args.repeats}", file=sys.stderr)
        for name, variant in variants.items():
            seconds = time_variant(training, variant)
            if round_number > 0:  # round 0 is for warming up
                rounds[name].append(seconds)
    return rounds


def time_variant(
    training: Training, variant: Callable[[Batch], TimeStamps | None]
) -> dict[str, float]:
    """Run a variant on the next batch. Return part of the step -> seconds."""
    dist.barrier()  # a rank that still runs the previous variant would disturb
    start = time.perf_counter()
    batch = next(training.batches)
    data = time.perf_counter() - start
    stamps = variant(batch)
    if training.world.device.type == "cuda":
        torch.cuda.synchronize()
    seconds = {"data": data, "step": time.perf_counter() - start}
    return seconds | (stamps.seconds() if stamps else {})


def parts_of_step(
    rounds: dict[str, list[dict[str, float]]], dims: list[str], times_recompute: bool
) -> dict[str, float]:
    """Divide the median plain step of a rank into parts. Return part -> seconds.

    Forward, backward and recompute are those with all dimensions silenced. Exposed communication is
    what silencing one more dimension saves, and `other` the rest of the plain step.
    rounds: from time_variants. dims: mesh dimensions in the order in which they were silenced."""

    def median(variant: str, part: str) -> float:
        return statistics.median(seconds.get(part, 0.0) for seconds in rounds[variant])

    variants = [name for name in rounds if name != "plain"]  # each silences one more dimension
    passes = [median(name, "pass") for name in variants]
    all_silent = variants[-1]
    forward, recompute = median(all_silent, "forward"), median(all_silent, "recompute")
    parts = {"forward": forward, "backward": passes[-1] - forward - recompute}
    if times_recompute:
        parts["recompute"] = recompute
    for dim, (before, after) in zip(dims, itertools.pairwise(passes)):
        parts[EXPOSED + dim] = before - after
    parts["optimizer"] = median("marked", "optimizer")
    parts["data"] = median("plain", "data")
    parts["other"] = median("plain", "step") - sum(parts.values())
    return parts


def time_stamp_overhead(rounds: dict[str, list[dict[str, float]]]) -> list[float]:
    """Return quartiles, over the rounds, of how much longer the marked step took than the plain
    one, as a fraction. On a shared machine two steps may differ by more for other reasons."""
    overheads = []
    for marked, plain in zip(rounds["marked"], rounds["plain"]):
        overheads.append((marked["step"] - marked["data"]) / (plain["step"] - plain["data"]) - 1)
    return quartiles(overheads)


# ---------------------------------------------------------------------------------------- counting


def count_step(training: Training) -> tuple[dict[str, int | None], Counted | None]:
    """Run one step under counters. Return kind of memory -> bytes, and the counted collectives.

    The bytes are those of the rank that holds most. None stands for unknown: counters do not see
    into compiled blocks and would disturb their compilation."""
    args, world, optimizer = training.args, training.world, training.optimizer
    on_gpu = world.device.type == "cuda"
    counters, counted, live = contextlib.ExitStack(), None, None
    if not world.parallel.compile:
        counted = counters.enter_context(Counted(world))
        live = counters.enter_context(Live(tree_leaves(state_tensors(training.model, optimizer))))
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    batch = next(training.batches)
    with counters:
        loss = accumulate(training.runner, batch, args.microbatch, world)
        state = state_bytes(training.model, optimizer)
    peak = torch.cuda.max_memory_allocated() if on_gpu else live.peak if live else 0
    update(optimizer, loss, batch, args.clip, world, step=1)
    if counted:
        # An update also all-gathers scalars, which do not count. ZeRO-1's all-gather of weights
        # does, and may be repeated.
        with counted:
            all_gather_updates(optimizer)

    maxima = world.all_gather_scalars([*state.values(), peak]).amax(0).tolist()
    memory = dict(zip([*state, "peak"], map(round, maxima)))
    peak = memory.pop("peak") or None
    # With --offload the state is in CPU memory, and the peak is the GPU's.
    state_is_elsewhere = world.parallel.offload and on_gpu
    known = peak is not None and not state_is_elsewhere
    rest = peak - sum(memory.values()) if known else None
    return memory | {"activations and the rest": rest, "peak": peak}, counted


def profile_attention(training: Training) -> int:
    """Return how often attention runs forward in a step with compiled blocks.

    Use when blocks are compiled, into which the profiler can see. Avoid otherwise: it also counts
    the calls that selective checkpointing replaces by a saved result."""
    batch = next(training.batches)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        plain_step(training, batch)
    return sum(
        event.count
        for event in profile.key_averages()
        if event.key.startswith("aten::_scaled_dot_product") and not event.key.endswith("backward")
    )


def count_graphs() -> tuple[int, int]:
    """Return the number of compiled graphs, and of graph breaks."""
    counters = torch._dynamo.utils.counters
    return counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())


# ------------------------------------------------------------------------------------------ report


def report(
    training: Training,
    rounds: dict[str, list[dict[str, float]]],
    memory: dict[str, int | None],
    counted: Counted | None,
    attentions: int,
) -> str:
    """Return all results in Markdown. Every rank must call it, since times are averaged."""
    args, world, parallel = training.args, training.world, training.world.parallel
    on_gpu = world.device.type == "cuda"
    parts = parts_of_step(rounds, training.dims, training.times_recompute)
    parts = dict(zip(parts, world.all_gather_scalars(list(parts.values())).mean(0).tolist()))
    step_quartiles = quartiles([seconds["step"] for seconds in rounds["plain"]])
    lower, step, upper = world.all_gather_scalars(step_quartiles).mean(0).tolist()
    speed = args.batch * args.seq_len / step
    peak = peak_flops(torch.cuda.get_device_name()) if on_gpu else None
    mfu = peak and flops_per_token(training.model, args.seq_len) * speed / (peak * world.size)
    predicted_peaks = {
        name: predict_peak(training, alternative)
        for name, alternative in alternatives(parallel, world.per_node).items()
    }
    graphs, graph_breaks = count_graphs()
    facts = Facts(
        shares={part: seconds / step for part, seconds in parts.items()},
        parallel=parallel,
        size=world.size,
        per_node=world.per_node,
        sequences=args.batch // world.data_size,
        microbatches=training.microbatches,
        usable_memory=usable_memory(world.device, world.per_node),
        peaks=predicted_peaks,
        attentions=attentions / (training.model.config.n_layers * training.microbatches),
        graph_breaks=graph_breaks if parallel.compile else 0,
        on_gpu=on_gpu,
        mfu=mfu,
    )
    overhead = [f"{100 * quartile:.1f}" for quartile in time_stamp_overhead(rounds)]
    traffic = "an unknown amount: blocks are compiled"
    if counted:
        traffic = describe_traffic(counted.sent) or "nothing"
    compiled = f"{graphs} graph(s) compiled, {graph_breaks} graph break(s)"
    noise = "these times are too noisy to judge by: use a quieter machine or more --repeats"
    return "\n".join(
        [
            f"{speed:,.0f} tokens/s, {step:.4g} s a step (quartiles {lower:.4g}-{upper:.4g} s), "
            f"MFU {'unknown' if mfu is None else percent(mfu)}",
            "",
            *table_of_parts(parts, step),
            *["recompute is compiled into backward"] * training.recompute_is_compiled,
            f"time stamps cost {overhead[1]} % of a step (quartiles {overhead[0]} to "
            f"{overhead[2]} %)",
            "",
            *table_of_memory(memory, predicted_peaks["this"]),
            "",
            f"counted payload of a step: {traffic}",
            f"attention runs forward {facts.attentions:g} time(s) a layer and microbatch",
            compiled if parallel.compile else "blocks are not compiled",
            "",
            *[noise] * too_noisy(facts.shares),
            *(f"- {sentence}" for sentence in verdict(facts)),
        ]
    )


def predict_peak(training: Training, parallel: ParallelConfig) -> int:
    """Return the peak memory in bytes that perf/cost.py predicts for a step with `parallel`."""
    unsharded = build_on_meta(training.model.config)
    tokens = training.args.microbatch * training.args.seq_len
    fused = parallel.compile or training.world.device.type == "cuda"
    return predict_memory(unsharded, parallel, tokens, training.microbatches, fused)["peak"]


def table_of_parts(parts: dict[str, float], step: float) -> list[str]:
    rows = [
        f"| {part} | {seconds:.4f} | {100 * seconds / step:.1f} % |"
        for part, seconds in (parts | {"the step": step}).items()
    ]
    return ["| part | seconds | share |", "|---|--:|--:|", *rows]


def table_of_memory(memory: dict[str, int | None], predicted_peak: int) -> list[str]:
    rows = memory | {"predicted peak": predicted_peak}
    lines = [f"| {kind} | {megabytes(nbytes)} |" for kind, nbytes in rows.items()]
    return ["| held on a rank | bytes |", "|---|--:|", *lines]
