"""Which sequences each step of a run reads: a pure function of (seed, number of the sequence).

So the sampler has no state to save, and the order stays the same when a run is resumed or the
number of processes changes.
"""

import hashlib
from dataclasses import dataclass
from pathlib import Path


def window_of(sequence: int, n: int, seed: int) -> int:
    """Return which of n windows is sequence number `sequence` (0, 1, ...) of a run.

    An epoch is n sequences. It has every window once, in an order that depends on seed and epoch.
    This permutation is computed, not stored: four Feistel rounds (Luby and Rackoff 1988) permute
    all integers of 2 * half bits, which are n to 4 n integers. A result of n or more is
    permuted again until it is below n. This permutes the numbers below n ("cycle walking")."""
    epoch, i = divmod(sequence, n)
    half = max(1, ((n - 1).bit_length() + 1) // 2)  # bits in each half of an integer
    low_bits = (1 << half) - 1
    while True:
        left, right = i >> half, i & low_bits
        for feistel_round in range(4):
            key = f"{seed} {epoch} {feistel_round} {right}".encode()
            digest = hashlib.blake2b(key, digest_size=8).digest()
            mask = int.from_bytes(digest, "little") & low_bits
            left, right = right, left ^ mask
        i = left << half | right
        if i < n:
            return i


def row_of(sequence: int, sources: list[tuple[int, int]], seed: int) -> int:
    """Return which row of a data set is sequence number `sequence` of a run. `sources` has two
    numbers for each source: its rows, and its places in a round.

    A round has every place once, in an order that depends on seed and round. So after each round
    the sources have had exactly their shares. Within a source the order is window_of's."""
    places = sum(n_places for _, n_places in sources)
    nth_round = sequence // places
    place = window_of(sequence, places, seed)
    first_row = 0
    for rows, n_places in sources:
        if place < n_places:
            return first_row + window_of(nth_round * n_places + place, rows, seed)
        place -= n_places
        first_row += rows


@dataclass(frozen=True)
class Order:
    """Which sequences each step of a run reads: those that follow the sequences of the step before.

    If a resume has changed --batch or --seq-len, earlier steps read other numbers of tokens:
    `token_offset` is how many more."""

    batch: int  # sequences of a step, over all ranks
    seq_len: int
    seed: int
    token_offset: int = 0

    def tokens_done(self, step: int) -> int:
        """Return how many tokens the run has read after a step."""
        return self.token_offset + step * self.batch * self.seq_len

    def sequences(self, step: int) -> range:
        """Return the numbers of a step's sequences, counted from the run's first."""
        first = self.tokens_done(step - 1) // self.seq_len
        return range(first, first + self.batch)

    def rows(self, step: int, sources: list[tuple[int, int]]) -> list[int]:
        """Return which rows of a data set a step reads; `sources` as for row_of."""
        return [row_of(number, sources, self.seed) for number in self.sequences(step)]


@dataclass(frozen=True)
class Steps:
    """The steps that a run still has to take, and the sequences that each reads."""

    done: int  # by the checkpoint that it continues
    last: int
    skipped: tuple[int, ...]
    order: Order
    checkpoint: Path | None = None  # that it continues; None for a new run

    @property
    def to_do(self) -> list[int]:
        return [n for n in range(self.done + 1, self.last + 1) if n not in self.skipped]

    def rows(self, sources: list[tuple[int, int]]) -> list[int]:
        """Return the rows of a data set that the run reads, in ascending order; `sources` as for
        row_of. After a resume they are the same as before it. Only if that has changed --batch or
        --seq-len, they are those of the steps still to do."""
        first = self.done + 1 if self.order.token_offset else 1
        read = set()
        for step in range(first, self.last + 1):
            read.update(self.order.rows(step, sources))
        return sorted(read)
