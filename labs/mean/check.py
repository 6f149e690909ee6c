"""The check of labs/mean."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

import train
from labs.machinery.lab import (
    Property,
    batch_of,
    compare_numbers,
    compare_tensors,
    nbytes_of,
    norm_of,
    share_of,
    small_model,
    summed_gradients,
    world_of,
)
from labs.machinery.student import check_returned
from labs.machinery.training import Run, replace_ddp
from model import IGNORE
from parallel import World
from perf.instruments import Counted
from text.batch import Batch

FUNCTION = "average"
ABOUT = "the gradient of the mean over all ranks' targets, clipped"
NEEDS = "`all_reduce`"
POINT = "a mean of means is none; three libraries had it"
LEADS_TO = "train.py", "update"
SIZES = 2, 3, 4
BARRED = "train.update", "train.train_step"
HINTS = (
    "Look at the docstring of `update` in train.py: what is accumulated, and when is it divided?",
    "Count the targets of each rank on paper. Whose number belongs under the sum of all gradients?",
    "One all-reduce for loss and number of targets; one for each gradient; divide; then the norm.",
)
CLIPS = 1e9, 0.01  # above the norms here, and below
NONE = "A rank may have no targets, and 0 / 0 is NaN: divide by the number of targets of all ranks."
ADDED = (
    "Norms are added up: the norm of all gradients together is the root of the sum of their "
    "squared norms."
)
CASES = (CLIPS[0], False), (CLIPS[0], True), (CLIPS[1], False)  # True: rank 0 has no targets


def on_rank(load: Callable, size: int, seed: int, rank: int) -> dict:
    """Return what the function gave and sent, without and with clipping."""
    world, gradients, reported = world_of(rank, size), [], []
    average = load()
    for clip, is_empty in CASES:
        model, batch = small_model(seed), share(seed, rank, size, is_empty)
        targets = int((batch.targets != IGNORE).sum())
        loss = model(*batch.inputs)
        loss.backward()
        with Counted(world) as counted:
            result = average(list(model.parameters()), loss, targets, clip)
        number = Tensor | float
        check_returned(result, (number, number), "the mean loss and the norm, two numbers")
        gradients.append({name: p.grad for name, p in model.named_parameters()})
        reported.append([v.item() if isinstance(v, torch.Tensor) else v for v in result])
    return {"reported": reported, "gradients": gradients, "sent": counted.sent}


def share(seed: int, rank: int, size: int, is_empty: bool) -> Batch:
    """Return a rank's rows. If it `is_empty`, rank 0 has no targets, as in answers that are
    masked."""
    batch = share_of(batch_of(seed), rank, size)
    if is_empty and rank == 0:
        batch.targets.fill_(IGNORE)
    return batch


def properties(results: list[dict], size: int, seed: int) -> Iterator[Property]:
    model, batch = small_model(seed), batch_of(seed)
    total, count, sums = summed_gradients(model, batch)
    of_ranks = [summed_gradients(model, share_of(batch, rank, size)) for rank in range(size)]
    counts = [n for _, n, _ in of_ranks]
    mean_of_means = (
        f"This is the mean of the ranks' means. The ranks here have {counts} targets: one with few "
        f"counts as much as one with many."
    )
    yield compare_numbers(
        "loss",
        [r["reported"][0][0] for r in results],
        total / count,
        {
            "The loss is the mean over this rank's own targets: ranks report different losses.": [
                loss / n for loss, n, _ in of_ranks
            ],
            mean_of_means: sum(loss / n for loss, n, _ in of_ranks) / size,
        },
    )
    means = {name: sum(g[name] / n for _, n, g in of_ranks) / size for name in sums}
    mean = scaled(sums, 1 / count)
    plain, empty, clipped = ([r["gradients"][i] for r in results] for i in range(3))
    yield compare_tensors(
        "gradients",
        plain,
        mean,
        {
            "No gradient was exchanged.": [scaled(g, 1 / count) for *_, g in of_ranks],
            "No gradient was exchanged: each rank has the mean over its own targets.": [
                scaled(g, 1 / n) for _, n, g in of_ranks
            ],
            "No gradient was exchanged, nor divided.": [g for *_, g in of_ranks],
            "This is the sum over all targets: the mean is wanted.": sums,
            mean_of_means: means,
            "Here each rank divides the sum by its own number of targets, and ranks have different "
            "ones.": [scaled(sums, 1 / n) for n in counts],
            "The sum is divided by the number of ranks: right for means of equal batches, and "
            "these are sums.": scaled(sums, 1 / size),
            "Gradients are scaled to the norm `clip` although theirs is smaller.": scaled(
                mean, CLIPS[0] / norm_of(mean)
            ),
        },
    )
    norm, clip = norm_of(mean), CLIPS[1]
    added = float(sum(g.norm() for g in mean.values()))
    right = scaled(mean, clip / norm)
    as_torch = scaled(mean, clip / (norm + 1e-6))  # what clip_grad_norm_ computes is right, too
    near = all(abs(norm_of(g) / norm_of(as_torch) - 1) < 1e-9 for g in clipped)
    yield compare_tensors(
        "clipped",
        clipped,
        as_torch if near else right,
        {
            "Here each rank clips by the norm of its own gradients: the norm of a sum is not known "
            "before the sum.": [
                scaled(mean, min(1.0, clip / (norm_of(g) / count))) for *_, g in of_ranks
            ],
            "The gradient is not clipped.": mean,
            "Each gradient is clipped by its own norm, which changes the direction of the step: "
            "one norm is that of all together.": {
                name: g * min(1.0, clip / float(g.norm())) for name, g in mean.items()
            },
            ADDED: scaled(mean, clip / added),
        },
    )
    yield compare_numbers(
        "norm",
        [r["reported"][2][1] for r in results],
        norm,
        {
            ADDED: added,
            "This is the norm after clipping: the one before is wanted.": clip,
            "This is the norm of the sum over all targets, and not of the mean.": norm * count,
        },
    )
    with_none = [summed_gradients(model, share(seed, rank, size, True)) for rank in range(size)]
    count = sum(n for _, n, _ in with_none)
    expected = {name: sum(g[name] for *_, g in with_none) / count for name in sums}
    expected["loss"] = torch.tensor(sum(loss for loss, *_ in with_none) / count)
    for r, of_rank in zip(results, empty):
        of_rank["loss"] = torch.tensor(r["reported"][1][0])
    is_nan = any(bool(g.isnan().any()) for of_rank in empty for g in of_rank.values())
    name = "the mean where rank 0 has no targets"
    yield compare_tensors("one empty", empty, expected, {}, name, NONE * is_nan)
    expected = sum(p.nbytes for p in model.parameters())
    most = max(nbytes_of(r["sent"]) for r in results)
    yield Property(
        "bytes a step",
        f"{most:,}; gradients have {expected:,}",
        expected <= most <= expected + 64,
        "Here every rank receives the gradients of all others, to add them up itself. An "
        "all-reduce puts out one sum." * (most >= size * expected),
    )


def scaled(gradients: dict[str, Tensor], factor: float) -> dict[str, Tensor]:
    return {name: g * factor for name, g in gradients.items()}


RUN = Run()


def install(average: Callable) -> None:
    replace_ddp(lambda model, world: model)

    def update(optimizer, loss, batch: Batch, clip: float, world: World, step, stop=()):
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        targets = int((batch.targets != IGNORE).sum())
        mean_loss, norm = average(parameters, loss, targets, clip)
        optimizer.step()
        optimizer.zero_grad()
        sums = world.all_gather_scalars([targets, batch.text_bytes, bool(stop)]).sum(0).tolist()
        tokens, text_bytes, stops = map(round, sums)
        return train.Totals(float(mean_loss) * tokens, tokens, text_bytes, float(norm), stops > 0)

    train.update = update
