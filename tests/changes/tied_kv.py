"""Llama whose values are its keys, before these are rotated: a block has no wv."""

import model
from model import LlamaConfig
from models.family import Family


class TiedKVConfig(LlamaConfig):
    def build(self):
        return TiedKV(self)


class Attention(model.Attention):
    def __init__(self, config: LlamaConfig, layer: int):
        super().__init__(config, layer)
        del self.wv

    def values(self, x):
        return self.keys(x)


class Block(model.Block):
    attention_type = Attention


class TiedKV(model.Llama):
    block_type = Block


MODEL = Family(
    "tied_kv",
    TiedKVConfig,
    {"tiny": TiedKVConfig(96, 4, 4, 2, 288, tie_embeddings=True)},
)
