"""Read preferences, two answers to a prompt of which one is better, and pack them into rows.

Both conversations of a pair lie in the same row, the chosen one first, as documents of their own:

    tokens      bos  1+1  >   2  | bos  1+1  >   3  | bos  Hi  >  ...
    targets      -    -   2  eot |  -    -   3  eot |  -    -          (- is IGNORE)

So no microbatch and no rank has one without the other. A pair that is longer than a row is left
out: a truncated answer would not end, and the model would learn that.
"""

import itertools
import random
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from plumbing.processes import UserError, with_progress
from text.batch import Batch
from text.chat import ANSWER_ROOM, EXAMPLES, Packed, encode, encode_prompt, pack
from text.conversations import Conversation, conversation_of, docstrings, files_of
from text.corpora import Reading, document_name, read_records, split_of
from text.tokenizer import Tokenizer

PAIRS = '{"prompt", "chosen", "rejected"}, of which chosen and rejected may be lists of messages'
HH_TURN = re.compile(r"(?:^|\n\n)(Human|Assistant): ?")  # as Anthropic's hh-rlhf marks turns
Pair = tuple[Conversation, Conversation]  # with the chosen answer, with the rejected one


def pair_of(record: dict, where: str) -> Pair:
    """Return the conversations of a JSON object. An answer is what follows a "prompt", or a whole
    conversation. Both may be lists, or strings, of which a whole one has Anthropic's form."""
    prompts = [record[name] for name in ("prompt", "instruction", "question") if record.get(name)]
    prompt = prompts[0] if prompts else []
    if isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    pair, others = [], {name: record[name] for name in record if name == "system"}
    for key in ("chosen", "rejected"):
        said = record.get(key)
        if isinstance(said, str) and prompt:
            said = [{"role": "assistant", "content": said}]
        elif isinstance(said, str):
            _, *turns = HH_TURN.split(said)
            turns = zip(turns[::2], turns[1::2])
            said = [{"role": name.lower(), "content": text} for name, text in turns]
        if not isinstance(said, list) or not said:
            raise UserError(f'{where}: "{key}" is {said!r:.60}: give {PAIRS}')
        follows = isinstance(said[0], dict) and said[0].get("role") == "assistant"
        whole = {"messages": [*prompt, *said] if follows else said}
        pair.append(conversation_of(whole | others, f"{where}: {key}"))
    if pair[0] == pair[1]:
        raise UserError(f"{where}: both answers are the same: leave the line out")
    return tuple(pair)


def read_pairs(data: list[str], reading: Reading) -> Iterator[tuple[str, str, Pair]]:
    """Yield (split, where, pair) for each pair of --data. Lines of files are held out by a hash.

    The default data are docstrings. Worse than a function's own are its words in disorder, and the
    docstring of the function before it."""
    if data == ["python"] and not Path("python").exists():
        before = ""
        for i, (split, module, (question, answer)) in enumerate(docstrings()):
            words = answer["content"].split()
            worse = before if i % 2 else " ".join(random.Random(i).sample(words, len(words)))
            before = answer["content"]
            if worse != before:
                yield split, module, ([question, answer], [question, answer | {"content": worse}])
        return
    for file in files_of(data, PAIRS):
        for number, where, record in read_records(file, PAIRS, reading):
            with reading.one(where):
                yield split_of(f"{document_name(file)}:{number}"), where, pair_of(record, where)


def encode_pair(pair: Pair, tokenizer: Tokenizer) -> list[tuple[np.ndarray, np.ndarray]]:
    """Encode both conversations, each as (ids, is_target). Targets are what follows the messages
    that they share: earlier answers would count in both, and say nothing."""
    differs = [one != other for one, other in zip(*pair)]
    shared = differs.index(True) if any(differs) else len(differs) - 1
    marked = ([m | {"train": i >= shared} for i, m in enumerate(each)] for each in pair)
    encoded = (encode(messages, tokenizer) for messages in marked)
    return [(np.array(ids, np.int32), np.array(is_target)) for ids, is_target in encoded]


class Pairs(Packed):
    """Samples, of which each two are a pair, packed into rows. The units of a batch are pairs, and
    it is `given` the reference_log_p of its rows: [B, most pairs of a row, 2]."""

    def __init__(self, samples: list, seq_len: int, tokenizer: Tokenizer):
        super().__init__(samples, seq_len, tokenizer)
        lengths = [len(ids) - 1 for ids, _ in samples]
        rows = pack([sum(pair) for pair in zip(lengths[::2], lengths[1::2])], seq_len)
        self.rows = [[i for pair in row for i in (2 * pair, 2 * pair + 1)] for row in rows]
        self.sources = [(len(rows), 1)]
        self.reference_log_p = torch.zeros(1, max(map(len, rows)), 2).expand(len(rows), -1, -1)

    def batch(self, indices: list[int | None]) -> Batch:
        units = [0 if row is None else len(self.rows[row]) // 2 for row in indices]
        given = self.reference_log_p[[row or 0 for row in indices]]
        return replace(super().batch(indices), units=torch.tensor(units), given=given)


def open_pairs(
    data: list[str],
    tokenizer: Tokenizer,
    seq_len: int,
    val_data: list[str] | None,
    reading: Reading,
) -> tuple[Pairs, Pairs, list[tuple[list[int], str]], str]:
    """Return what open_samples of text/chat.py does, of pairs: the true answers of the validation
    prompts are the chosen ones. Raise UserError where too few pairs fit in a row."""

    def usable(source: list[str]) -> tuple[list, int]:
        found, n_read = [], 0
        for split, where, pair in with_progress(
            list(read_pairs(source, reading)), "encoding pairs"
        ):
            with reading.one(where):
                try:
                    samples = encode_pair(pair, tokenizer)
                except UserError as error:
                    raise UserError(f"{where}: {error}")
                n_read += 1
                if sum(len(ids) - 1 for ids, _ in samples) <= seq_len:
                    found.append((split, pair[0], samples))
        return found, n_read - len(found)

    found, too_long = usable(data)
    train, val = ([each for each in found if each[0] == split] for split in ("train", "val"))
    if val_data:
        train, (val, _) = found, usable(val_data)
    elif not train or not val:
        train, val = found[:-1], found[-1:]
    if not train or not val:
        told = f"{' '.join(data)} needs two pairs that fit in --seq-len {seq_len}, one to hold out"
        raise UserError(f"{told}; {too_long:,} are longer: give more, or a longer --seq-len")
    sets = [
        Pairs([s for *_, two in part for s in two], seq_len, tokenizer) for part in (train, val)
    ]
    prompts = ((encode_prompt(chosen, tokenizer), chosen[-1]["content"]) for _, chosen, _ in val)
    short = (prompt for prompt in prompts if len(prompt[0]) <= seq_len - ANSWER_ROOM)
    counts = f"{len(train):,} pairs in {len(sets[0]):,} rows; {len(val):,} held out"
    summary = f"{counts}; {too_long:,} dropped, longer than the {seq_len:,} tokens of a row"
    return *sets, list(itertools.islice(short, EXAMPLES)), summary
