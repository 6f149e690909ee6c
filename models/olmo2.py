"""OLMo 2 (OLMo Team 2024, arXiv:2501.00656), whose data and training code are public, too.

What differs from Llama: norms stand after attention and feed-forward, and not before them:
x + norm(attention(x)). Queries and keys are normalized, all heads at once, before they are rotated.
"""

from dataclasses import dataclass

import model
from model import LlamaConfig, RMSNorm
from models.family import Family, Published


@dataclass(frozen=True)
class Olmo2Config(LlamaConfig):
    def build(self):
        return Olmo2(self)

    @property
    def normed_dim(self):
        return self.q_dim + self.kv_dim


class Attention(model.Attention):
    def __init__(self, config: Olmo2Config, layer: int):
        super().__init__(config, layer)
        self.q_norm = RMSNorm(config.q_dim, config.norm_eps)
        self.k_norm = RMSNorm(config.kv_dim, config.norm_eps)

    def queries(self, x):
        return self.heads(self.q_norm(self.wq(x)))

    def keys(self, x):
        return self.heads(self.k_norm(self.wk(x)))


class Block(model.Block):
    attention_type = Attention
    norms_outputs = True

    def forward(self, x, rotation, mask=None, cache=None):
        x = x + self.attention_norm(self.attention(x, rotation, mask, cache))
        return x + self.ffn_norm(self.feed_forward(x))


class Olmo2(model.Llama):
    block_type = Block


def plan():
    from techniques.more_layers import SharedNorm

    norm = SharedNorm()
    return {"layers.*.attention.q_norm": norm, "layers.*.attention.k_norm": norm}


def paired(config):
    return {"q_norm": config.n_heads, "k_norm": config.n_kv_heads}


NAMES = {
    "attention.q_norm": "self_attn.q_norm",
    "attention.k_norm": "self_attn.k_norm",
    "attention_norm": "post_attention_layernorm",
    "ffn_norm": "post_feedforward_layernorm",
}
GGUF_NAMES = {
    "attention.q_norm": "attn_q_norm",
    "attention.k_norm": "attn_k_norm",
    "attention_norm": "post_attention_norm",
    "ffn_norm": "post_ffw_norm",
}

MODEL = Family(
    "olmo2",
    Olmo2Config,
    presets={  # D, layers, H, KV, F, V, longest sequence, norm_eps, theta
        "tiny-olmo2": Olmo2Config(96, 4, 4, 2, 288, 2048, tie_embeddings=True),
        "olmo2-1b": Olmo2Config(2048, 16, 16, 16, 8192, 100_352, 4096, 1e-6, 5e5),
        "olmo2-7b": Olmo2Config(4096, 32, 32, 32, 11_008, 100_352, 4096, 1e-6, 5e5),
    },
    plan=plan,
    published=Published(
        logits=(2.007919, 0.743568, 2.996109, 5.069544),
        names=NAMES,
        defaults=dict(rope_theta=1e4, rms_norm_eps=1e-5),
        paired=paired,
        gguf_rows="hf",
        gguf_names=GGUF_NAMES,
    ),
)
