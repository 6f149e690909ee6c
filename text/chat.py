"""Turn conversations into packed batches, the data of fine-tuning.

A sample is one conversation. The targets are the assistant's answers, each with the end token that
follows, so that the model learns to stop. All other messages are only input: the targets there are
IGNORE. Samples are short and rows are long, so several samples share a row; the rest is padding:

    tokens      bos  Hi   >   Hel  lo  | bos  1+1  >   2  | pad  pad
    targets      -   -   Hel  lo   eot |  -    -   2  eot |  -    -      (- is IGNORE)
    positions    0   1    2    3    4  |  0    1   2   3  |  0    1

Positions begin at 0 with every sample, and attention stays within a sample (`document_mask` in
model.py). So a sample has the same loss and gradient as in a row of its own. A sample of n ids
takes n - 1 slots of a row: its first id is only an input, its last only a target.
"""

import bisect
import copy
import itertools
import json
import math
import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from operator import eq, itemgetter

import numpy as np
import torch

from model import IGNORE
from plumbing.messages import UserError, with_progress
from text.batch import Batch
from text.conversations import OPTIONAL_FIELDS, Conversation, Sample, conversations
from text.corpora import Reading
from text.templates import render
from text.tokenizer import Tokenizer

Encoded = tuple[list[int], list[bool]]  # ids [n], and which of them are targets [n]

# ----------------------------------------------------------------- from conversations to tokens


@dataclass(frozen=True)
class Chat:
    """A conversation and its tools, which the tokenizer's chat template writes out.

    Messages are ordinary text, even where somebody types the name of a special token. `guarded`
    puts a guard, a text that occurs nowhere else, inside such names; `to_ids` takes it out."""

    messages: Conversation
    tools: list | None
    tokenizer: Tokenizer
    guard: str

    def write(self, asks: bool = False) -> str:
        """Return what the template writes. If it `asks` for an answer, the heading comes last."""
        given = dict(messages=self.messages, tools=self.tools, add_generation_prompt=asks)
        return render(self.tokenizer.template, **given, **self.tokenizer.names)

    def with_marks(self) -> "Chat":
        """Return the conversation with a mark, its number between guards, for each content."""
        marks = (f"{self.guard}{i}{self.guard}" for i in range(len(self.messages)))
        pairs = zip(self.messages, marks)
        messages = [m | {"content": mark} if m.get("content") else m for m, mark in pairs]
        return replace(self, messages=messages)

    def write_whole(self, asks: bool = False) -> str:
        """Return what `write` does. Raise UserError if that leaves out a part of a content."""
        marked = self.with_marks()
        text, marked_text = self.write(asks), marked.write(asks)
        for i, (message, its_mark) in enumerate(zip(self.messages, marked.messages), 1):
            content = message.get("content", "").strip()
            as_json = json.dumps(content, ensure_ascii=False)[1:-1]  # which some templates write
            is_whole = content in text or as_json in text
            if content and not (is_whole and its_mark["content"] in marked_text):
                raise UserError(
                    f"the chat template leaves out message {i}, of the {message['role']}, or a "
                    f"part of it: leave the message out, too, or divide the conversation there"
                )
        return text

    def write_before(self, i: int) -> str:
        """Return what the template writes before the answer with index i, with its heading."""
        if i > 0:
            return replace(self, messages=self.messages[:i]).write(asks=True)
        if not self.messages[0].get("content"):
            raise UserError("the conversation begins with a call: let a message come before it")
        marked = self.with_marks()
        return marked.write().partition(marked.messages[0]["content"])[0]

    def can_do_without(self, name: str, text: str) -> bool:
        """Return whether the template writes the same text without a field that it was given."""
        messages = [{key: m[key] for key in m if key != name} for m in self.messages]
        less = replace(self, messages=messages, tools=None if name == "tools" else self.tools)
        try:
            return less != self and less.write() == text
        except UserError:  # the template needs the field
            return False

    def to_ids(self, text: str) -> list[int]:
        """Return the ids of a text that `write` returned. Names of special tokens without a guard
        stand for these tokens. The text between two of them is encoded in one piece, since a token
        may reach from a heading into a content."""
        ids = []
        for i, part in enumerate(self.tokenizer.special_pattern.split(text)):
            if i % 2 == 1:  # texts and names take turns
                ids.append(self.tokenizer.special[part.strip()])
            else:
                ids += self.tokenizer.encode(part.replace(self.guard, ""))
        return ids


def guarded(messages: Conversation, tools: list | None, tokenizer: Tokenizer) -> Chat:
    """Return a Chat with a guard inside each name of a special token. It has no `train`, which says
    nothing to a template, and no null, which a template might write as text."""
    messages = [{k: v for k, v in m.items() if v is not None and k != "train"} for m in messages]
    text = json.dumps([messages, tools or None], ensure_ascii=False)
    private = guard = "\ue000"  # a character that Unicode leaves to private use
    while guard in text:
        guard += private
    for name in tokenizer.special:
        text = text.replace(name, name[0] + guard + name[1:])
    return Chat(*json.loads(text), tokenizer, guard)


def encode(
    messages: Conversation,
    tokenizer: Tokenizer,
    train_on_prompt: bool = False,
    tools: list | None = None,
) -> Encoded:
    """Return the ids of a conversation up to its last target, and which ids are targets: those that
    the model is trained to predict.

    Targets are all answers but those that say `train: False`. An answer is what the template writes
    after the answer's heading, up to a token that ends generation. With `train_on_prompt`, the rest
    is a target, too, but for the first id. Raise UserError where the template leaves out a part of
    the conversation, or does not tell an answer from the rest."""
    chat = guarded(messages, tools, tokenizer)
    text = chat.write_whole()
    for name in (*OPTIONAL_FIELDS, "tools"):
        if chat.can_do_without(name, text):
            raise UserError(f"the chat template writes nothing of {name}: leave this field out")
    ids = chat.to_ids(text)
    is_target = [train_on_prompt] * len(ids)
    end = 0  # of the previous answer
    for i, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before = chat.write_before(i)
        if not text.startswith(before):
            raise UserError(
                f"the chat template asks for message {i + 1} by {before[-30:]!r}, and writes the "
                f"message after something else"
            )
        # A token that reaches from the heading into the answer is a target.
        start = sum(itertools.takewhile(bool, map(eq, chat.to_ids(before), ids)))
        stop = next((j for j in range(start, len(ids)) if ids[j] in tokenizer.stop), None)
        if start < end or stop is None:
            raise UserError(
                "the chat template ends an answer with no token that ends generation: name one as "
                "eos_token in tokenizer_config.json"
            )
        end = stop + 1
        is_target[start:end] = [message.get("train", True)] * (end - start)
    is_target[0] = False
    length = max((j + 1 for j, on in enumerate(is_target) if on), default=len(ids))
    return ids[:length], is_target[:length]


def encode_prompt(
    messages: Conversation, tokenizer: Tokenizer, tools: list | None = None
) -> list[int]:
    """Return the ids of a conversation up to where the model is to answer. An answer at its end is
    left out. `encode` of the whole conversation begins with the same ids, unless a token reaches
    from the heading into the answer."""
    prompt = messages[:-1] if messages and messages[-1]["role"] == "assistant" else messages
    chat = guarded(prompt, tools, tokenizer)
    return chat.to_ids(chat.write_whole(asks=True))


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

    samples: what `encode` returned, of at most seq_len + 1 ids each. A row has all or none of each
    `together` consecutive ones, in their order."""

    document_mask = True

    def __init__(
        self, samples: list[Encoded], seq_len: int, tokenizer: Tokenizer, together: int = 1
    ):
        self.samples, self.seq_len, self.tokenizer = samples, seq_len, tokenizer
        groups = [*zip(*[iter(range(len(samples)))] * together)]  # of samples' indices
        rows = pack([sum(len(samples[i][0]) - 1 for i in group) for group in groups], seq_len)
        self.rows = [[i for group in row for i in groups[group]] for row in rows]
        self.sources = [(len(self.rows), 1)]  # one source has all rows, as in data.Windows
        # Any token would do: no sample attends to padding, and padding has no targets.
        self.pad = tokenizer.special.get("<|finetune_right_pad_id|>", 0)
        self.target_values: dict[str, torch.Tensor] = {}  # [rows, seq_len] each

    def with_values(self, **target_values: torch.Tensor) -> "Packed":
        """Return the same rows; batches have these values of each target, [rows, seq_len] each."""
        with_them = copy.copy(self)
        with_them.target_values = target_values
        return with_them

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
        rows = [row or 0 for row in indices]
        values = {name: value[rows] for name, value in self.target_values.items()}
        tensors = map(torch.from_numpy, (tokens, targets, positions))
        return Batch(*tensors, text_bytes, target_values=values)


class Rows(Packed):
    """Samples in rows of their own, so that no mask is needed; each has `copies` equal rows."""

    document_mask = False

    def __init__(self, samples: list[Encoded], tokenizer: Tokenizer, copies: int = 1):
        self.samples, self.tokenizer, self.target_values = samples, tokenizer, {}
        self.rows, self.pad = [[i] for i in range(len(samples)) for _ in range(copies)], 0
        self.sources = [(len(self.rows), 1)]

    def batch(self, indices: list[int | None], multiple: int = 1) -> Batch:
        """Return rows that are as long as the longest sample, rounded up to a multiple."""
        longest = max(len(self.samples[i or 0][0]) for i in indices) - 1
        self.seq_len = math.ceil(longest / multiple) * multiple
        return replace(super().batch(indices), positions=None, starts=None)


# -------------------------------------------------------------------------- from --data to rows

ANSWER_ROOM = 64  # tokens of seq_len that a validation prompt leaves free for the answer
SHORTEST = 8  # tokens of an answer that is worth showing
EXAMPLES = 16  # validation prompts whose answers are scored
SHOWN = 3  # of these, those whose answers are shown


def open_samples(
    data: list[str],
    tokenizer: Tokenizer,
    seq_len: int,
    train_on_prompt: bool = False,
    val_data: list[str] | None = None,
    reading: Reading | None = None,
    read: Callable[..., list[Sample]] = conversations,
) -> tuple[Packed, Packed, list[tuple[list[int], str]], str]:
    """Return training rows, validation rows, up to EXAMPLES validation prompts, each as (ids, true
    answer), and a line that says how many samples and rows there are.

    data, val_data: JSONL files, directories of them, or `python` for the docstrings
    read: text.conversations.conversations, or text.pairs.pairs

    Without `val_data`, a hash holds out some of `data`; where that leaves a split empty, the last
    sample is held out. Raise UserError if a split has no sample."""
    options = tokenizer, seq_len, reading or Reading(), train_on_prompt, read
    samples, changes = _encode_all(data, *options)
    if val_data:
        train, val = samples, _encode_all(val_data, *options)[0]
    else:
        train, val = ([s for s in samples if s.split == split] for split in ("train", "val"))
        if not train or not val:
            train, val = samples[:-1], samples[-1:]
        if not train:
            which = f"one sample that fits in --seq-len {seq_len}"
            raise UserError(f"{' '.join(data)} holds {which}: give two or more, one is held out")
    train_rows, val_rows = (_pack_all(part, seq_len, tokenizer) for part in (train, val))
    filled = sum(len(ids) - 1 for ids, _ in train_rows.samples) / (len(train_rows) * seq_len)
    summary = (
        f"{len(train):,} samples in {len(train_rows):,} rows of {seq_len:,} tokens, "
        f"{100 * filled:.0f} % filled; {len(val):,} held out, in {len(val_rows):,} rows{changes}"
    )
    # Shuffled by hash, since in the order of files the first samples may be much alike. First come
    # those whose answer is more than a few words, and fits in what is generated.
    val.sort(key=lambda sample: zlib.crc32(str(sample.messages).encode()))
    val.sort(key=lambda sample: not SHORTEST <= sample.encoded[0][1].sum() <= ANSWER_ROOM)
    prompts = []
    for sample in val:
        answer = sample.messages[-1].get("content")  # a call may have none
        if answer and len(prompts) < EXAMPLES:
            ids = encode_prompt(sample.messages, tokenizer, sample.tools)
            if len(ids) <= seq_len - ANSWER_ROOM:
                prompts.append((ids, answer))
    return train_rows, val_rows, prompts, summary


def open_chats(data: list[str], tokenizer: Tokenizer, seq_len: int, reading: Reading) -> Packed:
    """Return the rows of all conversations of files, with what is too long truncated."""
    samples, _ = _encode_all(data, tokenizer, seq_len, reading)
    return _pack_all(samples, seq_len, tokenizer)


def _pack_all(samples: list[Sample], seq_len: int, tokenizer: Tokenizer) -> Packed:
    together = len(samples[0].encoded)
    return Packed([e for s in samples for e in s.encoded], seq_len, tokenizer, together)


def _encode_all(
    data: list[str],
    tokenizer: Tokenizer,
    seq_len: int,
    reading: Reading,
    train_on_prompt: bool = False,
    read: Callable[..., list[Sample]] = conversations,
) -> tuple[list[Sample], str]:
    """Return the samples, truncated to seq_len tokens, without those that then have no target, and
    text that says how many were truncated or dropped. A pair that is too long is dropped: answers
    without their ends would teach to be short. Raise UserError if no sample is left."""
    usable, truncated, longest = [], 0, 0
    samples = read(data, reading)
    for sample in with_progress(samples, "encoding samples"):
        with reading.one(sample.where):
            encoded, n_slots = [], 0
            for messages in filter(None, (sample.messages, sample.rejected)):
                try:
                    ids, is_target = encode(messages, tokenizer, train_on_prompt, sample.tools)
                except UserError as error:
                    raise UserError(f"{sample.where}: {error}")
                n_slots += len(ids) - 1
                # In arrays an id and its is_target take 5 bytes, in lists about 48.
                encoded.append(
                    (np.array(ids[: seq_len + 1], np.int32), np.array(is_target[: seq_len + 1]))
                )
            longest = max(longest, n_slots)
            too_long = n_slots > seq_len
            if all(flags.any() for _, flags in encoded) and not (sample.rejected and too_long):
                truncated += too_long
                usable.append(sample._replace(encoded=tuple(encoded)))
    if not usable:
        raise UserError(
            f"none of {len(samples):,} samples fits in --seq-len {seq_len}: the longest "
            f"takes {longest:,} tokens; give a longer --seq-len"
        )
    counts = {"truncated": truncated, "dropped": len(samples) - len(usable)}
    return usable, "".join(f"; {n:,} {what}" for what, n in counts.items() if n)
