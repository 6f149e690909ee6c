"""bench.py: its commands run and print their tables; what they measure is no test's matter."""

from conftest import launch, refused, succeed


def test_limit():
    out = succeed("bench.py", "limit", "--model", "tiny", "--batch=1", "--seq-len=16",
                  "--repeats=2").out  # fmt: skip
    rows = [line.split("|")[1].strip() for line in out.splitlines() if line.startswith("|")]
    assert rows[2:] == ["bare matrix products and attention", "transformers", "flatllama"]


def test_loss():
    out = succeed("bench.py", "loss", "--tokens=2048", "--vocab-size=32000", "--dim=64").out
    plain, chunked = (float(line.split("|")[2].split()[0]) for line in out.splitlines()[2:])
    assert chunked < plain


def test_compare():
    out = succeed("bench.py", "compare", "ddp", "wrong", "tp", "full", "--batch=2", "--seq-len=16",
                  "--repeats=2", nproc=2).out  # fmt: skip
    rows = [line.split("|")[1].strip() for line in out.splitlines() if line.startswith("|")]
    assert rows[2:] == ["ddp", "wrong", "tp", "full"]
    assert "ddp sends 2.56 MB by 2 all-reduce over replicate" in out  # 0.64 M parameters
    assert "full sends 2.56 MB" in out and "all-gather over tp" in out


def test_wrong_input():
    result = launch("bench.py", "speed")
    assert result.code == 2 and "invalid choice: 'speed'" in result.err
    refused(launch("bench.py", "compare", "ddp", "--batch=3", "--microbatch=2"), "--batch 3")
    refused(launch("bench.py", "compare", "ddp", "--seq-len=9999"), "--seq-len goes to 2048")
