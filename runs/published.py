"""Check that model.py, as it may have been changed, computes a published Llama.

A changed activation, norm or mask leaves names and shapes of the weights as they were. So before
an export a small model with fixed weights is run, and its logits are compared with LOGITS, which
transformers computed from the same weights (tests/test_export.py computes them again)."""

import torch

from model import KVCache, Llama, LlamaConfig
from plumbing.processes import UserError
from runs.check_model import with_fixed_weights

# All that a real model has matters in this one: grouped queries, the epsilon, and each range of
# Llama 3.1's RoPE. It has four layers, as some models treat every fourth layer differently.
CONFIG = LlamaConfig(32, 4, 4, 2, 40, 64, norm_eps=0.01, rope_theta=1e6, rope_scaling=8.0)
TOKENS = torch.arange(600)[None] ** 2 % 61  # [1, T]; longer than a short sliding window
LOGITS = (-2.065278, -0.008952, -3.993807, -0.007986)  # of vocabulary entries 0 to 3, after TOKENS
CONTEXT = 32_768  # longer than a sliding window
TOLERANCE = 1e-4  # angles in float32 make differences of some 1e-6, real changes 1e-2 or more


@torch.no_grad()
def check_computes_llama() -> None:
    """Raise UserError if model.py no longer computes the logits of a published Llama."""
    model = with_fixed_weights(Llama(CONFIG).double())
    logits = model(TOKENS)[0, -1, :4]
    same = torch.allclose(logits, torch.tensor(LOGITS).double(), rtol=0, atol=TOLERANCE)
    if not same or not attends_to_everything(model):
        raise UserError(
            "model.py has been changed and no longer computes a published Llama: other programs "
            "would compute other logits from the exported weights"
        )


@torch.enable_grad()
def attends_to_everything(model: Llama) -> bool:
    """Return whether each layer attends to the first of CONTEXT cached tokens: whether logits have
    a gradient there. With a sliding window, which may be longer than TOKENS, they have none."""
    shape = 1, CONTEXT, CONFIG.n_kv_heads, CONFIG.head_dim
    keys, *values = (torch.zeros(shape).double() for _ in range(1 + CONFIG.n_layers))
    cache, position = KVCache(), torch.tensor([[CONTEXT]])
    cache.add_positions(torch.arange(CONTEXT)[None])
    for layer, v in enumerate(values):
        cache.add(layer, keys, v.requires_grad_())
    logits = model(torch.zeros_like(position), positions=position, cache=cache)
    return all(grad[:, 0].any() for grad in torch.autograd.grad(logits.sum(), values))
