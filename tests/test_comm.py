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
    facts = dict(device="cpu", backend="gloo", ranks=2, per_node=2, torch=torch.__version__)
    assert {name: report[name] for name in facts} == facts
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
    for collective, factor in (("all-reduce", 7 / 4), ("all-gather", 7 / 8)):
        assert comm.bus_bandwidth(collective, 8, 10**6, 1e-3) == pytest.approx(factor * 1e9)
    assert comm.bus_bandwidth("reduce-scatter", 2, 10**6, 1e-3) == pytest.approx(0.5e9)
