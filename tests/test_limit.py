"""bench.py limit and loss, and bench.py's own errors. Speed is not tested, memory is."""

import pytest
from conftest import launch, succeed


def test_limit():
    out = succeed("bench.py", "limit", "--model", "tiny", "--batch=1", "--seq-len=16",
                  "--repeats=2").out  # fmt: skip
    rows = [line.split("|")[1].strip() for line in out.splitlines() if line.startswith("|")]
    assert rows[2:] == ["bare matrix products and attention", "transformers", "flatllama"]


@pytest.mark.slow
def test_loss():
    out = succeed("bench.py", "loss", "--tokens=2048", "--vocab-size=32000", "--dim=64").out
    plain, chunked = (float(line.split("|")[2].split()[0]) for line in out.splitlines()[2:])
    assert chunked < plain


def test_unknown_command():
    result = launch("bench.py", "speed")
    assert result.code == 2 and "invalid choice: 'speed'" in result.err
