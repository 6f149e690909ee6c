"""Check that a model is one that others publish, and write it as Hugging Face has it.

formats.py has the names, and reads such files; gguf.py writes llama.cpp's."""

import contextlib
import copy
import functools
import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from files import published
from files.formats import HF_FIELDS, SUPPORTED, SUPPORTED_SCALING, hf_names, to_hf_rows
from files.safetensors import StoredTensor, Weights, save_safetensors
from model import LlamaConfig
from plumbing.messages import UserError
from techniques.kv_cache import KVCache
from text.vocabulary import Tokenizer

MAX_FILE_BYTES = 5_000_000_000  # a larger model is written in several files


def check_is_published(config: LlamaConfig, weights: Weights) -> None:
    """Raise UserError if a model is not what others publish: if its code has other weights, or
    computes other logits. One with a padded vocabulary computes the same, and is refused, too."""
    for name in weights:
        hf_names(name, config, (1,))  # raises for a parameter that others lack
    rows = weights["tok_embeddings.weight"].shape[0]
    if rows != config.vocab_size:
        raise UserError(
            f"the model has been changed and embeds {rows} tokens, of which {config.vocab_size} "
            f"exist: a published one has no others"
        )
    family = published.family_for_others(config)
    computes_the_same = published.computes(family.published.logits, family)
    small = family.small_config
    deep = replace(small, n_layers=max(config.n_layers, small.n_layers))
    if not (
        computes_the_same
        and attends_as_far_as_told(small)
        and later_layers_are_alike(deep, small.n_layers)
    ):
        raise UserError(
            f"the code of {family.name} has been changed and no longer computes what is published: "
            f"other programs would compute other logits from the exported weights"
        )


@torch.enable_grad()
def attends_as_far_as_told(config: LlamaConfig) -> bool:
    """Return whether logits have a gradient at the first of 32,768 cached tokens in each layer, or
    at the first in its window, if it has one: a window may be longer than published.TOKENS."""
    model = published.with_fixed_weights(config.build().double())
    cache = KVCache(32_769)
    cache.take_slots(32_768, torch.device("cpu"))
    shape = 1, 32_768, config.n_kv_heads, config.head_dim
    values = []
    for layer in range(config.n_layers):
        value = torch.zeros(shape, dtype=torch.float64, requires_grad=True)
        cache.layers[str(layer)].add(torch.zeros_like(value), value)
        values.append(value)
    logits = model(torch.tensor([[0]]), positions=torch.tensor([[32_768]]), cache=cache)
    logits.sum().backward()
    for value, window in zip(values, config.windows or [0] * config.n_layers):
        sees = value.grad[0].flatten(1).any(1)  # [32,768]
        first = 32_768 - (window - 1) if window else 0
        if sees[:first].any() or not sees[first]:
            return False
    return True


@torch.no_grad()
def later_layers_are_alike(config: LlamaConfig, n_first: int) -> bool:
    """Return whether each layer after the first ones computes what one of these would with its
    weights, from what the layer before it returns: published logits are those of a few layers."""
    model = published.with_fixed_weights(config.build().double())
    blocks = list(model.layers.values())
    calls = []
    for block in blocks:
        block.register_forward_hook(lambda *call: calls.append(call))
    model(published.TOKENS)
    for number in range(n_first, len(blocks)):
        block, arguments, output = calls[number]
        _, _, before = calls[number - 1]
        if not torch.equal(arguments[0], before):
            return False
        alike = False
        for first in blocks[:n_first]:
            other = copy.deepcopy(first)
            with contextlib.suppress(RuntimeError):  # a layer of another kind has other weights
                other.load_state_dict(block.state_dict())
                alike |= torch.allclose(other.forward(*arguments), output, rtol=0, atol=1e-9)
        if not alike:
            return False
    return True


def save_hf(
    directory: Path, config: LlamaConfig, weights: Weights, tokenizer: Tokenizer | None = None
) -> None:
    """Write a directory that from_pretrained of transformers 4 or 5 loads.

    transformers stops generating at any token of eos_token_id, and with None never. Therefore it is
    always written: if it were left out, transformers would stop at token 2."""
    files = [{}]  # the tensors of each
    file_bytes = 0
    for name, weight in weights.items():
        for part, tensor in to_hf_parts(name, config, weight).items():
            if file_bytes and file_bytes + tensor.nbytes > MAX_FILE_BYTES:
                files.append({})
                file_bytes = 0
            files[-1][part] = tensor
            file_bytes += tensor.nbytes
    weight_map = {}
    for i, tensors in enumerate(files, 1):
        file_name = "model.safetensors"
        if len(files) > 1:
            file_name = f"model-{i:05d}-of-{len(files):05d}.safetensors"
        save_safetensors(directory / file_name, tensors, {"format": "pt"})
        weight_map |= dict.fromkeys(tensors, file_name)
    if len(files) > 1:
        total_size = sum(weight.nbytes for weight in weights.values())
        index = {"metadata": {"total_size": total_size}, "weight_map": weight_map}
        path = directory / "model.safetensors.index.json"
        path.write_text(json.dumps(index, indent=1), "utf-8")

    dtype = weights["tok_embeddings.weight"].dtype
    family = published.family_for_others(config)
    fields = HF_FIELDS | family.published.fields
    scaling = (family.published.scaling or SUPPORTED_SCALING) | {"factor": config.rope_scaling}
    content = SUPPORTED | {
        "model_type": family.name,
        "architectures": [f"{family.name.title().replace('_', '')}ForCausalLM"],
        **{key: getattr(config, name) for name, key in fields.items()},
        **family.published.supported,
        "head_dim": config.head_dim,
        "rope_scaling": scaling if config.rope_scaling != 1.0 else None,
        "bos_token_id": tokenizer.named_bos if tokenizer else None,
        "eos_token_id": list(tokenizer.stop) if tokenizer else None,
        "torch_dtype": str(dtype).removeprefix("torch."),
    }
    content |= family.published.write(config)
    for key in family.published.absent:
        del content[key]
    (directory / "config.json").write_text(json.dumps(content, indent=1), "utf-8")
    if tokenizer:
        tokenizer.save_published(directory)


def to_hf_parts(name: str, config: LlamaConfig, weight: StoredTensor) -> Weights:
    """Return a parameter as Hugging Face stores it, by its names there."""
    names = hf_names(name, config, weight.shape)
    if len(names) == 1:
        return {names[0]: weight.map(partial(to_hf_rows, name, config))}

    def read(i: int) -> Tensor:
        return _last_read(weight)[i].clone()

    parts = {}
    for i, part in enumerate(names):
        parts[part] = replace(weight, shape=weight.shape[1:], read=partial(read, i))
    return parts


@functools.lru_cache(1)  # a stack is read once for all its experts, which are written in a row
def _last_read(weight: StoredTensor) -> Tensor:
    return weight.read()
