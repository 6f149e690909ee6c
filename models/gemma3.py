"""Gemma 3, text alone (Gemma Team 2025, arXiv:2503.19786).

What differs from Llama: nearly all parts of a block, and the embedding.

    norms         multiply by 1 + weight, and two more stand after attention and feed-forward
    attention     queries and keys are normalized, head by head; scores are divided by
                  sqrt(score_dim), whatever the width of heads
    windows       five of six layers attend to a window, and have a theta of their own; RoPE of the
                  others may be slowed down, all pairs alike
    feed-forward  GeGLU, with gelu by tanh, in place of SwiGLU
    embedding     is multiplied by sqrt(D), and is the output matrix, too
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F

import model
from model import rms_norm
from models.family import Family, Published
from models.parts import (
    TwoRopes,
    WindowConfig,
    flatten_rope,
    plain_rotation,
    read_layers,
    write_layers,
)

WINDOW_THETA = 1e4


@dataclass(frozen=True)
class Gemma3Config(WindowConfig):
    tie_embeddings: bool = True
    rope_theta: float = 1e6
    window: int = 512
    full_every: int = 6
    score_dim: int = 256

    def build(self):
        return Gemma3(self)

    @property
    def normed_dim(self):
        return self.q_dim + self.kv_dim + 2 * self.dim


class RMSNorm(model.RMSNorm):
    initial_value = 0.0

    def forward(self, x):
        return rms_norm(x, 1 + self.weight, self.eps)


class Attention(TwoRopes):
    def __init__(self, config: Gemma3Config, layer: int):
        super().__init__(config, layer)
        self.q_norm = RMSNorm(config.head_dim, config.norm_eps)
        self.k_norm = RMSNorm(config.head_dim, config.norm_eps)
        self.scale = math.sqrt(config.head_dim / config.score_dim)  # attend divides by sqrt(E)

    def queries(self, x):
        return self.q_norm(super().queries(x)) * self.scale

    def keys(self, x):
        return self.k_norm(super().keys(x))


def geglu(gate, up):
    return F.gelu(gate, approximate="tanh") * up


class FeedForward(model.FeedForward):
    def forward(self, x):
        return self.w2(geglu(self.w1(x), self.w3(x)))


class Block(model.Block):
    attention_type, feed_forward_type = Attention, FeedForward
    norms_outputs = True

    def __init__(self, config: Gemma3Config, layer: int):
        super().__init__(config, layer)
        self.attention_norm = RMSNorm(config.dim, config.norm_eps)  # in place of Llama's
        self.attention_out_norm = RMSNorm(config.dim, config.norm_eps)
        self.ffn_norm = RMSNorm(config.dim, config.norm_eps)
        self.ffn_out_norm = RMSNorm(config.dim, config.norm_eps)

    def forward(self, x, rotation, mask=None, cache=None):
        attended = self.attention(self.attention_norm(x), rotation, mask, cache)
        x = x + self.attention_out_norm(attended)
        return x + self.ffn_out_norm(self.feed_forward(self.ffn_norm(x)))


class Gemma3(model.Llama):
    block_type = Block

    def __init__(self, config: Gemma3Config):
        super().__init__(config)
        self.norm = RMSNorm(config.dim, config.norm_eps)

    def embed(self, tokens, positions):
        x = super().embed(tokens, positions)
        scale = torch.tensor(self.config.dim**0.5, dtype=x.dtype, device="cpu")
        return x * scale.item()  # rounded to x's dtype, as it was where the model was trained

    def rotation(self, positions):
        c = self.config
        in_others = plain_rotation(c, positions / c.rope_scaling, c.rope_theta)
        in_windows = plain_rotation(c, positions, WINDOW_THETA)
        return torch.stack([in_windows, in_others])


def plan():
    from techniques.parallel_layers import HEAD_NORM, NORM

    return {
        "layers.*.attention.q_norm": HEAD_NORM,
        "layers.*.attention.k_norm": HEAD_NORM,
        "layers.*.attention_out_norm": NORM,
        "layers.*.ffn_out_norm": NORM,
    }


def paired(config):
    return {"q_norm": 1, "k_norm": 1}  # all heads share them


def prepare(content):
    of_windows = flatten_rope(content)
    if "rope_theta" in of_windows:
        content["rope_local_base_freq"] = of_windows["rope_theta"]
    content.pop("hidden_act", None)  # Gemma's is hidden_activation


def read(content):
    return read_layers(content, content["sliding_window_pattern"])


def write(config):
    return write_layers(config, LINEAR, WINDOW_THETA) | {"architectures": ["Gemma3ForCausalLM"]}


LINEAR = dict(rope_type="linear")
# Others that are called Gemma 3, as EmbeddingGemma, have other values.
SUPPORTED = dict(
    hidden_activation="gelu_pytorch_tanh",
    rope_local_base_freq=WINDOW_THETA,
    use_bidirectional_attention=False,
    attn_logit_softcapping=None,
    final_logit_softcapping=None,
)


def gemma3(dim, n_layers, n_heads, n_kv_heads, ffn_dim, max_seq_len, **rest) -> Gemma3Config:
    """Return the configuration of a published Gemma 3."""
    shared = dict(vocab_size=262_144, norm_eps=1e-6, head_dim=256)
    sizes = dim, n_layers, n_heads, n_kv_heads, ffn_dim
    return Gemma3Config(*sizes, max_seq_len=max_seq_len, **(shared | rest))


MODEL = Family(
    "gemma3_text",
    Gemma3Config,
    presets={  # D, layers, H, KV, F; the published ones: longest sequence
        "tiny-gemma3": Gemma3Config(
            96, 4, 4, 2, 288, vocab_size=2048, window=64, full_every=4, score_dim=24
        ),
        "gemma3-270m": gemma3(640, 18, 4, 1, 2048, 32_768),
        "gemma3-1b": gemma3(1152, 26, 4, 1, 6912, 32_768),
        "gemma3-4b": gemma3(
            2560, 34, 8, 4, 10_240, 131_072, vocab_size=262_208, window=1024, rope_scaling=8.0
        ),
    },
    small=dict(n_layers=6, head_dim=12, window=48, score_dim=20),
    plan=plan,
    published=Published(
        logits=(8.640294, -2.416750, 4.486516, -2.950612),
        names={
            "attention.q_norm": "self_attn.q_norm",
            "attention.k_norm": "self_attn.k_norm",
            "attention_out_norm": "post_attention_layernorm",
            "ffn_norm": "pre_feedforward_layernorm",
            "ffn_out_norm": "post_feedforward_layernorm",
        },
        fields=dict(score_dim="query_pre_attn_scalar"),
        defaults=dict(
            SUPPORTED,
            rope_theta=1e6,
            rms_norm_eps=1e-6,
            num_key_value_heads=4,
            head_dim=256,
            tie_word_embeddings=True,
            query_pre_attn_scalar=256,
            sliding_window=4096,
            sliding_window_pattern=6,
        ),
        supported=SUPPORTED,
        absent=("hidden_act", "mlp_bias", "use_sliding_window"),
        nulls=dict(sliding_window=None),
        scaling=LINEAR,
        prepare=prepare,
        read=read,
        write=write,
        paired=paired,
    ),
)
