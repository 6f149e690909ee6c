"""Llama with a gate on what attention writes: x + sigmoid(G norm(x)) * attention(norm(x))."""

from torch import nn

import model
from model import LlamaConfig
from models.family import Family


class GateConfig(LlamaConfig):
    def build(self):
        return Gated(self)


class Block(model.Block):
    writes_to_stream = ()  # names of its own layers whose output is added to x

    def __init__(self, config: LlamaConfig, layer: int):
        super().__init__(config, layer)
        self.gate = nn.Linear(config.dim, config.dim, bias=False)

    def forward(self, x, rotation, mask=None, cache=None):
        h = self.attention_norm(x)
        x = x + self.gate(h).sigmoid() * self.attention(h, rotation, mask, cache)
        return x + self.feed_forward(self.ffn_norm(x))


class Gated(model.Llama):
    block_type = Block


def plan():
    from techniques.more_layers import OwnTokens

    return {"layers.*.gate": OwnTokens()}


MODEL = Family(
    "gate", GateConfig, {"tiny": GateConfig(96, 4, 4, 2, 288, tie_embeddings=True)}, plan=plan
)
