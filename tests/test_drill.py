"""bench.py drill: ranks are killed, and the weights of the end are the same."""

import re

import pytest
import torch
from conftest import launch, refused, succeed
from test_train import flags

from checkpoint import write_checkpoint
from files.safetensors import StoredTensor
from model import Llama, LlamaConfig
from perf.drill import difference, last_step, newest


def test_runs_are_compared(tmp_path):
    """By their last checkpoints, to the last bit; and a line half written is no step."""
    model = Llama(config := LlamaConfig(8, 1, 2, 2, 16, vocab_size=20)).double()
    model.init_weights(seed=0)
    weights = model.state_dict()
    runs = [tmp_path / name for name in ("whole", "killed", "other")]
    for out in runs:
        if out.name == "other":
            weights["norm.weight"] = weights["norm.weight"] + torch.eye(8, dtype=torch.float64)[3]
        stored = {name: StoredTensor.of(tensor) for name, tensor in weights.items()}
        write_checkpoint(out / "step-00000004", config, stored, None)
    assert difference(*runs[:2]) == "final weights are equal, bit for bit"
    assert difference(runs[0], runs[2]) == "final weights differ by up to 1"
    assert newest(runs[0]) == 4 and newest(tmp_path / "none") == 0
    assert last_step(runs[0]) == 0
    (runs[0] / "metrics.jsonl").write_text('{"step": 5}\n{"step": 6}\n{"ste')
    assert last_step(runs[0]) == 6


def drill(corpus, out, kills: int, **more) -> list:
    return ["bench.py", "drill", f"--kills={kills}", *flags(corpus, out, **more)]


@pytest.mark.slow
def test_an_error_of_the_training_is_told(corpus, tmp_path):
    out = tmp_path / "out"
    refused(launch(*drill(corpus, out, 1, microbatch=3)), "--microbatch 3", str(out / "whole.log"))


@pytest.mark.slow
@pytest.mark.parametrize("more", [dict(dp="fsdp"), dict(dp="diloco", every=8, shard=1)])
def test_a_training_that_is_killed_ends_with_the_same_bits(corpus, tmp_path, more):
    given = drill(corpus, tmp_path / "out", 3, steps=200, save_every=9, **more)
    out = succeed(*given, timeout=600).out
    assert "final weights are equal, bit for bit" in out
    killed = re.findall(r"step (\d+): \d of 2 ranks killed, (\d+) steps or ", out)
    assert 0 < len(killed) == int(re.search(r"(\d+) failures", out)[1]) <= 3
    assert all(int(lost) <= max(9, int(step)) for step, lost in killed)
    assert re.search(r"goodput \d+\.\d%\n", out)
    started_again = "s to the next step" in out  # not if it was killed after the last step
    assert started_again == bool(re.search(r"\npredicted \d+\.\d%, with saves of", out))
