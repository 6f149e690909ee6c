"""Which of these answers should become likelier?

A model answers a prompt several times, and each answer gets a reward. Those that beat the mean of
their group become likelier, the others less likely, token by token (GRPO). The same answers serve
several steps, so the model moves away from the one that gave them: a token that has moved far
enough counts no more. The answers to a prompt may lie on several ranks.

Read: the head of rewards.py, then Liu et al. 2025 (arXiv:2503.20783), section 3.
"""

import math

import torch
import torch.distributed as dist
from torch import Tensor


def improve(
    microbatches: list[tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]],
    n_groups: int,
    end: int,
    low: float = 0.2,
    high: float = 0.28,
    normalize: str = "",
    epsilon: float = 1e-6,
) -> Tensor:
    """Return the loss of all answers on all ranks, and let each log_p.grad be its gradient. Each
    rank calls this. The loss is the sum over all tokens of answers, divided by the number of
    answers, of

        -min(ratio A, clipped A): ratio = p / old p, clipped is in [1 - low, 1 + high]
        A = reward of the answer - mean reward of its group. With normalize="std" that is divided by
            the standard deviation of the group's n rewards, which divides by n - 1, or by 1 where
            n is 1, plus epsilon

    A microbatch has six tensors of B rows. A row is a prompt, its answer, and padding:
    log_p [B, T]: of each token, given those before it, by the model; a leaf, so that backward fills
        its .grad
    old_log_p [B, T]: the same by the model that gave the answers
    tokens [B, T]: an answer goes up to its first token `end`, which belongs to it, or up to the
        end of the row; rows are padded with `end`. Prompts may have that token, too
    prompts [B]: how many tokens of a row are its prompt
    groups [B]: to which of the n_groups prompts it is an answer
    rewards [B] float64
    A rank may have no row, a group no answer. exp may be infinite of log_p - old_log_p, also of
    tokens that do not count; and rewards may be large, and differ little.
    """
    # >>>
    counts, sums, squares = torch.zeros(3, n_groups, dtype=torch.float64)
    for *_, groups, rewards in microbatches:
        counts.index_add_(0, groups, torch.ones_like(rewards))
        sums.index_add_(0, groups, rewards)
    dist.all_reduce(counts)
    dist.all_reduce(sums)
    means = sums / counts.clamp(min=1)
    scales = torch.ones_like(means)
    if normalize == "std":
        for *_, groups, rewards in microbatches:
            squares.index_add_(0, groups, (rewards - means[groups]).square())
        dist.all_reduce(squares)
        scales = (squares / (counts - 1).clamp(min=1)).sqrt() + epsilon
    losses = []
    for log_p, old_log_p, tokens, prompts, groups, rewards in microbatches:
        is_after_prompt = torch.arange(tokens.shape[1]) >= prompts[:, None]
        is_end = is_after_prompt & (tokens == end)
        is_answer = is_after_prompt & (is_end.cumsum(1) - is_end.long() == 0)
        log_ratio = (log_p - old_log_p)[is_answer]
        advantages = (rewards - means[groups]) / scales[groups]
        advantages = advantages[:, None].expand_as(log_p)[is_answer]
        not_above = log_ratio.clamp(max=math.log(1 + high))
        not_below = log_ratio.clamp(min=math.log(1 - low))
        ratio = torch.where(advantages < 0, not_below, not_above).exp()
        losses.append(-(ratio * advantages).sum())
    loss = torch.stack(losses).sum() / counts.sum()
    loss.backward()
    total = loss.detach().clone()
    dist.all_reduce(total)
    return total
    # <<<


# Why: the mean of a group says what an answer to this prompt is worth at present, so the advantage
# compares answers and not prompts. The minimum takes the clipped ratio only where it is the worse
# one: above where A is positive, below where it is negative. So a token whose ratio went the wrong
# way keeps its gradient and comes back. What is clipped has no gradient; it is clipped before exp,
# since 0 times infinity is NaN in backward, and for the same reason tokens that do not count are
# left out before exp. Each token weighs 1 / answers: divided by its answer's length, a long wrong
# answer would cost no more than a short one. And the standard deviation is small where nearly all
# answers are right or nearly all wrong: to divide by it makes such prompts count most.
#
# Questions: 1. With ratios of 1 the derivative is A times that of log p: the policy gradient. The
# loss is near 0 because the advantages of a group have the sum 0, and says nothing.
# 2. Nothing, since all advantages are 0. They cost as much as any: so some draw prompts again until
# answers differ.
