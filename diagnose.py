"""`bench.py step`: where the time of a training step goes, and which flag would change it.

    torchrun --nproc-per-node 2 bench.py step --model small --dp fsdp     and train.py's other flags

It trains as train.py would, writes nothing, and looks in four ways, in turns:

    plain       the step as it is                              its time, and the wait for data
    marked      the step with time stamps at its seams         the optimizer's part
    silenced    forward and backward, while collectives        what communication costs that does
                along some dimensions cost nothing             not hide behind computation
    counted     once each: bytes sent, bytes held, attention forwards, graph breaks

Collectives run beside computation, so that stamps around them say little: what counts is how much
sooner a step ends without them. The mesh's dimensions fall silent one after the other, the farthest
first; what each saves is its exposed communication, and what all leave is computation. So the parts
add up to the step. A part below zero is noise: then give more --repeats, or a quieter machine.

Ends with a verdict: what takes longest, and the flags that would shorten it.
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
from torch._C._distributed_c10d import FakeProcessGroup
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from cost import describe, device_room, memory, within_a_node
from data import Batch, read_ahead
from measure import Counted, Live, megabytes, on_meta, quartiles, state_bytes, state_tensors
from model import Llama, flops_per_token, peak_flops
from parallel import Split, World
from train import (
    accumulate,
    begin,
    drop_gradients,
    learning_rate,
    make_optimizer,
    prepare,
    share_of_step,
    show,
    split_model,
    train_step,
    update,
)

WARM_UP = 3  # steps: DDP settles its buckets in two, AdamW makes its moments, blocks are compiled
EXPOSED = "exposed communication over "  # a dimension


@dataclass(frozen=True)
class Run:
    """A training under way."""

    args: argparse.Namespace
    world: World
    model: Llama
    runner: nn.Module
    optimizer: torch.optim.Optimizer
    batches: Iterator[Batch]

    @property
    def microbatches(self) -> int:
        return self.args.batch // self.world.data_size // self.args.microbatch

    @property
    def dims(self) -> list[str]:
        """The dimensions along which there is somebody to talk to, the farthest first."""
        mesh = self.world.mesh
        return [dim for dim in mesh.mesh_dim_names if mesh[dim].size() > 1]

    @property
    def tells_recompute(self) -> bool:
        """Not where selective checkpointing is inside a compiled block, one graph with backward."""
        split = self.world.split
        return split.checkpointing != "none" and not (
            split.compile and split.checkpointing == "selective"
        )


def measure_step(args: argparse.Namespace) -> str:
    # Nothing is written, so that OUT may be anything, also the directory of a run.
    args.out, args.resume = args.out or Path("out"), True
    world = begin(args)
    # What a silenced collective was to bring is whatever lay in memory. A CPU computes numbers next
    # to 0 slowly; said before its threads are made, as they take it over.
    torch.set_flush_denormal(True)
    model, fill, _, windows, _ = prepare(args, world)
    world, runner = split_model(args, model, world, fill)
    # A run's first learning rate, all the time: no loss gets out of hand.
    lr = learning_rate(1, args.lr, args.warmup, args.steps)
    optimizer = make_optimizer(model, lr, args.weight_decay)
    read = partial(share_of_step, args, world, windows)
    with contextlib.closing(read_ahead(read, itertools.count(1), world.device)) as batches:
        run = Run(args, world, model, runner, optimizer, batches)
        show(f"{WARM_UP} steps to warm up", file=sys.stderr)
        for _ in range(WARM_UP):
            plain_step(run, next(batches))
        held, counted = weigh(run)
        attentions = counted.attentions if counted else profiled_attentions(run)
        records = take_turns(run)
    return report(run, records, held, counted, attentions)


# ------------------------------------------------------------------------------------- time stamps


class Spans:
    """Time stamps at the beginning and the end of parts of a step, read when it is over.

    On a GPU a stamp is an event, which the GPU marks as it comes by: nobody waits for it."""

    def __init__(self, device: torch.device):
        self.on_gpu = device.type == "cuda"
        self.open = {}  # part -> its begin
        self.closed = defaultdict(list)  # part -> pairs of begin and end

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
        """Of each part in all; the device has done its work."""
        return {
            part: sum(a.elapsed_time(b) / 1e3 if self.on_gpu else b - a for a, b in pairs)
            for part, pairs in self.closed.items()
        }


@contextlib.contextmanager
def stamped(run: Run) -> Iterator[Spans]:
    """Notes when forward, recomputation and the optimizer run while it is entered.

    prepend: before FSDP's own hook, which gathers weights. Of a compiled block only the outside is
    touched."""
    spans = Spans(run.world.device)
    hooks = [
        run.runner.register_forward_pre_hook(lambda *_: spans.begin("forward"), prepend=True),
        run.runner.register_forward_hook(lambda *_: spans.end("forward")),
        run.optimizer.register_step_pre_hook(lambda *_: spans.begin("optimizer")),
        run.optimizer.register_step_post_hook(lambda *_: spans.end("optimizer")),
    ]
    blocks = run.model.layers.values()
    whole = {b: b.forward for b in blocks if getattr(b.forward, "func", None) is checkpoint}
    for block, forward in whole.items():
        (inner,) = forward.args
        block.forward = partial(checkpoint, noted(inner, spans), **forward.keywords)
    try:
        yield spans
    finally:
        for block, forward in whole.items():
            block.forward = forward
        for hook in hooks:
            hook.remove()


def noted(forward: Callable, spans: Spans) -> Callable:
    """A checkpointed forward that notes its runs in backward. Such a run ends as soon as it has
    made what is needed, by an exception."""

    def run(*args, **kwargs):
        if "forward" in spans.open:
            return forward(*args, **kwargs)
        spans.begin("recompute")
        try:
            return forward(*args, **kwargs)
        finally:
            spans.end("recompute")

    return run


# ----------------------------------------------------------------------------------------- silence


@contextlib.contextmanager
def silenced(runner: nn.Module, world: World, dims: list[str]) -> Iterator[None]:
    """While it is entered, collectives along `dims` return at once, with nothing done.

    Each dimension's process group is given torch's fake backend, which sends nothing, and gets its
    own back. What is computed is garbage: it may be timed, and must never reach the weights. DDP's
    C++ wants the real one, and can be told not to send."""
    if isinstance(runner, DistributedDataParallel):
        with runner.no_sync() if dims else contextlib.nullcontext():
            yield
        return
    device, kinds = world.device, dist.ProcessGroup.BackendType
    groups = [world.mesh.get_group(dim) for dim in dims]
    real = [group._get_backend(device) for group in groups]
    try:
        for group in groups:
            options = FakeProcessGroup.Options()
            fake = FakeProcessGroup._create_internal(group.rank(), group.size(), options)
            group._register_backend(device, kinds.CUSTOM, fake)
        yield
    finally:
        for group, backend in zip(groups, real):
            group._register_backend(device, getattr(kinds, backend.name().upper()), backend)


# ------------------------------------------------------------------------------------- contestants


def plain_step(run: Run, batch: Batch) -> None:
    """As train.py does it."""
    args = run.args
    train_step(run.runner, run.optimizer, batch, args.microbatch, args.clip, run.world, step=1)


def marked_step(run: Run, batch: Batch) -> Spans:
    """The same, with time stamps."""
    with stamped(run) as spans:
        loss = marked_pass(run, batch, spans)
        update(run.optimizer, loss, batch, run.args.clip, run.world, step=1)
    return spans


def marked_pass(run: Run, batch: Batch, spans: Spans) -> torch.Tensor:
    spans.begin("pass")
    loss = accumulate(run.runner, batch, run.args.microbatch, run.world)
    spans.end("pass")
    return loss


def silenced_pass(run: Run, dims: list[str], batch: Batch) -> Spans:
    """Forward and backward with stamps and without some collectives."""
    with stamped(run) as spans, silenced(run.runner, run.world, dims):
        marked_pass(run, batch, spans)
    drop_gradients(run.optimizer, run.world)
    return spans


def take_turns(run: Run) -> dict[str, list[dict[str, float]]]:
    """Each contestant's records of --repeats rounds: seconds of its parts, of its wait for `data`,
    and of all of it, `step`. The last contestant is the most silent.

    Everybody takes a batch of its own, and `plain` comes after a whole step: so data are read
    beside as much work as in training."""
    contestants = {"marked": partial(marked_step, run), "plain": partial(plain_step, run)}
    for n in range(1, len(run.dims) + 1):
        silent = run.dims[:n]
        contestants[f"without {' '.join(silent)}"] = partial(silenced_pass, run, silent)
    records = {name: [] for name in contestants}
    for turn in range(run.args.repeats + 1):  # the first is to warm up
        show(f"round {turn} of {run.args.repeats}", file=sys.stderr)
        for name, contestant in contestants.items():
            record = timed(run, contestant)
            if turn:
                records[name].append(record)
    return records


def timed(run: Run, contestant: Callable[[Batch], Spans | None]) -> dict[str, float]:
    """Seconds of one contestant's turn and of its parts."""
    dist.barrier()  # nobody computes beside a step that is not theirs
    start = time.perf_counter()
    batch = next(run.batches)
    data = time.perf_counter() - start
    spans = contestant(batch)
    if run.world.device.type == "cuda":
        torch.cuda.synchronize()
    whole = {"data": data, "step": time.perf_counter() - start}
    return whole | (spans.seconds() if spans else {})


# ------------------------------------------------------------------------------------------ counts


def weigh(run: Run) -> tuple[dict[str, int | None], Counted | None]:
    """Of one step: the bytes that a rank holds by kind and at the `peak`, on the rank that holds
    most; and what Counted counts. None for what is not known: a mode sees nothing within a compiled
    block, and would keep it from being compiled."""
    world, on_gpu = run.world, run.world.device.type == "cuda"
    modes, counted, live = contextlib.ExitStack(), None, None
    if not world.split.compile:
        held = tree_leaves(state_tensors(run.model, run.optimizer))
        counted, live = Counted(world), Live(held)
        modes.enter_context(counted)
        modes.enter_context(live)
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    batch = next(run.batches)
    with modes:
        loss = accumulate(run.runner, batch, run.args.microbatch, world)
        kinds = state_bytes(run.model, run.optimizer)
    peak = torch.cuda.max_memory_allocated() if on_gpu else live and live.peak
    update(run.optimizer, loss, batch, run.args.clip, world, step=1)
    *most, peak = map(round, world.gather([*kinds.values(), peak or 0]).amax(0).tolist())
    apart = world.split.offload and on_gpu  # the kinds are in the CPU's memory, the peak the GPU's
    rest = None if apart or not peak else peak - sum(most)
    held = dict(zip(kinds, most))
    return held | {"activations and the rest": rest, "peak": peak or None}, counted


def profiled_attentions(run: Run) -> int:
    """How often attention runs forward in a step of compiled blocks. The profiler sees what is
    asked for: without compilation, also what selective checkpointing then takes from memory."""
    batch = next(run.batches)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        plain_step(run, batch)
    return sum(
        event.count
        for event in profile.key_averages()
        if event.key.startswith("aten::_scaled_dot_product") and not event.key.endswith("backward")
    )


def count_graphs() -> tuple[int, int]:
    """Graphs that were compiled, and breaks in them."""
    counters = torch._dynamo.utils.counters
    return counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())


# -------------------------------------------------------------------------------------- the parts


def parts_of(
    records: dict[str, list[dict[str, float]]], dims: list[str], recompute: bool
) -> dict[str, float]:
    """Seconds of each part of a rank's step, which add up to it: medians over rounds. `dims` as
    they fell silent; `recompute`: whether it has a part of its own."""

    def median(name: str, part: str) -> float:
        return statistics.median(record.get(part, 0.0) for record in records[name])

    passes = [name for name in records if name != "plain"]  # each silent along one dimension more
    quietest = passes[-1]
    seconds = [median(name, "pass") for name in passes]
    forward, again = median(quietest, "forward"), median(quietest, "recompute")
    parts = {"forward": forward, "backward": seconds[-1] - forward - again}
    if recompute:
        parts["recompute"] = again
    for dim, (loud, silent) in zip(dims, itertools.pairwise(seconds)):
        parts[EXPOSED + dim] = loud - silent
    parts["optimizer"] = median("marked", "optimizer")
    parts["data"] = median("plain", "data")
    parts["other"] = median("plain", "step") - sum(parts.values())
    return parts


def cost_of_stamps(records: dict[str, list[dict[str, float]]]) -> list[float]:
    """What a step with time stamps takes longer than its neighbour without, as a share of it:
    quartiles, since on a shared machine neighbours differ by more than that."""
    pairs = zip(records["marked"], records["plain"])
    working = [[record["step"] - record["data"] for record in pair] for pair in pairs]
    return quartiles([marked / plain - 1 for marked, plain in working])


# ------------------------------------------------------------------------------------- the verdict


@dataclass(frozen=True)
class Facts:
    """What the verdict follows from."""

    shares: dict[str, float]  # of a step's time, by part
    split: Split
    size: int  # processes
    per_node: int
    sequences: int  # of a step, for each part of the batch
    microbatches: int
    room: int  # bytes that a process may fill
    peaks: dict[str, int]  # those that a step would take in each of `alternatives`
    attentions: float  # forwards for a layer and microbatch
    graph_breaks: int = 0
    on_gpu: bool = False
    mfu: float | None = None

    def fits(self, name: str) -> bool:
        return self.peaks[name] < self.room

    def fit(self, name: str) -> str:
        return f"fits: {self.peaks[name] / 1e9:.3g} of {self.room / 1e9:.3g} GB"

    def crosses(self, dim: str) -> bool:
        """Whether ranks along a dimension lie on several nodes."""
        split = self.split
        reach = {"tp": split.tp, "shard": split.tp * split.shard, "replicate": self.size}
        return self.per_node % reach[dim] != 0


def alternatives(split: Split, per_node: int) -> dict[str, Split]:
    """What a flag would make of a split: of the memory that each takes the verdict depends."""
    data = split.replicate * split.shard
    node = within_a_node(data, split.tp, per_node)
    return {
        "this": split,
        "ddp": replace(split, dp="ddp", replicate=data, shard=1, reshard="weights"),
        "hsdp": replace(split, dp="hsdp", replicate=data // node, shard=node),
        "reshard none": replace(split, reshard="none"),
        "selective": replace(split, checkpointing="selective"),
        "none": replace(split, checkpointing="none"),
    }


def verdict(facts: Facts) -> list[str]:
    """Sentences: what takes most of a step that need not, the largest first, and which flag would
    change it."""
    said = []
    for part, share in sorted(facts.shares.items(), key=lambda item: -item[1]):
        if part not in LEVERS:  # forward and backward are what a step is for
            continue
        what, levers, notable = LEVERS[part]
        if share > notable and (flags := levers(facts)):
            dim = part.removeprefix(EXPOSED)
            far = ", which crosses nodes" if dim != part and facts.crosses(dim) else ""
            said.append(f"{percent(share)} of the step {what}{far}: {'; or '.join(flags)}")
    if facts.attentions > 2:
        said.append(
            f"attention runs forward {facts.attentions:g} times a layer and microbatch: full "
            f"checkpointing needs 2, so there is a checkpoint within a checkpoint"
        )
    if facts.graph_breaks:
        said.append(
            f"{facts.graph_breaks} graph break(s) cut what is compiled: TORCH_LOGS=graph_breaks "
            f"in front of the command says where"
        )
    if facts.on_gpu and not facts.split.compile:
        said.append("blocks run uncompiled: --compile joins what lies between matrix products")
    return said or [all_is_well(facts)]


def noisy(shares: dict[str, float]) -> bool:
    """Whether some part came out clearly below nothing."""
    return min(shares.values()) < -0.05


def all_is_well(facts: Facts) -> str:
    """Of a step that computes: how well, and what is largest of all else."""
    rest = dict(facts.shares)
    computing = {p: rest.pop(p) for p in ("forward", "backward", "recompute") if p in rest}
    parts = ", ".join(f"{part} {percent(share)}" for part, share in computing.items())
    mfu = "" if facts.mfu is None else f", at {percent(facts.mfu)} of the device's peak"
    total, most = percent(sum(computing.values())), percent(max(rest.values()))
    return f"{total} of the step computes ({parts}){mfu}: nothing else takes more than {most}"


def percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def shard_levers(facts: Facts) -> list[str]:
    split, levers = facts.split, []
    node = within_a_node(split.replicate * split.shard, split.tp, facts.per_node)
    if facts.crosses("shard") and node > 1 and facts.fits("hsdp"):
        flag = "--dp hsdp" if split.dp != "hsdp" else f"--shard {node}"
        levers.append(f"{flag} keeps them within nodes, and {facts.fit('hsdp')}")
    if facts.fits("ddp") and not split.offload:
        levers.append(f"--dp ddp sends only gradients, and a whole copy {facts.fit('ddp')}")
    if facts.microbatches > 1:
        if split.reshard in ("weights", "all") and facts.fits("reshard none"):
            once = f"--reshard none gathers once a step, and {facts.fit('reshard none')}"
            levers.append(once)
        elif split.reshard != "none":
            levers.append("a larger --microbatch, where there is room, gathers weights less often")
    return levers or ["a larger --batch computes more for the same bytes"]


def tp_levers(facts: Facts) -> list[str]:
    if facts.crosses("tp"):
        return [f"--tp {facts.per_node} or less stays within a node"]
    if facts.sequences > 1:
        return ["a smaller --tp, where there is room, waits less"]
    return ["a smaller --tp, where there is room, waits less; it wants a larger --batch"]


def recompute_levers(facts: Facts) -> list[str]:
    weaker = ["none"] if facts.split.checkpointing == "selective" else ["none", "selective"]
    fitting = [name for name in weaker if facts.fits(name)]
    return [f"--checkpointing {name} {facts.fit(name)}" for name in fitting[:1]]


def optimizer_levers(facts: Facts) -> list[str]:
    if facts.split.offload and facts.fits("this"):
        return [f"without --offload it runs on the GPU, and a step {facts.fit('this')}"]
    return ["a larger --batch updates less often"]


def other_levers(facts: Facts) -> list[str]:
    levers = ["a larger --batch does this less often"]
    return levers + ["bench.py comm names a slow link"] * (facts.size > 1)


# Part -> what the step does in it, what helps, and from which share on it is worth a sentence.
LEVERS = {
    EXPOSED + "replicate": (
        "waits for gradients over replicate",
        lambda facts: ["a larger --batch sends gradients less often"],
        0.10,
    ),
    EXPOSED + "shard": (
        "waits for all-gathers and reduce-scatters over shard",
        shard_levers,
        0.10,
    ),
    EXPOSED + "tp": ("waits for all-gathers and reduce-scatters over tp", tp_levers, 0.10),
    "recompute": ("computes activations again", recompute_levers, 0.10),
    "data": (
        "waits for data",
        lambda facts: [
            "they come late: tokenize them with data.py tokenize, and read them from a disk nearby"
        ],
        0.05,
    ),
    "optimizer": ("updates weights", optimizer_levers, 0.15),
    "other": ("is clipping, sums and ranks that wait for each other", other_levers, 0.10),
}


# -------------------------------------------------------------------------------------- the report


def report(
    run: Run,
    records: dict[str, list[dict[str, float]]],
    held: dict[str, int | None],
    counted: Counted | None,
    attentions: int,
) -> str:
    """All of it in Markdown. Called on all ranks, as they compare their numbers."""
    args, world, split = run.args, run.world, run.world.split
    on_gpu = world.device.type == "cuda"
    parts = parts_of(records, run.dims, run.tells_recompute)
    parts = dict(zip(parts, world.gather(list(parts.values())).mean(0).tolist()))
    spread = quartiles([record["step"] for record in records["plain"]])
    low, step, high = world.gather(spread).mean(0).tolist()
    speed = args.batch * args.seq_len / step
    peak = peak_flops(torch.cuda.get_device_name()) if on_gpu else None
    mfu = peak and flops_per_token(run.model.config, args.seq_len) * speed / (peak * world.size)

    needs = partial(memory_of, run, fused=on_gpu or split.compile)
    forwards = attentions / (run.model.config.n_layers * run.microbatches)
    graphs, breaks = count_graphs()
    facts = Facts(
        shares={part: seconds / step for part, seconds in parts.items()},
        split=split,
        size=world.size,
        per_node=world.per_node,
        sequences=args.batch // world.data_size,
        microbatches=run.microbatches,
        room=device_room(world.device, world.per_node),
        peaks={name: needs(other) for name, other in alternatives(split, world.per_node).items()},
        attentions=forwards,
        graph_breaks=breaks if split.compile else 0,
        on_gpu=on_gpu,
        mfu=mfu,
    )
    stamps = cost_of_stamps(records)
    compiled = f"{graphs} graph(s) compiled, {breaks} graph break(s)"
    return "\n".join(
        [
            f"{speed:,.0f} tokens/s, {step:.4g} s a step (quartiles {low:.4g}-{high:.4g} s), MFU "
            f"{'unknown' if mfu is None else percent(mfu)}",
            "",
            *table_of_parts(parts, step),
            *["recompute is part of backward: compiled into it"] * hides_recompute(run),
            f"time stamps cost {100 * stamps[1]:.1f} % of a step (quartiles "
            f"{100 * stamps[0]:.1f} to {100 * stamps[2]:.1f} %)",
            "",
            *table_of_memory(held, needs(split)),
            "",
            f"a rank sends in a step {what_is_sent(counted)}",
            f"attention runs forward {forwards:g} time(s) a layer and microbatch",
            compiled if split.compile else "blocks are not compiled",
            "",
            *["too noisy to judge by: a quieter machine or more --repeats"] * noisy(facts.shares),
            *(f"- {sentence}" for sentence in verdict(facts)),
        ]
    )


def what_is_sent(counted: Counted | None) -> str:
    if counted is None:
        return "what is not counted: blocks are compiled"
    return describe({key: n for key, n in counted.sent.items() if key[0] != "nobody"}) or "nothing"


def hides_recompute(run: Run) -> bool:
    return run.world.split.checkpointing != "none" and not run.tells_recompute


def memory_of(run: Run, split: Split, fused: bool) -> int:
    """Bytes at the peak of a step that cost.py expects of another split."""
    whole, tokens = on_meta(run.model.config, None), run.args.microbatch * run.args.seq_len
    return memory(whole, split, tokens, run.microbatches, fused)["peak"]


def table_of_parts(parts: dict[str, float], step: float) -> list[str]:
    rows = [
        f"| {part} | {seconds:.4f} | {100 * seconds / step:.1f} % |"
        for part, seconds in (parts | {"the step": step}).items()
    ]
    return ["| part | seconds | share |", "|---|--:|--:|", *rows]


def table_of_memory(held: dict[str, int | None], predicted: int) -> list[str]:
    rows = held | {"peak as predicted": predicted}
    lines = [f"| {kind} | {megabytes(nbytes)} |" for kind, nbytes in rows.items()]
    return ["| held on a rank | bytes |", "|---|--:|", *lines]
