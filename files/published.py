"""Tell a changed model.py by the logits of a small model with fixed weights.

A changed activation, norm or mask leaves names and shapes of the weights as they were. So before
an export the logits are compared with LOGITS, which transformers computed from the same weights
(tests/test_export.py computes them again). And a checkpoint keeps those of the code that trained
it: whoever goes on with other code is told."""

import functools
import sys
import zlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from model import KVCache, Llama, LlamaConfig
from plumbing.processes import UserError, print_rank_zero
from plumbing.shards import assign_shard

# All that a real model has matters in this one: grouped queries, the epsilon, and each range of
# Llama 3.1's RoPE. It has four layers, as some models treat every fourth layer differently.
CONFIG = LlamaConfig(32, 4, 4, 2, 40, 64, norm_eps=0.01, rope_theta=1e6, rope_scaling=8.0)
TOKENS = torch.arange(600)[None] ** 2 % 61  # [1, T]; longer than a short sliding window
LOGITS = (-2.065278, -0.008952, -3.993807, -0.007986)  # of vocabulary entries 0 to 3, after TOKENS
QWEN3 = replace(CONFIG, head_dim=12, qk_norm=True)
QWEN3_LOGITS = (0.375690, 1.428518, 0.098595, 1.908493)
CONTEXT = 32_768  # longer than a sliding window
TOLERANCE = 1e-4  # angles in float32 make differences of some 1e-6, real changes 1e-2 or more


@functools.cache
@torch.no_grad()
def small_logits(config: LlamaConfig = CONFIG) -> list[float] | None:
    """Return what model.py computes in place of LOGITS; None where it cannot compute them."""
    try:
        return with_fixed_weights(Llama(config).double())(TOKENS)[0, -1, :4].tolist()
    except Exception:  # whatever a change does: it must not stop a run from being saved
        return None


def equal(logits: Sequence[float] | None, others: Sequence[float] | None) -> bool:
    """Return whether two models have the same logits, as far as rounding allows."""
    if logits is None or others is None:
        return logits is others
    return all(abs(a - b) <= TOLERANCE for a, b in zip(logits, others, strict=True))


def check_computes_llama(qk_norm: bool = False) -> None:
    """Raise UserError if model.py no longer computes the logits of a published Llama, or of a Qwen3
    with `qk_norm`."""
    computed, logits = (QWEN3, QWEN3_LOGITS) if qk_norm else (CONFIG, LOGITS)
    if not equal(small_logits(computed), logits) or not attends_to_everything():
        raise UserError(
            "model.py has been changed and no longer computes a published Llama: other programs "
            "would compute other logits from the exported weights"
        )


@functools.cache
def warn_of_other_code(directory: Path, logits: tuple[float, ...] | None) -> None:
    """Warn, once, if model.py computes other logits than the code that wrote a checkpoint."""
    if not equal(small_logits(), logits):
        print_rank_zero(
            f"warning: model.py computes other logits from the same weights than the code that "
            f"trained {directory}",
            file=sys.stderr,
        )


@torch.enable_grad()
def attends_to_everything() -> bool:
    """Return whether each layer attends to the first of CONTEXT cached tokens: whether logits have
    a gradient there. With a sliding window, which may be longer than TOKENS, they have none."""
    model = with_fixed_weights(Llama(CONFIG).double())
    shape = 1, CONTEXT, CONFIG.n_kv_heads, CONFIG.head_dim
    keys, *values = (torch.zeros(shape).double() for _ in range(1 + CONFIG.n_layers))
    cache, position = KVCache(), torch.tensor([[CONTEXT]])
    cache.add_positions(torch.arange(CONTEXT)[None])
    for layer, v in enumerate(values):
        cache.add(layer, keys, v.requires_grad_())
    logits = model(torch.zeros_like(position), positions=position, cache=cache)
    return all(grad[:, 0].any() for grad in torch.autograd.grad(logits.sum(), values))


@torch.no_grad()
def with_fixed_weights(model: Llama) -> Llama:
    """Set the weights of a model, and let it evaluate: dropout would be random."""
    for name, parameter in model.named_parameters():
        assign_shard(parameter, fixed_weight(name, parameter))
    return model.eval()


def fixed_weight(name: str, like: Tensor) -> Tensor:
    """Return weights in float64 that depend on nothing but the parameter's name and shape, and are
    large enough for attention and activations to be far from linear."""
    phase = zlib.crc32(name.encode()) % 1000
    waves = (torch.arange(like.numel(), dtype=torch.float64) ** 2 + phase).sin().view(like.shape)
    return 1 + waves / 2 if like.ndim == 1 else waves / 2
