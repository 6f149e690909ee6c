"""Labs: write a part of distributed training yourself, and be told what is wrong with it.

    python labs/run.py                       the labs, and which is next
    python labs/run.py check mean            check labs/mean.py; --ranks 3 --seed 7 for other cases
    python labs/run.py watch mean            check it whenever the file changes
    python labs/run.py hint mean             the next of three hints
    python labs/run.py why mean              the solution, once you have passed
    python labs/run.py reset mean            the file as it was; yours is kept beside it

A check runs your function on several ranks of this machine. It compares numbers with those of one
process, in float64, and then what was sent, held and computed, to the byte.
"""

import sys
from pathlib import Path

LABS = Path(__file__).resolve().parent
sys.path[:0] = [str(LABS.parent), str(LABS)]

import argparse
import importlib
import json
import os
import re
import time
from collections.abc import Iterator
from types import ModuleType

import torch
from ranks import Ended, RankError, run_ranks

from plumbing.processes import UserError, run

NAMES = ("mean", "accumulate", "recompute")  # in the order of teaching
STATE = LABS / ".state"  # which labs have been passed, and how many hints were given


def read_state() -> dict:
    return json.loads(STATE.read_text()) if STATE.exists() else {"passed": [], "hints": {}}


def write_state(state: dict) -> None:
    temporary = STATE.with_suffix(".part")
    temporary.write_text(json.dumps(state))
    os.replace(temporary, STATE)


def check_of(lab: str) -> ModuleType:
    if lab not in NAMES:
        raise UserError(f"no lab '{lab}': choose from {', '.join(NAMES)}")
    return importlib.import_module(f"checks.{lab}")


def answer_of(lab: str) -> str:
    """Return the source of the solution. Raises UserError where it was left out."""
    path = LABS / "answers" / f"{lab}.py"
    if not path.exists():
        raise UserError("this copy of the labs has no solutions: ask your teacher")
    return path.read_text()


def starter_of(answer: str) -> str:
    """Return a solution without the part that is to be written, and without what follows it."""
    gap = re.search(r"^( +)# >>>\n(.*?)^ +# <<<\n", answer, re.MULTILINE | re.DOTALL)
    lines = len(gap[2].splitlines())
    filled = f'{gap[1]}raise NotImplementedError("about {lines} lines")\n'
    return answer[: gap.start()] + filled


def question_of(lab: str) -> str:
    """Return the first line of a lab's file."""
    return (LABS / f"{lab}.py").read_text().removeprefix('"""').split("\n")[0]


# ------------------------------------------------------------------------------------- checking


def check(lab: str, size: int, seed: int, path: Path | None = None) -> tuple[bool, str]:
    """Return whether a student's file passes on `size` ranks, and the report."""
    module, path = check_of(lab), (path or LABS / f"{lab}.py").resolve()
    source = path.read_text().splitlines()
    started = time.monotonic()
    ended = run_ranks(module.check(path, size, seed), size, path)
    elapsed = time.monotonic() - started
    lines = [f"{path}  {len(source)} lines, {size} ranks, seed {seed}  {elapsed:.1f} s"]
    if ended.error:
        return False, "\n".join([*lines, *explain_error(ended.error, source)])
    if ended.hang:
        return False, "\n".join([*lines, *explain_hang(ended)])
    for found in module.properties(ended.results, size, seed):
        lines.append(f"  {found.name:<14} {found.found:<64} {'ok' if found.ok else 'no'}")
        if not found.ok:
            lines += [f"  {found.mistake}"] if found.mistake else []
            return False, "\n".join([*lines, f"  hint: python labs/run.py hint {lab}"])
    return True, "\n".join(lines)


def explain_error(error: RankError, source: list[str]) -> list[str]:
    if error.kind == "NotImplementedError":
        return [f"  not written yet: {error.message}, in place of line {error.line}"]
    where = f" in line {error.line}: {source[error.line - 1].strip()}" if error.line else ""
    return [f"  rank {error.rank} failed{where}", f"  {error.kind}: {error.message}"]


def explain_hang(ended: Ended) -> list[str]:
    """Return where each rank waits, and the first call in which the ranks differ."""
    lines = ["  stopped after 5 s without progress"]
    for rank, call in enumerate(ended.hang):
        number = len(ended.calls[rank])
        if call:
            shape = "" if call.shape is None else f" {call.shape}"
            lines.append(f"  rank {rank}  call {number}: {call.name}{shape}, line {call.line}")
        else:
            lines.append(f"  rank {rank}  has called nothing")
    return [*lines, f"  {where_they_parted(ended)}"]


def where_they_parted(ended: Ended) -> str:
    shortest = min(map(len, ended.calls))
    for number in range(shortest):
        of_ranks = [calls[number] for calls in ended.calls]
        if len({(call.name, str(call.shape)) for call in of_ranks}) > 1:
            what = ", ".join(f"rank {r} {c.name} {c.shape}" for r, c in enumerate(of_ranks))
            return f"They parted at call {number + 1}: {what}. Ranks must call in one order."
    behind = [rank for rank, calls in enumerate(ended.calls) if len(calls) == shortest]
    ranks = ", ".join(map(str, behind))
    return f"They parted after call {shortest}: rank {ranks} made no more, and the others wait."


# ------------------------------------------------------------------------------------- commands


def list_labs(args: argparse.Namespace) -> Iterator[str]:
    state = read_state()
    for lab in NAMES:
        done = "passed" if lab in state["passed"] else ""
        yield f"{lab:<12} {question_of(lab):<48} {done}"
    if left := [lab for lab in NAMES if lab not in state["passed"]]:
        yield f"\nnext: read labs/{left[0]}.py, write, and try: python labs/run.py check {left[0]}"


def check_lab(args: argparse.Namespace) -> Iterator[str]:
    """Check on 2, 3 and 4 ranks, or on --ranks, until one case fails."""
    for size in [args.ranks] if args.ranks else (2, 3, 4):
        passed, report = check(args.lab, size, args.seed, args.file)
        yield report
        if not passed:
            args.failed = True
            return
    state = read_state()
    if args.lab not in state["passed"] and not args.file:
        state["passed"].append(args.lab)
        write_state(state)
    file, function = check_of(args.lab).LEADS_TO
    yield f"\npassed. The project's own is `{function}` in {file}."
    yield f"why it is so: python labs/run.py why {args.lab}"


def watch_lab(args: argparse.Namespace) -> Iterator[str]:
    """Check whenever the file has changed, which is looked up: not all systems tell of changes."""
    path, seen = LABS / f"{args.lab}.py", None
    check_of(args.lab)
    while True:
        if (changed := path.stat().st_mtime_ns) != seen:
            seen = changed
            yield from check_lab(args)
            yield "\nwaiting for a change; Ctrl-C ends"
        time.sleep(0.3)


def hint(args: argparse.Namespace) -> Iterator[str]:
    hints, state = check_of(args.lab).HINTS, read_state()
    given = state["hints"].get(args.lab, 0)
    number = min(given, len(hints) - 1)
    state["hints"][args.lab] = number + 1
    write_state(state)
    yield f"hint {number + 1} of {len(hints)}: {hints[number]}"


def why(args: argparse.Namespace) -> Iterator[str]:
    check_of(args.lab)
    if args.lab not in read_state()["passed"] and not args.give_up:
        raise UserError(f"you have not passed {args.lab} yet: --give-up shows the solution anyway")
    yield answer_of(args.lab)


def reset(args: argparse.Namespace) -> Iterator[str]:
    check_of(args.lab)
    path, number = LABS / f"{args.lab}.py", 1
    starter = starter_of(answer_of(args.lab))
    while (kept := path.with_suffix(f".py.{number}")).exists():
        number += 1
    path.rename(kept)
    path.write_text(starter)
    yield f"labs/{args.lab}.py is as it was; yours is labs/{kept.name}"


COMMANDS = {
    "list": list_labs,
    "check": check_lab,
    "watch": watch_lab,
    "hint": hint,
    "why": why,
    "reset": reset,
}


def main() -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("command", nargs="?", default="list", choices=COMMANDS)
    parser.add_argument("lab", nargs="?", help=f"one of {', '.join(NAMES)}")
    parser.add_argument("--ranks", type=int, help="number of ranks (default: 2, then 3, then 4)")
    parser.add_argument("--seed", type=int, default=0, help="other weights and data")
    parser.add_argument("--file", type=Path, help="check this file in place of labs/LAB.py")
    parser.add_argument("--give-up", action="store_true", help="why: before the lab is passed")
    args = parser.parse_args()
    if args.command != "list" and not args.lab:
        raise UserError(f"{args.command} which lab? One of {', '.join(NAMES)}")
    args.failed = False
    for text in COMMANDS[args.command](args):
        print(text, flush=True)
    if args.failed:
        sys.exit(1)


if __name__ == "__main__":
    torch.set_num_threads(1)
    run(main)
