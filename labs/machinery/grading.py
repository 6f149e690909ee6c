"""For teachers: a copy of the labs for a class, grades of its submissions, and a lab of your own.

    python labs/run.py release DIRECTORY        the project without solutions
    python labs/run.py grade DIRECTORY          checks DIRECTORY/STUDENT/LAB.py of each student
    python labs/run.py new NAME                 the files of a new lab, to be filled in

A submission is checked in a process of its own, for 60 seconds at most, with the limits of
guard.py. On each number of ranks it earns a point for each line of the check's report, up to the
first that does not hold: right numbers earn points even if too many bytes were sent.
"""

import argparse
import csv
import hashlib
import json
import keyword
import os
import re
import secrets
import shutil
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

from labs.machinery.answers import answer_of, wrong_answers
from labs.machinery.guard import run_guarded
from plumbing.processes import UserError, with_progress

LABS = Path(__file__).resolve().parent.parent


class Grade(NamedTuple):
    """What a student's file for a lab earned."""

    student: str
    lab: str
    seed: int
    passed: bool
    points: int
    of: int  # points of the solution
    mistake: str  # its name, if it is a known one; otherwise what the report says; "" if passed
    text: str  # the report on the first number of ranks on which it fails, or on the last


def seed_of(key: str, *parts: str) -> int:
    """Return a seed that depends on these words alone, and that nobody guesses without the key."""
    return int.from_bytes(hashlib.sha256("\0".join((key, *parts)).encode()).digest()[:4], "big")


# ------------------------------------------------------------------------------------- grading


def grade(args: argparse.Namespace, labs: list[str]) -> Iterator[str]:
    """Check every submission in a directory; yield a table or a summary, and write files."""
    key = args.key if args.key else secrets.token_hex(8) if args.seed is None else None
    files = ((args.csv, write_csv), (args.junit, write_junit), (args.gradescope, write_gradescope))
    for path, _ in files:
        check_writable(path)
    submissions = list(find_submissions(Path(args.lab), labs))
    if args.gradescope and len({student for student, *_ in submissions}) > 1:
        raise UserError("--gradescope is for one student's directory, with LAB.py files in it")
    seeds = [seed_of(key, *names) if key else args.seed for *names, _ in submissions]
    grades = grade_all(submissions, seeds)
    yield from summarize(grades) if args.summary else table(grades)
    yield from without_submissions(Path(args.lab), submissions)
    if not args.key and key:
        yield f"\nseeds are drawn: --class {key} repeats them"
    for path, write in files:
        if path:
            write(grades, path)
            yield str(path)


def check_writable(path: Path | None) -> None:
    """Raise UserError if a file cannot be written: grading before takes minutes."""
    if path is None:
        return
    place = path if path.exists() else path.resolve().parent
    if path.is_dir() or not place.exists() or not os.access(place, os.W_OK):
        raise UserError(f"{path} cannot be written: give a file in a directory of yours")


def find_submissions(directory: Path, labs: list[str]) -> Iterator[tuple[str, str, Path]]:
    """Yield (student, lab, file) for DIRECTORY/STUDENT/LAB.py; or for DIRECTORY/LAB.py, if it is a
    single student's. Raises UserError if there are none."""
    if not directory.is_dir():
        raise UserError(f"{directory} is no directory: give one with a directory for each student")
    own = [lab for lab in labs if (directory / f"{lab}.py").is_file()]
    students = [directory] if own else sorted(path for path in directory.iterdir() if path.is_dir())
    found = [
        (student.resolve().name, lab, student / f"{lab}.py")
        for student in students
        for lab in labs
        if (student / f"{lab}.py").is_file()
    ]
    if not found:
        raise UserError(f"no submissions in {directory}: name them STUDENT/LAB.py, as ada/mean.py")
    yield from found


def without_submissions(directory: Path, submissions: list[tuple[str, str, Path]]) -> Iterator[str]:
    """Yield a line for each student's directory without a submission."""
    found = {file.parent for *_, file in submissions}
    if directory not in found:  # else it is that of one student
        for path in sorted(directory.iterdir()):
            if path.is_dir() and path not in found and not path.name.startswith((".", "__")):
                yield f"{path.name}: no LAB.py found"


def grade_all(submissions: list[tuple[str, str, Path]], seeds: list[int]) -> list[Grade]:
    """Check each file in a directory where nothing else is."""
    grades, jobs = {}, []
    with tempfile.TemporaryDirectory() as folder:
        for i, ((_, lab, file), seed) in enumerate(zip(submissions, seeds)):
            copy = Path(folder, str(i)).resolve() / file.name
            copy.parent.mkdir()
            shutil.copyfile(file, copy)
            jobs.append((lab, copy, seed))
        try:
            for i, result in with_progress(run_guarded(jobs), "submissions", total=len(jobs)):
                (student, lab, file), (_, copy, seed) = submissions[i], jobs[i]
                text = result["text"].replace(str(copy), file.name)
                mistake = "" if result["passed"] else name_of(lab, result["mistake"])
                of = points_of_solution(lab)
                points = min(result["points"], of)
                grades[i] = Grade(student, lab, seed, result["passed"], points, of, mistake, text)
        except KeyboardInterrupt:  # what is graded is not lost
            left = len(jobs) - len(grades)
            print(f"warning: interrupted, {left} are not graded", file=sys.stderr, flush=True)
    return [grades[i] for i in sorted(grades)]


@cache
def points_of_solution(lab: str) -> int:
    """Return the points that the solution earns. Raises UserError if it does not pass here."""
    with tempfile.TemporaryDirectory() as name:
        copy = Path(name).resolve() / f"{lab}.py"
        copy.write_text(answer_of(lab))
        ((_, result),) = run_guarded([(lab, copy, 0)])
    if not result["passed"]:
        raise UserError(f"the solution of {lab} fails on this machine: {result['text']}")
    return result["points"]


def name_of(lab: str, mistake: str) -> str:
    """Return the name of the wrong answer that earns this sentence, or else the sentence."""
    said = " ".join(mistake.split())
    known = (wrong.name for wrong in wrong_answers(lab) if wrong.says in said)
    return next(known, said or "another mistake")


# ------------------------------------------------------------------------------------- reports


def table(grades: list[Grade]) -> Iterator[str]:
    width = max(len("student"), *(len(one.student) for one in grades))
    yield f"{'student':<{width}}  {'lab':<11} {'points':>8}"
    for one in grades:
        mistake = textwrap.shorten(one.mistake, 90, placeholder=" ...")
        points = f"{one.points} of {one.of}"
        yield f"{one.student:<{width}}  {one.lab:<11} {points:>8}  {mistake}".rstrip()


def summarize(grades: list[Grade]) -> Iterator[str]:
    """Yield how many passed each lab, and which mistakes the others made, the commonest first."""
    for lab in dict.fromkeys(one.lab for one in grades):
        of_lab = [one for one in grades if one.lab == lab]
        yield f"{lab}: {sum(one.passed for one in of_lab)} of {len(of_lab)} passed"
        alike = {}  # numbers differ from student to student, mistakes do not
        for one in of_lab:
            if not one.passed:
                alike.setdefault(re.sub(r"\d[\d,.]*", "N", one.mistake), []).append(one.mistake)
        for mistakes in sorted(alike.values(), key=len, reverse=True):
            yield f"{len(mistakes):>4}  {textwrap.shorten(mistakes[0], 110, placeholder=' ...')}"


def write_csv(grades: list[Grade], path: Path) -> None:
    with open(path, "w", newline="") as file:
        columns = [name for name in Grade._fields if name != "text"]
        writer = csv.DictWriter(file, columns, extrasaction="ignore")
        writer.writeheader()
        writer.writerows(one._asdict() for one in grades)


def write_junit(grades: list[Grade], path: Path) -> None:
    """Write the XML that CI servers show: a suite for each student, a case for each lab."""
    root = ElementTree.Element("testsuites")
    for student in dict.fromkeys(one.student for one in grades):
        own = [one for one in grades if one.student == student]
        failures = sum(not one.passed for one in own)
        counts = dict(tests=str(len(own)), failures=str(failures))
        suite = ElementTree.SubElement(root, "testsuite", name=student, **counts)
        for one in own:
            case = ElementTree.SubElement(suite, "testcase", classname=student, name=one.lab)
            if not one.passed:
                failure = ElementTree.SubElement(case, "failure", message=one.mistake)
                failure.text = "".join(c for c in one.text if c.isprintable() or c == "\n")
    ElementTree.ElementTree(root).write(path, encoding="utf-8", xml_declaration=True)


def write_gradescope(grades: list[Grade], path: Path) -> None:
    """Write the results.json of an autograder on Gradescope, of one student."""
    tests = [
        dict(name=one.lab, score=one.points, max_score=one.of, output=one.text) for one in grades
    ]
    path.write_text(json.dumps(dict(tests=tests), indent=1))


# ------------------------------------------------------------------------ copies, and new labs


SOLVED = re.compile("labs/[a-z0-9_]+/(answer.py|wrong.txt)|tests/test_labs")


def release(target: Path, starters: dict[str, str]) -> Iterator[str]:
    """Copy what git tracks to a new directory, with starters in place of the solutions."""
    if LABS.parent in target.resolve().parents:
        raise UserError(f"{target} is within the project: name a directory beside it")
    if target.exists():
        raise UserError(f"{target} exists: name a new directory")
    listed = subprocess.run(["git", "ls-files"], cwd=LABS.parent, capture_output=True, text=True)
    if listed.returncode:
        raise UserError(f"{LABS.parent} is no clone of the project's repository: git clone it")
    for name in listed.stdout.splitlines():
        if not SOLVED.match(name) and (LABS.parent / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(LABS.parent / name, target / name)
    for lab, starter in starters.items():
        (target / "labs" / lab / "starter.py").write_text(starter)
    yield f"{target} has the project and {len(starters)} starters, and no solutions"


ANSWER = '''"""The question, in one line?

What is given, and why one would want to know.

Read: where in the project it is done.
"""

import torch.distributed as dist
from torch import Tensor


def NAME(x: Tensor) -> Tensor:
    """Return what? Say shapes and units.

    x [n]: this rank's
    """
    # >>>
    total = x.clone()
    dist.all_reduce(total)
    mean = total / dist.get_world_size()
    assert mean.shape == x.shape
    return mean
    # <<<


# Why: the idea, its price, and who got it wrong.
'''
WRONG = """\
the sum instead of the mean
> This is the sum
- total / dist.get_world_size()
+ total
"""
CHECK = '''"""The check of NAME."""

from collections.abc import Callable, Iterator

from torch import Tensor

from labs.machinery import compare
from labs.machinery.compare import Property
from labs.machinery.lab import drawn
from labs.machinery.student import check_returned

FUNCTION = "NAME"
LEADS_TO = "parallel.py", "ddp"
SIZES = 2, 3
HINTS = ("Where to look.", "What to count.", "The shape of the code.")


def input_of(seed: int, rank: int) -> Tensor:
    return drawn(1000 * seed + rank, (13,))[0]


def on_rank(load: Callable, size: int, seed: int, rank: int) -> dict:
    """Return what the student's function gives."""
    return {"mean": check_returned(load()(input_of(seed, rank)), Tensor, "the mean, a tensor")}


def properties(results: dict[str, list], size: int, seed: int) -> Iterator[Property]:
    """Yield what is checked, in order, with what known mistakes would give."""
    total = sum(input_of(seed, rank) for rank in range(size))
    yield compare.tensors("output", results["mean"], total / size, {compare.SUMMED: total})
'''
PAGE = """# NAME: the question?

The idea, with one picture, ![what it shows](picture.svg); what the check counts; where it is done.
"""


def shown(path: Path) -> Path:
    """Return a path as seen from the project."""
    return path.resolve().relative_to(LABS.parent)


def write_lab(name: str, labs: list[str]) -> Iterator[str]:
    """Write the files of a new lab: a small one that works."""
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name):
        raise UserError(f"'{name}' cannot be a file of Python: use small letters, as in mean")
    files = {"answer.py": ANSWER, "wrong.txt": WRONG, "check.py": CHECK, "README.md": PAGE}
    paths = {LABS / name / file: text for file, text in files.items()}
    if name in labs:
        raise UserError(f"there is a lab {name}: choose another name")
    if (LABS / name).exists():
        raise UserError(f"there is a folder {shown(LABS / name)}: choose another name")
    if keyword.iskeyword(name):
        raise UserError(f"'{name}' is a word of Python: choose another name")
    (LABS / name).mkdir()
    for path, text in paths.items():
        path.write_text(text.replace("NAME", name))
        yield str(shown(path))
    yield f"""
Change them, then write the starter with `python labs/run.py reset {name}`. The lab is listed after
the others, until ORDER in run.py says where it belongs. `pytest tests/test_labs.py -k {name}` says
what is still missing."""
