"""The check of labs/mean."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

import train
from labs.machinery import compare
from labs.machinery.compare import Property, times
from labs.machinery.lab import batch_of, norm_of, share_of, small_model, summed_gradients, world_of
from labs.machinery.student import check_returned
from labs.machinery.training import Run, replace_ddp
from model import IGNORE
from parallel import World
from perf.instruments import Counted
from runs.records import Totals
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
ONCE = "These are divided by the number of targets of the first call: count them in each."
CASES = (CLIPS[0], False), (CLIPS[0], True), (CLIPS[1], False)  # True: rank 0 has no targets


def on_rank(load: Callable, size: int, seed: int, rank: int) -> dict:
    """Return what the function gave and sent, without and with clipping."""
    world, average, found = world_of(rank, size), load(), {"loss": [], "norm": [], "gradients": []}
    for clip, is_empty in CASES:
        model, batch = small_model(seed), share(seed, rank, size, is_empty)
        targets = int((batch.targets != IGNORE).sum())
        loss = model(*batch.inputs)
        loss.backward()
        with Counted(world) as counted:
            result = average(list(model.parameters()), loss, targets, clip)
        what = "the mean loss and the norm, two numbers"
        for name, value in zip(found, check_returned(result, (Tensor | float,) * 2, what)):
            found[name].append(float(value))
        found["gradients"].append({name: p.grad for name, p in model.named_parameters()})
    return found | {"sent": counted.sent}


def share(seed: int, rank: int, size: int, is_empty: bool) -> Batch:
    """Return a rank's rows. If it `is_empty`, rank 0 has no targets, as in answers that are
    masked."""
    batch = share_of(batch_of(seed), rank, size)
    if is_empty and rank == 0:
        batch.targets.fill_(IGNORE)
    return batch


def properties(results: dict[str, list], size: int, seed: int) -> Iterator[Property]:
    model, batch = small_model(seed), batch_of(seed)
    total, count, sums = summed_gradients(model, batch)
    of_ranks = [summed_gradients(model, share_of(batch, rank, size)) for rank in range(size)]
    counts = [n for _, n, _ in of_ranks]
    mean_of_means = (
        f"This is the mean of the ranks' means. The ranks here have {counts} targets: one with few "
        f"counts as much as one with many."
    )
    losses, norms, gradients = (
        [list(case) for case in zip(*results[key])] for key in ("loss", "norm", "gradients")
    )
    mistakes = {
        "The loss is the mean over this rank's own targets: ranks report different losses.": [
            loss / n for loss, n, _ in of_ranks
        ],
        mean_of_means: sum(loss / n for loss, n, _ in of_ranks) / size,
    }
    yield compare.numbers("loss", losses[0], total / count, mistakes)
    mean = times(sums, 1 / count)
    mistakes = {
        "No gradient was exchanged.": [times(g, 1 / count) for *_, g in of_ranks],
        "No gradient was exchanged: each rank has the mean over its own targets.": [
            times(g, 1 / n) for _, n, g in of_ranks
        ],
        "No gradient was exchanged, nor divided.": [g for *_, g in of_ranks],
        "This is the sum over all targets: the mean is wanted.": sums,
        "Rank 0 alone divides the sum: all have to.": [mean, *[sums] * (size - 1)],
        mean_of_means: {name: sum(g[name] / n for _, n, g in of_ranks) / size for name in sums},
        "Here each rank divides the sum by its own number of targets, and ranks have different "
        "ones.": [times(sums, 1 / n) for n in counts],
        "The sum is divided by the number of ranks: right for means of equal batches, and these "
        "are sums.": times(sums, 1 / size),
        "Gradients are scaled to the norm `clip` although theirs is smaller.": times(
            mean, CLIPS[0] / norm_of(mean)
        ),
    }
    yield compare.tensors("gradients", gradients[0], mean, mistakes)

    norm, clip = norm_of(mean), CLIPS[1]
    others = {  # what may be taken for the norm of all
        "Norms are added up: the norm of all gradients together is the root of the sum of their "
        "squared norms.": sum(float(g.norm()) for g in mean.values()),
        "This is the largest norm of one gradient: that of all together is wanted.": max(
            float(g.norm()) for g in mean.values()
        ),
        "This is the largest element, in place of the root of the sum of all squares.": max(
            float(g.abs().max()) for g in mean.values()
        ),
    }
    mistakes = {
        "Here each rank clips by the norm of its own gradients: the norm of a sum is not known "
        "before the sum.": [
            times(mean, min(1.0, clip / (norm_of(g) / count))) for *_, g in of_ranks
        ],
        "The gradient is not clipped.": mean,
        "Each gradient is clipped by its own norm, which changes the direction of the step: one "
        "norm is that of all together.": {
            name: g * min(1.0, clip / float(g.norm())) for name, g in mean.items()
        },
        "Each element is cut off at `clip`, which changes the direction of the step: `clip` is for "
        "the norm.": {name: g.clamp(-clip, clip) for name, g in mean.items()},
    } | {text: times(mean, min(1.0, clip / other)) for text, other in others.items()}
    as_torch = times(mean, clip / (norm + 1e-6))  # what clip_grad_norm_ computes is right, too
    near = all(abs(norm_of(g) / norm_of(as_torch) - 1) < 1e-9 for g in gradients[2])
    right = as_torch if near else times(mean, clip / norm)
    yield compare.tensors("clipped", gradients[2], right, mistakes)
    mistakes = others | {
        "This is the norm after clipping: the one before is wanted.": clip,
        "This is the norm of the sum over all targets, and not of the mean.": norm * count,
    }
    yield compare.numbers("norm", norms[2], norm, mistakes)

    with_none = [summed_gradients(model, share(seed, rank, size, True)) for rank in range(size)]
    sums = {name: sum(g[name] for *_, g in with_none) for name in sums}
    sums["loss"] = sum(torch.tensor(loss, dtype=torch.float64) for loss, *_ in with_none)
    found = [of_rank | {"loss": torch.tensor(loss, dtype=torch.float64)}
             for of_rank, loss in zip(gradients[1], losses[1])]  # fmt: skip
    is_nan = any(bool(g.isnan().any()) for of_rank in found for g in of_rank.values())
    yield compare.tensors(
        "one empty",
        found,
        times(sums, 1 / sum(n for _, n, _ in with_none)),
        {ONCE: times(sums, 1 / count)},
        "the mean where rank 0 has no targets",
        NONE * is_nan,
    )
    expected = sum(p.nbytes for p in model.parameters())
    most = max(map(compare.nbytes_of, results["sent"]))
    text, mistake = f"{most:,}; gradients have {expected:,}", ""
    if most >= size * expected:
        mistake = f"{compare.ALL_GATHERED} An all-reduce puts out one sum."
    yield Property("bytes a step", text, expected <= most <= expected + 64, mistake)


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
        return Totals(float(mean_loss) * tokens, tokens, text_bytes, float(norm), stops > 0)

    train.update = update
