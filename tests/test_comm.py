"""bench.py comm: its report, and how it names slow links and ranks."""

import json
from datetime import datetime

import pytest
import torch
from conftest import succeed

from perf import comm


def test_comm(tmp_path):
    """Two ranks on one node: a single kind of group with every collective, and one pair."""
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
    for points in times.values():
        assert [nbytes for nbytes, _ in points] == [64, 4096]  # a multiple of 2 ranks x 4 bytes
        assert all(seconds > 0 for _, seconds in points)
    [(i, j, speed)] = report["pairs"]
    assert (i, j) == (0, 1) and speed > 0
    rows = [line.split("|")[1].strip() for line in out.splitlines() if line.startswith("|")]
    assert rows == ["bytes", "---", "64", "4,096"]
    assert "the smallest message is the latency" in out
    assert "no pair of ranks is slower than half" in out
    assert "the slowest groups" not in out  # there is one kind only


def test_bus_bandwidth():
    """A million bytes in a millisecond, by the table in nccl-tests' doc/PERFORMANCE.md."""
    expected = {"all-reduce": 1.75e9, "all-gather": 0.875e9, "reduce-scatter": 0.875e9,
                "broadcast": 1e9, "send/recv": 1e9}  # fmt: skip
    for collective, speed in expected.items():
        assert comm.bus_bandwidth(collective, 8, 10**6, 1e-3) == pytest.approx(speed)
    assert comm.bus_bandwidth("all-reduce", 2, 10**6, 1e-3) == pytest.approx(1e9)


def test_pairs_to_measure():
    assert comm.pairs_to_measure(4, 2) == [(0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3)]
    assert len(comm.pairs_to_measure(32, 8)) == 32 * 31 // 2
    many = comm.pairs_to_measure(64, 8)
    assert len(many) == 63 + 56 and (7, 8) in many and (55, 63) in many


def all_pairs(size: int, speed) -> list[tuple[int, int, float]]:
    return [(i, j, speed(i, j)) for i, j in comm.pairs_to_measure(size, size)]


@pytest.mark.parametrize("size", [4, 5, 8])
def test_slow_rank(size):
    pairs = all_pairs(size, lambda i, j: 1e6 if 3 in (i, j) else 1e7)
    lines = comm.pairs_text(pairs, size)
    assert lines[0].startswith("ranks 0 and 3: 1.0 MB/s, where the median is ")
    assert lines[-1] == f"rank 3 is slow: it is in {size - 1} of these {size - 1} pairs"
    assert len(lines) == size


def test_slow_links():
    """Across two nodes all pairs are ten times slower than within, which is normal. Two pairs are
    slow for their kind, and have no rank in common."""
    exceptions = {(0, 1): 3e7, (2, 6): 2e6}
    pairs = all_pairs(8, lambda i, j: exceptions.get((i, j), 1e8 if i // 4 == j // 4 else 1e7))
    slow = comm.slow_pairs(pairs, per_node=4)
    assert slow == [(2, 6, 2e6, 1e7), (0, 1, 3e7, 1e8)]  # the slowest for its kind first
    assert comm.common_rank(slow) is None
    assert comm.common_rank(slow[:1]) is None  # either end may be the cause
    assert len(comm.pairs_text(pairs, 4)) == 2


def test_many_slow_pairs():
    pairs = all_pairs(24, lambda i, j: 1.0 if {i, j} & {0, 1} else 1e6)
    lines = comm.pairs_text(pairs, 24)
    assert len(lines) == 9 and lines[-1] == "and 37 more pairs below half of the median"


def test_slowest_group():
    """By payload per second alone, the world would be slowest; its links carry nearly twice it."""
    groups = {
        "world": {"ranks": 8, "times": {"all-reduce": [(64, 9.0), (1000, 0.7)]}},  # 2500 B/s
        "node": {"ranks": 4, "times": {"all-reduce": [(64, 9.0), (1000, 0.25)]}},  # 6000 B/s
        "across": {"ranks": 2, "times": {"all-reduce": [(64, 1e-6), (1000, 0.5)]}},  # 2000 B/s
    }
    assert comm.slowest_group(groups) == ("across", "node", pytest.approx(3))
    assert comm.slowest_group({"world": groups["world"]}) is None
