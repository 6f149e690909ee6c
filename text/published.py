"""Tokenizers of other Llamas and of Qwen3: a tokenizer.json, read by Hugging Face's `tokenizers`.

Two kinds are read, both byte-pair encodings. A byte-level one has a character for each byte of text
(SmolLM2, Qwen3). One of SentencePiece's kind (Llama 2, TinyLlama, Yi) has ▁ for a space, often puts
one more before a text, and falls back to bytes for characters that it does not know.
"""

import hashlib
import json
import re
import shutil
from functools import cached_property
from pathlib import Path

import numpy as np

from plumbing.processes import UserError
from text.tokenizer import BYTE_OF_CHARACTER, Tokenizer, chat_template

FILES = "tokenizer.json tokenizer_config.json special_tokens_map.json chat_template.jinja".split()
STOPS = "<|im_end|> <|endoftext|> <|eot_id|> <|end_of_text|> </s>".split()


class PublishedTokenizer(Tokenizer):
    """A tokenizer.json, with the interface of Tokenizer. Raises UserError for what it cannot read.

    The space that SentencePiece's kind puts before a text counts as a byte of it."""

    def __init__(self, name: str, path: Path):
        self.name, self.file, self.word_pattern = name, path, None
        try:
            import tokenizers
        except ImportError:
            raise UserError(f"{path} is not Llama 3's, and needs a package: pip install tokenizers")
        config = path.with_name("tokenizer_config.json")
        try:
            self.inner, content = tokenizers.Tokenizer.from_file(str(path)), path.read_text()
            content, config = (json.loads(text) for text in (content, config.read_text()))
        except Exception as error:  # `tokenizers` raises nothing more special
            raise UserError(f"{path} and {config.name} are no tokenizer: {error}")
        model, words = content["model"], json.dumps(content["pre_tokenizer"])
        is_byte_level = '"ByteLevel"' in words
        falls_back = model.get("byte_fallback") and '"Metaspace"' not in words
        if model["type"] != "BPE" or not (is_byte_level or falls_back):
            raise UserError(
                f"{path} has a {model['type']} and pre-tokenizes by {words:.100}: only byte-level "
                f"BPE works here, and BPE that falls back to bytes, with its spaces in a normalizer"
            )
        self.inner.no_truncation()
        self.inner.no_padding()
        self.inner.encode_special_tokens = True  # their names in a text are ordinary text
        added = {token["content"]: token for token in content["added_tokens"]}
        self.special = {name: token["id"] for name, token in added.items() if token["special"]}
        self.pieces = {token["id"]: name.encode() for name, token in added.items()}
        for token, i in model["vocab"].items():
            if i not in self.pieces:
                self.pieces[i] = _bytes_of(token, is_byte_level)
        self.vocab_size, self.beginning = max(self.pieces) + 1, self.inner.encode("").ids
        end = config.get("eos_token")
        names = [end["content"] if isinstance(end, dict) else end, *STOPS]
        self.stop = tuple(dict.fromkeys(self.special[n] for n in names if n in self.special))
        if not self.stop:
            raise UserError(f"{path} has no token that ends a text: tokenizer_config.json names it")
        # <|endoftext|> both ends a document and begins the next, as with GPT-2.
        self.eos = self.special.get("<|endoftext|>", self.stop[0])
        self.bos = self.beginning[0] if self.beginning else self.eos
        self.template = chat_template(path.parent)

    def encode(self, text: str, bos: bool = False) -> list[int]:
        ids = self.inner.encode(text, add_special_tokens=False).ids
        return (self.beginning or [self.bos] * (not ids)) * bos + ids  # a prompt is never empty

    def encode_array(self, text: str) -> np.ndarray:
        return np.array(self.encode(text), dtype=np.uint32)

    @cached_property
    def hash(self) -> str:
        return hashlib.sha256(self.file.read_bytes()).hexdigest()[:16]

    def save(self, directory: Path) -> dict[str, str]:
        for path in map(self.file.with_name, FILES):
            if path.exists() and directory != path.parent:
                shutil.copy(path, directory)
        return {"tokenizer": "tokenizer.json", "tokenizer_hash": self.hash}


def _bytes_of(token: str, is_byte_level: bool) -> bytes:
    if is_byte_level:
        return bytes(BYTE_OF_CHARACTER[character] for character in token)
    byte = re.fullmatch("<0x([0-9A-F]{2})>", token)
    return bytes.fromhex(byte[1]) if byte else token.replace("▁", " ").encode()
