"""Llama with GeGLU in place of SwiGLU (Shazeer 2020, arXiv:2002.05202)."""

import torch.nn.functional as F

import model
from model import LlamaConfig
from models.family import Family


class GegluConfig(LlamaConfig):
    def build(self):
        return Geglu(self)


class FeedForward(model.FeedForward):
    def forward(self, x):
        return self.w2(F.gelu(self.w1(x)) * self.w3(x))


class Block(model.Block):
    feed_forward_type = FeedForward


class Geglu(model.Llama):
    block_type = Block


MODEL = Family("geglu", GegluConfig, {"tiny": GegluConfig(96, 4, 4, 2, 288, tie_embeddings=True)})
