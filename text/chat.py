"""Turn conversations into packed batches, the data of fine-tuning.

A sample is one conversation. The targets are the assistant's answers, each with the end token that
follows, so that the model learns to stop. All other messages are only input: the targets there are
IGNORE. Samples are short and rows are long, so several samples share a row; the rest is padding:

    tokens      bos  Hi   >   Hel  lo  | bos  1+1  >   2  | pad  pad
    targets      -   -   Hel  lo   eot |  -    -   2  eot |  -    -      (- is IGNORE)
    positions    0   1    2    3    4  |  0    1   2   3  |  0    1

Positions begin at 0 with every sample, and attention stays between one position 0 and the next
(`document_mask` in model.py). So a sample has the same loss and gradient as in a row of its own.
A sample of n ids takes n - 1 slots of a row: its last id is only a target, its first only an input.

The default data set needs no download: it is the functions of Python's standard library, for which
the model learns to write the docstring.
"""

import ast
import bisect
import itertools
import math
import re
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from operator import itemgetter
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from model import IGNORE
from plumbing.processes import UserError, with_progress
from text.batch import Batch
from text.corpora import (
    Reading,
    check_string,
    document_name,
    kind_of,
    read_records,
    split_of,
    standard_library,
)
from text.tokenizer import Tokenizer

Conversation = list[dict[str, str]]  # [{"role": "user", "content": "Hi"}, ...]
Encoded = tuple[list[int], list[bool]]  # ids [n], and which of them are targets [n]

# --------------------------------------------------------------------------- conversation files

# ShareGPT's names of roles and those of others -> Llama 3's; what a tool has put out is "ipython".
ROLES = {name: name for name in ("system", "user", "assistant", "ipython")}
ROLES |= dict(developer="system", human="user", gpt="assistant", tool="ipython", function="ipython")
MESSAGE_KEYS = ("role", "from"), ("content", "value")
MESSAGES = '{"messages": [{"role", "content"}, ...]}'
ONE_TURN_KEYS = (("instruction", "input", "output"), ("prompt", "completion"))  # answer last
LINE_FORMATS = (
    f'{MESSAGES}, {{"conversations": [{{"from", "value"}}, ...]}}, {{"instruction", "input", '
    f'"output"}} or {{"prompt", "completion"}}'
)


def read_conversations(path: Path, reading: Reading) -> Iterator:
    """Yield (number, conversation) for each line of a JSONL file, or element of a JSON array.

    A line is a JSON object in one of the LINE_FORMATS; "input" may be missing. Messages after the
    last answer are left out, since they have no targets. Raise UserError where a line is something
    else."""
    for number, where, record in read_records(path, LINE_FORMATS, reading):
        with reading.one(where):
            yield number, _conversation(record, where)


def _conversation(record: dict, where: str) -> Conversation:
    """Return the conversation in an object of one of the LINE_FORMATS, up to its last answer."""
    fields = record | {"input": record.get("input") or ""}  # it may be missing, null or empty
    one_turn = next((keys for keys in ONE_TURN_KEYS if fields.keys() >= set(keys)), None)
    if name := next((name for name in ("messages", "conversations") if name in record), None):
        messages = record[name]
    elif one_turn:
        *prompts, answer = (check_string(fields[key], f'{where}: "{key}" is') for key in one_turn)
        messages = _one_turn("\n\n".join(filter(None, prompts)), answer)
    else:
        found = ", ".join(map(repr, record)) or "nothing"
        raise UserError(f"{where}: an object with {found:.200}: give {LINE_FORMATS}")
    if not isinstance(messages, list):
        raise UserError(f'{where}: "{name}" is not a list: give {MESSAGES}')
    checked = [_message(m, f"{where}: message {i}") for i, m in enumerate(messages, 1)]
    while checked and checked[-1]["role"] != "assistant":
        checked.pop()
    if not checked:
        raise UserError(f"{where}: no message has the role assistant: give an answer to train on")
    return checked


def _one_turn(prompt: str, answer: str) -> Conversation:
    return [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]


def _message(message: object, which: str) -> dict[str, str]:
    """Return a message of a conversation file. Raise UserError if it is not valid."""
    if not isinstance(message, dict):
        raise UserError(f'{which} is {message!r:.60}: give {{"role": "...", "content": "..."}}')
    role, content = (message.get(a, message.get(b)) for a, b in MESSAGE_KEYS)
    if not isinstance(role, str) or role not in ROLES:
        raise UserError(f'{which} has the "role" {role!r:.60}: give one of {", ".join(ROLES)}')
    role, content = ROLES[role], check_string(content, f'{which} has the "content"')
    if role == "assistant" and not content.strip():
        raise UserError(f"{which} is an empty answer: write one, or leave the line out")
    return {"role": role, "content": content}


# ------------------------------------------------------------------------- the default data set

MAX_SOURCE_LENGTH = 1200  # characters
SUMMARY_LENGTHS = range(15, 301)  # characters: less says nothing, more is not a summary
Function = ast.FunctionDef | ast.AsyncFunctionDef


def docstrings() -> Iterator[tuple[str, str, Conversation]]:
    """Yield (split, module, conversation): the user shows a function of the standard library, and
    the assistant answers with the first paragraph of its docstring.

    Modules are held out as files are in pretraining on `python`, so validation is on functions
    that a model pretrained there has not seen. Each source occurs once. Training modules come
    first ("train" before "val"), so a function that is also in one of them is never held out."""
    names = ((document_name(path), path) for path in standard_library())
    seen = set()
    for split, name, path in sorted((split_of(name), name, path) for name, path in names):
        text = path.read_text(encoding="utf-8")
        lines = text.split("\n")  # not splitlines(): Python's line numbers ignore form feeds
        for function in ast.walk(ast.parse(text)):
            docstring = isinstance(function, Function) and ast.get_docstring(function)
            if not docstring:
                continue
            summary = " ".join(re.split(r"\n\s*\n", docstring)[0].split())  # its first paragraph
            source = _without_docstring(function, lines)
            fits = 0 < len(source) <= MAX_SOURCE_LENGTH and len(summary) in SUMMARY_LENGTHS
            if fits and source not in seen:
                seen.add(source)
                prompt = f"Write the docstring for this function.\n\n{source}"
                yield split, name, _one_turn(prompt, summary)


def _without_docstring(function: Function, lines: list[str]) -> str:
    """Return the source of a function without its docstring and without indentation; an empty
    string if nothing else is in the function, or if other code shares a line with the docstring.

    lines: the lines of the module's source."""
    docstring, *rest = function.body
    before = lines[docstring.lineno - 1][: docstring.col_offset]
    if not rest or rest[0].lineno == docstring.end_lineno or before.strip():
        return ""
    start = min(node.lineno for node in [function, *function.decorator_list])
    source = lines[start - 1 : docstring.lineno - 1]
    source += lines[docstring.end_lineno : function.end_lineno]
    return "\n".join(line.removeprefix(" " * function.col_offset) for line in source)


# ----------------------------------------------------------------- from conversations to tokens

# What a chat template contains -> what it writes before and after the message of a `role`, which
# comes after one of role `last`. A template is a program in Jinja; these are what the common ones
# write, but that they leave spaces around a message. A space before an answer is part of it.
LLAMA_3 = "<|start_header_id|>"
FORMS = {
    "<|im_start|>": lambda role, last: (f"<|im_start|>{role}\n", "<|im_end|>\n"),  # ChatML
    LLAMA_3: lambda role, last: (f"<|start_header_id|>{role}<|end_header_id|>\n\n", "<|eot_id|>"),
    "<<SYS>>": lambda role, last: {  # Llama 2's
        "system": ("[INST] <<SYS>>\n", "\n<</SYS>>\n\n"),
        "user": ({None: "[INST] ", "system": ""}.get(last, "<s>[INST] "), " [/INST]"),
        "assistant": (" ", " </s>"),
    }[role],
    "<|assistant|>": lambda role, last: (f"<|{role}|>\n", "</s>\n"),  # TinyLlama's
}  # fmt: skip


def form_of(tokenizer: Tokenizer) -> Callable[[str, str | None], tuple[str, str]]:
    """Return the entry of FORMS for a tokenizer's chat template; without a template, ChatML if
    there are tokens for it, else headings in plain text.

    Raise UserError for another template."""
    for text, form in FORMS.items():
        if text in tokenizer.template or (not tokenizer.template and text in tokenizer.special):
            return form
    if tokenizer.template:
        raise UserError(
            f"tokenizer {tokenizer.name} has a chat template of another form than those with "
            f"{', '.join(FORMS)}: replace it by one of them"
        )
    end = next(token for token, i in tokenizer.special.items() if i == tokenizer.eos)
    return lambda role, last: (f"### {role.title()}:\n", end if role == "assistant" else "\n\n")


def write_out(
    messages: Conversation, tokenizer: Tokenizer, asks: bool
) -> Iterator[tuple[str | int, bool]]:
    """Yield the pieces of a conversation, texts and ids of special tokens, and whether each belongs
    to an answer. It `asks` if the heading of an answer follows."""
    form, template, last = form_of(tokenizer), tokenizer.template, None
    names = "|".join(map(re.escape, tokenizer.special))

    def split(text: str) -> list[str | int]:  # a text of the form, in which names are tokens
        pieces = re.split(f"({names})", text)
        return [tokenizer.special.get(piece, piece) for piece in pieces if piece]

    if "bos_token" in template or not template:
        yield from ((token, False) for token in tokenizer.beginning)
    default = re.search(r"<\|im_start\|>system(?:\\n|\n)([^'\"{}]+)<\|im_end\|>", template)
    if default and messages[0]["role"] != "system":
        messages = [{"role": "system", "content": default[1]}, *messages]
    for message in messages:
        role, is_answer = message["role"], message["role"] == "assistant"
        if role == "ipython" and form in FORMS.values() and form is not FORMS[LLAMA_3]:
            raise UserError(
                f"a message has the role tool, for which tokenizer {tokenizer.name}'s chat format "
                f"has no place here: leave such conversations out, or take a Llama 3"
            )
        before, after = form(role, last)
        heading = before.rstrip(" ") if is_answer else before
        yield from ((piece, False) for piece in split(heading))
        yield before[len(heading) :] + message["content"].strip(), is_answer
        for piece in split(after):
            yield piece, is_answer
            is_answer &= isinstance(piece, str)  # the first special token ends the answer
        last = role
    if asks:
        yield from ((piece, False) for piece in split(form("assistant", last)[0].rstrip(" ")))


def to_ids(pieces: Iterable[tuple[str | int, bool]], tokenizer: Tokenizer) -> Encoded:
    """Return the ids of pieces, and whether each belongs to an answer.

    Texts between two special tokens are encoded at once, since seams may matter. An answer is the
    last of them, and begins where the ids of what is before it end."""
    ids, of_answer = [], []
    for is_text, group in itertools.groupby(pieces, lambda piece: isinstance(piece[0], str)):
        contents, flags = zip(*group)
        if is_text:
            before = "".join(text for text, is_answer in zip(contents, flags) if not is_answer)
            start, contents = len(tokenizer.encode(before)), tokenizer.encode("".join(contents))
            flags = (i >= start for i in range(len(contents)))
        ids += contents
        of_answer += flags
    return ids, of_answer


def encode(messages: Conversation, tokenizer: Tokenizer, train_on_prompt: bool = False) -> Encoded:
    """Return the ids of a conversation up to its last answer, and for each id whether it is a
    target: whether the model is trained to predict it.

    Targets are all answers, each with the token that ends it; with `train_on_prompt`, every id but
    the first. Names of special tokens in a message are encoded as ordinary text."""
    ids, is_target = to_ids(write_out(messages, tokenizer, asks=False), tokenizer)
    while not is_target[-1]:  # what separates it from another message
        del ids[-1], is_target[-1]
    return ids, [False] + [True] * (len(ids) - 1) if train_on_prompt else is_target


def encode_prompt(messages: Conversation, tokenizer: Tokenizer) -> list[int]:
    """Return the ids of a conversation up to where the model is to answer, without a last message
    that is an answer. `encode` of the whole conversation begins with the same ids."""
    prompt = messages[:-1] if messages and messages[-1]["role"] == "assistant" else messages
    return to_ids(write_out(prompt, tokenizer, asks=True), tokenizer)[0]


def drop_oldest(messages: Conversation, tokenizer: Tokenizer, max_tokens: int) -> Conversation:
    """Return a conversation without its oldest exchanges of a question and an answer: as many are
    dropped as it takes for the prompt to have at most `max_tokens` tokens. A system prompt and the
    last message stay, even if they have more."""
    start = int(messages[0]["role"] == "system")
    while len(messages) > start + 2 and len(encode_prompt(messages, tokenizer)) > max_tokens:
        messages = messages[:start] + messages[start + 2 :]
    return messages


# -------------------------------------------------------------------------- from tokens to rows


def pack(lengths: list[int], seq_len: int) -> list[list[int]]:
    """Distribute samples over as few rows as possible; return the sample indices of each row.

    lengths: the number of slots that each sample takes. A row has seq_len slots.

    This is best fit decreasing: from the longest sample to the shortest, each goes into the row
    where it leaves the fewest free slots, or into a new row. It needs at most 11/9 of the smallest
    possible number of rows, plus a constant (Johnson et al. 1974)."""
    rows = []
    by_room = []  # (free slots, row), in ascending order of free slots
    for sample in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        best = bisect.bisect_left(by_room, lengths[sample], key=itemgetter(0))
        if best < len(by_room):
            room, row = by_room.pop(best)
        else:
            room, row = seq_len, len(rows)
            rows.append([])
        rows[row].append(sample)
        bisect.insort_left(by_room, (room - lengths[sample], row), key=itemgetter(0))
    return rows


class Packed:
    """Samples packed into rows, numbered from 0. Training scripts use it like data.Windows.

    samples: what `encode` returned, of at most seq_len + 1 ids each."""

    document_mask = True

    def __init__(self, samples: list[Encoded], seq_len: int, tokenizer: Tokenizer):
        self.samples, self.seq_len, self.tokenizer = samples, seq_len, tokenizer
        self.rows = pack([len(ids) - 1 for ids, _ in self.samples], seq_len)
        self.sources = [(len(self.rows), 1)]  # as data.Windows has it
        # Any token would do: no sample attends to padding, and padding has no targets.
        self.pad = tokenizer.special.get("<|finetune_right_pad_id|>", 0)

    def __len__(self) -> int:
        return len(self.rows)

    def checksum(self) -> int:
        """Return a checksum of all ids, to notice when nodes have different files."""
        return zlib.crc32(np.concatenate([ids for ids, _ in self.samples]))

    def batch(self, indices: list[int | None]) -> Batch:
        """Return the rows of these indices; None makes a row without targets."""
        shape = len(indices), self.seq_len  # [B, T]
        tokens, targets = np.full(shape, self.pad), np.full(shape, IGNORE)
        positions = np.zeros(shape, dtype=np.int64)
        for b, row in enumerate(indices):
            start = 0
            for sample in [] if row is None else self.rows[row]:
                ids, is_target = self.samples[sample]
                ids = np.asarray(ids, np.int64)  # token files are unsigned, and IGNORE is not
                end = start + len(ids) - 1
                tokens[b, start:end] = ids[:-1]
                targets[b, start:end] = np.where(is_target[1:], ids[1:], IGNORE)
                positions[b, start:end] = np.arange(end - start)
                start = end
            positions[b, start:] = np.arange(self.seq_len - start)  # padding is a document too
        text_bytes = self.tokenizer.count_bytes(targets)
        return Batch(*map(torch.from_numpy, (tokens, targets, positions)), text_bytes)


class Rows(Packed):
    """Samples, one a row. The rows of a batch are as long as its longest sample, rounded up to a
    multiple of `multiple`, which evaluation sets. Padding follows a sample: there is no mask."""

    def __init__(self, samples: list[Encoded], tokenizer: Tokenizer):
        self.samples, self.tokenizer, self.multiple = samples, tokenizer, 1
        self.rows, self.pad = [[i] for i in range(len(samples))], 0

    def batch(self, indices: list[int | None]) -> Batch:
        longest = max(len(self.samples[i or 0][0]) for i in indices) - 1
        self.seq_len = math.ceil(longest / self.multiple) * self.multiple
        return replace(super().batch(indices), positions=None, starts=None)


# -------------------------------------------------------------------------- from --data to rows

ANSWER_ROOM = 64  # tokens of seq_len that a validation prompt leaves free for the answer
SHORTEST = 8  # tokens of an answer that tells something
EXAMPLES, SHOWN = 16, 3  # held-out prompts whose answers are scored, and shown


class Sample(NamedTuple):
    split: str  # "train" or "val"
    messages: Conversation
    encoded: tuple[np.ndarray, np.ndarray]  # ids [n] int32, is_target [n] bool


def open_samples(
    data: list[str],
    tokenizer: Tokenizer,
    seq_len: int,
    train_on_prompt: bool = False,
    val_data: list[str] | None = None,
    reading: Reading | None = None,
) -> tuple[Packed, Packed, list[tuple[list[int], str]], str]:
    """Return training rows, validation rows, up to EXAMPLES validation prompts, each as (ids, true
    answer), and a line that says how many samples and rows there are.

    data: JSONL files, directories of them, or `python` for the docstrings

    Samples are held out by a hash; if that leaves either split empty, the last one is held out. If
    `val_data` is given, they are those in place of a part of `data`. Raise UserError if none can be
    used, or one of which none is left for validation."""
    options = tokenizer, seq_len, reading or Reading(), train_on_prompt
    samples, changes = _encode_all(data, *options)
    train, val = ([s for s in samples if s.split == split] for split in ("train", "val"))
    if val_data:
        train, val = samples, _encode_all(val_data, *options)[0]
    elif len(samples) == 1:
        which = f"one sample that fits in --seq-len {seq_len}"
        raise UserError(f"{' '.join(data)} holds {which}: give two or more, one is held out")
    elif not train or not val:
        train, val = samples[:-1], samples[-1:]
    packed = [Packed([s.encoded for s in part], seq_len, tokenizer) for part in (train, val)]
    train_rows, val_rows = packed
    filled = sum(len(ids) - 1 for ids, _ in train_rows.samples) / (len(train_rows) * seq_len)
    summary = (
        f"{len(train):,} samples in {len(train_rows):,} rows of {seq_len:,} tokens, "
        f"{100 * filled:.0f} % filled; {len(val):,} held out, in {len(val_rows):,} rows{changes}"
    )
    # Shuffled by hash, since in the order of files the first samples may be much alike. First come
    # those whose answer is more than a few words, and fits in what is generated.
    val.sort(key=lambda sample: zlib.crc32(str(sample.messages).encode()))
    val.sort(key=lambda sample: not SHORTEST <= sample.encoded[1].sum() <= ANSWER_ROOM)
    prompts = ((encode_prompt(s.messages, tokenizer), s.messages[-1]["content"]) for s in val)
    short = (prompt for prompt in prompts if len(prompt[0]) <= seq_len - ANSWER_ROOM)
    return train_rows, val_rows, list(itertools.islice(short, EXAMPLES)), summary


def open_chats(data: list[str], tokenizer: Tokenizer, seq_len: int, reading: Reading) -> Packed:
    """Return the rows of all conversations of files, with what is too long truncated."""
    samples, _ = _encode_all(data, tokenizer, seq_len, reading)
    return Packed([sample.encoded for sample in samples], seq_len, tokenizer)


def _encode_all(
    data: list[str],
    tokenizer: Tokenizer,
    seq_len: int,
    reading: Reading,
    train_on_prompt: bool = False,
) -> tuple[list[Sample], str]:
    """Return the samples that have a target within seq_len tokens, which may truncate them, and
    text that says how many were truncated or dropped. Raise UserError if none can be used."""
    usable, truncated, longest = [], 0, 0
    conversations = list(_conversations(data, reading))
    for split, messages in with_progress(conversations, "encoding samples"):
        ids, is_target = encode(messages, tokenizer, train_on_prompt)
        length = len(ids) - 1  # slots in a row
        longest = max(longest, length)
        ids, is_target = ids[: seq_len + 1], is_target[: seq_len + 1]
        if any(is_target):
            truncated += length > seq_len
            # In arrays an id and its is_target take 5 bytes, in lists about 48.
            usable.append(Sample(split, messages, (np.array(ids, np.int32), np.array(is_target))))
    if not conversations:
        raise UserError(f"{' '.join(data)} holds no conversation: give lines like {LINE_FORMATS}")
    if not usable:
        raise UserError(
            f"none of {len(conversations):,} samples fits in --seq-len {seq_len}: the longest "
            f"takes {longest:,} tokens; give a longer --seq-len"
        )
    counts = {"truncated": truncated, "dropped": len(conversations) - len(usable)}
    return usable, "".join(f"; {n:,} {what}" for what, n in counts.items() if n)


def _conversations(data: list[str], reading: Reading) -> Iterator[tuple[str, Conversation]]:
    """Yield (split, conversation) for each conversation of --data. Lines of files are held out as
    in pretraining on the same files."""
    if data == ["python"] and not Path("python").exists():
        yield from ((split, messages) for split, _, messages in docstrings())
        return
    for path in map(Path, data):
        inside = (file for file in path.rglob("*") if kind_of(file) == ".jsonl")
        if not (files := sorted(inside) if path.is_dir() else [path]):
            raise UserError(f"{path} holds no .jsonl file: give one with lines like {LINE_FORMATS}")
        for file in files:
            for number, messages in read_conversations(file, reading):
                yield split_of(f"{document_name(file)}:{number}"), messages
