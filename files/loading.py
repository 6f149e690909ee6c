"""Find a model, and load its weights, from any directory of directories.find_checkpoint."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from files import directories, formats
from files.adapters import merged_weights, open_adapter
from files.directories import check_tokenizer, find_checkpoint, open_weights, read_config
from files.safetensors import with_progress_of
from lora import adapters, quantize_base
from model import Llama
from plumbing.messages import UserError
from plumbing.processes import Process, meet
from plumbing.shards import allocate, assign_shard
from text.tokenizer import Tokenizer, load_tokenizer


def find_model(
    directory: Path, tokenizer: str | None, process: Process, template: str | None = None
) -> tuple[dict, Tokenizer]:
    """Return what read_config says of the model that is found in a directory, and the
    `tokenizer`, by default the model's own, with a chat template: see load_tokenizer."""
    directory = process.broadcast_from_rank_zero(partial(find_checkpoint, directory))
    metadata = read_config(directory)
    if not (name := tokenizer or metadata["tokenizer"]):
        raise UserError(f"{directory} has no tokenizer.model: give its --tokenizer")
    loaded = process.local_rank_zero_first(partial(load_tokenizer, name, template))
    check_tokenizer(metadata, loaded)
    return metadata, loaded


def weights_of(model: Llama) -> dict[str, Tensor]:
    """Return a model's weights by name, without adapters, sharing its memory."""
    tensors = {name: t for name, t in model.state_dict().items() if ".lora_" not in name}
    if model.config.tie_embeddings:
        tensors.pop("output.weight", None)  # of a pipeline's ranks the last alone has it
    return tensors


@torch.no_grad()
def load_weights(directory: Path, model: Llama, adapter: Path | None = None) -> None:
    """Load weights, from any directory of find_checkpoint, into a model that is not on `meta`, and
    an adapter, if one is given: into the model's own adapters or, without any, merged.

    All ranks call it together, and each loads its shards. From our files a rank reads only what
    overlaps with its shards. From other files, with an adapter to merge, or into 4 bits, it reads
    one full matrix at a time, which takes memory only if rows are reordered or joined, or values
    change. Without `adapter`, the model's adapters do not change."""
    factors = adapters(model)
    if adapter and factors:
        _, stored = open_adapter(adapter, model.config)
        for name, factor in factors.items():
            assign_shard(factor, stored[name].read())
        adapter = None  # none is to be merged
    in_4_bits = any(not tensor.is_floating_point() for tensor in weights_of(model).values())
    if directories.has_weights(directory) and not in_4_bits and not adapter:
        directories.verify(directory, "weights")
        meet()
        directories.load_tensors(weights_of(model), directory / "weights")
        return
    _, stored = open_weights(directory)
    formats.check_weights(stored, formats.parameter_shapes(model.config), directory)
    if adapter:  # in the model's dtype: that of the files may be too narrow for the change
        dtype = next(model.parameters()).dtype
        stored = {name: weight.to(dtype) for name, weight in stored.items()}
        stored = merged_weights(stored, adapter, model.config)
    quantize_base(model, lambda name: stored[name].read(), assign_shard)  # if it is in 4 bits
    stored = with_progress_of(stored, f"loading {directory}")
    for name, parameter in weights_of(model).items():
        if parameter.is_floating_point():
            assign_shard(parameter, stored[name].read())


def load_pretrained(
    directory: str | Path,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    prepare: Callable[[Llama], None] = lambda model: None,
    adapter: Path | None = None,
) -> Llama:
    """Return a Llama with what load_weights loads, from any directory that find_checkpoint finds.
    `prepare` may change its layers before they are allocated, as add_adapters does."""
    directory = find_checkpoint(Path(directory))
    config = read_config(directory)["model"]  # before meta: it computes logits of a small model
    with torch.device("meta"):
        model = config.build().to(dtype)
        prepare(model)
    allocate(model, device)
    load_weights(directory, model, adapter)
    return model.eval()
