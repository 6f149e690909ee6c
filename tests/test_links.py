"""Links: what bench.py comm reports of them, and that ranks send what costs/ says."""

import json
import subprocess
import sys
from datetime import datetime

import pytest
import torch
from conftest import ENVIRONMENT, ROOT, succeed

from config import ParallelConfig
from costs.seconds import sent_bytes
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


RANKS = 4
OWN_NETWORK = ["unshare", "--map-root-user", "--net", "sh", "-c", 'ip link set lo up && "$0" "$@"']


@pytest.mark.slow
def test_a_rank_sends_what_a_ring_sends():
    """As sent_bytes says, but for gloo's reduce-scatter, which sends as much as its all-reduce."""
    if subprocess.run([*OWN_NETWORK, "true"]).returncode:
        pytest.skip("needs the right to make a network namespace")
    torchrun = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={RANKS}"]
    command = [*OWN_NETWORK, *torchrun, ROOT / "tests/workers/link_bytes.py"]
    environment = ENVIRONMENT | {"GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": str(ROOT)}
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    counted = json.loads(run.stdout)
    print(counted)
    for collective, ratio in counted.items():
        sends_like = "all-reduce" if collective == "reduce-scatter" else collective
        traffic = {("replicate", sends_like): (1, 10**6)}
        predicted = sent_bytes(traffic, ParallelConfig(replicate=RANKS)) / 10**6
        assert ratio == pytest.approx(predicted, rel=0.02), counted
