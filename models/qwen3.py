"""Qwen3, dense (Yang et al. 2025, arXiv:2505.09388).

What differs from Llama: queries and keys are normalized, head by head, before they are rotated
(Henry et al. 2020, arXiv:2010.04245). Published ones have heads 128 wide, whatever their own width.
"""

from dataclasses import dataclass

import model
from model import LlamaConfig, RMSNorm
from models.family import Family, Published


@dataclass(frozen=True)
class Qwen3Config(LlamaConfig):
    def build(self):
        return Qwen3(self)

    @property
    def normed_dim(self):
        return self.q_dim + self.kv_dim


class Attention(model.Attention):
    def __init__(self, config: Qwen3Config, layer: int):
        super().__init__(config, layer)
        self.q_norm = RMSNorm(config.head_dim, config.norm_eps)
        self.k_norm = RMSNorm(config.head_dim, config.norm_eps)

    def queries(self, x):
        return self.q_norm(super().queries(x))

    def keys(self, x):
        return self.k_norm(super().keys(x))


class Block(model.Block):
    attention_type = Attention


class Qwen3(model.Llama):
    block_type = Block


def plan():
    from techniques.parallel_layers import HEAD_NORM

    return {"layers.*.attention.q_norm": HEAD_NORM, "layers.*.attention.k_norm": HEAD_NORM}


def paired(config):
    return {"q_norm": 1, "k_norm": 1}  # all heads share them


NAMES = {"attention.q_norm": "self_attn.q_norm", "attention.k_norm": "self_attn.k_norm"}

PRESETS = {  # D, layers, H, KV, F, V, longest sequence, norm_eps, theta
    "tiny-qwen3": Qwen3Config(96, 4, 4, 2, 288, 2048, tie_embeddings=True),
    "qwen3-0.6b": Qwen3Config(
        1024, 28, 16, 8, 3072, 151_936, 40_960, 1e-6, 1e6, tie_embeddings=True, head_dim=128
    ),
    "qwen3-8b": Qwen3Config(4096, 36, 32, 8, 12_288, 151_936, 40_960, 1e-6, 1e6, head_dim=128),
}

MODEL = Family(
    "qwen3",
    Qwen3Config,
    PRESETS,
    small=dict(head_dim=12),
    plan=plan,
    published=Published(
        logits=(0.375690, 1.428518, 0.098595, 1.908493),
        names=NAMES,
        defaults=dict(rope_theta=1e4, rms_norm_eps=1e-6, num_key_value_heads=32, head_dim=128),
        paired=paired,
        gguf_rows="hf",
        gguf_names={"attention.q_norm": "attn_q_norm", "attention.k_norm": "attn_k_norm"},
    ),
)
