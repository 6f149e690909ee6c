"""Open conversations as packed rows, for training and for validation: the data of fine-tuning.

A sample is one conversation, or the two of a pair (text/pairs.py). text/targets.py turns it into
tokens, and text/packing.py packs several into a row.
"""

import sys
import zlib
from collections.abc import Callable

import numpy as np

from plumbing.messages import UserError, print_rank_zero, with_progress
from text.conversations import Sample, conversations
from text.corpora import Reading
from text.packing import Packed
from text.targets import ANSWER_ROOM, encode, encode_prompt
from text.vocabulary import Tokenizer

SHORTEST = 8  # tokens of an answer that is worth showing
EXAMPLES = 16  # validation prompts whose answers are scored


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
    train = _encode_all(data, *options)
    if val_data:
        val = _encode_all(val_data, *options)
    else:
        train, val = _hold_out(train)
        if not train:
            which = f"one sample that fits in --seq-len {seq_len}"
            raise UserError(f"{' '.join(data)} holds {which}: give two or more, one is held out")
    train_rows = _pack_all(train, seq_len, tokenizer)
    val_rows = _pack_all(val, seq_len, tokenizer)
    slots = sum(len(ids) - 1 for ids, _ in train_rows.samples)
    filled = slots / (len(train_rows) * seq_len)
    summary = (
        f"{len(train):,} samples in {len(train_rows):,} rows of {seq_len:,} tokens, "
        f"{100 * filled:.0f} % filled; {len(val):,} held out, in {len(val_rows):,} rows"
    )
    return train_rows, val_rows, _examples(val, tokenizer, seq_len), summary


def open_chats(data: list[str], tokenizer: Tokenizer, seq_len: int, reading: Reading) -> Packed:
    """Return the rows of all conversations of files, with what is too long truncated."""
    samples = _encode_all(data, tokenizer, seq_len, reading)
    return _pack_all(samples, seq_len, tokenizer)


def _hold_out(samples: list[Sample]) -> tuple[list[Sample], list[Sample]]:
    """Return what is for training and what is for validation; of a few, the last is held out."""
    train = [sample for sample in samples if sample.split == "train"]
    val = [sample for sample in samples if sample.split == "val"]
    return (train, val) if train and val else (samples[:-1], samples[-1:])


def _pack_all(samples: list[Sample], seq_len: int, tokenizer: Tokenizer) -> Packed:
    encoded = []
    for sample in samples:
        encoded += sample.encoded
    together = len(samples[0].encoded)
    return Packed(encoded, seq_len, tokenizer, together)


def _examples(val: list[Sample], tokenizer: Tokenizer, seq_len: int) -> list[tuple[list[int], str]]:
    """Return prompts with their true answers, to show what a model answers.

    They are shuffled by hash, since in the order of files the first samples may be much alike.
    First come those whose targets are more than a few words, and fit in what is generated."""

    def order(sample: Sample) -> tuple[bool, int]:
        _, is_target = sample.encoded[0]
        is_good = SHORTEST <= is_target.sum() <= ANSWER_ROOM
        return not is_good, zlib.crc32(str(sample.messages).encode())

    prompts = []
    for sample in sorted(val, key=order):
        answer = sample.messages[-1].get("content")  # a call may have none
        if answer and len(prompts) < EXAMPLES:
            ids = encode_prompt(sample.messages, tokenizer, sample.tools)
            if len(ids) <= seq_len - ANSWER_ROOM:
                prompts.append((ids, answer))
    return prompts


def _encode_all(
    data: list[str],
    tokenizer: Tokenizer,
    seq_len: int,
    reading: Reading,
    train_on_prompt: bool = False,
    read: Callable[..., list[Sample]] = conversations,
) -> list[Sample]:
    """Return the samples, truncated to seq_len tokens, without those that then have no target. A
    line says how many were truncated or dropped. A pair that is too long is dropped: answers
    without their ends would teach to be short. Raise UserError if no sample is left."""
    usable = []
    truncated = 0
    longest = 0
    samples = read(data, reading)
    for sample in with_progress(samples, "encoding samples"):
        with reading.one(sample.where):
            encoded = []
            n_slots = 0
            for messages in (sample.messages, sample.rejected):
                if messages is None:
                    continue
                try:
                    ids, is_target = encode(messages, tokenizer, train_on_prompt, sample.tools)
                except UserError as error:
                    raise UserError(f"{sample.where}: {error}")
                n_slots += len(ids) - 1
                # In arrays an id and its is_target take 5 bytes, in lists about 48.
                kept_ids = np.array(ids[: seq_len + 1], np.int32)
                kept_targets = np.array(is_target[: seq_len + 1])
                encoded.append((kept_ids, kept_targets))
            longest = max(longest, n_slots)
            is_too_long = n_slots > seq_len
            have_targets = all(kept_targets.any() for _, kept_targets in encoded)
            if have_targets and not (sample.rejected and is_too_long):
                truncated += is_too_long
                usable.append(sample._replace(encoded=tuple(encoded)))
    if not usable:
        raise UserError(
            f"none of {len(samples):,} samples has targets within --seq-len {seq_len}: the longest "
            f"takes {longest:,} tokens; give a longer --seq-len, or answers to train on"
        )
    dropped = len(samples) - len(usable)
    if truncated or dropped:
        changes = f"{truncated:,} samples truncated to --seq-len {seq_len}, {dropped:,} dropped"
        print_rank_zero(f"{' '.join(data)}: {changes}", file=sys.stderr)
    return usable
