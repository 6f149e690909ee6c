"""Llama with a learned scale for each feature of what a block adds (Touvron et al. 2021,
arXiv:2103.17239)."""

import torch
from torch import nn

import model
from model import LlamaConfig
from models.family import Family


class LayerScaleConfig(LlamaConfig):
    def build(self):
        return LayerScaled(self)


class Scale(nn.Module):
    initial_value = 0.1

    def __init__(self, dim: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(dim))

    def forward(self, x):
        return x * self.weight


class Block(model.Block):
    def __init__(self, config: LlamaConfig, layer: int):
        super().__init__(config, layer)
        self.attention_scale = Scale(config.dim)
        self.ffn_scale = Scale(config.dim)

    def forward(self, x, rotation, mask=None, cache=None):
        h = self.attention(self.attention_norm(x), rotation, mask, cache)
        x = x + self.attention_scale(h)
        return x + self.ffn_scale(self.feed_forward(self.ffn_norm(x)))


class LayerScaled(model.Llama):
    block_type = Block


def plan():
    from techniques.parallel_layers import NORM  # for what multiplies each token by itself

    return {"layers.*.attention_scale": NORM, "layers.*.ffn_scale": NORM}


MODEL = Family(
    "layer_scale",
    LayerScaleConfig,
    {"tiny": LayerScaleConfig(96, 4, 4, 2, 288, tie_embeddings=True)},
    plan=plan,
)
