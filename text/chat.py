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
"""

import bisect
import itertools
import json
import math
import zlib
from dataclasses import replace
from operator import itemgetter
from typing import NamedTuple

import numpy as np
import torch

from model import IGNORE
from plumbing.processes import UserError, with_progress
from text.batch import Batch
from text.conversations import LINE_FORMATS, MEANT, Conversation, Line, conversations
from text.corpora import Reading
from text.templates import render
from text.tokenizer import Tokenizer

Encoded = tuple[list[int], list[bool]]  # ids [n], and which of them are targets [n]
PRIVATE = "\ue000"  # a character that Unicode leaves to private use

# ----------------------------------------------------------------- from conversations to tokens


def write_out(
    messages: Conversation, tokenizer: Tokenizer, asks: bool = False, tools: list | None = None
) -> str:
    """Return what the tokenizer's chat template writes. It `asks` if the heading of an answer
    follows."""
    given = [{k: v for k, v in m.items() if v is not None and k != "train"} for m in messages]
    options = dict(tools=tools, add_generation_prompt=asks, **tokenizer.names)
    return render(tokenizer.template, messages=given, **options)


def write_marked(
    text: str, messages: Conversation, tokenizer: Tokenizer, guard: str, asks: bool, tools
) -> str:
    """Return what the template writes with a mark, the message's number between guards, in place
    of each content. `text` is what it writes with the contents: raise UserError where a part of one
    is left out."""
    numbered = list(enumerate(messages, 1))
    marks = [m | {"content": f"{guard}{i}{guard}"} if m.get("content") else m for i, m in numbered]
    marked = write_out(marks, tokenizer, asks, tools)
    for i, message in numbered:
        content = (message.get("content") or "").strip()
        forms = content, json.dumps(content, ensure_ascii=False)[1:-1]  # some write JSON of it
        if content and (f"{guard}{i}{guard}" not in marked or all(f not in text for f in forms)):
            raise UserError(
                f"the chat template leaves out message {i}, of the {message['role']}, or a part of "
                f"it: leave it out, too, or divide the conversation there"
            )
    return marked


def needs(text: str, messages: Conversation, tokenizer: Tokenizer, tools: list | None) -> bool:
    """Return whether the template, given less than what it has written `text` of, writes something
    else, or cannot write at all."""
    try:
        return write_out(messages, tokenizer, tools=tools) != text
    except UserError:
        return True


def guarded(
    messages: Conversation, tools: list | None, tokenizer: Tokenizer
) -> tuple[Conversation, list | None, str]:
    """Return a conversation and its tools in which no text is the name of a special token: a guard,
    which occurs nowhere else, stands inside such names. It is returned, too."""
    text, guard = json.dumps([messages, tools], ensure_ascii=False), PRIVATE
    while guard in text:
        guard += PRIVATE
    for name in tokenizer.special:
        text = text.replace(name, name[0] + guard + name[1:])
    return *json.loads(text), guard


def to_ids(text: str, guard: str, tokenizer: Tokenizer) -> list[int]:
    """Return the ids of a text in which names of special tokens stand for these tokens. What stands
    between two of them is encoded at once, since seams may matter."""
    ids, end = [], 0
    for match in tokenizer.special_pattern.finditer(text):
        ids += tokenizer.encode(text[end : match.start()].replace(guard, ""))
        ids.append(tokenizer.special[match[0].strip()])
        end = match.end()
    return ids + tokenizer.encode(text[end:].replace(guard, ""))


def encode(
    messages: Conversation,
    tokenizer: Tokenizer,
    train_on_prompt: bool = False,
    tools: list | None = None,
) -> Encoded:
    """Return the ids of a conversation up to its last answer, and for each id whether it is a
    target: whether the model is trained to predict it.

    Targets are all answers but those that say `train: False`. An answer is what the template writes
    after it has asked for it, up to a token that ends generation. With `train_on_prompt`, what is
    no answer is a target, too, but for the first id. Names of special tokens in a message are
    encoded as ordinary text. Raise UserError where the template leaves out a part of the
    conversation, or does not tell an answer from the rest."""
    messages, tools, guard = guarded(messages, tools, tokenizer)
    text = write_out(messages, tokenizer, tools=tools)
    marked = write_marked(text, messages, tokenizer, guard, False, tools)
    for name in MEANT:
        fewer = [{key: m[key] for key in m if key != name} for m in messages]
        if fewer != messages and not needs(text, fewer, tokenizer, tools):
            raise UserError(f"the chat template writes nothing of {name}: leave it out")
    if tools and not needs(text, messages, tokenizer, None):
        raise UserError("the chat template writes nothing of tools: leave them out")
    ids = to_ids(text, guard, tokenizer)
    is_target, end = [train_on_prompt] * len(ids), 0
    for i, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        if i > 0:
            prompt = write_out(messages[:i], tokenizer, asks=True, tools=tools)
        elif message.get("content"):  # nothing asks for it
            prompt = marked[: marked.index(f"{guard}1{guard}")]
        else:
            raise UserError("the conversation begins with a call: let a message come before it")
        if not text.startswith(prompt):
            raise UserError(
                f"the chat template asks for message {i + 1} by {prompt[-30:]!r}, and what it has "
                f"before it is something else"
            )
        # A token of the heading may have grown by the first letters of the answer: it is a target.
        asked = to_ids(prompt, guard, tokenizer)
        differ = (j for j, (one, other) in enumerate(zip(asked, ids)) if one != other)
        start = next(differ, len(asked))
        ends = (j + 1 for j in range(start, len(ids)) if ids[j] in tokenizer.stop)
        if start < end or not (end := next(ends, 0)):
            raise UserError(
                "the chat template ends an answer with no token that ends generation: name one as "
                "eos_token in tokenizer_config.json"
            )
        is_target[start:end] = [message.get("train", True)] * (end - start)
    is_target[0] = False
    while any(is_target) and not is_target[-1]:  # what separates an answer from other messages
        del ids[-1], is_target[-1]
    return ids, is_target


def encode_prompt(
    messages: Conversation, tokenizer: Tokenizer, tools: list | None = None
) -> list[int]:
    """Return the ids of a conversation up to where the model is to answer, without a last message
    that is an answer. `encode` of the whole conversation begins with the same ids, unless a token
    of the heading grows by the first letters of the answer."""
    prompt = messages[:-1] if messages and messages[-1]["role"] == "assistant" else messages
    prompt, tools, guard = guarded(prompt, tools, tokenizer)
    text = write_out(prompt, tokenizer, True, tools)
    write_marked(text, prompt, tokenizer, guard, True, tools)
    return to_ids(text, guard, tokenizer)


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
    line: Line
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
    val.sort(key=lambda sample: zlib.crc32(str(sample.line.messages).encode()))
    val.sort(key=lambda sample: not SHORTEST <= sample.encoded[1].sum() <= ANSWER_ROOM)
    lines = (sample.line for sample in val if "content" in sample.line.messages[-1])
    prompts = (
        (encode_prompt(line.messages, tokenizer, line.tools), line.messages[-1]["content"])
        for line in lines
    )
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
    lines = list(conversations(data, reading))
    for split, line in with_progress(lines, "encoding samples"):
        ids, is_target = [], []
        with reading.one(line.where):
            try:
                ids, is_target = encode(line.messages, tokenizer, train_on_prompt, line.tools)
            except UserError as error:
                raise UserError(f"{line.where}: {error}")
        length = len(ids) - 1  # slots in a row
        longest = max(longest, length)
        ids, is_target = ids[: seq_len + 1], is_target[: seq_len + 1]
        if any(is_target):
            truncated += length > seq_len
            # In arrays an id and its is_target take 5 bytes, in lists about 48.
            usable.append(Sample(split, line, (np.array(ids, np.int32), np.array(is_target))))
    if not lines:
        raise UserError(f"{' '.join(data)} holds no conversation: give lines like {LINE_FORMATS}")
    if not usable:
        raise UserError(
            f"none of {len(lines):,} samples fits in --seq-len {seq_len}: the longest "
            f"takes {longest:,} tokens; give a longer --seq-len"
        )
    counts = {"truncated": truncated, "dropped": len(lines) - len(usable)}
    return usable, "".join(f"; {n:,} {what}" for what, n in counts.items() if n)
