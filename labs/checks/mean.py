"""The check of labs/mean.py."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path

from lab import (
    Mistake,
    Property,
    batch_of,
    compare_gradients,
    compare_numbers,
    load_function,
    norm_of,
    payload,
    share_of,
    small_model,
    summed_gradients,
    world_of,
)

from perf.measure import Counted

FUNCTION = "average"
LEADS_TO = "train.py", "update"
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
    targets = int((batch.targets != -100).sum())
    with Counted(world) as counted:
        mean, norm = average(list(model.parameters()), loss, targets, CLIP)
    gradients = {name: p.grad for name, p in model.named_parameters()}
    return {"loss": float(mean), "norm": float(norm), "gradients": gradients, "sent": counted.sent}


def clipped(gradients: dict, divisor: float, norm: float | None = None) -> dict:
    divided = {name: g / divisor for name, g in gradients.items()}
    scale = min(1.0, CLIP / (norm_of(divided) if norm is None else norm))
    return {name: g * scale for name, g in divided.items()}


def properties(results: list[dict], size: int, seed: int) -> Iterator[Property]:
    """Yield what is checked, in order, with what known mistakes would give."""
    model, batch = small_model(seed), batch_of(seed)
    total, count, sums = summed_gradients(model, batch)
    of_ranks = [summed_gradients(model, share_of(batch, rank, size)) for rank in range(size)]
    norm = norm_of(sums) / count
    means = {name: sum(g[name] / n for _, n, g in of_ranks) / size for name in sums}
    own_norms = [norm_of(g) / count for _, _, g in of_ranks]
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
    yield compare_numbers(
        "norm",
        [r["norm"] for r in results],
        [norm] * size,
        [
            Mistake(
                [norm_of(means)] * size,
                f"This is the mean of the ranks' means. The ranks here have {counts} targets: one "
                f"with few counts as much as one with many.",
            ),
            Mistake(
                [norm_of(sums) / n for n in counts],
                "Here each rank divides the sum by its own number of targets, and ranks go "
                "different ways.",
            ),
            Mistake(
                [norm_of(sums) / size] * size,
                "The sum is divided by the number of ranks: right for means of equal batches, and "
                "these are sums.",
            ),
            Mistake(
                own_norms,
                "Here each rank clips by the norm of its own gradients: the norm of a sum is not "
                "known before the sum.",
            ),
        ],
    )
    yield compare_gradients(
        [r["gradients"] for r in results],
        clipped(sums, count),
        [
            Mistake([clipped(g, count) for _, _, g in of_ranks], "No gradient was exchanged."),
            Mistake([clipped(sums, count, norm=CLIP)] * size, "The gradient is not clipped."),
        ],
    )
    expected = sum(p.nbytes for p in model.parameters())
    calls, sent = payload(results[0]["sent"])
    text = f"{sent:,} by {calls} collectives"
    ok = expected <= sent <= expected + 64
    mistake = ""
    if sent >= size * expected:
        mistake = (
            "Here every rank receives the gradients of all others, to add them up itself. An "
            "all-reduce puts out one sum."
        )
    yield Property(
        "bytes a step", text if ok else f"{text}; gradients have {expected:,}", ok, mistake
    )


def check(path: Path, size: int, seed: int):
    """Return the function that ranks run."""
    return partial(on_rank, path, size, seed)
