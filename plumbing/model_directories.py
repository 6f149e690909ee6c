"""Find and open the directories that hold a model's weights, or an adapter.

A directory with weights is a checkpoint in our own format (checkpoint.py), or a model in the format
of Meta or Hugging Face (formats.py). The output directory of a run stands for the newest of its
checkpoints.
"""

import re
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from lora import LoRA
from model import LlamaConfig
from plumbing import formats
from plumbing.checkpoint_files import CHECKSUMS, load_tensors, read_index, verify
from plumbing.peft_files import PEFT_FILES, is_adapter
from plumbing.processes import UserError
from plumbing.safetensors import StoredTensor
from plumbing.tokenizer import Tokenizer, find_tokenizer


def checkpoints(out: Path) -> list[Path]:
    """Return the checkpoints of a run, oldest first."""
    found = [path for path in out.glob("step-*") if re.fullmatch(r"step-\d{8,}", path.name)]
    return sorted(found, key=lambda path: int(path.name.removeprefix("step-")))


def has_weights(directory: Path) -> bool:
    """Return whether this is a checkpoint in our format that holds weights."""
    return (directory / "weights").is_dir()


def find_checkpoint(directory: Path) -> Path:
    """Return the directory with weights: the given one, or the newest checkpoint of a run.

    Raises UserError if neither is one of our checkpoints or a directory of Meta or Hugging Face."""
    for found in (directory, *checkpoints(directory)[-1:]):
        if has_weights(found) or formats.is_meta(found) or formats.is_hf(found):
            return found
        if is_adapter(found):
            base = formats.JsonFile(found / PEFT_FILES[0]).get("base_model_name_or_path")
            raise UserError(
                f"{found} is an adapter: generate.py takes it as --adapter, with "
                f"{base or 'its base'} as the model, and python checkpoint.py merge makes a model "
                f"of both"
            )
    raise UserError(
        f"no checkpoint in '{directory}': give a run's --out or one of its step-N, or a directory "
        f"with params.json (Meta) or config.json (Hugging Face) and weights"
    )


def find_adapter(directory: Path) -> Path:
    """Return the directory with an adapter: the given one, or the newest checkpoint of a run."""
    for found in (directory, *checkpoints(directory)[-1:]):
        if is_adapter(found):
            if (found / CHECKSUMS).exists():
                verify(found, "adapter")
            return found
    raise UserError(f"no adapter in '{directory}': give a run of finetune_lora.py, or PEFT's files")


def read_config(directory: Path) -> dict:
    """Return the metadata of a directory from find_checkpoint, or of an adapter's checkpoint.

    `model` is a LlamaConfig, `tokenizer` an argument for load_tokenizer or None, and `directory`
    the directory itself. Our checkpoints also have `tokenizer_hash`, `step` and `flags`."""
    if not has_weights(directory) and not (directory / CHECKSUMS).exists():
        config, _ = open_weights(directory)
        file = find_tokenizer(directory)
        return {"model": config, "tokenizer": file and str(file), "directory": directory}
    verify(directory, "config.json", "tokenizer.model")
    content = formats.JsonFile(directory / "config.json")
    try:
        metadata = content | {"model": LlamaConfig(**content["model"]), "directory": directory}
    except (TypeError, ValueError) as error:
        raise UserError(f"{directory} was saved with another model.py: {error}")
    if metadata["tokenizer"] == "tokenizer.model":
        metadata["tokenizer"] = str(directory / "tokenizer.model")
    return metadata


def check_tokenizer(metadata: dict, tokenizer: Tokenizer) -> None:
    """Raise UserError if a tokenizer does not fit the model whose metadata read_config returned:
    if it is not the model's own or, where that is unknown, has more tokens than the model."""
    directory, vocab_size = metadata["directory"], metadata["model"].vocab_size
    if metadata.get("tokenizer_hash") not in (None, tokenizer.hash):
        raise UserError(
            f"{directory} was trained with another tokenizer than {tokenizer.name}: "
            f"give --tokenizer {metadata['tokenizer']}"
        )
    if tokenizer.vocab_size > vocab_size:
        raise UserError(
            f"tokenizer {tokenizer.name} has {tokenizer.vocab_size} tokens, the model in "
            f"{directory} {vocab_size}: give the --tokenizer it was trained with"
        )


def open_weights(directory: Path) -> tuple[LlamaConfig, dict[str, StoredTensor]]:
    """Return the configuration and the weights of any directory that find_checkpoint returns.

    It does not communicate."""
    if not has_weights(directory):
        is_meta = formats.is_meta(directory)
        return formats.open_meta(directory) if is_meta else formats.open_hf(directory)
    verify(directory, "weights", alone=True)
    entries = read_index(directory / "weights").state_dict_metadata

    def read(name: str) -> Tensor:
        tensor = torch.empty(entries[name].size, dtype=entries[name].properties.dtype)
        load_tensors({name: tensor}, directory / "weights", alone=True)
        return tensor

    return read_config(directory)["model"], {
        name: StoredTensor(entry.properties.dtype, tuple(entry.size), partial(read, name))
        for name, entry in entries.items()
    }


def describe_differences(theirs: LlamaConfig | LoRA, ours: LlamaConfig | LoRA) -> str:
    """Return the fields in which two configurations differ, as in `dim 256, not 512`."""
    fields = zip(asdict(theirs).items(), asdict(ours).values())
    return ", ".join(f"{name} {a}, not {b}" for (name, a), b in fields if a != b)
