"""OLMo 3 (OLMo Team 2025, arXiv:2512.13961).

What differs from Llama: all that differs in OLMo 2, and three of four layers attend to a window.
The others have RoPE scaled by YaRN for long sequences.
"""

from dataclasses import dataclass

import torch

import model
from model import rotation_by
from models import olmo2
from models.family import Family, Published
from models.parts import (
    YARN,
    TwoRopes,
    WindowConfig,
    flatten_rope,
    plain_rotation,
    read_layers,
    write_layers,
    yarn_frequencies,
    yarn_scale,
)
from plumbing.messages import UserError


@dataclass(frozen=True)
class Olmo3Config(WindowConfig):
    def build(self):
        return Olmo3(self)

    @property
    def normed_dim(self):
        return self.q_dim + self.kv_dim


class Attention(TwoRopes, olmo2.Attention):
    pass


class Block(olmo2.Block):
    attention_type = Attention


class Olmo3(model.Llama):
    block_type = Block

    def rotation(self, positions):
        c = self.config
        in_windows = plain_rotation(c, positions, c.rope_theta)
        if c.rope_scaling == 1.0:
            return torch.stack([in_windows, in_windows])
        original = YARN["original_max_position_embeddings"]
        frequencies = yarn_frequencies(
            c.head_dim, c.rope_theta, c.rope_scaling, original, positions.device
        )
        in_others = rotation_by(frequencies, positions)
        scale = yarn_scale(c.rope_scaling)  # sharpens the softmax over the longer context
        return torch.stack([in_windows, in_others * scale])


THETA = 5e5


def prepare(content):
    of_windows = flatten_rope(content)
    of_others = content | (content.get("rope_scaling") or {})
    theta = of_others.get("rope_theta", THETA)
    if of_windows.get("rope_theta", theta) != theta:
        raise UserError(f"{content.path} has a rope_theta of its own for layers with windows")


def read(content):
    if "factor" in content:  # of YaRN
        factor = content.checked("factor", content["factor"], float)
        usual = {"attention_factor": yarn_scale(factor), "mscale": 0, "truncate": True}
        for key, value in usual.items():
            found = content.get(key, value)
            if found != value:
                raise UserError(f"{content.path} has {key} {found}: only {value} works here")
    return read_layers(content, every=4)


def write(config):
    return write_layers(config, YARN, config.rope_theta)


MODEL = Family(
    "olmo3",
    Olmo3Config,
    presets={  # D, layers, H, KV, F, V, longest sequence, norm_eps, theta
        "tiny-olmo3": Olmo3Config(96, 4, 4, 2, 288, 2048, tie_embeddings=True, window=64),
        "olmo3-7b": Olmo3Config(
            4096, 32, 32, 32, 11_008, 100_278, 65_536, 1e-6, 5e5, rope_scaling=8.0
        ),
    },
    small=dict(window=48),
    plan=olmo2.plan,
    published=Published(
        logits=(1.213008, -1.442953, 1.619310, 5.105761),
        names=olmo2.NAMES,
        defaults=dict(
            rope_theta=THETA, rms_norm_eps=1e-5, sliding_window=4096, beta_fast=32, beta_slow=1
        ),
        nulls=dict(sliding_window=None),
        scaling=YARN,
        prepare=prepare,
        read=read,
        write=write,
        paired=olmo2.paired,
    ),
)
