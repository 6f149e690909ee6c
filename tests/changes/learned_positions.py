"""Llama with learned positions in place of RoPE, as in GPT-2 (Radford et al. 2019)."""

from torch import nn

import model
from model import LlamaConfig
from models.family import Family


class LearnedConfig(LlamaConfig):
    def build(self):
        return WithLearnedPositions(self)


class Attention(model.Attention):
    def forward(self, x, rotation, mask=None, cache=None):
        rotation = rotation.new_tensor([1.0, 0.0])  # cosine and sine of no angle
        return super().forward(x, rotation, mask, cache)


class Block(model.Block):
    attention_type = Attention


class WithLearnedPositions(model.Llama):
    block_type = Block

    def __init__(self, config: LlamaConfig):
        super().__init__(config)
        self.positions = nn.Embedding(config.max_seq_len, config.dim)

    def embed(self, tokens, positions):
        return super().embed(tokens, positions) + self.positions(positions)


def plan():
    from parallel import PLAN

    return {"positions": PLAN["tok_embeddings"]}


MODEL = Family(
    "learned_positions",
    LearnedConfig,
    {"tiny": LearnedConfig(96, 4, 4, 2, 288, tie_embeddings=True)},
    plan=plan,
)
