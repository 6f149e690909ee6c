"""Import, export and merge: turn any model directory into a checkpoint, and a checkpoint into files
of other programs. One process does it, matrix by matrix; checkpoint.py has the commands."""

import contextlib
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.metadata import MetadataIndex

from files.adapters import merged_weights
from files.directories import (
    check_tokenizer,
    checksums,
    complete,
    describe_differences,
    failure_reason,
    find_adapter,
    find_checkpoint,
    open_weights,
    read_config,
    sync,
)
from files.export import check_is_published, save_hf
from files.formats import HF_FIELDS
from files.gguf import Q8_0, save_gguf
from files.safetensors import Weights, with_progress_of
from model import LlamaConfig
from plumbing.messages import UserError
from plumbing.new_files import hidden_until_complete
from text.tokenizer import load_tokenizer
from text.vocabulary import OtherKind, Tokenizer


def import_weights(source: Path, target: Path, tokenizer: str | None) -> None:
    """Write a checkpoint at `target` with the source's weights, in their dtype."""
    source = find_checkpoint(source)
    config, stored = open_weights(source)
    metadata = read_config(source)
    loaded = load_tokenizer(tokenizer) if tokenizer else tokenizer_of(metadata)
    if loaded:
        check_tokenizer(metadata, loaded)
    write_checkpoint(target, config, stored, loaded, init=str(source.resolve()))


def merge_adapter(base: Path, adapter: Path, target: Path, tokenizer: Tokenizer | None) -> None:
    """Write a checkpoint at `target` of a model and an adapter. `adapter` is a directory with one,
    or a run that trained one."""
    adapter = find_adapter(adapter, base)
    config, stored = open_weights(base)
    merged = merged_weights(stored, adapter, config)
    flags = dict(init=str(base.resolve()), adapter=adapter.name)
    write_checkpoint(target, config, merged, tokenizer, **flags)


def write_checkpoint(
    target: Path, config: LlamaConfig, stored: Weights, tokenizer: Tokenizer | None, **flags
) -> None:
    """Write a checkpoint of step 0 without an optimizer from one process, matrix by matrix."""
    stored = with_progress_of(stored, f"writing {target}")
    with new_directory(target) as temporary:
        save_stored_tensors(stored, temporary / "weights")
        digests = checksums(temporary, (temporary / "weights").glob("__*"))
        complete(temporary, config, {"step": 0, "flags": flags}, tokenizer, digests)


@contextlib.contextmanager
def new_directory(target: Path) -> Iterator[Path]:
    """Yield a hidden directory to write to, and rename it to `target` if nothing was raised. Raises
    UserError if the target exists."""
    if target.exists():
        raise UserError(f"{target} exists: give the name of a new directory")
    try:
        with hidden_until_complete(target) as unfinished:
            unfinished.mkdir()
            yield unfinished
    except (RuntimeError, CheckpointException) as error:
        if "unexpected pos" not in (reason := failure_reason(error)):  # torch.save could not write
            raise
        free = shutil.disk_usage(target.parent).free / 1e9
        raise UserError(f"cannot write {target}: {reason}; {free:,.3f} GB are free: make room")
    sync(target.parent)


def save_stored_tensors(stored: Weights, directory: Path) -> None:
    """Write weights/ from one process, which holds one tensor at a time: DCP plans with tensors on
    `meta`, and each is read only when DCP writes it."""

    class ReadWhenWritten(dcp.DefaultSavePlanner):
        def lookup_object(self, index: MetadataIndex) -> Tensor:
            return stored[index.fqn].read()

    on_meta = {}
    for name, tensor in stored.items():
        on_meta[name] = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
    dcp.save(on_meta, checkpoint_id=directory, planner=ReadWhenWritten(), no_dist=True)


def export_weights(
    source: Path, target: Path, format: str, dtype: torch.dtype | str | None
) -> None:
    """Write a directory in the format of Hugging Face (`hf`) or llama.cpp (`gguf`). Weights keep
    their dtype if `dtype` is None. Raises UserError for a model that other programs would load as
    another one."""
    if dtype == Q8_0 and format != "gguf":
        raise UserError(f"--dtype {Q8_0} is of --format gguf alone: give another one")
    source = find_checkpoint(source)
    tokenizer = tokenizer_of(read_config(source))
    config, stored = open_weights(source)
    check_is_published(config, stored)
    if dtype and format != "gguf":  # gguf.py casts matrices alone
        stored = {name: weight.to(dtype) for name, weight in stored.items()}
    stored = with_progress_of(stored, f"writing {target}")
    if format == "gguf" and not tokenizer:
        raise UserError(f"{source} has no tokenizer: import it with --tokenizer FILE, then export")
    with new_directory(target) as temporary:
        if format == "gguf":
            save_gguf(temporary / "model.gguf", config, stored, tokenizer, dtype)
            # No file of llama.cpp is read here: this is all that it holds.
            fields = (*HF_FIELDS, "rope_scaling", "head_dim")
            read_back = type(config)(**{name: getattr(config, name) for name in fields})
        else:
            save_hf(temporary, config, stored, tokenizer)
            read_back, _ = open_weights(temporary)  # also compares names and shapes with model.py's
        if read_back != config:
            raise UserError(
                f"--format {format} cannot hold the model in {source}: it would be read back with "
                f"{describe_differences(read_back, config)}"
            )
        sync(*temporary.iterdir(), temporary)


def tokenizer_of(metadata: dict) -> Tokenizer | None:
    """Return the tokenizer that read_config has found, or None. Prints a warning if it cannot be
    read, such as Llama 2's without the package for it. Raises UserError if it is damaged."""
    try:
        tokenizer = metadata["tokenizer"] and load_tokenizer(metadata["tokenizer"])
    except OtherKind as error:
        print(f"warning: without a tokenizer, as {error}", file=sys.stderr)
        return None
    if tokenizer:
        check_tokenizer(metadata, tokenizer)
    return tokenizer
