"""Read the model directories of Hugging Face; meta.py reads Meta's.

Both hold the same weights. They differ in the names of the weights, in the order of the rows of wq
and wk, in the number of files, and in how they describe the model's shape. Opening either gives a
configuration and a StoredTensor for each weight, with Meta's names and Meta's order of rows.

Files are memory-mapped, and a weight is read only when `StoredTensor.read` is called. So a process
that loads its shard of a 70B model holds one full matrix at a time beside its shard.
"""

import functools
import math
import re
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from files import published
from files.safetensors import StoredTensor, Weights, open_safetensors
from model import LlamaConfig
from models.family import families, family_of, own_fields
from plumbing.json_files import JsonFile
from plumbing.messages import UserError, print_rank_zero

Shapes = dict[str, tuple[int, ...]]
SAMPLE = 256  # bytes, of at most about SAMPLES places in a file
SAMPLES = 512

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
    match = re.fullmatch(r"(layers\.\d+\.|)((.+)\.(weight|bias))", name)
    if match and match[2] in names:
        found = names[match[2]]
    elif match and match[3] in names:
        found = f"{names[match[3]]}.{match[4]}"
    else:
        raise UserError(f"a published Llama has no parameter like {name} of model.py")
    return f"model.{match[1]}{found}" if match[1] else found


def all_names(config: LlamaConfig) -> dict[str, str]:
    """Return Hugging Face's names of a model's modules; of one that nobody else knows, Llama's."""
    as_published = family_of(config).published
    return HF_NAMES | as_published.names if as_published else HF_NAMES


def hf_names(name: str, config: LlamaConfig, shape: tuple[int, ...]) -> list[str]:
    """Return Hugging Face's name of a parameter; of stacked matrices, the name of each."""
    published.family_for_others(config)  # raises for what nobody else knows
    found = hf_name(name, all_names(config))
    if "{}" not in found:
        return [found]
    return [found.format(i) for i in range(shape[0])]


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
    if as_published := family_of(config).published:
        paired |= as_published.paired(config)
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


def checked_config(file: JsonFile, kind: type[LlamaConfig], **fields: Any) -> LlamaConfig:
    """Return a configuration with these fields, which come from a file and are checked."""
    default = kind()
    family = family_of(default)
    for name, value in fields.items():
        usual = getattr(default, name, None)
        like = value if usual is None else usual
        limit = 2**10 if name == "n_layers" else 2**31  # building a million layers takes hours
        above = 0
        if name in own_fields(kind):
            above = -1
            if family.digest:  # of a student's file: may be any number
                above, limit = -math.inf, math.inf
        fields[name] = file.checked(name, value, type(like), limit, above)
    try:
        config = kind(**fields)
        if config.dim * (config.q_dim + config.ffn_dim + config.vocab_size) >= 2**50:
            raise ValueError("it has more than a quadrillion weights")
        return config
    except (TypeError, ValueError) as error:  # TypeError: there is no such field
        raise UserError(f"{file.path} describes no {family.name} of these files: {error}")


# ---------------------------------------------------------------------------------- Hugging Face

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


def is_meta(directory: Path) -> bool:
    return (directory / "params.json").is_file()


def is_hf(directory: Path) -> bool:
    path = directory / "config.json"
    return path.is_file() and "model_type" in JsonFile(path)


def hf_config(directory: Path) -> LlamaConfig:
    """Return the configuration in a config.json of transformers 4 or 5.

    Raises UserError for models other than Llama, and for variants that model.py does not have."""
    path = directory / "config.json"
    content = JsonFile(path)
    kind = content.checked("model_type", content["model_type"], str)
    known = {family.name: family for family in families().values() if family.published}
    if kind not in known:
        raise UserError(f"{path} has model_type {kind}: only {', '.join(known)} work here")
    family = known[kind]
    as_published = family.published
    nulls = {"num_key_value_heads": content.get("num_attention_heads")} | as_published.nulls
    for key in [key for key, value in content.items() if value is None]:
        del content[key]  # any other null is a missing field
        if key in nulls:
            content[key] = nulls[key]
    as_published.prepare(content)
    # transformers 4 has rope_theta, and rope_scaling beside it, if any. transformers 5 has both in
    # one dictionary, rope_parameters; but a rope_scaling that was added by hand replaces all of it.
    rope = content.get("rope_scaling") or content.get("rope_parameters") or {}
    if not isinstance(rope, dict):
        raise UserError(f"{path} is damaged: its RoPE is {rope}")
    fields = HF_FIELDS | as_published.fields
    if content.get("quantization_config"):
        raise UserError(f"{path} has quantized weights: give the model they were made from")
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    scaling = as_published.scaling or SUPPORTED_SCALING
    scaled = scaling["rope_type"]
    if rope_type not in ("default", scaled):
        raise UserError(
            f"{path} has RoPE of type '{rope_type}': only default and {scaled} work here"
        )
    supported = SUPPORTED | (scaling if rope_type == scaled else {})
    supported |= as_published.supported
    defaults = {"tie_word_embeddings": False, "num_key_value_heads": content["num_attention_heads"]}
    defaults |= SUPPORTED | as_published.defaults
    for new, old in as_published.renamed.items():
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
    return checked_config(content, family.config, **values | as_published.read(content))


@functools.cache
def note(text: str) -> None:
    """Print a note on rank 0, the same text only once."""
    print_rank_zero(f"note: {text}", file=sys.stderr)


def open_hf(directory: Path) -> tuple[LlamaConfig, Weights]:
    """Open a directory that transformers' save_pretrained has written."""
    config = hf_config(directory)
    ignored = published.family_for_others(config).published.ignored
    found: Weights = {}
    for path in hf_files(directory):
        for name, tensor in open_safetensors(path).items():
            if name in found:
                raise UserError(f"{directory} has {name} in two files")
            if what := ignored(name, config):
                note(f"{directory} also has {what}, which is not read")
            elif not name.endswith("rotary_emb.inv_freq"):
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


def samples_of_weights(directory: Path) -> bytes:
    """Return some bytes of each part of the files with weights, of Meta's or of transformers': few
    enough to be read in a moment, and changed by any training."""
    is_metas = is_meta(directory)
    files = sorted(directory.glob("consolidated.*.pth")) if is_metas else hf_files(directory)
    samples = b""
    for path in files:
        size = path.stat().st_size
        samples += f"{path.name} {size} ".encode()
        with open(path, "rb") as file:
            for start in range(0, size, max(SAMPLE, size // SAMPLES)):
                file.seek(start)
                samples += file.read(SAMPLE)
    return samples


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
