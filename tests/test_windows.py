"""techniques/windows.py against a mask of T x T scores; and models/parts.py, which reads what a
config.json says of layers with windows, as published and as transformers 4 and 5 write it."""

import pytest
import torch
from conftest import hf_config_of, line_of_refusal, same_with_gradients
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from model import attend, document_mask
from models.family import find_preset
from models.gemma3 import Gemma3Config
from models.olmo3 import Olmo3Config
from techniques.windows import attend_within

WINDOWS = 1, 2, 3, 4, 8, 50
# Queries, and the keys before them: those of a cache, or of another chunk under --cp.
LENGTHS = [(1, 0), (1, 8), (5, 0), (3, 7), (13, 0), (13, 2), (13, 17), (24, 0), (40, 1)]


def mask_of(kind: str, T: int, S: int) -> torch.Tensor | None:
    """Return a mask of two rows with two documents each, as model.py or as --cp makes it."""
    if kind == "none":
        return None
    rows = []
    for first in (3, S // 2):
        row = torch.cat([torch.arange(first), torch.arange(S)])
        rows.append(row[:S])
    slots = torch.arange(S - T, S)
    visible = document_mask(torch.stack(rows)[:, slots], slots, S)
    if kind == "bool":
        return visible
    return torch.zeros_like(visible, dtype=torch.float64).masked_fill(~visible, -torch.inf)


@pytest.mark.parametrize("kind", ["none", "bool", "float"])
@pytest.mark.parametrize("T, earlier", LENGTHS)
def test_folded_windows_equal_a_mask(T, earlier, kind):
    """Outputs and gradients. Without a mask, queries are those of all keys."""
    if kind == "none":
        earlier = 0
    S = T + earlier
    torch.manual_seed(0)
    sizes = (2, T, 4, 6), (2, S, 2, 6), (2, S, 2, 6)
    inputs = [torch.randn(*size, dtype=torch.float64, requires_grad=True) for size in sizes]
    distance = torch.arange(earlier, S)[:, None] - torch.arange(S)
    for window in WINDOWS:
        visible = (distance >= 0) & (distance < window)
        mask = mask_of(kind, T, S)
        whole = torch.zeros(T, S, dtype=torch.float64).masked_fill(~visible, -torch.inf)
        if kind == "bool":
            whole = visible & mask
        elif kind == "float":
            whole = whole + mask
        found = attend_within(*inputs, mask, window)
        same_with_gradients(found, attend(*inputs, whole), inputs)


class Sizes(TorchDispatchMode):
    """Keeps the number of elements of the largest tensor that an operator returns."""

    largest = 0

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        result = operator(*args, **kwargs or {})
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self.largest = max(self.largest, leaf.numel())
        return result


def test_a_long_sequence_has_no_scores_of_all_pairs():
    """The largest tensor that attention makes is far smaller than T x T."""
    T, window = 1024, 16
    q = torch.randn(1, T, 2, 8, requires_grad=True)
    with Sizes() as made:
        attend_within(q, q, q, None, window).sum().backward()
    assert 0 < made.largest <= 2 * T * 2 * window < T * T / 10


# ------------------------------------------------------------------------------- config.json

OLMO3_7B = dict(
    model_type="olmo3", attention_bias=False, hidden_act="silu", hidden_size=4096,
    intermediate_size=11008, max_position_embeddings=65536, num_attention_heads=32,
    num_hidden_layers=32, num_key_value_heads=32, rms_norm_eps=1e-06, rope_theta=500000,
    rope_scaling=dict(attention_factor=1.2079441541679836, beta_fast=32, beta_slow=1, factor=8.0,
                      original_max_position_embeddings=8192, rope_type="yarn"),
    layer_types=(["sliding_attention"] * 3 + ["full_attention"]) * 8,
    sliding_window=4096, tie_word_embeddings=False, vocab_size=100278,
)  # fmt: skip
GEMMA3_1B = dict(
    model_type="gemma3_text", attention_bias=False, attn_logit_softcapping=None,
    final_logit_softcapping=None, head_dim=256, hidden_activation="gelu_pytorch_tanh",
    hidden_size=1152, intermediate_size=6912, max_position_embeddings=32768,
    num_attention_heads=4, num_hidden_layers=26, num_key_value_heads=1,
    query_pre_attn_scalar=256, rms_norm_eps=1e-06, rope_local_base_freq=10000,
    rope_scaling=None, rope_theta=1000000, sliding_window=512, sliding_window_pattern=6,
    vocab_size=262144,
)  # fmt: skip
KINDS = ["sliding_attention"] * 5 + ["full_attention"]
GEMMA3_270M = GEMMA3_1B | dict(
    _sliding_window_pattern=6, hidden_size=640, intermediate_size=2048, num_hidden_layers=18,
    layer_types=KINDS * 3, use_bidirectional_attention=False,
)  # fmt: skip
del GEMMA3_270M["sliding_window_pattern"]


@pytest.mark.parametrize("content, preset", [
    (OLMO3_7B, "olmo3-7b"), (GEMMA3_1B, "gemma3-1b"), (GEMMA3_270M, "gemma3-270m"),
], ids=["olmo3-7b", "gemma3-1b", "gemma3-270m"])  # fmt: skip
def test_published_files_are_the_presets(content, preset, tmp_path):
    assert hf_config_of(tmp_path, content) == find_preset(preset)


def test_a_file_of_transformers_5_says_the_same(tmp_path):
    """RoPE of each kind of layers has fields of its own there."""
    for content, local, kind in ((OLMO3_7B, 5e5, Olmo3Config), (GEMMA3_1B, 1e4, Gemma3Config)):
        expected = hf_config_of(tmp_path, content)
        assert type(expected) is kind
        new = dict(content)
        full = (new.pop("rope_scaling") or {"rope_type": "default"}) | {
            "rope_theta": new.pop("rope_theta")
        }
        new.pop("rope_local_base_freq", None)
        local = {"rope_type": "default", "rope_theta": local}
        new["rope_parameters"] = {"full_attention": full, "sliding_attention": local}
        assert hf_config_of(tmp_path, new) == expected


def test_another_period_of_full_layers_is_read(tmp_path):
    content = OLMO3_7B | dict(layer_types=KINDS * 5 + KINDS[:2])
    assert hf_config_of(tmp_path, content).full_every == 6


def rope(**changes) -> dict:
    return dict(rope_scaling=OLMO3_7B["rope_scaling"] | changes)


def nested(**of_windows) -> dict:
    return dict(rope_parameters={"full_attention": {}, "sliding_attention": of_windows})


@pytest.mark.parametrize("content, changes, message", [
    (OLMO3_7B, dict(layer_types=KINDS[::-1] * 5 + KINDS[:2]), "only one full layer in so many"),
    (OLMO3_7B, rope(attention_factor=1.0), "has attention_factor 1.0: only 1.2"),
    (OLMO3_7B, rope(mscale=1.0, mscale_all_dim=1.0), "has mscale 1.0"),
    (OLMO3_7B, rope(original_max_position_embeddings=4096), "embeddings 4096: only 8192"),
    (OLMO3_7B, rope(rope_type="llama3"), "RoPE of type 'llama3': only default and yarn"),
    (OLMO3_7B, nested(rope_theta=1e4), "has a rope_theta of its own for layers with windows"),
    (GEMMA3_1B, nested(rope_type="linear", factor=8.0), "scales RoPE in windows"),
    (GEMMA3_1B, nested(rope_theta=2e4), "has rope_local_base_freq 20000.0"),
    (GEMMA3_1B, dict(rope_local_base_freq=2e4), "has rope_local_base_freq 20000.0"),
    (GEMMA3_1B, dict(use_bidirectional_attention=True), "has use_bidirectional_attention True"),
    (GEMMA3_1B, dict(final_logit_softcapping=30.0), "has final_logit_softcapping 30.0"),
    (GEMMA3_1B, dict(hidden_activation="silu"), "has hidden_activation silu"),
    (GEMMA3_1B, dict(quantization_config={"bits": 4}), "has quantized weights"),
    (GEMMA3_1B, dict(model_type="gemma3"), "has model_type gemma3: only"),
    (GEMMA3_1B, dict(rope_parameters={"full_attention": 3}), "is damaged: its RoPE"),
    (GEMMA3_1B, dict(sliding_window_pattern=0), "choose 1 or more for each"),
], ids=str)  # fmt: skip
def test_variants_that_are_not_here_are_refused(content, changes, message, tmp_path):
    assert message in line_of_refusal(hf_config_of, tmp_path, content | changes)
