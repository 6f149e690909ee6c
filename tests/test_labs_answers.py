"""All labs: solutions pass and train as the project, and each wrong answer gets its sentence."""

import re
from xml.etree import ElementTree

import pytest
from conftest import launch, refused, slow
from test_labs import ANSWERS, WRONG, lab, student_file

from labs.machinery.answers import starter_of
from labs.machinery.training import check_module

RECT = "{http://www.w3.org/2000/svg}rect"


@pytest.mark.parametrize("name", ["mean", "zero1", "pipeline", slow("buckets")])
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


@pytest.mark.slow
@pytest.mark.parametrize("name, wrong", WRONG, ids=[f"{n}: {w.name}" for n, w in WRONG])
def test_wrong_answers_are_named(name, wrong, tmp_path):
    path = student_file(name, tmp_path, patch=wrong.patch)
    sizes = check_module(name).SIZES
    size = 3 if 3 in sizes else sizes[0]
    out = lab("check", name, "--file", path, "--ranks", size, code=1)
    assert wrong.says in " ".join(out.split()), out
    if wrong.tells == "right numbers":  # so it takes more than numbers to find it
        kinds = r"  (loss|norm|gradients|gathered|output|adapters|weights|example) .*"
        numbers = [line for line in out.splitlines() if re.match(kinds, line)]
        assert numbers and all(line.endswith("ok") for line in numbers)
    if wrong.tells == "hangs":
        assert "stopped: ranks wait" in out and "rank 0  call" in out and ", line " in out


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


# -------------------------------------------------------------------------------- in training

TRAINED = [name for name in ANSWERS if hasattr(check_module(name), "RUN")]


@pytest.mark.parametrize("name", [name if name == "mean" else slow(name) for name in TRAINED])
def test_solutions_train_as_the_project(name, tmp_path):
    steps = 30 if name == "ddp" else 8
    out = lab("train", name, "--file", student_file(name, tmp_path), "--steps", steps, timeout=400)
    differences = re.findall(r"largest difference .*: (\S+) of the", out)
    # mean clips by clip / norm, where the project divides by norm + 1e-6.
    assert max(map(float, differences)) < (1e-7 if name == "mean" else 1e-12)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, change",
    [
        ("mean", {"grad /= totals[1]": "grad /= targets"}),
        ("ddp", {"            parameter.grad /= dist.get_world_size()\n": ""}),
        ("fsdp", {"rows_grad[: len(rows)]": "-rows_grad[: len(rows)]"}),
        ("fsdp", {"rows_grad[: len(rows)]": "rows_grad[: len(rows)] / size"}),
        ("hsdp", {"        dist.all_reduce(rows, group=across)\n": "        rows.neg_()\n"}),
        ("tp", {"        x = SumInBackward.apply(x)\n": ""}),
        ("logits", {"-= is_here.to(p.dtype)": "-= 1"}),
    ],
)
def test_wrong_answers_train_otherwise(name, change, tmp_path):
    """So the student's function is what the run uses."""
    path = student_file(name, tmp_path, change)
    result = launch("labs/run.py", "train", name, "--file", path, timeout=400)
    refused(result, "the runs differ")
