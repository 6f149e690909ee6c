"""Check a student's file on several ranks, and say in words what is wrong with it."""

import importlib
import math
import re
import textwrap
import time
from collections import Counter
from collections.abc import Collection, Iterator
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

from labs.machinery import compare, student
from labs.machinery.answers import LABS
from labs.machinery.compare import Property
from labs.machinery.lab import plural
from labs.machinery.ranks import Call, Ended, busy, run_ranks

NOT_WRITTEN = "not written yet"  # what is wrong with a starter
KNOWN_SEED = 0  # with which wrong answers have been run (known.py)
BARRIER = (
    "A barrier makes all ranks wait for the slowest, and helps nothing here: each collective waits "
    "for what it needs."
)


BROKEN = {
    "gloo": "The connection between ranks broke: one of them has ended, or they did not send what "
    "others await."
}


class Report(NamedTuple):
    """What came out of a check on some number of ranks."""

    passed: bool
    properties: list[Property]  # those that were looked at, in order: at most the last is wrong
    mistake: str  # the sentence for what is wrong; "" if nothing is, or if it is not known
    text: str  # what the student reads
    drawing: str = ""  # an SVG of the time line, if the lab has one


def check(lab: str, size: int, seed: int, path: Path) -> Report:
    """Check a student's file on `size` ranks; and if it is right, with each of its functions called
    again before what they returned is used."""
    report = check_once(lab, size, seed, path)
    if report.passed:
        student.AGAIN = True
        again = check_once(lab, size, seed, path, held={line.name for line in report.properties})
        student.AGAIN = False
        if not again.passed:
            return again
    return report


def check_module(lab: str) -> ModuleType:
    return importlib.import_module(f"labs.{lab}.check")


def check_once(lab: str, size: int, seed: int, path: Path, held: Collection[str] = ()) -> Report:
    """Check a student's file once. `held` are the lines of the report that held where functions
    were not called again."""
    module = check_module(lab)
    source = path.read_text().splitlines()
    started = time.monotonic()
    ended = run_student(lab, size, seed, path)
    elapsed = time.monotonic() - started
    facts = f"{len(source)} lines, {plural(size, 'rank')}, seed {seed}"
    head = f"{path}  {facts}  {elapsed:.1f} s"
    if ended.error and ended.error.message.startswith("about "):
        text = f"  {NOT_WRITTEN}: {ended.error.message}, in place of line {ended.error.line}"
        return Report(False, [], NOT_WRITTEN, f"{head}\n{text}")
    properties = []
    shown = []
    mistake = ""
    drawing = ""
    if differing := different_groups(ended.calls):  # may hang, fail, or give wrong numbers
        mistake = differing
        lines = wrapped(differing)
    elif ended.hangs:
        mistake = where_they_parted(ended)
        lines = explain_hang(ended)
    elif ended.error:
        mistake, lines = explain_error(ended, source, getattr(module, "ERRORS", {}))
    else:
        properties = properties_of(lab, size, seed, ended)
        lines = [f"  {line.name:<15} {line.text:<64} {'ok' if line.ok else 'no'}"
                 for line in properties]  # fmt: skip
        results = compare.by_name(ended.results)
        picture, drawing = (getattr(module, name, lambda *_: "")(results, size, seed)
                            for name in ("picture", "drawing"))  # fmt: skip
        shown = [textwrap.indent(picture, "  ")] if picture else []
        if properties[-1].ok:
            return Report(True, properties, "", "\n".join([head, *lines, *shown]), drawing)
        if properties[-1].name in held:
            mistake = student.ONCE
        else:
            mistake = not_waited_for(ended.unfinished) or (
                known_sentence(lab, size, seed, path, properties[-1]) or properties[-1].mistake
            )
        lines += wrapped(mistake) + show_calls(ended.calls[0], source)
    hint = f"  hint: python labs/run.py hint {lab}"
    text = "\n".join([head, *lines, *shown, hint])
    return Report(False, properties, mistake, text, drawing)


def run_student(lab: str, size: int, seed: int, path: Path) -> Ended:
    """Return how a lab's ranks ended with the function in a student's file."""
    return run_ranks(partial(student.on_rank, check_module(lab), path, size, seed), size, path)


def properties_of(lab: str, size: int, seed: int, ended: Ended) -> list[Property]:
    """Return the lines of a report on what the ranks returned, up to the first that does not
    hold."""
    module = check_module(lab)
    found = module.properties(compare.by_name(ended.results), size, seed)
    barriers = [call for calls in ended.calls for call in calls
                if call.name == "barrier" and call.line]  # fmt: skip
    if barriers and not getattr(module, "NEEDS_BARRIERS", False):
        found = [Property("barriers", f"{len(barriers)} calls", False, BARRIER)]
    properties = list(until_wrong(found))
    if properties[-1].ok and ended.unfinished:
        text = f"nothing waits for {plural(len(ended.unfinished), 'call')} of all ranks"
        properties.append(Property("waited for", text, False))
    return properties


def known_sentence(lab: str, size: int, seed: int, path: Path, wrong: Property) -> str:
    """Return the sentence of the wrong answer that gives the same numbers as the student's file,
    which is run once more if that was with another seed than theirs; "" if none does."""
    if wrong.found is None:
        return ""
    if seed != KNOWN_SEED:
        ended = run_student(lab, size, KNOWN_SEED, path)
        if ended.results is None:
            return ""
        wrong = properties_of(lab, size, KNOWN_SEED, ended)[-1]
    sentence = compare.known_sentence(LABS / lab / "known.json", size, wrong)
    return with_facts(lab, size, sentence)


def with_facts(lab: str, size: int, sentence: str) -> str:
    """Return a sentence of wrong.txt with what is in {braces} filled in."""
    facts = getattr(check_module(lab), "facts", lambda size: {})
    return sentence.format(**facts(size))


def until_wrong(properties: Iterator[Property]) -> Iterator[Property]:
    """Yield properties up to the first that does not hold."""
    for found in properties:
        yield found
        if not found.ok:
            return


def wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, 98, initial_indent="  ", subsequent_indent="  ")


def show_calls(calls: list[Call], source: list[str]) -> list[str]:
    """Return the lines of a student's file in which a rank called torch.distributed."""
    by_line = Counter((call.line, call.name) for call in calls if call.line)
    return [f"  line {line:<4} {name}, on rank 0 {plural(n, 'time')}: {source[line - 1].strip()}"
            for (line, name), n in sorted(by_line.items())]  # fmt: skip


def explain_error(ended: Ended, source: list[str], known: dict[str, str]) -> tuple[str, list[str]]:
    """Return what an exception means, in a sentence and in lines. If ranks made different
    collectives, that comes first; an exception of gloo's, which then comes from a broken
    connection, says nothing more."""
    error = ended.error
    parted = first_difference(collectives(ended))
    if parted and "gloo" in error.message:
        return parted, wrapped(parted)
    if error.kind == "Misuse":
        return error.message, wrapped(error.message)
    where = f" in line {error.line}: {source[error.line - 1].strip()}" if error.line else ""
    message = re.sub(r"\[rank\d+\]:\[F.*?\.cpp:\d+\] ", "", error.message)
    raised = f"{error.kind}: {message}"
    sentence = swapped_tensors(ended.calls[error.rank], error.line) or next(
        (text for part, text in (known | BROKEN).items() if part in error.message), ""
    )
    failed = f"  rank {error.rank} failed{where}"
    lines = [*wrapped(parted), failed, *wrapped(raised), *wrapped(sentence)]
    return parted or sentence or raised, lines


def swapped_tensors(calls: list[Call], line: int | None) -> str:
    """Return that a rank's last call, in the line that failed, has its input in place of its
    output; "" if the shapes do not show that."""
    if not calls or calls[-1].line != line or calls[-1].second is None:
        return ""
    name, first, second = calls[-1].name, calls[-1].shape, calls[-1].second
    has_more = math.prod(first) - math.prod(second)  # the first has so many elements more
    if name == "reduce_scatter_tensor" and has_more > 0:
        larger = "input"
    elif name == "all_gather_into_tensor" and has_more < 0:
        larger = "output"
    else:
        return ""
    return (
        f"{name} takes the output first, then the input, and its {larger} is the larger one. Here "
        f"{first} comes first, then {second}."
    )


def explain_hang(ended: Ended) -> list[str]:
    """Return where each rank is, and what keeps the ranks from going on."""
    lines = ["  stopped: ranks wait for each other, or compute without end"]
    for rank, (calls, returned) in enumerate(zip(ended.calls, ended.returned)):
        after = plural(len(calls), "call")
        if returned:
            lines.append(f"  rank {rank}  has returned, after {after}")
        elif is_elsewhere(ended, rank):
            lines.append(f"  rank {rank}  is in line {ended.lines[rank]}, after {after}")
        elif calls:
            shape = "" if calls[-1].shape is None else f" {calls[-1].shape}"
            place = f"line {calls[-1].line}" if calls[-1].line else "not in your file"
            lines.append(f"  rank {rank}  call {len(calls)}: {calls[-1].name}{shape}, {place}")
        else:
            lines.append(f"  rank {rank}  has called nothing, and is not in your file")
    return [*lines, *wrapped(where_they_parted(ended))]


def is_elsewhere(ended: Ended, rank: int) -> bool:
    """Return whether a rank was in a line of the student's file that is not that of its last call
    of torch.distributed, and so did not wait in that call."""
    line, calls = ended.lines[rank], ended.calls[rank]
    return (
        not ended.returned[rank] and line is not None and line not in (c.line for c in calls[-1:])
    )


def not_waited_for(unfinished: list[Call]) -> str:
    """Return the sentence for an asynchronous call that nothing waits for; "" if there is none.
    What went wrong besides may come from it, and differ from one run to the next."""
    if not unfinished:
        return ""
    call = unfinished[0]
    return (
        f"In line {call.line} nothing waits for the {call.name}: it may still be under way when "
        f"its tensors are used. Call wait() of what it returned."
    )


PAIRS = {"send", "recv", "isend", "irecv"}  # may differ between ranks


def collectives(ended: Ended) -> list[list[Call]]:
    """Return the calls of each rank in which all ranks take part."""
    return [[call for call in calls if call.name not in PAIRS] for calls in ended.calls]


def first_difference(calls: list[list[Call]]) -> str:
    """Return the first call whose name or shape differs between ranks; "" if there is none."""
    for number, of_ranks in enumerate(zip(*calls), 1):
        of_one_shape = of_ranks[0].name != "all_to_all_single"  # which takes any of each rank
        if len({(call.name, str(call.shape) * of_one_shape) for call in of_ranks}) > 1:
            what = ", ".join(f"rank {r} {c.name} {c.shape}, line {c.line}"
                             for r, c in enumerate(of_ranks))  # fmt: skip
            return f"They parted at call {number}: {what}. Ranks must call alike, in one order."
    return ""


def different_groups(calls: list[list[Call]]) -> str:
    """Return which ranks made different groups where they should have made one; "" if none did."""
    of_ranks = [[call for call in of_rank if call.name == "new_group"] for of_rank in calls]
    for groups in zip(*of_ranks):
        for rank, group in enumerate(groups):
            if group.shape != groups[0].shape:
                return (
                    f"Every rank has to make every group, its own or not, in one order. In line "
                    f"{group.line} rank 0 made a group of ranks {groups[0].shape}, and rank {rank} "
                    f"one of {group.shape}."
                )
    return ""


def where_they_parted(ended: Ended) -> str:
    """Return why ranks wait for ever, as far as their calls show it (labs/hang finds who)."""
    if elsewhere := [rank for rank in range(len(ended.calls)) if is_elsewhere(ended, rank)]:
        rank = elsewhere[0]
        stays = f"Rank {rank} does not come out of line {ended.lines[rank]}"
        if True in ended.returned:  # what a library calls for a student's line is not noted
            gone = ended.returned.index(True)
            stays += f", and rank {gone} has returned: does it wait for what rank {gone} left out"
            return f"{stays}?{busy()}"
        return f"{stays}.{busy()}"
    if not any(ended.calls):
        return f"No rank has called torch.distributed: does a loop not end?{busy()}"
    waiting = {calls[-1].name for calls, returned in zip(ended.calls, ended.returned)
               if calls and not returned}  # fmt: skip
    if waiting == {"send"}:
        return (
            "All ranks that wait are in send, until their messages are received: call isend, "
            "receive, and then wait."
        )
    if waiting == {"recv"}:
        return "All ranks that wait are in recv: the ranks that should send to them do not."
    if parted := first_difference(collectives(ended)):
        return parted
    if waiting & PAIRS:
        return ""
    shortest = min(map(len, ended.calls))
    behind = [rank for rank, calls in enumerate(ended.calls) if len(calls) == shortest]
    if len(behind) == len(ended.calls):
        made = plural(shortest, "call")
        return f"All ranks made the same {made}: do their groups have the same ranks?{busy()}"
    ranks = ", ".join(map(str, behind))
    return f"They parted after call {shortest}: rank {ranks} made no more, and the others wait."
