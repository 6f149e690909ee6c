"""Write GGUF files: a model with its tokenizer and its chat template, for llama.cpp and ollama.

    "GGUF", version         then the numbers of tensors and of metadata
    metadata                each a key, a type and a value
    tensors                 each a name, a shape with the innermost size first, a type, and the
                            offset of its data
    data                    of each tensor in turn, at a multiple of ALIGNMENT bytes

Numbers are little-endian. A string is its length and its bytes in UTF-8.
"""

import math
import re
import struct
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor

from files.formats import to_hf_rows
from files.published import family_for_others
from files.safetensors import StoredTensor, Weights
from model import LlamaConfig, rope_frequencies
from plumbing.messages import UserError
from text.vocabulary import BYTE_OF_CHARACTER, BYTES_PATTERN, WORD_PATTERN, Tokenizer

VERSION, ALIGNMENT = 3, 32  # that of files that name no other
NAMES = {
    "tok_embeddings": "token_embd", "norm": "output_norm", "output": "output",
    "attention_norm": "attn_norm", "attention.wq": "attn_q", "attention.wk": "attn_k",
    "attention.wv": "attn_v", "attention.wo": "attn_output", "ffn_norm": "ffn_norm",
    "feed_forward.w1": "ffn_gate", "feed_forward.w2": "ffn_down", "feed_forward.w3": "ffn_up",
}  # fmt: skip
Q8_0 = "q8_0"  # 8 bits a weight, and for BLOCK weights in a row a scale in float16
BLOCK = 32
TYPES = {torch.float32: 0, torch.float16: 1, Q8_0: 8, torch.bfloat16: 30}
DType = torch.dtype | str
NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5  # kinds of tokens
# llama.cpp's names of patterns that divide text. A tokenizer of bytes merges nothing, so that its
# pattern does not matter.
PATTERNS = {WORD_PATTERN: "llama-bpe", BYTES_PATTERN: "llama-bpe"}
PATTERNS[WORD_PATTERN.replace(r"\p{N}{1,3}", r"\p{N}")] = "qwen2"
IGNORES_MERGES = {"llama-bpe": True, "qwen2": False}  # of a word that is a token


def save_gguf(
    path: Path,
    config: LlamaConfig,
    weights: Weights,
    tokenizer: Tokenizer,
    dtype: DType | None = None,
) -> None:
    """Write a file, reading one weight at a time: matrices in `dtype`, by default as they are, and
    norms and biases in float32.

    Rows of wq and wk have Meta's order in llama.cpp's `llama`, and Hugging Face's in most of its
    other models (`gguf_rows`)."""
    dtype = dtype or weights["tok_embeddings.weight"].dtype
    family = family_for_others(config)
    others = family.published
    if not others.gguf_rows:
        raise UserError(
            f"--format gguf is not written for models like {family.name}: give --format hf"
        )
    if others.gguf_rows == "hf":
        if config.rope_scaling != 1.0:
            raise UserError(f"llama.cpp's {family.name} has no scaled RoPE: give --format hf")
        weights = {n: w.map(partial(to_hf_rows, n, config)) for n, w in weights.items()}
    names = NAMES | others.gguf_names
    tensors = {gguf_name(name, names): weight for name, weight in weights.items()}
    if config.rope_scaling != 1.0:
        tensors["rope_freqs.weight"] = StoredTensor.of(slowdown(config))
    types = {name: _type_of(tensor, dtype) for name, tensor in tensors.items()}
    metadata = describe(config) | vocabulary(tokenizer, config.vocab_size)
    metadata["tokenizer.chat_template"] = tokenizer.template
    header = b"GGUF" + struct.pack("<IQQ", VERSION, len(tensors), len(metadata))
    for key, value in metadata.items():
        header += _string(key) + _typed(value)
    offset = 0
    for name, tensor in tensors.items():
        sizes = tensor.shape[::-1]
        header += _string(name) + struct.pack(f"<I{len(sizes)}Q", len(sizes), *sizes)
        header += struct.pack("<IQ", TYPES[types[name]], offset)
        offset += _aligned(_nbytes(tensor, types[name]))
    with open(path, "wb") as file:
        _write(file, header)
        for name, tensor in tensors.items():
            _write(file, encoded(tensor.read(), types[name]))


def gguf_name(name: str, names: dict[str, str]) -> str:
    """Return llama.cpp's name of a weight: layers.3.attention.wq.weight -> blk.3.attn_q.weight"""
    match = re.fullmatch(r"(?:layers\.(\d+)\.)?(.+)\.(weight|bias)", name)
    layer, path, kind = match.groups()
    block = f"blk.{layer}." if layer else ""
    return f"{block}{names[path]}.{kind}"


def describe(config: LlamaConfig) -> dict[str, Any]:
    """Return the metadata of a model's shape."""
    shape = {
        "context_length": config.max_seq_len,
        "embedding_length": config.dim,
        "block_count": config.n_layers,
        "feed_forward_length": config.ffn_dim,
        "attention.head_count": config.n_heads,
        "attention.head_count_kv": config.n_kv_heads,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "attention.layer_norm_rms_epsilon": float(config.norm_eps),
        "rope.dimension_count": config.head_dim,
        "rope.freq_base": float(config.rope_theta),
    }
    kind = family_for_others(config).name
    return {"general.architecture": kind} | {f"{kind}.{key}": v for key, v in shape.items()}


def slowdown(config: LlamaConfig) -> Tensor:
    """Return by how much scaled RoPE slows down each rotation, [E/2] float32."""
    cpu = torch.device("cpu")
    return rope_frequencies(replace(config, rope_scaling=1.0), cpu) / rope_frequencies(config, cpu)


def vocabulary(tokenizer: Tokenizer, size: int) -> dict[str, Any]:
    """Return the metadata of a tokenizer for a model with `size` tokens."""
    if tokenizer.vocab_size > size:
        raise UserError(f"the tokenizer has {tokenizer.vocab_size:,} tokens, the model {size:,}")
    pre = pre_tokenizer_name(tokenizer)
    vocab, merges = tokenizer.in_printable_characters()
    tokens = [f"[unused {i}]" for i in range(size)]
    kinds = np.full(size, UNUSED, "<i4")
    groups = (vocab, NORMAL), (tokenizer.added, USER_DEFINED), (tokenizer.special, CONTROL)
    for known, kind in groups:
        for token, i in known.items():
            tokens[i] = token
            kinds[i] = kind
    described = {
        "model": "gpt2",
        "pre": pre,
        "tokens": tokens,
        "token_type": kinds,
        "merges": [" ".join(pair) for pair in merges],
        "bos_token_id": tokenizer.bos if tokenizer.named_bos is None else tokenizer.named_bos,
        "add_bos_token": bool(tokenizer.beginning),
    }
    # llama.cpp stops at three tokens that a file names, and at others whose names it knows.
    ends = ("eos", "eot", "eom")
    if len(tokenizer.stop) > len(ends):
        raise UserError(f"generation ends at {len(tokenizer.stop)} tokens: a GGUF file names three")
    for name, token in zip(ends, tokenizer.stop):
        described[f"{name}_token_id"] = token
    return {f"tokenizer.ggml.{key}": value for key, value in described.items()}


def pre_tokenizer_name(tokenizer: Tokenizer) -> str:
    """Return llama.cpp's name of how a tokenizer works. Raise UserError, which names a step of its
    tokenizer.json, if llama.cpp does something else under that name."""

    def refuse(step: str, found: object):
        raise UserError(
            f"tokenizer {tokenizer.name} has a {step} that llama.cpp lacks: {found!s:.150}; export "
            f"with --format hf: llama.cpp's converter may know it"
        )

    if tokenizer.word_pattern is not None:  # it is one of ours, Meta's, or tiktoken's
        if tokenizer.word_pattern not in PATTERNS:
            refuse("pre_tokenizer", tokenizer.word_pattern)
        return PATTERNS[tokenizer.word_pattern]
    first = tokenizer.step("pre_tokenizer") or {}
    parts = first.get("pretokenizers", [first])
    pattern = parts[0].get("pattern", {}).get("Regex")
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated"}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}
    known = [split | {"invert": False}, byte_level | {"trim_offsets": True}]
    if parts[1:]:
        parts[1]["trim_offsets"] = True  # which changes no token
    if pattern not in PATTERNS or parts != known:
        refuse("pre_tokenizer", first)
    pre = PATTERNS[pattern]
    normalizer = tokenizer.step("normalizer")
    is_nfc = pre == "qwen2" and normalizer == {"type": "NFC"}  # docs/home.md says so
    if normalizer is not None and not is_nfc:
        refuse("normalizer", normalizer)
    decoder = tokenizer.step("decoder")
    if decoder is not None and decoder["type"] != "ByteLevel":
        refuse("decoder", decoder)
    if tokenizer.ending or tokenizer.beginning not in ([], [tokenizer.named_bos]):
        refuse("post_processor", tokenizer.step("post_processor"))
    model = tokenizer.inner.model
    if model.ignore_merges != IGNORES_MERGES[pre] and not tokenizer.merges_all_tokens():
        refuse("model", f"ignore_merges {model.ignore_merges} beside this pre_tokenizer")
    vocab, _ = tokenizer.in_printable_characters()
    ordinary = vocab.keys() - tokenizer.special.keys() - tokenizer.added.keys()
    if set("".join(ordinary)) != BYTE_OF_CHARACTER.keys():
        refuse("vocabulary", "other characters than those of GPT-2's alphabet")
    for token in tokenizer.inner.get_added_tokens_decoder().values():
        if token.lstrip or token.rstrip or token.single_word:
            refuse("token", f"{token.content!r}, which is not found in all places")
    return pre


def encoded(tensor: Tensor, dtype: DType) -> bytes:
    """Return the bytes of a tensor in a type.

    Q8_0 divides a row into blocks of 32 weights: a block is its largest absolute value over 127 as
    float16, and each weight over that, rounded, in 8 bits."""
    if dtype != Q8_0:
        return tensor.to(dtype).contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    blocks = tensor.float().reshape(-1, BLOCK).numpy()
    scale = np.abs(blocks).max(1, keepdims=True) / np.float32(127)
    inverse = np.divide(1, scale, out=np.zeros_like(scale), where=scale != 0)
    scaled = blocks * inverse
    size = np.floor(np.abs(scaled) + np.float32(0.5))  # rounded half away from zero
    rounded = np.copysign(size, scaled).astype(np.int8)
    return np.hstack([scale.astype("<f2").view(np.int8), rounded]).tobytes()


def _type_of(tensor: StoredTensor, dtype: DType) -> DType:
    """Return the type in which to write a tensor: float32 for norms and biases, and float16 for a
    matrix whose rows are no whole number of blocks."""
    if len(tensor.shape) == 1:
        return torch.float32
    if dtype == Q8_0 and tensor.shape[-1] % BLOCK:
        return torch.float16
    return dtype


def _nbytes(tensor: StoredTensor, dtype: DType) -> int:
    n = math.prod(tensor.shape)
    if dtype == Q8_0:
        return n // BLOCK * (2 + BLOCK)
    return n * dtype.itemsize


def _aligned(n: int) -> int:
    return -(-n // ALIGNMENT) * ALIGNMENT


def _write(file: BinaryIO, content: bytes) -> None:
    file.write(content.ljust(_aligned(len(content)), b"\0"))


def _string(text: str) -> bytes:
    content = text.encode()
    return struct.pack("<Q", len(content)) + content


def _typed(value: Any) -> bytes:
    """Return a metadata's type and value: a bool, an int, a float, a string, a list of strings, or
    an array of int32."""
    if isinstance(value, list):
        strings = b"".join(_string(text) for text in value)
        return struct.pack("<IIQ", 9, 8, len(value)) + strings
    if isinstance(value, np.ndarray):
        return struct.pack("<IIQ", 9, 5, len(value)) + value.astype("<i4").tobytes()
    if isinstance(value, str):
        return struct.pack("<I", 8) + _string(value)
    kind, form = {bool: (7, "?"), int: (4, "I"), float: (6, "f")}[type(value)]
    return struct.pack(f"<I{form}", kind, value)
