"""Schedules of a pipeline as text: read, checked, timed, drawn. pipeline.py makes and runs them."""

import re
from collections.abc import Callable
from html import escape
from typing import NamedTuple


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
    p, splits = len(schedule), splits_backward(schedule)
    needs = {"B": "F", "W": "B"}
    for rank, order in enumerate(schedule):
        kinds = "FBW" if splits else "FB"
        wanted = {Action(k, i, s) for k in kinds for i in range(m) for s in range(rank, stages, p)}
        seen = set()
        for position, action in enumerate(order, 1):
            where = f"rank {rank}, position {position}: {action}"
            if action not in wanted:
                raise ValueError(f"{where} is not for this rank, {m} microbatches, {stages} stages")
            if action in seen:
                raise ValueError(f"{where} was there before")
            if action.kind in needs:
                first = action._replace(kind=needs[action.kind])
                if first not in seen:
                    raise ValueError(f"{where} comes before {first}")
            seen.add(action)
        if missing := wanted - seen:
            raise ValueError(f"rank {rank}, position {len(order) + 1}: {min(missing)} is missing")
    ticks = {"F": 1, "B": 1 if splits else 2, "W": 1}
    return simulate(schedule, lambda action: ticks[action.kind])


def simulate(
    schedule: Schedule, seconds: Callable[[Action], float], message: float = 0.0
) -> Timeline:
    """Return when each rank computes what, if an action takes seconds(action), and a message to
    another rank `message` seconds. Raises ValueError where ranks wait for each other."""
    p, last = len(schedule), max(action.stage for order in schedule for action in order)
    ended: dict[Action, float] = {}
    spans: Timeline = [[] for _ in schedule]
    progress = True
    while progress:
        progress = False
        for rank, order in enumerate(schedule):
            while len(spans[rank]) < len(order):
                action = order[len(spans[rank])]
                needed = inputs_of(action, last)
                if not all(other in ended for other in needed):
                    break
                free = spans[rank][-1].end if spans[rank] else 0.0
                arrivals = (ended[o] + message * (o.stage % p != rank) for o in needed)
                start = max([free, *arrivals])
                ended[action] = start + seconds(action)
                spans[rank].append(Span(action, start, ended[action]))
                progress = True
    for rank, order in enumerate(schedule):
        if len(spans[rank]) < len(order):
            action, position = order[len(spans[rank])], len(spans[rank]) + 1
            other = next(other for other in inputs_of(action, last) if other not in ended)
            raise ValueError(
                f"rank {rank}, position {position}: {action} waits for {other}, which rank "
                f"{other.stage % p} never reaches: ranks wait for each other"
            )
    return spans


def inputs_of(action: Action, last: int) -> list[Action]:
    """Return the actions whose results an action needs; `last` is the last stage."""
    kind, microbatch, stage = action
    if kind == "F":
        return [Action("F", microbatch, stage - 1)] * (stage > 0)
    own = Action("F" if kind == "B" else "B", microbatch, stage)
    return [own] + [Action("B", microbatch, stage + 1)] * (kind == "B" and stage < last)


def held(order: list[Action]) -> int:
    """Return the most microbatches, of a stage each, whose activations a rank holds at a time."""
    frees = "W" if splits_backward([order]) else "B"
    now = most = 0
    for action in order:
        now += (action.kind == "F") - (action.kind == frees)
        most = max(most, now)
    return most


def bubble(timeline: Timeline) -> float:
    """Return the share of all ranks' time in which they wait."""
    end = max(spans[-1].end for spans in timeline)
    busy = sum(span.end - span.start for spans in timeline for span in spans)
    return 1 - busy / (end * len(timeline))


# ---------------------------------------------------------------------------------------- drawing


def draw_text(timeline: Timeline) -> str:
    """Return a line for each rank, with a column for each tick."""
    several = max(span.action.stage for spans in timeline for span in spans) >= len(timeline)
    lines = []
    for rank, spans in enumerate(timeline):
        cells = ["."] * int(max(spans[-1].end for spans in timeline))
        for action, start, end in spans:
            name = str(action) if several else f"{action.kind}{action.microbatch}"
            cells[int(start) : int(end)] = [name] * int(end - start)
        lines.append([f"rank {rank}", *cells])
    width = max(len(cell) for line in lines for cell in line[1:])
    return "\n".join(
        " ".join([line[0], *(c.ljust(width) for c in line[1:])]).rstrip() for line in lines
    )


FILLS = {"F": "#4c8dd6", "B": "#dd8435", "W": "#46a568"}


def draw_svg(
    timeline: Timeline,
    title: str,
    lanes: list[str] | None = None,
    ticks: dict[float, str] | None = None,
) -> str:
    """Return a picture: forwards blue, backwards orange, W green, and nothing where ranks wait.

    `lanes` are the names of the rows, if these are no ranks; `ticks` maps times to the labels of an
    axis below them."""
    width, row, left, top = 900, 26, 70 if lanes else 60, 34
    right = 28 if ticks else 10  # room for half a label
    scale = (width - left - right) / max(span.end for spans in timeline for span in spans)
    bottom = top + row * len(timeline)
    height = bottom + (24 if ticks else 8)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'font-family="sans-serif" font-size="12">',
        "<style>text { fill: #1f2328 } @media (prefers-color-scheme: dark) "
        "{ text { fill: #e6edf3 } } .inside { fill: #ffffff }</style>",
        f'<text x="{left}" y="20" font-size="14">{escape(title)}</text>',
    ]
    for rank, spans in enumerate(timeline):
        y = top + row * rank
        name = lanes[rank] if lanes else f"rank {rank}"
        parts.append(f'<text x="8" y="{y + 16}">{name}</text>')
        for action, start, end in spans:
            x, w = left + start * scale, (end - start) * scale
            # Later stages of a rank are paler.
            opacity = 1 / (1 + 0.4 * (action.stage // len(timeline)))
            parts.append(
                f'<rect x="{x:.1f}" y="{y}" width="{max(w - 1, 0.5):.1f}" height="{row - 4}" '
                f'fill="{FILLS[action.kind]}" fill-opacity="{opacity:.2f}"/>'
            )
            if w > max(14, 7 * len(str(action.microbatch))):
                parts.append(f'<text class="inside" x="{x + w / 2:.1f}" y="{y + 16}" '
                             f'text-anchor="middle">{action.microbatch}</text>')  # fmt: skip
    for time, label in (ticks or {}).items():
        x = left + time * scale
        parts.append(f'<path d="M {x:.1f} {bottom} v 4" stroke="#6e7781"/>')
        parts.append(f'<text x="{x:.1f}" y="{bottom + 17}" text-anchor="middle">{label}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"
