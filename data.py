"""Text in, batches of tokens out: tokenizers, corpora, token shards, and which sequence comes when.

    text ──tokenizer──> shards of token ids on disk ──windows of T + 1──> permuted ──> batches

A corpus is tokenized once into flat files (llm.c's `.bin` format) that are then mapped into memory,
so its size does not matter. Training takes raw text too: it is tokenized at first use and kept in
`cache/`. What each training step sees is a pure function of (seed, step): a sampler without
state needs no saving, and resuming or changing the number of processes cannot disturb the order.

    python data.py train-tokenizer my_text/ --vocab-size 8192 --out my.model
    python data.py tokenize my_text/ more.jsonl --tokenizer my.model --out my_tokens
    torchrun train.py --data my_tokens
"""

import argparse
import base64
import binascii
import functools
import hashlib
import heapq
import itertools
import json
import math
import os
import shutil
import sys
import sysconfig
import tempfile
import time
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np
import regex  # comes with tiktoken, which needs it
import tiktoken
import torch
from torch import Tensor

from formats import load_ranks
from model import IGNORE, UserError

CACHE = Path(__file__).resolve().parent / "cache"
DEFAULT_TOKENIZER = "python-2048"

# ------------------------------------------------------------------------------------- tokenizers

# How Llama 3 cuts text before it merges bytes: words with a leading space, at most three digits...
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# Special tokens follow the ordinary ones in this order: 256 in Llama 3. Our own small tokenizers
# carry the first eleven, all that have a meaning, so that chat can be taught with any of them.
SPECIAL = [
    "<|begin_of_text|>",
    "<|end_of_text|>",
    "<|reserved_special_token_0|>",
    "<|reserved_special_token_1|>",
    "<|finetune_right_pad_id|>",
    "<|reserved_special_token_2|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eom_id|>",
    "<|eot_id|>",
    "<|python_tag|>",
    *(f"<|reserved_special_token_{i}|>" for i in range(3, 248)),
]
N_SMALL_SPECIAL = SPECIAL.index("<|python_tag|>") + 1
LLAMA3_RANKS = 128_000


class Tokenizer:
    """Text to token ids and back. `name` is what load_tokenizer takes, `file` where it was read."""

    def __init__(self, name: str, encoding: tiktoken.Encoding, file: Path | None = None):
        self.name, self.encoding, self.file = name, encoding, file
        self.vocab_size = encoding.n_vocab
        special = encoding._special_tokens
        self.special: dict[str, int] = special
        # GPT-2 and its kin have one token that both ends a document and begins the next.
        self.bos = special.get("<|begin_of_text|>", special.get("<|endoftext|>"))
        self.eos = special.get("<|end_of_text|>", special.get("<|endoftext|>"))
        stops = ("<|end_of_text|>", "<|eom_id|>", "<|eot_id|>", "<|endoftext|>")
        self.stop = tuple(special[name] for name in stops if name in special)

    def save(self, path: Path) -> None:
        """Write it as a `tokenizer.model`."""
        ranks = self.encoding._mergeable_ranks
        path.write_bytes(_model_file(sorted(ranks, key=ranks.get)))

    def encode(self, text: str, bos: bool = False) -> list[int]:
        """Ids of a text. What looks like a special token in it stays text."""
        return [self.bos] * bos + self.encoding.encode_ordinary(text)

    def encode_array(self, text: str) -> np.ndarray:
        """Ids of a long text, as uint32."""
        return self.encoding.encode_to_numpy(text, disallowed_special=())

    def encode_chat(self, messages: list[dict[str, str]]) -> list[int]:
        """Llama 3's chat format for [{"role", "content"}...], ending where the assistant speaks."""
        if "<|eot_id|>" not in self.special:
            raise UserError(f"tokenizer {self.name} has no chat tokens; take a Llama 3 tokenizer")

        def header(role):
            start, end = self.special["<|start_header_id|>"], self.special["<|end_header_id|>"]
            return [start, *self.encode(role), end, *self.encode("\n\n")]

        tokens = [self.bos]
        for message in messages:
            tokens += header(message["role"]) + self.encode(message["content"].strip())
            tokens.append(self.special["<|eot_id|>"])
        return tokens + header("assistant")

    def decode(self, tokens: Iterable[int]) -> str:
        """Text of ids; bytes that are not UTF-8 become U+FFFD."""
        return self.decode_bytes(tokens).decode(errors="replace")

    def decode_bytes(self, tokens: Iterable[int]) -> bytes:
        """Bytes of ids; those that stand for nothing, as a larger model may emit, are left out."""
        return self.encoding.decode_bytes([token for token in tokens if token in self._known])

    @functools.cached_property
    def _known(self) -> set[int]:
        return {*self.encoding._mergeable_ranks.values(), *self.special.values()}

    @functools.cached_property
    def hash(self) -> str:
        """Tells tokenizers apart that give ids different meanings."""
        ranks = sorted(self.encoding._mergeable_ranks.items(), key=lambda item: item[1])
        meaning = repr((ranks, sorted(self.special.items()), self.encoding._pat_str))
        return hashlib.sha256(meaning.encode()).hexdigest()[:16]

    @functools.cached_property
    def token_bytes(self) -> np.ndarray:
        """Bytes of text each token stands for [V]: 0 for special tokens and gaps in the ids."""
        lengths = np.zeros(self.vocab_size, dtype=np.int64)
        for token, rank in self.encoding._mergeable_ranks.items():
            lengths[rank] = len(token)
        return lengths

    def count_bytes(self, targets: np.ndarray) -> int:
        """Bytes of text that targets stand for."""
        return int(self.token_bytes[targets[targets != IGNORE]].sum())


def load_tokenizer(name: str) -> Tokenizer:
    """A tokenizer by name or path.

    `bytes`; `python-2048` (or another size): a BPE trained on the default corpus at first use;
    Llama 3's `tokenizer.model`, or its `tokenizer.json` at Hugging Face, or a file in one of these
    formats, or a directory that holds one; one of tiktoken's own encodings, such as `gpt2`, which
    tiktoken downloads.
    """
    if name == "bytes":
        ranks = {bytes([i]): i for i in range(256)}
        return Tokenizer(name, _encoding(name, ranks, r"(?s:.{1,256})"))
    path = find_tokenizer(Path(name)) or Path(name)
    if path.is_file():
        return Tokenizer(name, _encoding(name, _read_ranks(path), SPLIT), path)
    if name.startswith("python-") and name.removeprefix("python-").isdigit():
        path = CACHE / f"{name}-{sys.version_info[0]}.{sys.version_info[1]}.model"
        if not path.exists():
            print(f"training tokenizer {name}, once, in {path}", file=sys.stderr)
            train_tokenizer(["python"], int(name.removeprefix("python-")), path)
        return Tokenizer(name, _encoding(name, _read_ranks(path), SPLIT), path)
    if name in tiktoken.list_encoding_names():
        try:
            return Tokenizer(name, tiktoken.get_encoding(name))
        except OSError as error:  # requests' errors are OSErrors
            reason = type(error).__name__
            raise UserError(
                f"tiktoken could not download '{name}' ({reason}); try --tokenizer bytes"
            )
    known = ", ".join(["bytes", DEFAULT_TOKENIZER, *tiktoken.list_encoding_names()])
    raise UserError(f"no tokenizer '{name}': give a tokenizer.model file or one of {known}")


def find_tokenizer(directory: Path) -> Path | None:
    """The tokenizer's file in a directory; Meta's at Hugging Face have it below."""
    names = ("tokenizer.model", "original/tokenizer.model", "tokenizer.json")
    return next((directory / name for name in names if (directory / name).is_file()), None)


def _encoding(name: str, ranks: dict[bytes, int], split: str) -> tiktoken.Encoding:
    n_special = len(SPECIAL) if len(ranks) == LLAMA3_RANKS else N_SMALL_SPECIAL
    special = {token: len(ranks) + i for i, token in enumerate(SPECIAL[:n_special])}
    return tiktoken.Encoding(name, pat_str=split, mergeable_ranks=ranks, special_tokens=special)


def _model_file(tokens: list[bytes]) -> bytes:
    """What a `tokenizer.model` of these tokens, in the order of their ranks, holds."""
    return b"".join(b"%s %d\n" % (base64.b64encode(t), rank) for rank, t in enumerate(tokens))


def _read_ranks(path: Path) -> dict[bytes, int]:
    """The `tokenizer.model` format: a line per token, `base64(bytes) rank`; or tokenizer.json.

    tiktoken's own reader would do, but it never notices that the file at a path has changed.
    """
    if path.suffix == ".json":
        ranks = load_ranks(path, SPLIT)
    else:
        ranks = {}
        try:
            for line in path.read_bytes().splitlines():
                token, rank = line.split()
                ranks[base64.b64decode(token, validate=True)] = int(rank)
        except (ValueError, binascii.Error):
            number = len(ranks) + 1
            raise UserError(f"{path} is no tokenizer.model: line {number} is not `base64 rank`")
    if sorted(ranks.values()) != list(range(len(ranks))) or len(ranks) < 256:
        raise UserError(f"{path} is no tokenizer: its ranks are not 0, 1, 2... or too few")
    return ranks


# ----------------------------------------------------------------------------------------- corpora

PIECE = 1 << 20  # bytes of text read and tokenized at a time


class Piece(NamedTuple):
    text: str
    starts_document: bool
    split: str  # "train" or "val"


def find_files(sources: Iterable[str]) -> list[Path]:
    """Text files of a corpus: files as given, those in directories, `python` for the default."""
    files = []
    for source in map(str, sources):
        path = Path(source)
        if source == "python" and not path.exists():
            files += standard_library()
        elif path.is_dir():
            kinds = (".txt", ".jsonl", ".md", ".py")
            found = sorted(p for p in path.rglob("*") if p.suffix in kinds and p.is_file())
            if not found:
                raise UserError(f"{source} holds no .txt, .jsonl, .md or .py file")
            files += found
        elif path.is_file():
            files.append(path)
        else:
            raise UserError(f"no data at '{source}': give a file, a directory, or `python`")
    return files


def standard_library() -> list[Path]:
    """The default corpus, on every machine that runs this: Python's own source, without its tests
    and without the packages that are tables rather than code."""
    root = Path(sysconfig.get_paths()["stdlib"])
    skip = {"site-packages", "dist-packages", "test", "tests", "idle_test"}
    skip |= {"encodings", "pydoc_data"}
    files = sorted(p for p in root.rglob("*.py") if skip.isdisjoint(p.relative_to(root).parts))
    if not files:
        raise UserError(f"no Python source under {root}; give your own text with --data")
    return files


def read_pieces(files: list[Path], val_fraction: float = 0.05) -> Iterator[Piece]:
    """The text of a corpus, in pieces of about PIECE bytes that end at line ends.

    A file is a document, but of a `.jsonl` file each line is one, in its "text" field. Of many
    documents, those are held out for validation that a hash of their name and number picks; of
    fewer than 100 files, the end of all their text.
    """
    by_range = len(files) < 100 and not any(path.suffix == ".jsonl" for path in files)
    total = sum(path.stat().st_size for path in files)
    border = total * (1 - val_fraction) if by_range else math.inf
    before = 0  # bytes in the files already read
    for path in files:
        name = "/".join(path.parts[-2:])
        with open(path, "rb") as file:
            if path.suffix == ".jsonl":
                for number, line in enumerate(file, 1):
                    if line.isspace():
                        continue
                    split = "val" if chance(f"{name}:{number}") < val_fraction else "train"
                    yield Piece(_text_field(line, path, number), True, split)
                continue
            picked = not by_range and chance(name) < val_fraction
            split, starts = "val" if picked or before >= border else "train", True
            while True:
                left = border - before - file.tell()  # to the border; nothing is read across it
                raw = file.read(int(min(PIECE, left)) if left > 0 else PIECE) + file.readline()
                if not raw:
                    break
                yield Piece(_decode(raw, path), starts, split)
                starts = False
                if split == "train" and before + file.tell() >= border:
                    split, starts = "val", True
        before += path.stat().st_size


def chance(name: str) -> float:
    """A number in [0, 1) that depends on a document's name alone."""
    return zlib.crc32(name.encode()) / 2**32


def _decode(raw: bytes, path: Path) -> str:
    try:
        if b"\0" not in raw:
            return raw.decode()
        found = "a zero byte"
    except UnicodeDecodeError as error:
        found = f"byte 0x{raw[error.start]:02x}"
    raise UserError(f"{path} is not UTF-8 text (it holds {found}): convert it, or leave it out")


def _text_field(line: bytes, path: Path, number: int) -> str:
    try:
        text = json.loads(line)["text"]
    except (ValueError, KeyError, TypeError):
        text = None
    if not isinstance(text, str):
        raise UserError(f'{path}, line {number}: expected {{"text": "..."}}, got {line[:60]!r}')
    return whole_characters(text)


def whole_characters(text: str) -> str:
    """JSON can hold halves of characters (surrogates), which no UTF-8 and no tokenizer can."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


# ------------------------------------------------------------------------------------------ shards

# llm.c's format: 256 int32 of header (magic, version, number of tokens, zeros), then the tokens.
HEADER_BYTES = 256 * 4
FORMATS = {(20240520, 1): np.dtype("<u2"), (20240801, 7): np.dtype("<u4")}


def open_shard(path: Path) -> np.ndarray:
    """The tokens of one `.bin` file, mapped into memory: read when touched, shared by processes."""
    size = path.stat().st_size
    header = np.fromfile(path, dtype="<i4", count=256)
    if len(header) < 256 or (dtype := FORMATS.get((int(header[0]), int(header[1])))) is None:
        got = f"magic {header[0]}, version {header[1]}" if len(header) > 1 else f"{size} bytes"
        raise UserError(
            f"{path} is no token shard ({got}): write one with `python data.py tokenize`"
        )
    n_tokens = int(header[2])
    held = (size - HEADER_BYTES) // dtype.itemsize
    if held != n_tokens or n_tokens == 0:
        raise UserError(f"{path} is damaged: its header says {n_tokens} tokens, it holds {held}")
    return np.memmap(path, dtype=dtype, mode="r", offset=HEADER_BYTES, shape=(n_tokens,))


class ShardWriter:
    """Writes tokens to DIR/SPLIT_000000.bin, DIR/SPLIT_000001.bin, ... of at most `size` tokens."""

    def __init__(self, directory: Path, split: str, vocab_size: int, size: int):
        self.directory, self.split, self.size = directory, split, size
        wide = vocab_size > 1 << 16
        (self.magic, self.version), self.dtype = list(FORMATS.items())[wide]
        self.file: BinaryIO | None = None
        self.shards = self.tokens = self.in_shard = 0

    def write(self, tokens: np.ndarray) -> None:
        while len(tokens):
            if self.file is None:
                self.file = open(self.directory / f"{self.split}_{self.shards:06d}.bin", "wb")
                self.file.write(bytes(HEADER_BYTES))  # zeros until close: refused if unfinished
            part, tokens = np.split(tokens, [min(len(tokens), self.size - self.in_shard)])
            self.file.write(part.astype(self.dtype).tobytes())
            self.in_shard += len(part)
            self.tokens += len(part)
            if self.in_shard == self.size:
                self.close()

    def close(self) -> None:
        if self.file is None:
            return
        self.file.seek(0)
        self.file.write(np.array([self.magic, self.version, self.in_shard], "<i4").tobytes())
        self.file.close()
        self.file, self.in_shard, self.shards = None, 0, self.shards + 1


def tokenize(
    files: list[Path],
    tokenizer: Tokenizer,
    out: Path,
    val_fraction: float = 0.05,
    shard_tokens: int = 100_000_000,
) -> None:
    """Write a corpus as shards, on all cores (tiktoken works outside Python's lock).

    Each document begins with the tokenizer's beginning-of-text token, and the one before it is
    closed by its end-of-text token. `out` appears only when it is complete.
    """
    out.parent.mkdir(parents=True, exist_ok=True)
    total, done, started = sum(path.stat().st_size for path in files), 0, time.monotonic()
    pieces = read_pieces(files, val_fraction)
    with (
        tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}-") as temporary,
        ThreadPoolExecutor(os.cpu_count()) as pool,
    ):
        unfinished = Path(temporary) / out.name
        unfinished.mkdir()
        train, val = (
            ShardWriter(unfinished, split, tokenizer.vocab_size, shard_tokens)
            for split in ("train", "val")
        )
        for group in _grouped(pieces, 16 * PIECE):
            arrays = pool.map(lambda piece: tokenizer.encode_array(piece.text), group)
            for piece, tokens in zip(group, arrays):
                writer = train if piece.split == "train" else val
                if piece.starts_document:
                    closes = writer.tokens and tokenizer.eos != tokenizer.bos
                    border = [tokenizer.eos, tokenizer.bos] if closes else [tokenizer.bos]
                    writer.write(np.array(border, dtype=np.uint32))
                writer.write(tokens)
                done += len(piece.text)
            _show_progress(done, total, time.monotonic() - started)
        print(file=sys.stderr)
        train.close()
        val.close()
        name = "tokenizer.model" if tokenizer.file else tokenizer.name
        if tokenizer.file:
            shutil.copyfile(tokenizer.file, unfinished / name)
        about = {"tokenizer": name, "tokenizer_hash": tokenizer.hash}
        about |= {"train_tokens": train.tokens, "val_tokens": val.tokens}
        (unfinished / "data.json").write_text(json.dumps(about, indent=1))
        try:
            os.rename(unfinished, out)
        except OSError:
            if not out.exists():  # it does if another run was faster with the same corpus
                raise


def _grouped(pieces: Iterable[Piece], size: int) -> Iterator[list[Piece]]:
    """Lists of pieces that hold `size` characters or a little more together."""
    group, held = [], 0
    for piece in pieces:
        group.append(piece)
        held += len(piece.text)
        if held >= size:
            yield group
            group, held = [], 0
    yield group


def _show_progress(done: int, total: int, seconds: float) -> None:
    """A line on the terminal; `total` in bytes, `done` in characters, of which each takes one."""
    part = min(done / max(total, 1), 1)
    left = seconds / max(part, 1e-9) - seconds
    line = f"tokenizing {total / 1e6:,.1f} MB: {part:4.0%}, {done / seconds / 1e6:.1f} MB/s, "
    print(f"\r{line}{left:,.0f} s left ", end="", file=sys.stderr, flush=True)


CUT = 1  # part of every cache key: count up when documents are cut or held out in another way


def cached_shards(files: list[Path], tokenizer: Tokenizer) -> Path:
    """Directory of a raw corpus's shards, tokenized now if it or the tokenizer changed."""
    key = hashlib.sha256(f"{CUT} {tokenizer.hash}".encode())
    for path in files:
        stat = path.stat()
        key.update(repr((str(path.resolve()), stat.st_size, stat.st_mtime_ns)).encode())
    directory = CACHE / f"tokens-{key.hexdigest()[:16]}"
    if not directory.exists():
        tokenize(files, tokenizer, directory)
    return directory


# ------------------------------------------------------------- windows of tokens, and their order


@dataclass
class Batch:
    """A rank's share of a step: b sequences of T tokens."""

    tokens: Tensor  # [b, T] int64
    targets: Tensor  # [b, T] int64: the token after each, IGNORE where nothing is to be learnt
    positions: Tensor | None  # [b, T] int64, each token's place in its document; None: not asked
    text_bytes: int  # of text that the targets stand for

    def tensors(self) -> list[Tensor | None]:
        return [self.tokens, self.targets, self.positions]

    def split(self, size: int) -> list[tuple[Tensor | None, ...]]:
        """Microbatches of `size` sequences: (tokens, targets, positions) of each."""
        n = -(-len(self.tokens) // size)
        return list(zip(*([None] * n if t is None else t.split(size) for t in self.tensors())))

    def to(self, device: torch.device) -> "Batch":
        """On a device. From pinned memory the copy runs beside the GPU's work, not after it."""
        moved = [t if t is None else t.to(device, non_blocking=True) for t in self.tensors()]
        return Batch(*moved, self.text_bytes)

    def pinned(self) -> "Batch":
        return Batch(*(t if t is None else t.pin_memory() for t in self.tensors()), self.text_bytes)


class Windows:
    """The windows of seq_len + 1 tokens of a list of shards, numbered from 0.

    Neighbours share a token: the last target of one is the first input of the next. With
    `document_mask`, batches say where documents begin, so that attention stays within them."""

    def __init__(
        self,
        shards: list[np.ndarray],
        seq_len: int,
        tokenizer: Tokenizer,
        document_mask: bool = False,
    ):
        self.shards, self.seq_len = shards, seq_len
        self.tokenizer, self.document_mask = tokenizer, document_mask
        self.ends = np.cumsum([(len(shard) - 1) // seq_len for shard in shards], dtype=np.int64)

    def __len__(self) -> int:
        return int(self.ends[-1]) if len(self.ends) else 0

    def __getitem__(self, i: int) -> np.ndarray:
        """Window i [T + 1]."""
        shard = int(np.searchsorted(self.ends, i, side="right"))
        start = (i - (int(self.ends[shard - 1]) if shard else 0)) * self.seq_len
        return self.shards[shard][start : start + self.seq_len + 1]

    def batch(self, numbers: list[int | None]) -> Batch:
        """The windows of these numbers; None gives a row without targets."""
        rows = np.stack([self[number or 0].astype(np.int64) for number in numbers])  # [b, T + 1]
        if rows.max() >= self.tokenizer.vocab_size:
            raise UserError(
                f"the data holds token {rows.max()}, but tokenizer {self.tokenizer.name} has only "
                f"{self.tokenizer.vocab_size}: give the --tokenizer that the data was made with"
            )
        tokens, targets = rows[:, :-1].copy(), rows[:, 1:].copy()  # [b, T] both
        targets[[number is None for number in numbers]] = IGNORE
        text_bytes = self.tokenizer.count_bytes(targets)
        positions = None
        if self.document_mask:
            place = np.arange(self.seq_len)  # [T]
            starts = np.where(tokens == self.tokenizer.bos, place, 0)  # [b, T]
            positions = torch.from_numpy(place - np.maximum.accumulate(starts, axis=1))
        return Batch(torch.from_numpy(tokens), torch.from_numpy(targets), positions, text_bytes)


def find_shards(data: list[str]) -> list[Path]:
    """The `.bin` files that --data names or whose directories it names; none if it is raw text."""
    found = []
    for path in map(Path, data):
        found.append(sorted(path.glob("*.bin")) if path.is_dir() else [path])
        found[-1] = [shard for shard in found[-1] if shard.suffix == ".bin" and shard.is_file()]
    if any(found) and not all(found):
        raise UserError(f"--data mixes token shards and text ({' '.join(data)}): tokenize the text")
    return [shard for shards in found for shard in shards]


def tokenizer_of(data: list[str]) -> str | None:
    """What token shards were made with, as load_tokenizer takes it; None if --data is text."""
    shards = find_shards(data)
    if not shards:
        return None
    about = shards[0].parent / "data.json"
    if not about.is_file():
        raise UserError(f"{shards[0]} does not say what tokenizer made it: give --tokenizer")
    name = json.loads(about.read_text())["tokenizer"]
    return str(about.parent / name) if name == "tokenizer.model" else name


def check_tokenizer(shards: list[Path], tokenizer: Tokenizer) -> None:
    """Refuse shards that say they were made with another tokenizer."""
    for about in sorted({shard.parent / "data.json" for shard in shards}):
        if about.is_file() and json.loads(about.read_text())["tokenizer_hash"] != tokenizer.hash:
            raise UserError(
                f"the shards in {about.parent} were not made with tokenizer {tokenizer.name}: "
                f"leave out --tokenizer, or tokenize the text anew"
            )


def open_windows(
    data: list[str], tokenizer: Tokenizer, seq_len: int, document_mask: bool = False
) -> tuple[Windows, Windows]:
    """Training and validation windows of raw text (tokenized on first use) or of token shards.

    Shards with "val" in their name are for validation; without any, the end of the last shard is.
    """
    paths = find_shards(data) or sorted(cached_shards(find_files(data), tokenizer).glob("*.bin"))
    check_tokenizer(paths, tokenizer)
    train = [open_shard(path) for path in paths if "val" not in path.name]
    val = [open_shard(path) for path in paths if "val" in path.name]
    if train and not val:
        border = len(train[-1]) * 19 // 20
        train[-1], val = train[-1][:border], [train[-1][border:]]
    for split, shards in (("train", train), ("validation", val)):
        longest = max(map(len, shards), default=0)
        if longest <= seq_len:
            raise UserError(
                f"the {split} part of {' '.join(data)} is too short: --seq-len {seq_len} needs "
                f"{seq_len + 1} tokens in a row, it has {longest}; give more text, or a shorter "
                f"--seq-len"
            )
    train, val = (Windows(shards, seq_len, tokenizer, document_mask) for shards in (train, val))
    return train, val


def window_of(sequence: int, n: int, seed: int) -> int:
    """Which of n windows is the experiment's sequence number `sequence`: each once per epoch.

    A permutation of 0..n-1 that is computed, not stored: four Feistel rounds scramble the next
    even number of bits one to one (Luby and Rackoff 1988), and what falls beyond n is scrambled
    again until it is within. That stays one to one, and takes at most four tries on average.
    """
    epoch, i = divmod(sequence, n)
    half = max(1, ((n - 1).bit_length() + 1) // 2)  # bits on each side
    while True:
        left, right = i >> half, i & ((1 << half) - 1)
        for turn in range(4):
            key = f"{seed} {epoch} {turn} {right}".encode()
            mask = int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little")
            left, right = right, left ^ (mask & ((1 << half) - 1))
        i = left << half | right
        if i < n:
            return i


def read_ahead(
    read: Callable[[int], Batch], steps: Iterable[int], device: torch.device
) -> Iterator[Batch]:
    """read(step) on `device` for each step, the next one being read in a thread meanwhile."""
    on_gpu = device.type == "cuda"

    def load(step: int) -> Batch:
        if on_gpu:
            torch.cuda.set_device(device)  # a thread starts on GPU 0, whose memory is not ours
        batch = read(step)
        return batch.pinned() if on_gpu else batch

    with ThreadPoolExecutor(1) as pool:
        coming = None
        for step in steps:
            ready, coming = coming, pool.submit(load, step)
            if ready:
                yield ready.result().to(device)
        if coming:
            yield coming.result().to(device)


# --------------------------------------------------------------------------- training a tokenizer


def train_tokenizer(sources: list[str], vocab_size: int, out: Path, sample: int = 8 << 20) -> None:
    """Train a byte-pair encoding (Sennrich et al. 2016) and write it as a `tokenizer.model`.

    Learns from `sample` bytes of text spread over the corpus. vocab_size counts special tokens.
    """
    n_ranks = vocab_size - N_SMALL_SPECIAL
    if n_ranks < 256:
        smallest = 256 + N_SMALL_SPECIAL
        raise UserError(f"a tokenizer of {vocab_size} tokens is too small: at least {smallest}")
    files = find_files(sources)
    every = max(1, sum(path.stat().st_size for path in files) // sample)
    words = Counter()
    for piece in itertools.islice(read_pieces(files), 0, None, every):
        if piece.split == "train":
            words.update(regex.findall(SPLIT, piece.text))
    tokens = merge_pairs(words, n_ranks)
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=out.parent, delete=False) as temporary:
        temporary.write(_model_file(tokens))
    os.replace(temporary.name, out)  # whole or not at all, though several runs may start at once


def merge_pairs(words: Counter[str], n_tokens: int) -> list[bytes]:
    """Byte-pair encoding: from 256 bytes on, merge the most frequent neighbours, again and again.

    `words` counts the pieces of text within which pairs are merged; returns tokens by rank. Only
    words in which a pair occurs are touched when it is merged, and the most frequent pair comes
    from a heap whose entries may be out of date: they are checked when they are taken. Ties go to
    the pair of older tokens, so the result does not depend on the order of words.
    """
    tokens = [bytes([i]) for i in range(256)]
    spelled = [list(word.encode()) for word in words]  # each word as token ids
    frequency = list(words.values())
    counts, where = Counter(), defaultdict(set)  # of each pair: occurrences, words it is in
    for w, ids in enumerate(spelled):
        for pair in itertools.pairwise(ids):
            counts[pair] += frequency[w]
            where[pair].add(w)
    heap = [(-count, pair) for pair, count in counts.items()]
    heapq.heapify(heap)
    while len(tokens) < n_tokens and heap:
        negative, pair = heapq.heappop(heap)
        if -negative != counts[pair]:
            if counts[pair] > 0:
                heapq.heappush(heap, (-counts[pair], pair))
            continue
        new = len(tokens)
        tokens.append(tokens[pair[0]] + tokens[pair[1]])
        changed = set()
        for w in where.pop(pair):
            ids, merged, i = spelled[w], [], 0
            while i < len(ids):
                if i + 1 < len(ids) and (ids[i], ids[i + 1]) == pair:
                    merged.append(new)
                    i += 2
                else:
                    merged.append(ids[i])
                    i += 1
            for old in itertools.pairwise(ids):
                counts[old] -= frequency[w]
            for now in itertools.pairwise(merged):
                counts[now] += frequency[w]
                where[now].add(w)
                changed.add(now)
            spelled[w] = merged
        for now in changed:
            heapq.heappush(heap, (-counts[now], now))
    return tokens


# ------------------------------------------------------------------------------------ command line


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Train a tokenizer, or turn text into token shards."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    train = commands.add_parser("train-tokenizer", help="train a BPE, written as a tokenizer.model")
    train.add_argument("--vocab-size", type=int, default=4096, help="special tokens included")
    shards = commands.add_parser("tokenize", help="write .bin token shards for train.py --data")
    shards.add_argument("--tokenizer", default=DEFAULT_TOKENIZER, help="name or tokenizer.model")
    shards.add_argument("--val-fraction", type=float, default=0.05, help="held out for validation")
    shards.add_argument("--shard-tokens", type=int, default=100_000_000, help="tokens in a shard")
    for command in (train, shards):
        command.add_argument("sources", nargs="+", help="files, directories, or `python`")
        command.add_argument("--out", type=Path, required=True, help="file or directory to write")
    args = parser.parse_args()
    try:
        if args.command == "train-tokenizer":
            train_tokenizer(args.sources, args.vocab_size, args.out)
        else:
            files = find_files(args.sources)
            tokenizer = load_tokenizer(args.tokenizer)
            if args.out.exists():
                raise UserError(f"{args.out} exists: remove it, or choose another --out")
            if not 0 <= args.val_fraction < 1 or not 0 < args.shard_tokens < 2**31:
                raise UserError("--val-fraction must be in [0, 1), --shard-tokens in [1, 2^31)")
            tokenize(files, tokenizer, args.out, args.val_fraction, args.shard_tokens)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    print(args.out)


if __name__ == "__main__":
    main()
