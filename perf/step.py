"""`bench.py step`: measure where the time of a training step goes, and which flag would shorten it.

    torchrun --nproc-per-node 2 bench.py step --model small --dp fsdp     and train.py's other flags
    torchrun --nproc-per-node 2 bench.py step --lora --init out/tiny      and finetune_lora.py's

It trains as the script would, but writes no files. Three variants of a step are run:

    whole       train.py's step, with time stamps                its time, the wait for data, and
                                                                 the time of the optimizer
    without     forward and backward, while collectives over     the time of computation, and of
                some mesh dimensions return at once              communication that it does not hide
    counted     one step under counters                          payload, memory, forward runs of
                                                                 attention, graph breaks

Collectives run beside computation, so time stamps around them would say little. What matters is
how much sooner a step ends without them: their exposed time. The mesh dimensions are silenced one
after the other, beginning with the one whose ranks are farthest apart. What each saves is its
exposed time; what is left when all are silent is computation. So the parts add up to the step. A
negative part is noise. What ZeRO-1 all-gathers, and what Muon exchanges, counts as the optimizer's
time. The last lines say which parts take long, and which flags would shorten them
(perf/verdict.py).
"""

import contextlib
import itertools
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
from torch.utils.checkpoint import checkpoint

from config import DIMS, ParallelConfig, Work
from costs.page import Traffic, holds
from costs.search import usable_memory
from costs.shapes import flops_per_token, peak_flops
from parallel import World, zero_gradients
from perf.instruments import Rounds, Training, run_in_turns, silenced
from perf.reports import markdown_table, megabytes, quartiles, traffic_in_words, write_json
from perf.verdict import EXPOSED, Facts, percent, verdict
from plumbing.messages import print_rank_zero
from runs.changed import prediction_note
from techniques import schedules
from techniques.pipeline import Pipeline
from techniques.recompute import is_attention

WARM_UP_STEPS = 3  # DDP makes its final buckets, AdamW its moments; blocks are compiled


def measure_step(training: Training, work: Work, repeats: int, json_file: Path | None) -> str:
    """Return tables and the verdict; write figures to --json. All ranks call it together."""
    print_rank_zero(f"{WARM_UP_STEPS} steps to warm up", file=sys.stderr)
    for _ in range(WARM_UP_STEPS):
        training()
    counts = count_step(training)
    rounds = run_in_turns(variants_of(training), repeats)
    text, figures = report(training, work, rounds, *counts)
    write_json(json_file, figures)
    return text


def dims_of(world: World) -> list[str]:
    """Return the dimensions with more than one rank; ranks along the first are farthest apart."""
    return [dim for dim in DIMS if getattr(world.parallel, dim) > 1]


# ------------------------------------------------------------------------------------- time stamps


class TimeStamps:
    """Time stamps at the beginning and the end of parts of a step, read when the step is over.

    On a GPU a stamp is an event that the GPU records when it gets there: nothing waits for it."""

    def __init__(self, world: World):
        self.on_gpu = world.device.type == "cuda"
        self.stamps = defaultdict(list)  # part -> begin, end, begin, end

    def stamp(self, part: str, *_) -> None:
        if self.on_gpu:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
        else:
            event = time.perf_counter()
        self.stamps[part].append(event)

    @contextlib.contextmanager
    def around(self, part: str) -> Iterator[None]:
        self.stamp(part)
        try:
            yield
        finally:  # an exception ends a recomputation, as soon as checkpoint has enough
            self.stamp(part)

    def seconds(self) -> dict[str, float]:
        """Return the total seconds of each part. On a GPU, synchronize before."""
        seconds = defaultdict(float)
        for part, stamps in self.stamps.items():
            for begin, end in zip(stamps[::2], stamps[1::2]):
                seconds[part] += begin.elapsed_time(end) / 1e3 if self.on_gpu else end - begin
        return dict(seconds)


@contextlib.contextmanager
def time_stamped(training: Training) -> Iterator[TimeStamps]:
    """Record time stamps of forward, recompute and optimizer in the step within the context."""
    stamps = TimeStamps(training.world)
    runner = training.runner
    stamp_optimizer = partial(stamps.stamp, "optimizer")
    stamp_forward = partial(stamps.stamp, "forward")

    def stamped_forward(forward: Callable, *args, **kwargs):
        in_backward = torch._C._current_graph_task_id() != -1
        with stamps.around("recompute") if in_backward else contextlib.nullcontext():
            return forward(*args, **kwargs)

    with contextlib.ExitStack() as undo:
        hooks = [training.optimizer.register_step_pre_hook(stamp_optimizer)]
        hooks.append(training.optimizer.register_step_post_hook(stamp_optimizer))
        stages = runner.stages.values() if isinstance(runner, Pipeline) else [runner]
        for stage in stages:
            # prepend: before FSDP's own hook, which all-gathers weights
            hooks.append(stage.register_forward_pre_hook(stamp_forward, prepend=True))
            hooks.append(stage.register_forward_hook(stamp_forward))
        for hook in hooks:
            undo.callback(hook.remove)
        for block in training.model.layers.values():
            # Blocks that recompute.py has wrapped; a compiled block cannot be stamped within.
            forward = block.forward
            if getattr(forward, "func", None) is checkpoint:
                stamped = partial(stamped_forward, *forward.args)
                block.forward = partial(checkpoint, stamped, **forward.keywords)
                undo.callback(setattr, block, "forward", forward)
        yield stamps


# ---------------------------------------------------------------------------------- timed variants


def stamped_step(training: Training, silent: list[str]) -> Callable:
    """Run train.py's step with time stamps, and return the function that reads them: `data` is the
    wait for a batch that was read ahead; in its place preferences.py has `reference`, the base's
    forward, rewards.py `sampling`, distill.py `teacher`. `pass` is forward and backward, including
    the communication of gradients. Without collectives over the dimensions `silent`, if there are
    any, gradients are garbage: then discard them in place of the update."""
    world = training.world
    optimizer = training.optimizer
    start = time.perf_counter()
    batch = next(training.batches)
    if world.device.type == "cuda":
        torch.cuda.synchronize()
    waited = time.perf_counter() - start
    with time_stamped(training) as stamps:
        with silenced(training.runner, world, silent), stamps.around("pass"):
            loss = training.accumulate(batch)
        if silent:
            zero_gradients(optimizer, world)
        else:
            training.update(loss, batch)
    return lambda: stamps.seconds() | {training.before_step: waited}


def variants_of(training: Training) -> dict[str, Callable]:
    """Return the variants to time: each silences one more dimension, and the last silences all."""
    dims = dims_of(training.world)
    variants = {"whole": partial(stamped_step, training, [])}
    for n in range(1, len(dims) + 1):
        variants[f"without {' '.join(dims[:n])}"] = partial(stamped_step, training, dims[:n])
    return variants


def median(rounds: Rounds, variant: str, part: str) -> float:
    return statistics.median(rounds[variant].get(part, [0.0]))


def parts_of_step(rounds: Rounds, dims: list[str], before_step="data") -> dict[str, float]:
    """Divide the median step of a rank into parts. Return part -> seconds.

    Forward, backward and recompute are those with all dimensions silenced. Exposed communication is
    what silencing one more of `dims` saves, and `other` the rest of the whole step."""
    *_, last = rounds
    passes = [median(rounds, name, "pass") for name in rounds]
    forward = median(rounds, last, "forward")
    recompute = median(rounds, last, "recompute")
    parts = {"forward": forward, "backward": passes[-1] - forward - recompute}
    if recompute:
        parts["recompute"] = recompute
    for dim, (before, after) in zip(dims, itertools.pairwise(passes)):
        parts[EXPOSED + dim] = before - after
    for part in ("optimizer", before_step):
        parts[part] = median(rounds, "whole", part)
    parts["other"] = median(rounds, "whole", "step") - sum(parts.values())
    return parts


# ---------------------------------------------------------------------------------------- counting


def count_step(training: Training) -> tuple[dict[str, int | None], Traffic | None, int]:
    """Count a step. Return kind of memory -> bytes, on the rank that holds most; what this rank
    sends; and its forward runs of attention. None stands for unknown, in compiled blocks."""
    world = training.world
    on_gpu = world.device.type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    counted, memory = training.count()
    if on_gpu:
        memory["peak"] = torch.cuda.max_memory_allocated()
    maxima = world.all_gather_scalars([nbytes or 0 for nbytes in memory.values()]).amax(0).tolist()
    *state, peak = map(round, maxima)
    # With --offload the state is in CPU memory, and the peak is the GPU's.
    apart = world.parallel.offload and on_gpu
    rest = peak - sum(state) if peak and not apart else None
    memory = dict(zip(memory, state)) | {"activations and the rest": rest, "peak": peak or None}
    if counted:
        return memory, counted.sent, counted.attentions
    return memory, None, profile_attention(training)


def profile_attention(training: Training) -> int:
    """Return how often attention runs forward in a step with compiled blocks.

    Use when blocks are compiled, into which the profiler can see. Avoid otherwise: it also counts
    the calls that selective checkpointing replaces by a saved result."""
    batch = next(training.batches)  # a task may run forward for it
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        training.accumulate(batch)
    zero_gradients(training.optimizer, training.world)
    counts = {event.key: event.count for event in profile.key_averages()}
    kernels = [name for name in counts if "::_" in name and is_attention(name)]
    return sum(counts[name] for name in kernels)  # not what chooses a kernel


# ------------------------------------------------------------------------------------------ report


def report(
    training: Training,
    work: Work,
    rounds: Rounds,
    memory: dict[str, int | None],
    sent: Traffic | None,
    attentions: int,
) -> tuple[str, dict]:
    """Return all results in Markdown, and the figures for --json. All ranks call it together."""
    world, parallel = training.world, work.parallel
    parts = parts_of_step(rounds, dims_of(world), training.before_step)
    own = [*parts.values(), *quartiles(rounds["whole"]["step"])]
    *of_parts, lower, step, upper = world.all_gather_scalars(own).mean(0).tolist()
    parts = dict(zip(parts, of_parts))
    speed = work.batch * work.seq_len / step
    peak = peak_flops(torch.cuda.get_device_name()) if work.on_gpu else None
    flops = flops_per_token(work.model, work.seq_len) * speed
    mfu = flops / (peak * world.size) if peak else None
    chunks = 2 if parallel.cp > 1 else 1  # for each of which attention runs
    compiler = torch._dynamo.utils.counters
    facts = Facts(
        shares={part: seconds / step for part, seconds in parts.items()},
        work=work,
        per_node=world.per_node,
        usable_memory=usable_memory(world.device),
        device=world.device,
        attentions=attentions / (len(training.model.layers) * work.microbatches * chunks),
        graph_breaks=sum(compiler["graph_break"].values()),
        mfu=mfu,
    )
    memory = memory | {"predicted peak": holds(work)["peak"]}
    times = []
    for part, seconds in (parts | {"the step": step}).items():
        times.append([part, f"{seconds:.4f}", f"{100 * seconds / step:.1f} %"])
    held = [[kind, megabytes(nbytes)] for kind, nbytes in memory.items()]
    sender = "each rank" if parallel.pp == 1 else "rank 0"
    notes = [
        f"counted: per step, {sender} sends {traffic_in_words(sent, parallel)}",
        prediction_note(work.model.config),
        f"attention runs forward {facts.attentions:g} time(s) a layer and microbatch",
        describe_bubble(parallel, work.microbatches) if parallel.pp > 1 else "",
    ]
    if parallel.compile:
        graphs = compiler["stats"]["unique_graphs"]
        notes.append(f"{graphs} graph(s) compiled, {facts.graph_breaks} graph break(s)")
    else:
        notes.append("blocks are not compiled")
    if parallel.checkpointing != "none" and "recompute" not in parts:
        notes.append("recompute is compiled into backward")
    if min(facts.shares.values()) < -0.05:
        notes.append("these times are too noisy: use a quieter machine or more --repeats")
    mfu_in_words = "unknown" if mfu is None else percent(mfu)
    lines = [
        f"{speed:,.0f} tokens/s, {step:.4g} s a step (quartiles {lower:.4g}-{upper:.4g} s), "
        f"MFU {mfu_in_words}",
        "",
        *markdown_table(["part", "seconds", "share"], times),
        "",
        *markdown_table(["held on a rank", "bytes"], held),
        "",
        *filter(None, notes),
        "",
        *(f"- {sentence}" for sentence in verdict(facts)),
    ]
    figures = dict(tokens_per_second=speed, seconds=[lower, step, upper], mfu=mfu, parts=parts)
    figures |= {f"{kind.replace(' ', '_')}_bytes": nbytes for kind, nbytes in memory.items()}
    return "\n".join(lines), figures


def describe_bubble(parallel: ParallelConfig, microbatches: int) -> str:
    """Return in words how long ranks of a pipeline would wait if all stages took equally long and
    messages no time. What they wait in fact is in the table, as exposed communication over pp."""
    p = parallel
    schedule = schedules.make_schedule(p.schedule, p.pp, microbatches, p.stages_per_rank)
    timeline = schedules.check_schedule(schedule, microbatches, p.pp * p.stages_per_rank)
    share = schedules.bubble(timeline)
    return f"of forward and backward, ranks wait for other stages {share:.1%} by the schedule alone"
