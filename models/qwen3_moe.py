"""Qwen3 with experts (Yang et al. 2025, arXiv:2505.09388).

What differs from Llama: Qwen3's attention, and experts like Mixtral's, but many narrow ones.
"""

from dataclasses import dataclass

import model
from models import mixtral, qwen3
from models.family import Family, Published


@dataclass(frozen=True)
class Qwen3MoeConfig(mixtral.MixtralConfig):
    def build(self):
        return Qwen3Moe(self)

    @property
    def normed_dim(self):
        return self.q_dim + self.kv_dim


class Block(mixtral.Block):
    attention_type = qwen3.Attention


class Qwen3Moe(model.Llama):
    block_type = Block


def plan():
    return qwen3.plan() | mixtral.plan()


# All blocks have experts, whose K weights add up to 1.
SUPPORTED = dict(norm_topk_prob=True, decoder_sparse_step=1, mlp_only_layers=[])

QWEN3_30B = Qwen3MoeConfig(  # D, layers, H, KV, F, V, longest sequence, norm_eps, theta
    2048, 48, 32, 4, 768, 151_936, 40_960, 1e-6, 1e6,
    head_dim=128, n_experts=128, top_k=8, balance="none",
)  # fmt: skip

MODEL = Family(
    "qwen3_moe",
    Qwen3MoeConfig,
    presets={"qwen3-30b-a3b": QWEN3_30B},
    small=dict(head_dim=12, n_experts=8, top_k=3, balance="none"),
    plan=plan,
    published=Published(
        logits=(1.943468, -0.576003, 0.918020, 0.937743),
        names={
            **qwen3.NAMES,
            "feed_forward.router": "mlp.gate",
            "feed_forward.experts.w1": "mlp.experts.{}.gate_proj",
            "feed_forward.experts.w2": "mlp.experts.{}.down_proj",
            "feed_forward.experts.w3": "mlp.experts.{}.up_proj",
        },
        fields=dict(
            top_k="num_experts_per_tok", n_experts="num_experts", ffn_dim="moe_intermediate_size"
        ),
        defaults=dict(
            rope_theta=1e4,
            rms_norm_eps=1e-6,
            num_key_value_heads=4,
            num_experts_per_tok=8,
            norm_topk_prob=False,
            decoder_sparse_step=1,
            mlp_only_layers=[],
        ),
        renamed={"num_local_experts": "num_experts"},  # as transformers 5 writes it
        supported=SUPPORTED,
        paired=qwen3.paired,
        read=mixtral.as_published,
        unpublished=mixtral.unpublished,
    ),
)
