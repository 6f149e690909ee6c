"""bench.py comm: its report."""

import json
from datetime import datetime

import pytest
import torch
from conftest import succeed

from perf import comm


def test_comm(tmp_path):
    """Two ranks on one node: a single kind of group with every collective."""
    file = tmp_path / "comm.json"
    out = succeed("bench.py", "comm", "--repeats=2", "--out", file, nproc=2).out
    report = json.loads(file.read_text())
    assert report["device"] == "cpu" and report["backend"] == "gloo"
    assert (report["ranks"], report["per_node"], report["torch"]) == (2, 2, torch.__version__)
    assert datetime.fromisoformat(report["date"]).tzinfo
    assert list(report["groups"]) == ["world"] and report["groups"]["world"]["ranks"] == 2
    times = report["groups"]["world"]["times"]
    assert list(times) == ["all-reduce", "all-gather", "reduce-scatter"]
    for points in times.values():
        assert [nbytes for nbytes, _ in points] == comm.SIZES
        assert all(seconds > 0 for _, seconds in points)
    rows = [line.split("|")[1].strip() for line in out.splitlines() if line.startswith("|")]
    assert rows == ["bytes", "---", *(f"{size:,}" for size in comm.SIZES)]
    assert "the smallest message is the latency" in out


def test_bus_bandwidth():
    """A million bytes in a millisecond, by the table in nccl-tests' doc/PERFORMANCE.md."""
    expected = {"all-reduce": 1.75e9, "all-gather": 0.875e9, "reduce-scatter": 0.875e9}
    for collective, speed in expected.items():
        assert comm.bus_bandwidth(collective, 8, 10**6, 1e-3) == pytest.approx(speed)
    assert comm.bus_bandwidth("all-reduce", 2, 10**6, 1e-3) == pytest.approx(1e9)
