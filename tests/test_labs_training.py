"""Training with the functions of labs: losses and norms are train.py's, unless one is wrong."""

import re

import pytest
from conftest import launch, refused, slow
from test_labs import ANSWERS, lab, student_file

from labs.machinery.training import check_module

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
