"""costs/page.py beside counts of emulated steps, in which every two options of a step meet.

counted.jsonl has steps with their counts: the peak of memory and the payload of each collective.
`python tests/test_page.py` counts them anew, which takes half an hour."""

import json
import sys
from dataclasses import replace
from functools import partial

import pytest
import torch
from conftest import ROOT, step_of
from exact import check_step, meta_model, parallel_config
from torch.utils._pytree import tree_leaves

from config import ParallelConfig, Work
from costs.page import holds, saved, sends
from costs.seconds import sent_bytes
from lora import LoRA
from model import PRESETS, Llama, LlamaConfig
from parallel import with_mesh
from perf.instruments import Live, build_on_meta, emulate, needs_real_tensors, state_tensors
from plumbing.parser import Parser
from plumbing.processes import UserError, init_distributed
from runs.flags import add_optimizer_flags
from techniques import float8, offload, optimizers
from techniques.recompute import recompute_and_compile
from text.batch import Batch
from train import accumulate, make_optimizer

CHUNKY = LlamaConfig(64, 3, 4, 2, 160, vocab_size=512)
WIDE = LlamaConfig(256, 4, 4, 4, 768, vocab_size=2048)
TIED = LlamaConfig(128, 6, 4, 2, 384, vocab_size=4096, tie_embeddings=True)
QWEN3 = replace(CHUNKY, head_dim=64, qk_norm=True)
CONFIGS = dict(CHUNKY=CHUNKY, WIDE=WIDE, TIED=TIED, QWEN3=QWEN3)
ADAPTERS = {
    "none": None,
    "rank 4": dict(rank=4),
    "wq wv": dict(rank=4, targets=("wq", "wv")),
    "dropout": dict(rank=4, dropout=0.1),
    "dora": dict(rank=4, dora=True),
}
COUNTED = ROOT / "tests/counted.jsonl"
ROWS = [json.loads(line) for line in COUNTED.read_text().splitlines()]


def make_step(step: dict) -> tuple[Work, int]:
    """Return the step of a row of COUNTED, and the place along pp of the rank that was counted."""
    given = dict(step)
    ranks, name, adapters = (given.pop(key) for key in ("ranks", "config", "adapters"))
    bits, stage = given.pop("base_bits"), given.pop("stage")
    sequences = given.pop("microbatch"), given.pop("microbatches")
    given["dtype"] = getattr(torch, given["dtype"])
    lora = ADAPTERS[adapters]
    parallel = parallel_config(ranks, bool(lora), **given)
    config, pp = CONFIGS[name], parallel.pp
    config = replace(config, n_layers=pp * parallel.stages_per_rank + 1) if pp > 1 else config
    model = build_on_meta(config, LoRA(**lora), bits) if lora else meta_model(config, True)
    return step_of(model, parallel, *sequences, 256), pp - 1 if stage == "last" else 0


def count(work: Work, stage: int, monkeypatch) -> dict:
    is_fake = not needs_real_tensors(work.parallel)
    monkeypatch.setattr(float8, "has_float8", lambda *_: is_fake)  # count as on a GPU
    monkeypatch.setattr(offload, "MIN_BYTES", 0)  # the tensors here are small
    monkeypatch.setattr(optimizers, "ELEMENTS_AT_A_TIME", 1 << 14)
    sent, held = emulate(work, stage)
    payload = {f"{collective} over {dim}": nbytes for (dim, collective), (_, nbytes) in sent.items()}
    return {"peak": held["peak"], "payload": payload}


def is_plain(step: dict) -> bool:
    """Return whether a step is a Llama's by AdamW, without other techniques than checkpointing."""
    off = dict(adapters="none", float8="none", optimizer="adamw", moments="float32")
    off |= dict(async_tp=False, offload_activations=False)
    return all(step[name] == value for name, value in off.items())
