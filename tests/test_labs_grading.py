"""Points, names of mistakes and files are those written out here for a class of known answers.
Hostile answers get their sentence, and change nothing."""

import csv
import ctypes
import importlib
import json
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import ROOT, lab_in_copy, slow, succeed
from test_labs import ANSWERS, WRONG, lab, on_two_ranks, student_file

from labs.machinery import grading, guard
from labs.machinery.answers import starter_of
from labs.machinery.checking import check_module

PUBLISHED = next(wrong for name, wrong in WRONG if name == "mean" and not wrong.tells)


@pytest.mark.slow
def test_a_class_is_graded(tmp_path):
    """A point for each line of the report that holds, up to the first that does not; and files."""
    ada, bob = tmp_path / "class/ada", tmp_path / "class/bob"
    for student, patch in ((ada, ""), (bob, PUBLISHED.patch)):
        student.mkdir(parents=True)
        student_file("mean", student, patch=patch)
    (bob / "ddp.py").write_text(starter_of("ddp"))
    (tmp_path / "class/frank").mkdir()
    file = tmp_path / "g.csv"
    out = lab("grade", tmp_path / "class", "--class", "key", "--csv", file, timeout=600)
    rows = list(csv.DictReader(file.open()))
    right, ddp, mean = sorted(rows, key=lambda row: (row["student"], row["lab"]))
    assert (right["passed"], right["points"], right["of"]) == ("True", "30", "30")
    said = "This is the mean of the ranks' means. "
    assert mean["mistake"].startswith(said) and (mean["passed"], mean["of"]) == ("False", "30")
    assert (ddp["points"], ddp["mistake"]) == ("0", "not written yet")
    for row in rows:
        assert re.search(rf"{row['student']} +{row['lab']} +{row['points']} of {row['of']}", out)
        assert row["seed"] == str(grading.seed_of("key", row["student"], row["lab"]))
    assert len({row["seed"] for row in rows}) == 3  # everybody has their own
    assert "frank: no LAB.py found" in out

    file = tmp_path / "results.json"
    out = lab("grade", bob, "--seed", 3, "--summary", "--gradescope", file, timeout=600)
    assert re.search(rf"mean: 0 of 1 passed\n   1  {said}.*\nddp: 0 of 1 passed", out)
    test, _ = json.loads(file.read_text())["tests"]
    assert test["name"] == "mean" and 0 < test["score"] < test["max_score"] == 30


def test_what_is_graded_is_not_lost(tmp_path, monkeypatch, capsys):
    """By Ctrl-C, or where a solution fails: always, or once, as on a busy machine."""
    right = dict(passed=True, points=15, mistake="", text="fine", seconds=9.0)
    wrong = right | dict(passed=False, text="hangs")
    found, limits = [wrong, wrong, wrong, right, right | {"points": 99}], []

    def check(jobs: list[guard.Job], at_once: int = 1) -> Iterator[tuple[int, dict]]:
        for place, job in enumerate(jobs):
            limits.append((job.lab, job.seconds))
            if not found:
                raise KeyboardInterrupt
            yield place, found.pop(0)

    monkeypatch.setattr(grading, "check_guarded", check)
    files = [(who, tmp_path / f"{lab}.py", 1) for who in "ab" for lab in ("mean", "ddp")]
    for _, file, _ in files:
        file.write_text("")
    (grade,) = grading.grade_all(files)
    assert (grade.student, grade.lab, grade.points, grade.of) == ("a", "mean", 15, 15)
    assert limits == [("ddp", 600)] * 2 + [("mean", 600)] * 2 + [("mean", 90)] * 2
    err = capsys.readouterr().err
    assert "ddp is not graded: its solution fails" in err and "interrupted, 1 are not" in err


# What a rank may not do, and one thing that it may, by a part of what it is told.
BARRED = {
    "may not read": """open(SOLUTION); exec(compile("open(SOLUTION)", SOLUTION, "exec"))
        importlib.import_module("labs.machinery.answers").answer_of("mean")""",
    "may not change": """os.link(SOLUTION, "mine"); open("../mine", "w"); os.mkdir("/tmp/mine")
        os.remove(OTHER); os.truncate(OTHER, 0); os.utime(OTHER); os.setxattr(OTHER, "a", b"1")""",
    "may not use": """sqlite3.connect(OTHER); subprocess.run("ls"); ctypes.CDLL(None)
        os.kill(os.getppid(), 9); resource.prlimit(os.getppid(), 0, (1, 1))
        socket.create_connection(("127.0.0.1", 9))""",
    "Permission denied": """torch.from_file(SOLUTION, size=9, dtype=torch.uint8)
        torch.from_file(OTHER, shared=True, size=9, dtype=torch.uint8).zero_()
        torch.save(torch.zeros(9), OTHER); sys.audit = lambda *_: 0; subprocess.run("id")""",
    "MemoryError": "bytearray(3 << 30)",
    "Cannot allocate memory": "mmap.mmap(-1, 3 << 30)",
    "has no attribute": """os.pidfd_open(os.getppid()); os.memfd_create("x"); posix.pidfd_open(1)
        signal.pidfd_send_signal""",
    "File too large": """open("own", "wb").truncate(1 << 30)""",
    "None": """open("own", "w").write("1")""",
}  # fmt: skip


def test_submissions_have_their_own_directory_and_nothing_else(tmp_path):
    home, other = tmp_path / "home", tmp_path / "other"
    home.mkdir()
    other.write_text("mine")
    modules = (
        "ctypes importlib mmap os resource socket sqlite3 subprocess sys torch posix signal".split()
    )
    names = {name: importlib.import_module(name) for name in modules}
    names |= dict(SOLUTION=str(ROOT / "labs/mean/answer.py"), OTHER=str(other))
    expected = {c.strip(): says for says, cs in BARRED.items() for c in re.split("[;\n]", cs)}
    expected["sys.audit = lambda *_: 0"] = "None"  # is asked by subprocess, which is in Python

    def run() -> None:
        os.chdir(home)
        said = {}
        guard.guard(home, cpu_seconds=60)
        for code in expected:
            try:
                said[code] = str(exec(code, names))
            except Exception as error:
                said[code] = f"{type(error).__name__}: {error}"
        Path("said").write_text(json.dumps(said))

    (process := guard.FORK.Process(target=run)).start()
    process.join()
    said = json.loads((home / "said").read_text())
    if sys.platform != "linux" or ctypes.CDLL(None).syscall(444, None, 0, 1) < 1:  # no Landlock
        linux = "Permission denied", "MemoryError", "Cannot allocate memory"
        expected = {c: s for c, s in expected.items() if s not in linux and "xattr" not in c}
    assert {code: said[code] for code, says in expected.items() if says not in said[code]} == {}
    assert other.read_text() == "mine"


def handed_in(line: str) -> str:
    """The solution of mean with a line before its first."""
    first = "    totals = torch.stack"
    return ANSWERS["mean"].replace(first, f"    {line}\n{first}")


# What a class hands in, and what is said of it. Whether who sleeps and computes in turn hangs or
# takes too long depends on the machine.
HOSTILE = {
    "right": (ANSWERS["mean"], ""),
    "copied": (ANSWERS["mean"].replace("totals", "sums").replace("# >>>", "# mine"), ""),
    "loop": (handed_in("while True: pass"), "seconds"),
    "sleeper": (handed_in("import time; time.sleep(1000)"), "does not come out of line"),
    "waker": (handed_in("while True: __import__('time').sleep(0.2); sum(range(10**6))"), ""),
    "forks": (handed_in("import os; [os.fork() for _ in range(1000)]"), "may not use os.fork"),
    "bytes": (handed_in("bytearray(20 << 30)"), "MemoryError"),
    "grows": (handed_in("[bytearray(1 << 20) for _ in range(20_000)]"), "MemoryError"),
    "shared": (handed_in("import mmap; mmap.mmap(-1, 2304 << 20)"), "Cannot allocate memory"),
    "socket": (handed_in("import socket; socket.create_connection(('127.0.0.1', 9))"), "network"),
    "outside": (handed_in("open('../outside', 'w')"), "may not change"),
    "exits": (handed_in("import os; os._exit(0)"), "without a result"),
    "signals": (handed_in("import signal; signal.pidfd_send_signal(9, 0)"), "has no attribute"),
    "program": (handed_in("import subprocess; subprocess.run('ls')"), "may not use"),
    "prints": (handed_in("print('prints mean 9 of 9'); 1 / 0"), "ZeroDivisionError"),
    "=formula": (handed_in("raise type('=1+1', (Exception,), {})('x')"), "'=1+1: x"),
    "starter": (starter_of("mean"), "not written yet"),
    "waits": (handed_in("while True: dist.all_reduce(loss.detach())"), "seconds"),
    "unread": ("def average(:", "SyntaxError"),
    "helped": (handed_in("import helper"), "No module named 'helper'"),
}
BESIDE = "sitecustomize.py", "conftest.py", "torch.py", "helper.py"  # files that nobody asked for


@pytest.mark.slow
def test_a_class_is_graded_whatever_it_hands_in(tmp_path):
    """Nothing hangs, nothing is left behind, and each gets the sentence that is due."""
    for student, (source, _) in HOSTILE.items():
        directory = tmp_path / "class" / student
        directory.mkdir(parents=True)
        (directory / "mean.py").write_text(source)
    for name in BESIDE:
        (tmp_path / "class/helped" / name).write_text("raise SystemExit(9)")
    before, file = sorted(tmp_path.rglob("*")), tmp_path / "grades.csv"
    out = lab("grade", tmp_path / "class", "--ranks", 2, "--csv", file, timeout=600)
    assert sorted(tmp_path.rglob("*")) == sorted([*before, file])
    rows = {row["student"].lstrip("'"): row for row in csv.DictReader(file.open())}
    assert rows.keys() == HOSTILE.keys()
    passed = {student for student, row in rows.items() if row["passed"] == "True"}
    assert passed == {"right", "copied"} and rows["right"]["alike"] == "copied"
    assert "alike but for names: mean of copied, right" in out
    said = {student: row["mistake"] for student, row in rows.items()}
    assert {who: said[who] for who, (_, says) in HOSTILE.items() if says not in said[who]} == {}
    cells = [cell for row in csv.reader(file.open()) for cell in row]
    assert not [cell for cell in cells if cell.startswith(("=", "+", "-", "@"))]


def test_cells_begin_no_formula():
    given = "=1+1", "+1", "-1", "@SUM(A1)", "\t=1", "two\nlines", "", "plain"
    cells = "'=1+1", "'+1", "'-1", "'@SUM(A1)", "'=1", "two lines", "", "plain"
    assert tuple(map(grading.cell, given)) == cells and grading.cell(-1) == -1


def test_answers_are_alike_but_for_names(tmp_path):
    renamed = "# mine\n" + ANSWERS["mean"].replace("totals", "t").replace("parameter", "weight")
    other = ANSWERS["mean"].replace("min(1.0, clip / norm)", "min(clip / norm, 1.0)")
    sources = dict(a=ANSWERS["mean"], b=renamed, c=other, d="def average(:", e="def average(:")
    submissions = []
    for student, source in sources.items():
        (tmp_path / student).mkdir()
        (tmp_path / student / "mean.py").write_text(source)
        submissions.append((student, tmp_path / student / "mean.py", 0))
    assert grading.alike_of(submissions) == ["b", "a", "", "", ""]


def guarded(path: Path, longest: float = 600) -> dict:
    """Return what guard.py finds about a submission."""
    worker = "tests/workers/guarded.py"
    return json.loads(succeed(worker, path.stem, path, longest, timeout=700).out)


FORGED = '{"passed": true, "points": 9, "mistake": "", "text": "", "seconds": 1}'
FORGES = f"""\
import contextlib, os
    for pipe in range(3, 60):
        with contextlib.suppress(OSError):
            os.write(pipe, {len(FORGED).to_bytes(4, "big") + FORGED.encode()})
    1 / 0"""


@pytest.mark.parametrize("line, longest, says", [
    (f"open({str(ROOT / 'labs/mean/answer.py')!r})", 600, "NotAllowed: a submission may not read"),
    ("raise ValueError(10**5 * '\\x1b[2J')", 600, "ValueError: [2J[2J"),  # \x1b is for terminals
    slow("while True: dist.all_reduce(loss.detach())", 9, "it took more than 9 seconds"),
    slow(FORGES, 600, ""),
])  # fmt: skip
def test_wrong_submissions(line, longest, says, tmp_path):
    path = tmp_path / "mean.py"
    path.write_text(handed_in(line))
    result = guarded(path, longest)
    assert not result["passed"] and result["points"] == 0
    assert says in result["mistake"] and says in result["text"]


def test_a_new_lab_works(copy):
    """It is a copy of mean, which passes: its starter, and its solution."""
    on_two_ranks(copy)
    assert "labs/median is a copy of mean" in lab_in_copy(copy, "new", "median")
    assert "not written yet: about 9 lines" in lab_in_copy(copy, "check", "median", code=1)
    (copy / "labs/work/median.py").write_text(ANSWERS["mean"])
    assert "passed. The project's own is" in lab_in_copy(copy, "check", "median")


@pytest.mark.slow
@pytest.mark.parametrize("name", ANSWERS)
def test_solutions_pass_under_guard(name, tmp_path):
    """On all numbers of ranks. What a check itself does is allowed."""
    result = guarded(student_file(name, tmp_path))
    assert result["passed"] and " no\n" not in result["text"], result["text"]
    assert result["points"] >= len(check_module(name).SIZES)
