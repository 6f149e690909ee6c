"""tests/workers/drill.py: ranks are killed, and the weights of the end are the same."""

import re

import pytest
import torch
from conftest import succeed
from test_train import flags
from workers.drill import difference, last_step, newest

from checkpoint import write_checkpoint
from files.safetensors import StoredTensor
from model import Llama, LlamaConfig


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


@pytest.mark.slow
@pytest.mark.parametrize("more", [dict(dp="fsdp"), dict(dp="diloco", every=8, shard=1)])
def test_a_training_that_is_killed_ends_with_the_same_bits(corpus, tmp_path, more):
    given = flags(corpus, tmp_path, steps=200, save_every=9, **more)
    out = succeed("tests/workers/drill.py", 3, tmp_path / "out", *given, timeout=600).out
    assert "final weights are equal, bit for bit" in out
    killed = re.findall(r"step (\d+): \d of 2 ranks killed, (\d+) steps lost", out)
    assert 0 < len(killed) == int(re.search(r"(\d+) failures", out)[1]) <= 3
    assert all(int(lost) <= max(9, int(step)) for step, lost in killed)
