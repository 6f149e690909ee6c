"""Turn text into batches of tokens: token files, and windows of them.

    text ──tokenizer──> token files on disk ──> windows of T + 1 tokens ──> batches

A corpus is tokenized once into files in llm.c's `.bin` format. They are mapped into memory, so a
corpus may be larger than memory. Raw text given to training is tokenized at first use and kept in
`cache/`, or where the environment variable FLATLLAMA_CACHE says.

text/order.py says which windows a step reads.

    python data.py train-tokenizer my_text/ --vocab-size 8192 --out my.model
    python data.py tokenize my_text/ more.jsonl --tokenizer my.model --out my_tokens
    torchrun train.py --data my_tokens
    torchrun train.py --data my_text/=0.7 python=0.3          sources with their shares
"""

import plumbing.endings  # first, for Ctrl-C during the imports
import argparse
import hashlib
import itertools
import json
import os
import re
import sys
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from numpy.lib.stride_tricks import sliding_window_view
from torch.utils.data import ConcatDataset

from model import IGNORE
from plumbing.json_files import JsonFile
from plumbing.messages import Progress, UserError, is_rank_zero
from plumbing.new_files import hidden_until_complete
from plumbing.parser import Parser, nonnegative_float, positive_int
from plumbing.processes import run
from techniques.context_parallel import share_sequences
from text.batch import Batch
from text.corpora import VAL_FRACTION, Reading, find_files, read_pieces
from text.order import Order
from text.packing import Packed, Rows
from text.token_files import TokenFileWriter, check_ids, open_token_file
from text.tokenizer import CACHE, DEFAULT_TOKENIZER, Tokenizer, load_tokenizer

# ---------------------------------------------------------------------------------- token files

WEIGHTED_SOURCE = r"(.+)=(\d*\.?\d+)"  # SOURCE=WEIGHT
ROUND_LENGTH = 1000  # a round has about so many sequences: of each source its share, rounded
FOR_VALIDATION = r"(?<![A-Za-z])val"  # begins a word of a token file's name, as in a_val_0.bin
LEFT_OUT_FILE = "left-out.txt"  # lists the documents that could not be read


def tokenize(files: list[Path], tokenizer: Tokenizer, out: Path, reading: Reading) -> None:
    """Write a corpus as a directory of token files, with a data.json that names the tokenizer, and
    a list of what was left out. The directory `out` appears only when it is complete."""
    try:
        with hidden_until_complete(out) as unfinished:
            unfinished.mkdir()
            n_tokens = _write_token_files(unfinished, files, tokenizer, reading)
            metadata = tokenizer.save(unfinished) | n_tokens
            (unfinished / "data.json").write_text(json.dumps(metadata, indent=1), "utf-8")
    except OSError:
        if not out.exists():  # else another run has just tokenized the same corpus
            raise
    reading.list_left_out(out / LEFT_OUT_FILE)


def _write_token_files(
    directory: Path, files: list[Path], tokenizer: Tokenizer, reading: Reading
) -> dict[str, int]:
    """Tokenize the documents of a corpus, write each into the files of its split, and print how
    many there are. Return the number of tokens of each split, by its name in data.json.

    Every document begins with `bos`. From the second document of a split on, `eos` precedes `bos`,
    unless the tokenizer has one token for both."""
    writers = {s: TokenFileWriter(directory, s, tokenizer.vocab_size) for s in ("train", "val")}
    size = sum(path.stat().st_size for path in files)
    progress = Progress("tokenizing", size / 1e6, " MB")
    pieces = read_pieces(files, reading)
    documents = Counter()
    text_bytes = 0
    with ThreadPoolExecutor(os.cpu_count()) as pool:  # tiktoken runs outside Python's global lock
        while group := list(itertools.islice(pieces, 64)):  # about 64 MB if lines are short
            arrays = pool.map(lambda piece: tokenizer.encode_array(piece.text), group)
            for piece, tokens in zip(group, arrays):
                writer = writers[piece.split]
                if piece.starts_document:
                    border = [tokenizer.bos]
                    if writer.n_tokens and tokenizer.eos != tokenizer.bos:
                        border = [tokenizer.eos, tokenizer.bos]
                    writer.write(np.array(border, dtype=np.uint32))
                writer.write(tokens)
                documents[piece.split] += piece.starts_document
                text_bytes += tokenizer.count_bytes(tokens)
                progress.add(len(piece.text) / 1e6)  # in characters; some take several bytes
    for writer in writers.values():
        writer.close()
    train = writers["train"].n_tokens
    val = writers["val"].n_tokens
    if not train:
        raise UserError(
            "there is no text, or all of it is held out: give more text (data.py tokenize takes a "
            "smaller --val-fraction, too)"
        )
    bytes_per_token = text_bytes / (train + val)
    print(
        f"{train:,} tokens of {documents['train']:,} documents; held out: {val:,} tokens of "
        f"{documents['val']:,}; {bytes_per_token:.2f} bytes a token",
        file=sys.stderr,
    )
    return {"train_tokens": train, "val_tokens": val}


# Part of every key in the cache. Increment it when documents are read, held out or divided
# differently, so that old token files are not used any more.
CACHE_VERSION = 5


def cached_token_files(data: list[str], tokenizer: Tokenizer, reading: Reading) -> list[Path]:
    """Return the token files of a corpus in `cache/`. Tokenize the corpus if there are none yet, or
    if a file or the tokenizer has changed since."""
    files = find_files(data)
    key = hashlib.sha256(f"{CACHE_VERSION} {tokenizer.hash} {reading}".encode())
    for path in files:
        stat = path.stat()
        file_key = str(path.resolve()), stat.st_size, stat.st_mtime_ns
        key.update(repr(file_key).encode())
    directory = CACHE / f"tokens-{key.hexdigest()[:16]}"
    if not directory.exists():
        tokenize(files, tokenizer, directory, replace(reading, left_out=[]))  # a list of its own
    return sorted(directory.glob("*.bin"))


def sources_of(data: list[str]) -> list[tuple[list[str], int]]:
    """Return the sources of --data, each with its number of places in a round of sequences.

    `a=0.7 b=0.3` are two sources; without weights, everything is one. A path that exists is not
    read as SOURCE=WEIGHT. Raise UserError if only some sources have a weight, or one is 0."""
    weights = {}  # of the sources that have one
    for entry in data:
        match = re.fullmatch(WEIGHTED_SOURCE, entry)
        if match and not Path(entry).exists():
            weights[entry] = match[1], float(match[2])
    if not weights:
        return [(data, 1)]
    if not all(entry in weights and weights[entry][1] > 0 for entry in data):
        raise UserError(f"--data {' '.join(data)}: give a weight to each source, as in a=0.7 b=0.3")
    total = sum(weights[entry][1] for entry in data)
    sources = []
    for entry in data:
        source, weight = weights[entry]
        sources.append(([source], max(1, round(ROUND_LENGTH * weight / total))))
    return sources


def paths_of(data: list[str]) -> list[str]:
    """Return the paths in --data, without weights."""
    paths = []
    for source, _ in sources_of(data):
        paths += source
    return paths


def find_token_files(data: list[str]) -> list[Path]:
    """Return the `.bin` files that --data names, and those in directories that it names; none if
    it names raw text. Raise UserError if it names both."""
    by_source = []
    for path in map(Path, data):
        candidates = sorted(path.glob("*.bin")) if path.is_dir() else [path]
        by_source.append([p for p in candidates if p.suffix == ".bin" and p.is_file()])
    if any(by_source) and not all(by_source):
        problem = f"--data mixes token files and text ({' '.join(data)})"
        raise UserError(f"{problem}: make token files of the text by data.py tokenize")
    return [*itertools.chain(*by_source)]


def tokenizer_of_token_files(data: list[str]) -> str | None:
    """Return the tokenizer that made the token files in --data: its name, or the path of its file
    beside them; None if --data is text. Raise UserError if there is no data.json."""
    files = find_token_files(paths_of(data))
    if not files:
        return None
    metadata = files[0].with_name("data.json")
    if not metadata.is_file():
        raise UserError(f"{files[0]} does not say what tokenizer made it: give --tokenizer")
    content = JsonFile(metadata)
    name = content.checked("tokenizer", content["tokenizer"], str)
    return str(metadata.parent / name) if name.startswith("tokenizer.") else name


# -------------------------------------------------------------------------------------- batches


class Windows(ConcatDataset):
    """The windows of T + 1 tokens in a list of token files, numbered from 0; T is seq_len.

    Neighbouring windows share a token: the last target of one is the first input of the next. The
    rest of a file, too short for a window, is not used. With `document_mask`, batches have
    positions that start at 0 in every document, and attention stays within documents."""

    def __init__(
        self,
        files: list[np.ndarray],
        seq_len: int,
        tokenizer: Tokenizer,
        document_mask: bool = False,
    ):
        windows = []  # views of the files, which are read when a window is taken
        for file in files:
            if len(file) > seq_len:
                windows.append(sliding_window_view(file, seq_len + 1)[::seq_len])
        super().__init__(windows)
        self.files = files
        self.seq_len = seq_len
        self.tokenizer = tokenizer
        self.document_mask = document_mask
        self.sources = [(len(self), 1)]  # (windows, places in a round) of each source, for row_of

    def checksum(self) -> int:
        """Return a checksum by which a resumed run notices other data.

        It covers the lengths of the files and all their tokens. Of more than 2^24 tokens it covers
        about 4096, evenly spaced."""
        lengths = [len(file) for file in self.files]
        stride = 1 if sum(lengths) <= 1 << 24 else sum(lengths) // 4096
        checksum = zlib.crc32(repr(lengths).encode())
        for file in self.files:
            checksum = zlib.crc32(np.ascontiguousarray(file[::stride]), checksum)
        return checksum

    def batch(self, indices: list[int | None]) -> Batch:
        """Return the windows of these indices; None makes a row without targets. Raise UserError
        if a token is not in the tokenizer's vocabulary."""
        # None is padding: the tokens of window 0, with all targets masked.
        rows = np.stack([self[i or 0] for i in indices]).astype(np.int64)  # [B, T + 1]
        check_ids(rows, self.tokenizer)
        tokens = rows[:, :-1].copy()  # [B, T]
        targets = rows[:, 1:].copy()  # [B, T]
        targets[[i is None for i in indices]] = IGNORE
        text_bytes = self.tokenizer.count_bytes(targets)
        positions = None
        lengths = [self.seq_len] * len(rows)
        if self.document_mask:
            column = np.arange(self.seq_len)  # [T]
            starts = np.where(tokens == self.tokenizer.bos, column, 0)  # [B, T]
            # The last start at or before a token is where its document begins.
            start = np.maximum.accumulate(starts, axis=1)
            positions = torch.from_numpy(column - start)
            # A document ends where the next one starts, and the last one with the batch.
            firsts = np.flatnonzero(column == start)
            lengths = np.diff(firsts, append=start.size).tolist()
        tensors = torch.from_numpy(tokens), torch.from_numpy(targets)
        return Batch(*tensors, positions, text_bytes, lengths)


def token_files(data: list[str], tokenizer: Tokenizer, reading: Reading) -> list[Path]:
    """Return the token files that --data names, or those of its text, tokenized at first use.

    Raise UserError if they were made with another tokenizer. Files without a data.json, such as
    those of other projects, are not checked."""
    paths = find_token_files(data) or cached_token_files(data, tokenizer, reading)
    for metadata in filter(Path.is_file, sorted({path.parent / "data.json" for path in paths})):
        if JsonFile(metadata)["tokenizer_hash"] != tokenizer.hash:
            raise UserError(
                f"the token files in {metadata.parent} were not made with tokenizer "
                f"{tokenizer.name}: leave out --tokenizer, or tokenize the text anew"
            )
    return paths


def open_text(
    data: list[str], tokenizer: Tokenizer, seq_len: int, reading: Reading, document_mask: bool
) -> Packed | Rows:
    """Return a whole text as windows, up to the last token of each file. With `document_mask`,
    each document in a window is a sample of its own."""
    samples = []
    for path in token_files(data, tokenizer, replace(reading, val_fraction=0.0)):
        file = open_token_file(path)
        check_ids(file, tokenizer)
        starts = np.arange(0, len(file) - 1, seq_len)
        if document_mask:
            starts = np.union1d(starts, np.flatnonzero(file[:-1] == tokenizer.bos))
        for start, last in itertools.pairwise([*starts.tolist(), len(file) - 1]):
            ids = file[start : last + 1]  # the last target is the next sample's first input
            is_target = np.ones(len(ids), bool)
            samples.append((ids, is_target))
    if not samples:
        raise UserError(f"{' '.join(data)} holds no text")
    if document_mask:
        return Packed(samples, seq_len, tokenizer)
    return Rows(samples, tokenizer)


def open_windows(
    data: list[str],
    tokenizer: Tokenizer,
    seq_len: int,
    document_mask: bool = False,
    val_data: list[str] | None = None,
    reading: Reading | None = None,
) -> tuple[Windows, Windows | Packed]:
    """Return the training and the validation windows of --data. With `val_data`, all text in --data
    is for training, and token files for validation are left out.

    A file is for validation if a word of its name begins with "val"; if none is, the last twentieth
    of the last file is. Raise UserError if a part of a source is too short for a window."""
    reading = reading or Reading()
    if val_data:
        reading = replace(reading, val_fraction=0.0)
    train_files, val_files, sources = [], [], []
    for source, places in sources_of(data):
        paths = token_files(source, tokenizer, reading)
        train, val = [], []
        for path in paths:
            of_split = val if re.search(FOR_VALIDATION, path.name) else train
            of_split.append(open_token_file(path))
        if train and not val and not val_data:
            last = train.pop()
            border = len(last) * 19 // 20
            train.append(last[:border])
            val.append(last[border:])
        splits = {"training": train}
        if not val_data:
            splits["validation"] = val
        for split, files in splits.items():
            longest = max(map(len, files), default=0)
            if longest <= seq_len:
                raise UserError(
                    f"the {split} part of {' '.join(source)} is too short: --seq-len {seq_len} "
                    f"needs {seq_len + 1} consecutive tokens, it has {longest}; give more text, or "
                    f"a shorter --seq-len"
                )
        sources.append((len(Windows(train, seq_len, tokenizer)), places))
        train_files += train
        val_files += val
    train_set = Windows(train_files, seq_len, tokenizer, document_mask)
    train_set.sources = sources
    if val_data:
        return train_set, open_text(val_data, tokenizer, seq_len, reading, document_mask)
    return train_set, Windows(val_files, seq_len, tokenizer, document_mask)


# --------------------------------------------------------------------------- batches of a step


def local_batch(order: Order, world, dataset: Windows, step: int) -> Batch:
    """Return this rank's share of a step's batch: of the next rows of an epoch's permutation, which
    depend on seed and step alone (text/order.py). Ranks along cp share sequences; without --cp
    each has whole ones. `world` is a World of parallel.py; `dataset` may also be a Packed of
    text/packing.py."""
    n_sequences = order.batch // world.parallel.data_size
    first = world.data_rank * n_sequences
    rows = order.rows(step, dataset.sources)[first : first + n_sequences]
    return share_sequences(dataset.batch(rows), world)


def batch_of(dataset: Windows | Packed, rows: Sequence[int | None], world) -> Batch:
    """Return this rank's tokens of some rows, on its device; None is a row without targets."""
    if isinstance(dataset, Rows):  # as long as the longest, rounded up: so ranks can share it
        batch = dataset.batch(rows, multiple=world.parallel.multiple_of_tokens)
    else:
        batch = dataset.batch(rows)
    return share_sequences(batch, world).to(world.device)


def read_ahead(
    read: Callable[[int], Batch], steps: Iterable[int], device: torch.device
) -> Iterator[Batch]:
    """Yield read(step) on `device` for each step, while a thread reads the next one."""

    def load(step: int) -> Batch:
        if device.type != "cuda":
            return read(step)
        torch.cuda.set_device(device)  # a new thread starts with GPU 0
        return read(step).pinned()

    with ThreadPoolExecutor(1) as pool:
        ahead = None  # the batch that is being read
        for step in steps:
            before, ahead = ahead, pool.submit(load, step)
            if before:
                yield before.result().to(device)
        if ahead:
            yield ahead.result().to(device)


def list_left_out(reading: Reading, name: str) -> None:
    """Let rank 0 list the documents that were left out, if any were, in a file of the cache."""
    if is_rank_zero():
        reading.list_left_out(CACHE / f"{name}-{LEFT_OUT_FILE}")


# --------------------------------------------------------------------------------- command line


def parse_args() -> argparse.Namespace:
    parser = Parser(description="Train a tokenizer, or turn text into token files.")
    # fmt: off
    commands = parser.add_subparsers(dest="command", required=True,
                                     metavar="train-tokenizer|tokenize")
    train = commands.add_parser("train-tokenizer", help="train a byte-pair encoding")
    tokens = commands.add_parser("tokenize", help="write token files for train.py --data")
    train.add_argument("--vocab-size", type=positive_int, default=4096,
                       help="number of tokens, special ones included")
    tokens.add_argument("--tokenizer", default=DEFAULT_TOKENIZER, help="name or tokenizer.model")
    tokens.add_argument("--val-fraction", type=nonnegative_float, default=VAL_FRACTION,
                        help="fraction of the text held out for validation")
    for command, out in ((train, "file"), (tokens, "directory")):
        add = command.add_argument
        add("sources", nargs="+", help="text files, directories, or python: Python's own library")
        add("--out", type=Path, required=True, help=f"{out} to write")
        add("--text-field", default="text", metavar="NAME",
            help="field of records that holds the text")
        add("--skip-bad", action="store_true",
            help="leave out what cannot be read; list it in a file")
    # fmt: on
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    reading = Reading(args.text_field, args.skip_bad)
    if args.out.exists():
        raise UserError(f"{args.out} exists: remove it, or choose another --out")
    if args.command == "train-tokenizer":
        from text.bpe import train_tokenizer  # here, since it is needed once

        train_tokenizer(args.sources, args.vocab_size, args.out, reading)
        reading.list_left_out(args.out.with_suffix(f".{LEFT_OUT_FILE}"))
    else:
        reading = replace(reading, val_fraction=args.val_fraction)
        tokenize(find_files(args.sources), load_tokenizer(args.tokenizer), args.out, reading)
    print(args.out)


if __name__ == "__main__":
    run(main)
