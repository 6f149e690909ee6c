"""Load a tokenizer: by its name, from Meta's file, or from a tokenizer.json."""

import base64
import os
import re
import sys
from pathlib import Path

import tiktoken

from plumbing.json_files import JsonFile
from plumbing.messages import UserError
from text.settings import folder_of, listed_tokens, special_names
from text.vocabulary import (
    BYTE_OF_CHARACTER,
    BYTES_PATTERN,
    SPECIAL,
    WORD_PATTERN,
    OtherKind,
    Tokenizer,
    has_all_ids,
    tokenizer_json,
    with_special_tokens,
)

# What is made at first use, of which several nodes or users may want to share one.
CACHE = Path(os.environ.get("FLATLLAMA_CACHE") or Path(__file__).resolve().parent.parent / "cache")
DEFAULT_TOKENIZER = "python-2048"
RESERVED = {token for token in SPECIAL if "reserved" in token}


def load_tokenizer(name: str, template: str | None = None) -> Tokenizer:
    """Return a tokenizer by name or path. Raise UserError where there is none.

    `template` is the name of a chat template in its directory, or a file with one.

    bytes             every byte is a token
    python-2048       a tokenizer of 2048 tokens (or any other number), trained on the default
                      corpus when it is first used
    a path            a `tokenizer.model` in Meta's format, a `tokenizer.json` of Hugging Face's,
                      or a directory with one of them
    gpt2, ...         tiktoken's encodings, which tiktoken downloads"""
    if name == "bytes":
        vocab = {bytes([i]): i for i in range(256)}
        encoding = with_special_tokens(name, vocab, BYTES_PATTERN)
        return Tokenizer(name, encoding, template=template)
    path = find_tokenizer(Path(name)) or Path(name)
    python_size = re.fullmatch(r"python-(\d{1,6})", name)
    if python_size and not path.is_file():
        path = tokenizer_of_python(name, int(python_size[1]))
    if path.is_file() and path.suffix == ".json":
        if own := read_own_json(name, path, template):
            return own
        from text.published import PublishedTokenizer  # here, since most runs do without it

        return PublishedTokenizer(name, path, template)
    if path.is_file():
        encoding = with_special_tokens(name, read_model_file(path), WORD_PATTERN)
        if others := others_beside(path, encoding._special_tokens):
            raise OtherKind(f"{path} has no {others[0]!r}, which the files beside it name")
        return Tokenizer(name, encoding, path, template)
    if name not in tiktoken.list_encoding_names():
        known = ", ".join(["bytes", DEFAULT_TOKENIZER, *tiktoken.list_encoding_names()])
        raise UserError(f"no tokenizer '{name}': give a tokenizer.model file or one of {known}")
    try:
        return Tokenizer(name, tiktoken.get_encoding(name), template=template)
    except OSError as error:  # the errors of requests, which downloads, are OSErrors
        reason = type(error).__name__
        raise OtherKind(f"tiktoken cannot download '{name}' ({reason}): give --tokenizer bytes")


def find_tokenizer(directory: Path) -> Path | None:
    """Return the tokenizer file in a model directory. A tokenizer.json may have more tokens than a
    tokenizer.model, which Meta's models on Hugging Face have in the subdirectory `original`."""
    for name in ("tokenizer.json", "tokenizer.model", "original/tokenizer.model"):
        if (directory / name).is_file():
            return directory / name
    return None


def tokenizer_of_python(name: str, size: int) -> Path:
    """Return the file of a tokenizer of the default corpus, which is trained when there is none."""
    path = CACHE / f"{name}-{sys.version_info[0]}.{sys.version_info[1]}.model"
    if not path.exists():
        from text.bpe import train_tokenizer  # here, since it is needed once

        print(f"training tokenizer {name}, once, in {path}", file=sys.stderr)
        train_tokenizer(["python"], size, path)
    return path


def read_model_file(path: Path) -> dict[bytes, int]:
    """Return the ordinary tokens of Meta's `tokenizer.model` with their ids. A line of the file is
    a token: base64 of its bytes, a space, its id.

    tiktoken can read such files too, but does not notice when the file at a path has changed."""
    vocab: dict[bytes, int] = {}
    content = path.read_bytes()
    if content.startswith(b"\n"):
        raise OtherKind(f"{path} is SentencePiece's: only a tokenizer.json beside it is read")
    try:
        for line in content.splitlines():
            token, i = line.split()
            vocab[base64.b64decode(token, validate=True)] = int(i)
    except ValueError:
        where = f"{path}, line {len(vocab) + 1}"
        raise UserError(f"{where}: expected a token in base64 and its id, as in a tokenizer.model")
    if not has_all_ids(vocab):
        raise UserError(f"{path} is no tokenizer: expected ids 0, 1, 2, ... of 256 tokens or more")
    return vocab


def others_beside(path: Path, special: dict[str, int]) -> list[str]:
    """Return the tokens that files beside a tokenizer name, and that it does not have."""
    folder = folder_of(path)
    others = [name for name in special_names(folder) if name not in special]
    for i, flags in listed_tokens(folder):
        token = flags["content"]
        is_reserved = token.startswith("<|reserved_special_token_")  # Llama 3.0 had more of them
        if special.get(token) != i and not is_reserved:
            others.append(token)
    return others


def read_own_json(name: str, path: Path, template: str | None) -> Tokenizer | None:
    """Return the tokenizer in a tokenizer.json if it says just what is written here: if it is
    Meta's, or one that was trained here. Only then can tiktoken read it; else return None."""
    theirs = dict(JsonFile(path))
    try:
        vocab = {}
        for token, i in theirs["model"]["vocab"].items():
            vocab[bytes(BYTE_OF_CHARACTER[character] for character in token)] = i
        if not has_all_ids(vocab):
            return None
        encoding = with_special_tokens(name, vocab, WORD_PATTERN)
        if others_beside(path, encoding._special_tokens):
            return None
        tokenizer = Tokenizer(name, encoding, path, template)
        ours = tokenizer_json(tokenizer)
        model = theirs["model"]
        model["merges"] = [m if isinstance(m, str) else " ".join(m) for m in model["merges"]]
        off = [key for key, value in model.items() if not value and key not in ours["model"]]
        for key in off:
            del model[key]
        # Llama 3.0 had reserved tokens that Llama 3.1 named.
        for token, named in zip(theirs["added_tokens"], tokenizer.special, strict=True):
            if token["content"] in RESERVED:
                token["content"] = named
        processor = theirs["post_processor"]
        parts = processor.get("processors") or [processor]
        before_a_text = [part["single"] for part in parts if "single" in part]
        is_same = (
            model == ours["model"]
            and theirs["added_tokens"] == ours["added_tokens"]
            and theirs.get("normalizer") is None
            and theirs["pre_tokenizer"] == ours["pre_tokenizer"]
            and before_a_text == [ours["post_processor"]["single"]]
        )
    except (AttributeError, KeyError, TypeError, ValueError):
        return None
    return tokenizer if is_same else None
