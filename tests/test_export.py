"""checkpoint.py writes a model, changed as a class may change it, only where the format's reader
computes the same. transformers is that reader."""

from dataclasses import replace

import pytest
import torch
from conftest import changed_copy, hugging_face_model, launch, refused, slow, succeed
from test_formats import DEEPSEEK, stored
from test_model import load_weights
from torch import nn

from files import published as fingerprint
from files.export import check_is_published, later_layers_are_alike
from files.gguf import save_gguf
from files.published import with_fixed_weights
from model import Attention, Block
from models.family import families
from models.gemma3 import Gemma3Config
from models.mixtral import MixtralConfig
from models.olmo3 import Olmo3Config
from models.qwen2 import Qwen2Config
from models.qwen3 import Qwen3Config
from plumbing.messages import UserError

# Strings of model.py, and places for more lines.
FIELD = "    tie_embeddings: bool = False"
TINY = "vocab_size=2048, tie_embeddings=True"
PADDED = {
    "Embedding(config.vocab_size": "Embedding(config.vocab_size + 5",
    "Output(config.dim, config.vocab_size": "Output(config.dim, config.vocab_size + 5",
    "return self.output(x)": "return self.output(x)[..., :-5]",
}
OFF = {FIELD: f"    window: int = 0\n{FIELD}"}
PUBLISHED = {name: family for name, family in families().items() if family.published}
ON = OFF | {TINY: f"window=64, {TINY}"}


def export_of(patch: str, edits: dict, corpus, tmp_path) -> tuple:
    """Return the command that exports a changed model after a step of training."""
    within = changed_copy(tmp_path / "copy", patch, edits)
    run = tmp_path / "run"
    succeed(*within, "train.py", "--data", corpus, "--out", run, "--steps", 1, "--batch", 2,
            "--seq-len", 100, "--eval-every", 0)  # fmt: skip
    return *within, "checkpoint.py", "export", run, tmp_path / "hf", "--format", "hf"


@pytest.mark.parametrize("patch, edits, message", [
    slow("", PADDED, "embeds 272 tokens, of which 267 exist"),
    slow("", ON, "read back with window 0, not 64"),
    ("sliding_window", {"WINDOW = 64": "WINDOW = 4096"}, "no longer computes"),
], ids=["padded", "window", "long-window"])  # fmt: skip
def test_a_model_that_the_format_cannot_hold_is_refused(patch, edits, message, corpus, tmp_path):
    refused(launch(*export_of(patch, edits, corpus, tmp_path)), message)
    assert {path.name for path in tmp_path.iterdir()} == {"copy", "run"}


def test_another_loss_and_a_field_that_is_off_are_no_other_model(corpus, tmp_path):
    succeed(*export_of("z_loss", OFF, corpus, tmp_path))
    assert (tmp_path / "hf").is_dir()


@pytest.mark.parametrize("name", PUBLISHED)
def test_late_layers_are_looked_at(name, monkeypatch):
    """A change of a layer that the published logits do not reach, in its block or between two."""
    small = PUBLISHED[name].small_config
    deep = replace(small, n_layers=small.n_layers + 3)
    assert later_layers_are_alike(deep, small.n_layers)
    if name == "llama":
        values = Attention.values
        monkeypatch.setattr(Attention, "values", lambda m, x: values(m, x) * (1 + m.layer // 5))
        assert not later_layers_are_alike(deep, small.n_layers)
        monkeypatch.setattr(Attention, "values", values)
        monkeypatch.setattr(
            Block,
            "__call__",
            lambda m, x, *rest: nn.Module.__call__(m, x * (1 + m.attention.layer // 5), *rest),
        )
        assert not later_layers_are_alike(deep, small.n_layers)


@pytest.mark.parametrize("config, message", [
    (MixtralConfig(n_experts=4), "balances experts: train with --balance none"),
    (families()["llama"].small_config, r"no parameter like layers\.0\.attention\.v_norm\.weight"),
])  # fmt: skip
def test_a_parameter_that_hugging_face_has_no_name_for(config, message):
    with pytest.raises(UserError, match=message):
        check_is_published(config, {"layers.0.attention.v_norm.weight": None})


@pytest.mark.parametrize("config, message", [
    (MixtralConfig(n_experts=4, balance="none"), "gguf is not written for models like mixtral"),
    (Olmo3Config(), "gguf is not written for models like olmo3"),
    (DEEPSEEK, "gguf is not written for models like deepseek_v3"),
    (Gemma3Config(), "gguf is not written for models like gemma3_text"),
    (Qwen2Config(rope_scaling=8.0), "qwen2 has no scaled RoPE"),
    (Qwen3Config(rope_scaling=8.0), "qwen3 has no scaled RoPE"),
])  # fmt: skip
def test_a_model_that_gguf_cannot_hold_is_refused(config, message):
    with pytest.raises(UserError, match=message):
        save_gguf(None, config, {}, None, torch.float32)


@torch.no_grad()
@pytest.mark.parametrize("name", PUBLISHED)
def test_the_fingerprint_is_that_of_transformers(name):
    config = PUBLISHED[name].small_config
    expected = [*PUBLISHED[name].published.logits]
    reference = hugging_face_model(config).double()
    load_weights(reference, with_fixed_weights(config.build().double()))
    logits = reference.eval()(fingerprint.TOKENS).logits[0, -1, :4]
    torch.testing.assert_close(logits.tolist(), expected, rtol=0, atol=1e-5)
    check_is_published(config, stored(config.build()))
