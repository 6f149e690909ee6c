"""What a task makes its own loss of: the loss of each target (preferences.py, rewards.py), or the
logits of each token (distill.py)."""

from collections.abc import Callable

import torch
from torch import Tensor

from model import Llama
from plumbing.devices import cast_by_autocast
from techniques.chunked_loss import cross_entropies, some_at_a_time, wide_logits
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


def hidden_states(hidden: Tensor, weight: Tensor, targets: Tensor, vocabulary) -> Tensor:
    """As a model's `loss`: let forward return its last hidden states, [B, T, D]."""
    return hidden


def from_logits(
    function: Callable[..., Tensor], states: list[Tensor], weights: list[Tensor], *of_tokens: Tensor
) -> Tensor:
    """Return function(logits, ...) of each token, [B, T, ...]: the logits [n, V] of some tokens at
    a time, one tensor for each of `states` [B, T, D] and `weights` [V, D], and what `of_tokens`
    [B, T, ...] have. With tensor parallelism logits are those of a shard of the vocabulary."""
    weights = cast_by_autocast(*weights)

    def of_chunk(*given: Tensor) -> Tensor:
        logits = [wide_logits(hidden, weight) for hidden, weight in zip(given, weights)]
        return function(*logits, *given[len(weights) :])

    return some_at_a_time(of_chunk, *states, *of_tokens)
