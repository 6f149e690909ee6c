"""Labs: write a part of distributed training yourself, and be told what is wrong with it.

    python labs/run.py                       the labs, and which is next
    python labs/run.py check mean            check labs/work/mean.py; --ranks 3 --seed 7 for others
    python labs/run.py check pipeline --plot FILE.svg    and draw its time line
    python labs/run.py watch mean            check it whenever the file changes
    python labs/run.py hint mean             the next of three hints
    python labs/run.py why mean              the solution, once you have passed
    python labs/run.py reset mean            the file as it was; yours is kept beside it
    python labs/run.py predict bytes         say what a step sends, then see it counted; three more

A command that needs your file writes it first, with the part that is yours left out.

For teachers (labs/README.md):
    python labs/run.py release DIRECTORY     a copy of the project without solutions
    python labs/run.py grade DIRECTORY       checks DIRECTORY/STUDENT/LAB.py; --csv FILE and others
    python labs/run.py new NAME              a copy of mean, for a lab of your own
    python labs/run.py known NAME            runs its wrong answers, so that they are recognised

A check runs your function on several ranks of this machine. It compares numbers with those of one
process, in float64, and then what was sent, held and computed, to the byte.

Exit codes: check 0 passed, 1 not, 2 cannot be checked; grade 0 all were graded, 1 some were not,
2 cannot be graded.
"""

import sys
from pathlib import Path

LABS = Path(__file__).resolve().parent
sys.path.insert(0, str(LABS.parent))

import argparse
import json
import os
import textwrap
import time
from collections.abc import Iterator
from types import ModuleType

import torch

from labs.machinery.answers import answer_of, starter_of, wrong_answers
from labs.machinery.checking import check, check_module, with_facts
from labs.machinery.grading import grade, release, sizes_of, write_lab
from labs.machinery.known import write_known
from labs.machinery.lab import plural
from labs.machinery.predict import predict
from perf.instruments import check_writable
from plumbing.messages import UserError
from plumbing.parser import Parser, nonnegative_int
from plumbing.processes import run

# In the order of teaching.
ORDER = """
ring mean ddp accumulate zero1 fsdp hsdp rarely tp logits flash context experts pipeline recompute
lora float8 nf4 sampling speculative preferences rewards hang resume bpe scaling
""".split()
NAMES = sorted(
    (path.parent.name for path in LABS.glob("*/check.py")),
    key=lambda name: ORDER.index(name) if name in ORDER else len(ORDER),
)
WORK = LABS / "work"  # what a student writes; git ignores it
STATE = WORK / ".state"  # which labs have been passed, and how many hints were given


def read_state() -> dict:
    return json.loads(STATE.read_text()) if STATE.exists() else {"passed": [], "hints": {}}


def write_state(state: dict) -> None:
    WORK.mkdir(exist_ok=True)
    temporary = STATE.with_suffix(".part")
    temporary.write_text(json.dumps(state))
    os.replace(temporary, STATE)


def check_of(lab: str) -> ModuleType:
    if lab not in NAMES:
        raise UserError(f"no lab '{lab}': choose from {', '.join(NAMES)}")
    return check_module(lab)


def question_of(lab: str) -> str:
    """Return the first line of a lab's starter."""
    return starter_of(lab).removeprefix('"""').split("\n")[0]


def file_of(args: argparse.Namespace) -> Path:
    """Return the student's file, which is the starter at first. Raises UserError if --file is
    none."""
    check_of(args.lab)
    path = args.file or WORK / f"{args.lab}.py"
    if not path.exists() and not args.file:
        WORK.mkdir(exist_ok=True)
        path.write_text(starter_of(args.lab))
    if not path.exists():
        raise UserError(f"{path} does not exist: give another --file")
    if path.is_dir():
        raise UserError(f"{path} is a directory: give a file")
    try:
        path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read: {error}") from None
    return path.resolve()


# ------------------------------------------------------------------------------------- commands


def list_labs(args: argparse.Namespace) -> Iterator[str]:
    state = read_state()
    for lab in NAMES:
        done = "passed" if lab in state["passed"] else ""
        yield f"{lab:<12} {question_of(lab):<66} {done}"
    if left := [lab for lab in NAMES if lab not in state["passed"]]:
        yield f"\nnext: python labs/run.py check {left[0]}, which begins labs/work/{left[0]}.py"


def check_lab(args: argparse.Namespace) -> Iterator[str]:
    """Check on several numbers of ranks, or on --ranks, until one case fails."""
    module = check_of(args.lab)
    sizes = sizes_of(args.lab, args.ranks)
    if args.ranks not in (None, *sizes):
        wanted = ", ".join(map(str, module.SIZES))
        raise UserError(f"--ranks {args.ranks}: {args.lab} is checked on {wanted}")
    check_writable("--plot", args.plot)
    if args.plot and not hasattr(module, "drawing"):
        raise UserError(f"--plot: {args.lab} has no time line; pipeline has")
    path = file_of(args)
    for size in sizes:
        report = check(args.lab, size, args.seed or 0, path)
        yield report.text
        if args.plot and report.drawing:
            args.plot.write_text(report.drawing)
            yield str(args.plot)
        if not report.passed:
            args.failed = True
            return
    if args.ranks:
        ranks = plural(args.ranks, "rank")
        yield f"\npassed on {ranks}; without --ranks it is checked on others, too"
        return
    state = read_state()
    if args.lab not in state["passed"] and not args.file:
        state["passed"].append(args.lab)
        write_state(state)
    file, function = module.LEADS_TO
    yield f"\npassed. The project's own is `{function}` in {file}."
    if (LABS / args.lab / "answer.py").exists():  # a copy for a class has none
        yield f"why it is so: python labs/run.py why {args.lab}"
    if args.lab == "ddp":
        yield "in training:  torchrun --nproc-per-node 2 labs/train.py --out out/own-ddp"


def watch_lab(args: argparse.Namespace) -> Iterator[str]:
    """Check again whenever the file's time changes, which is polled."""
    path = file_of(args)
    seen = None
    while True:
        # While an editor saves, the file may not be there for a moment.
        if path.exists() and path.stat().st_mtime_ns != seen:
            seen = path.stat().st_mtime_ns
            yield from check_lab(args)
            yield "\nwaiting for a change; Ctrl-C ends"
        time.sleep(0.3)


def hint(args: argparse.Namespace) -> Iterator[str]:
    hints = check_of(args.lab).HINTS
    state = read_state()
    given = state["hints"].get(args.lab, 0)
    number = min(given, len(hints) - 1)
    state["hints"][args.lab] = number + 1
    write_state(state)
    yield f"hint {number + 1} of {len(hints)}: {hints[number]}"
    if number + 1 == len(hints):
        yield "This was the last hint."


def why(args: argparse.Namespace) -> Iterator[str]:
    """Show the solution, its reasons, and what is wrong with other answers."""
    size = check_of(args.lab).SIZES[0]
    if args.lab not in read_state()["passed"] and not args.give_up:
        raise UserError(f"you have not passed {args.lab} yet: --give-up shows the solution anyway")
    yield answer_of(args.lab).strip()
    for wrong in wrong_answers(args.lab):
        says = with_facts(args.lab, size, wrong.says)
        lines = textwrap.indent(f"> {says}\n{wrong.patch}", "  ")
        yield f"\n\nWrong: {wrong.name}\n{lines.rstrip()}"


def reset(args: argparse.Namespace) -> Iterator[str]:
    """Write the starter again. What the student wrote gets a number."""
    check_of(args.lab)
    path = WORK / f"{args.lab}.py"
    number = 1
    starter = starter_of(args.lab)
    WORK.mkdir(exist_ok=True)
    while (kept := path.with_suffix(f".py.{number}")).exists():
        number += 1
    existed = path.exists()
    if existed:
        path.rename(kept)
    path.write_text(starter)
    yield f"labs/work/{path.name} is as it was" + f"; yours is labs/work/{kept.name}" * existed


def know(args: argparse.Namespace) -> Iterator[str]:
    """Run the wrong answers of a lab, so that a check recognises what they give."""
    check_of(args.lab)
    yield from write_known(args.lab)


# Each command, and the flags that it takes.
COMMANDS = {
    "list": (list_labs, ""),
    "check": (check_lab, "ranks seed file plot"),
    "watch": (watch_lab, "ranks seed file plot"),
    "hint": (hint, ""),
    "why": (why, "give_up"),
    "reset": (reset, ""),
    "predict": (predict, "seed answer student key"),
    "release": (lambda args: release(Path(args.lab), {lab: starter_of(lab) for lab in NAMES}), ""),
    "grade": (lambda args: grade(args, NAMES), "ranks seed key summary csv gradescope"),
    "new": (lambda args: write_lab(args.lab), ""),
    "known": (know, ""),
}


def check_flags(parser: Parser, args: argparse.Namespace) -> None:
    """Raise UserError for a flag that the command would ignore."""
    own = ["command", "lab", *COMMANDS[args.command][1].split()]
    for name, value in vars(args).items():
        if name not in own and value != parser.get_default(name):
            flag = {"key": "class"}.get(name, name).replace("_", "-")
            parser.error(f"{args.command} takes no --{flag}")


def main() -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = Parser(description=__doc__, formatter_class=raw)
    parser.add_argument("command", nargs="?", default="list", choices=COMMANDS)
    parser.add_argument(
        "lab",
        nargs="?",
        help=f"one of {', '.join(NAMES)}; release and grade: a directory; predict: a form, or "
        "nothing for a list",
    )
    parser.add_argument(
        "--ranks", type=int, help="number of ranks (default: several, one after the other)"
    )
    parser.add_argument(
        "--seed",
        type=nonnegative_int,
        help="other weights and data (default: 0; grade, predict: any)",
    )
    parser.add_argument("--file", type=Path, help="check this file in place of labs/work/LAB.py")
    parser.add_argument(
        "--plot", type=Path, metavar="FILE.svg", help="draw the time line of pipeline"
    )
    parser.add_argument("--give-up", action="store_true", help="why: before the lab is passed")
    guess = parser.add_argument_group("predict")
    guess.add_argument("--answer", action="append", help="a line in place of one that is typed")
    guess.add_argument("--student", metavar="NAME", help="with --class: questions of your own")
    teacher = parser.add_argument_group("grade")
    teacher.add_argument(
        "--class", dest="key", metavar="KEY", help="other seeds for each student, by this word"
    )
    teacher.add_argument("--summary", action="store_true", help="the mistakes that a class made")
    for name, what in (("csv", "a table"), ("gradescope", "an autograder's results.json")):
        teacher.add_argument(f"--{name}", type=Path, metavar="FILE", help=f"write {what}")
    args = parser.parse_args()
    check_flags(parser, args)
    if not args.lab:
        if args.command in ("release", "grade"):
            raise UserError(f"{args.command} which directory?")
        if args.command == "new":
            raise UserError("new needs a name: python labs/run.py new NAME")
        if args.command not in ("list", "predict"):
            raise UserError(f"{args.command} which lab? One of {', '.join(NAMES)}")
    args.failed = False
    for text in COMMANDS[args.command][0](args):
        print(text, flush=True)
    if args.failed:
        sys.exit(1)


if __name__ == "__main__":
    torch.set_num_threads(1)
    run(main)
