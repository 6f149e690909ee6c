"""Mixtral (Jiang et al. 2024, arXiv:2401.04088).

What differs from Llama: a block has X feed-forwards, the experts, of which a router chooses K for
each token. techniques/experts.py computes them, and says how they are balanced.
"""

from dataclasses import dataclass

import model
from model import LlamaConfig
from models.family import Family, Published
from techniques.mixture import MixtureOfExperts


@dataclass(frozen=True)
class MixtralConfig(LlamaConfig):
    n_experts: int = 8  # X feed-forwards of width F in a block
    top_k: int = 2  # K, how many of them a token uses
    balance: str = "bias"  # what makes tokens use experts equally, or "none", as in Mixtral

    def __post_init__(self):
        super().__post_init__()
        if self.balance not in ("bias", "none"):
            raise ValueError(f"balance {self.balance}: choose bias or none")
        if not 2 <= self.top_k <= self.n_experts:
            raise ValueError(  # a softmax of one score is 1, from which no router would learn
                f"top_k {self.top_k} of n_experts {self.n_experts}: choose 2 to n_experts as top_k"
            )

    def build(self):
        return Mixtral(self)

    @property
    def ffn_uses(self):
        return self.top_k


class Block(model.Block):
    feed_forward_type = MixtureOfExperts


class Mixtral(model.Llama):
    block_type = Block


def plan():
    from techniques.expert_parallel import PLAN

    return PLAN


def as_published(content):
    return {"balance": "none"}


def unpublished(config):
    if config.balance == "none":
        return ""
    return "no published model balances experts: train with --balance none"


MODEL = Family(
    "mixtral",
    MixtralConfig,
    presets={  # D, layers, H, KV, F, V, longest sequence, norm_eps, theta
        "tiny-experts": MixtralConfig(96, 4, 4, 2, 144, 2048, tie_embeddings=True),
        "mixtral-8x7b": MixtralConfig(
            4096, 32, 32, 8, 14_336, 32_000, 32_768, 1e-5, 1e6, balance="none"
        ),
    },
    small=dict(n_experts=4, balance="none"),
    plan=plan,
    published=Published(
        logits=(0.275464, -1.846293, 3.516261, -0.608938),
        names={
            "feed_forward.router": "block_sparse_moe.gate",
            "feed_forward.experts.w1": "block_sparse_moe.experts.{}.w1",
            "feed_forward.experts.w2": "block_sparse_moe.experts.{}.w2",
            "feed_forward.experts.w3": "block_sparse_moe.experts.{}.w3",
        },
        fields=dict(top_k="num_experts_per_tok", n_experts="num_local_experts"),
        defaults=dict(
            rope_theta=1e6, rms_norm_eps=1e-5, num_key_value_heads=8, num_experts_per_tok=2
        ),
        supported=dict(sliding_window=None),
        read=as_published,
        unpublished=unpublished,
    ),
)
