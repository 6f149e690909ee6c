"""Model directories that say something twice, or hold something beside the model: as transformers
reads them, and with a note."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from test_formats import PLAIN, logits_agree, our_model, saved_hf

from checkpoint import load_pretrained
from files.adapters import save_adapter
from files.directories import find_adapter, find_checkpoint
from lora import LoRA, adapters, add_adapters, init_adapters
from plumbing.processes import UserError

SCALED_ROPE = dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
                   original_max_position_embeddings=8192)  # fmt: skip


SCALED_ROPE = dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
                   original_max_position_embeddings=8192)  # fmt: skip


def read_alike(directory: Path) -> None:
    theirs = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    logits_agree(load_pretrained(directory), theirs)


def with_settings(directory: Path, **settings) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))


@torch.no_grad()
def test_what_a_directory_says_twice_is_read_as_by_transformers(tmp_path, capsys):
    model = our_model(replace(PLAIN, vocab_size=101))
    hf = saved_hf(tmp_path / "hf", model)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(hf)
    theirs.save_pretrained(hf)  # with rope_parameters
    for rope in (SCALED_ROPE, SCALED_ROPE | {"rope_theta": 30_000.0}):
        with_settings(hf, rope_scaling=rope)  # as cards of models say
        read_alike(hf)
    with_settings(hf, rope_scaling={"rope_type": "linear", "factor": 2.0})
    with pytest.raises(UserError, match="RoPE of type 'linear'"):
        load_pretrained(hf)
    # A null is a missing field, and a model may lie beside other weights.
    with_settings(hf, rope_scaling=None, head_dim=None)
    theirs.model.norm.weight.mul_(2)
    theirs.save_pretrained(tmp_path / "shards", max_shard_size=30_000)
    for path in (tmp_path / "shards").glob("model*"):
        shutil.copy(path, hf)
    capsys.readouterr()
    read_alike(hf)
    assert f"{hf} has model.safetensors, which is read, and shards" in capsys.readouterr().err
    (hf / "model.safetensors").unlink()
    read_alike(hf)
    wide = our_model(replace(PLAIN, vocab_size=101, n_kv_heads=PLAIN.n_heads))
    many = saved_hf(tmp_path / "many", wide)
    with_settings(many, num_key_value_heads=None)
    read_alike(many)


def test_an_adapter_of_another_base_is_named(tmp_path, capsys):
    """And one that lies in the model's own directory."""
    config = replace(PLAIN, vocab_size=101)
    base, other = (saved_hf(tmp_path / name, our_model(config)) for name in ("base", "other"))
    model, lora = our_model(config), LoRA(rank=2)
    add_adapters(model, lora)
    init_adapters(model)
    names = str(base), "someone/base", "someone/else", "", str(tmp_path / "gone/base")
    for name in names:
        (directory := tmp_path / "adapter").mkdir(exist_ok=True)
        save_adapter(directory, lora, config, adapters(model), name)
        for given in (base, other):
            find_adapter(directory, given)
            said = f"the adapter in {directory} was trained beside {name}, and not {given}"
            is_other = name and Path(name).name != given.name
            assert (said in capsys.readouterr().err) == bool(is_other), (name, given)
    save_adapter(base, lora, config, adapters(model), "")
    find_checkpoint(base)
    assert f"{base} holds an adapter, too: --adapter applies it" in capsys.readouterr().err
