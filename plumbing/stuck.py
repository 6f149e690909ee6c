"""Find out which rank keeps the others waiting, and at which line.

Every rank reports where it is, and the last collectives of each of its process groups by number,
which PyTorch records (its flight recorder). All ranks of a group call the same collective under a
number; so one that has called another, or none while others wait, has gone astray.
"""

import json
import math
import os
import re
import sys
import threading
import time
import traceback
from collections import defaultdict
from typing import NamedTuple

import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

STUCK_AFTER = 60  # seconds, or five times the last step if that is more, without the end of a step
KEPT = 500  # collectives in a report
ROOT = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "")
# Files of torch.distributed, and ours in which ranks wait for each other.
COMMUNICATES = ("distributed_c10d.py", "_functional_collectives.py", "plumbing/processes.py")
SAME_SIZES = "all_?reduce|all_?gather|reduce_?scatter"  # on all ranks


class LastStep(NamedTuple):
    """The last step that has ended."""

    number: int | None = None  # None: no other follows
    ended_at: float = 0.0
    report_at: float = math.inf  # when the next step counts as stuck


last_step = LastStep()
own_error: BaseException | None = None  # that ends this process, and tells where, if others wait


def note_step(step: int | None, seconds: float = 0.0) -> None:
    """Let the watching thread know that a step has ended, which took so many seconds, or that no
    others follow (None)."""
    global last_step
    if step is None:
        last_step = LastStep()
        return
    now = time.monotonic()
    last_step = LastStep(step, now, now + max(STUCK_AFTER, 5 * seconds))


def position(error: BaseException | None = None) -> tuple[str, bool]:
    """Return the innermost line of this project that the main thread is in, as `train.py:185`, or
    that has raised an error; and whether it communicates there. The main thread goes on."""
    if error:
        frames = reversed(list(traceback.walk_tb(error.__traceback__)))
    else:
        frames = traceback.walk_stack(sys._current_frames()[threading.main_thread().ident])
    communicates = False
    for frame, line in frames:
        path = frame.f_code.co_filename
        waits = path.endswith(COMMUNICATES)
        if path.startswith(ROOT) and "site-packages" not in path and not waits:
            return f"{path.removeprefix(ROOT)}:{line}", communicates
        communicates |= waits
    return "?", communicates


def report() -> dict:
    """Return where this rank is, or has failed: its `line`; whether it `waits`; the ranks of its
    `groups`; its last `calls`: [group, number, name, sizes of the input, whether it has ended].

    With NCCL the host calls collectives that the GPU has not come to: they have not ended."""
    line, waits = position(own_error)
    names = list(dist.distributed_c10d._world.pg_names.items())
    known = {str(name): dist.get_process_group_ranks(group) for group, name in names}
    groups = {}
    calls = []
    for entry in recorded_calls():
        backend, _, name = entry["profiling_name"].partition(":")
        group_name = entry["process_group"][0]
        ranks = known.get(group_name)
        if ranks and not entry["is_p2p"]:
            group = f"{backend} {group_name} from rank {ranks[0]}"
            groups[group] = ranks
            has_ended = entry["retired"]
            waits |= not has_ended
            number = entry["collective_seq_id"]
            calls.append([group, number, name, entry["input_sizes"], has_ended])
    return dict(line=line, waits=waits, groups=groups, calls=calls)


def recorded_calls() -> list[dict]:
    """Return the last entries of the flight recorders of gloo and, if torch has it, NCCL."""
    calls = []
    for name in ("_dump_fr_trace_json", "_dump_nccl_trace_json"):
        dump = getattr(c10d, name, None)
        if dump:
            recorded = json.loads(dump(True, False))
            calls += recorded.get("entries", [])[-KEPT:]
    return calls


def describe(reports: dict[int, dict]) -> str:
    """Return which ranks wait, in what, and which rank they wait for, from the ranks' reports."""
    called = defaultdict(dict)  # (number, group) -> rank -> name, sizes, whether it has ended
    members = {}  # group -> its ranks
    for rank, found in sorted(reports.items()):
        members |= found["groups"]
        for group, number, *call in found["calls"]:
            called[number, group][rank] = call
    absent = []  # of each collective that ranks wait in: do all wait, how many do (negative), text
    for (number, group), calls in sorted(called.items()):
        alike = defaultdict(list)  # what was called -> by which ranks
        for rank, (name, sizes, _) in calls.items():
            size = str(sizes) if re.search(SAME_SIZES, name) else ""
            alike[name, size].append(rank)
        (what, _), most = max(alike.items(), key=lambda item: len(item[1]))
        here = f"{what} {number} ({reports[most[0]]['line']})"
        others = sorted(calls.keys() - set(most))
        if others:
            name, *_ = calls[others[0]]
            line = reports[others[0]]["line"]
            return f"{_ranks(most)} called {here}; {_ranks(others)} called {name} instead: {line}"
        waiting = [rank for rank in most if not calls[rank][-1]]
        missing = [rank for rank in members[group] if rank in reports and rank not in calls]
        if waiting and missing:
            guilty = [rank for rank in missing if not reports[rank]["waits"]]
            awaited = guilty or missing
            wait = "wait" if len(waiting) > 1 else "waits"
            text = f"{_ranks(waiting)} {wait} in {here}; {_ranks(awaited)} never called it"
            line = reports[awaited[0]]["line"]
            absent.append((not guilty, -len(waiting), f"{text}: {line}"))
    if absent:
        _, _, told = min(absent)
        return told
    places = defaultdict(list)
    for rank, found in sorted(reports.items()):
        does = "waiting" if found["waits"] else "computing"
        places[f"{does} at {found['line']}"].append(rank)
    return "; ".join(f"{_ranks(ranks)} {place}" for place, ranks in places.items())


def who_waits(store: dist.Store) -> str:
    """Return which rank keeps the others waiting: what rank 0 has found out in this step, so that
    not every rank reads the reports of all; else as the reports have it."""
    if store.check(["stuck"]):
        step, line = json.loads(store.get("stuck"))
        if step == last_step.number:
            return line
    reports = {}
    for rank in range(dist.get_world_size()):
        key = f"report of rank {rank}"
        if store.check([key]):
            reports[rank] = json.loads(store.get(key))
    return describe(reports)


def _ranks(ranks: list[int]) -> str:
    noun = "ranks" if len(ranks) > 1 else "rank"
    return f"{noun} {' '.join(map(str, ranks))}"
