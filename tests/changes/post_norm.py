"""Llama with norms of the residual stream itself, after each sum, as in the first Transformer
(Vaswani et al. 2017, arXiv:1706.03762)."""

import model
from model import LlamaConfig
from models.family import Family


class PostNormConfig(LlamaConfig):
    def build(self):
        return PostNorm(self)


class Block(model.Block):
    def forward(self, x, rotation, mask=None, cache=None):
        x = self.attention_norm(x + self.attention(x, rotation, mask, cache))
        return self.ffn_norm(x + self.feed_forward(x))


class PostNorm(model.Llama):
    block_type = Block


MODEL = Family(
    "post_norm", PostNormConfig, {"tiny": PostNormConfig(96, 4, 4, 2, 288, tie_embeddings=True)}
)
