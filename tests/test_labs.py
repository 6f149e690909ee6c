"""labs/: starters fail as not written yet, solutions pass, each wrong answer gets its sentence."""

import ast
import functools
import json
import re
import runpy
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
from conftest import ENVIRONMENT, ROOT, lab_in_copy, wait_for_lines
from test_endings import gone_in_time

from labs import run
from labs.machinery import answers
from labs.machinery.checking import check_module

LABS = ROOT / "labs"
NAMES = run.NAMES
ANSWERS = {name: answers.answer_of(name) for name in NAMES}
lab = functools.partial(lab_in_copy, ROOT)  # what a command of labs/run.py prints
WRONG = [(name, wrong) for name in NAMES for wrong in answers.wrong_answers(name)]


def student_file(
    name: str, directory: Path, change: dict[str, str] | None = None, patch: str = ""
) -> Path:
    """A file with a lab's solution, after a change."""
    source = ANSWERS[name]
    for old, new in (change or {}).items():
        assert source.count(old) == 1, old
        source = source.replace(old, new)
    source = answers.patched(source, patch)
    path = directory / f"{name}.py"
    path.write_text(source)
    return path


@pytest.mark.parametrize("name", ANSWERS)
def test_starters_are_the_solutions_without_the_marked_part(name):
    before, gap, _ = re.split(r"^ +# >>>\n|^ +# <<<\n", ANSWERS[name], flags=re.MULTILINE)
    lines = len(gap.splitlines())
    expected = f'{before}    raise NotImplementedError("about {lines} lines")\n'
    assert answers.starter_of(name) == expected and 5 <= lines <= 40


def source_of(place: str) -> str:
    """Return the text of a file, as it is or, for "FILE of commit HASH", as it was."""
    file, _, commit = place.partition(" of commit ")
    if not commit:
        return (ROOT / file).read_text()
    git = ["git", "-C", ROOT, "show", f"{commit}:{file}"]
    shown = subprocess.run(git, capture_output=True, text=True)
    if shown.returncode:
        pytest.skip(f"needs commit {commit}: git fetch --unshallow")
    return shown.stdout


@pytest.mark.parametrize("name", ANSWERS)
def test_each_lab_is_complete(name):
    """Wrong answers, hints, the way into the code, and a page with a picture."""
    of_lab = answers.wrong_answers(name)
    assert len(of_lab) == (LABS / name / "wrong.txt").read_text().count("\n> ") >= 4  # all are read
    assert {"right numbers"} <= {wrong.tells for wrong in of_lab} <= {"right numbers", "hangs", ""}
    module = check_module(name)
    assert len(module.HINTS) == 3 and not any(re.search(r"\d\d", hint) for hint in module.HINTS)
    place, function = module.LEADS_TO
    names = {node.name: node for node in ast.parse(source_of(place)).body
             if isinstance(node, ast.FunctionDef | ast.ClassDef)}  # fmt: skip
    assert f"labs/{name}" in ast.get_docstring(names[function])
    assert "(picture.svg)" in (LABS / name / "README.md").read_text()
    ElementTree.parse(LABS / name / "picture.svg")


def test_known_sentences_are_whole():
    """What stands in wrong.txt may only begin the sentence, which a student reads to its end."""
    for known in LABS.glob("*/known.json"):
        for sentence in json.loads(known.read_text()):
            assert sentence.endswith((".", "?")), known


def test_the_page_has_what_the_labs_have():
    """The rows of the checks, known commands, and how many mistakes others have published."""
    page = (LABS / "README.md").read_text()
    tables = runpy.run_path(str(ROOT / "docs/map.py"))["tables"]
    assert page == tables(page), "python docs/map.py writes them anew"
    commands = set(re.findall(r"`?python labs/run.py (\w+)|^`(\w+)`", page))
    assert {one or other for one, other in commands} <= run.COMMANDS.keys()
    of_others = [wrong for _, wrong in WRONG if re.search(r"\(|#", wrong.name)]  # names a source
    right = sum(wrong.tells == "right numbers" for wrong in of_others)
    says = f"{len(of_others)} are mistakes that others have published, and {right} of these pass"
    assert says in " ".join(page.split())


def on_two_ranks(copy: Path) -> None:
    """Let a copy of the project check mean on two ranks alone, which takes less time."""
    check = copy / "labs/mean/check.py"
    check.write_text(check.read_text().replace("SIZES = 2, 3, 4", "SIZES = (2,)"))


def test_commands(copy):
    name, (first, second, *_) = "mean", NAMES
    on_two_ranks(copy)
    assert f"next: python labs/run.py check {first}, " in lab_in_copy(copy)
    assert "not written yet" in lab_in_copy(copy, "check", name, code=1)  # writes the starter
    file = copy / f"labs/work/{name}.py"
    starter = answers.starter_of(name)
    assert file.read_text() == starter
    hints = [lab_in_copy(copy, "hint", name) for _ in range(4)]
    assert [hint[:6] for hint in hints] == ["hint 1", "hint 2", "hint 3", "hint 3"]
    lab_in_copy(copy, "why", name, code=2)
    assert "# >>>" in lab_in_copy(copy, "why", name, "--give-up")
    solved = student_file(name, copy / "labs/work").read_text()
    assert "mean" == second and "Whose mean is it?" in lab_in_copy(copy)
    assert "passed. The project's own is `update` in train.py" in lab_in_copy(copy, "check", name)
    assert re.search(r"^mean .* passed$", lab_in_copy(copy), re.MULTILINE)
    shown = lab_in_copy(copy, "why", name)
    assert "# Why: " in shown and "Wrong: mean of means" in shown
    assert json.loads((copy / "labs/work/.state").read_text())["hints"] == {name: 3}
    lab_in_copy(copy, "reset", name)
    assert file.read_text() == starter and Path(f"{file}.1").read_text() == solved


@pytest.mark.slow
def test_exit_codes(copy):
    """0 all is right or graded, 1 something is wrong or was not graded, 2 it cannot be done."""
    lab_in_copy(copy, "check", "nf4", code=1)  # not written yet
    student_file("nf4", copy / "labs/work")
    lab_in_copy(copy, "check", "nf4")
    lab_in_copy(copy, "check", "nf4", "--ranks", 5, code=2)
    lab_in_copy(copy, "check", "nf4", "--file", copy / "none.py", code=2)
    (copy / "bytes.py").write_bytes(b"\xff\xfe")
    lab_in_copy(copy, "check", "nf4", "--file", copy / "bytes.py", code=2)
    (copy / "class/ada").mkdir(parents=True)
    lab_in_copy(copy, "grade", copy / "class", code=2)  # nobody handed in anything
    (copy / "class/ada/nf4.py").write_text("wrong")
    assert "ada" in lab_in_copy(copy, "grade", copy / "class")
    (copy / "labs/nf4/answer.py").write_text("wrong, too")  # then nothing is to be compared with
    lab_in_copy(copy, "grade", copy / "class", code=1)


@pytest.mark.slow
def test_released_copies_have_no_solutions(tmp_path):
    if not (ROOT / ".git").exists():
        pytest.skip("needs a clone")
    copy = tmp_path / "class"
    assert "no solutions" in lab("release", copy)
    solved = [path for path in copy.rglob("*.py") if "dist.all_reduce(totals)" in path.read_text()]
    assert solved == [] and not [*copy.rglob("answer.py"), *copy.rglob("wrong.txt")]
    assert "ask your teacher" in lab_in_copy(copy, "why", "mean", "--give-up", code=2)
    (copy / "labs/work").mkdir()
    student_file("mean", copy / "labs/work")
    assert "passed on 2 ranks" in lab_in_copy(copy, "check", "mean", "--ranks", 2)
    lab_in_copy(copy, "reset", "mean")
    assert (copy / "labs/work/mean.py").read_text() == answers.starter_of("mean")


@pytest.mark.slow
def test_ranks_end_with_the_process_that_checks(tmp_path):
    """Also if it is killed, and although they wait in a collective."""
    notes = tmp_path / "ranks"
    change = {"    totals = torch.stack": f"""\
    import os

    with open({str(notes)!r}, "a") as file:
        print(os.getpid(), file=file)
    if dist.get_rank() == 0:
        dist.barrier()
    totals = torch.stack"""}  # fmt: skip
    path = student_file("mean", tmp_path, change)
    command = [sys.executable, LABS / "run.py", "check", "mean", "--file", path, "--ranks", "3"]
    check = subprocess.Popen(command, env=ENVIRONMENT, stdout=subprocess.DEVNULL)
    wait_for_lines(notes, 3)
    check.kill()
    check.wait()
    assert all(gone_in_time(int(rank), 60) for rank in notes.read_text().split())
