"""The check of labs/fsdp.py."""

from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from lab import Mistake, Property, barred, compare_gradients, load_function
from torch import Tensor

from perf.measure import Counted, Live

FUNCTION = "sharded_linear"
LEADS_TO = "parallel.py", "fsdp"
SIZES = 2, 3, 4
BARRED = (
    "torch.distributed.fsdp.fully_shard",
    "torch.distributed.fsdp.FullyShardedDataParallel",
    "torch.distributed.tensor.distribute_tensor",
    "parallel.parallelize",
    "parallel.fsdp",
)
HINTS = (
    "Look at the two pictures in the docstring of `fsdp`: what does a rank hold, and what does it "
    "gather when?",
    "Count the all-gathers of a matrix in forward and backward. Which tensors live in between? And "
    "how many rows has the last rank?",
    "A Function whose forward saves x and rows, pads the rows, gathers and multiplies. Backward "
    "gathers again, takes two products, and reduce-scatters the padded gradient.",
)
# A stack of matrices, which weigh more than the few tokens that pass through. Neither 3 nor 4 ranks
# divide their rows.
WIDTHS = [50, 97] * 6 + [50]
TOKENS = 5  # of a rank


def matrices(seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = zip(WIDTHS[1:], WIDTHS)
    return [torch.randn(o, i, generator=generator, dtype=torch.float64) / i**0.5 for o, i in shapes]


def input_of(seed: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    x = torch.randn(TOKENS, WIDTHS[0], generator=generator, dtype=torch.float64)
    return x.requires_grad_()


def on_rank(path: Path, size: int, seed: int, rank: int) -> dict:
    """Run forward and backward of the stack, sharded. Return gradients, what was sent and held."""
    slices = [weight.chunk(size)[rank].clone().requires_grad_() for weight in matrices(seed)]
    x = input_of(seed, rank)
    with barred(*BARRED):
        sharded_linear = load_function(path, FUNCTION)
        with Live([x, *slices]) as live, Counted(None) as counted:
            held = live.now
            out = x
            for rows, width in zip(slices, WIDTHS[1:]):
                out = torch.tanh(sharded_linear(out, rows, width))
            kept = live.now - held
            (out**2).sum().backward()
    gradients = [t.grad for t in (x, *slices)]
    return {"out": out.detach(), "gradients": gradients, "sent": counted.sent, "kept": kept}


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


def properties(results: list[dict], size: int, seed: int) -> Iterator[Property]:
    """Yield what is checked, in order, with what known mistakes would give."""
    outputs, of_ranks = reference(seed, size)
    names = [f"matrix {i}" for i in range(len(WIDTHS) - 1)]
    named = [{"out": out} for out in outputs]
    yield compare_gradients([{"out": r["out"]} for r in results], named, [], name="output")
    missing = {name for r in results for name, g in zip(["x", *names], r["gradients"]) if g is None}
    if missing:
        text, sentence = f"{min(missing)} has none", ""
        if "x" in missing:
            sentence = "The layers before this one learn from the gradient of x."
        if names[-1] in missing:
            sentence = (
                "Collectives of torch.distributed are not recorded by autograd: rows gets its "
                "gradient from the backward that you write."
            )
        yield Property("gradients", text, False, sentence)
        return

    def sliced(of_matrices: list[Tensor], rank: int) -> dict[str, Tensor]:
        return {name: g.chunk(size)[rank] for name, g in zip(names, of_matrices)}

    sums = [sum(of_matrix) for of_matrix in zip(*(g[1:] for g in of_ranks))]
    xs = [{"x": g[0]} for g in of_ranks]
    yield compare_gradients(
        [{"x": r["gradients"][0]} | dict(zip(names, r["gradients"][1:])) for r in results],
        [xs[rank] | sliced(sums, rank) for rank in range(size)],
        [
            Mistake(
                [xs[rank] | sliced(of_ranks[rank][1:], rank) for rank in range(size)],
                "No gradient was exchanged: a rank's rows need what all ranks' sequences say.",
            ),
            Mistake(
                [xs[rank] | sliced([s / size for s in sums], rank) for rank in range(size)],
                "This is the average over the ranks: the sum is wanted.",
            ),
        ],
    )
    padded = sum(-(-out // size) * size * width * 8 for out, width in zip(WIDTHS[1:], WIDTHS))
    sent = {}
    for (_, collective), (calls, nbytes) in results[0]["sent"].items():
        sent[collective] = calls, nbytes
    gathers, scatters = (sent.get(name, (0, 0)) for name in ("all-gather", "reduce-scatter"))
    kept, x_bytes = results[0]["kept"], sum(2 * TOKENS * width * 8 for width in WIDTHS[1:])
    yield Property(
        "live memory",
        f"{kept:,} bytes between forward and backward; activations {x_bytes:,}",
        kept <= x_bytes + 8 * 97 * 50,
        "The whole matrix is kept from forward to backward, in every layer: that is what "
        "--reshard none does. Drop it, and gather it again.",
    )
    yield Property(
        "all-gathers",
        f"{gathers[0]} with {gathers[1]:,} bytes; twice the padded matrices are {2 * padded:,}",
        gathers == (2 * len(names), 2 * padded),
    )
    others = ", ".join(sorted(set(sent) - {"all-gather", "reduce-scatter"}))
    yield Property(
        "reduce-scatters",
        f"{scatters[0]} with {scatters[1]:,} bytes" + f", and {others}" * bool(others),
        scatters == (len(names), padded) and not others,
        "An all-reduce gives every rank all of the sum, at twice the price of the slice that it "
        "needs: reduce-scatter." * ("all-reduce" in others),
    )
