"""The check of labs/fsdp."""

import time
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from labs.machinery import compare, student
from labs.machinery.compare import Property
from labs.machinery.lab import drawn
from labs.machinery.student import check_returned
from perf.instruments import Counted, Live

FUNCTION = "sharded_linear"
ABOUT = "a sharded matrix, forward and backward"
NEEDS = "`autograd.Function`, padding"
POINT = "memory is paid for in bytes"
LEADS_TO = "parallel.py", "fsdp"
SIZES = 2, 3, 4
BARRED = *student.SHARDING, "parallel.fsdp"
HINTS = (
    "Look at the two pictures in the docstring of `fsdp`: what does a rank hold, and what does it "
    "gather when?",
    "Count the all-gathers of a matrix in forward and backward. Which tensors live in between? And "
    "how many rows has the last rank?",
    "A Function whose forward saves x and rows, pads the rows, gathers and multiplies. Backward "
    "gathers again, takes two products, and reduce-scatters the padded gradient.",
)
# A stack of matrices, which weigh more than the few tokens that pass through. Neither 3 nor 4 ranks
# divide their rows; the last one has a single row, so that all ranks but the first have none.
WIDTHS = [50, 97] * 6 + [50, 1]
NAMES = "x", *(f"matrix {i}" for i in range(len(WIDTHS) - 1))
TOKENS = 5  # of a rank
# Bytes that may be kept from forward to backward: the outputs of tanh, which are the next inputs,
# and one more.
LIMIT = sum(TOKENS * width * 8 for width in [*WIDTHS[1:], 97])
WHOLE = sum(out * width * 8 for out, width in zip(WIDTHS[1:], WIDTHS))
UNEVEN = "The last ranks have fewer rows, and collectives take as much of each rank: pad them."
AGAIN = (
    "The first run is right, and the second with the same rows is not: a hook on rows stays there, "
    "and each call adds one."
)
IDLE = " idle"
NO_TOKENS = "A rank without tokens still lends its rows, and needs their gradient."
ERRORS = {
    "invalid tensor size": UNEVEN,
    "outputShape": UNEVEN,
    "shapes cannot be multiplied": "The output has `out` columns: cut off those of padded rows.",
    "returned an invalid gradient": "A gradient has the shape of what it is the gradient of: of "
    "what was padded, give back what was there before.",
}


def matrices(seed: int) -> list[Tensor]:
    return [matrix / matrix.shape[1] ** 0.5 for matrix in drawn(seed, *zip(WIDTHS[1:], WIDTHS))]


def rows_of(matrix: Tensor, rank: int, size: int) -> Tensor:
    """Return a rank's chunk of the rows, none where there are too few."""
    most = -(-len(matrix) // size)
    return matrix[rank * most : (rank + 1) * most]


def input_of(seed: int, rank: int, run: str = "") -> Tensor:
    (x,) = drawn(1000 * seed + rank, (TOKENS, WIDTHS[0]))
    return x[:0] if run == IDLE and rank == 0 else x


def on_rank(load: Callable, size: int, seed: int, rank: int) -> dict:
    """Run forward and backward of the stack, sharded, and again. Return outputs and gradients of
    all runs, and of the first what was sent and held."""
    slices = [rows_of(weight, rank, size).clone().requires_grad_() for weight in matrices(seed)]
    x = input_of(seed, rank).requires_grad_()
    sharded_linear = load()
    with Live([x, *slices]) as live, Counted(None) as counted:
        held = live.now
        out = x
        for rows, width in zip(slices, WIDTHS[1:]):
            out = check_returned(sharded_linear(out, rows, width), Tensor, "x @ weight.T, a tensor")
            out = torch.tanh(out)
        for _ in range(100):  # a collective may free its buffers a little later
            if (kept := live.now - held) > LIMIT:
                time.sleep(0.01)
        (out**2).sum().backward()
    found = {"out": [out.detach()], "gradients": [gradients_of(x, slices)], "kept": kept}
    found["sent"] = compare.by_kind(counted.sent)
    for run in runs()[1:]:
        for rows in slices:
            rows.grad = None
        out = x = input_of(seed, rank, run).requires_grad_()
        for rows, width in zip(slices, WIDTHS[1:]):
            out = torch.tanh(sharded_linear(out, rows, width))
        (out**2).sum().backward()
        found["out"].append(out.detach())
        found["gradients"].append(gradients_of(x, slices))
    return found


def runs() -> list[str]:
    """Return what the report calls the runs with the same rows. What is right is checked with a
    rank that has no tokens, too: ranks that also send x would wait for ever there."""
    return ["", " again"] + [IDLE] * student.AGAIN


def gradients_of(x: Tensor, slices: list[Tensor]) -> dict[str, Tensor | None]:
    return dict(zip(NAMES, (tensor.grad for tensor in (x, *slices))))


def reference(seed: int, size: int, run: str) -> tuple[list[Tensor], list[dict[str, Tensor]]]:
    """Return the outputs and gradients of each rank, from one process that has all tokens."""
    weights = [weight.requires_grad_() for weight in matrices(seed)]
    of_ranks = [input_of(seed, rank, run) for rank in range(size)]
    counts = list(map(len, of_ranks))
    out = x = torch.cat(of_ranks).requires_grad_()
    for weight in weights:
        out = torch.tanh(out @ weight.T)
    (out**2).sum().backward()
    of_ranks = [(of_x, *(rows_of(w.grad, rank, size) for w in weights))
                for rank, of_x in enumerate(x.grad.split(counts))]  # fmt: skip
    return list(out.detach().split(counts)), [dict(zip(NAMES, own)) for own in of_ranks]


def properties(results: dict[str, list], size: int, seed: int) -> Iterator[Property]:
    mistakes = {" again": AGAIN, IDLE: NO_TOKENS}
    for i, run in enumerate(runs()):
        outputs, gradients = reference(seed, size, run)
        for name, wanted in (("out", outputs), ("gradients", gradients)):
            found = [of_rank[i] for of_rank in results[name]]
            line = f"{'output' if name == 'out' else name}{run}"
            yield compare.tensors(line, found, wanted, otherwise=mistakes.get(run, ""))
    kept = results["kept"]
    mistakes = {
        "The whole matrix is kept from forward to backward, in every layer: that is what "
        "--reshard none does. Drop it, and gather it again.": max(kept) > WHOLE / 2,
        "Backward needs x and rows, which are there: what else you save is kept for nothing.": True,
    }
    text = "{:,} bytes between forward and backward, and may be {:,}"
    yield compare.at_most("live memory", kept, LIMIT, text, mistakes)
    padded = sum(-(-out // size) * size * width * 8 for out, width in zip(WIDTHS[1:], WIDTHS))
    n = len(WIDTHS) - 1
    wanted = {"all-gather": (2 * n, 2 * padded), "reduce-scatter": (n, padded)}
    sent = compare.unexpected(results["sent"], wanted)
    others = ", ".join(sorted(sent.keys() - wanted.keys()))
    mistakes = {
        compare.ALL_REDUCED: others == "all-reduce",
        f"Instead there is {others}.": others,
        "Forward needs the matrix once, and backward once: more gathers give the same.": True,
    }
    for name, (calls, nbytes) in wanted.items():
        found = sent.get(name, (0, 0))
        text = f"{found[0]} with {found[1]:,} bytes; {calls} with {nbytes:,} are wanted"
        yield Property(name, text, found == (calls, nbytes), mistakes)
    yield Property("nothing else", others or "is sent", not others)
