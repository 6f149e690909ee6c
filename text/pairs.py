"""Read preferences, two answers to a prompt of which one is better, and pack them into rows.

Both answers of a pair are documents of the same row, the chosen one first, each after the prompt:

    tokens      bos  1+1  >   2  | bos  1+1  >   3  | bos  Hi  >  ...
    targets      -    -   2  eot |  -    -   3  eot |  -    -          (- is IGNORE)
    pair             0                  0                 1

So no microbatch and no rank has one answer of a pair without the other, and a batch is counted in
rows, as in fine-tuning (text/chat.py). A pair that is longer than a row is left out: a truncated
answer would not end, and the model would learn that from it.
"""

import re
import zlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from plumbing.processes import UserError, with_progress
from text.batch import Batch
from text.chat import (
    ANSWER_ROOM,
    EXAMPLES,
    Encoded,
    Packed,
    encode,
    encode_prompt,
    pack,
)
from text.conversations import Conversation, conversation_of, docstrings, files_of
from text.corpora import Reading, document_name, read_records, split_of
from text.tokenizer import Tokenizer

PAIRS = '{"prompt", "chosen", "rejected"}, of which chosen and rejected may be lists of messages'
HH_TURN = re.compile(r"(?:^|\n\n)(Human|Assistant): ?")  # as Anthropic's hh-rlhf marks turns
Pair = tuple[Conversation, Conversation]  # with the chosen answer, with the rejected one


def pair_of(record: dict, where: str) -> Pair:
    """Return the two conversations of a JSON object.

    An answer is a string after a "prompt", a list of messages after it, or the whole conversation,
    as a list or as one string of Anthropic's form. A prompt may be a string or a list."""
    record = {key: value for key, value in record.items() if value is not None}
    names = [name for name in ("prompt", "instruction", "question") if name in record]
    prompt = record[names[0]] if names else []
    if isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    pair = []
    for key in ("chosen", "rejected"):
        said = record.get(key)
        if isinstance(said, str) and names:
            said = [{"role": "assistant", "content": said}]
        elif isinstance(said, str):
            _, *turns = HH_TURN.split(said)
            roles = ({"Human": "user"}.get(name, "assistant") for name in turns[::2])
            said = [{"role": role, "content": text} for role, text in zip(roles, turns[1::2])]
        if not isinstance(said, list) or not said or not isinstance(prompt, list):
            raise UserError(f'{where}: "{key}" is {said!r:.60}: give {PAIRS}')
        follows = isinstance(said[0], dict) and said[0].get("role") == "assistant"
        messages = {"messages": [*prompt, *said] if follows else said}
        if "system" in record:
            messages["system"] = record["system"]
        pair.append(conversation_of(messages, f"{where}: {key}"))
    chosen, rejected = pair
    if chosen == rejected:
        raise UserError(f"{where}: both answers are the same: leave the line out")
    return chosen, rejected


def docstring_pairs() -> Iterator[tuple[str, str, Pair]]:
    """Yield (split, module, pair) of the default data: a function's docstring is better than that
    of the function before it, and better than its own words in disorder."""
    before = {}
    for i, (split, module, (question, answer)) in enumerate(docstrings()):
        words = answer["content"].split()
        shuffled = " ".join(sorted(words, key=lambda word: zlib.crc32(f"{i} {word}".encode())))
        worse = shuffled if i % 2 else before.get(split, shuffled)
        before[split] = answer["content"]
        if worse != answer["content"]:
            yield split, module, ([question, answer], [question, answer | {"content": worse}])


def read_pairs(data: list[str], reading: Reading) -> Iterator[tuple[str, str, Pair]]:
    """Yield (split, where, pair) for each pair of --data, which a hash holds out."""
    if data == ["python"] and not Path("python").exists():
        yield from docstring_pairs()
        return
    for file in files_of(data, PAIRS):
        for number, where, record in read_records(file, PAIRS, reading):
            with reading.one(where):
                yield split_of(f"{document_name(file)}:{number}"), where, pair_of(record, where)


def encode_pair(pair: Pair, tokenizer: Tokenizer) -> list[Encoded]:
    """Encode both conversations. Targets are what follows the messages that they share: earlier
    answers would count in both, and say nothing."""
    differs = [one != other for one, other in zip(*pair)]
    shared = differs.index(True) if any(differs) else len(differs) - 1
    messages = [
        [m | {"train": i >= shared} if m["role"] == "assistant" else m for i, m in enumerate(each)]
        for each in pair
    ]
    return [encode(each, tokenizer) for each in messages]


class Pairs(Packed):
    """Samples of which each two are a pair, packed into rows. `width` is the most pairs of a row.

    reference_log_p: None or [rows, width, 2], which a batch has as `given`"""

    def __init__(self, samples: list[Encoded], seq_len: int, tokenizer: Tokenizer):
        super().__init__(samples, seq_len, tokenizer)
        lengths = [len(ids) - 1 for ids, _ in samples]
        rows = pack([sum(pair) for pair in zip(lengths[::2], lengths[1::2])], seq_len)
        self.rows = [[i for pair in row for i in (2 * pair, 2 * pair + 1)] for row in rows]
        self.sources, self.width = [(len(rows), 1)], max(map(len, rows))
        self.reference_log_p: torch.Tensor | None = None

    def batch(self, indices: list[int | None]) -> Batch:
        units = [0 if row is None else len(self.rows[row]) // 2 for row in indices]
        given = torch.zeros(len(indices), self.width, 2)
        if self.reference_log_p is not None:
            given = self.reference_log_p[[row or 0 for row in indices]]
        return replace(super().batch(indices), units=torch.tensor(units), given=given)


def open_pairs(
    data: list[str],
    tokenizer: Tokenizer,
    seq_len: int,
    val_data: list[str] | None,
    reading: Reading,
) -> tuple[Pairs, Pairs, list[tuple[list[int], str]], str]:
    """Return rows of pairs to train on and to validate on, some validation prompts, each as (ids,
    chosen answer), and a line that says how many there are. If nothing is held out, the last pair
    is. Raise UserError if fewer than two fit in seq_len tokens."""
    samples: dict[str, list[Encoded]] = {"train": [], "val": []}
    examples, too_long = [], 0
    sources = [(data, None)] if not val_data else [(data, "train"), (val_data, "val")]
    for source, wanted in sources:
        pairs = list(read_pairs(source, reading))
        for split, where, pair in with_progress(pairs, "encoding pairs"):
            with reading.one(where):
                try:
                    encoded = encode_pair(pair, tokenizer)
                except UserError as error:
                    raise UserError(f"{where}: {error}")
                if sum(len(ids) - 1 for ids, _ in encoded) > seq_len:
                    too_long += 1
                    continue
                split = wanted or split
                samples[split] += [(np.array(ids, np.int32), np.array(t)) for ids, t in encoded]
                prompt = encode_prompt(pair[0], tokenizer)
                fits = split == "val" and len(prompt) <= seq_len - ANSWER_ROOM
                examples += [(prompt, pair[0][-1]["content"])] * (fits and len(examples) < EXAMPLES)
    if not samples["val"]:
        samples["val"], samples["train"] = samples["train"][-2:], samples["train"][:-2]
    if not samples["train"]:
        raise UserError(
            f"{' '.join(data)} has too few pairs that fit in --seq-len {seq_len}, {too_long:,} are "
            f"longer: two are needed, one of them to hold out; give lines like {PAIRS}"
        )
    train, val = (Pairs(samples[split], seq_len, tokenizer) for split in ("train", "val"))
    counts = f"{len(train.samples) // 2:,} pairs in {len(train):,} rows of {seq_len:,} tokens"
    dropped = f"; {too_long:,} dropped, longer than a row" if too_long else ""
    return train, val, examples, f"{counts}; {len(val.samples) // 2:,} held out{dropped}"
