"""For teachers: a copy of the labs for a class, grades of its submissions, and a lab of your own.

    python labs/run.py release DIRECTORY        the project without solutions
    python labs/run.py grade DIRECTORY          checks DIRECTORY/STUDENT/LAB.py of each student
    python labs/run.py new NAME                 a copy of mean, to be made into a lab of your own

A submission is checked in a process of its own, with the limits of guard.py, several at a time.
It has ten times as long as the solution takes here, and a rank may compute for a quarter of that.
On each number of ranks it earns a point for each line of the check's report, up to the first that
does not hold: right numbers earn points with any bytes.
"""

import argparse
import ast
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
import textwrap
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from labs.machinery.answers import wrong_answers
from labs.machinery.checking import NOT_WRITTEN, check_module
from labs.machinery.guard import LABS, Job, check_guarded
from plumbing.messages import UserError, with_progress

SHORTEST = 20.0  # seconds that any submission has, at least
CORES = os.cpu_count() or 1
SOLVED = re.compile("labs/[a-z0-9_]+/(answer.py|wrong.txt)|tests/test_labs")


class Grade(NamedTuple):
    """What a student's file for a lab earned."""

    student: str
    lab: str
    seed: int
    passed: bool
    points: int
    of: int  # points of the solution
    mistake: str  # its name, if it is a known one; otherwise what the report says; "" if passed
    alike: str  # other students whose files differ in names and comments alone
    text: str  # the report on the first number of ranks on which it fails, or on the last


def seed_of(key: str, *parts: str) -> int:
    """Return a seed that depends on these words alone, and that nobody guesses without the key."""
    return int.from_bytes(hashlib.sha256("\0".join((key, *parts)).encode()).digest()[:4], "big")


def grade(args: argparse.Namespace, labs: list[str]) -> Iterator[str]:
    """Check every submission in a directory; yield a table or a summary, and write files."""
    key = args.key if args.key else secrets.token_hex(8) if args.seed is None else None
    files = (args.csv, write_csv), (args.gradescope, write_gradescope)
    for path in filter(None, (args.csv, args.gradescope)):  # before minutes of grading
        place = path if path.exists() else path.resolve().parent
        if path.is_dir() or not os.access(place, os.W_OK):
            raise UserError(f"{path} cannot be written: give a file in a directory of yours")
    files_of = find_submissions(Path(args.lab), labs)
    if args.gradescope and sum(map(bool, files_of.values())) > 1:
        raise UserError("--gradescope is for one student's directory, with LAB.py files in it")
    submissions = [(student, file, seed_of(key, student, file.stem) if key else args.seed)
                   for student, files in files_of.items() for file in files]  # fmt: skip
    grades = grade_all(submissions, args.ranks)
    args.failed = len(grades) < len(submissions)
    yield from summarize(grades) if args.summary else table(grades)
    yield from (f"{student}: no LAB.py found" for student, files in files_of.items() if not files)
    if not args.key and key:
        yield f"\nseeds are drawn: --class {key} repeats them"
    for path, write in files:
        if path:
            write(grades, path)
            yield str(path)


def find_submissions(directory: Path, labs: list[str]) -> dict[str, list[Path]]:
    """Return the files of each student, DIRECTORY/STUDENT/LAB.py; or DIRECTORY/LAB.py, if it is a
    single student's. Raises UserError if there are none."""
    if not directory.is_dir():
        raise UserError(f"{directory} is no directory: give one with a directory for each student")

    def files_in(student: Path) -> list[Path]:
        return [path for lab in labs if (path := student / f"{lab}.py").is_file()]

    students = [directory.resolve()]
    if not files_in(directory):
        students = sorted(path for path in directory.glob("[!._]*") if path.is_dir())
    found = {student.name: files_in(student) for student in students}
    if not any(found.values()):
        raise UserError(f"no submissions in {directory}: name them STUDENT/LAB.py, as ada/mean.py")
    return found


def grade_all(submissions: list[tuple[str, Path, int]], ranks: int | None = None) -> list[Grade]:
    """Check files of students with these seeds, after the solutions of their labs: on so many
    ranks, or on all numbers of ranks that a lab has."""
    labs = sorted({file.stem for _, file, _ in submissions})
    solutions = check_solutions(labs, ranks)
    left = [submission for submission in submissions if submission[1].stem in solutions]
    jobs = [job_of(file, seed, ranks, solutions[file.stem]["seconds"]) for _, file, seed in left]
    alike = alike_of(left)
    grades = {}
    try:
        # Ranks that wait leave their core to others.
        ended = check_guarded(jobs, at_once=2 * CORES)
        for place, found in with_progress(ended, "submissions", len(jobs)):
            student, file, seed = left[place]
            lab, passed = file.stem, found["passed"]
            of = solutions[lab]["points"]
            mistake = "" if passed else name_of(lab, found["mistake"])
            points = min(found["points"], of)
            others = "" if mistake == NOT_WRITTEN else alike[place]
            rest = passed, points, of, mistake, others, found["text"]
            grades[place] = Grade(student, lab, seed, *rest)
    except KeyboardInterrupt:  # what is graded is not lost
        print(f"warning: interrupted, {len(left) - len(grades)} are not graded", file=sys.stderr)
    return [grades[place] for place in sorted(grades)]


def job_of(file: Path, seed: int, ranks: int | None, solved_in: float) -> Job:
    """Return a check of a file, whose lab's solution took so many seconds."""
    seconds = max(SHORTEST, 10 * solved_in)
    given = file.stem, file, seed, sizes_of(file.stem, ranks)
    return Job(*given, seconds, cpu_seconds=max(5, round(seconds / 4)))


def sizes_of(lab: str, ranks: int | None) -> tuple[int, ...]:
    """Return the numbers of ranks to check a lab on: all that it has, or `ranks` alone, or the
    fewest if it cannot have so many."""
    sizes = check_module(lab).SIZES
    if ranks is None:
        return sizes
    return (ranks,) if ranks in sizes else sizes[:1]


def alike_of(submissions: list[tuple[str, Path, int]]) -> list[str]:
    """Return for each submission the other students whose code for this lab is the same but for
    names and comments."""
    students = defaultdict(list)  # lab and shape of the code -> who handed it in
    shapes = [(file.stem, shape_of(file)) for _, file, _ in submissions]
    for (student, *_), shape in zip(submissions, shapes):
        students[shape].append(student)
    return [
        ", ".join(other for other in students[shape] if other != student)
        for (student, *_), shape in zip(submissions, shapes)
    ]


def shape_of(file: Path) -> str:
    """Return a file's code without comments and docstrings, each name replaced by its number."""
    try:
        tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError):  # what cannot be read is like nothing else
        return str(file)
    numbers = {}
    for node in ast.walk(tree):
        if isinstance(getattr(node, "body", None), list):
            node.body = [line for line in node.body if not is_text(line)]
        for field in ("id", "arg", "name"):
            if isinstance(name := getattr(node, field, None), str):
                setattr(node, field, str(numbers.setdefault(name, len(numbers))))
    return ast.dump(tree)


def is_text(node: ast.stmt) -> bool:
    """Return whether this is a string that stands alone, as a docstring does."""
    is_constant = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    return is_constant and isinstance(node.value.value, str)


def check_solutions(labs: list[str], ranks: int | None) -> dict[str, dict]:
    """Return what the solution of each lab earns, and in how many seconds. A lab whose solution
    fails twice is not graded. Raises UserError if there are no solutions."""
    passed = {}
    for lab in with_progress(labs, "solutions"):
        if not (file := LABS / lab / "answer.py").exists():
            raise UserError("this copy of the labs has no solutions: grade in the project")
        job = Job(lab, file, 0, sizes_of(lab, ranks), seconds=600, cpu_seconds=300)
        ((_, found),) = check_guarded([job])
        if not found["passed"]:
            ((_, found),) = check_guarded([job])
        if found["passed"]:
            passed[lab] = found
        else:
            says = f"{lab} is not graded: its solution fails on this machine\n{found['text']}"
            print(f"warning: {says}", file=sys.stderr, flush=True)
    return passed


def name_of(lab: str, mistake: str) -> str:
    """Return the name of the wrong answer that earns this sentence, or else the sentence."""
    said = " ".join(mistake.split())
    known = (wrong.name for wrong in wrong_answers(lab) if wrong.says in said)
    return next(known, said or "another mistake")


# ------------------------------------------------------------------------------------- reports


def table(grades: list[Grade]) -> Iterator[str]:
    width = max(len(name) for name in ("student", *(one.student for one in grades)))
    yield f"{'student':<{width}}  {'lab':<11} {'points':>8}"
    for one in grades:
        mistake = textwrap.shorten(one.mistake, 90, placeholder=" ...")
        points = f"{one.points} of {one.of}"
        yield f"{one.student:<{width}}  {one.lab:<11} {points:>8}  {mistake}".rstrip()
    alike = {(one.lab, *sorted([one.student, *one.alike.split(", ")]))
             for one in grades if one.alike}  # fmt: skip
    for lab, *students in sorted(alike):
        yield f"alike but for names: {lab} of {', '.join(students)}"


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
        for one in grades:
            writer.writerow({name: cell(value) for name, value in one._asdict().items()})


def cell(value: object) -> object:
    """Return what stands in a cell of a table: text in one line, and an apostrophe before what a
    spreadsheet would compute."""
    if not isinstance(value, str):
        return value
    text = " ".join(value.split())
    return f"'{text}" if text.startswith(("=", "+", "-", "@")) else text


def write_gradescope(grades: list[Grade], path: Path) -> None:
    """Write the results.json of an autograder on Gradescope, of one student."""
    tests = [dict(name=g.lab, score=g.points, max_score=g.of, output=g.text) for g in grades]
    path.write_text(json.dumps(dict(tests=tests), indent=1))


# ------------------------------------------------------------------------ copies, and new labs


def release(target: Path, starters: dict[str, str]) -> Iterator[str]:
    """Copy what git tracks to a new directory, with starters in place of the solutions."""
    if LABS.parent in target.resolve().parents:
        raise UserError(f"{target} is within the project: name a directory beside it")
    if target.exists():
        raise UserError(f"{target} exists: name a new directory")
    listed = subprocess.run(["git", "ls-files"], cwd=LABS.parent, capture_output=True, text=True)
    if listed.returncode:
        raise UserError(f"{LABS.parent} is no clone of the project's repository: git clone it")
    names = listed.stdout.splitlines()
    for lab in starters:
        if f"labs/{lab}/answer.py" not in names:
            raise UserError(f"labs/{lab} is not in git: git add it first")
    for name in names:
        if not SOLVED.match(name) and (LABS.parent / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(LABS.parent / name, target / name)
    for lab, starter in starters.items():
        (target / "labs" / lab / "starter.py").write_text(starter)
    yield f"{target} has the project and {len(starters)} starters, and no solutions"


def write_lab(name: str) -> Iterator[str]:
    """Copy mean, which works, for a new lab."""
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name) or keyword.iskeyword(name):
        raise UserError(f"'{name}' cannot be a file of Python: use small letters, as in mean")
    if (LABS / name).exists():
        raise UserError(f"there is a folder labs/{name}: choose another name")
    shutil.copytree(LABS / "mean", LABS / name, ignore=shutil.ignore_patterns("__pycache__"))
    yield f"""labs/{name} is a copy of mean. Change its files, then write the starter with `python
labs/run.py reset {name}`. The lab is listed after the others, until ORDER in run.py says where it
belongs. `pytest tests/test_labs.py -k {name}` says what is still missing."""
