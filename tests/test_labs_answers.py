"""All labs: solutions pass, one trains as the project, and each wrong answer gets its sentence."""

import json
import re
from xml.etree import ElementTree

import pytest
from conftest import launch, slow
from test_labs import ANSWERS, lab, student_file

from labs.machinery import answers
from labs.machinery.answers import starter_of
from labs.machinery.checking import check_module

RECT = "{http://www.w3.org/2000/svg}rect"


@pytest.mark.parametrize("name", ["mean", "zero1", "pipeline"])
def test_solutions_pass(name, tmp_path):
    """The file that is checked is the one that was given. Time lines are drawn."""
    path, plot = student_file(name, tmp_path), tmp_path / "plot.svg"
    size, draws = check_module(name).SIZES[0], hasattr(check_module(name), "drawing")
    given = ["--ranks", size, "--seed", 7, *(["--plot", plot] if draws else [])]
    out = lab("check", name, "--file", path, *given)
    assert re.search(rf"^{path}  .* {size} ranks?, seed 7 ", out, re.MULTILINE)
    assert f"passed on {size} rank" in out and " no\n" not in out
    if draws:
        assert str(plot) in out and len(ElementTree.parse(plot).getroot().findall(RECT)) > 10


KINDS = r"  (loss|norm|gradients|gathered|output|adapters|weights|example) .*"  # of numbers


@pytest.mark.slow
@pytest.mark.parametrize("name", ANSWERS)
def test_wrong_answers_are_named(name, tmp_path):
    wrong_answers, sizes = answers.wrong_answers(name), check_module(name).SIZES
    files = []
    for number, wrong in enumerate(wrong_answers):
        files.append(tmp_path / f"{number}.py")
        files[-1].write_text(answers.patched(ANSWERS[name], wrong.patch))
    size = 3 if 3 in sizes else sizes[0]
    result = launch("tests/workers/reports.py", name, size, *files, timeout=600)
    for wrong, text in zip(wrong_answers, json.loads(result.out), strict=True):
        words, (says, *_) = " ".join(text.split()), wrong.says.split("{")
        assert says in words, f"{wrong.name}: {text}"
        if wrong.tells == "right numbers":  # so it takes more than numbers to find it
            numbers = [line for line in text.splitlines() if re.match(KINDS, line)]
            assert numbers and all(line.endswith("ok") for line in numbers), text
        if wrong.tells == "hangs":
            assert "stopped: ranks wait" in text and "rank 0  call" in text and ", line " in text


NOTHING = [(name, body) for name in ANSWERS for body in ("", "pass")]
NOTHING += [("mean", "return 0.0, 0.0"), ("mean", "everything")]


@pytest.mark.slow
@pytest.mark.parametrize("name, body", NOTHING)
def test_doing_nothing_fails(name, body, tmp_path):
    """The starter, with another body or without."""
    starter, path = starter_of(name), tmp_path / "nothing.py"
    path.write_text(re.sub(r"    raise NotImplementedError.*", f"    {body}", starter))
    if not body:
        path.write_text(starter)
    if body == "everything":  # is commented out
        path.write_text("".join(f"# {line}\n" for line in starter.splitlines()))
    out = lab("check", name, "--file", path, "--ranks", check_module(name).SIZES[-1], code=1)
    says = {
        "": "not written yet: about",
        "pass": "returned None, and should return",
        "return 0.0, 0.0": "0 on rank 0, and ",
        "everything": "defines no function",
    }
    assert says[body] in " ".join(out.split()), out


@pytest.mark.parametrize(
    "line, says",
    [
        ("totals = torch.stack([loss", "SyntaxError: '[' was never closed"),
        ("return loss.detach()", "returned Tensor, and should return the mean loss and the norm"),
        ("assert dist.get_rank() != 1; return loss, loss", "rank 1 failed in line"),
        slow("dist.get_rank() or dist.barrier(); return loss, loss", "rank 1 has"),
        ("dist.all_reduce(loss.detach().view(-1)[: dist.get_rank()])", "They parted at call 1"),
        (
            "(dist.send if dist.get_rank() else dist.recv)(loss, 1 - dist.get_rank()); 1 / 0",
            "ZeroDivisionError: division by zero",
        ),
    ],
)
def test_other_mistakes_are_explained(line, says, tmp_path):
    starter, path = starter_of("mean"), tmp_path / "mean.py"
    path.write_text(re.sub(r"raise NotImplementedError.*", line, starter))
    out = lab("check", "mean", "--file", path, "--ranks", 2, code=1)
    assert says in " ".join(out.split()), out
    assert "hint: python labs/run.py hint mean" in out


def test_a_changed_tensor_is_named_with_its_line(tmp_path):
    """And what the check itself does brings no warning of PyTorch's among the lines."""
    exchange = "    dist.all_reduce(totals)\n"
    change = {exchange: f"{exchange}    dist.all_reduce(loss.detach())\n"}
    path = student_file("mean", tmp_path, change)
    out = lab("check", "mean", "--file", path, "--ranks", 2, code=1)
    assert "average changes `loss` in line 27." in out and "Warning" not in out


def test_the_ddp_of_a_student_trains_as_the_project(copy):
    """And another trains otherwise, so it is the student's that a run uses."""
    (copy / "labs/work").mkdir()
    flags = "--dp ddp --model tiny --tokenizer bytes --seq-len 32 --batch 12 --microbatch 6".split()
    flags += "--optimizer adamw --dtype float64 --steps 4 --eval-every 0".split()
    change = {"            parameter.grad /= dist.get_world_size()\n": ""}
    measured = {}
    for name, script, changed in (
        ("project's", "train.py", {}),
        ("student's", "labs/train.py", {}),
        ("wrong", "labs/train.py", change),
    ):
        student_file("ddp", copy / "labs/work", changed)
        out = copy / name
        result = launch(copy / script, *flags, "--data", copy / "docs", "--out", out, nproc=2)
        assert result.codes == [0, 0], f"{name}: {result.err}"
        lines = (out / "metrics.jsonl").read_text().splitlines()
        measured[name] = [
            json.loads(line)[what] for line in lines for what in ("loss", "grad_norm")
        ]
    assert measured["student's"] == pytest.approx(measured["project's"], rel=1e-12)
    assert measured["wrong"] != pytest.approx(measured["project's"], rel=1e-3)
