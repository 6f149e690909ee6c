"""The check of labs/pipeline."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from config import ParallelConfig, Work
from costs.machines import assumed_machine
from costs.seconds import step_time
from labs.machinery import compare
from labs.machinery.compare import Property
from labs.machinery.lab import CONFIG, batch_of, plural, summed_gradients
from labs.machinery.student import Misuse, Refused, check_returned
from model import PRESETS, Llama
from parallel import parallelize, with_mesh
from perf.instruments import build_on_meta
from plumbing.processes import Process
from plumbing.shards import assign_shard, to_local
from techniques import schedules as timeline
from techniques import timelines
from techniques.schedules import SCHEDULES, Schedule, Timeline, splits_backward

FUNCTION = "schedule"
ABOUT = "1F1B as text, then a schedule that beats it"
NEEDS = "patience with a picture"
POINT = "a bubble is filled with what nobody waits for"
LEADS_TO = "techniques/schedules.py", "one_f_one_b"
SIZES = 2, 3, 4
BARRED = ("techniques.schedules.one_f_one_b",)
HINTS = (
    "Draw some lines of your own, as the head of the file says: who waits, and for which action of "
    "which rank?",
    "Count the forwards that a rank can run until its first backward can begin. Then count how "
    "many W a rank can put off before it holds too many microbatches.",
    "Some forwards first, fewer on each later rank; then a forward and a backward in turn, and at "
    "the end the backwards that are left. The last rank puts off most W, the first none.",
)
CONFIG = replace(CONFIG, n_layers=5)  # stages are uneven
ROWS, MICROBATCHES = 2, 6  # of a microbatch, and of the step that is run and drawn
CASES = [MICROBATCHES, *range(1, 10)]  # numbers of microbatches for which lines are checked
WIDTH = 110  # of a drawing, which is cut there
MISTAKES = {  # part of what check_schedule says -> what it means
    "ranks wait for each other": "Two ranks wait for each other: each needs what the other would "
    "compute later. How many forwards does each run before its first backward?",
    "is not for this rank": "There is no such microbatch, or no such stage on this rank. With "
    "fewer microbatches than ranks, there are fewer forwards to run first.",
    "comes before": "B needs what the F of its microbatch has computed, and W what B has.",
    "was there before": "Each rank computes each action of each microbatch once.",
    "is missing": "Each rank computes each action of each microbatch once.",
    "is no action": "Write actions such as F0, B0 and W0, with blanks between them.",
    "is no W": "W is never computed: where backward is split, B leaves out the weights' gradients.",
    "is a W": "Where split is False, B computes all gradients.",
}


def on_rank(load: Callable, size: int, seed: int, rank: int) -> dict:
    """Return the student's lines, split -> number of microbatches -> lines, and this rank's
    gradients of a step by those that do not split backward."""
    texts = {False: {}, True: {}}
    gradients = {}
    with patch.dict(SCHEDULES, {name: Refused(name, None) for name in SCHEDULES}):
        schedule = load()
        for split, m in product(texts, numbers(seed)):
            ranks = size if m in CASES else size + 3
            lines = schedule(ranks, m, split)
            check_returned(lines, list, "a list of strings, one for each rank")
            check_returned(tuple(lines), (str,) * ranks, f"{ranks} strings, one for each rank")
            if schedule(ranks, m, split) != lines:
                raise Misuse("A second call with the same arguments gives other lines.")
            texts[split][m] = lines
    lines = texts[False][MICROBATCHES]
    if not problem(lines, MICROBATCHES, split=False):
        gradients = gradients_by(lines, size, seed, rank)
    return {"texts": texts, "gradients": gradients}


def numbers(seed: int) -> list[int]:
    """Return the numbers of microbatches for which lines are checked, the last of them also for
    more ranks than here."""
    return [*CASES, 11 + seed % 7]


def gradients_by(lines: list[str], size: int, seed: int, rank: int) -> dict[str, Tensor]:
    """Run forward and backward of a step in the order of `lines`, by the project's pipeline."""
    # What notes a rank's calls hides these two from torch, which compares them.
    plain = {call: getattr(dist.distributed_c10d, call) for call in ("isend", "irecv")}
    ours = {"yours": lambda rank, p, m, v=1: lines[rank].split()}
    with patch.dict(SCHEDULES, ours), patch.multiple(dist, **plain):
        process = Process(rank, size, rank, size, torch.device("cpu"))
        world = with_mesh(process, ParallelConfig(pp=size, schedule="yours", dtype=torch.float64))
        with torch.device("meta"):
            model = Llama(CONFIG)
        runner = parallelize(model, world, lambda m: m.init_weights(seed, assign_shard))
        runner.accumulate(batch_of(seed).microbatches(ROWS))
    named = model.named_parameters()
    return {name: None if p.grad is None else to_local(p.grad) for name, p in named}


def problem(lines: list[str], m: int, split: bool) -> str:
    """Return why lines cannot be carried out, "" if they can."""
    try:
        schedule, _ = timed(lines, m)
    except ValueError as error:
        return str(error)
    if splits_backward(schedule) == split:
        return ""
    return "there is no W" if split else "there is a W"


def timed(lines: list[str], m: int) -> tuple[Schedule, Timeline]:
    """Return what lines say, and when it is computed. Raises ValueError if it cannot be."""
    schedule = timeline.read_schedule(lines)
    return schedule, timeline.check_schedule(schedule, m, len(lines))


def properties(results: dict[str, list], size: int, seed: int) -> Iterator[Property]:
    """Yield what is checked, in order: first of whole backwards, then of those in two parts."""
    model = Llama(CONFIG).double()
    model.init_weights(seed)
    _, _, expected = summed_gradients(model, batch_of(seed))
    for split, texts in results["texts"][0].items():
        suffix = " W" * split
        yield first_wrong("order" + suffix, check_order, texts, split)
        if not split:
            found = results["gradients"]
            wanted = [{name: expected[name] for name in of_rank} for of_rank in found]
            yield compare.tensors("gradients", found, wanted)
        yield first_wrong("held" + suffix, check_held, texts, split)
        yield first_wrong("waiting" + suffix, check_waiting, texts, split)


def first_wrong(name: str, check: Callable, texts: dict[int, list[str]], split: bool) -> Property:
    """Return the first of the cases that is wrong; if all are right, the first."""
    cases = [check(name, m, lines, split) for m, lines in texts.items()]
    return next((case for case in cases if not case.ok), cases[0])


def check_order(name: str, m: int, lines: list[str], split: bool) -> Property:
    """Return whether ranks can compute in this order, and compute everything."""
    found = problem(lines, m, split)
    if not found:
        return Property(name, f"can be carried out with 1 to {max(CASES)} microbatches", True)
    means = next((means for part, means in MISTAKES.items() if part in found), "")
    text = f"cannot be carried out with {plural(m, 'microbatch')}"
    return Property(name, text, False, f"{found[0].upper()}{found[1:]}. {means}")


def check_held(name: str, m: int, lines: list[str], split: bool) -> Property:
    """Return whether no rank holds more microbatches than it may."""
    schedule, _ = timed(lines, m)
    held = [timeline.held(order) for order in schedule]
    ranks = len(schedule)
    limits = [ranks if split else ranks - rank for rank in range(ranks)]
    mistakes = {
        "A microbatch is held until its W, so a rank that puts off W holds more. The first rank "
        "holds most before its first backward; the last one can put off most.": split,
        "All forwards come first, as in GPipe, so every microbatch is held. Run a backward as soon "
        "as one can be run: it lets go of a microbatch.": held == [m] * ranks,
        "Every rank runs as many forwards first. The last rank can run its first backward after "
        "its first forward, the rank before it after its second.": len(set(held)) == 1,
        "A rank runs more forwards before its first backward than keep it busy.": True,
    }
    text = f"{held} of {m} microbatches; at most {limits}"
    return Property(name, text, all(map(int.__le__, held, limits)), mistakes)


def check_waiting(name: str, m: int, lines: list[str], split: bool) -> Property:
    """Return whether ranks wait no longer than they must. Each works for 3 m ticks."""
    schedule, spans = timed(lines, m)
    end = int(max(of_rank[-1].end for of_rank in spans))
    ranks = len(schedule)
    waits = end - 3 * m
    limit = (1 if split else 3) * (ranks - 1)
    each_at_once = all(f"B{i} W{i}" in line for line in lines for i in range(m))
    mistakes = {
        "Each W comes right after its B, so none is left for the time in which a rank waits. The "
        "last ranks wait at the end: they can put W off.": split and each_at_once,
        "Look at the picture: where does each rank wait? Could it compute a W meanwhile? Or is "
        "there one that it computes while the rank before waits for its B?": split,
        "One microbatch is under way at a time: while it is with other ranks, this one waits. Send "
        "the next ones after it.": all(timeline.held(order) == 1 for order in schedule),
        "Look at the picture: where does each rank wait? Before its first backward it can run as "
        "many forwards more as there are ranks after it.": True,
    }
    text = f"{waits} of {end} ticks with {m} microbatches; {limit} cannot be avoided"
    return Property(name, text, waits <= limit or (split and m < ranks), mistakes)


def picture(results: dict[str, list], size: int, seed: int) -> str:
    """Draw what can be carried out, for the first number of microbatches that is wrong if there is
    one, and say how long a step would take on GPUs."""
    drawn = []
    for split, texts in results["texts"][0].items():
        if any(problem(lines, m, split) for m, lines in texts.items()):
            break
        wrong = (m for m, lines in texts.items() for check in (check_held, check_waiting)
                 if not check("", m, lines, split).ok)  # fmt: skip
        shown = next(wrong, MICROBATCHES)
        drawn += [f"{plural(shown, 'microbatch')}:"] * (shown != MICROBATCHES)
        _, spans = timed(texts[shown], shown)
        rows = timelines.draw_text(spans).splitlines()
        drawn += [row if len(row) <= WIDTH else f"{row[:WIDTH]} ..." for row in rows]
        if not split:
            drawn.append(
                f"Llama 3 8B on {size} nodes of 8 H100, a stage on each, 400 Gbit/s between them: "
                f"{step_seconds(texts):.2f} s a step\n"
            )
    return "\n".join(drawn).strip()


def drawing(results: dict[str, list], size: int, seed: int) -> str:
    """Draw the schedule with W as an SVG, if it can be carried out."""
    lines = results["texts"][0][True][MICROBATCHES]
    if problem(lines, MICROBATCHES, split=True):
        return ""
    _, spans = timed(lines, MICROBATCHES)
    return timelines.draw_svg(spans, f"{size} ranks, {MICROBATCHES} microbatches, with W")


def step_seconds(texts: dict[int, list[str]]) -> float:
    """Return the seconds that `bench.py plan` predicts for a step of Llama 3 8B, with microbatches
    of 8,192 tokens. `texts` are the lines for each number of microbatches."""
    name = str(texts)  # schedules are remembered by name
    with patch.dict(SCHEDULES, {name: lambda rank, p, m, v=1: texts[m][rank].split()}):
        sizes = dict(pp=len(texts[MICROBATCHES]), shard=8)
        parallel = ParallelConfig("fsdp", **sizes, schedule=name, dtype=torch.bfloat16)
        machine = assumed_machine("h100", "400gbit", per_node=8)
        model = build_on_meta(PRESETS["llama3-8b"])
        work = Work(model, parallel, 8 * MICROBATCHES, 1, 8192, on_gpu=True)
        return sum(step_time(work, machine).values())
