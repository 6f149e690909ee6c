"""Conversations in, packed batches out: what a model is fine-tuned on.

A sample is one conversation. Only what the assistant says is learnt, its end token included, so
that the model learns to stop; what others say is read, but its targets are IGNORE. Samples are
short and rows are long, so several samples share a row, and what is left of it is padding:

    tokens      bos  Hi   >   Hel  lo  | bos  1+1  >   2  | pad  pad
    targets      -   -   Hel  lo   eot |  -    -   2  eot |  -    -
    positions    0   1    2    3    4  |  0    1   2   3  |  0    1

Positions start again at 0 with every sample, and attention stays between two zeros (model.py,
`document_mask`): a sample has the loss and the gradient that it has in a row of its own. A sample
of n ids takes n - 1 slots, because its last id is a target only and its first an input only.

Who has no conversations takes the set that is on every machine: functions of Python's standard
library, for which the model learns to write the docstring.
"""

import ast
import bisect
import functools
import itertools
import json
import re
import sys
import time
import zlib
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from data import Batch, Tokenizer, chance, standard_library, whole_characters
from model import IGNORE, UserError

Conversation = list[dict[str, str]]  # [{"role": "user", "content": "Hi"}, ...]
VAL_FRACTION = 0.05  # of modules or lines; held out by the rule of data.py, `read_pieces`

# ------------------------------------------------------------------------------- conversation files

ROLES = ("system", "user", "assistant")
MESSAGES = '{"messages": [{"role", "content"}, ...]}'
TURNS = (("instruction", "input", "output"), ("prompt", "completion"))  # the last is the answer
KINDS = f'{MESSAGES}, {{"instruction", "input", "output"}} or {{"prompt", "completion"}}'


def read_conversations(path: Path) -> Iterator[tuple[int, Conversation]]:
    """The conversations of a JSONL file, each after the number of its line; blank lines are none.

    A line is an object of one of the KINDS; its "input" may be absent. A conversation ends with its
    last answer: what a file has after that is left out, as nothing in it would be learnt."""
    if not path.is_file():
        what = "is a directory" if path.is_dir() else "does not exist"
        raise UserError(f"{path} {what}: give a file with one of these a line: {KINDS}")
    empty = True
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            if not line.isspace():
                empty, where = False, f"{path}, line {number}"
                yield number, _messages(_record(line, where), where)
    if empty:
        raise UserError(f"{path} holds no conversation: give one of these a line: {KINDS}")


def _record(line: bytes, where: str) -> dict:
    try:
        record = json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        byte = error.object[error.start]
        raise UserError(f"{where}: byte 0x{byte:02x} is not UTF-8: convert the file to UTF-8")
    except (ValueError, RecursionError):  # not JSON, or nested too deep
        record = None
    if not isinstance(record, dict):
        raise UserError(f"{where}: {line[:60]!r} is no JSON object: give one of {KINDS}")
    return record


def _messages(record: dict, where: str) -> Conversation:
    """The conversation in an object of any of the three kinds."""
    if "messages" in record:
        return _checked(record["messages"], where)
    fields = record | {"input": record.get("input") or ""}  # absent, null or empty alike
    for keys in TURNS:
        if set(keys) <= fields.keys():
            for key in keys:
                if not isinstance(fields[key], str):
                    raise UserError(f'{where}: "{key}" is {fields[key]!r:.60}: give it as a string')
            *asked, answer = (fields[key] for key in keys)
            return _checked(_turn("\n\n".join(filter(None, asked)), answer), where)
    found = ", ".join(map(repr, record)) or "nothing"
    raise UserError(f"{where}: an object with {found:.200}: give one of {KINDS}")


def _turn(asked: str, answer: str) -> Conversation:
    return [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]


def _checked(messages: object, where: str) -> Conversation:
    """Messages as JSON has them, whatever that is -> those up to the last answer."""
    if not isinstance(messages, list):
        raise UserError(f'{where}: "messages" is no list: give {MESSAGES}')
    checked, answers = [], []
    for i, message in enumerate(messages, 1):
        at = f"{where}: message {i}"
        if not isinstance(message, dict):
            raise UserError(f'{at} is {message!r:.60}: give {{"role": "...", "content": "..."}}')
        role, content = message.get("role"), message.get("content")
        if role not in ROLES:
            known = ", ".join(ROLES)
            raise UserError(f'{at} has the "role" {role!r:.60}: only {known} can be taught')
        if not isinstance(content, str):
            raise UserError(f'{at} has the "content" {content!r:.60}: give it as a string')
        if role == "assistant" and not content.strip():
            raise UserError(f"{at} is an empty answer: write one, or leave the line out")
        checked.append({"role": role, "content": whole_characters(content)})
        answers += [i] * (role == "assistant")
    if not answers:
        raise UserError(f"{where}: no message has role assistant: give an answer to learn")
    return checked[: answers[-1]]


# ---------------------------------------------------------------------------------- the default set

LONGEST_SOURCE = 1200  # characters
SUMMARY_LENGTHS = range(15, 301)  # characters: less says nothing, more is no summary
Function = ast.FunctionDef | ast.AsyncFunctionDef


def docstrings() -> Iterator[tuple[str, str, Conversation]]:
    """Functions of the standard library, and the first paragraph of their docstrings as answer.

    Yields (split, module, conversation). Modules are held out by the rule of data.py, so those of
    "val" are those that pretraining on `python` has not seen either. A source comes once, and
    training modules come first: what also stands in one of them is never held out."""
    modules = []
    for path in standard_library():
        name = "/".join(path.parts[-2:])
        modules.append(("val" if chance(name) < VAL_FRACTION else "train", name, path))
    seen = set()
    for split, name, path in sorted(modules):
        text = path.read_text(encoding="utf-8")
        lines = text.split("\n")  # as Python counts them; splitlines also splits at form feeds
        for function in ast.walk(ast.parse(text)):
            docstring = isinstance(function, Function) and ast.get_docstring(function)
            if not docstring:
                continue
            summary = " ".join(re.split(r"\n\s*\n", docstring)[0].split())
            source = _without_docstring(function, lines)
            fits = 0 < len(source) <= LONGEST_SOURCE and len(summary) in SUMMARY_LENGTHS
            if fits and source not in seen:
                seen.add(source)
                asked = f"Write the docstring for this function.\n\n{source}"
                yield split, name, _turn(asked, summary)


def _without_docstring(function: Function, lines: list[str]) -> str:
    """Source of a function that begins with a docstring, without that and not indented.

    Empty where the docstring is all there is to the function, or shares a line with the rest."""
    docstring, *rest = function.body
    before = lines[docstring.lineno - 1][: docstring.col_offset]
    if not rest or rest[0].lineno == docstring.end_lineno or before.strip():
        return ""
    first = min(node.lineno for node in [function, *function.decorator_list])
    kept = lines[first - 1 : docstring.lineno - 1]
    kept += lines[docstring.end_lineno : function.end_lineno]
    return "\n".join(line.removeprefix(" " * function.col_offset) for line in kept)


# ----------------------------------------------------------------------------------- what is learnt


def encode(
    messages: Conversation, tokenizer: Tokenizer, train_on_prompt: bool = False
) -> tuple[list[int], list[bool]]:
    """Ids of a conversation up to its last answer, and for each whether it is to be learnt.

    Learnt are the answers of all turns, each with the token that ends it; with `train_on_prompt`
    all but the first id, which nothing precedes. The format is Llama 3's where the tokenizer has
    the tokens for it, else plain headings. What looks like a special token in a text stays text."""
    end = tokenizer.special.get("<|eot_id|>", tokenizer.eos)
    ids, learnt, asked = [tokenizer.bos], [False], []
    for message in messages:
        if message["role"] != "assistant":
            asked.append(message)
            continue
        before = _before_answer(asked, tokenizer)
        answer = [*tokenizer.encode(message["content"].strip()), end]
        ids += before + answer
        learnt += [train_on_prompt] * len(before) + [True] * len(answer)
        asked = []
    return ids, learnt


def _before_answer(asked: Conversation, tokenizer: Tokenizer) -> list[int]:
    """Ids of what others say in a turn, and of the heading under which the assistant answers."""
    if "<|eot_id|>" in tokenizer.special:
        return tokenizer.encode_chat(asked)[1:]  # the first begins the text, as `encode` does
    texts = [f"### {m['role'].title()}:\n{m['content'].strip()}\n\n" for m in asked]
    return tokenizer.encode("".join(texts) + "### Assistant:\n")


def encode_prompt(messages: Conversation, tokenizer: Tokenizer) -> list[int]:
    """Ids up to where the next answer begins, or the last one where it is the last message.

    By construction they are the first of `encode`'s: what an empty answer gives, but for its end.
    """
    asked = messages[:-1] if messages and messages[-1]["role"] == "assistant" else messages
    ids, _ = encode([*asked, {"role": "assistant", "content": ""}], tokenizer)
    return ids[:-1]


# -------------------------------------------------------------------------------------- packed rows


def pack(lengths: list[int], seq_len: int) -> list[list[int]]:
    """Numbers of the samples in each row: every sample in one row, no row above seq_len slots.

    From the longest to the shortest, a sample goes into the row where it leaves the least room, or
    into a new one. This best fit decreasing needs at most 11/9 of the fewest rows and a few more
    (Johnson et al. 1974). Rows with equal room are as good as each other: a stack of them for each
    room, and a search in the sorted rooms, take moments for 100,000 samples."""
    if max(lengths, default=0) > seq_len:
        raise UserError(f"a sample of {max(lengths)} tokens fits no row: give a longer --seq-len")
    rows, rooms = [], []  # rooms: the slots left in rows, each number once, ascending
    rows_with = defaultdict(list)  # slots left -> numbers of the rows
    for sample in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        at = bisect.bisect_left(rooms, lengths[sample])
        if at == len(rooms):
            row, room = len(rows), seq_len
            rows.append([])
        else:
            row, room = rows_with[rooms[at]].pop(), rooms[at]
            if not rows_with[room]:
                del rooms[at]
        rows[row].append(sample)
        room -= lengths[sample]
        if not rows_with[room]:
            bisect.insort(rooms, room)
        rows_with[room].append(row)
    return rows


class Packed:
    """Samples packed into rows, numbered from 0: to a training loop, the like of data.Windows.

    samples: (ids [n], learnt [n]) of each, as `encode` gives them, with n at most seq_len + 1."""

    def __init__(
        self, samples: list[tuple[list[int], list[bool]]], seq_len: int, tokenizer: Tokenizer
    ):
        self.seq_len, self.tokenizer = seq_len, tokenizer
        # In arrays an id takes 5 bytes with its mark, in lists of Python's numbers about 48.
        self.samples = [(np.asarray(i, np.int32), np.asarray(j, bool)) for i, j in samples]
        self.rows = pack([len(ids) - 1 for ids, _ in self.samples], seq_len)
        # Any token would do, as no sample sees padding and none learns it; this is Llama's own.
        self.pad = tokenizer.special.get("<|finetune_right_pad_id|>", 0)

    def __len__(self) -> int:
        return len(self.rows)

    def checksum(self) -> int:
        """Tells sets apart, as over nodes with files of their own."""
        return functools.reduce(lambda sum, sample: zlib.crc32(sample[0], sum), self.samples, 0)

    def batch(self, numbers: list[int | None]) -> Batch:
        """The rows of these numbers; None gives a row without targets."""
        shape = len(numbers), self.seq_len  # [b, T]
        tokens, targets = np.full(shape, self.pad), np.full(shape, IGNORE)
        positions = np.zeros(shape, dtype=np.int64)
        for b, number in enumerate(numbers):
            start = 0
            for sample in [] if number is None else self.rows[number]:
                ids, learnt = self.samples[sample]
                end = start + len(ids) - 1
                tokens[b, start:end] = ids[:-1]
                targets[b, start:end] = np.where(learnt[1:], ids[1:], IGNORE)
                positions[b, start:end] = np.arange(end - start)
                start = end
            positions[b, start:] = np.arange(self.seq_len - start)  # padding is a document too
        text_bytes = self.tokenizer.count_bytes(targets)
        return Batch(*map(torch.from_numpy, (tokens, targets, positions)), text_bytes)


# -------------------------------------------------------------------------------- from data to rows

ANSWER_ROOM = 64  # tokens that generation may take after a held-out prompt, within seq_len


class Sample(NamedTuple):
    split: str  # "train" or "val"
    messages: Conversation
    encoded: tuple[np.ndarray, np.ndarray]  # ids [n] int32, learnt [n] bool


def open_samples(
    data: list[str],
    tokenizer: Tokenizer,
    seq_len: int,
    long: str = "truncate",
    train_on_prompt: bool = False,
    quiet: bool = False,
) -> tuple[Packed, Packed, list[tuple[list[int], str]], str]:
    """Training rows, held-out rows, up to 3 held-out prompts (ids, true answer), and their counts.

    data: JSONL files, directories of them, or `python` for the docstrings. Of a sample that is
    longer than a row, long="truncate" keeps the beginning and "drop" nothing; one of which nothing
    is left to learn is dropped in any case. `quiet`: no progress is shown, however long it takes.
    """
    samples, changed = _encode_all(data, tokenizer, seq_len, long, train_on_prompt, quiet)
    train, val = ([s for s in samples if s.split == split] for split in ("train", "val"))
    if not train or not val:  # of a handful, chance may hold out none, or all
        train, val = samples[:-1], samples[-1:]
    rows, val_rows = (Packed([s.encoded for s in x], seq_len, tokenizer) for x in (train, val))
    filled = sum(len(ids) - 1 for ids, _ in rows.samples) / (len(rows) * seq_len)
    about = (
        f"{len(train):,} samples in {len(rows):,} rows of {seq_len:,} tokens, "
        f"{100 * filled:.0f} % filled; {len(val):,} held out, in {len(val_rows):,} rows{changed}"
    )
    varied = sorted(val, key=lambda s: chance(str(s.messages)))  # not all from one place
    prompts = ((encode_prompt(s.messages, tokenizer), s.messages[-1]["content"]) for s in varied)
    fitting = (prompt for prompt in prompts if len(prompt[0]) <= seq_len - ANSWER_ROOM)
    return rows, val_rows, list(itertools.islice(fitting, 3)), about


def _encode_all(
    data: list[str],
    tokenizer: Tokenizer,
    seq_len: int,
    long: str,
    train_on_prompt: bool,
    quiet: bool,
) -> tuple[list[Sample], str]:
    """The samples that can be used, two at least, and how many were truncated or dropped."""
    kept, truncated, dropped, longest, started = [], 0, 0, 0, time.monotonic()
    for count, (split, messages) in enumerate(_conversations(data), 1):
        ids, learnt = encode(messages, tokenizer, train_on_prompt)
        longest = max(longest, len(ids) - 1)
        over = len(ids) - 1 > seq_len
        ids, learnt = ids[: seq_len + 1], learnt[: seq_len + 1]
        if (over and long == "drop") or not any(learnt):
            dropped += 1
        else:
            truncated += over
            encoded = np.array(ids, np.int32), np.array(learnt)
            kept.append(Sample(split, messages, encoded))
        seconds = time.monotonic() - started
        if count % 1000 == 0 and seconds > 2 and not quiet:
            print(f"\rencoding samples: {count:,} ", end="", file=sys.stderr, flush=True)
    if seconds > 2 and not quiet:
        print(f"\rencoding samples: {count:,} in {seconds:.0f} s", file=sys.stderr)
    if len(kept) < 2 and dropped:
        raise UserError(
            f"{dropped:,} of {count:,} samples do not fit --seq-len {seq_len}, and two must: the "
            f"longest takes {longest:,} tokens; give a longer --seq-len"
        )
    if len(kept) < 2:
        raise UserError(f"{' '.join(data)} holds one sample: give two or more, for one is held out")
    counts = {"truncated": truncated, "dropped": dropped}
    return kept, "".join(f"; {n:,} {what}" for what, n in counts.items() if n)


def _conversations(data: list[str]) -> Iterator[tuple[str, Conversation]]:
    """The conversations of --data, each after "train" or "val"."""
    if data == ["python"] and not Path("python").exists():
        yield from ((split, messages) for split, _, messages in docstrings())
        return
    for source in map(Path, data):
        files = sorted(source.rglob("*.jsonl")) if source.is_dir() else [source]
        if not files:
            raise UserError(f"{source} holds no .jsonl file: give one with these a line: {KINDS}")
        for path in files:
            name = "/".join(path.parts[-2:])
            for number, messages in read_conversations(path):
                held_out = chance(f"{name}:{number}") < VAL_FRACTION
                yield "val" if held_out else "train", messages
