"""How does a small model save the large one's time?

A large model that generates one token at a time reads all of its weights for it. One call could
judge several tokens, if somebody knew them. So a small model drafts some, and the large model says
of each how likely it is. What is accepted and what is drawn in its place can be chosen so that the
text is distributed as if the large model had written every token itself.

Read: Leviathan et al. 2023 (arXiv:2211.17192), algorithm 1, or Chen et al. 2023 (arXiv:2302.01318).
"""

from collections.abc import Callable

import torch
from torch import Tensor


def speculate(
    large: Callable[[list[int]], Tensor],
    draft: Callable[[list[int]], Tensor],
    tokens: list[int],
    ahead: int,
    choose: Callable[[Tensor], int],
    accept: Callable[[float], bool],
) -> list[int]:
    """Return the next tokens, from one to `ahead` + 1 of them, distributed as those of `large`.

    large(tokens [T]) -> probabilities [T, V]: row i has those of the token after tokens[: i + 1].
        It may be called once
    draft(tokens [T]) -> the same of the small model, which may be called `ahead` times
    ahead: how many tokens to draft, 0 or more
    choose(p [V]) -> a token, drawn with these probabilities, whose sum is 1
    accept(probability) -> True with this probability; above 1 always
    What is drawn by `choose` and `accept` is all that may be random. Return as many tokens as the
    large model's one call allows.
    """
    # >>>
    drafted, guesses = list(tokens), []
    for _ in range(ahead):
        guesses.append(draft(drafted)[-1])
        drafted.append(choose(guesses[-1]))
    wanted = large(drafted)[len(tokens) - 1 :]  # [ahead + 1, V]
    new = []
    for p, guess, token in zip(wanted, guesses, drafted[len(tokens) :]):
        if not accept(float(p[token] / guess[token])):
            missing = (p - guess).clamp(min=0)  # what drafts give too rarely
            return [*new, choose(missing / missing.sum())]
        new.append(token)
    return [*new, choose(wanted[-1])]
    # <<<


# Why: a token is drafted with probability q and accepted with min(1, p / q), so it comes out with
# min(p, q). What is missing to p is max(0, p - q), and a rejected draft is replaced by a draw from
# exactly that. So each token has probability p, whatever the draft thinks; a bad draft costs time
# and no quality. After a rejection the later drafts have another past, and are dropped. If all are
# accepted, the same call of the large model gives one token more.
#
# Questions: 1. p has to be the large model's with temperature 0.7, as that is what the text is to
# follow; and q what was really drawn from, whatever its temperature.
# 2. Six: n drafts give (1 - 0.8^(n + 1)) / 0.2 tokens on average for 1 + 0.1 n calls. That is 2.46
# tokens a call with five, 2.47 with six and 2.45 with seven.
