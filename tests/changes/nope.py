"""Llama without RoPE in every second layer (Yang et al. 2025, arXiv:2501.18795), and with a
temperature of its own for each head."""

from dataclasses import dataclass

import torch
from torch import nn

import model
from model import LlamaConfig
from models.family import Family


@dataclass(frozen=True)
class NopeConfig(LlamaConfig):
    rope_every: int = 2  # layers, one of which has RoPE; 1: all have, as in Llama

    def build(self):
        return Nope(self)


class Temperature(nn.Module):
    initial_value = 1.0

    def __init__(self, heads: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(heads))

    def forward(self):
        return self.weight


class Attention(model.Attention):
    def __init__(self, config: NopeConfig, layer: int):
        super().__init__(config, layer)
        self.rotates = layer % config.rope_every == 0
        self.temperature = Temperature(config.n_heads)

    def forward(self, x, rotation, mask=None, cache=None):
        if not self.rotates:
            rotation = rotation.new_tensor([1.0, 0.0])  # cosine and sine of no angle
        return super().forward(x, rotation, mask, cache)

    def attend(self, q, k, v, mask):
        scaled = q * self.temperature()[:, None].type_as(q)
        return super().attend(scaled, k, v, mask)


class Block(model.Block):
    attention_type = Attention


class Nope(model.Llama):
    block_type = Block


def plan():
    from techniques.parallel_layers import OfHeads

    return {"layers.*.attention.temperature": OfHeads()}


MODEL = Family(
    "nope", NopeConfig, {"tiny": NopeConfig(96, 4, 4, 2, 288, tie_embeddings=True)}, plan=plan
)
