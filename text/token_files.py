"""Token files in llm.c's `.bin` format, which are mapped into memory.

A header of 256 int32 (magic number, version, number of tokens, zeros), then the tokens, whose dtype
follows from magic number and version.
"""

import contextlib
import resource
from pathlib import Path
from typing import BinaryIO

import numpy as np

from plumbing.messages import UserError
from text.vocabulary import Tokenizer

HEADER_BYTES = 256 * 4
TOKEN_DTYPES = {(20240520, 1): np.dtype("<u2"), (20240801, 7): np.dtype("<u4")}
TOKENS_PER_FILE = 100_000_000


def open_token_file(path: Path) -> np.ndarray:
    """Map the tokens of a `.bin` file into memory, where processes share them. Raise UserError
    if the file is no token file, or is incomplete."""
    with contextlib.suppress(OSError, ValueError):  # mapped files stay open: allow the most
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    header = np.fromfile(path, dtype="<i4", count=256).tolist()
    dtype = TOKEN_DTYPES.get(tuple(header[:2])) if len(header) == 256 else None
    if dtype is None:
        raise UserError(f"{path} is not a token file: write one with data.py tokenize")
    expected = header[2]
    found = (path.stat().st_size - HEADER_BYTES) // dtype.itemsize
    if found != expected or expected == 0:
        raise UserError(
            f"{path} is empty or damaged: its header says {expected} tokens, and it holds {found}"
        )
    return np.memmap(path, dtype=dtype, mode="r", offset=HEADER_BYTES, shape=(expected,))


def check_ids(tokens: np.ndarray, tokenizer: Tokenizer) -> None:
    """Raise UserError if a token is not in the tokenizer's vocabulary."""
    if tokens.max() >= tokenizer.vocab_size:
        raise UserError(
            f"the data holds token {tokens.max()}, but tokenizer {tokenizer.name} has only "
            f"{tokenizer.vocab_size}: give the --tokenizer that the data was made with"
        )


class TokenFileWriter:
    """Writes tokens to DIR/SPLIT_000000.bin, DIR/SPLIT_000001.bin, ... of TOKENS_PER_FILE each."""

    def __init__(self, directory: Path, split: str, vocab_size: int):
        self.directory = directory
        self.split = split
        two_bytes, four_bytes = TOKEN_DTYPES.items()
        self.kind, self.dtype = two_bytes if vocab_size <= 1 << 16 else four_bytes
        self.file: BinaryIO | None = None  # the unfinished file
        self.n_tokens = 0  # tokens in all files

    def write(self, tokens: np.ndarray) -> None:
        """Append tokens, beginning a new file whenever one is full."""
        while len(tokens):
            number, in_file = divmod(self.n_tokens, TOKENS_PER_FILE)
            if in_file == 0:
                self.close()
                self.file = open(self.directory / f"{self.split}_{number:06d}.bin", "wb")
                self.file.write(bytes(HEADER_BYTES))  # zeros, so an unfinished file is refused
            part, tokens = np.split(tokens, [TOKENS_PER_FILE - in_file])
            self.file.write(part.astype(self.dtype).tobytes())
            self.n_tokens += len(part)

    def close(self) -> None:
        """Complete the header of the last file, which may be shorter than the others."""
        if self.file:
            in_file = (self.file.tell() - HEADER_BYTES) // self.dtype.itemsize
            self.file.seek(0)
            self.file.write(np.array([*self.kind, in_file], "<i4").tobytes())
            self.file.close()
            self.file = None
