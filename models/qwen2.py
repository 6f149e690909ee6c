"""Qwen2 (Yang et al. 2024, arXiv:2407.10671), and Qwen2.5.

What differs from Llama: wq, wk and wv have a bias.
"""

from dataclasses import dataclass

from torch import nn

import model
from model import LlamaConfig
from models.family import Family, Published


@dataclass(frozen=True)
class Qwen2Config(LlamaConfig):
    def build(self):
        return Qwen2(self)


class Attention(model.Attention):
    def __init__(self, config: Qwen2Config, layer: int):
        super().__init__(config, layer)
        self.wq = nn.Linear(config.dim, config.q_dim)
        self.wk = nn.Linear(config.dim, config.kv_dim)
        self.wv = nn.Linear(config.dim, config.kv_dim)


class Block(model.Block):
    attention_type = Attention


class Qwen2(model.Llama):
    block_type = Block


PRESETS = {  # D, layers, H, KV, F, V, longest sequence, norm_eps, theta
    "qwen2.5-0.5b": Qwen2Config(
        896, 24, 14, 2, 4864, 151_936, 32_768, 1e-6, 1e6, tie_embeddings=True
    ),
    "qwen2.5-7b": Qwen2Config(3584, 28, 28, 4, 18_944, 152_064, 131_072, 1e-6, 1e6),
}

MODEL = Family(
    "qwen2",
    Qwen2Config,
    PRESETS,
    published=Published(
        logits=(2.107521, 0.376267, -0.146369, 4.298876),
        defaults=dict(rope_theta=1e4, rms_norm_eps=1e-6, num_key_value_heads=32),
        absent=("attention_bias",),  # there always are biases
        gguf_rows="hf",
    ),
)
