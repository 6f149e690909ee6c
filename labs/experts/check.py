"""The check of labs/experts."""

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from labs.machinery import compare
from labs.machinery.compare import Property
from labs.machinery.lab import drawn, gradient_of
from labs.machinery.student import check_returned
from perf.instruments import Counted
from techniques.expert_parallel import AllToAll

FUNCTION = "exchange"
ABOUT = "the way of rows to their experts and back, given the all-to-all"
NEEDS = "`all_to_all_single`, `argsort`, a hook of a gradient"
POINT = "results and gradients go home by the inverse of the way out"
LEADS_TO = "techniques/expert_parallel.py", "exchange"
SIZES = 2, 3, 4
BARRED = ("techniques.expert_parallel.exchange",)
HINTS = (
    "What does a rank have to know before it can receive rows? Draw the rows of two ranks with two "
    "experts each, before and after they travel.",
    "Compare the order of the rows that arrive with the order that compute needs. Then count over "
    "how many ranks' rows the gradient of an expert is a sum.",
    "An all-to-all of counts; two lists of its sums; an all-to-all of rows; a sort by expert, the "
    "computation, the inverse of the sort; an all-to-all with the lists exchanged. Beside it, a "
    "hook on a view of the weight. No rows are a message, too.",
)
ERRORS = {
    "Split sizes doesn't match": "What a rank received it now sends: on the way back the two lists "
    "change places."
}
EACH, WIDTH = 2, 5  # experts of a rank; features
TURNS = 3  # calls with the same weight; the first two have the same rows, too
GATHERED = "Of the counts a rank needs those for its own experts: an all-to-all sends no others."
FEWER = (
    "Counts or rows travel in a way that is not seen here, or in fewer bytes than they have: give "
    "them to all_to_all_single as they are, counts in int64."
)
HOOKED = (
    "The first call is right, and the second with the same weight is not. A hook on the weight "
    "stays there, so that each call adds one: put it on a view of the weight."
)


def rows_of(seed: int, size: int, rank: int, turn: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return a rank's rows, their counts, and what their results are multiplied by in its loss. In
    the last turn the last rank has no rows, and the experts of rank 0 get none."""
    is_last = turn == TURNS - 1
    generator = torch.Generator().manual_seed(1000 * seed + 10 * rank + is_last)
    counts = torch.randint(0, 4, (EACH * size,), generator=generator)
    counts[(rank + 1) % len(counts)] += 2
    if is_last:
        counts[-1] += 2  # some rows travel, whatever is drawn
        counts[:EACH] = 0
        counts *= int(rank < size - 1)
    shape = int(counts.sum()), WIDTH
    return *drawn(2000 * seed + 10 * rank + is_last, shape, shape), counts


def compute(rows: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    parts = zip(rows.split(counts.tolist()), weight.unbind())
    return torch.cat([torch.tanh(F.linear(part, matrix)) for part, matrix in parts])


def on_rank(load: Callable, size: int, seed: int, rank: int) -> dict:
    """Exchange rows in all turns, with a backward after each. Return results, gradients, bytes, and
    which collectives sent them."""
    exchange = load()
    found = {"output": [], "gradients": [], "sent": 0}
    kinds = set()
    (weight,) = drawn(seed, (EACH * size, WIDTH, WIDTH))
    own = weight[EACH * rank :][:EACH].clone().requires_grad_()
    for turn in range(TURNS):
        rows, upstream, counts = rows_of(seed, size, rank, turn)
        rows.requires_grad_()
        own.grad = None
        with Counted(None) as counted:
            arguments = compute, lambda *x: AllToAll.apply(*x, None), own, rows * 1, counts.clone()
            out = check_returned(exchange(*arguments), Tensor, "results [n, D], a tensor")
            if out.shape != rows.shape:
                raise TypeError(
                    f"your function returned results of shape {list(out.shape)} for rows of shape "
                    f"{list(rows.shape)}: results go home to their rows"
                )
            (out * upstream).sum().backward()
        found["output"].append({"results": out.detach()})
        gradients = {"rows": gradient_of(rows), "weight": gradient_of(own)}
        found["gradients"].append(gradients)
        found["sent"] += compare.nbytes_of(counted.sent)
        kinds |= compare.by_kind(counted.sent).keys()
    return found | {"kinds": sorted(kinds)}


def expected(seed: int, size: int, turn: int) -> tuple[list[dict], list[dict]]:
    """Return the results and the gradients of each rank, by one process that has all experts."""
    (weight,) = drawn(seed, (EACH * size, WIDTH, WIDTH))
    weight.requires_grad_()
    results = []
    gradients = []
    for rank in range(size):
        rows, upstream, counts = rows_of(seed, size, rank, turn)
        out = compute(rows.requires_grad_(), weight, counts)
        (out * upstream).sum().backward()
        results.append({"results": out.detach()})
        gradients.append({"rows": rows.grad})
    for rank in range(size):
        gradients[rank]["weight"] = weight.grad[EACH * rank :][:EACH] / size
    return results, gradients


def properties(results: dict[str, list], size: int, seed: int) -> Iterator[Property]:
    names = "output", "gradients"
    whens = {"": "", " again": HOOKED, " empty": ""}
    for turn, (when, mistake) in enumerate(whens.items()):
        for name, wanted in zip(names, expected(seed, size, turn)):
            found = [of_rank[turn] for of_rank in results[name]]
            yield compare.tensors(f"{name}{when}", found, wanted, otherwise=mistake)
    wanted = [bytes_needed(seed, size, rank) for rank in range(size)]
    over = [sent - right for sent, right in zip(results["sent"], wanted)]
    if min(over) < 0:
        text = f"{-min(over):,} bytes fewer on a rank than rows and counts have to travel"
        yield Property("bytes", text, False, FEWER)
        return
    text = "{:,} bytes more on a rank than rows and counts have to travel"
    mistakes = {GATHERED: any("all-gather" in kinds for kinds in results["kinds"])}
    yield compare.at_most("bytes", over, 0, text, mistakes)


def bytes_needed(seed: int, size: int, rank: int) -> int:
    """Return the bytes of counts and rows of all turns, in forward and backward, on a rank."""
    nbytes = 0
    for turn in range(TURNS):
        counts = torch.stack([rows_of(seed, size, r, turn)[2] for r in range(size)])
        between = counts.view(size, size, EACH).sum(2)  # rows from a rank to another
        between.fill_diagonal_(0)
        rows = int(between[rank].sum() + between[:, rank].sum())
        nbytes += EACH * size * 8 + 2 * rows * WIDTH * 8
    return nbytes
