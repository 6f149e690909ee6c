"""The record of Llama itself, which is in model.py."""

from model import PRESETS, LlamaConfig
from models.family import Family, Published

MODEL = Family(
    "llama",
    LlamaConfig,
    PRESETS,
    published=Published(
        logits=(-2.065278, -0.008952, -3.993807, -0.007986),
        # Without num_key_value_heads there are as many as query heads.
        defaults=dict(rope_theta=1e4, rms_norm_eps=1e-6),
        gguf_rows="meta",
    ),
)
