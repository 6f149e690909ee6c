"""DoRA, and a base in 4 bits, in runs: saved, resumed, merged; and what cannot be done."""

import shutil
from pathlib import Path

import pytest
import torch
from conftest import needs_2_13, step_of, succeed
from test_finetune import factors, flags, same_run
from test_formats import our_model, saved

from checkpoint import load_pretrained
from config import ParallelConfig
from files.adapters import load_adapter
from generate import generate, load_model
from lora import TARGETS
from model import Llama, LlamaConfig
from perf.instruments import build_on_meta
from techniques.nf4 import refuses, rounded
from text.tokenizer import load_tokenizer

BYTES = load_tokenizer("bytes")
# Blocks of 64 weights: also where two or four ranks share the rows of wo and w2.
CONFIG = LlamaConfig(128, 2, 4, 2, 256, vocab_size=267, max_seq_len=256)
FLAGS = dict(steps=4, base_bits=4, dora=True, save_every=2, keep=0, rank=4, lr=0.01)


def rounded_to_4_bits(model: Llama) -> Llama:
    """Round the matrices of a model in place, as a base in 4 bits has them."""
    for name, layer in model.named_modules():
        if name.endswith(TARGETS):
            layer.weight.data = rounded(layer.weight.detach())
    return model


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    """A checkpoint in bfloat16, whose matrices 4 bits can hold."""
    model = our_model(CONFIG, torch.bfloat16, seed=3, factor=4, norms=(1, 1))
    return saved(tmp_path_factory.mktemp("base") / "base", model, BYTES)


@pytest.fixture(scope="module")
def one_run(base, sums, tmp_path_factory):
    out = tmp_path_factory.mktemp("one") / "run"
    result = succeed("finetune_lora.py", *flags(base, sums, out, **FLAGS, merge=True))
    return out, result.out


def test_an_adapter_goes_on_beside_the_base_that_it_saw(base, one_run):
    """Loaded for generation, and merged: beside the rounded base, not the original."""
    out, _ = one_run
    assert any(name.endswith("lora_magnitude_vector") for name in factors(out / "step-00000004"))
    model, tokens = load_pretrained(base, torch.float64), torch.arange(20)[None]
    load_adapter(model, out / "step-00000004")
    expected = model(tokens)
    merged = load_pretrained(out / "merged", torch.float64)(tokens)
    assert (merged - expected).norm() < 0.03 * expected.norm()  # bfloat16
    beside_original = load_pretrained(base, torch.float64)
    shutil.copytree(out / "step-00000004", out / "plain", dirs_exist_ok=True)
    (out / "plain" / "run.json").unlink()  # PEFT's files alone do not say what the base was
    load_adapter(beside_original, out / "plain")
    assert (beside_original(tokens) - expected).norm() > 5 * (merged - expected).norm()


@pytest.mark.parametrize("with_adapter", [False, True])
@torch.no_grad()
def test_text_is_generated_beside_a_base_in_4_bits(base, one_run, with_adapter):
    """With the logits of full matrices that have been rounded, and its weights in bytes."""
    out, printed = one_run
    assert f"--adapter {out} --base-bits 4 --chat" in printed
    adapter = out / "step-00000004" if with_adapter else None
    cpu, tokens = torch.device("cpu"), torch.arange(20)[None]
    model, full = (load_model(base, CONFIG, adapter, bits, cpu) for bits in (4, 16))
    matrices = [m for name, m in model.named_modules() if name.endswith(TARGETS)]
    assert matrices and all(m.weight.dtype == torch.uint8 for m in matrices)
    if not with_adapter:
        rounded_to_4_bits(full)
    expected = full(tokens)
    assert (model(tokens) - expected).norm() < 1e-5 * expected.norm()
    flags = ["--prompt", "Add", "--max-new-tokens", 5, "--temperature", 0, "--base-bits", 4]
    flags += ["--adapter", adapter] if with_adapter else []
    (new,) = generate(full, [BYTES.encode("Add", bos=True)], 5, temperature=0, stop=BYTES.stop)
    text = BYTES.decode([token for token in new if token not in BYTES.stop])
    assert f"Add{text}\n" in succeed("generate.py", base, *flags).out


def test_what_a_run_computes_with_is_the_rounded_base(base, sums, one_run, tmp_path):
    """The same run beside a base in 16 bits that was rounded before."""
    model = rounded_to_4_bits(load_pretrained(base, torch.float64))
    saved(tmp_path / "rounded", model, BYTES)
    given = FLAGS | dict(base_bits=16)
    succeed("finetune_lora.py", *flags(tmp_path / "rounded", sums, tmp_path / "run", **given))
    same_run(tmp_path / "run", one_run[0], step=4)


@needs_2_13
def test_a_run_goes_on_as_on_one_process(base, sums, one_run, tmp_path):
    """Resumed on a mesh from a checkpoint of one process."""
    out = tmp_path / "run"
    shutil.copytree(one_run[0], out, ignore=lambda *_: ["step-00000004", "merged"])
    mesh = dict(dp="fsdp", microbatch=1, checkpointing="full")
    arguments = flags(base, sums, out, **FLAGS, **mesh)
    result = succeed("finetune_lora.py", *arguments, "--resume", nproc=2, timeout=300)
    assert f"resumed from {out / 'step-00000002'}" in result.out
    same_run(out, one_run[0], step=4)


def test_a_torch_that_shards_no_bytes_is_refused(monkeypatch):
    monkeypatch.setattr(torch, "__version__", torch.torch_version.TorchVersion("2.11.0"))
    for ranks in (1, 2):
        parallel = ParallelConfig(dp="fsdp", shard=ranks)
        refusal = refuses(step_of(build_on_meta(CONFIG), parallel, 2, 1, 8))
        assert "torch 2.11.0 cannot shard a base in 4 bits" in refusal
