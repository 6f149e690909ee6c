"""Tell a changed model.py by the logits of a small model with fixed weights.

A changed activation, norm or mask leaves names and shapes of the weights as they were. So an export
compares the logits with LOGITS, which transformers computed (tests/test_export.py), and a
checkpoint keeps those of the code that trained it: whoever goes on with other code is told."""

import functools
import sys
import zlib
from dataclasses import replace
from pathlib import Path

import torch

from model import Llama, LlamaConfig
from plumbing.messages import UserError, print_rank_zero
from plumbing.shards import assign_shard

# All that a real model has matters in this one: grouped queries, the epsilon, and each range of
# Llama 3.1's RoPE. It has four layers, as some models treat every fourth layer differently.
CONFIG = LlamaConfig(32, 4, 4, 2, 40, 64, norm_eps=0.01, rope_theta=1e6, rope_scaling=8.0)
TOKENS = torch.arange(600)[None] ** 2 % 61  # [1, T]; longer than a short sliding window
LOGITS = (-2.065278, -0.008952, -3.993807, -0.007986)  # of vocabulary entries 0 to 3, after TOKENS
# The published models by the model_type of their config.json: a small one, and its logits.
MODELS = {
    "llama": (CONFIG, LOGITS),
    "qwen2": (replace(CONFIG, qkv_bias=True), (2.107521, 0.376267, -0.146369, 4.298876)),
    "qwen3": (
        replace(CONFIG, head_dim=12, qk_norm=True),
        (0.375690, 1.428518, 0.098595, 1.908493),
    ),
    "mixtral": (
        replace(CONFIG, n_experts=4, balance="none"),
        (0.275464, -1.846293, 3.516261, -0.608938),
    ),
    "qwen3_moe": (
        replace(CONFIG, head_dim=12, qk_norm=True, n_experts=8, top_k=3, balance="none"),
        (1.943468, -0.576003, 0.918020, 0.937743),
    ),
}
# Of models with experts, by model_type: names in files, beside formats.HF_NAMES. {} is the number
# of an expert, each of which has a matrix of its own there.
NAMES = {
    "mixtral": {
        "feed_forward.router": "block_sparse_moe.gate",
        **{f"feed_forward.experts.w{i}": f"block_sparse_moe.experts.{{}}.w{i}" for i in (1, 2, 3)},
    },
    "qwen3_moe": {
        "feed_forward.router": "mlp.gate",
        "feed_forward.experts.w1": "mlp.experts.{}.gate_proj",
        "feed_forward.experts.w2": "mlp.experts.{}.down_proj",
        "feed_forward.experts.w3": "mlp.experts.{}.up_proj",
    },
}
USED = {"top_k": "num_experts_per_tok"}
FIELDS = {  # LlamaConfig's fields -> those of config.json, beside formats.HF_FIELDS
    "mixtral": USED | dict(n_experts="num_local_experts"),
    "qwen3_moe": USED | dict(n_experts="num_experts", ffn_dim="moe_intermediate_size"),
}
RENAMED = {"num_local_experts": "num_experts"}  # as transformers 5 writes Qwen's
# What transformers takes where a config.json lacks a field. Any other field has to be there.
DEFAULTS = {
    "llama": dict(rope_theta=1e4, rms_norm_eps=1e-6),  # and as many key/value heads as query heads
    "qwen2": dict(rope_theta=1e4, rms_norm_eps=1e-6, num_key_value_heads=32),
    "qwen3": dict(rope_theta=1e4, rms_norm_eps=1e-6, num_key_value_heads=32, head_dim=128),
    "mixtral": dict(
        rope_theta=1e6, rms_norm_eps=1e-5, num_key_value_heads=8, num_experts_per_tok=2
    ),
    "qwen3_moe": dict(
        rope_theta=1e4,
        rms_norm_eps=1e-6,
        num_key_value_heads=4,
        num_experts_per_tok=8,
        norm_topk_prob=False,
        decoder_sparse_step=1,
        mlp_only_layers=[],
    ),
}
# The only values that work here: all blocks have experts, whose K weights add up to 1.
SUPPORTED = {
    "mixtral": dict(sliding_window=None),
    "qwen3_moe": dict(norm_topk_prob=True, decoder_sparse_step=1, mlp_only_layers=[]),
}


def model_type(config: LlamaConfig) -> str:
    """Return the model_type of the published models that have such blocks, in any size."""
    wanted = config.qkv_bias, config.qk_norm, config.n_experts > 0
    for name, (small, _) in MODELS.items():
        if (small.qkv_bias, small.qk_norm, small.n_experts > 0) == wanted:
            if config.n_experts and config.balance != small.balance:
                raise UserError("no published model balances experts: train with --balance none")
            return name
    other = "experts" if config.n_experts else "qk_norm"
    raise UserError(f"no published model has qkv_bias and {other}: other programs cannot load it")


@functools.cache
@torch.no_grad()
def small_logits(config: LlamaConfig = CONFIG) -> list[float] | None:
    """Return what model.py computes in place of LOGITS; None where it cannot compute them."""
    try:
        return with_fixed_weights(Llama(config).double())(TOKENS)[0, -1, :4].tolist()
    except Exception:  # whatever a change does: it must not stop a run from being saved
        return None


def computes(logits: tuple | list | None, config: LlamaConfig = CONFIG) -> bool:
    """Return whether model.py computes these logits, or could not either if they are None. Rounding
    is far below 1e-4, and the changes that were tried are 1e-2 or more."""
    if (found := small_logits(config)) is None or logits is None:
        return found is logits
    return len(found) == len(logits) and all(abs(a - b) <= 1e-4 for a, b in zip(found, logits))


@functools.cache
def warn_of_other_code(directory: Path, logits: tuple[float, ...] | None) -> None:
    """Warn, once, if model.py computes other logits than the code that wrote a checkpoint."""
    if not computes(logits):
        told = "computes other logits from the same weights than the code that trained"
        print_rank_zero(f"warning: model.py {told} {directory}", file=sys.stderr)


@torch.no_grad()
def with_fixed_weights(model: Llama) -> Llama:
    """Set weights by name and shape, large enough for nonlinearity, and turn off dropout."""
    for name, parameter in model.named_parameters():
        phase, shape = zlib.crc32(name.encode()) % 1000, parameter.shape
        waves = (torch.arange(shape.numel(), dtype=torch.float64) ** 2 + phase).sin().view(shape)
        assign_shard(parameter, waves / 2 if parameter.ndim > 1 else 1 + waves / 2)
    return model.eval()
