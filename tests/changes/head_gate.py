"""Llama with a gate on what each head has attended to (Qiu et al. 2025, arXiv:2505.06708)."""

from torch import nn

import model
from model import LlamaConfig, rotate
from models.family import Family


class HeadGateConfig(LlamaConfig):
    def build(self):
        return HeadGated(self)


class Attention(model.Attention):
    def __init__(self, config: LlamaConfig, layer: int):
        super().__init__(config, layer)
        self.gate = nn.Linear(config.dim, config.q_dim, bias=False)

    def forward(self, x, rotation, mask=None, cache=None):
        q = rotate(self.queries(x), rotation)
        k = rotate(self.keys(x), rotation)
        v = self.values(x)
        if cache is not None:
            k, v = cache.add(k, v)
        attended = self.attend(q, k, v, mask).flatten(2)
        return self.wo(self.gate(x).sigmoid() * attended)


class Block(model.Block):
    attention_type = Attention


class HeadGated(model.Llama):
    block_type = Block


def plan():
    from techniques.parallel_layers import COLUMNS

    return {"layers.*.attention.gate": COLUMNS}  # as wq: a rank has the gates of its heads


MODEL = Family(
    "head_gate",
    HeadGateConfig,
    {"tiny": HeadGateConfig(96, 4, 4, 2, 288, tie_embeddings=True)},
    plan=plan,
)
