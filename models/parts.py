"""What several models have, and Llama has not: layers with a window among others, and YaRN for
sequences that are longer than those of the first training."""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

import model
from model import LlamaConfig, rope_frequencies, rotation_by
from plumbing.messages import UserError
from techniques.windows import attend_within


@dataclass(frozen=True)
class WindowConfig(LlamaConfig):
    """A layer attends to a window (techniques/windows.py), every full_every-th to everything."""

    window: int = 4096  # tokens
    full_every: int = 4  # layers

    def __post_init__(self):
        super().__post_init__()
        if min(self.window, self.full_every) < 1:
            raise ValueError(
                f"window {self.window}, full_every {self.full_every}: choose 1 or more for each"
            )

    @property
    def windows(self):
        of_layers = []
        for layer in range(self.n_layers):
            is_full = (layer + 1) % self.full_every == 0
            of_layers.append(0 if is_full else self.window)
        return tuple(of_layers)


class WindowAttention(model.Attention):
    """Attention in the window of its layer."""

    def __init__(self, config: WindowConfig, layer: int):
        super().__init__(config, layer)
        self.window = config.windows[layer]

    def attend(self, q, k, v, mask):
        if self.window:
            return attend_within(q, k, v, mask, self.window)
        return super().attend(q, k, v, mask)


class TwoRopes(WindowAttention):
    """Layers with a window and without have RoPEs of their own: rotation [2, B, T, 1, E/2, 2]."""

    def forward(self, x, rotation, mask=None, cache=None):
        kind = 0 if self.window else 1
        return super().forward(x, rotation[kind], mask, cache)


# ------------------------------------------------------------------------------------------- YaRN

# A pair of features that makes FAST turns or more within the sequences of the first training keeps
# its speed; one that makes fewer than SLOW is slowed down by all of the factor.
FAST, SLOW = 32, 1
YARN = dict(rope_type="yarn", original_max_position_embeddings=8192, beta_fast=FAST, beta_slow=SLOW)


def yarn_frequencies(width: int, theta: float, factor: float, original: int, device) -> Tensor:
    """Return the radians per token of each pair of `width` rotated features, [width/2] float32,
    after training with sequences of `original` tokens. Between FAST and SLOW, YaRN (Peng et al.
    2023, arXiv:2309.00071) mixes both speeds by the number of the pair; Llama 3.1 does so by its
    turns."""
    exponents = torch.arange(0, width, 2, device=device, dtype=torch.float32) / width
    wavelengths = theta**exponents  # tokens / (2 pi)
    if factor == 1.0:
        return 1.0 / wavelengths

    def pair_that_turns(times: int) -> float:
        return width / 2 * math.log(original / (times * 2 * math.pi)) / math.log(theta)

    first = max(math.floor(pair_that_turns(FAST)), 0)
    # There are but width / 2 pairs; YaRN's authors clip at width - 1.
    last = min(math.ceil(pair_that_turns(SLOW)), width - 1)
    pairs = torch.arange(len(wavelengths), device=device, dtype=torch.float32)
    slow_share = ((pairs - first) / max(last - first, 0.001)).clamp(0, 1)
    return slow_share / (factor * wavelengths) + (1 - slow_share) / wavelengths


def yarn_scale(factor: float) -> float:
    """Return by what YaRN multiplies queries and keys."""
    return 0.1 * math.log(factor) + 1


def plain_rotation(config: LlamaConfig, positions: Tensor, theta: float) -> Tensor:
    """Return the rotation of RoPE with this theta, without scaling."""
    plain = replace(config, rope_theta=theta, rope_scaling=1.0)
    return rotation_by(rope_frequencies(plain, positions.device), positions)


# -------------------------------------------------------------------- config.json of such models

WINDOWED, FULL = "sliding_attention", "full_attention"


def flatten_rope(content) -> dict:
    """Return the RoPE of layers with a window, if a config.json has one for each kind of layers, as
    transformers 5 writes it; move that of the others to rope_scaling, where transformers 4 has it.
    A rope_scaling that was added by hand replaces parts of it."""
    rope = content.get("rope_parameters") or {}
    if not isinstance(rope, dict) or not rope.keys() & {WINDOWED, FULL}:
        return {}
    of_full = rope.get(FULL) or {}
    of_windows = rope.get(WINDOWED) or {}
    by_hand = content.get("rope_scaling") or {}
    if not all(isinstance(fields, dict) for fields in (of_full, of_windows, by_hand)):
        raise UserError(f"{content.path} is damaged: its RoPE is {rope}")
    content["rope_scaling"] = of_full | by_hand
    if of_windows.get("rope_type", "default") != "default":
        raise UserError(f"{content.path} scales RoPE in windows: only that of other layers is here")
    return of_windows


def read_layers(content, every: int) -> dict:
    """Return which layers have a window, of a config.json; `every` is for one without layer_types.

    Raises UserError for another order of layers."""
    if "layer_types" in content:
        kinds = content.checked("layer_types", content["layer_types"], list)
        n = content.checked("num_hidden_layers", content["num_hidden_layers"], int, 2**10)
        every = kinds.index(FULL) + 1 if FULL in kinds else n + 1
        if kinds != layer_types(n, every):
            raise UserError(
                f"{content.path} has layer_types {kinds}: only one full layer in so many works here"
            )
    return {"window": content["sliding_window"], "full_every": every}


def layer_types(n: int, every: int) -> list[str]:
    return [FULL if (layer + 1) % every == 0 else WINDOWED for layer in range(n)]


def write_layers(config: WindowConfig, scaling: dict, theta: float) -> dict:
    """Return the fields of a config.json for layers with windows: RoPE as transformers 5 has it,
    with `scaling` in full layers and `theta` in others. save_hf adds what transformers 4 reads."""
    of_full = {"rope_type": "default"}
    if config.rope_scaling != 1.0:
        of_full = scaling | {"factor": config.rope_scaling}
    return {
        "layer_types": layer_types(config.n_layers, config.full_every),
        "sliding_window": config.window,
        "rope_parameters": {
            FULL: of_full | {"rope_theta": config.rope_theta},
            WINDOWED: {"rope_type": "default", "rope_theta": theta},
        },
    }
