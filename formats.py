"""Other people's files: safetensors, and the directories of Hugging Face and of Meta, with the
tokenizer.json that the first of them have.

All hold the same numbers. They differ in what the weights are called, in how the rows of wq and wk
are ordered, in how many files there are, and in what is said about the shape. Here each becomes a
LlamaConfig and a `Stored` for each weight, under Meta's names and in Meta's order. Files are
mapped, and a weight is read when `Stored.read` asks for it: a process that wants its part of a 70B
model holds one matrix at a time beside that part.
"""

import json
import math
import os
import re
import sys
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from model import Llama, LlamaConfig, UserError


@dataclass(frozen=True)
class Stored:
    """A tensor that lies in a file. `read` gives it in full: mapped from the file, or built."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    read: Callable[[], Tensor]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


# ------------------------------------------------------------------------------------- safetensors
#
#     8 bytes        N, little-endian
#     N bytes        JSON: {name: {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}, ...}
#     the rest       the tensors' bytes, without gaps, where the offsets say; little-endian
#
# No code in it and nothing to unpickle: so it is safe to read what a stranger wrote, if a reader
# believes nothing that the header says before it has checked it.

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "C64": torch.complex64,
}
HEADER_BYTES = 100_000_000  # longest header: the limit that the safetensors package has


def open_safetensors(path: Path) -> dict[str, Stored]:
    """The tensors of a file by name, still in the file. UserError for one that is malformed."""

    def refuse(why: str):
        raise UserError(f"{path} is no safetensors file, or damaged: {why}")

    def no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            refuse("a name stands twice in its header")
        return found

    size = path.stat().st_size
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(size - 8, HEADER_BYTES):
            refuse(f"a header of {length:,} bytes in a file of {size:,}")
        header = file.read(length)
    try:
        entries = json.loads(header.decode(), object_pairs_hook=no_duplicates)
    except (ValueError, RecursionError) as error:  # of JSON or UTF-8; nested too deep
        refuse(f"its header is not JSON ({type(error).__name__})")
    if not isinstance(entries, dict) or not header.startswith(b"{"):
        refuse("its header is no JSON object")
    metadata = entries.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        refuse("its __metadata__ is not text")

    stored, ends = {}, []
    for name, entry in entries.items():
        if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
            refuse(f"{name!r} does not have a dtype, a shape and data_offsets")
        dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
        if not isinstance(dtype, str) or dtype not in DTYPES:
            refuse(f"{name!r} is of unknown dtype {dtype!s:.200}")
        if not _counts(shape) or len(shape) > 64 or math.prod(max(n, 1) for n in shape) >= 2**63:
            refuse(f"{name!r} cannot have shape {shape!s:.200}")
        if not _counts(offsets) or len(offsets) != 2:
            refuse(f"{name!r} cannot have data_offsets {offsets!s:.200}")
        begin, end = offsets
        if begin + math.prod(shape) * DTYPES[dtype].itemsize != end:
            refuse(f"{name!r} of shape {shape} in {dtype} does not fill {offsets}")
        place = partial(_map, path, size, 8 + length + begin, DTYPES[dtype], tuple(shape))
        stored[name] = Stored(DTYPES[dtype], tuple(shape), place)
        ends.append((begin, end))
    reached = 0
    for begin, end in sorted(ends):
        if begin != reached:
            refuse(f"its tensors overlap or leave a gap at byte {min(begin, reached):,}")
        reached = end
    if 8 + length + reached != size:
        refuse(f"{size:,} bytes where its header says {8 + length + reached:,}")
    return stored


def _counts(value: Any) -> bool:
    """Whether this is a list of whole numbers, none below 0."""
    return isinstance(value, list) and all(type(n) is int and n >= 0 for n in value)


def _map(path: Path, size: int, begin: int, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """A tensor over a file's bytes from `begin` on. Only what is used of it is read; and the file
    is let go of with the tensor."""
    if path.stat().st_size != size:
        raise UserError(f"{path} has changed while it was read")
    file = torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8)
    raw = file[begin : begin + math.prod(shape) * dtype.itemsize]
    if begin % dtype.itemsize:  # not where numbers of this size may lie in memory
        raw = raw.clone()
    return raw.view(dtype).view(shape)


def save_safetensors(path: Path, tensors: dict[str, Stored], metadata: dict[str, str]) -> None:
    """Write a file, one tensor at a time. Wide types come first, so that all are aligned."""
    if sys.byteorder != "little":
        raise UserError("safetensors files are little-endian, this machine is not")
    names = {dtype: name for name, dtype in DTYPES.items()}
    order = sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name))
    header, end = {"__metadata__": metadata}, 0
    for name in order:
        begin, end = end, end + tensors[name].nbytes
        header[name] = {
            "dtype": names[tensors[name].dtype],
            "shape": tensors[name].shape,
            "data_offsets": (begin, end),
        }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in order:
            flat = tensors[name].read().contiguous().view(-1)
            file.write(flat.view(torch.uint8).numpy())
        file.flush()
        os.fsync(file.fileno())


# ------------------------------------------------------------------------- names and order of rows

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


def hf_name(name: str) -> str:
    """layers.3.attention.wq.weight -> model.layers.3.self_attn.q_proj.weight"""
    layer, rest = re.fullmatch(r"(layers\.\d+\.|)(.+)\.weight", name).groups()
    return f"{'model.' if layer else ''}{layer}{HF_NAMES[rest]}.weight"


def rotated_heads(name: str, config: LlamaConfig) -> int:
    """How many heads a weight makes that RoPE turns: of wq and wk, in whose rows files differ."""
    return {"wq": config.n_heads, "wk": config.n_kv_heads}.get(name.split(".")[-2], 0)


def pairs_to_halves(weight: Tensor, heads: int) -> Tensor:
    """Meta's order of a head's rows, (0 1) (2 3)... turned together, to Hugging Face's, where row i
    turns with row i + E/2. weight [heads * E, any] -> a copy of the same shape."""
    return weight.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)


def halves_to_pairs(weight: Tensor, heads: int) -> Tensor:
    """The way back."""
    return weight.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)


def shapes(config: LlamaConfig) -> dict[str, tuple[int, ...]]:
    """Every parameter of a model and its shape; a tied output is not one of its own."""
    with torch.device("meta"):
        return {name: tuple(p.shape) for name, p in Llama(config).named_parameters()}


def match(found: dict[str, Any], expected: dict[str, tuple[int, ...]], where: Path) -> None:
    """Refuse weights (Stored, or tensors) that are not exactly those expected, and say which."""
    shared = found.keys() & expected.keys()
    problems = {
        "lacks": expected.keys() - found.keys(),
        "has unknown": found.keys() - expected.keys(),
        "has other shapes": {
            f"{name} {list(found[name].shape)}, not {list(expected[name])}"
            for name in shared
            if tuple(found[name].shape) != expected[name]
        },
        "has whole numbers": {n for n in shared if not found[n].dtype.is_floating_point},
    }
    told = [
        f"{what} {len(names)}: {', '.join(sorted(names)[:5])}{', ...' if len(names) > 5 else ''}"
        for what, names in problems.items()
        if names
    ]
    if told:
        raise UserError(f"the weights in {where} are not this Llama's: it {'; it '.join(told)}")


class Json(dict):
    """What a JSON file says. Asked for what it does not say, it tells the user."""

    def __init__(self, path: Path):
        try:
            content = json.loads(path.read_text())
        except (ValueError, RecursionError) as error:
            raise UserError(f"{path} is damaged: {error}")
        if not isinstance(content, dict):
            raise UserError(f"{path} is damaged: no JSON object")
        super().__init__(content)
        self.path = path

    def __missing__(self, key: str):
        raise UserError(f"{self.path} does not say '{key}'")

    def config(self, **sizes: Any) -> LlamaConfig:
        """A LlamaConfig of what was found here, if every value is of the type it should be."""
        example = LlamaConfig()
        for name, value in sizes.items():
            kind = type(getattr(example, name))
            fits = type(value) is bool
            if kind is not bool:
                limit = 2**10 if name == "n_layers" else 2**31
                fits = type(value) in (kind, int) and 0 < value < limit
            if not fits:
                raise UserError(f"{self.path} is damaged: {name} cannot be {value!r:.50}")
            sizes[name] = kind(value)
        return LlamaConfig(**sizes)


# ------------------------------------------------------------------------------------ Hugging Face


FILE_BYTES = 5_000_000_000  # at most so much in one file, one tensor at least

# What a config.json may say of things that are not configurable here, and of RoPE's scaling.
KNOWN = dict(model_type="llama", hidden_act="silu", attention_bias=False, mlp_bias=False)
KNOWN_SCALING = dict(
    rope_type="llama3", low_freq_factor=1, high_freq_factor=4, original_max_position_embeddings=8192
)


def is_hf(directory: Path) -> bool:
    path = directory / "config.json"
    return path.is_file() and "model_type" in Json(path)


def hf_config(directory: Path) -> LlamaConfig:
    """The shape that a config.json of transformers 4.x or 5.x describes."""
    path = directory / "config.json"
    about = Json(path)
    # 4.x has rope_theta beside rope_scaling, which is null without scaling; 5.x has one dictionary.
    rope = about.get("rope_parameters") or about.get("rope_scaling") or {}
    if not isinstance(rope, dict):
        raise UserError(f"{path} is damaged: its RoPE is {rope}")
    if about.get("quantization_config"):
        raise UserError(f"{path} has quantized weights: take the model they were made from")
    kind = rope.get("rope_type", rope.get("type", "default"))
    only = {key: about.get(key, value) for key, value in KNOWN.items()}
    if kind == "llama3":
        only |= {key: rope.get(key) for key in KNOWN_SCALING}
    elif kind != "default":
        raise UserError(f"{path} has RoPE of type '{kind}': only default and llama3 are known here")
    for key, value in only.items():
        if value != (known := (KNOWN | KNOWN_SCALING)[key]):
            raise UserError(f"{path} has {key} {value}: only {known} is known here")
    config = about.config(
        dim=about["hidden_size"],
        n_layers=about["num_hidden_layers"],
        n_heads=about["num_attention_heads"],
        n_kv_heads=about.get("num_key_value_heads", about["num_attention_heads"]),
        ffn_dim=about["intermediate_size"],
        vocab_size=about["vocab_size"],
        max_seq_len=about["max_position_embeddings"],
        norm_eps=about["rms_norm_eps"],
        rope_theta=rope.get("rope_theta", about.get("rope_theta", 10_000.0)),
        rope_scaling=rope.get("factor") if kind == "llama3" else 1.0,
        tie_embeddings=about.get("tie_word_embeddings", False),
    )
    if about.get("head_dim") not in (None, config.head_dim):
        raise UserError(f"{path} has head_dim {about['head_dim']}: only {config.head_dim} is known")
    return config


def open_hf(directory: Path) -> tuple[LlamaConfig, dict[str, Stored]]:
    """A directory as transformers' save_pretrained writes it."""
    config = hf_config(directory)
    index = directory / "model.safetensors.index.json"
    if index.exists():
        files = Json(index)["weight_map"]
        if not isinstance(files, dict) or any(Path(str(n)).name != n for n in files.values()):
            raise UserError(f"{index} is damaged: weight_map has no names of files here")
        files = sorted(set(files.values()))
    else:
        files = sorted(path.name for path in directory.glob("model*.safetensors"))
    if missing := [name for name in files if not (directory / name).is_file()]:
        raise UserError(f"{directory} lacks {', '.join(missing)}, which {index.name} lists")
    if not files:
        raise UserError(f"{directory} has a config.json and no model.safetensors beside it")
    found: dict[str, Stored] = {}
    for name in files:
        tensors = open_safetensors(directory / name)
        if twice := found.keys() & tensors.keys():
            raise UserError(f"{directory} has {min(twice)} in two files")
        found |= tensors
    found = {name: t for name, t in found.items() if not name.endswith("rotary_emb.inv_freq")}
    if config.tie_embeddings and "lm_head.weight" in found:
        output, embedding = found.pop("lm_head.weight"), found.get("model.embed_tokens.weight")
        if embedding and not torch.equal(output.read(), embedding.read()):
            raise UserError(f"{directory} ties embeddings, but has another lm_head.weight")

    ours = shapes(config)
    match(found, {hf_name(name): shape for name, shape in ours.items()}, directory)

    def read(name: str) -> Tensor:
        weight, heads = found[hf_name(name)].read(), rotated_heads(name, config)
        return halves_to_pairs(weight, heads) if heads else weight

    return config, {
        name: Stored(found[hf_name(name)].dtype, shape, partial(read, name))
        for name, shape in ours.items()
    }


def save_hf(
    directory: Path,
    config: LlamaConfig,
    weights: dict[str, Stored],
    bos: int | None = None,
    eos: list[int] | None = None,
) -> None:
    """Write what transformers' from_pretrained, of 4.x or 5.x, takes. It stops generating at any
    token of `eos`, and with None never; without a word about it, it would stop at token 2."""

    def read(name: str) -> Tensor:
        weight, heads = weights[name].read(), rotated_heads(name, config)
        return pairs_to_halves(weight, heads) if heads else weight

    files, filled = [{}], 0
    for name, weight in weights.items():
        if filled and filled + weight.nbytes > FILE_BYTES:
            files.append({})
            filled = 0
        files[-1][hf_name(name)] = Stored(weight.dtype, weight.shape, partial(read, name))
        filled += weight.nbytes
    names = ["model.safetensors"]
    if len(files) > 1:
        n = len(files)
        names = [f"model-{i:05d}-of-{n:05d}.safetensors" for i in range(1, n + 1)]
        index = {
            "metadata": {"total_size": sum(weight.nbytes for weight in weights.values())},
            "weight_map": {t: name for name, file in zip(names, files) for t in file},
        }
        (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
    for name, file in zip(names, files):
        save_safetensors(directory / name, file, {"format": "pt"})

    scaling = KNOWN_SCALING | {"factor": config.rope_scaling}
    dtype = weights["tok_embeddings.weight"].dtype
    about = KNOWN | {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": config.dim,
        "num_hidden_layers": config.n_layers,
        "num_attention_heads": config.n_heads,
        "num_key_value_heads": config.n_kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.ffn_dim,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_seq_len,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        "rope_scaling": scaling if config.rope_scaling != 1.0 else None,
        "tie_word_embeddings": config.tie_embeddings,
        "bos_token_id": bos,
        "eos_token_id": eos,
        "torch_dtype": str(dtype).removeprefix("torch."),
    }
    (directory / "config.json").write_text(json.dumps(about, indent=1))


# A byte in tokenizer.json is the character of that number where it prints; the 68 others are, in
# their order, the characters from 256 on.
PRINTS = [*range(33, 127), *range(161, 173), *range(174, 256)]
OTHERS = [byte for byte in range(256) if byte not in PRINTS]
CHARACTERS = {b: chr(b) for b in PRINTS} | {b: chr(256 + i) for i, b in enumerate(OTHERS)}

CHAT = (  # Llama 3's chat format, in Jinja
    "{{ bos_token }}{% for message in messages %}<|start_header_id|>{{ message.role }}"
    "<|end_header_id|>\n\n{{ message.content | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)


def save_tokenizer(
    directory: Path, ranks: dict[bytes, int], special: dict[str, int], split: str
) -> None:
    """Write the tokenizer.json and tokenizer_config.json that transformers' AutoTokenizer takes.

    `ranks` are the ordinary tokens, `split` the pattern that cuts text before bytes are merged."""

    def shown(token: bytes) -> str:
        return "".join(CHARACTERS[byte] for byte in token)

    merges = []  # every way to make a token of two others, as a list in the order to try them
    for token in sorted(ranks, key=ranks.get):
        halves = [(token[:i], token[i:]) for i in range(1, len(token))]
        ways = [pair for pair in halves if pair[0] in ranks and pair[1] in ranks]
        merges += sorted(ways, key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))
    plain = dict(single_word=False, lstrip=False, rstrip=False, normalized=False, special=True)
    cut = {"type": "Split", "pattern": {"Regex": split}, "behavior": "Isolated", "invert": False}
    spell = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": False,
    }
    about = {
        "version": "1.0",
        "added_tokens": [{"id": i, "content": text, **plain} for text, i in special.items()],
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [cut, spell]},
        "decoder": spell,
        "model": {
            "type": "BPE",
            "ignore_merges": True,  # a piece of text that is a token is that token
            "vocab": {shown(token): rank for token, rank in ranks.items()},
            "merges": [[shown(left), shown(right)] for left, right in merges],
        },
    }
    (directory / "tokenizer.json").write_text(json.dumps(about, ensure_ascii=False))
    about = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|begin_of_text|>",
        "eos_token": "<|eot_id|>",
        "chat_template": CHAT,
        "clean_up_tokenization_spaces": False,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(about, indent=1))


def load_ranks(path: Path, split: str) -> dict[bytes, int]:
    """The ordinary tokens of a tokenizer.json that cuts text as `split` does."""
    bytes_of = {character: byte for byte, character in CHARACTERS.items()}
    about = Json(path)
    try:
        steps = about["pre_tokenizer"].get("pretokenizers", [about["pre_tokenizer"]])
        patterns = [step["pattern"]["Regex"] for step in steps if step["type"] == "Split"]
        vocab = about["model"]["vocab"]
        ranks = {bytes(bytes_of[c] for c in shown): rank for shown, rank in vocab.items()}
    except (AttributeError, KeyError, TypeError) as error:
        raise UserError(f"{path} is no tokenizer of Llama 3: {type(error).__name__} {error}")
    if patterns != [split]:
        raise UserError(f"{path} is no tokenizer of Llama 3: it cuts text by {patterns}")
    return ranks


# -------------------------------------------------------------------------------------------- Meta


def is_meta(directory: Path) -> bool:
    return (directory / "params.json").is_file()


def open_meta(directory: Path) -> tuple[LlamaConfig, dict[str, Stored]]:
    """A directory with params.json and consolidated.00.pth; or several of these, each with a part
    of every matrix, of its rows or of its columns, and with all norms.

    params.json says less than the weights do. The sizes of the vocabulary and the feed-forward come
    from their matrices. Embeddings are tied where there is no output, or one that equals them. With
    `use_scaled_rope` the factor is 32 for models with tied embeddings, which are Llama 3.2 1B and
    3B, and 8 for others, unless `rope_scaling_factor` says another, as `save_meta` does where this
    rule would be wrong. The context is 8,192 tokens, or 131,072 with scaling.
    """
    path, files = directory / "params.json", sorted(directory.glob("consolidated.*.pth"))
    if not files:
        raise UserError(f"{directory} has a params.json and no consolidated.00.pth beside it")
    params, parts = Json(path), [_load_pth(file) for file in files]
    n, first = len(parts), {name: tuple(weight.shape) for name, weight in parts[0].items()}
    for file, part in zip(files, parts):
        match(part, first, file)
    embedding, w1 = "tok_embeddings.weight", "layers.0.feed_forward.w1.weight"
    if not all(len(first.get(name, ())) == 2 for name in (embedding, w1)):
        raise UserError(f"the weights in {directory} are not this Llama's: no {embedding}, {w1}")
    rows, columns = first[embedding]
    tied = "output.weight" not in first or all(
        torch.equal(part["output.weight"], part[embedding]) for part in parts
    )
    scaled, factor = params.get("use_scaled_rope"), 32.0 if tied else 8.0
    config = params.config(
        dim=params["dim"],
        n_layers=params["n_layers"],
        n_heads=params["n_heads"],
        n_kv_heads=params.get("n_kv_heads") or params["n_heads"],
        ffn_dim=n * first[w1][0],
        vocab_size=rows * n if columns == params["dim"] else rows,  # Llama 2 cuts columns
        max_seq_len=131_072 if scaled else 8192,
        norm_eps=params["norm_eps"],
        rope_theta=params.get("rope_theta", 10_000.0),
        rope_scaling=params.get("rope_scaling_factor", factor) if scaled else 1.0,
        tie_embeddings=tied,
    )
    ours = shapes(config)

    def whole(name: str, shape: tuple[int, ...]) -> Stored:
        """A weight joined along the dimension of which its parts do not have all."""
        sizes = zip(shape, ours.get(name, shape))
        cut = next((d for d, (size, all_of_it) in enumerate(sizes) if size != all_of_it), None)
        if cut is None:
            return Stored(parts[0][name].dtype, shape, lambda: parts[0][name])
        joined = (*shape[:cut], shape[cut] * n, *shape[cut + 1 :])
        read = partial(torch.cat, [part[name] for part in parts], cut)
        return Stored(parts[0][name].dtype, joined, read)

    weights = {name: whole(name, shape) for name, shape in first.items()}
    if tied:
        weights.pop("output.weight", None)
    match(weights, ours, directory)
    return config, weights


def _load_pth(path: Path) -> dict[str, Tensor]:
    """The tensors of a file that torch.save wrote, mapped. Of pickle, only what makes tensors is
    allowed. A damaged file can raise nearly anything."""
    with path.open("rb") as file:
        mapped = zipfile.is_zipfile(file)  # other files are older than torch 1.6
    try:
        content = torch.load(path, map_location="cpu", mmap=mapped, weights_only=True)
    except Exception as error:
        raise UserError(f"{path} is damaged, or holds more than weights ({type(error).__name__})")
    plain = isinstance(content, dict) and all(
        isinstance(name, str) and isinstance(weight, Tensor) and weight.layout == torch.strided
        for name, weight in content.items()
    )
    if not plain or any(weight.is_meta for weight in content.values()):
        raise UserError(f"{path} is no Llama: it holds more than named tensors")
    return {name: weight for name, weight in content.items() if name != "rope.freqs"}


def save_meta(directory: Path, config: LlamaConfig, weights: dict[str, Stored]) -> None:
    """Write params.json and one consolidated.00.pth, which takes the whole model in memory.

    params.json has no place for the length of the context. Meta's code knows no tied embeddings: an
    output is always written. It computes the width of the feed-forward as
    int(ffn_dim_multiplier * int(8 * dim / 3)), rounded up to multiple_of."""
    tensors = {name: weight.read().clone() for name, weight in weights.items()}
    tensors.setdefault("output.weight", tensors["tok_embeddings.weight"])
    with open(directory / "consolidated.00.pth", "wb") as file:
        torch.save(tensors, file)
        file.flush()
        os.fsync(file.fileno())
    params = {
        "dim": config.dim,
        "n_layers": config.n_layers,
        "n_heads": config.n_heads,
        "n_kv_heads": config.n_kv_heads,
        "vocab_size": config.vocab_size,
        "ffn_dim_multiplier": config.ffn_dim / int(8 * config.dim / 3),
        "multiple_of": config.ffn_dim,
        "norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
    }
    if config.rope_scaling != 1.0:
        params["use_scaled_rope"] = True
    if config.rope_scaling not in (1.0, 32.0 if config.tie_embeddings else 8.0):
        params["rope_scaling_factor"] = config.rope_scaling
    (directory / "params.json").write_text(json.dumps(params, indent=1))
