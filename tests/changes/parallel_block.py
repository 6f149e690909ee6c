"""Llama whose attention and feed-forward read the same x, as in GPT-J and PaLM (Chowdhery et al.
2022, arXiv:2204.02311). One norm is for both."""

import model
from model import LlamaConfig
from models.family import Family


class ParallelBlockConfig(LlamaConfig):
    def build(self):
        return WithParallelBlocks(self)


class Block(model.Block):
    def __init__(self, config: LlamaConfig, layer: int):
        super().__init__(config, layer)
        del self.ffn_norm

    def forward(self, x, rotation, mask=None, cache=None):
        h = self.attention_norm(x)
        return x + self.attention(h, rotation, mask, cache) + self.feed_forward(h)


class WithParallelBlocks(model.Llama):
    block_type = Block


MODEL = Family(
    "parallel_block",
    ParallelBlockConfig,
    {"tiny": ParallelBlockConfig(96, 4, 4, 2, 288, tie_embeddings=True)},
)
