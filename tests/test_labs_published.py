"""Mistakes that others have published, in files of their own style, are recognized by name."""

from pathlib import Path

import pytest
from conftest import ROOT
from test_labs import check_module, lab

from labs.machinery.answers import wrong_answers

LABS = ROOT / "labs"
# File -> part of the name of the wrong answer, and whether all comparisons of numbers hold.
PUBLISHED = {
    "picotron": ("picotron's DataParallelNaive", False),
    "picotron_tutorial": ("picotron_tutorial", False),
    "build_nanogpt": ("build-nanogpt PR #30", True),
    "transformers_34242": ("transformers #34242", False),
    "arena": ("ARENA", True),
    "dist_tuto": ("dist_tuto", True),
    "llama_cookbook": ("llama-cookbook #740", True),
    "pytorch_161776": ("pytorch #161776", True),
    "pytorch_84590": ("pytorch PR #84590", True),
    "litgpt": ("litgpt #1417", True),
}
NUMBERS = ("loss", "norm", "gradients", "gathered", "output", "adapters", "sum")


def test_every_file_is_tried():
    assert {path.stem for path in (LABS / "published").glob("*.py")} == set(PUBLISHED)


@pytest.mark.slow
@pytest.mark.parametrize("name", PUBLISHED)
def test_published_mistakes_are_recognized(name):
    path = LABS / f"published/{name}.py"
    of_lab = path.read_text().removeprefix('"""').split(",")[0]
    size = check_module(of_lab).SIZES[-1]
    out = lab("check", of_lab, "--file", path, "--ranks", size, code=1)
    said = " ".join(out.split())
    recognized = [wrong.name for wrong in wrong_answers(of_lab) if wrong.says in said]
    part, numbers_are_right = PUBLISHED[name]
    assert recognized and part in recognized[0], out
    numbers = [line for line in out.splitlines() if line.split()[:1] and line.split()[0] in NUMBERS]
    assert all(line.endswith("ok") for line in numbers) == numbers_are_right, out


def test_the_table_of_teachers_counts_them():
    """As many as the page says pass all comparisons of numbers."""
    page = Path(ROOT / "labs/README.md").read_text()
    right = sum(numbers for _, numbers in PUBLISHED.values())
    assert f"{right} of these {len(PUBLISHED)} mistakes" in " ".join(page.split())
