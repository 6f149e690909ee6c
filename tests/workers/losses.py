"""Losses as a student would write them in model.py, beside PyTorch's own formulas, in float64: in
chunks, and with the vocabulary sharded over all ranks."""

import torch
import torch.nn.functional as F
from torch import Tensor

import model
from config import ParallelConfig
from files.published import with_fixed_weights
from model import IGNORE, Llama, LlamaConfig
from parallel import parallelize, with_mesh
from perf.instruments import build_on_meta
from plumbing.processes import init_distributed, run
from runs.equal import small_batch, whole_tensor
from techniques.chunked_loss import LOSS_CHUNK

CONFIG = LlamaConfig(32, 1, 4, 2, 24, vocab_size=101)
ROWS = 45, 15  # sequences, tokens of each: two chunks, and a third of the tokens have no target


def capped(hidden, weight):
    return 3 * torch.tanh(hidden @ weight.T / 3)


def smoothed(logits, targets, vocabulary):
    everywhere = vocabulary.logsumexp(logits) - vocabulary.sum(logits) / vocabulary.size
    return 0.9 * vocabulary.cross_entropy(logits, targets) + 0.1 * everywhere


def with_z(logits, targets, vocabulary):
    return vocabulary.cross_entropy(logits, targets) + 1e-2 * vocabulary.logsumexp(logits) ** 2


def focal(logits, targets, vocabulary):
    loss = vocabulary.cross_entropy(logits, targets)
    return (1 - torch.exp(-loss)) ** 2 * loss


def expected_losses(loss_of, logits: Tensor, targets: Tensor) -> Tensor:
    """Return the loss of each target, by PyTorch."""
    smoothing = 0.1 * (loss_of is smoothed)
    found = F.cross_entropy(logits, targets, reduction="none", label_smoothing=smoothing)
    if loss_of is with_z:
        found = found + 1e-2 * logits.logsumexp(-1) ** 2
    if loss_of is focal:
        found = found * (1 - logits.softmax(-1).gather(1, targets[:, None])[:, 0]) ** 2
    return found


def main():
    process = init_distributed()
    world = with_mesh(process, ParallelConfig(tp=process.size, dtype=torch.float64))
    batch, plain = small_batch(*ROWS, CONFIG), with_fixed_weights(Llama(CONFIG).double())
    valid = batch.targets != IGNORE
    assert batch.tokens.numel() > LOSS_CHUNK
    logits_of = model.logits_of
    for loss_of, cap in ((smoothed, True), (with_z, False), (focal, False)):
        model.logits_of, model.loss_of = logits_of, loss_of
        logits, targets = plain(batch.tokens), batch.targets[valid]
        logits = 3 * torch.tanh(logits / 3) if cap else logits
        expected = expected_losses(loss_of, logits[valid], targets).sum()
        gradients = torch.autograd.grad(expected, list(plain.parameters()))

        model.logits_of = capped if cap else logits_of
        llama = build_on_meta(CONFIG)
        parallelize(llama, world, with_fixed_weights)
        loss = llama(*batch.inputs)
        loss.backward()
        torch.testing.assert_close(loss, expected, rtol=1e-13, atol=0)
        for (path, p), gradient in zip(llama.named_parameters(), gradients, strict=True):
            error = (whole_tensor(p.grad) - gradient).norm() / gradient.norm()
            assert error < 1e-12, (loss_of, path, error)
        with torch.no_grad():  # validation has the cross entropy, whatever is trained
            found = llama(*batch.inputs), llama(batch.tokens)
        validation = F.cross_entropy(logits[valid], targets, reduction="sum")
        torch.testing.assert_close(found, (validation, logits), rtol=1e-12, atol=1e-12)


if __name__ == "__main__":
    run(main)
