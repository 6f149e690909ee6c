"""bench.py limit and loss. Speed is not tested, memory is."""

import pytest
from conftest import succeed


def test_limit():
    out = succeed("bench.py", "limit", "--model", "tiny", "--batch=1", "--seq-len=64",
                  "--repeats=2", "--operators").out  # fmt: skip
    times, operators = out.split("\n\n")
    rows = [line.split("|")[1].strip() for line in times.splitlines() if line.startswith("|")]
    assert rows[2:] == ["bare matrix products and attention", "transformers", "flatllama"]
    table = [line.split("|") for line in operators.splitlines()[2:]]
    calls = {row[1].strip(): int(row[2]) for row in table}
    # Three products for each of 7 matrices in 4 blocks and for the output; 4 attentions.
    assert calls["mm"] == 3 * (7 * 4 + 1)
    assert calls["_scaled_dot_product_flash_attention_for_cpu_backward"] == 4
    assert calls["all"] >= sum(calls.values()) - calls["all"]  # others are not in the table


@pytest.mark.slow
def test_loss():
    out = succeed("bench.py", "loss", "--tokens=2048", "--vocab-size=32000", "--dim=64").out
    plain, chunked = (float(line.split("|")[2].split()[0]) for line in out.splitlines()[2:])
    assert chunked < plain
