"""Read the documents of a corpus and split them into training and validation.

A corpus is a list of files and directories. The word `python` stands for the default corpus, the
source of Python's standard library, which every machine that runs this code already has.

The split uses no random numbers, so all runs and scripts that read the same files agree on it. Of
many documents, a hash of their names picks those that are held out for validation. Of few, the end
of the text is held out.
"""

import json
import math
import sys
import sysconfig
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from plumbing.processes import UserError, print_rank_zero

PIECE_BYTES = 1 << 20  # text read and tokenized at a time
VAL_FRACTION = 0.05  # held out for validation


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
            kinds = {p: _kind(p.relative_to(path)) for p in path.rglob("*") if p.is_file()}
            found = sorted(p for p, kind in kinds.items() if kind in suffixes)
            if not found:
                raise UserError(f"{source} holds no .txt, .jsonl, .md or .py file")
            left_out = Counter(kind for kind in kinds.values() if kind not in suffixes)
            if left_out:
                counts = ", ".join(f"{n:,} {kind}" for kind, n in left_out.most_common())
                line = f"{source}: {len(found):,} files; left out: {counts}"
                print_rank_zero(line, file=sys.stderr)
            files += found
        elif path.is_file():
            files.append(path)
        else:
            raise UserError(f"no data at '{source}': give a file, a directory, or `python`")
    return files


def _kind(path: Path) -> str:
    """Return the suffix of a file's path; "hidden" if the file or a directory is, as .git."""
    hidden = any(part.startswith(".") for part in path.parts)
    return "hidden" if hidden else path.suffix or "without a suffix"


def standard_library() -> list[Path]:
    """Return the files of the default corpus: Python's own source, without its tests and without
    the packages that hold tables rather than code."""
    root = Path(sysconfig.get_paths()["stdlib"])
    skipped = set("site-packages dist-packages test tests idle_test encodings pydoc_data".split())
    files = sorted(p for p in root.rglob("*.py") if skipped.isdisjoint(p.relative_to(root).parts))
    if not files:
        raise UserError(f"no Python source in {root}: give text of your own with --data")
    return files


# ------------------------------------------------------------------- the train/validation split


def split_of(document: str, val_fraction: float = VAL_FRACTION) -> str:
    """Return "train" or "val" for the document of this name, the same in every run."""
    fraction = zlib.crc32(document.encode()) / 2**32  # in [0, 1)
    return "val" if fraction < val_fraction else "train"


def document_name(path: Path) -> str:
    """Return the name of a file for `split_of`: DIRECTORY/FILE. The rest of the path is left out,
    so that a corpus can be moved without changing the split."""
    return "/".join(path.parts[-2:])


# -------------------------------------------------------------------------------------- reading


def read_pieces(files: list[Path], val_fraction: float = VAL_FRACTION) -> Iterator[Piece]:
    """Yield the text of a corpus in pieces of about PIECE_BYTES that end at line ends.

    A file is one document; in a `.jsonl` file each line is one, in its "text" field. `split_of`
    assigns documents to training or validation; but with fewer than 100 files and no `.jsonl`, the
    end of the whole text is held out. Raise UserError where a file is not text."""
    hold_out_end = len(files) < 100 and not any(path.suffix == ".jsonl" for path in files)
    train_bytes = sum(path.stat().st_size for path in files) * (1 - val_fraction)
    offset = 0  # where this file begins in the corpus, in bytes
    for path in files:
        name = document_name(path)
        if path.suffix == ".jsonl":
            for number, record in read_json_lines(path, '{"text": "..."}'):
                where = f"{path}, line {number}"
                if "text" not in record:
                    found = ", ".join(record) or "nothing"
                    raise UserError(f'{where}: there is no "text" but {found}')
                text = check_string(record["text"], f'{where}: "text" is')
                yield Piece(text, True, split_of(f"{name}:{number}", val_fraction))
        elif hold_out_end:
            yield from _read_text(path, train_bytes - offset)
        else:
            yield from _read_text(path, 0 if split_of(name, val_fraction) == "val" else math.inf)
        offset += path.stat().st_size


def _read_text(path: Path, val_start: float) -> Iterator[Piece]:
    """Yield a file up to the first line end from byte `val_start` on as a document for training,
    the rest as one for validation. `val_start` may be negative, or beyond the end."""
    split, starts_document = "train", True
    with open(path, "rb") as file:
        while True:
            left = val_start - file.tell()  # unread bytes of training text
            if split == "train" and left <= 0:
                split, starts_document = "val", True
            size = PIECE_BYTES if split == "val" else int(min(PIECE_BYTES, left))
            raw = file.read(size) + file.readline()
            if not raw:
                return
            yield Piece(_decode(raw, str(path)), starts_document, split)
            starts_document = False


def _decode(raw: bytes, where: str) -> str:
    try:
        text = raw.decode()
    except UnicodeDecodeError as error:
        raise UserError(f"{where}: byte 0x{raw[error.start]:02x} is not UTF-8: convert the file")
    if "\0" in text:
        raise UserError(f"{where}: a zero byte is not text: leave the file out")
    return text


def read_json_lines(path: Path, expected: str) -> Iterator[tuple[int, dict]]:
    """Yield (line number, JSON object) for each line of a `.jsonl` file; blank lines are skipped.
    Raise UserError, which asks for `expected`, where a line is something else."""
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            if line.isspace():
                continue
            where = f"{path}, line {number}"
            try:
                record = json.loads(_decode(line, where).removeprefix("\ufeff"))
            except (ValueError, RecursionError):  # not JSON, or nested too deep
                record = None
            if not isinstance(record, dict):
                raise UserError(f"{where}: {line[:60]!r} is not a JSON object: give {expected}")
            yield number, record


def check_string(value: object, what: str) -> str:
    """Return a string that was in a JSON file. Raise UserError for another value.

    JSON can hold half of a character, a lone surrogate, and UTF-8 cannot: it becomes U+FFFD."""
    if not isinstance(value, str):
        raise UserError(f"{what} {value!r:.60}: give it as a string")
    return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
