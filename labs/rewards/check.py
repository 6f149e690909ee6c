"""The check of labs/rewards."""

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from labs.machinery import compare
from labs.machinery.compare import Property, are_finite, nbytes_of
from labs.machinery.lab import gradient_of
from labs.machinery.student import check_returned
from perf.instruments import Counted

FUNCTION = "improve"
ABOUT = "the loss of GRPO from rewards to gradients: groups, clipping, masks and one division"
NEEDS = "`index_add_`, `cumsum`, `clamp`, `all_reduce`"
POINT = "an answer is compared with its group, wherever that lies, and a token weighs one token"
LEADS_TO = "rewards.py", "Rewards"
SIZES = 2, 3, 4
BARRED = "rewards.advantages_of", "rewards.clipped"
HINTS = (
    "Draw the minimum over the ratio, once for a positive and once for a negative advantage. On "
    "which side is each of them flat?",
    "Count the answers of one group on each rank. What does a rank have to know of the others, so "
    "that it can subtract the mean? And which number divides the losses of a rank with few rows?",
    "Counts and sums of groups, added up over ranks. For each microbatch: which tokens are the "
    "answer's, their log ratios clipped on one side, exp, times the advantage. Then one division "
    "by the answers of all ranks, one backward, and the loss added up.",
)
N_GROUPS, END, LOW, HIGH = 5, 1, 0.2, 0.28
EPSILON = 0.05  # so large that nobody takes it for a rounding error
FAR = 1e4  # a log ratio whose exp is infinite
LARGE = 2.0**40  # to which rewards are added; their means are exact
# The last case -> what the report calls it. The first two have the same tensors.
PLAIN, AGAIN, STD, EMPTY, FAR_APART, OFFSET = "", " again", " std", " empty", " far", " large"
CASES = {PLAIN: "", AGAIN: "", STD: "std", EMPTY: "", FAR_APART: "", OFFSET: "std"}
HOOKED = (
    "The first call is right, and the second with the same tensors is not: a hook on log_p stays "
    "there, and so does what a call adds to a list."
)
NO_STD = (
    "The rewards of a group may be equal, or there may be one alone: its standard deviation is 0 "
    "then. epsilon is added to it, and n - 1 is 1 at least."
)
NO_ROWS = "A rank may have no row: divide by the number of answers of all ranks."
OVERFLOWS = (
    "exp of a log ratio may be infinite, and 0 times infinity is NaN, in backward, too: leave out "
    "tokens that do not count, and clip, before exp."
)
CANCELS = (
    "Rewards are large here and differ little: the mean of the squares minus the square of the "
    "mean has lost all digits then. Add up squares of differences from the mean."
)
# Case -> the sentence, and whether it is only for numbers that are not finite.
MISTAKES = {AGAIN: (HOOKED, False), STD: (NO_STD, True), EMPTY: (NO_ROWS, True),
            FAR_APART: (OVERFLOWS, True), OFFSET: (CANCELS, False)}  # fmt: skip


class Rows(NamedTuple):
    """A microbatch: what the student's function is given, and the lengths of its answers."""

    log_p: Tensor
    old_log_p: Tensor
    tokens: Tensor
    prompts: Tensor
    groups: Tensor
    rewards: Tensor
    lengths: Tensor


def microbatches_of(seed: int, rank: int, size: int, case: str = PLAIN) -> list[Rows]:
    """Return a rank's two microbatches. In group 2 rewards are equal, group 3 has one answer, and
    group 4 none."""
    generator = torch.Generator().manual_seed(100 * seed + rank)
    found = []
    for i in range(2):
        B = 2 * (1 + (rank + i) % 3) + 4 * (rank == 0)
        B = 0 if case == EMPTY and rank == size - 1 else B
        row = torch.arange(B)
        prompts = torch.randint(2, 5, (B,), generator=generator)
        lengths = torch.randint(1, 9, (B,), generator=generator)
        T = 8 + (rank + i) % 3
        column = torch.arange(T)
        tokens = torch.randint(2, 9, (B, T), generator=generator)
        tokens[::2, 0] = END  # as a turn before this prompt ended
        answer_ends = prompts + lengths
        is_cut_off = answer_ends >= T
        lengths = torch.where(is_cut_off, T - prompts, lengths)
        tokens[column >= answer_ends[:, None] - 1] = END
        groups = (row // 2 + rank + i) % 3
        quarters = torch.randint(1, 9, (B,), generator=generator).double()
        rewards = quarters / 4
        if case == OFFSET:  # the mean of each group is LARGE
            rewards = LARGE + rewards[row // 2 * 2] * (1 - 2 * (row % 2))
        else:
            rewards[groups == 2] = 1.0
            if rank == i == 0:
                groups[-1] = 3
                rewards[:2] = torch.tensor([9.0, -9.0])  # of group 0
        both = -3 * torch.rand(2, B, T, generator=generator, dtype=torch.float64)
        log_p, old_log_p = both[0], both[0] + (both[1] + 1.5) / 2
        if rank == i == 0:  # ratios 1.24 and 0.76, between bounds that may be exchanged
            between = torch.tensor([1.24, 0.76], dtype=torch.float64).log()
            old_log_p[[0, 1], prompts[:2]] = log_p[[0, 1], prompts[:2]] - between
        if case == FAR_APART:
            old_log_p[(column < prompts[:, None]) | (column >= answer_ends[:, None])] = -FAR
            old_log_p[groups == 2] = -FAR  # whose advantages are 0
            if rank == i == 0:
                old_log_p[0, prompts[0]] = -FAR  # of an answer that is better than its group
                log_p[1, prompts[1]] = -FAR  # and of one that is worse
        found.append(
            Rows(log_p.requires_grad_(), old_log_p, tokens, prompts, groups, rewards, lengths)
        )
    return found


def on_rank(load: Callable, size: int, seed: int, rank: int) -> dict:
    """Return the losses, the gradients and what was sent, in all cases."""
    improve = load()
    losses = {}
    gradients = {}
    sent = []
    for case, normalize in CASES.items():
        if case != AGAIN:
            microbatches = microbatches_of(seed, rank, size, case)
        given = [tuple(rows[:-1]) for rows in microbatches]
        with Counted(None) as counted:
            loss = improve(given, N_GROUPS, END, LOW, HIGH, normalize, EPSILON)
        sent.append(nbytes_of(counted.sent))
        check_returned(loss, Tensor | float, "the loss, a number")
        losses[case] = torch.as_tensor(loss, dtype=torch.float64).item()
        gradients[case] = {}
        for i, (log_p, *_) in enumerate(microbatches):
            gradient = log_p.grad if len(log_p) else gradient_of(log_p)
            gradients[case][f"gradient of microbatch {i}"] = gradient
            log_p.grad = None
    return {"losses": losses, "gradients": gradients, "sent": max(sent)}


def by_formula(seed: int, size: int, case: str) -> tuple[float, list[dict[str, Tensor]]]:
    """Return the loss, and each rank's gradients, a token at a time."""
    shares = [microbatches_of(seed, rank, size, case) for rank in range(size)]
    rewards = {group: [] for group in range(N_GROUPS)}
    for rows in (rows for share in shares for rows in share):
        for group, reward in zip(rows.groups.tolist(), rows.rewards.tolist()):
            rewards[group].append(reward)
    n_answers = sum(map(len, rewards.values()))
    loss = 0.0
    gradients = []
    for share in shares:
        gradients.append({})
        for i, rows in enumerate(share):
            gradient = torch.zeros_like(rows.log_p)
            for row, group in enumerate(rows.groups.tolist()):
                advantage = advantage_of(rows.rewards[row].item(), rewards[group], CASES[case])
                first = int(rows.prompts[row])
                for t in range(first, first + int(rows.lengths[row])):
                    log_ratio = rows.log_p[row, t].item() - rows.old_log_p[row, t].item()
                    value, slope = clipped(log_ratio, advantage)
                    loss -= value / n_answers
                    gradient[row, t] = -slope / n_answers
            gradients[-1][f"gradient of microbatch {i}"] = gradient.detach()
    return loss, gradients


def advantage_of(reward: float, of_group: list[float], normalize: str) -> float:
    mean = sum(of_group) / len(of_group)
    if not normalize:
        return reward - mean
    squares = sum((other - mean) ** 2 for other in of_group)
    return (reward - mean) / (math.sqrt(squares / max(1, len(of_group) - 1)) + EPSILON)


def clipped(log_ratio: float, advantage: float) -> tuple[float, float]:
    """Return min(ratio A, clipped A) and its derivative by the log ratio."""
    if advantage == 0:
        return 0.0, 0.0
    if advantage > 0 and log_ratio > math.log(1 + HIGH):
        return (1 + HIGH) * advantage, 0.0
    if advantage < 0 and log_ratio < math.log(1 - LOW):
        return (1 - LOW) * advantage, 0.0
    return math.exp(log_ratio) * advantage, math.exp(log_ratio) * advantage


def facts(size: int) -> dict:
    """Return what sentences of wrong.txt say of the answers."""
    shares = [microbatches_of(0, rank, size) for rank in range(size)]
    rows_of = [[len(rows.rewards) for rows in share] for share in shares]
    return {"counts": rows_of[0], "of_ranks": list(map(sum, rows_of)), "size": size}


def properties(results: dict[str, list], size: int, seed: int) -> Iterator[Property]:
    for case in CASES:
        loss, expected = by_formula(seed, size, case)
        gradients = [of_rank[case] for of_rank in results["gradients"]]
        losses = [of_rank[case] for of_rank in results["losses"]]
        mistake, of_infinite_only = MISTAKES.get(case, ("", False))
        if of_infinite_only and are_finite([losses, gradients]):
            mistake = ""
        reference = "those of the loss of all answers"
        yield compare.tensors(f"gradients{case}", gradients, expected, reference, mistake)
        yield compare.numbers(f"loss{case}", losses, loss, mistake)
    most = max(results["sent"])
    allowed = 8 * (3 * N_GROUPS + 2)
    text = f"{most:,}; three numbers of each group, and two more, are {allowed}"
    mistake = "Ranks need three sums of each group from each other, and the loss: not more."
    yield Property("bytes", text, most <= allowed, mistake)
