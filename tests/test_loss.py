"""Losses that a student writes in model.py, beside PyTorch's own formulas, in float64: on one
process in chunks, and with the vocabulary sharded over two."""

import pytest
import torch
import torch.nn.functional as F
from conftest import succeed
from workers.losses import CONFIG, LOSSES, ROWS

from files.published import with_fixed_weights
from model import IGNORE, Llama
from runs.equal import small_batch
from techniques.chunked_loss import LOSS_CHUNK


def expected_losses(name: str, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the loss of each target, by PyTorch."""
    options = dict(reduction="none", label_smoothing=0.1 * ("smoothed" in name))
    found = F.cross_entropy(logits, targets, **options)
    if name == "z-loss":
        found = found + 1e-2 * logits.logsumexp(-1) ** 2
    if name == "focal":
        found = found * (1 - logits.softmax(-1).gather(1, targets[:, None])[:, 0]) ** 2
    return found


@pytest.fixture(scope="module", params=[1, 2])
def results(request, tmp_path_factory):
    path = tmp_path_factory.mktemp("losses") / "results.pt"
    succeed("tests/workers/losses.py", path, nproc=request.param)
    return torch.load(path)


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_in_chunks_and_over_shards_is_that_of_pytorch(name, results):
    found = results[name]
    batch = small_batch(*ROWS, CONFIG)
    assert batch.tokens.numel() > LOSS_CHUNK
    llama = with_fixed_weights(Llama(CONFIG).double())
    logits = llama(batch.tokens)
    if "capped" in name:
        logits = 3 * torch.tanh(logits / 3)
    valid = batch.targets != IGNORE
    loss = expected_losses(name, logits[valid], batch.targets[valid]).sum()
    loss.backward()
    validation = F.cross_entropy(logits[valid], batch.targets[valid], reduction="sum")

    torch.testing.assert_close(found["loss"], loss, rtol=1e-13, atol=0)
    torch.testing.assert_close(found["validation"], validation, rtol=1e-13, atol=0)
    torch.testing.assert_close(found["logits"], logits[:2], rtol=1e-12, atol=1e-12)
    for path, parameter in llama.named_parameters():
        error = (found["gradients"][path] - parameter.grad).norm() / parameter.grad.norm()
        assert error < 1e-12, (path, error)
