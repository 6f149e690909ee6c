"""Llama whose scores are capped before the softmax, as in Gemma 2 (Gemma Team 2024,
arXiv:2408.00118). No kernel of PyTorch has a cap, so scores are written out, T x T of them."""

import math

import torch
from torch import Tensor

import model
from model import LlamaConfig
from models.family import Family

CAP = 5.0


class SoftCapConfig(LlamaConfig):
    def build(self):
        return SoftCapped(self)


class Attention(model.Attention):
    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask):
        if hasattr(mask, "attention"):
            raise ValueError("capped scores need a mask: leave out --cp, or --document-mask")
        group = q.shape[2] // k.shape[2]
        k, v = (x.repeat_interleave(group, 2) for x in (k, v))
        scores = torch.einsum("bthe,bshe->bhts", q, k) / math.sqrt(q.shape[-1])
        scores = CAP * torch.tanh(scores / CAP)
        if mask is None:
            T = q.shape[1]
            mask = torch.ones(T, T, dtype=torch.bool, device=q.device).tril()
        if mask.dtype != torch.bool:  # a cache has one of 0 and -inf
            mask = mask == 0
        shares = scores.masked_fill(~mask, -torch.inf).softmax(-1)
        return torch.einsum("bhts,bshe->bthe", shares, v)


class Block(model.Block):
    attention_type = Attention


class SoftCapped(model.Llama):
    block_type = Block


MODEL = Family(
    "soft_cap", SoftCapConfig, {"tiny": SoftCapConfig(96, 4, 4, 2, 288, tie_embeddings=True)}
)
