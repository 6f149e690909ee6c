"""For teachers: a copy of the labs for a class, grades of its submissions, and a lab of your own.

    python labs/run.py release DIRECTORY        the project without solutions
    python labs/run.py grade DIRECTORY          checks DIRECTORY/STUDENT/LAB.py of each student
    python labs/run.py new NAME                 a copy of mean, to be made into a lab of your own

A submission is checked in a process of its own, with the limits of guard.py, and has ten times as
long as the solution takes here. On each number of ranks it earns a point for each line of the
check's report, up to the first that does not hold: right numbers earn points with any bytes.
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
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from labs.machinery.answers import wrong_answers
from labs.machinery.guard import LABS, check_guarded
from plumbing.messages import UserError, with_progress

LONGEST = 60.0  # seconds that any submission has
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
    grades = grade_all(submissions)
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


def grade_all(submissions: list[tuple[str, Path, int]]) -> list[Grade]:
    """Check files of students with these seeds, after the solutions of their labs."""
    solutions, grades = check_solutions(sorted({file.stem for _, file, _ in submissions})), []
    left = [submission for submission in submissions if submission[1].stem in solutions]
    try:
        for student, file, seed in with_progress(left, "submissions"):
            solution = solutions[lab := file.stem]
            found = check_guarded(lab, file, seed, max(LONGEST, 10 * solution["seconds"]))
            passed, of = found["passed"], solution["points"]
            mistake = "" if passed else name_of(lab, found["mistake"])
            points = min(found["points"], of)
            grades.append(Grade(student, lab, seed, passed, points, of, mistake, found["text"]))
    except KeyboardInterrupt:  # what is graded is not lost
        print(f"warning: interrupted, {len(left) - len(grades)} are not graded", file=sys.stderr)
    return grades


def check_solutions(labs: list[str]) -> dict[str, dict]:
    """Return what the solution of each lab earns, and in how many seconds. A lab whose solution
    fails twice is not graded. Raises UserError if there are no solutions."""
    passed = {}
    for lab in with_progress(labs, "solutions"):
        if not (file := LABS / lab / "answer.py").exists():
            raise UserError("this copy of the labs has no solutions: grade in the project")
        found = check_guarded(lab, file, 0, 600)
        if not found["passed"]:
            found = check_guarded(lab, file, 0, 600)
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
    for name in listed.stdout.splitlines():
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
