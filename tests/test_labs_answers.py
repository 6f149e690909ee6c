"""Checks of all labs: solutions pass, and each wrong answer gets its sentence."""

import re
from xml.etree import ElementTree

import pytest
from conftest import slow
from test_labs import ANSWERS, WRONG, check_module, lab, student_file

from labs.machinery.answers import starter_of

QUICK = "mean zero1 pipeline".split()  # labs whose checks are quick


@pytest.mark.parametrize("name", [name if name == "mean" else slow(name) for name in ANSWERS])
def test_starters_fail_as_not_written_yet(name, tmp_path):
    (tmp_path / "starter.py").write_text(starter_of(name))
    assert "not written yet: about" in lab("check", name, "--file", tmp_path / "starter.py", code=1)


@pytest.mark.parametrize("name", QUICK)
def test_solutions_pass(name, tmp_path):
    size = check_module(name).SIZES[0]
    out = lab("check", name, "--file", student_file(name, tmp_path), "--ranks", size)
    assert f"passed on {size} rank" in out and " no\n" not in out


@pytest.mark.parametrize("name", [slow("buckets"), "pipeline"])
def test_time_lines_are_drawn(name, tmp_path):
    plot = tmp_path / "plot.svg"
    path, size = student_file(name, tmp_path), check_module(name).SIZES[0]
    assert str(plot) in lab("check", name, "--file", path, "--ranks", size, "--plot", plot)
    drawn = ElementTree.parse(plot).getroot()
    assert len(drawn.findall("{http://www.w3.org/2000/svg}rect")) > 10


@pytest.mark.slow
@pytest.mark.parametrize("name", ANSWERS)
def test_solutions_pass_on_all_numbers_of_ranks(name, tmp_path):
    """And the file that is checked is the one that was given."""
    path = student_file(name, tmp_path)
    out = lab("check", name, "--file", path, "--seed", 7)
    for size in check_module(name).SIZES:
        assert re.search(rf"^{path}  .* {size} ranks?, seed 7 ", out, re.MULTILINE)
    assert "passed. The project's own is" in out and " no\n" not in out


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


@pytest.mark.slow
@pytest.mark.parametrize("body", ["pass", "return 0.0, 0.0", "everything"])
@pytest.mark.parametrize("name", ANSWERS)
def test_doing_nothing_fails(name, body, tmp_path):
    starter, path = starter_of(name), tmp_path / "nothing.py"
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


@pytest.mark.parametrize(
    "line",
    [
        "scale = torch.nn.utils.clip_grad_norm_(parameters, clip)\n    return mean, scale",
        slow(
            "norm = norm_of(parameters)\n    scale_down(parameters, clip, norm)\n"
            "    return mean.item(), norm.item()"
        ),
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
    starter, path = starter_of("mean"), tmp_path / "mean.py"
    path.write_text(re.sub(r"raise NotImplementedError.*", lambda _: body, starter))
    lab("check", "mean", "--file", path, "--ranks", 3)
