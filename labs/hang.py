"""Which rank is missing?

A collective ends when all ranks of its group have called it, each with the same name and shape. If
one rank calls something else, or nothing, the others wait for ever. A timeout names those who wait,
and they are not at fault. But every rank keeps a log of its calls, and the logs together tell.

Read: the head of plumbing/processes.py, and PyTorch's tutorial about its flight recorder.
"""

from collections import Counter
from itertools import zip_longest
from typing import NamedTuple


class Call(NamedTuple):
    """A collective that a rank has called. It is logged before it starts."""

    name: str
    shape: tuple[int, ...]
    group: tuple[int, ...]  # the ranks that take part
    where: str  # in the program; the same collective may be called from several places


def culprit(logs: list[list[Call]]) -> dict[int, int]:
    """Return the ranks at fault, each with the number of its wrong or missing call; {} if all ends.

    logs: of each rank. In a group, a rank's i-th call meets the i-th calls of the others. Calls may
    be asynchronous: a log can go on after the call that never ends. Numbers count all calls in the
    rank's log, from 1, and a missing call comes after the last.

    Of each group, look at the first call that not all of its ranks have made with the same name and
    shape. A rank that has made none there has ended, or died, and that counts as what it did. But
    if it waits in another group, leave it out: it has not come so far. Of those that are left, the
    ranks that did what more than half of them did are right, and the others are at fault. If no
    call has more than half, all of them are.
    """

    raise NotImplementedError("about 24 lines")
