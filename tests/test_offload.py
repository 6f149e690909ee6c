"""techniques/offload.py: activations in CPU memory change no bit, and leave the GPU."""

from types import SimpleNamespace

import pytest
import torch
from exact import GROUPED, ODD, case, train

import techniques.offload as offload
from model import Block, Llama, LlamaConfig
from techniques.offload import offload_activations

CASES = {
    "fsdp": case(ODD, dp="fsdp", shard=2, checkpointing="full"),
    "autocast": case(ODD, dp="ddp", replicate=2),
    "tp": case(GROUPED, 2, dp="fsdp", tp=2),
}


def test_offloading_changes_no_bit(tmp_path):
    """In bfloat16: test_exact.py takes float64, in which other orders of sums do not show."""
    cases = {}
    for name, given in CASES.items():
        for offloads in (False, True):
            parallel = given["parallel"] | dict(offload_activations=offloads)
            cases[name, offloads] = given | dict(dtype="bfloat16", parallel=parallel)
    results = train(tmp_path, 2, cases)
    for name in CASES:
        result, expected = results[name, True], results[name, False]
        assert (result["rows"], result["sent"]) == (expected["rows"], expected["sent"]), name
        for what in ("gradients", "last"):
            for parameter, value in expected[what].items():
                assert torch.equal(result[what][parameter], value), (name, parameter)


ON_CPU = SimpleNamespace(device=torch.device("cpu"))  # a World


def small_model() -> Llama:
    torch.manual_seed(0)
    (model := Llama(LlamaConfig(32, 3, 4, 2, 48, vocab_size=50)).double()).init_weights()
    return model


def test_blocks_take_turns_on_the_gpu(monkeypatch):
    """After forward the GPU has what the last block saved; in backward also what comes next.
    Evaluation offloads nothing."""
    monkeypatch.setattr(offload, "MIN_BYTES", 0)
    blocks, used = [], []  # what each block saved; in each use, of which block something is there

    class Watched(offload.SavedByBlock):
        def __init__(self, *args):
            super().__init__(*args)
            blocks.append(self.tensors)

        def use(self, saved):
            result = super().use(saved)
            used.append([any(t.on_gpu is not None for t in tensors) for tensors in blocks])
            return result

    monkeypatch.setattr(offload, "SavedByBlock", Watched)
    offload_activations(model := small_model(), ON_CPU)
    tokens = torch.arange(24).view(2, 12)
    with torch.no_grad():
        model(tokens, targets=tokens)
    assert not blocks
    loss = model(tokens, targets=tokens)
    assert [all(t.on_gpu is None for t in tensors) for tensors in blocks] == [True, True, False]
    # q, attention's output, two norms' inputs, outputs and what their weights multiply; k, v; gate,
    # silu(gate), up and their product; lse in float32 or float64
    nbytes = 8 * 24 * (8 * 32 + 2 * 16 + 4 * 48)
    for tensors in blocks:
        assert nbytes < sum(t.on_cpu.nbytes for t in tensors) < 1.1 * nbytes
    loss.backward()
    assert used[0] == [False, True, True] and used[-1][0]


def test_a_change_in_place_is_refused_as_without(monkeypatch):
    """Hooks switch off PyTorch's own check: without another, gradients would be wrong."""
    monkeypatch.setattr(offload, "MIN_BYTES", 0)

    def forward(self, x, *rest):
        h = (x * 2).exp()
        return x + h.mul_(3)  # exp has saved h

    monkeypatch.setattr(Block, "forward", forward)
    tokens = torch.arange(12).view(1, 12)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        small_model()(tokens, targets=tokens).backward()
    offload_activations(model := small_model(), ON_CPU)
    with pytest.raises(RuntimeError, match="changed in place a tensor"):
        model(tokens, targets=tokens).backward()
