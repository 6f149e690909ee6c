"""What a rank sends, as costs/ has it, equals what the kernel counts on an emulated link."""

import json
import os
import subprocess
import sys

import pytest
from conftest import ENVIRONMENT, ROOT

from config import ParallelConfig
from costs.seconds import sent_bytes

RANKS = 4


def ip(*command: str) -> None:
    subprocess.run(["ip", *command], check=True, capture_output=True)


@pytest.fixture
def nodes():
    """Return network namespaces that are joined by a bridge, one for each rank."""
    prefix = f"fl{os.getpid()}"
    names, bridge = [f"{prefix}n{i}" for i in range(RANKS)], f"{prefix}b"
    try:
        for name in (bridge, *names):
            ip("netns", "add", name)
        ip("-n", bridge, "link", "add", "bridge", "type", "bridge")
        ip("-n", bridge, "link", "set", "bridge", "up")
        for i, name in enumerate(names):
            ip("link", "add", "veth", "netns", name, "type", "veth",
               "peer", "name", f"port{i}", "netns", bridge)  # fmt: skip
            ip("-n", bridge, "link", "set", f"port{i}", "master", "bridge", "up")
            ip("-n", name, "addr", "add", f"10.88.0.{i + 1}/24", "dev", "veth")
            ip("-n", name, "link", "set", "veth", "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield names
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"needs the right to make network namespaces: {error}")
    finally:
        for name in (bridge, *names):
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


@pytest.mark.slow
def test_a_rank_sends_what_a_ring_sends(nodes):
    """As sent_bytes says, but for gloo's reduce-scatter, which sends as much as its all-reduce."""
    processes = []
    for rank, name in enumerate(nodes):
        environment = ENVIRONMENT | {
            "RANK": str(rank), "WORLD_SIZE": str(RANKS), "MASTER_ADDR": "10.88.0.1",
            "MASTER_PORT": "29500", "GLOO_SOCKET_IFNAME": "veth",
        }  # fmt: skip
        command = ["ip", "netns", "exec", name, sys.executable,
                   ROOT / "tests/workers/link_bytes.py", "veth"]  # fmt: skip
        options = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        processes.append(subprocess.Popen(command, env=environment, **options))
    results = [process.communicate(timeout=120) for process in processes]
    assert [process.returncode for process in processes] == [0] * RANKS, results
    counted = json.loads(results[0][0])
    print(counted)
    for collective, ratio in counted.items():
        sends_like = "all-reduce" if collective == "reduce-scatter" else collective
        traffic = {("replicate", sends_like): (1, 10**6)}
        predicted = sent_bytes(traffic, ParallelConfig(replicate=RANKS)) / 10**6
        assert ratio == pytest.approx(predicted, rel=0.02), counted
