"""bench.py equal: no false alarm, and the first module that a fault reaches is named."""

import pytest
from conftest import launch, slow, succeed, with_fault
from test_train import SIZES

from model import IGNORE, PRESETS
from runs.equal import small_batch


def flags(corpus, more: str) -> list[str]:
    given = ["--data", corpus, *SIZES, "--seq-len=32", "--batch=4", "--microbatch=1"]
    return ["bench.py", "equal", *given, *more.split()]


@pytest.mark.parametrize("nproc, more", [(2, "--tp 2"), slow(4, "--tp 2 --pp 2 --document-mask")])
def test_a_step_of_the_project_is_equal(nproc, more, corpus):
    """As every run of several processes finds before its first step."""
    assert succeed(*flags(corpus, more), nproc=nproc).out.endswith("the steps are equal\n")


FAULTS = [  # a file, what stands there and what replaces it, the flags, what is named
    ("parallel", "hidden.to_local(grad_placements=[Partial()])", "hidden.to_local()",
     "--tp 2", "first in backward: the gradient of the output of norm, "),
    slow("zero1", "gradient / self.mesh.size()", "gradient",
         "--dp zero1", "first in reduction: the gradient of norm.weight, relative difference 1;"),
    slow("zero1", "parameter.whole.data.copy_(parameter.detach().full_tensor())", "pass",
         "--dp zero1", "first in update: "),
]  # fmt: skip


@pytest.mark.parametrize("file, old, new, more, named", FAULTS)
def test_a_fault_is_named_in_its_module(file, old, new, more, named, corpus, tmp_path):
    within = with_fault(tmp_path / "copy", file, old, new)
    result = launch(*within, *flags(corpus, more), nproc=2)
    assert result.code == 0, result.err
    assert named in result.out and "usual causes" in result.out


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("cp", [2, 4, 8])
def test_targets_count_on_both_sides_of_a_border_of_the_check(cp, tp):
    """So that a loss that sees the targets of the next tokens differs under --cp."""
    T = (768 // (2 * cp * tp) + 1) * 2 * cp * tp
    counts = small_batch(1, T, PRESETS["tiny"]).targets[0] != IGNORE
    borders = range(T // (2 * cp), T, T // (2 * cp))
    assert any(counts[border - 3 : border + 3].all() for border in borders)
    assert not counts[:8].all()  # of check_gradients
