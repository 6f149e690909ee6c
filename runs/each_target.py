"""The loss of each target, from which a task makes its own loss: preferences.py, rewards.py."""

import torch
from torch import Tensor

from model import Llama
from techniques.chunked_loss import cross_entropies
from text.batch import Batch


def set_loss_of_each_target(model: Llama) -> None:
    """Let forward return the loss of each target, [B, T], which is -log p of it."""
    model.loss = cross_entropies


def log_p_of_targets(model: Llama, batch: Batch, microbatch: int) -> Tensor:
    """Return log p of each target, [B, T], by a model after set_loss_of_each_target. In a pipeline
    only the last stage has it and needs it; the others return 0."""
    parts = batch.microbatches(microbatch)
    losses = []
    for part in parts:
        part.use()
        losses.append(model(*part.inputs, documents=part.documents))
    return -torch.cat([x.expand_as(part.targets) for x, part in zip(losses, parts)])
