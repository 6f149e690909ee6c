"""Llama with ALiBi in place of RoPE (Press et al. 2022, arXiv:2108.12409): each head subtracts from
a score the distance of the key times a slope of its own. A softmax does not change if all scores of
a query do: so the number of the key times the slope is added."""

import torch

import model
from model import LlamaConfig
from models.family import Family


class AlibiConfig(LlamaConfig):
    def build(self):
        return Alibi(self)


class Attention(model.Attention):
    def forward(self, x, rotation, mask=None, cache=None):
        rotation = rotation.new_tensor([1.0, 0.0])  # cosine and sine of no angle
        return super().forward(x, rotation, mask, cache)

    def attend(self, q, k, v, mask):
        T, S, H = q.shape[1], k.shape[1], q.shape[2]
        slopes = 2.0 ** (-8 * torch.arange(1, H + 1, device=q.device) / H)
        bias = slopes[:, None, None] * torch.arange(S, device=q.device)  # [H, 1, S]
        if mask is None:
            mask = torch.ones(T, S, dtype=torch.bool, device=q.device).tril()
        if mask.dtype == torch.bool:
            mask = torch.zeros_like(mask, dtype=q.dtype).masked_fill(~mask, -torch.inf)
        return super().attend(q, k, v, mask + bias.type_as(q))


class Block(model.Block):
    attention_type = Attention


class Alibi(model.Llama):
    block_type = Block


MODEL = Family("alibi", AlibiConfig, {"tiny": AlibiConfig(96, 4, 4, 2, 288, tie_embeddings=True)})
