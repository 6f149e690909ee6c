"""Read the documents of a corpus and split them into training and validation.

A corpus is a list of files and directories. The word `python` stands for the default corpus, the
source of Python's standard library, which every machine that runs this code already has.

The split uses no random numbers, so all runs and scripts that read the same files agree on it. Of
many documents, a hash of their names picks those that are held out for validation. Of few, the end
of the text is held out.
"""

import contextlib
import gzip
import math
import sys
import sysconfig
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from os.path import isdir, isfile
from pathlib import Path
from typing import BinaryIO, NamedTuple

from plumbing.json_files import check_string, parse_json
from plumbing.messages import UserError, print_rank_zero

PIECE_BYTES = 1 << 20  # text read and tokenized at a time
MAX_LINE = 64 << 20  # bytes; a small file of gzip's may hold a line of any length
TEXTS = (".txt", ".jsonl", ".md", ".py")  # kinds of files in a corpus
VAL_FRACTION = 0.05  # held out for validation
MESSAGES = {"messages", "conversations"}  # fields with a list that is one record
PANDAS = (
    "python -c \"import pandas; pandas.{}('PATH').to_json('NEW', orient='records', lines=True)\""
)
DATASETS = "python -c \"import datasets; datasets.Dataset.from_file('PATH').to_json('NEW')\""
CSV = (
    'python -c "import csv, json; [print(json.dumps(row)) for row in '
    "csv.DictReader(open('PATH', newline=''){})]\" > NEW"
)
BOM = "\ufeff"  # a byte order mark, with which some programs begin a file: it is no text


class OtherFormat(NamedTuple):
    """A format of files that is not read here, and how to make JSON lines of a file."""

    name: str
    suffix: str
    magic: bytes  # with which a file begins
    command: str

    def convert(self, path: Path) -> str:
        """Return advice to convert a file."""
        new = path.with_suffix(".jsonl")
        return f"run  {self.command.replace('PATH', str(path)).replace('NEW', str(new))}"


OTHER_FORMATS = (
    OtherFormat("Parquet", ".parquet", b"PAR1", PANDAS.format("read_parquet")),
    OtherFormat("Arrow", ".arrow", b"\xff\xff\xff\xff", DATASETS),
    OtherFormat("Arrow", ".feather", b"ARROW1", PANDAS.format("read_feather")),
    OtherFormat("zstd", ".zst", b"(\xb5/\xfd", "zstd -d PATH"),
    OtherFormat("xz", ".xz", b"\xfd7zXZ", "xz -dk PATH"),
    OtherFormat("bzip2", ".bz2", b"BZh91AY", "bzip2 -dk PATH"),
    OtherFormat("zip", ".zip", b"PK\x03\x04", "unzip PATH"),
    OtherFormat("CSV", ".csv", b"", CSV.format("")),
    OtherFormat("CSV", ".tsv", b"", CSV.format(", delimiter='\\t'")),
)


class Piece(NamedTuple):
    """A stretch of text from one document."""

    text: str
    starts_document: bool
    split: str  # "train" or "val"


@dataclass(frozen=True)
class Reading:
    """How documents are read and divided, and what was left out."""

    text_field: str = "text"  # of a record
    skip_bad: bool = False  # leave out what cannot be read, in place of raising UserError
    val_fraction: float = VAL_FRACTION
    left_out: list[str] = field(default_factory=list, repr=False)  # and why

    @contextlib.contextmanager
    def one(self, where: str) -> Iterator[None]:
        """Within this context, what cannot be read ends the context and no more, with skip_bad."""
        try:
            yield
        except (UserError, EOFError, zlib.error, gzip.BadGzipFile) as error:
            problem = error if isinstance(error, UserError) else f"{where} is damaged: {error}"
            if not self.skip_bad:
                raise UserError(problem)
            self.left_out.append(str(problem))

    def list_left_out(self, path: Path) -> None:
        """Write a file with a line for each document that was left out, if any was, and say so."""
        if self.left_out:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("".join(f"{line}\n" for line in self.left_out), "utf-8")
            print(f"left out {len(self.left_out):,} documents: {path}", file=sys.stderr)


def find_files(
    sources: Iterable[str], suffixes: tuple[str, ...] = TEXTS, advice: str = "give one"
) -> list[Path]:
    """Return files as given, then those inside the directories given that have one of the suffixes,
    or for `python` the standard library. Raise UserError, with advice, where a source has none."""
    check_there_is_data(sources)
    files = []
    for source in map(str, sources):
        path = Path(source)
        if source == "python" and ".py" in suffixes and not path.exists():
            files += standard_library()
        elif path.is_dir():
            files += files_inside(path, suffixes, advice)
        else:
            files.append(path)
    for path, times in Counter(map(without_gzip, files)).items():
        if times > 1:
            raise UserError(f"{path} would be read twice: name it once, or leave out one of two")
    return files


def files_inside(directory: Path, suffixes: tuple[str, ...], advice: str) -> list[Path]:
    """Return what find_files finds in a directory. A line says what is left out."""
    found = []
    left_out = Counter()
    for file in filter(Path.is_file, sorted(directory.rglob("*"))):
        kind = _kind(file.relative_to(directory))
        if kind in suffixes:
            found.append(file)
        else:
            left_out[kind] += 1
    counts = ", ".join(f"{n:,} {kind}" for kind, n in left_out.most_common())
    if not found:
        others = [format for format in OTHER_FORMATS if format.suffix in left_out]
        if others:
            one = directory / f"FILE{others[0].suffix}"
            advice = f"of each {others[0].name} file make JSON lines: {others[0].convert(one)}"
        kinds = " or ".join(suffixes)
        raise UserError(f"{directory} holds no {kinds} file, but {counts or 'nothing'}: {advice}")
    if left_out:
        line = f"{directory}: {len(found):,} files; left out: {counts}"
        print_rank_zero(line, file=sys.stderr)
    return found


def check_there_is_data(sources: Iterable[str]) -> None:
    for source in map(str, sources):
        if source != "python" and not (isfile(source) or isdir(source)):
            raise UserError(f"no data at '{source}': give a file, a directory, or `python`")


def _kind(path: Path) -> str:
    """Return the suffix of a file's path; "hidden" if the file or a directory is, as .git."""
    hidden = any(part.startswith(".") for part in path.parts)
    return "hidden" if hidden else kind_of(path) or "without a suffix"


def kind_of(path: Path) -> str:
    """Return the suffix of a file's name, without that of gzip."""
    return without_gzip(path).suffix


def without_gzip(path: Path) -> Path:
    return path.with_name(path.name.removesuffix(".gz"))


def open_file(path: Path) -> BinaryIO:
    """Open a file of text, which gzip may have compressed. Raise UserError for OTHER_FORMATS."""
    file = gzip.open(path) if path.suffix == ".gz" else open(path, "rb")
    first_bytes = file.peek(8)
    for format in OTHER_FORMATS:
        has_magic = format.magic and first_bytes.startswith(format.magic)
        if has_magic or (not format.magic and kind_of(path) == format.suffix):
            raise UserError(f"{path} is {format.name}: {format.convert(path)}")
    return file


def text_size(path: Path) -> int:
    """Return the bytes of a file, of a compressed one those of its text."""
    if path.suffix != ".gz":
        return path.stat().st_size
    with open_file(path) as file:
        return sum(map(len, iter(lambda: file.read(PIECE_BYTES), b"")))


def standard_library() -> list[Path]:
    """Return the files of the default corpus: Python's own source, without its tests and without
    the packages that hold tables rather than code."""
    root = Path(sysconfig.get_paths()["stdlib"])
    skipped = set("site-packages dist-packages test tests idle_test encodings pydoc_data".split())
    files = []
    for path in sorted(root.rglob("*.py")):
        if skipped.isdisjoint(path.relative_to(root).parts):
            files.append(path)
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
    return "/".join(path.absolute().parts[-2:])


# -------------------------------------------------------------------------------------- reading


def read_pieces(files: list[Path], reading: Reading = Reading()) -> Iterator[Piece]:
    """Yield the text of a corpus in pieces of about PIECE_BYTES that end at line ends.

    A file is one document; in a `.jsonl` or `.json` file each record is one, in its "text" field.
    `split_of` assigns documents to training or validation; but with fewer than 100 files and no
    records, the end of the whole text is held out. Raise UserError where a file is not text;
    `reading` may have its record, or the rest of the file, left out."""
    val_fraction = reading.val_fraction
    has_records = {path: kind_of(path) in (".jsonl", ".json") for path in files}
    hold_out_end = len(files) < 100 and not any(has_records.values())
    sizes = []
    for path in files:
        with reading.one(str(path)):
            sizes.append((path, text_size(path) if hold_out_end else 0))
    train_bytes = sum(size for _, size in sizes) * (1 - val_fraction)
    offset = 0  # where a file begins in the corpus, in bytes
    for path, size in sizes:
        name = document_name(path)
        with reading.one(str(path)):
            if has_records[path]:
                for number, where, record in read_records(path, '{"text": "..."}', reading):
                    with reading.one(where):
                        text = _text_of(record, reading.text_field, where)
                        yield Piece(text, True, split_of(f"{name}:{number}", val_fraction))
            elif hold_out_end:
                yield from _read_text(path, train_bytes - offset)
            else:
                is_held_out = split_of(name, val_fraction) == "val"
                yield from _read_text(path, 0 if is_held_out else math.inf)
        offset += size


def _text_of(record: dict, field: str, where: str) -> str:
    if field not in record:
        found = ", ".join(record) or "nothing"
        advice = "give --text-field"
        if record.keys() & (MESSAGES | {"instruction", "prompt"}):
            advice += "; conversations are for fine-tuning, and for evaluate.py --chat"
        raise UserError(f'{where}: there is no "{field}" but {found}: {advice}')
    return check_string(record[field], f'{where}: "{field}" is')


def _read_text(path: Path, val_start: float) -> Iterator[Piece]:
    """Yield a file up to the first line end from byte `val_start` on as a document for training,
    the rest as one for validation. `val_start` may be negative, or beyond the end."""
    split = "train"
    starts_document = True
    with open_file(path) as file:
        while True:
            left = val_start - file.tell()  # unread bytes of training text
            if split == "train" and left <= 0:
                split = "val"
                starts_document = True
            size = PIECE_BYTES if split == "val" else int(min(PIECE_BYTES, left))
            whole = file.read(size)
            rest = file.readline(MAX_LINE)  # of the line that `whole` ends in
            if not whole + rest:
                return
            if len(rest) == MAX_LINE:
                raise UserError(f"{path} has a line of {MAX_LINE >> 20} MiB or more: divide it")
            text = _decode(whole + rest, str(path))
            # Where files with a mark were joined, lines begin with one.
            text = text.removeprefix(BOM).replace(f"\n{BOM}", "\n")
            yield Piece(text, starts_document, split)
            starts_document = False


def _decode(raw: bytes, where: str) -> str:
    try:
        text = raw.decode()
    except UnicodeDecodeError as error:
        raise UserError(f"{where}: byte 0x{raw[error.start]:02x} is not UTF-8: convert the file")
    if "\0" in text:
        raise UserError(f"{where}: a zero byte is not text: leave the file out")
    return text


def read_records(
    path: Path, expected: str, reading: Reading = Reading()
) -> Iterator[tuple[int, str, dict]]:
    """Yield (number, "FILE, line N", JSON object) for each line of a file; blank lines are skipped.
    A `.json` file may be an array of objects instead.

    Raise UserError, which asks for `expected`, where a line is something else."""

    def parse(raw: bytes, where: str) -> object:
        text = _decode(raw, where).removeprefix(BOM)
        with contextlib.suppress(UserError):  # it is not JSON, or nested too deep
            return parse_json(text, where)

    def elements(file: BinaryIO) -> list:
        """Return the elements of a list, or the lines of a file that holds none."""
        limit = MAX_LINE + 20 * path.stat().st_size  # gzip makes text some five times smaller
        whole = file.read(limit + 1)
        if len(whole) > limit:
            raise UserError(f"{path} holds more than {limit:,} bytes: give a .jsonl file")
        value = parse(whole, str(path))
        if isinstance(value, list):
            return value
        if value is None and whole.lstrip()[:1] == b"[":
            raise UserError(f"{path} begins as a list, and is no JSON: is it complete?")
        lines = whole.splitlines(keepends=True)
        if isinstance(value, dict):
            inside = [k for k in value.keys() - MESSAGES if isinstance(value[k], list)]
            if len(lines) > 1 or inside == [*value]:
                which = f"the list in {inside[0]!r}" if inside else "a list of objects"
                raise UserError(f"{path} is one JSON object: give {which}, or an object a line")
        return lines

    with reading.one(str(path)), open_file(path) as file:
        is_json = kind_of(path) == ".json"
        found = elements(file) if is_json else iter(lambda: file.readline(MAX_LINE), b"")
        for number, line in enumerate(found, 1):
            is_line = isinstance(line, bytes)
            if is_line and line.isspace():
                continue
            where = f"{path}, {'line' if is_line else 'element'} {number}"
            with reading.one(where):
                record = parse(line, where) if is_line else line
                if record is None and is_line and b"\r" in line.strip():
                    advice = f"run  tr '\\r' '\\n' < {path} > NEW"
                    raise UserError(f"{where}: its lines end in CR alone: {advice}")
                if not isinstance(record, dict):
                    raise UserError(f"{where}: {line!r:.60} is not a JSON object: give {expected}")
                yield number, where, record
