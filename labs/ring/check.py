"""The check of labs/ring."""

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from labs.machinery import compare
from labs.machinery.compare import Property
from labs.machinery.lab import drawn, plural
from labs.machinery.ranks import CALLS
from labs.machinery.student import check_returned
from perf.instruments import Counted

FUNCTION = "ring_all_reduce"
ABOUT = "an all-reduce, by sends and receives"
NEEDS = "`isend`, `recv`, modulo"
POINT = "the same sum, or all of it over one link"
LEADS_TO = "costs/seconds.py", "collective_time"
SIZES = 2, 3, 4
OTHERS = {"send", "recv", "isend", "irecv", "barrier", "new_group"}
BARRED = [f"torch.distributed.{name}" for name in CALLS if name not in OTHERS]
HINTS = (
    "Look up isend: when may the tensor that is sent be changed? Then draw three ranks in a ring, "
    "and each rank's tensor in three chunks.",
    "Count the steps after which one chunk has visited every rank. Which chunk does a rank send in "
    "a step, if it sends what has just arrived, and which one arrives?",
    "A loop over the steps of two rounds: start to send one chunk, receive another into a tensor "
    "of its own, wait. In the first round add what arrived, in the second copy it.",
)
LEFT_OVER = (
    "The number of ranks does not divide the number of elements: sum those that are left over "
    "after chunks of equal size, too."
)
FLAT = "A transposed tensor cannot be sent, nor viewed as flat: flatten copies it where needed."
ERRORS = {
    "view size is not compatible": FLAT,
    "has to be contiguous": FLAT,
    "tuple index out of range": "chunk(n) can return fewer than n chunks: tensor_split(n) always "
    "returns n, and some may be empty.",
    "is invalid for input of size": LEFT_OVER,
    "must match the size of tensor": "Chunks may differ in size: what arrives has the size of the "
    "chunk that the neighbour sends.",
    "Pair is not connected": "A rank cannot send to itself, nor receive from itself.",
}
EARLY = "A tensor was used before it had arrived: wait for irecv first."
ON_PAPER = "Follow one chunk around the ring, on paper: which rank has it after which step?"
SHAPES = (13,), (4, 6), (1,), (7, 143)  # 2, 3 and 4 ranks divide only the second
ODD = "a transposed view", "float32", "a tensor without dimensions"
ODD_SUMS = "of a transposed view, in float32, without dimensions"
KEPT = "The second sum of a tensor is another than the first: something is kept between calls."
MESSAGES = []  # of this rank. They live as long as its process, until all ranks have theirs


def inputs(seed: int, rank: int) -> dict[str, Tensor]:
    """Return what a rank gives to the student's function."""
    plain = drawn(1000 * seed + rank, *SHAPES)
    whole = plain[1].round()  # whole numbers, whose sum is exact in float32, too
    odd = zip(ODD, (whole.T, whole.float(), whole[0, 0].clone()))
    return {f"sum of {'x'.join(map(str, tensor.shape))}": tensor for tensor in plain} | dict(odd)


class Message:
    """What isend and irecv return.

    It notes whether a tensor was changed while it was sent. A tensor that is received has NaN
    until it was waited for, however early the message came."""

    def __init__(self, call: Callable, is_sent: bool, tensor: Tensor, *args, **kwargs):
        self.tensor, self.content, self.is_sent = tensor, tensor.clone(), is_sent
        self.waited_for = self.changed = False
        self.work = call(tensor if is_sent else self.content, *args, **kwargs)
        if not is_sent:
            tensor.fill_(torch.nan)

    def wait(self, *args) -> None:
        if self.waited_for:
            return
        if self.is_sent:
            self.changed |= not torch.allclose(self.tensor, self.content, 0, 0, equal_nan=True)
        self.work.wait(*args)
        if not self.is_sent:
            self.tensor.copy_(self.content)
        self.waited_for, self.tensor, self.content, self.work = True, None, None, None


def noted_messages() -> contextlib.AbstractContextManager:
    """Return a context within which MESSAGES gets what isend and irecv return."""

    def start(*args, **kwargs) -> Message:
        MESSAGES.append(Message(*args, **kwargs))
        return MESSAGES[-1]

    def operation(op: Callable, tensor: Tensor, peer: int) -> Callable:
        return partial(op, tensor, peer)  # torch's P2POp takes only its own isend and irecv

    return mock.patch.multiple(
        dist,
        isend=partial(start, dist.isend, True),
        irecv=partial(start, dist.irecv, False),
        P2POp=operation,
        batch_isend_irecv=lambda operations: [start_it() for start_it in operations],
    )


def on_rank(load: Callable, size: int, seed: int, rank: int) -> dict:
    """Sum tensors of several shapes, each twice. Return the sums, what the first call of each sent,
    and how it was waited for."""
    sums = {}
    again = {}
    sent = {}
    with noted_messages():
        ring_all_reduce = load(overwrites=True)
        for name, tensor in inputs(seed, rank).items():
            content = tensor.clone()
            with Counted(None) as counted:
                total = check_returned(ring_all_reduce(tensor), Tensor, "the sum, a tensor")
            sums[name], sent[name] = total.clone(), compare.by_kind(counted.sent)
            tensor.copy_(content)
            again[name] = ring_all_reduce(tensor).clone()
    return {
        "sums": sums,
        "again": again,
        "sent": sent,
        "messages": len(MESSAGES),
        "waited for": sum(message.waited_for for message in MESSAGES),
        "changed": sum(message.changed for message in MESSAGES),
    }


def properties(results: dict[str, list], size: int, seed: int) -> Iterator[Property]:
    keys = "messages", "waited for", "changed"
    messages, waited, changed = (sum(results[key]) for key in keys)
    yield Property(
        "waited for",
        f"{waited} of {messages} asynchronous sends and receives",
        waited == messages,
        f"Nobody waits for {plural(messages - waited, 'message')}: the function may return before "
        f"that, and the caller may change the tensor.",
    )
    yield Property(
        "untouched",
        f"{plural(changed, 'tensor')} changed while being sent",
        not changed,
        "A tensor was changed while it was being sent, so the neighbour gets the old content or "
        "the new. Receive into a tensor of its own, and wait before you write to what was sent.",
    )
    of_ranks = [inputs(seed, rank) for rank in range(size)]
    total = {name: sum(tensors[name] for tensors in of_ranks) for name in of_ranks[0]}
    plain = {name: tensor for name, tensor in total.items() if name not in ODD}
    found = [{name: sums[name] for name in plain} for sums in results["sums"]]
    has_nan = any(tensor.isnan().any() for sums in found for tensor in sums.values())
    otherwise = EARLY if has_nan else ON_PAPER
    reference = "the sums of tensors of 1 to 1,001 elements"
    yield compare.tensors("output", found, plain, reference, otherwise)
    for what in ODD:
        found = [sums[what] for sums in results["sums"]]
        otherwise = f"The sum of {what} is wrong: shape, order and dtype are the caller's."
        line = compare.tensors("odd tensors", found, total[what], ODD_SUMS, otherwise)
        if not line.ok:
            break
    yield line
    reference = "the same sums, of the same tensors"
    yield compare.tensors("output again", results["again"], total, reference, KEPT)
    for name, tensor in plain.items():
        count = tensor.numel()
        nbytes = tensor.nbytes
        limit = 2 * (size - 1) * -(-count // size) * tensor.element_size()
        sent = [of_rank[name].get("send", (0, 0))[1] for of_rank in results["sent"]]
        mistakes = {
            f"All of the sum goes through rank 0: it sends {sent[0]:,} bytes where the others send "
            f"{sent[1]:,}, and their links are idle meanwhile.": sent[0] > max(sent[1:]),
            "Every rank sends whole tensors. Cut the tensor into as many chunks as there are "
            "ranks, and let each step pass on one chunk.": sent == [(size - 1) * nbytes] * size,
            "More is sent than 2 (n - 1) chunks of a tensor, one in each step of two rounds.": (
                max(sent) > limit
            ),
            "Fewer bytes are sent than a sum needs: send them by isend and irecv.": True,
        }
        line = Property(
            "bytes sent",
            f"{max(sent):,} by a rank; {limit:,} are enough for {count:,} elements",
            max(sent) <= limit and sum(sent) >= 2 * (size - 1) * nbytes,
            mistakes,
        )
        if not line.ok:
            break
    yield line
    others = {kind for of_rank in results["sent"] for sent in of_rank.values() for kind in sent}
    others = ", ".join(sorted(others - {"send"}))
    yield Property("nothing else", others or "is sent", not others)
