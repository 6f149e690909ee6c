"""The check of labs/mean.py."""

from collections.abc import Iterator
from pathlib import Path

import torch
from lab import (
    Mistake,
    Property,
    batch_of,
    compare_gradients,
    compare_numbers,
    load_function,
    norm_of,
    share_of,
    small_model,
    summed_gradients,
    world_of,
)

from model import IGNORE
from perf.measure import Counted

FUNCTION = "average"
LEADS_TO = "train.py", "update"
SIZES = 2, 3, 4
HINTS = (
    "Look at the docstring of `update` in train.py: what is accumulated, and when is it divided?",
    "Count the targets of each rank on paper. Whose number belongs under the sum of all gradients?",
    "One all-reduce for loss and number of targets; one for each gradient; divide; then the norm.",
)
CLIP = 0.01  # below the norm of any gradient here


def on_rank(path: Path, size: int, seed: int, rank: int) -> dict:
    """Run the student's function on a rank. Return what it gave and sent."""
    world, model = world_of(rank, size), small_model(seed)
    average = load_function(path, FUNCTION)
    batch = share_of(batch_of(seed), rank, size)
    loss = model(*batch.inputs)
    loss.backward()
    targets = int((batch.targets != IGNORE).sum())
    with Counted(world) as counted:
        mean, norm = average(list(model.parameters()), loss, targets, CLIP)
    gradients = {name: p.grad for name, p in model.named_parameters()}
    mean, norm = (torch.as_tensor(value).item() for value in (mean, norm))
    return {"loss": mean, "norm": norm, "gradients": gradients, "sent": counted.sent}


def properties(results: list[dict], size: int, seed: int) -> Iterator[Property]:
    """Yield what is checked, in order, with what known mistakes would give."""
    model, batch = small_model(seed), batch_of(seed)
    total, count, sums = summed_gradients(model, batch)
    of_ranks = [summed_gradients(model, share_of(batch, rank, size)) for rank in range(size)]
    means = {name: sum(g[name] / n for _, n, g in of_ranks) / size for name in sums}
    counts = [n for _, n, _ in of_ranks]
    yield compare_numbers(
        "loss",
        [r["loss"] for r in results],
        [total / count] * size,
        [
            Mistake(
                [loss / n for loss, n, _ in of_ranks],
                "The loss is the mean over this rank's own targets: ranks report different losses.",
            ),
        ],
    )
    yield compare_gradients(
        [r["gradients"] for r in results],
        [clipped(sums, norm_of(sums), count)] * size,
        [
            Mistake([clipped(g, norm_of(g)) for _, _, g in of_ranks], "No gradient was exchanged."),
            Mistake(
                [clipped(means, norm_of(means))] * size,
                f"This is the mean of the ranks' means. The ranks here have {counts} targets: one "
                f"with few counts as much as one with many.",
            ),
            Mistake(
                [clipped(sums, norm_of(g), count) for _, _, g in of_ranks],
                "Here each rank clips by the norm of its own gradients: the norm of a sum is not "
                "known before the sum.",
            ),
            Mistake(
                [{name: g / count for name, g in sums.items()}] * size,
                "The gradient is not clipped.",
            ),
        ],
    )
    yield compare_numbers(
        "norm",
        [r["norm"] for r in results],
        [norm_of(sums) / count] * size,
        [
            Mistake(
                [norm_of(sums) / n for n in counts],
                "Here each rank divides the sum by its own number of targets, and ranks have "
                "different ones.",
            ),
            Mistake(
                [norm_of(sums) / size] * size,
                "The sum is divided by the number of ranks: right for means of equal batches, and "
                "these are sums.",
            ),
        ],
    )
    expected = sum(p.nbytes for p in model.parameters())
    calls, sent = map(max, zip(*(totals(r["sent"]) for r in results)))
    ok = expected <= sent <= expected + 64
    yield Property(
        "bytes a step",
        f"{sent:,} by {calls} collectives; gradients have {expected:,}",
        ok,
        "Here every rank receives the gradients of all others, to add them up itself. An "
        "all-reduce puts out one sum." * (sent >= size * expected),
    )


def clipped(gradients: dict, norm: float, divisor: float = 1.0) -> dict:
    """Return gradients divided by `divisor`, then scaled from so divided a norm down to CLIP."""
    scale = min(1.0, CLIP / (norm / divisor)) / divisor
    return {name: g * scale for name, g in gradients.items()}


def totals(sent: dict) -> tuple[int, int]:
    """Return the calls and the bytes of all collectives of a rank."""
    return sum(calls for calls, _ in sent.values()), sum(nbytes for _, nbytes in sent.values())
