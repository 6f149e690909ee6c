"""Llama without RoPE in every fourth layer, as in Llama 4 (Meta 2025)."""

import model
from model import LlamaConfig
from models.family import Family


class NopeFourthConfig(LlamaConfig):
    def build(self):
        return NopeFourth(self)


class Attention(model.Attention):
    def __init__(self, config: LlamaConfig, layer: int):
        super().__init__(config, layer)
        self.rotates = (layer + 1) % 4 != 0

    def forward(self, x, rotation, mask=None, cache=None):
        if not self.rotates:
            rotation = rotation.new_tensor([1.0, 0.0])  # cosine and sine of no angle
        return super().forward(x, rotation, mask, cache)


class Block(model.Block):
    attention_type = Attention


class NopeFourth(model.Llama):
    block_type = Block


MODEL = Family(
    "nope_fourth",
    NopeFourthConfig,
    {"tiny": NopeFourthConfig(96, 4, 4, 2, 288, tie_embeddings=True)},
)
