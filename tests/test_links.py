"""What a rank sends, as costs/ has it, equals what the kernel counts on a link."""

import json
import subprocess
import sys

import pytest
from conftest import ENVIRONMENT, ROOT

from config import ParallelConfig
from costs.seconds import sent_bytes

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
