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
# Of each case, `clip` as a multiple of the norm, and how many of the first ranks have no targets.
# All cases have the same parameters, the first two also the same numbers.
CASES = (200.0, 0), (200.0, 0), (200.0, 1), (0.01, 0), (1.5, 0), (1.001, 0)
PLAIN, AGAIN, EMPTY, CLIPPED, *BELOW = range(len(CASES))
NOT_CLIPPED = "Gradients whose norm is below `clip` stay as they are, however near it is."
HOOKED = (
    "The first call is right, and the second on the same parameters is not: a hook on a parameter "
    "stays there, and so does what a call keeps."
)
ZERO = "A gradient of zeros has the norm 0, and clip / 0 is infinite: it stays as it is."


def on_rank(load: Callable, size: int, seed: int, rank: int) -> dict:
    """Return what the function gave and sent, without and with clipping."""
    world = world_of(rank, size)
    average = load()
    found = {"loss": [], "norm": [], "gradients": []}
    model = small_model(seed)
    for multiple, empty in CASES:
        _, right = mean_of_all(seed, size, empty)
        model.zero_grad()
        batch = share(seed, rank, size, empty)
        targets = int((batch.targets != IGNORE).sum())
        loss = model(*batch.inputs)
        loss.backward()
        with Counted(world) as counted:
            result = average(list(model.parameters()), loss, targets, multiple * norm_of(right))
        what = "the mean loss and the norm, two numbers"
        for name, value in zip(found, check_returned(result, (Tensor | float,) * 2, what)):
            found[name].append(torch.as_tensor(value, dtype=torch.float64).item())
        found["gradients"].append({name: p.grad for name, p in model.named_parameters()})
    model.zero_grad()
    loss = 0 * model(*batch.inputs)
    loss.backward()
    average(list(model.parameters()), loss, targets, 1.0)
    found["of zeros"] = {name: p.grad for name, p in model.named_parameters()}
    return found | {"sent": counted.sent}


def share(seed: int, rank: int, size: int, empty: int) -> Batch:
    """Return a rank's rows. The first `empty` ranks have no targets, as in answers that are
    masked."""
    batch = share_of(batch_of(seed), rank, size)
    if rank < empty:
        batch.targets.fill_(IGNORE)
    return batch


def mean_of_all(seed: int, size: int, empty: int) -> tuple[float, dict[str, Tensor]]:
    """Return the mean loss over the targets of all ranks, and its gradient."""
    model = small_model(seed)
    shares = (share(seed, rank, size, empty) for rank in range(size))
    losses, counts, gradients = zip(*(summed_gradients(model, batch) for batch in shares))
    total = {name: sum(g[name] for g in gradients) for name in gradients[0]}
    return sum(losses) / sum(counts), times(total, 1 / sum(counts))


def facts(size: int) -> dict:
    """Return what sentences of wrong.txt say of the ranks."""
    counts = [int((share(0, rank, size, 0).targets != IGNORE).sum()) for rank in range(size)]
    return {"counts": counts, "size": size}


def properties(results: dict[str, list], size: int, seed: int) -> Iterator[Property]:
    losses, norms, gradients = (
        [list(case) for case in zip(*results[key])] for key in ("loss", "norm", "gradients")
    )
    loss, mean = mean_of_all(seed, size, 0)
    yield compare.numbers("loss", losses[PLAIN], loss)
    yield compare.tensors("gradients", gradients[PLAIN], mean)
    yield compare.numbers("loss again", losses[AGAIN], loss, HOOKED)
    yield compare.tensors("gradients again", gradients[AGAIN], mean, otherwise=HOOKED)
    norm = norm_of(mean)
    clip = CASES[CLIPPED][0] * norm_of(mean)
    as_torch = times(mean, clip / (norm + 1e-6))  # what clip_grad_norm_ computes is right, too
    near = all(abs(norm_of(g) / norm_of(as_torch) - 1) < 1e-9 for g in gradients[CLIPPED])
    clipped = as_torch if near else times(mean, clip / norm)
    yield compare.tensors("clipped", gradients[CLIPPED], clipped)
    reference = "as they are, where their norm is below `clip`"
    for case in BELOW:
        line = compare.tensors("not clipped", gradients[case], mean, reference, NOT_CLIPPED)
        if not line.ok:
            break
    yield line
    yield compare.numbers("norm", norms[CLIPPED], norm)
    reference = "as they are, where all are 0"
    zeros = times(mean, 0.0)
    yield compare.tensors("of zeros", results["of zeros"], zeros, reference, ZERO)

    loss, mean = mean_of_all(seed, size, 1)
    found = [of_rank | {"loss": torch.tensor(loss, dtype=torch.float64)}
             for of_rank, loss in zip(gradients[EMPTY], losses[EMPTY])]  # fmt: skip
    expected = mean | {"loss": torch.tensor(loss, dtype=torch.float64)}
    is_nan = any(bool(g.isnan().any()) for of_rank in found for g in of_rank.values())
    reference = "the mean where rank 0 has no targets"
    yield compare.tensors("one empty", found, expected, reference, NONE * is_nan)
    expected = sum(g.nbytes for g in mean.values())
    most = max(map(compare.nbytes_of, results["sent"]))
    gathered = compare.by_kind(results["sent"][0]).get("all-gather", (0, 0))
    text = f"{most:,}; gradients have {expected:,}"
    mistake = ""
    if gathered[1] >= size * expected:
        mistake = f"{compare.ALL_GATHERED} An all-reduce puts out one sum."
    yield Property("bytes a step", text, expected <= most <= expected + 64, mistake)
