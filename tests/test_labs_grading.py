"""Grades of a class: points, names of mistakes, files for other tools, and what is barred."""

import csv
import json
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

import pytest
from conftest import ROOT, in_copy, launch, refused, slow, succeed
from test_labs import ANSWERS, WRONG, lab, student_file

from labs.machinery import grading
from labs.machinery.answers import starter_of
from labs.machinery.checking import check_module
from labs.machinery.grading import seed_of

LABS = ROOT / "labs"
NOT_ALLOWED = {
    "solution": (f"open({str(LABS / 'mean/answer.py')!r})", "read .*/labs/mean/answer.py"),
    "program": ("import subprocess; subprocess.run('ls')", "start programs"),
    "network": ("import socket; socket.create_connection(('127.0.0.1', 9))", "use the network"),
    "file": ("open('../mine', 'w')", "change ../mine"),
    "exec": ("exec(\"import os; os.remove('/tmp/none')\")", "change /tmp/none"),
    "directory": ("import os; os.mkdir('/tmp/mine')", "change /tmp/mine"),
    "home": ("open('own.txt', 'w').write('1')", ""),  # its own directory is allowed
}
PUBLISHED = next(wrong for name, wrong in WRONG if name == "mean" and not wrong.tells)


def submit(directory: Path, student: str, name: str, change: dict | None = None, patch="") -> None:
    (directory / student).mkdir(exist_ok=True, parents=True)
    student_file(name, directory / student, change, patch)


@pytest.mark.slow
def test_a_class_is_graded(tmp_path):
    """A point for each line of the report that holds, up to the first that does not; and files."""
    submit(tmp_path / "class", "ada", "mean")
    submit(tmp_path / "class", "bob", "mean", patch=PUBLISHED.patch)
    (tmp_path / "class/bob/ddp.py").write_text(starter_of("ddp"))
    (tmp_path / "class/notes.txt").write_text("not a submission")
    (tmp_path / "class/frank").mkdir()
    files = "--csv", tmp_path / "g.csv", "--junit", tmp_path / "g.xml"
    out = lab("grade", tmp_path / "class", "--class", "key", *files, timeout=200)
    rows = list(csv.DictReader((tmp_path / "g.csv").open()))
    ada, bob_ddp, bob_mean = sorted(rows, key=lambda row: (row["student"], row["lab"]))
    lines = int(ada["of"])
    assert (ada["passed"], ada["points"]) == ("True", ada["of"]) and lines % 3 == 0  # sizes
    assert (bob_mean["passed"], bob_mean["mistake"]) == ("False", PUBLISHED.name)
    assert 0 < int(bob_mean["points"]) < lines and bob_mean["of"] == ada["of"]
    assert (bob_ddp["points"], bob_ddp["mistake"]) == ("0", "not written yet")
    for row in rows:
        assert re.search(rf"{row['student']} +{row['lab']} +{row['points']} of {row['of']}", out)
        assert row["seed"] == str(seed_of("key", row["student"], row["lab"]))
    assert re.findall(r".*no LAB.py found", out) == ["frank: no LAB.py found"]

    suites = ElementTree.parse(tmp_path / "g.xml").getroot()
    failed = {suite.get("name"): suite.get("failures") for suite in suites}
    assert failed == {"ada": "0", "bob": "2"}
    failures = [case.find("failure") for suite in suites for case in suite]
    assert [one is not None for one in failures] == [row["passed"] == "False" for row in rows]
    texts = "".join(one.text for one in failures if one is not None)
    assert "hint: python labs/run.py hint mean" in texts and "not written yet" in texts


def test_seeds_are_the_students_own():
    given = [("key", "ada", "mean"), ("key", "bob", "mean"), ("key", "bob", "ddp")]
    assert len({seed_of(*words) for words in (*given, ("other", "ada", "mean"))}) == 4


@pytest.mark.slow
def test_the_directory_of_one_student(tmp_path):
    for student in ("ada", "bob"):
        submit(tmp_path, student, "mean")
    file = tmp_path / "results.json"
    files = "--gradescope", file
    out = lab("grade", tmp_path / "ada", "--seed", 3, "--summary", *files, timeout=200)
    assert "mean: 1 of 1 passed" in out
    (test,) = json.loads(file.read_text())["tests"]
    assert test["name"] == "mean" and test["score"] == test["max_score"] == 18
    result = launch("labs/run.py", "grade", tmp_path, *files, timeout=200)
    refused(result, "--gradescope is for one student's directory")


def test_mistakes_are_alike_but_for_their_numbers():
    says = ("12 bytes too many", "1,234 bytes too many", "not written yet")
    grades = [grading.Grade("ada", "mean", 0, False, 1, 5, text, text) for text in says]
    expected = ["mean: 0 of 3 passed", "   2  12 bytes too many", "   1  not written yet"]
    assert list(grading.summarize(grades)) == expected


def guarded(name: str, directory: Path, line: str = "", longest: float = 60) -> dict:
    """Return what guard.py finds about a solution, that of mean with a line before its first."""
    first = "    totals = torch.stack"
    path = student_file(name, directory, {first: f"    {line}\n{first}"} if line else None)
    return json.loads(succeed("tests/workers/guarded.py", name, path, longest, timeout=90).out)


@pytest.mark.parametrize("what", [slow(what) if what == "home" else what for what in NOT_ALLOWED])
def test_submissions_have_their_own_directory_and_nothing_else(what, tmp_path):
    line, says = NOT_ALLOWED[what]
    result = guarded("mean", tmp_path, line)
    assert result["passed"] == (says == "")
    assert re.search(f"NotAllowed: a submission may not {says}" if says else "ok", result["text"])


WRITES = """
import os

for descriptor in range(3, 60):
    try:
        os.write(descriptor, b'{"passed": true}')
    except OSError:
        pass
"""
RUNS = """
class Loaded(torch.Tensor):
    def __reduce_ex__(self, _):
        return exec, (f"open({__file__ + '.escaped'!r}, 'w')",)

"""


@pytest.mark.slow
def test_a_submission_harms_no_other(tmp_path):
    """One writes to all open files, one returns what runs code when it is loaded, one starts a
    thread: each is graded, and so are the others."""
    submit(tmp_path, "ada", "ring")
    submit(tmp_path, "jan", "ring", {"def ring_all_reduce": f"{WRITES}\n\ndef ring_all_reduce"})
    submit(tmp_path, "kim", "ring", {
        "def ring_all_reduce": f"{RUNS}\ndef ring_all_reduce",
        "return total.view_as(tensor)": "return total.view_as(tensor).as_subclass(Loaded)",
    })  # fmt: skip
    started = "import subprocess\n    import threading\n\n    "
    started += "threading.Thread(target=subprocess.run, args=(['ls'],)).start()\n    rank, size"
    submit(tmp_path, "qin", "ring", {"    rank, size": f"    {started}"})
    lab("grade", tmp_path, "--csv", tmp_path / "grades.csv", timeout=200)
    rows = {row["student"]: row for row in csv.DictReader((tmp_path / "grades.csv").open())}
    assert rows["ada"]["passed"] == rows["kim"]["passed"] == "True"
    assert rows["jan"]["of"] == rows["ada"]["points"]
    assert "without a thread" in rows["qin"]["mistake"]
    assert not list(Path(tempfile.gettempdir()).glob("*/*/ring.py.escaped"))


def test_what_is_graded_is_not_lost_by_ctrl_c(tmp_path, monkeypatch, capsys):
    def interrupted(jobs: list[tuple]) -> Iterator[tuple[int, dict]]:
        yield 1, dict(passed=True, points=99, mistake="", text="fine")
        raise KeyboardInterrupt

    monkeypatch.setattr(grading, "run_guarded", interrupted)
    monkeypatch.setattr(grading, "points_of_solution", lambda lab: 15)
    files = [(student, "mean", student_file("mean", tmp_path)) for student in ("ada", "bob")]
    (grade,) = grading.grade_all(files, [1, 2])
    assert (grade.student, grade.points) == ("bob", 15)
    assert "interrupted, 1 are not graded" in capsys.readouterr().err


def test_long_reports_come_back(tmp_path):
    result = guarded("mean", tmp_path, "raise ValueError('x' * 10**6)")
    assert not result["passed"] and len(result["text"]) > 10**6


@pytest.mark.slow
def test_long_submissions_are_ended(tmp_path):
    result = guarded("mean", tmp_path, "while True: pass", longest=3)
    assert not result["passed"] and "more than 3 seconds" in result["mistake"]


def test_a_new_lab_works(copy):
    """Its starter, its solution, and its wrong answer."""
    out = in_copy(copy, "new", "median")
    assert "labs/median/answer.py" in out and "labs/median/check.py" in out
    assert "not written yet: about 5 lines" in in_copy(copy, "check", "median", code=1)
    answer = (copy / "labs/median/answer.py").read_text()
    (copy / "labs/work/median.py").write_text(answer)
    assert "passed. The project's own is" in in_copy(copy, "check", "median")
    wrong = answer.replace("total / dist.get_world_size()", "total")
    (copy / "labs/work/median.py").write_text(wrong)
    assert "This is the sum over the ranks" in in_copy(copy, "check", "median", code=1)


@pytest.mark.slow
@pytest.mark.parametrize("name", ANSWERS)
def test_solutions_pass_under_guard(name, tmp_path):
    """On all numbers of ranks. What a check itself does is not taken for the student's doing."""
    result = guarded(name, tmp_path)
    assert result["passed"] and " no\n" not in result["text"], result["text"]
    assert result["points"] >= len(check_module(name).SIZES)
