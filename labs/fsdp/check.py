"""The check of labs/fsdp."""

import time
from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from labs.machinery import compare
from labs.machinery.compare import Property
from labs.machinery.lab import drawn
from labs.machinery.student import SHARDING, check_returned
from labs.machinery.training import Run, after_backward, replace_ddp
from model import Llama
from parallel import World
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
# divide their rows; of the last one's, the last of 4 ranks has none.
WIDTHS = [50, 97] * 6 + [50, 5]
TOKENS = 5  # of a rank
# Bytes that may be kept from forward to backward: the outputs of tanh, which are the next inputs,
# and one more.
LIMIT = sum(TOKENS * width * 8 for width in [*WIDTHS[1:], 97])
WHOLE = sum(out * width * 8 for out, width in zip(WIDTHS[1:], WIDTHS))
UNEVEN = "The last ranks have fewer rows, and collectives take as much of each rank: pad them."
ERRORS = {
    "invalid tensor size": UNEVEN,
    "outputShape": UNEVEN,
    "returned an invalid gradient": "A gradient has the shape of what it is the gradient of: of "
    "what was padded, give back what was there before.",
}
OF_X = (
    "The last matrix has its right gradient, which does not depend on what backward gives x, and "
    "those before have not. x is a rank's own: its gradient is grad @ weight, not a sum."
)


def matrices(seed: int) -> list[Tensor]:
    return [matrix / matrix.shape[1] ** 0.5 for matrix in drawn(seed, *zip(WIDTHS[1:], WIDTHS))]


def rows_of(matrix: Tensor, rank: int, size: int) -> Tensor:
    """Return a rank's chunk of the rows, none where there are too few."""
    most = -(-len(matrix) // size)
    return matrix[rank * most : (rank + 1) * most]


def input_of(seed: int, rank: int) -> Tensor:
    return drawn(1000 * seed + rank, (TOKENS, WIDTHS[0]))[0].requires_grad_()


def on_rank(load: Callable, size: int, seed: int, rank: int) -> dict:
    """Run forward and backward of the stack, sharded. Return gradients, what was sent and held."""
    slices = [rows_of(weight, rank, size).clone().requires_grad_() for weight in matrices(seed)]
    x = input_of(seed, rank)
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
    gradients = [t.grad for t in (x, *slices)]
    sent = compare.by_kind(counted.sent)
    return {"out": out.detach(), "gradients": gradients, "sent": sent, "kept": kept}


def reference(seed: int, size: int) -> tuple[list[Tensor], list[list[Tensor]]]:
    """Return each rank's output, and the gradients of its x and of all matrices, without ranks."""
    outputs, gradients = [], []
    for rank in range(size):
        weights = [weight.requires_grad_() for weight in matrices(seed)]
        out = x = input_of(seed, rank)
        for weight in weights:
            out = torch.tanh(out @ weight.T)
        (out**2).sum().backward()
        outputs.append(out.detach())
        gradients.append([t.grad for t in (x, *weights)])
    return outputs, gradients


def properties(results: dict[str, list], size: int, seed: int) -> Iterator[Property]:
    outputs, of_ranks = reference(seed, size)
    names = ["x", *(f"matrix {i}" for i in range(len(WIDTHS) - 1))]
    yield compare.tensors("output", results["out"], outputs)
    found = [dict(zip(names, gradients)) for gradients in results["gradients"]]
    if missing := sorted({name for own in found for name in names if own[name] is None}):
        mistake = "The layers before this one learn from the gradient of x."
        if names[-1] in missing:
            mistake = compare.NOT_RECORDED + "the gradient of rows is for your backward."
        yield Property("gradients", f"{missing[0]} has none", False, mistake)
        return
    sums = [sum(of_matrix) for of_matrix in zip(*(g[1:] for g in of_ranks))]

    def gradients(of_matrices: list[Tensor], rank: int) -> dict[str, Tensor]:
        rows = (rows_of(g, rank, size) for g in of_matrices)
        return dict(zip(names, (of_ranks[rank][0], *rows)))

    last = [{names[-1]: rows_of(sums[-1], rank, size)} for rank in range(size)]
    yield compare.tensors(
        "gradients",
        found,
        [gradients(sums, rank) for rank in range(size)],
        {
            "No gradient was exchanged: a rank's rows need what all ranks' sequences say.": [
                gradients(of_ranks[rank][1:], rank) for rank in range(size)
            ],
            compare.AVERAGED: [gradients([s / size for s in sums], rank) for rank in range(size)],
            OF_X: last,
        },
    )
    kept = results["kept"]
    mistakes = {
        "The whole matrix is kept from forward to backward, in every layer: that is what "
        "--reshard none does. Drop it, and gather it again.": max(kept) > WHOLE / 2,
        "Backward needs x and rows, which are there: what else you save is kept for nothing.": True,
    }
    text = "{:,} bytes between forward and backward, and may be {:,}"
    yield compare.at_most("live memory", kept, LIMIT, text, mistakes)
    padded = sum(-(-out // size) * size * width * 8 for out, width in zip(WIDTHS[1:], WIDTHS))
    n = len(names) - 1
    wanted = {"all-gather": (2 * n, 2 * padded), "reduce-scatter": (n, padded)}
    sent = compare.unexpected(results["sent"], wanted)
    others = ", ".join(sorted(sent.keys() - wanted.keys()))
    gathers, needed = (of.get("all-gather", (0, 0))[0] for of in (sent, wanted))
    mistakes = {
        compare.ALL_REDUCED: others == "all-reduce",
        f"Instead there is {others}.": others,
        "Forward needs the matrix once, and backward once: more gathers give the same.": (
            gathers > needed
        ),
        "Backward does not gather: so the whole matrix is kept somewhere from forward on.": (
            gathers < needed
        ),
    }
    for name, (calls, nbytes) in wanted.items():
        found = sent.get(name, (0, 0))
        text = f"{found[0]} with {found[1]:,} bytes; {calls} with {nbytes:,} are wanted"
        yield Property(name, text, found == (calls, nbytes), mistakes)
    yield Property("nothing else", others or "is sent", not others)


# The lab says nothing about the norm of sharded gradients, so nothing is clipped.
RUN = Run(flags="--microbatch 6 --clip 0")


def install(sharded_linear: Callable) -> None:
    """Shard the matrices of the blocks; average the gradients of the other parameters as DDP."""

    def forward(layer: nn.Linear, x: Tensor) -> Tensor:
        y = sharded_linear(x.flatten(0, 1), layer.weight, layer.out_features)
        return y.unflatten(0, x.shape[:2])

    def apply(model: Llama, world: World) -> Llama:
        sharded = [module for block in model.layers.values() for module in block.modules()
                   if isinstance(module, nn.Linear)]  # fmt: skip
        for layer in sharded:
            rows = layer.weight.detach().chunk(world.size)[world.rank].clone()
            layer.weight, layer.forward = nn.Parameter(rows), partial(forward, layer)
        summed = {layer.weight for layer in sharded}

        def finish() -> None:
            for parameter in model.parameters():
                if parameter not in summed:
                    dist.all_reduce(parameter.grad)
                parameter.grad /= world.size

        after_backward(finish)
        return model

    replace_ddp(apply)
