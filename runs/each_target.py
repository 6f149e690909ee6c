"""What tasks compute losses of their own from: the loss of each target (preferences.py and
rewards.py), or the logits of each token (distill.py)."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from model import IGNORE, Llama, Vocabulary, logits_of
from plumbing.devices import cast_by_autocast
from techniques.chunked_loss import tokens_at_a_time
from text.batch import Batch


def cross_entropies(
    hidden: Tensor, weight: Tensor, targets: Tensor, vocabulary: Vocabulary
) -> Tensor:
    """Return -log p of each target, 0 for IGNORE, in float32 or float64: [B, T].

    A task computes its loss from these. So gradients are not known in forward, as they are for the
    model's own loss (techniques/chunked_loss.py): backward computes each chunk's logits again."""

    def losses_of_chunk(hidden: Tensor, targets: Tensor) -> Tensor:
        losses = vocabulary.cross_entropy(wide_logits(hidden, weight), targets)
        return torch.where(targets != IGNORE, losses, 0)

    return some_at_a_time(losses_of_chunk, hidden, targets)


def some_at_a_time(function: Callable[..., Tensor], hidden: Tensor, *of_tokens: Tensor) -> Tensor:
    """Return function(hidden, ...), which computes each token by itself, for some tokens at a time.
    Backward runs it again, so that only one chunk's logits are in memory.

    hidden [B, T, D], of_tokens [B, T, ...]; the function is given [n, ...] of each -> [B, T, ...]
    """
    size = tokens_at_a_time(hidden.is_cuda, compiled=False)
    shape = hidden.shape[:-1]
    last = len(shape) - 1
    chunks = [tensor.flatten(0, last).split(size) for tensor in (hidden, *of_tokens)]
    parts = [checkpoint(function, *chunk, use_reentrant=False) for chunk in zip(*chunks)]
    return torch.cat(parts).unflatten(0, shape)


def wide_logits(hidden: Tensor, weight: Tensor) -> Tensor:
    """Return logits in float32 or float64, from which losses are computed."""
    logits = logits_of(hidden, weight)
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def set_loss_of_each_target(model: Llama) -> None:
    """Let forward return the loss of each target, [B, T], which is -log p of it."""
    model.loss = cross_entropies


def log_p_of_targets(model: Llama, batch: Batch, microbatch: int) -> Tensor:
    """Return log p of each target, [B, T], by a model after set_loss_of_each_target. In a pipeline
    only the last stage has it and needs it; the others return 0."""
    parts = batch.microbatches(microbatch)
    losses = []
    for part in parts:
        part.prepare()
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
