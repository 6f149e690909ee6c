r"""Schedules of a pipeline: in which order its ranks compute the microbatches.

    python -m techniques.schedules --stages 4 --microbatches 8 --schedule 1f1b        draws one

A schedule is text, a line for each rank, which is checked and timed here, drawn by timelines.py,
and run by pipeline.py:

    F0 F1 B0 F2 B1 B2      F2 is the forward of microbatch 2, B2 its backward
    F0@0 F0@2 B0@2 B0@0    @2: at stage 2, where a rank has several stages
    F0 B0 F1 W0 B1 W1      B computes the gradient of the input alone, W those of the weights

The last kind is drawn and not run. In it W fills the time in which a rank would wait, since others
wait for B alone (zero bubble, Qi et al. 2023, arXiv:2401.10241). But here a backward in two parts
took longer than one, and steps were no faster (docs/measured.md).

Stage s lies on rank s % p. Letters: p ranks of a pipeline, v stages of a rank, m microbatches.
"""

import functools
import itertools
import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from plumbing.messages import UserError
from plumbing.parser import Parser, positive_int
from plumbing.processes import run


def gpipe(rank: int, p: int, m: int, v: int = 1) -> list[str]:
    """All forwards, then all backwards (Huang et al. 2018, arXiv:1811.06965). Holds m microbatches.

    rank 0 F0 F1 F2 F3 .  .  .  B0 B0 B1 B1 B2 B2 B3 B3
    rank 1 .  F0 F1 F2 F3 B0 B0 B1 B1 B2 B2 B3 B3 .  .
    """
    return [f"F{i}" for i in range(m)] + [f"B{i}" for i in range(m)]


def one_f_one_b(rank: int, p: int, m: int, v: int = 1) -> list[str]:
    """Backwards as soon as possible, one after each forward (Narayanan et al. 2020,
    arXiv:2006.09503). The bubble is GPipe's, but a rank holds min(m, p - rank) microbatches.
    labs/pipeline writes it.

        rank 0 F0 F1 .  .  B0 B0 F2 B1 B1 F3 B2 B2 .  B3 B3
        rank 1 .  F0 B0 B0 F1 B1 B1 F2 B2 B2 F3 B3 B3 .  .
    """
    forwards = [f"F{i}" for i in range(m)]
    backwards = [f"B{i}" for i in range(m)]
    return alternate(forwards, backwards, first=min(m, p - 1 - rank))


def interleaved(rank: int, p: int, m: int, v: int = 2) -> list[str]:
    """1F1B with v stages on a rank: p microbatches pass through its first stage, then through its
    second, and so on (Narayanan et al. 2021, arXiv:2104.04473). The bubble is v times shorter, and
    (v p - 1) / (p - 1) times as much is sent. m must be a multiple of p. Holds min(m v,
    2 (p - 1 - rank) + (v - 1) p + 1) microbatches, each of one stage.

        rank 0 F0@0 F1@0 F0@2 F1@2 .    .    B0@2 B0@2 .    B1@2 B1@2 B0@0 B0@0 B1@0 B1@0
        rank 1 .    F0@1 F1@1 F0@3 B0@3 B0@3 F1@3 B1@3 B1@3 B0@1 B0@1 B1@1 B1@1 .    .
    """
    if m % p:
        raise UserError(f"interleaved takes a multiple of {p} microbatches, not {m}")
    turns = []  # (microbatch, which of the rank's stages)
    for first in range(0, m, p):
        for c in range(v):
            turns += [(first + i, c) for i in range(p)]
    forwards = [f"F{i}@{c * p + rank}" for i, c in turns]
    backwards = [f"B{i}@{(v - 1 - c) * p + rank}" for i, c in turns]
    return alternate(forwards, backwards, first=min(m * v, 2 * (p - 1 - rank) + (v - 1) * p))


def alternate(forwards: list[str], backwards: list[str], first: int) -> list[str]:
    """Return the `first` forwards, then a forward and a backward in turn, then what is left."""
    order = forwards[:first]
    for pair in zip(forwards[first:], backwards):
        order += pair
    return order + backwards[len(forwards) - first :]


SCHEDULES = {"gpipe": gpipe, "1f1b": one_f_one_b, "interleaved": interleaved}
STEADY = "1f1b", "interleaved"  # they repeat themselves: see `enough`
STAGES = {"interleaved": 2}  # of a rank, where --stages-per-rank is not given; others have 1


def lines_of(name: str, p: int = 1, m: int = 1, v: int = 1) -> list[str]:
    """Return the text of a schedule, a line for each rank: by its name, or from a file."""
    if name in SCHEDULES:
        if v > 1 and name not in STAGES:
            raise UserError(f"{name} has one stage on each rank: --stages-per-rank 1")
        return [" ".join(SCHEDULES[name](rank, p, m, v)) for rank in range(p)]
    file = Path(name)
    if not file.is_file():
        raise UserError(f"no schedule '{name}': choose from {', '.join(SCHEDULES)}, or give a file")
    without_comments = [line.partition("#")[0] for line in file.read_text("utf-8").splitlines()]
    return [line for line in without_comments if line.strip()]


# ----------------------------------------------------------------------------- reading and checking


class Action(NamedTuple):
    """What a rank computes: forward (F) or backward (B, W) of a microbatch at a stage."""

    kind: str
    microbatch: int
    stage: int

    def __str__(self):
        return f"{self.kind}{self.microbatch}@{self.stage}"


class Span(NamedTuple):
    """When an action is computed."""

    action: Action
    start: float
    end: float


Schedule = list[list[Action]]  # of each rank
Timeline = list[list[Span]]  # of each rank


def read_schedule(lines: list[str]) -> Schedule:
    """Read a schedule from lines, one for each rank, of actions such as F0, or B0@2 for stage 2.
    Raises ValueError for another word."""
    schedule = []
    for rank, line in enumerate(lines):
        order = []
        for position, word in enumerate(line.split(), 1):
            match = re.fullmatch(r"([FBW])(\d+)(?:@(\d+))?", word)
            if not match:
                raise ValueError(
                    f"rank {rank}, position {position}: '{word}' is no action such as F0 or B0@2"
                )
            kind, microbatch, stage = match.groups()
            order.append(Action(kind, int(microbatch), int(stage or rank)))
        schedule.append(order)
    return schedule


def splits_backward(schedule: Schedule) -> bool:
    return any(action.kind == "W" for order in schedule for action in order)


def check_schedule(schedule: Schedule, m: int, stages: int) -> Timeline:
    """Return the timeline of a schedule of m microbatches, in ticks: a forward takes one, a
    backward two, or B and W one each. Raises ValueError where gradients would be wrong or ranks
    would wait for each other; the message names rank and position."""
    p = len(schedule)
    splits = splits_backward(schedule)
    kinds = "FBW" if splits else "FB"
    for rank, order in enumerate(schedule):
        expected = itertools.product(kinds, range(m), range(rank, stages, p))
        wanted = set(itertools.starmap(Action, expected))
        seen = set()
        for position, action in enumerate(order, 1):
            where = f"rank {rank}, position {position}: {action}"
            if action not in wanted:
                raise ValueError(f"{where} is not for this rank, {m} microbatches, {stages} stages")
            if action in seen:
                raise ValueError(f"{where} was there before")
            for first in inputs_of(action, stages - 1):
                if first.stage == action.stage and first not in seen:
                    raise ValueError(f"{where} comes before {first}")
            seen.add(action)
        if missing := wanted - seen:
            raise ValueError(f"rank {rank}, position {len(order) + 1}: {min(missing)} is missing")
    ticks = {"F": 1, "B": 1 if splits else 2, "W": 1}
    return simulate(schedule, lambda action: ticks[action.kind])


def simulate(schedule: Schedule, seconds: Callable) -> Timeline:
    """Return when each rank computes what, if an action takes seconds(action), and messages no
    time. Raises ValueError where ranks wait for each other."""
    p = len(schedule)
    last = max(action.stage for action in itertools.chain(*schedule))
    ended: dict[Action, float] = {}
    spans: Timeline = [[] for _ in schedule]
    progress = True
    while progress:
        progress = False
        for rank, order in enumerate(schedule):
            done = spans[rank]
            free = done[-1].end if done else 0.0
            for action in order[len(done) :]:
                start = free
                try:
                    for other in inputs_of(action, last):
                        start = max(start, ended[other])
                except KeyError:  # it waits for that one
                    break
                ended[action] = free = start + seconds(action)
                done.append(Span(action, start, free))
                progress = True
    for rank, order in enumerate(schedule):
        if len(spans[rank]) < len(order):
            n_done = len(spans[rank])
            action = order[n_done]
            other = next(first for first in inputs_of(action, last) if first not in ended)
            raise ValueError(
                f"rank {rank}, position {n_done + 1}: {action} waits for {other}, which rank "
                f"{other.stage % p} never reaches: ranks wait for each other"
            )
    return spans


def inputs_of(action: Action, last: int) -> list[Action]:
    """Return the actions whose results an action needs; `last` is the last stage."""
    kind, microbatch, stage = action
    if kind == "F":
        return [Action("F", microbatch, stage - 1)] if stage else []
    if kind == "W":
        return [Action("B", microbatch, stage)]
    own = Action("F", microbatch, stage)
    return [own, Action("B", microbatch, stage + 1)] if stage < last else [own]


def held(order: list[Action]) -> int:
    """Return the most microbatches, of a stage each, whose activations a rank holds at a time."""
    frees = "W" if splits_backward([order]) else "B"
    now = most = 0
    for action in order:
        now += (action.kind == "F") - (action.kind == frees)
        most = max(most, now)
    return most


def enough(name: str, p: int, m: int) -> int:
    """Return how many of m microbatches are enough to find out what ranks hold and how long they
    wait: a steady schedule repeats itself after 2 p."""
    repeats = name in STEADY and m % p == 0
    return min(m, 2 * p) if repeats else m


@functools.lru_cache(1024)
def most_held(name: str, p: int, m: int, v: int, rank: int) -> int:
    """Return what `held` does for a rank of a schedule."""
    return held(make_schedule(name, p, enough(name, p, m), v)[rank])


def bubble(timeline: Timeline) -> float:
    """Return the share of all ranks' time in which they wait."""
    busy = sum(span.end - span.start for span in itertools.chain(*timeline))
    return 1 - busy / (end_of(timeline) * len(timeline))


def end_of(timeline: Timeline) -> float:
    return max(spans[-1].end for spans in timeline)


@functools.cache
def make_schedule(name: str, p: int, m: int, v: int = 1) -> Schedule:
    """Return a schedule of m microbatches, by its name or from a file. Raises UserError for one
    that cannot be carried out."""
    lines = lines_of(name, p, m, v)
    if len(lines) != p:
        raise UserError(f"schedule {name} has {len(lines)} lines, and {p} ranks need one each")
    try:
        schedule = read_schedule(lines)
        check_schedule(schedule, m, p * v)
    except ValueError as error:
        raise UserError(f"schedule {name}: {error}")
    return schedule


def main() -> None:
    from techniques.timelines import draw_svg, draw_text  # here: runs draw none

    parser = Parser(description="Draw a schedule.")
    parser.add_argument("--stages", type=positive_int, default=4, help="stages (default: 4)")
    parser.add_argument("--microbatches", type=positive_int, default=8, help="(default: 8)")
    parser.add_argument("--schedule", default="1f1b", help=f"{', '.join(SCHEDULES)}, or a file")
    parser.add_argument("--stages-per-rank", type=positive_int, help="(default: 1; interleaved: 2)")
    parser.add_argument("--plot", type=Path, metavar="FILE.svg", help="draw it there, too")
    args = parser.parse_args()
    v = args.stages_per_rank or STAGES.get(args.schedule, 1)
    p, rest = divmod(args.stages, v)
    if rest:
        raise UserError(f"--stages {args.stages} is no multiple of --stages-per-rank {v}")
    schedule = make_schedule(args.schedule, p, args.microbatches, v)
    spans = check_schedule(schedule, args.microbatches, args.stages)
    print(draw_text(spans))
    most = ", ".join(str(held(order)) for order in schedule)
    waits = f"{bubble(spans):.1%} of the time is waiting, if backward takes two forwards"
    print(f"{waits}; ranks hold {most} microbatches{' of a stage each' * (v > 1)}")
    if args.plot:
        args.plot.write_text(draw_svg(spans, f"{args.schedule}: {waits}"), "utf-8")


if __name__ == "__main__":
    run(main)
