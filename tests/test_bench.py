"""bench.py: its commands run and print their tables; what they measure is no test's matter."""

import json
from datetime import datetime

import pytest
import torch
from conftest import launch, refused, succeed

import bench


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


def test_comm(tmp_path):
    """Two ranks are one node: a single grouping, every collective in it, and one pair."""
    file = tmp_path / "comm.json"
    out = succeed("bench.py", "comm", "--sizes", "4096", "60", "--repeats=2", "--out", file,
                  nproc=2).out  # fmt: skip
    report = json.loads(file.read_text())
    assert report["device"] == "cpu" and report["backend"] == "gloo"
    assert (report["ranks"], report["per_node"], report["torch"]) == (2, 2, torch.__version__)
    assert datetime.fromisoformat(report["date"]).tzinfo
    assert list(report["groups"]) == ["world"] and report["groups"]["world"]["ranks"] == 2
    times = report["groups"]["world"]["times"]
    assert list(times) == ["all-reduce", "all-gather", "reduce-scatter", "broadcast", "send/recv"]
    for rows in times.values():
        assert [nbytes for nbytes, _ in rows] == [64, 4096]  # rounded up for 2 ranks to share
        assert all(seconds > 0 for _, seconds in rows)
    [(i, j, speed)] = report["pairs"]
    assert (i, j) == (0, 1) and speed > 0
    rows = [line.split("|")[1].strip() for line in out.splitlines() if line.startswith("|")]
    assert rows == ["bytes", "--:", "64", "4,096"]
    assert "latency: all-reduce" in out and "no pair of ranks is slower than half" in out
    assert "the slow dimension" not in out  # there is one only


def test_comm_wrong_input(tmp_path):
    refused(launch("bench.py", "comm"), "torchrun --nproc-per-node 2 bench.py comm")
    refused(launch("bench.py", "comm", "--sizes", "0"), "--sizes", "'0'")
    nowhere = tmp_path / "no" / "comm.json"
    err = launch("bench.py", "comm", "--out", nowhere, nproc=2).err
    lines = [line for line in err.splitlines() if line.startswith("error: ")]
    assert lines == [f"error: --out {nowhere}: there is no directory {nowhere.parent}"]
    assert "exitcode  : 2" in err and "world: all" not in err  # before anything was measured


def test_bus_bandwidth():
    """A million bytes in a millisecond, by the table in nccl-tests' doc/PERFORMANCE.md."""
    expected = {"all-reduce": 1.75e9, "all-gather": 0.875e9, "reduce-scatter": 0.875e9,
                "broadcast": 1e9, "send/recv": 1e9}  # fmt: skip
    for collective, speed in expected.items():
        assert bench.bus_bandwidth(collective, 8, 10**6, 1e-3) == pytest.approx(speed)
    assert bench.bus_bandwidth("all-reduce", 2, 10**6, 1e-3) == pytest.approx(1e9)


def test_pairs_to_try():
    assert bench.pairs_to_try(4, 2) == [(0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3)]
    assert len(bench.pairs_to_try(32, 8)) == 32 * 31 // 2
    many = bench.pairs_to_try(64, 8)
    assert len(many) == 63 + 56 and (7, 8) in many and (55, 63) in many


def all_pairs(size: int, speed) -> list[tuple[int, int, float]]:
    return [(i, j, speed(i, j)) for i, j in bench.pairs_to_try(size, size)]


@pytest.mark.parametrize("size", [4, 5, 8])
def test_slow_rank(size):
    pairs = all_pairs(size, lambda i, j: 1e6 if 3 in (i, j) else 1e7)
    slow = bench.slow_pairs(pairs, size)
    assert len(slow) == size - 1 and all(3 in pair[:2] for pair in slow)
    assert bench.common_rank(slow) == 3
    said = bench.pairs_in_words(pairs, size)
    assert said[0].startswith("ranks 0 and 3: 1.0 MB/s, where ")
    assert said[-1] == f"rank 3 pairs badly: it is in {size - 1} of these {size - 1} pairs"


def test_slow_links():
    """Across two nodes all is ten times slower than within, which is no fault of a link; two links
    are slow for their kind, and have no rank in common."""
    speeds = {(0, 1): 3e7, (2, 6): 2e6}
    usual = lambda i, j: 1e8 if i // 4 == j // 4 else 1e7  # noqa: E731
    pairs = all_pairs(8, lambda i, j: speeds.get((i, j), usual(i, j)))
    slow = bench.slow_pairs(pairs, per_node=4)
    assert slow == [(2, 6, 2e6, 1e7), (0, 1, 3e7, 1e8)]  # the worst for its kind first
    assert bench.common_rank(slow) is None
    assert bench.common_rank(slow[:1]) is None  # neither end is to blame more than the other
    assert len(bench.pairs_in_words(pairs, 4)) == 2


def test_many_slow_pairs():
    pairs = all_pairs(24, lambda i, j: 1.0 if {i, j} & {0, 1} else 1e6)
    said = bench.pairs_in_words(pairs, 24)
    assert len(said) == 9 and said[-1] == "and 37 more pairs below half of what is usual"
    same = all_pairs(3, lambda i, j: 1e6)
    assert bench.pairs_in_words(same, 3) == [
        "no pair of ranks is slower than half the median of its kind"
    ]


def test_slow_grouping():
    """Payload per second alone would call the world slowest; its links carry nearly twice it."""
    groups = {
        "world": {"ranks": 8, "times": {"all-reduce": [(64, 9.0), (1000, 0.7)]}},  # 2500 B/s
        "node": {"ranks": 4, "times": {"all-reduce": [(64, 9.0), (1000, 0.25)]}},  # 6000 B/s
        "across": {"ranks": 2, "times": {"all-reduce": [(64, 1e-6), (1000, 0.5)]}},  # 2000 B/s
    }
    assert bench.slow_grouping(groups) == ("across", "node", pytest.approx(3))
    assert bench.slow_grouping({"world": groups["world"]}) is None
