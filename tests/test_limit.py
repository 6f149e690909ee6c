"""bench.py limit: what it measures. Speed is not tested."""

import pytest
from conftest import slow, succeed


@pytest.mark.parametrize(
    "flags, rows",
    [
        ("", ["transformers", "flatllama"]),
        slow("--lora --compile", ["peft", "flatllama", "flatllama, all weights"]),
    ],
)
def test_limit(flags, rows):
    out = succeed("bench.py", "limit", "--model", "tiny", "--batch=1", "--seq-len=64",
                  "--repeats=2", *flags.split()).out  # fmt: skip
    found = [line.split("|")[1].strip() for line in out.splitlines() if line.startswith("|")]
    rows += ["flatllama, compiled blocks"] * ("--compile" in flags)
    assert found[2:] == ["bare matrix products and attention", *rows]
