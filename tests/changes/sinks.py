"""Llama with a sink in each head, as in gpt-oss (OpenAI 2025, arXiv:2508.10925): a score without a
key, so that a head that finds nothing need not attend to anything.

Kernels know no such score. But a key of its own makes one: each query has one more feature, the
sink of its head, and the sink's key has a 1 there, where other keys have 0. Its value is 0.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import model
from model import LlamaConfig
from models.family import Family

MORE = 8  # features, of which one is used: kernels need a multiple of 8


class SinkConfig(LlamaConfig):
    def build(self):
        return WithSinks(self)


class Sink(nn.Module):
    initial_value = 0.0

    def __init__(self, heads: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(heads))

    def forward(self):
        return self.weight


class Attention(model.Attention):
    def __init__(self, config: LlamaConfig, layer: int):
        super().__init__(config, layer)
        self.sink = Sink(config.n_heads)

    def attend(self, q, k, v, mask):
        return attend_with_sinks(q, k, v, mask, self.sink())


def attend_with_sinks(q: Tensor, k: Tensor, v: Tensor, mask, sinks: Tensor) -> Tensor:
    """Return what model.attend does, beside the scores `sinks` [H]."""
    if hasattr(mask, "attention"):
        raise ValueError("sinks need a mask: leave out --cp, and on a GPU --document-mask")
    E = q.shape[3]
    of_sink = sinks.type_as(q)[:, None].expand(*q.shape[:3], 1)
    # attend divides scores by the square root of the width, which is E + MORE now.
    q = torch.cat([q / math.sqrt(E), of_sink], 3) * math.sqrt(E + MORE)
    q = F.pad(q, (0, MORE - 1))
    key = torch.zeros_like(F.pad(k[:, :1], (0, MORE)))
    key[..., E] = 1
    k = torch.cat([key, F.pad(k, (0, MORE))], 1)  # the sink is the first key
    v = F.pad(v, (0, MORE, 0, 0, 1, 0))
    if mask is not None:
        allowed = 1 if mask.dtype == torch.bool else 0  # a cache has a mask of 0 and -inf
        mask = F.pad(mask, (1, 0), value=allowed)
        return model.attend(q, k, v, mask)[..., :E]
    # Causal attention needs as many queries as keys: the first sees the sink alone.
    q = F.pad(q, (0, 0, 0, 0, 1, 0))
    return model.attend(q, k, v, None)[:, 1:, :, :E]


class Block(model.Block):
    attention_type = Attention


class WithSinks(model.Llama):
    block_type = Block


def plan():
    from techniques.parallel_layers import OfHeads

    return {"layers.*.attention.sink": OfHeads()}


MODEL = Family(
    "sinks", SinkConfig, {"tiny": SinkConfig(96, 4, 4, 2, 288, tie_embeddings=True)}, plan=plan
)
