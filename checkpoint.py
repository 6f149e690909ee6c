"""Checkpoints: saved whole or not at all, resumed exactly, loaded anywhere.

    OUT/step-00000100/          a checkpoint; the directory exists only when it is complete
        config.json             model shape, tokenizer, step
        tokenizer.model         a copy, where the tokenizer is a file: nothing else is needed
        .metadata, *.distcp     weights and optimizer state (torch.distributed.checkpoint)

A save writes to a hidden directory first and renames it last. A process that is killed while it
saves leaves a hidden directory, which the next save removes; earlier checkpoints are untouched.
OUT must be on a disk that all nodes share: every rank writes a part.
"""

import json
import os
import re
import shutil
import warnings
from dataclasses import asdict
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)

from data import Tokenizer
from model import Llama, LlamaConfig, UserError


def save(
    out: Path,
    step: int,
    model: Llama,
    optimizer: torch.optim.Optimizer,
    tokenizer: Tokenizer,
    keep: int = 0,
) -> Path:
    """Write OUT/step-N; every rank calls it. `keep` > 0 leaves that many of the newest."""
    final, temporary = out / f"step-{step:08d}", out / f".step-{step:08d}"
    writes = dist.get_rank() == 0
    if writes:
        for leftover in out.glob(".step-*"):
            shutil.rmtree(leftover)
        temporary.mkdir(parents=True)
    dist.barrier()
    weights, moments = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=temporary)
    if writes:
        about = {"model": asdict(model.config), "step": step}
        about |= {"tokenizer": tokenizer.name, "tokenizer_hash": tokenizer.hash}
        if tokenizer.file:
            shutil.copyfile(tokenizer.file, temporary / "tokenizer.model")
            about["tokenizer"] = "tokenizer.model"
        (temporary / "config.json").write_text(json.dumps(about, indent=1))
        parts = FileSystemReader(temporary).read_metadata().storage_data.values()
        if missing := {part.relative_path for part in parts} - set(os.listdir(temporary)):
            raise UserError(f"{temporary} lacks {missing}: --out must be on a disk all nodes share")
        for path in [*temporary.iterdir(), temporary]:
            _sync(path)
        os.rename(temporary, final)
        _sync(out)
        for old in checkpoints(out)[:-keep] if keep else []:
            hidden = out / f".{old.name}"
            os.rename(old, hidden)  # a checkpoint that is half removed must not look like one
            shutil.rmtree(hidden)
    dist.barrier()
    return final


def _sync(path: Path) -> None:
    """Make the disk hold what was written under this path, before anything relies on it."""
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def checkpoints(out: Path) -> list[Path]:
    """Complete checkpoints of a run, oldest first; what else a user keeps there is left alone."""
    found = [path for path in out.glob("step-*") if re.fullmatch(r"step-\d{8,}", path.name)]
    return sorted(found, key=lambda path: int(path.name.removeprefix("step-")))


def find_checkpoint(directory: Path) -> Path:
    """A checkpoint from its own directory, or the newest of a run's."""
    if (directory / ".metadata").exists():
        return directory
    if found := checkpoints(directory):
        return found[-1]
    raise UserError(f"no checkpoint in '{directory}': give a run's --out or one of its step-N")


def read_config(directory: Path) -> dict:
    """config.json of a checkpoint, with `model` as a LlamaConfig and `tokenizer` as load_tokenizer
    takes it."""
    about = json.loads((directory / "config.json").read_text())
    about["model"] = LlamaConfig(**about["model"])
    if about["tokenizer"] == "tokenizer.model":
        about["tokenizer"] = str(directory / "tokenizer.model")
    return about


def resume(
    directory: Path, model: Llama, optimizer: torch.optim.Optimizer, tokenizer: Tokenizer
) -> int:
    """Continue from a checkpoint: weights and moments in place; returns its step.

    The optimizer's settings, such as weight decay, stay those of the flags."""
    about = read_config(directory)
    if about["model"] != model.config:
        raise UserError(
            f"{directory} holds another model ({differences(about['model'], model.config)}): "
            f"give the flags it was trained with, or another --out"
        )
    check_tokenizer(directory, tokenizer)
    settings = [
        {name: value for name, value in group.items() if name != "params"}
        for group in optimizer.param_groups
    ]
    weights, moments = get_state_dict(model, optimizer)
    dcp.load({"model": weights, "optimizer": moments}, checkpoint_id=directory)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
    for group, setting in zip(optimizer.param_groups, settings):
        group.update(setting)
    return about["step"]


def check_tokenizer(directory: Path, tokenizer: Tokenizer) -> None:
    """Refuse a tokenizer that gives the same ids another meaning."""
    about = read_config(directory)
    if about["tokenizer_hash"] != tokenizer.hash:
        raise UserError(
            f"{directory} was trained with another tokenizer than {tokenizer.name}: "
            f"give --tokenizer {about['tokenizer']}"
        )


def differences(theirs: LlamaConfig, ours: LlamaConfig) -> str:
    """What sets two shapes apart, as `dim 256, not 512`."""
    pairs = zip(asdict(theirs).items(), asdict(ours).values())
    return ", ".join(f"{name} {a}, not {b}" for (name, a), b in pairs if a != b)


def load_weights(directory: Path, model: Llama) -> None:
    """Fill a materialised model with a checkpoint's weights; every rank calls it."""
    weights = get_model_state_dict(model)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # as generate.py wants
        dcp.load({"model": weights}, checkpoint_id=directory)
    set_model_state_dict(model, weights)


def load_pretrained(
    directory: str | Path, dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> Llama:
    """A Llama from one of our checkpoints (a step's directory, or a run's for its newest)."""
    directory = find_checkpoint(Path(directory))
    with torch.device("meta"):
        model = Llama(read_config(directory)["model"]).to(dtype)
    model.to_empty(device=device)
    model.tie_weights()
    load_weights(directory, model)
    return model
