"""The check of labs/fsdp."""

import time
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from labs.machinery import compare
from labs.machinery.compare import Property
from labs.machinery.lab import drawn
from labs.machinery.student import SHARDING, check_returned
from perf.instruments import Counted, Live

FUNCTION = "sharded_linear"
ABOUT = "a sharded matrix, forward and backward"
NEEDS = "`autograd.Function`, padding"
POINT = "memory is paid for in bytes"
LEADS_TO = "parallel.py", "fsdp"
SIZES = 2, 3, 4
BARRED = *SHARDING, "parallel.fsdp"
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
    "The first run is right, and the second with the same rows is not, in which rank 0 has no "
    "tokens: it still lends its rows, and needs their gradient. And hooks stay on rows."
)
ERRORS = {
    "invalid tensor size": UNEVEN,
    "outputShape": UNEVEN,
    "returned an invalid gradient": "A gradient has the shape of what it is the gradient of: of "
    "what was padded, give back what was there before.",
}


def matrices(seed: int) -> list[Tensor]:
    return [matrix / matrix.shape[1] ** 0.5 for matrix in drawn(seed, *zip(WIDTHS[1:], WIDTHS))]


def rows_of(matrix: Tensor, rank: int, size: int) -> Tensor:
    """Return a rank's chunk of the rows, none where there are too few."""
    most = -(-len(matrix) // size)
    return matrix[rank * most : (rank + 1) * most]


def input_of(seed: int, rank: int) -> Tensor:
    return drawn(1000 * seed + rank, (TOKENS, WIDTHS[0]))[0]


def on_rank(load: Callable, size: int, seed: int, rank: int) -> dict:
    """Run forward and backward of the stack, sharded, and again where rank 0 has no tokens. Return
    outputs and gradients, and of the first run what was sent and held."""
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
    for tensor in (x, *slices):
        tensor.grad = None
    out = x = x.detach()[tokens_of(rank, is_again=True)].requires_grad_()
    for rows, width in zip(slices, WIDTHS[1:]):
        out = torch.tanh(sharded_linear(out, rows, width))
    (out**2).sum().backward()
    found["out"].append(out.detach())
    found["gradients"].append(gradients_of(x, slices))
    return found


def tokens_of(rank: int, is_again: bool) -> slice:
    """Return which of its tokens a rank has: in the second run, rank 0 has none."""
    return slice(0 if is_again and rank == 0 else TOKENS)


def gradients_of(x: Tensor, slices: list[Tensor]) -> dict[str, Tensor | None]:
    return dict(zip(NAMES, (tensor.grad for tensor in (x, *slices))))


def reference(seed: int, size: int, is_again: bool) -> tuple[list[Tensor], list[dict[str, Tensor]]]:
    """Return the outputs and gradients of each rank, from one process that has all tokens."""
    weights = [weight.requires_grad_() for weight in matrices(seed)]
    of_ranks = [input_of(seed, rank)[tokens_of(rank, is_again)] for rank in range(size)]
    counts = list(map(len, of_ranks))
    out = x = torch.cat(of_ranks).requires_grad_()
    for weight in weights:
        out = torch.tanh(out @ weight.T)
    (out**2).sum().backward()
    of_ranks = [(of_x, *(rows_of(w.grad, rank, size) for w in weights))
                for rank, of_x in enumerate(x.grad.split(counts))]  # fmt: skip
    return list(out.detach().split(counts)), [dict(zip(NAMES, own)) for own in of_ranks]


def properties(results: dict[str, list], size: int, seed: int) -> Iterator[Property]:
    for run, (when, mistake) in enumerate({"": "", " again": AGAIN}.items()):
        outputs, gradients = reference(seed, size, is_again=run == 1)
        found = [of_rank[run] for of_rank in results["out"]]
        yield compare.tensors(f"output{when}", found, outputs, otherwise=mistake)
        found = [of_rank[run] for of_rank in results["gradients"]]
        yield compare.tensors(f"gradients{when}", found, gradients, otherwise=mistake)
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
