"""The check of labs/mean."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from labs.machinery import compare
from labs.machinery.compare import Property, times
from labs.machinery.lab import batch_of, norm_of, share_of, small_model, summed_gradients, world_of
from labs.machinery.student import check_returned
from model import IGNORE
from perf.instruments import Counted
from text.batch import Batch

FUNCTION = "average"
ABOUT = "the gradient of the mean over all ranks' targets, clipped"
NEEDS = "`all_reduce`"
POINT = "a mean of means is none; three libraries had it"
LEADS_TO = "train.py", "update"
SIZES = 2, 3, 4
BARRED = ("train.update",)
HINTS = (
    "The wanted gradient is a sum over the targets of all ranks, divided by their number. Which "
    "part of the sum does a rank have, and who knows the number?",
    "Count the targets of each rank on paper. Whose number belongs under the sum of all gradients?",
    "One all-reduce for loss and number of targets; one for each gradient; divide; then the norm.",
)
NONE = "A rank may have no targets, and 0 / 0 is NaN: divide by the number of targets of all ranks."
# Of each case, `clip` as a multiple of the norm, and whether rank 0 has no targets.
CASES = (200.0, False), (200.0, True), (0.01, False), (1.5, False)
BELOW = "Gradients whose norm is below `clip` stay as they are, however near it is."


def on_rank(load: Callable, size: int, seed: int, rank: int) -> dict:
    """Return what the function gave and sent, without and with clipping."""
    world, average, found = world_of(rank, size), load(), {"loss": [], "norm": [], "gradients": []}
    for multiple, is_empty in CASES:
        _, right = mean_of_all(seed, size, is_empty)
        model, batch = small_model(seed), share(seed, rank, size, is_empty)
        targets = int((batch.targets != IGNORE).sum())
        loss = model(*batch.inputs)
        loss.backward()
        with Counted(world) as counted:
            result = average(list(model.parameters()), loss, targets, multiple * norm_of(right))
        what = "the mean loss and the norm, two numbers"
        for name, value in zip(found, check_returned(result, (Tensor | float,) * 2, what)):
            found[name].append(float(torch.as_tensor(value, dtype=torch.float64).detach()))
        found["gradients"].append({name: p.grad for name, p in model.named_parameters()})
    return found | {"sent": counted.sent}


def share(seed: int, rank: int, size: int, is_empty: bool) -> Batch:
    """Return a rank's rows. If it `is_empty`, rank 0 has no targets, as in answers that are
    masked."""
    batch = share_of(batch_of(seed), rank, size)
    if is_empty and rank == 0:
        batch.targets.fill_(IGNORE)
    return batch


def mean_of_all(seed: int, size: int, is_empty: bool) -> tuple[float, dict[str, Tensor]]:
    """Return the mean loss over the targets of all ranks, and its gradient."""
    model = small_model(seed)
    shares = (share(seed, rank, size, is_empty) for rank in range(size))
    losses, counts, gradients = zip(*(summed_gradients(model, batch) for batch in shares))
    total = {name: sum(g[name] for g in gradients) for name in gradients[0]}
    return sum(losses) / sum(counts), times(total, 1 / sum(counts))


def facts(size: int) -> dict:
    """Return what sentences of wrong.txt say of the ranks."""
    counts = [int((share(0, rank, size, False).targets != IGNORE).sum()) for rank in range(size)]
    return {"counts": counts}


def properties(results: dict[str, list], size: int, seed: int) -> Iterator[Property]:
    losses, norms, gradients = (
        [list(case) for case in zip(*results[key])] for key in ("loss", "norm", "gradients")
    )
    loss, mean = mean_of_all(seed, size, False)
    yield compare.numbers("loss", losses[0], loss)
    yield compare.tensors("gradients", gradients[0], mean)
    norm, clip = norm_of(mean), CASES[2][0] * norm_of(mean)
    as_torch = times(mean, clip / (norm + 1e-6))  # what clip_grad_norm_ computes is right, too
    near = all(abs(norm_of(g) / norm_of(as_torch) - 1) < 1e-9 for g in gradients[2])
    yield compare.tensors("clipped", gradients[2], as_torch if near else times(mean, clip / norm))
    reference = "as they are, where their norm is below `clip`"
    yield compare.tensors("not clipped", gradients[3], mean, reference, BELOW)
    yield compare.numbers("norm", norms[2], norm)

    loss, mean = mean_of_all(seed, size, True)
    found = [of_rank | {"loss": torch.tensor(loss, dtype=torch.float64)}
             for of_rank, loss in zip(gradients[1], losses[1])]  # fmt: skip
    expected = mean | {"loss": torch.tensor(loss, dtype=torch.float64)}
    is_nan = any(bool(g.isnan().any()) for of_rank in found for g in of_rank.values())
    reference = "the mean where rank 0 has no targets"
    yield compare.tensors("one empty", found, expected, reference, NONE * is_nan)
    expected = sum(g.nbytes for g in mean.values())
    most = max(map(compare.nbytes_of, results["sent"]))
    text, mistake = f"{most:,}; gradients have {expected:,}", ""
    if most >= size * expected:
        mistake = f"{compare.ALL_GATHERED} An all-reduce puts out one sum."
    yield Property("bytes a step", text, expected <= most <= expected + 64, mistake)
