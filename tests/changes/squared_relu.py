"""Llama with a squared ReLU, which needs no third matrix (So et al. 2021, arXiv:2109.08668)."""

import torch.nn.functional as F
from torch import nn

import model
from model import LlamaConfig
from models.family import Family


class SquaredReluConfig(LlamaConfig):
    def build(self):
        return SquaredRelu(self)


class FeedForward(nn.Module):
    writes_to_stream = ("w2",)
    saved_products = ("w1",)

    def __init__(self, config: LlamaConfig):
        super().__init__()
        self.w1 = nn.Linear(config.dim, config.ffn_dim, bias=False)
        self.w2 = nn.Linear(config.ffn_dim, config.dim, bias=False)

    def forward(self, x):
        return self.w2(F.relu(self.w1(x)).square())


class Block(model.Block):
    feed_forward_type = FeedForward


class SquaredRelu(model.Llama):
    block_type = Block


MODEL = Family(
    "squared_relu",
    SquaredReluConfig,
    {"tiny": SquaredReluConfig(96, 4, 4, 2, 432, tie_embeddings=True)},
)
