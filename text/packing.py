"""Pack samples of tokens into rows, so that little of a batch is padding.

A sample is some token ids, and which of them are targets. Samples are short and rows are long, so
several share a row; the rest is padding. Here two conversations do (> begins an answer):

    tokens      bos  Hi   >   Hel  lo  | bos  1+1  >   2  | pad  pad
    targets      -   -   Hel  lo   eot |  -    -   2  eot |  -    -      (- is IGNORE)
    positions    0   1    2    3    4  |  0    1   2   3  |  0    1

Positions begin at 0 with every sample, and attention stays within a sample (`document_mask` in
model.py). So a sample has the same loss and gradient as in a row of its own. A sample of n ids
takes n - 1 slots of a row: its first id is only an input, its last only a target.
"""

import bisect
import copy
import math
import zlib
from dataclasses import replace
from operator import itemgetter

import numpy as np
import torch

from model import IGNORE
from text.batch import Batch
from text.vocabulary import Tokenizer

Encoded = tuple[list[int], list[bool]]  # ids [n], and which of them are targets [n]


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

    samples: of at most seq_len + 1 ids each. Groups of `together` consecutive ones, such as the two
    of a pair, are never divided between rows."""

    document_mask = True

    def __init__(
        self, samples: list[Encoded], seq_len: int, tokenizer: Tokenizer, together: int = 1
    ):
        self.samples = samples
        self.seq_len = seq_len
        self.tokenizer = tokenizer
        firsts = range(0, len(samples), together)  # of the samples that stay together
        lengths = []
        for first in firsts:
            group = samples[first : first + together]
            lengths.append(sum(len(ids) - 1 for ids, _ in group))
        self.rows = []  # samples' indices
        for groups in pack(lengths, seq_len):
            row = []
            for group in groups:
                row += range(firsts[group], firsts[group] + together)
            self.rows.append(row)
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
        """Return a checksum of all ids, to notice other files, on a node or later. It leaves out
        targets, as d36363a and 86671ca do: else their runs would seem to have other data."""
        return zlib.crc32(np.concatenate([ids for ids, _ in self.samples]))

    def batch(self, indices: list[int | None]) -> Batch:
        """Return the rows of these indices; None makes a row without targets."""
        shape = len(indices), self.seq_len  # [B, T]
        tokens = np.full(shape, self.pad)
        targets = np.full(shape, IGNORE)
        positions = np.zeros(shape, dtype=np.int64)
        lengths = []
        for b, row in enumerate(indices):
            start = 0
            for sample in [] if row is None else self.rows[row]:
                ids, is_target = self.samples[sample]
                ids = np.asarray(ids, np.int64)  # token files are unsigned, and IGNORE is not
                end = start + len(ids) - 1
                tokens[b, start:end] = ids[:-1]
                targets[b, start:end] = np.where(is_target[1:], ids[1:], IGNORE)
                positions[b, start:end] = np.arange(end - start)
                lengths.append(end - start)
                start = end
            positions[b, start:] = np.arange(self.seq_len - start)  # padding is a document too
        text_bytes = self.tokenizer.count_bytes(targets)
        rows = [row or 0 for row in indices]
        values = {name: value[rows] for name, value in self.target_values.items()}
        tensors = map(torch.from_numpy, (tokens, targets, positions))
        return Batch(*tensors, text_bytes, lengths, target_values=values)


class Rows(Packed):
    """Samples in rows of their own, so that no mask is needed."""

    document_mask = False

    def __init__(self, samples: list[Encoded], tokenizer: Tokenizer):
        self.samples = samples
        self.tokenizer = tokenizer
        self.target_values = {}
        self.pad = 0
        self.rows = [[i] for i in range(len(samples))]
        self.sources = [(len(self.rows), 1)]

    def batch(self, indices: list[int | None], multiple: int = 1) -> Batch:
        """Return rows as long as the longest of their samples, rounded up to a multiple."""
        longest = max(len(self.samples[i or 0][0]) for i in indices) - 1
        self.seq_len = math.ceil(longest / multiple) * multiple
        return replace(super().batch(indices), positions=None, starts=None)
