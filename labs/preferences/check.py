"""The check of labs/preferences."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from labs.machinery import compare
from labs.machinery.compare import Property, nbytes_of
from labs.machinery.student import check_returned
from perf.instruments import Counted

FUNCTION = "prefer"
ABOUT = "DPO's loss over microbatches and ranks, and its gradient"
NEEDS = "`scatter_add`, `all_reduce`"
POINT = "a loss of log 2 may be right, and teach nothing"
LEADS_TO = "preferences.py", "Preferences"
SIZES = 2, 3, 4
BARRED = "preferences.Preferences", "preferences.of_answers"
HINTS = (
    "What is the probability of several tokens, and what its logarithm? How many numbers does a "
    "pair have before the sigmoid?",
    "Count the pairs of each row. What is the loss of a pair that is only padding, and what its "
    "gradient? Which number divides the losses of a microbatch?",
    "For each microbatch: rewards of tokens, added up by answer; two columns; their difference; a "
    "sum over real pairs. Then one all-reduce of two numbers, and one backward.",
)
BETA, ROWS, WIDTH = 0.3, 3, 3  # rows of a microbatch, pairs of a row at most


def microbatches_of(seed: int, rank: int) -> list[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """Return a rank's two microbatches. The first rank's second one has a single pair."""
    generator = torch.Generator().manual_seed(100 * seed + rank)
    found = []
    for i in range(2):
        pairs = torch.randint(WIDTH + 1, (ROWS,), generator=generator)
        pairs = torch.tensor([1, 0, 0]) if i and not rank else pairs.index_fill(0, pairs[:1] * 0, 2)
        lengths = [torch.randint(1, 5, (2 * int(n),), generator=generator) for n in pairs]
        numbers = [torch.arange(len(of_row)).repeat_interleave(of_row) for of_row in lengths]
        T = max(map(len, numbers)) + 2
        answers = torch.stack([
            torch.cat([of_row, torch.full((T - len(of_row),), 2 * int(n))])
            for of_row, n in zip(numbers, pairs)
        ])  # fmt: skip
        is_token = (answers < 2 * pairs[:, None]) & (torch.rand(ROWS, T, generator=generator) < 0.8)
        both = -3 * torch.rand(2, ROWS, T, generator=generator, dtype=torch.float64) * is_token
        found.append((both[0].clone().requires_grad_(), both[1], answers, pairs))
    return found


def on_rank(load: Callable, size: int, seed: int, rank: int) -> dict:
    """Return the loss, the gradients and what was sent."""
    prefer, microbatches = load(), microbatches_of(seed, rank)
    with Counted(None) as counted:
        loss = check_returned(prefer(microbatches, BETA), Tensor | float, "the mean loss, a number")
    gradients = {f"gradient of microbatch {i}": m[0].grad for i, m in enumerate(microbatches)}
    loss = float(torch.as_tensor(loss, dtype=torch.float64).detach())
    return {"loss": loss, "gradients": gradients, "sent": counted.sent}


def by_formula(seed: int, size: int) -> tuple[float, list[dict[str, Tensor]]]:
    """Return the mean loss, and each rank's gradients, an answer at a time."""
    losses, shares = [], [microbatches_of(seed, rank) for rank in range(size)]
    for log_p, base_log_p, answers, pairs in (m for share in shares for m in share):
        for row, n in enumerate(pairs):
            for pair in range(n):
                chosen, rejected = (
                    (log_p - base_log_p)[row][answers[row] == 2 * pair + k].sum() for k in (0, 1)
                )
                losses.append(torch.log1p(torch.exp(-BETA * (chosen - rejected))))
    loss = torch.stack(losses).mean()
    loss.backward()
    gradients = [{f"gradient of microbatch {i}": m[0].grad for i, m in enumerate(share)}
                 for share in shares]  # fmt: skip
    return loss.item(), gradients


def facts(size: int) -> dict:
    """Return what sentences of wrong.txt say of the microbatches."""
    return {"counts": [int(pairs.sum()) for *_, pairs in microbatches_of(0, 0)]}


def properties(results: dict[str, list], size: int, seed: int) -> Iterator[Property]:
    loss, gradients = by_formula(seed, size)
    yield compare.tensors("gradients", results["gradients"], gradients, "those of the mean loss")
    yield compare.numbers("loss", results["loss"], loss)
    most = max(map(nbytes_of, results["sent"]))
    text = f"{most:,}; two numbers are 16"
    yield Property("bytes", text, most <= 16, "Ranks need each other's sum and count, not more.")
