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
BARRED = "train.update", "train.train_step"
HINTS = (
    "Look at the docstring of `update` in train.py: what is accumulated, and when is it divided?",
    "Count the targets of each rank on paper. Whose number belongs under the sum of all gradients?",
    "One all-reduce for loss and number of targets; one for each gradient; divide; then the norm.",
)
CLIPS = 1e9, 0.01  # above the norms here, and below
NONE = "A rank may have no targets, and 0 / 0 is NaN: divide by the number of targets of all ranks."
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
            found[name].append(float(torch.as_tensor(value).detach()))
        found["gradients"].append({name: p.grad for name, p in model.named_parameters()})
    return found | {"sent": counted.sent}


def share(seed: int, rank: int, size: int, is_empty: bool) -> Batch:
    """Return a rank's rows. If it `is_empty`, rank 0 has no targets, as in answers that are
    masked."""
    batch = share_of(batch_of(seed), rank, size)
    if is_empty and rank == 0:
        batch.targets.fill_(IGNORE)
    return batch


def facts(size: int) -> dict:
    """Return what sentences of wrong.txt say of the ranks."""
    counts = [int((share(0, rank, size, False).targets != IGNORE).sum()) for rank in range(size)]
    return {"counts": counts}


def properties(results: dict[str, list], size: int, seed: int) -> Iterator[Property]:
    model, batch = small_model(seed), batch_of(seed)
    total, count, sums = summed_gradients(model, batch)
    losses, norms, gradients = (
        [list(case) for case in zip(*results[key])] for key in ("loss", "norm", "gradients")
    )
    yield compare.numbers("loss", losses[0], total / count)
    mean = times(sums, 1 / count)
    yield compare.tensors("gradients", gradients[0], mean)
    norm, clip = norm_of(mean), CLIPS[1]
    as_torch = times(mean, clip / (norm + 1e-6))  # what clip_grad_norm_ computes is right, too
    near = all(abs(norm_of(g) / norm_of(as_torch) - 1) < 1e-9 for g in gradients[2])
    yield compare.tensors("clipped", gradients[2], as_torch if near else times(mean, clip / norm))
    yield compare.numbers("norm", norms[2], norm)

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
        "the mean where rank 0 has no targets",
        NONE * is_nan,
    )
    expected = sum(p.nbytes for p in model.parameters())
    most = max(map(compare.nbytes_of, results["sent"]))
    text, mistake = f"{most:,}; gradients have {expected:,}", ""
    if most >= size * expected:
        mistake = f"{compare.ALL_GATHERED} An all-reduce puts out one sum."
    yield Property("bytes a step", text, expected <= most <= expected + 64, mistake)
