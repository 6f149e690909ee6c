"""Corpora: text files, the documents in them, and their split into training and validation.

A corpus is a list of files and directories. The word `python` stands for the default corpus, the
source of Python's standard library, which every machine that runs this code already has.

The split uses no random numbers: of many documents, a hash of their names picks those that are held
out for validation; of few, the end of the text is held out. So all runs and all scripts that read
the same files agree on the split.
"""

import json
import math
import sysconfig
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from plumbing.processes import UserError

PIECE_BYTES = 1 << 20  # bytes of text read and tokenized at a time
VAL_FRACTION = 0.05  # of a corpus, held out for validation


class Piece(NamedTuple):
    """A stretch of text from one document."""

    text: str
    starts_document: bool
    split: str  # "train" or "val"


def find_files(sources: Iterable[str]) -> list[Path]:
    """Return the text files of a corpus: files as given, then those inside the directories given,
    or for `python` the standard library. Raise UserError where a source has no text."""
    files = []
    for source in map(str, sources):
        path = Path(source)
        if source == "python" and not path.exists():
            files += standard_library()
        elif path.is_dir():
            suffixes = (".txt", ".jsonl", ".md", ".py")
            found = sorted(p for p in path.rglob("*") if p.suffix in suffixes and p.is_file())
            if not found:
                raise UserError(f"{source} holds no .txt, .jsonl, .md or .py file")
            files += found
        elif path.is_file():
            files.append(path)
        else:
            raise UserError(f"no data at '{source}': give a file, a directory, or `python`")
    return files


def standard_library() -> list[Path]:
    """Return the files of the default corpus: Python's own source, without its tests and without
    the packages that hold tables rather than code."""
    root = Path(sysconfig.get_paths()["stdlib"])
    skipped = {"site-packages", "dist-packages", "test", "tests", "idle_test"}
    skipped |= {"encodings", "pydoc_data"}
    files = sorted(p for p in root.rglob("*.py") if skipped.isdisjoint(p.relative_to(root).parts))
    if not files:
        raise UserError(f"no Python source in {root}: give text of your own with --data")
    return files


# ------------------------------------------------------------------- the train/validation split


def split_of(document: str, val_fraction: float = VAL_FRACTION) -> str:
    """Return "train" or "val" for the document of this name."""
    return "val" if hash_fraction(document) < val_fraction else "train"


def hash_fraction(name: str) -> float:
    """Map a name to a number in [0, 1) by a hash: the same one in every run, on every machine."""
    return zlib.crc32(name.encode()) / 2**32


def document_name(path: Path) -> str:
    """Return a file's name for `split_of`: its own and that of its directory. The rest of the path
    is left out, so that a corpus can be moved without changing the split."""
    return "/".join(path.parts[-2:])


# -------------------------------------------------------------------------------------- reading


def read_pieces(files: list[Path], val_fraction: float = VAL_FRACTION) -> Iterator[Piece]:
    """Yield the text of a corpus in pieces of about PIECE_BYTES that end at line ends.

    A file is one document; in a `.jsonl` file each line is one, in its "text" field. `split_of`
    assigns documents to training or validation. Fewer than 100 text files are too few for that:
    there the end of the text is held out, in the order of files. Raise UserError where a file is
    not text.
    """
    hold_out_end = len(files) < 100 and not any(path.suffix == ".jsonl" for path in files)
    train_bytes = sum(path.stat().st_size for path in files) * (1 - val_fraction)
    offset = 0  # where this file begins in the corpus, in bytes
    for path in files:
        name = document_name(path)
        if path.suffix == ".jsonl":
            yield from _read_lines(path, name, val_fraction)
        elif hold_out_end:
            yield from _read_text(path, train_bytes - offset)
        else:
            yield from _read_text(path, 0 if split_of(name, val_fraction) == "val" else math.inf)
        offset += path.stat().st_size


def _read_lines(path: Path, name: str, val_fraction: float) -> Iterator[Piece]:
    """Yield each line of a `.jsonl` file as a document; blank lines are skipped."""
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            if not line.isspace():
                split = split_of(f"{name}:{number}", val_fraction)
                yield Piece(_text_field(line, path, number), True, split)


def _read_text(path: Path, val_start: float) -> Iterator[Piece]:
    """Yield a file as one document for training up to about byte `val_start`, at the end of a line,
    and what follows as one for validation. All of the file is for validation if `val_start` is 0
    or negative, and none of it if `val_start` is beyond the end."""
    split, starts_document = "train", True
    with open(path, "rb") as file:
        while True:
            left = val_start - file.tell()  # bytes of training text that are not read yet
            if split == "train" and left <= 0:
                split, starts_document = "val", True
            size = PIECE_BYTES if split == "val" else int(min(PIECE_BYTES, left))
            raw = file.read(size) + file.readline()
            if not raw:
                return
            yield Piece(_decode(raw, path), starts_document, split)
            starts_document = False


def _decode(raw: bytes, path: Path) -> str:
    try:
        if b"\0" not in raw:
            return raw.decode()
        problem = "a zero byte"
    except UnicodeDecodeError as error:
        problem = f"byte 0x{raw[error.start]:02x}"
    raise UserError(f"{path} is not UTF-8 text (it holds {problem}): convert it, or leave it out")


def _text_field(line: bytes, path: Path, number: int) -> str:
    try:
        text = json.loads(line)["text"]
    except (ValueError, KeyError, TypeError):
        text = None
    if not isinstance(text, str):
        raise UserError(f'{path}, line {number}: expected {{"text": "..."}}, got {line[:60]!r}')
    return replace_lone_surrogates(text)


def replace_lone_surrogates(text: str) -> str:
    """Replace halves of characters by U+FFFD. JSON can hold such a half (a surrogate) without the
    other; UTF-8 and tokenizers cannot."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
