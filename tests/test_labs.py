"""labs/: starters fail as not written yet, solutions pass, each wrong answer gets its sentence."""

import ast
import importlib
import json
import os
import re
import runpy
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest
from conftest import ENVIRONMENT, ROOT, Forks, launch, refused, slow

LABS = ROOT / "labs"
ANSWERS = {path.stem: path.read_text() for path in sorted((LABS / "answers").glob("*.py"))}
WRONG = [(name, wrong) for name in ANSWERS
         for wrong in runpy.run_path(str(LABS / "answers" / f"{name}.py"))["WRONG"]]  # fmt: skip


def lab(*args, code: int = 0, **options) -> str:
    """Return what a command of labs/run.py prints."""
    result = launch("labs/run.py", *args, **options)
    assert result.codes == [code], result.out + result.err
    return result.out


def check_module(name: str) -> ModuleType:
    return importlib.import_module(f"checks.{name}")


def student_file(name: str, directory: Path, change: dict[str, str] | None = None) -> Path:
    """A file with a lab's solution, after a change that makes it wrong."""
    source = ANSWERS[name][: ANSWERS[name].index("\nWRONG = [")]
    for old, new in (change or {}).items():
        assert source.count(old) == 1, old
        source = source.replace(old, new)
    path = directory / f"{name}.py"
    path.write_text(source)
    return path


@pytest.fixture
def copy(tmp_path) -> Path:
    """The project with labs of its own, in which nobody has done anything."""
    shutil.copytree(LABS, tmp_path / "labs", ignore=shutil.ignore_patterns(".state", "*.py.[0-9]*"))
    for path in ROOT.iterdir():
        if path.name not in ("labs", "out"):
            (tmp_path / path.name).symlink_to(path)
    return tmp_path


def in_copy(copy: Path, *args, code: int = 0, script: str = "run.py", **options) -> str:
    """Return what a command prints in another copy of the project."""
    result = launch(copy / "labs" / script, *args, **options)
    assert result.codes == [code], result.out + result.err
    return result.out + result.err


@pytest.mark.parametrize("name", ANSWERS)
def test_starters_are_the_solutions_without_the_marked_part(name):
    before, gap, _ = re.split(r"^ +# >>>\n|^ +# <<<\n", ANSWERS[name], flags=re.MULTILINE)
    lines = len(gap.splitlines())
    starter = (LABS / f"{name}.py").read_text()
    assert starter == f'{before}    raise NotImplementedError("about {lines} lines")\n'
    assert 5 <= lines <= 40


@pytest.mark.parametrize("name", ANSWERS)
def test_starters_fail_as_not_written_yet(name):
    assert "not written yet: about" in lab("check", name, code=1)


@pytest.mark.parametrize("seed", [0, slow(7)])
@pytest.mark.parametrize("name", ANSWERS)
def test_solutions_pass(name, seed, tmp_path):
    """On each number of ranks; and the file that is checked is the one that was given."""
    path = student_file(name, tmp_path)
    out = lab("check", name, "--file", path, "--seed", seed)
    for size in check_module(name).SIZES:
        assert re.search(rf"^{path}  .* {size} ranks?, seed {seed} ", out, re.MULTILINE)
    assert "passed. The project's own is" in out and " no\n" not in out


@pytest.mark.parametrize("name, wrong", WRONG, ids=[f"{n}: {wrong['name']}" for n, wrong in WRONG])
def test_wrong_answers_are_named(name, wrong, tmp_path):
    path = student_file(name, tmp_path, wrong["change"])
    sizes = check_module(name).SIZES
    size = wrong.get("ranks", 3 if 3 in sizes else sizes[0])
    out = lab("check", name, "--file", path, "--ranks", size, code=1)
    assert wrong["says"] in " ".join(out.split()), out
    if wrong.get("numbers") == "right":  # so it takes more than numbers to find it
        kinds = r"  (loss|norm|gradients|gathered|output|adapters|weights) .*"
        numbers = [line for line in out.splitlines() if re.match(kinds, line)]
        assert numbers and all(line.endswith("ok") for line in numbers)
    if wrong.get("hangs"):
        assert "stopped: ranks wait" in out and "rank 0  call" in out and ", line " in out


@pytest.mark.parametrize("name", ANSWERS)
def test_there_are_enough_wrong_answers(name):
    wrong_answers = [wrong for of_lab, wrong in WRONG if of_lab == name]
    assert len(wrong_answers) >= 4
    assert any(wrong.get("numbers") == "right" for wrong in wrong_answers)


@pytest.mark.parametrize("body", ["pass", "return 0.0, 0.0", "everything"])
@pytest.mark.parametrize("name", ANSWERS)
def test_doing_nothing_fails(name, body, tmp_path):
    starter, path = (LABS / f"{name}.py").read_text(), tmp_path / "nothing.py"
    path.write_text(re.sub(r"    raise NotImplementedError.*", f"    {body}", starter))
    if body == "everything":  # is commented out
        path.write_text("".join(f"# {line}\n" for line in starter.splitlines()))
    out = lab("check", name, "--file", path, "--ranks", check_module(name).SIZES[-1], code=1)
    says = {
        "pass": "returned None, and should return",
        "return 0.0, 0.0": "0 on rank 0, and " if name == "mean" else ", and should return",
        "everything": "defines no function",
    }
    assert says[body] in " ".join(out.split()), out


@pytest.mark.parametrize(
    "line, says",
    [
        ("totals = torch.stack([loss", "SyntaxError: '[' was never closed"),
        ("return loss.detach()", "returned Tensor, and should return the mean loss and the norm"),
        ("assert dist.get_rank() != 1; return loss, loss", "rank 1 failed in line"),
        ("dist.get_rank() or dist.barrier(); return loss, loss", "rank 1 has"),
        ("dist.all_reduce(loss.detach().view(-1)[: dist.get_rank()])", "They parted at call 1"),
        (
            "(dist.send if dist.get_rank() else dist.recv)(loss, 1 - dist.get_rank()); 1 / 0",
            "ZeroDivisionError: division by zero",
        ),
    ],
)
def test_other_mistakes_are_explained(line, says, tmp_path):
    starter, path = (LABS / "mean.py").read_text(), tmp_path / "mean.py"
    path.write_text(re.sub(r"raise NotImplementedError.*", line, starter))
    out = lab("check", "mean", "--file", path, "--ranks", 2, code=1)
    assert says in " ".join(out.split()), out
    assert "hint: python labs/run.py hint mean" in out


@pytest.mark.parametrize(
    "line",
    [
        "scale = torch.nn.utils.clip_grad_norm_(parameters, clip)\n    return mean, scale",
        "norm = norm_of(parameters)\n    scale_down(parameters, clip, norm)\n"
        "    return mean.item(), norm.item()",
    ],
)
def test_other_solutions_pass(line, tmp_path):
    """clip_grad_norm_ divides by the norm + 1e-6; and numbers need not be tensors."""
    body = f"""\
totals = torch.stack([loss.detach(), torch.tensor(float(targets), dtype=loss.dtype)])
    dist.all_reduce(totals)
    for parameter in parameters:
        dist.all_reduce(parameter.grad)
        parameter.grad /= totals[1]
    mean = totals[0] / totals[1]
    {line}


def norm_of(parameters):
    return torch.stack([parameter.grad.norm() for parameter in parameters]).norm()


def scale_down(parameters, clip, norm):
    for parameter in parameters:
        parameter.grad *= min(1.0, clip / norm)
"""
    starter, path = (LABS / "mean.py").read_text(), tmp_path / "mean.py"
    path.write_text(re.sub(r"raise NotImplementedError.*", lambda _: body, starter))
    lab("check", "mean", "--file", path, "--ranks", 3)


@pytest.mark.parametrize("name", ANSWERS)
def test_each_lab_has_hints_and_leads_into_the_code(name):
    module = check_module(name)
    assert len(module.HINTS) == 3 and not any(re.search(r"\d\d", hint) for hint in module.HINTS)
    file, function = module.LEADS_TO
    names = {node.name: node for node in ast.parse((ROOT / file).read_text()).body
             if isinstance(node, ast.FunctionDef | ast.ClassDef)}  # fmt: skip
    assert f"labs/{name}.py" in ast.get_docstring(names[function])


def test_the_page_names_each_lab_command_and_length():
    page = (LABS / "README.md").read_text()
    rows = dict(re.findall(r"^\| (\w+) \| (\d+) \|", page, re.MULTILINE))
    for name in ANSWERS:
        assert f"| [{name}]({name}.py) |" in page
        assert f'"about {rows[name]} lines"' in (LABS / f"{name}.py").read_text()
    commands = set(re.findall(r"`?python labs/run.py (\w+)|^`(\w+)`", page))
    known = re.findall(r'^    "(\w+)": \w+,$', (LABS / "run.py").read_text(), re.MULTILINE)
    assert {one or other for one, other in commands} <= set(known)


def test_commands(copy):
    name, other = "mean", "accumulate"
    assert f"next: read labs/{name}.py" in in_copy(copy)
    in_copy(copy, "check", name, code=1)
    hints = [in_copy(copy, "hint", name) for _ in range(4)]
    assert [hint[:6] for hint in hints] == ["hint 1", "hint 2", "hint 3", "hint 3"]
    in_copy(copy, "why", name, code=2)
    assert "# >>>" in in_copy(copy, "why", name, "--give-up")
    starter = (LABS / f"{name}.py").read_text()
    solved = student_file(name, copy / "labs").read_text()
    assert "passed on 2 ranks" in in_copy(copy, "check", name, "--ranks", 2)
    assert f"next: read labs/{name}.py" in in_copy(copy)
    assert "passed. The project's own is `update` in train.py" in in_copy(copy, "check", name)
    assert f"next: read labs/{other}.py" in in_copy(copy)
    shown = in_copy(copy, "why", name)
    assert "# Why: " in shown and "Wrong: mean of means" in shown and "WRONG" not in shown
    assert json.loads((copy / "labs/.state").read_text())["hints"] == {name: 3}
    in_copy(copy, "reset", name)
    assert (copy / f"labs/{name}.py").read_text() == starter
    assert (copy / f"labs/{name}.py.1").read_text() == solved
    (copy / f"labs/{name}.py").unlink()
    assert f"python labs/run.py reset {name}" in in_copy(copy, "check", name, code=2)
    in_copy(copy, "reset", name)
    assert (copy / f"labs/{name}.py").read_text() == starter


@pytest.mark.parametrize(
    "arguments, says",
    [
        (["check", "none"], "no lab 'none'"),
        (["check"], "check which lab?"),
        (["chekc", "mean"], "invalid choice"),
        (["check", "mean", "--rank", "x"], "invalid int value"),
        (["check", "mean", "--ranks", "5"], "mean is checked on 2, 3, 4"),
        (["check", "mean", "--file", "no.py"], "no.py does not exist"),
        (["train", "mean"], "mean.py is not written yet"),
        (["train", "mean", "--file", "no.py"], "no.py does not exist"),
        (["release"], "release which directory?"),
        (["release", str(ROOT)], "exists: name a new directory"),
    ],
)
def test_wrong_commands_are_refused(arguments, says):
    refused(launch("labs/run.py", *arguments), says)


def test_watch_checks_again_after_a_change(copy):
    command = [sys.executable, copy / "labs/run.py", "watch", "mean"]
    watch = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=ENVIRONMENT)
    try:
        lines = iter(watch.stdout.readline, "")
        assert any("not written yet" in line for line in lines)
        assert any("waiting for a change" in line for line in lines)
        student_file("mean", copy / "labs")
        assert any("passed." in line for line in lines)
    finally:
        watch.kill()
        watch.wait()


def test_released_copies_have_no_solutions(tmp_path):
    if not (ROOT / ".git").exists():
        pytest.skip("needs a clone")
    copy = tmp_path / "class"
    assert "no solutions" in lab("release", copy)
    assert not any("# >>>" in path.read_text() for path in copy.glob("labs/**/*.py")
                   if path.name != "run.py")  # fmt: skip
    assert "ask your teacher" in in_copy(copy, "why", "mean", "--give-up", code=2)
    starter = (copy / "labs/mean.py").read_text()
    student_file("mean", copy / "labs")
    assert "passed on 2 ranks" in in_copy(copy, "check", "mean", "--ranks", 2)
    in_copy(copy, "reset", "mean")
    assert (copy / "labs/mean.py").read_text() == starter == (LABS / "mean.py").read_text()


def test_students_do_not_meet(tmp_path):
    """Two checks at once, of a right and a wrong answer."""
    wrong = {"grad /= totals[1]": "grad /= targets"}
    (tmp_path / "wrong").mkdir()
    files = student_file("mean", tmp_path), student_file("mean", tmp_path / "wrong", wrong)
    runs = [Forks("labs/run.py", "check", "mean", "--file", file) for file in files]
    assert [run.finish().codes for run in runs] == [[0], [1]]


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
    deadline = time.monotonic() + 60
    while not notes.exists() or notes.read_text().count("\n") < 3:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    ranks = [int(line) for line in notes.read_text().split()]
    check.send_signal(signal.SIGKILL)
    check.wait()
    while any(Path(f"/proc/{rank}").exists() and is_alive(rank) for rank in ranks):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    state = Path(f"/proc/{process}/stat")
    return not state.exists() or state.read_text().rpartition(")")[2].split()[0] != "Z"


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in ANSWERS if hasattr(check_module(name), "RUN")])
def test_solutions_train_as_the_project(name, tmp_path):
    out = lab("train", name, "--file", student_file(name, tmp_path), timeout=400)
    (difference,) = re.findall(r"largest difference: (\S+) of the loss", out)
    # mean clips by clip / norm, where the project divides by norm + 1e-6.
    assert float(difference) < (1e-4 if name == "mean" else 1e-12)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, change",
    [
        ("mean", {"grad /= totals[1]": "grad /= targets"}),
        ("ddp", {"            parameter.grad /= dist.get_world_size()\n": ""}),
        ("fsdp", {"rows_grad[: len(rows)]": "-rows_grad[: len(rows)]"}),
        ("hsdp", {"        dist.all_reduce(rows, group=across)\n": "        rows.neg_()\n"}),
    ],
)
def test_wrong_answers_train_otherwise(name, change, tmp_path):
    """So the student's function is what the run uses."""
    path = student_file(name, tmp_path, change)
    result = launch("labs/run.py", "train", name, "--file", path, timeout=400)
    refused(result, "the losses differ")
