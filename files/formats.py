"""Read the model directories of Hugging Face and of Meta, and write Hugging Face's.

Both hold the same weights. They differ in the names of the weights, in the order of the rows of wq
and wk, in the number of files, and in how they describe the model's shape. Opening either gives a
LlamaConfig and a StoredTensor for each weight, with Meta's names and Meta's order of rows.

Files are memory-mapped, and a weight is read only when `StoredTensor.read` is called. So a process
that loads its shard of a 70B model holds one full matrix at a time beside its shard.
"""

import functools
import json
import re
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from files import published
from files.safetensors import StoredTensor, Weights, open_safetensors, save_safetensors
from model import KVCache, LlamaConfig
from models.family import families, family_of
from plumbing.json_files import JsonFile
from plumbing.messages import UserError, print_rank_zero
from text.vocabulary import Tokenizer

Shapes = dict[str, tuple[int, ...]]

# -------------------------------------------------------------------------- names and row orders

HF_NAMES = {
    "tok_embeddings": "model.embed_tokens",
    "attention_norm": "input_layernorm",
    "attention.wq": "self_attn.q_proj",
    "attention.wk": "self_attn.k_proj",
    "attention.wv": "self_attn.v_proj",
    "attention.wo": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w2": "mlp.down_proj",
    "feed_forward.w3": "mlp.up_proj",
    "norm": "model.norm",
    "output": "lm_head",
}


def hf_name(name: str, names: dict[str, str] = HF_NAMES) -> str:
    """Return Hugging Face's name of a weight or a bias.

    layers.3.attention.wq.weight -> model.layers.3.self_attn.q_proj.weight"""
    match = re.fullmatch(r"(layers\.\d+\.|)(.+)\.(weight|bias)", name)
    if not match or match[2] not in names:
        raise UserError(f"a published Llama has no parameter like {name} of model.py")
    return f"{'model.' if match[1] else ''}{match[1]}{names[match[2]]}.{match[3]}"


def hf_names(name: str, config: LlamaConfig, shape: tuple[int, ...]) -> list[str]:
    """Return Hugging Face's name of a parameter; of stacked matrices, the name of each."""
    family = published.family_for_others(config)
    found = hf_name(name, HF_NAMES | family.published.names)
    if "{}" not in found:
        return [found]
    return [found.format(i) for i in range(shape[0])]


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


@functools.lru_cache(1)  # once for all stacked matrices, which are written one after the other
def _last_read(weight: StoredTensor) -> Tensor:
    return weight.read()


def reorder_rows(
    head_shape: tuple[int, int], name: str, config: LlamaConfig, tensor: Tensor
) -> Tensor:
    """Return a weight or LoRA factor with its rows in the order of Meta or of Hugging Face.

    RoPE rotates the rows of a head in pairs: rows of wq and wk, of their biases, of their adapter's
    B and magnitudes, and of the norms of queries and keys, which all heads share. Meta puts the two
    rows of a pair next to each other, so that a head is [E/2, 2]; Hugging Face puts row i of a head
    with row i + E/2: [2, E/2]. `head_shape` is a head's shape before, with -1 for E/2. Any other
    tensor is returned as it is."""
    *_, matrix, kind = name.split(".")
    paired = {"wq": config.n_heads, "wk": config.n_kv_heads}
    if others := family_of(config).published:
        paired |= others.paired(config)
    heads = paired.get(matrix)
    if not heads or kind == "lora_A":
        return tensor
    return tensor.unflatten(0, (heads, *head_shape)).transpose(1, 2).flatten(0, 2)


to_hf_rows = partial(reorder_rows, (-1, 2))
to_meta_rows = partial(reorder_rows, (2, -1))


def parameter_shapes(config: LlamaConfig) -> Shapes:
    """Return the shape of every parameter of a model. A tied output is not listed."""
    with torch.device("meta"):
        return {name: tuple(p.shape) for name, p in config.build().named_parameters()}


def check_weights(found: Weights | dict[str, Tensor], expected: Shapes, source: Path) -> None:
    """Raise UserError unless the weights have exactly the expected names and shapes."""
    of_other_shapes, of_integers = [], []
    for name in found.keys() & expected.keys():
        shape = tuple(found[name].shape)
        if shape != expected[name]:
            of_other_shapes.append(f"{name} {list(shape)}, not {list(expected[name])}")
        if not found[name].dtype.is_floating_point:
            of_integers.append(name)
    problems = {
        "lacks {} tensor(s)": expected.keys() - found.keys(),
        "has {} unknown tensor(s)": found.keys() - expected.keys(),
        "has {} tensor(s) of other shapes": of_other_shapes,
        "has {} tensor(s) of integers": of_integers,
    }
    messages = []
    for problem, names in problems.items():
        if names:
            some = sorted(names)[:5]
            if len(names) > 5:
                some.append("...")
            messages.append(f"it {problem.format(len(names))}: {', '.join(some)}")
    if messages:
        raise UserError(f"the weights in {source} are not this Llama's: {'; '.join(messages)}")


def check_is_published(config: LlamaConfig, weights: Weights) -> None:
    """Raise UserError if a model is not what others publish: if its code has other weights, or
    computes other logits. One with a padded vocabulary computes the same logits, and is none."""
    for name in weights:
        hf_names(name, config, (1,))
    rows = weights["tok_embeddings.weight"].shape[0]
    if rows != config.vocab_size:
        raise UserError(
            f"model.py has been changed and embeds {rows} tokens, of which {config.vocab_size} "
            f"exist: a published Llama has no others"
        )
    family = published.family_for_others(config)
    computes_the_same = published.computes(family.published.logits, family)
    if not (computes_the_same and attends_as_far_as_told(family.small_config)):
        raise UserError(
            "model.py has been changed and no longer computes a published Llama: other programs "
            "would compute other logits from the exported weights"
        )


@torch.enable_grad()
def attends_as_far_as_told(config: LlamaConfig) -> bool:
    """Return whether logits have a gradient at the first of 32,768 cached tokens in each layer, or
    at the first in its window, if it has one: a window may be longer than published.TOKENS."""
    model = published.with_fixed_weights(config.build().double())
    cache = KVCache()
    position = cache.add_positions(torch.arange(32_768)[None])[:, -1:] + 1
    shape = 1, 32_768, config.n_kv_heads, config.head_dim
    values = []
    for layer in range(config.n_layers):
        value = torch.zeros(shape, dtype=torch.float64, requires_grad=True)
        cache.add(layer, torch.zeros_like(value), value)
        values.append(value)
    logits = model(torch.zeros_like(position), positions=position, cache=cache)
    logits.sum().backward()
    for value, window in zip(values, config.windows or [0] * config.n_layers):
        sees = value.grad[0].flatten(1).any(1)  # [32,768]
        first = 32_768 - (window - 1) if window else 0
        if sees[:first].any() or not sees[first]:
            return False
    return True


def checked_config(file: JsonFile, kind: type[LlamaConfig], **fields: Any) -> LlamaConfig:
    """Return a configuration with these fields, which come from a file and are checked."""
    default = kind()
    for name, value in fields.items():
        own = getattr(default, name, None)
        like = own if isinstance(own, int | float | str) else value
        limit = 2**10 if name == "n_layers" else 2**31  # building a million layers takes hours
        fields[name] = file.checked(name, value, type(like), limit)
    try:
        config = kind(**fields)
        if config.dim * (config.q_dim + config.ffn_dim + config.vocab_size) >= 2**50:
            raise ValueError("it has more than a quadrillion weights")
        return config
    except (TypeError, ValueError) as error:  # TypeError: there is no such field
        family = family_of(default).name
        raise UserError(f"{file.path} describes no {family} of these files: {error}")


# ---------------------------------------------------------------------------------- Hugging Face

MAX_FILE_BYTES = 5_000_000_000  # a larger model is written in several files

HF_FIELDS = {  # LlamaConfig's fields -> those of a config.json with the same values
    "dim": "hidden_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "n_kv_heads": "num_key_value_heads",
    "ffn_dim": "intermediate_size",
    "vocab_size": "vocab_size",
    "max_seq_len": "max_position_embeddings",
    "norm_eps": "rms_norm_eps",
    "rope_theta": "rope_theta",
    "tie_embeddings": "tie_word_embeddings",
}
# The only values of a config.json that this project supports, in general and for scaled RoPE.
SUPPORTED = dict(hidden_act="silu", attention_bias=False, mlp_bias=False, use_sliding_window=False)
SUPPORTED_SCALING = dict(
    rope_type="llama3", low_freq_factor=1, high_freq_factor=4, original_max_position_embeddings=8192
)


def is_hf(directory: Path) -> bool:
    path = directory / "config.json"
    return path.is_file() and "model_type" in JsonFile(path)


def hf_config(directory: Path) -> LlamaConfig:
    """Return the configuration in a config.json of transformers 4 or 5.

    Raises UserError for models other than Llama, and for variants that model.py does not have."""
    path = directory / "config.json"
    content = JsonFile(path)
    if content.get("num_key_value_heads", 0) is None:
        content["num_key_value_heads"] = content.get("num_attention_heads")
    for key in [key for key, value in content.items() if value is None]:
        del content[key]  # any other null is a missing field
    kind = content.checked("model_type", content["model_type"], str)
    known = {family.name: family for family in families().values() if family.published}
    if kind not in known:
        raise UserError(f"{path} has model_type {kind}: only {', '.join(known)} work here")
    family = known[kind]
    others = family.published
    others.prepare(content)
    # transformers 4 has rope_theta, and rope_scaling beside it, if any. transformers 5 has both in
    # one dictionary, rope_parameters; but a rope_scaling that was added by hand replaces all of it.
    rope = content.get("rope_scaling") or content.get("rope_parameters") or {}
    if not isinstance(rope, dict):
        raise UserError(f"{path} is damaged: its RoPE is {rope}")
    fields = HF_FIELDS | others.fields
    if content.get("quantization_config"):
        raise UserError(f"{path} has quantized weights: give the model they were made from")
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    scaling = others.scaling or SUPPORTED_SCALING
    scaled = scaling["rope_type"]
    if rope_type not in ("default", scaled):
        raise UserError(
            f"{path} has RoPE of type '{rope_type}': only default and {scaled} work here"
        )
    supported = SUPPORTED | (scaling if rope_type == scaled else {})
    supported |= others.supported
    defaults = {"tie_word_embeddings": False, "num_key_value_heads": content["num_attention_heads"]}
    defaults |= SUPPORTED | others.defaults
    for new, old in others.renamed.items():
        if new in content:
            defaults[old] = content[new]
    original = "original_max_position_embeddings"
    if original in content:  # which transformers prefers to the one among RoPE's fields
        rope = rope | {original: content[original]}
    content.update(defaults | content | rope | {"rope_type": rope_type})
    for key, value in supported.items():
        if content.get(key) != value:
            raise UserError(f"{path} has {key} {content.get(key)}: only {value} works here")
    values = {name: content[key] for name, key in fields.items()}
    if "head_dim" in content:
        values["head_dim"] = content["head_dim"]
    if rope_type == scaled:
        values["rope_scaling"] = rope.get("factor")
    return checked_config(content, family.config, **values | others.read(content))


@functools.cache
def note(text: str) -> None:
    """Say once what was taken of two things."""
    print_rank_zero(f"note: {text}", file=sys.stderr)


def open_hf(directory: Path) -> tuple[LlamaConfig, Weights]:
    """Open a directory that transformers' save_pretrained has written."""
    config = hf_config(directory)
    found: Weights = {}
    for path in hf_files(directory):
        for name, tensor in open_safetensors(path).items():
            if name in found:
                raise UserError(f"{directory} has {name} in two files")
            if not name.endswith("rotary_emb.inv_freq"):
                found[name] = tensor
    if config.tie_embeddings and "lm_head.weight" in found:
        output = found.pop("lm_head.weight")
        embedding = found.get("model.embed_tokens.weight")
        if embedding and not torch.equal(output.read(), embedding.read()):
            raise UserError(f"{directory} ties embeddings, but has another lm_head.weight")

    shapes = parameter_shapes(config)
    expected = {}
    for name, shape in shapes.items():
        names = hf_names(name, config, shape)
        expected |= dict.fromkeys(names, shape[1:] if len(names) > 1 else shape)
    check_weights(found, expected, directory)

    def read(name: str, names: list[str]) -> Tensor:
        tensors = [found[part].read() for part in names]
        whole = torch.stack(tensors) if len(tensors) > 1 else tensors[0]
        return to_meta_rows(name, config, whole)

    weights = {}
    for name, shape in shapes.items():
        names = hf_names(name, config, shape)
        weights[name] = StoredTensor(found[names[0]].dtype, shape, partial(read, name, names))
    return config, weights


def hf_files(directory: Path) -> list[Path]:
    """Return the files that hold the weights of a directory of transformers."""
    whole = directory / "model.safetensors"
    index = directory / "model.safetensors.index.json"
    if whole.exists():  # as transformers does
        if index.exists():
            note(f"{directory} has {whole.name}, which is read, and shards, which are not")
        return [whole]
    if index.exists():
        content = JsonFile(index)
        weight_map = content.checked("weight_map", content["weight_map"], dict)
        files = [directory / name for name in sorted({*map(str, weight_map.values())})]
    else:
        files = sorted(directory.glob("model*.safetensors"))
    if not files:
        raise UserError(f"{directory} has a config.json and no model.safetensors beside it")
    for path in files:
        if not path.is_file():
            raise UserError(f"{directory} lacks {path.name}, which {index.name} lists")
    return files


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


# ------------------------------------------------------------------------------------------ Meta

# The fields of a params.json that have the names and values of LlamaConfig's.
META_FIELDS = ("dim", "n_layers", "n_heads", "n_kv_heads", "norm_eps", "rope_theta")


def is_meta(directory: Path) -> bool:
    return (directory / "params.json").is_file()


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
