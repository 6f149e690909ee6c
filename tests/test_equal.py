"""bench.py equal: no false alarm, and the first module that a fault reaches is named."""

import pytest
from conftest import launch, slow, succeed, with_fault

SIZES = "--dim 32 --n-layers 2 --n-heads 4 --n-kv-heads 2 --ffn-dim 48 --seq-len 32 --batch 4"


def flags(corpus, more: str) -> list[str]:
    return ["equal", "--data", corpus, *SIZES.split(), "--microbatch", "1", *more.split()]


@pytest.mark.parametrize("nproc, more", [(2, "--tp 2"), slow(4, "--tp 2 --pp 2 --document-mask")])
def test_a_step_of_the_project_is_equal(nproc, more, corpus):
    """As every run of several processes finds before its first step."""
    out = succeed("bench.py", *flags(corpus, more), nproc=nproc).out
    assert out.endswith("the steps are equal\n")


# Where: a file, what stands there and what replaces it, the flags, what is named.
FAULTS = {
    "a gradient that is not summed over tp": (
        "parallel", "hidden.to_local(grad_placements=[Partial()])", "hidden.to_local()",
        "--tp 2", "first in backward: the gradient of the output of norm, ",
    ),
    "a wrong scale": (
        "zero1", "gradient / self.mesh.size()", "gradient", "--dp zero1",
        "first in reduction: the gradient of norm.weight, relative difference 1;",
    ),
    "an update that is not gathered": (
        "zero1", "parameter.whole.data.copy_(parameter.detach().full_tensor())", "pass",
        "--dp zero1", "first in update: ",
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    "name", [name if "--tp 2" in FAULTS[name] else slow(name) for name in FAULTS]
)
def test_a_fault_is_named_in_its_module(name, corpus, tmp_path):
    file, old, new, more, named = FAULTS[name]
    within = with_fault(tmp_path / "copy", file, old, new)
    result = launch(*within, "bench.py", *flags(corpus, more), nproc=2)
    assert result.code == 0, result.err
    assert named in result.out and "usual causes" in result.out
