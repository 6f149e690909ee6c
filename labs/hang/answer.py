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

    # >>>
    def made(rank: int, number: int | None) -> tuple | None:
        return logs[rank][number - 1][:2] if number else None  # name and shape

    stuck = []  # of each group: rank -> number of its call there, or None
    for group in {call.group for log in logs for call in log}:
        numbers = [
            [number for number, call in enumerate(logs[rank], 1) if call.group == group]
            for rank in group
        ]
        for of_ranks in zip_longest(*numbers):
            if len(set(map(made, group, of_ranks))) > 1:
                stuck.append(dict(zip(group, of_ranks)))
                break

    waiting = {rank for calls in stuck for rank, number in calls.items() if number}
    guilty = {}
    for calls in stuck:
        voters = [rank for rank, number in calls.items() if number or rank not in waiting]
        votes = Counter(made(rank, calls[rank]) for rank in voters)
        most, count = votes.most_common(1)[0]
        for rank in voters:
            if made(rank, calls[rank]) != most or 2 * count <= len(voters):
                guilty[rank] = calls[rank] or len(logs[rank]) + 1
    return guilty
    # <<<


# Why: nothing says which call of another rank a call is meant for. They meet by their order, so one
# call too many shifts all that follow, and a timeout shows the shift and not its cause. It may be
# that one rank generates alone (litgpt #1202), has fewer batches (pytorch #38174), leaves the loop
# at a NaN of its own (pytorch/audio #3749), saves alone what all must gather (DeepSpeed PR #801),
# or sends gradients in the order of a set (Megatron-LM PR #2218). PyTorch's flight recorder keeps
# such logs, and its analyzer matches them by group and number, as you do. The cure is neither a
# longer timeout nor one barrier more: ranks have to decide alike, for example by the all-reduced
# maximum of a flag that says whether to stop.
#
# Questions: 1. Those in nodes of 3 ranks: it compares the n-th calls of all ranks, whatever their
# groups, and takes ranks that only belong to different ones for ranks that parted.
# 2. A call that is missing comes after no timeout, and a barrier is one more collective that can
# shift. All ranks have to leave together: all-reduce a flag, by MAX, and look at that.
# 3. Rank 0 waits in a call that nobody else of its group has made, and the others wait for rank 0.
# Compare it with the ranks in the same place of other nodes, whose logs have no such call.
