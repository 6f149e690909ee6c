"""Read Meta's model directories: params.json, and consolidated.00.pth and what follows it."""

from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from files.formats import check_weights, checked_config, parameter_shapes
from files.safetensors import StoredTensor, Weights
from model import LlamaConfig
from plumbing.json_files import JsonFile
from plumbing.messages import UserError

# The fields of a params.json that have the names and values of LlamaConfig's.
META_FIELDS = ("dim", "n_layers", "n_heads", "n_kv_heads", "norm_eps", "rope_theta")


def open_meta(directory: Path) -> tuple[LlamaConfig, Weights]:
    """Open a directory with params.json and consolidated.00.pth, consolidated.01.pth, ...

    Several files are the shards of tensor parallelism: each has some rows or some columns of every
    matrix, and all norms. What params.json lacks is taken from the weights or from a rule:

        vocab_size, ffn_dim   the sizes of their matrices
        tie_embeddings        there is no output, or its shards equal those of the embedding
        rope_scaling          1 without use_scaled_rope; else rope_scaling_factor, if it is there;
                              else 32 for tied embeddings (Llama 3.2 1B and 3B), 8 for others
        max_seq_len           131,072 tokens with use_scaled_rope, 8,192 without"""
    path = directory / "params.json"
    files = sorted(filter(Path.is_file, directory.glob("consolidated.*.pth")))
    if not files:
        raise UserError(f"{directory} has a params.json and no consolidated.00.pth beside it")
    params, shards = JsonFile(path), [_load_pth(file) for file in files]
    n_shards = len(shards)
    shard_shapes = {name: tuple(weight.shape) for name, weight in shards[0].items()}
    for file, shard in zip(files, shards):
        check_weights(shard, shard_shapes, file)
    embedding, w1 = "tok_embeddings.weight", "layers.0.feed_forward.w1.weight"
    if not all(len(shard_shapes.get(name, ())) == 2 for name in (embedding, w1)):
        raise UserError(f"the weights in {directory} are not this Llama's: no {embedding}, {w1}")
    rows, columns = shard_shapes[embedding]
    rows_sharded = columns == params["dim"]  # Llama 2 shards the columns of the embedding
    tied = "output.weight" not in shard_shapes or all(
        torch.equal(shard["output.weight"], shard[embedding]) for shard in shards
    )
    scaled, default_scaling = params.get("use_scaled_rope"), 32.0 if tied else 8.0
    params["n_kv_heads"] = params.get("n_kv_heads") or params["n_heads"]
    params.setdefault("rope_theta", 10_000.0)
    config = checked_config(
        params,
        LlamaConfig,
        **{name: params[name] for name in META_FIELDS},
        ffn_dim=shard_shapes[w1][0] * n_shards,
        vocab_size=rows * n_shards if rows_sharded else rows,
        max_seq_len=131_072 if scaled else 8192,
        rope_scaling=params.get("rope_scaling_factor", default_scaling) if scaled else 1.0,
        tie_embeddings=tied,
    )
    full_shapes = parameter_shapes(config)

    def join(name: str, shape: tuple[int, ...]) -> StoredTensor:
        """Concatenate the shards of a weight along the dimension in which they are not full."""
        sizes = zip(shape, full_shapes.get(name, shape))
        dim = next((d for d, (size, full_size) in enumerate(sizes) if size != full_size), None)
        if dim is None:  # a norm, which is full in every shard, or the only shard
            return StoredTensor.of(shards[0][name])
        joined_shape = (*shape[:dim], shape[dim] * n_shards, *shape[dim + 1 :])
        read = partial(torch.cat, [shard[name] for shard in shards], dim)
        return StoredTensor(shards[0][name].dtype, joined_shape, read)

    weights = {name: join(name, shape) for name, shape in shard_shapes.items()}
    if tied:
        weights.pop("output.weight", None)
    check_weights(weights, full_shapes, directory)
    return config, weights


def _load_pth(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a file that torch.save has written, memory-mapped.

    weights_only lets pickle build tensors and nothing else, so no code of the file can run."""
    try:
        content = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except Exception as error:  # a damaged file can raise nearly anything
        raise UserError(f"{path} is damaged, or holds more than weights ({type(error).__name__})")
    if not isinstance(content, dict) or not all(isinstance(w, Tensor) for w in content.values()):
        raise UserError(f"{path} is no Llama: it holds more than named tensors")
    return {name: weight for name, weight in content.items() if name != "rope.freqs"}
