"""The check of labs/preferences."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from labs.machinery import compare
from labs.machinery.compare import Property, are_finite, nbytes_of
from labs.machinery.lab import gradient_of
from labs.machinery.student import check_returned
from perf.instruments import Counted

FUNCTION = "prefer"
ABOUT = "DPO's loss over microbatches and ranks, and its gradient"
NEEDS = "`scatter_add`, `all_reduce`"
POINT = "a loss of log 2 may be right, and teach nothing"
LEADS_TO = "preferences.py", "Preferences"
SIZES = 2, 3, 4
BARRED = "preferences.Preferences", "preferences.sums_of_answers"
HINTS = (
    "What is the probability of several tokens, and what its logarithm? How many numbers does a "
    "pair have before the sigmoid?",
    "Count the pairs of each row. What is the loss of a pair that is only padding, and what its "
    "gradient? Which number divides the losses of a microbatch?",
    "For each microbatch: rewards of tokens, added up by answer; two columns; their difference; a "
    "sum over real pairs. Then one all-reduce of two numbers, and one backward.",
)
BETA, ROWS, WIDTH = 0.3, 3, 3  # rows of a microbatch, pairs of a row at most
FAR = -1e4  # log p of a token of a chosen answer that the model has become very unlikely to give
# The last case -> what the report calls it. The first two have the same tensors.
PLAIN, AGAIN, EMPTY, FAR_APART = "", " again", " empty", " far"
CASES = PLAIN, AGAIN, EMPTY, FAR_APART
HOOKED = (
    "The first call is right, and the second with the same tensors is not: a hook on log_p stays "
    "there, and so does what a call adds to a list."
)
OVERFLOWS = (
    "exp of a large difference is infinite, and its logarithm, too: F.logsigmoid of the difference "
    "has no such limit."
)
NO_PAIRS = "A rank may have no pairs: divide by the number of pairs of all ranks."


def microbatches_of(
    seed: int, rank: int, size: int, case: str = PLAIN
) -> list[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """Return a rank's two microbatches. The first rank's second one has a single pair."""
    generator = torch.Generator().manual_seed(100 * seed + rank)
    found = []
    for i in range(2):
        pairs = torch.randint(WIDTH + 1, (ROWS,), generator=generator)
        pairs = torch.tensor([1, 0, 0]) if i and not rank else pairs.index_fill(0, pairs[:1] * 0, 2)
        if case == EMPTY and rank == size - 1:
            pairs = torch.zeros_like(pairs)
        lengths = [torch.randint(1, 5, (2 * int(n),), generator=generator) for n in pairs]
        numbers = [torch.arange(len(of_row)).repeat_interleave(of_row) for of_row in lengths]
        T = max(map(len, numbers)) + 2
        answers = torch.stack([
            torch.cat([of_row, torch.full((T - len(of_row),), 2 * int(n))])
            for of_row, n in zip(numbers, pairs)
        ])  # fmt: skip
        is_token = (answers < 2 * pairs[:, None]) & (torch.rand(ROWS, T, generator=generator) < 0.8)
        both = -3 * torch.rand(2, ROWS, T, generator=generator, dtype=torch.float64) * is_token
        if case == FAR_APART:
            both[0, 0, 0] = FAR
        found.append((both[0].clone().requires_grad_(), both[1], answers, pairs))
    return found


def on_rank(load: Callable, size: int, seed: int, rank: int) -> dict:
    """Return the losses, the gradients and what was sent, in all cases."""
    prefer = load()
    losses = {}
    gradients = {}
    for case in CASES:
        if case != AGAIN:
            microbatches = microbatches_of(seed, rank, size, case)
        with Counted(None) as counted:
            loss = prefer(microbatches, BETA)
        check_returned(loss, Tensor | float, "the mean loss, a number")
        losses[case] = torch.as_tensor(loss, dtype=torch.float64).item()
        gradients[case] = {}
        for i, (log_p, *_) in enumerate(microbatches):
            gradients[case][f"gradient of microbatch {i}"] = gradient_of(log_p)
            log_p.grad = None
    return {"losses": losses, "gradients": gradients, "sent": counted.sent}


def by_formula(seed: int, size: int, case: str) -> tuple[float, list[dict[str, Tensor]]]:
    """Return the mean loss, and each rank's gradients, an answer at a time."""
    losses = []
    shares = [microbatches_of(seed, rank, size, case) for rank in range(size)]
    for log_p, base_log_p, answers, pairs in (m for share in shares for m in share):
        for row, n in enumerate(pairs):
            for pair in range(n):
                chosen, rejected = (
                    (log_p - base_log_p)[row][answers[row] == 2 * pair + k].sum() for k in (0, 1)
                )
                margin = BETA * (chosen - rejected)
                losses.append(torch.logaddexp(torch.zeros_like(margin), -margin))
    loss = torch.stack(losses).mean()
    loss.backward()
    gradients = []
    for share in shares:
        gradients.append(
            {f"gradient of microbatch {i}": gradient_of(m[0]) for i, m in enumerate(share)}
        )
    return loss.item(), gradients


def facts(size: int) -> dict:
    """Return what sentences of wrong.txt say of the microbatches, and of the ranks' pairs."""
    of_ranks = [[int(pairs.sum()) for *_, pairs in microbatches_of(0, rank, size)]
                for rank in range(size)]  # fmt: skip
    return {"counts": of_ranks[0], "of_ranks": list(map(sum, of_ranks)), "size": size}


def properties(results: dict[str, list], size: int, seed: int) -> Iterator[Property]:
    mistakes = {PLAIN: "", AGAIN: HOOKED, EMPTY: NO_PAIRS, FAR_APART: OVERFLOWS}
    for case in CASES:
        loss, expected = by_formula(seed, size, case)
        gradients = [of_rank[case] for of_rank in results["gradients"]]
        losses = [of_rank[case] for of_rank in results["losses"]]
        is_finite = are_finite([losses, gradients])
        mistake = "" if is_finite and case in (EMPTY, FAR_APART) else mistakes[case]
        reference = "those of the mean loss"
        yield compare.tensors(f"gradients{case}", gradients, expected, reference, mistake)
        yield compare.numbers(f"loss{case}", losses, loss, mistake)
    most = max(map(nbytes_of, results["sent"]))
    text = f"{most:,}; two numbers are 16"
    yield Property("bytes", text, most <= 16, "Ranks need each other's sum and count, not more.")
