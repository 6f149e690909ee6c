"""Llama with a sliding window in every second layer, as in Gemma 2 (Gemma Team 2024,
arXiv:2408.00118)."""

import model
from models.family import Family
from models.parts import WindowAttention, WindowConfig


class WindowedConfig(WindowConfig):
    def build(self):
        return Windowed(self)


class Block(model.Block):
    attention_type = WindowAttention


class Windowed(model.Llama):
    block_type = Block


TINY = WindowedConfig(96, 4, 4, 2, 288, tie_embeddings=True, window=64, full_every=2)
MODEL = Family("windowed", WindowedConfig, {"tiny": TINY})
