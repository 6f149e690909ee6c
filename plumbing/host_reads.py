"""Numbers that the host reads of a device, where it waits for all that the device has to do.

Activation checkpointing runs a forward again in backward. The numbers are the same then, so it
takes those that the first forward has read, and waits for nothing (techniques/recompute.py).
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from plumbing.messages import UserError

READERS = [Tensor.tolist]  # the first one asks the device; the last one is that of the context


def read_counts(counts: Tensor, total: int) -> list[list[int]]:
    """Return counts [m, n] as lists. A fake tensor has no contents: its rows are lists of equal
    counts, which add up to `total`."""
    m, n = counts.shape
    if isinstance(counts, FakeTensor):
        return m * [[(total + i) // n for i in range(n)]]
    return READERS[-1](counts)


def keeping_reads(contexts: Callable) -> tuple:
    """Return the two contexts that `contexts` makes, of a forward and of its recomputation. Within
    the second, read_counts returns what it has returned within the first, in the same order. Raises
    UserError if it is called more often there."""
    forward, again = contexts()
    kept = []

    def read(counts):
        kept.append(READERS[0](counts))
        return kept[-1]

    def read_again(counts):
        if not kept:
            raise UserError("a layer reads more numbers in a recomputation than in its forward")
        return kept.pop(0)

    return reading_by(read, forward), reading_by(read_again, again)


@contextmanager
def reading_by(reader: Callable, context) -> Iterator[None]:
    READERS.append(reader)
    try:
        with context:
            yield
    finally:
        READERS.remove(reader)
