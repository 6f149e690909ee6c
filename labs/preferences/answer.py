"""Whose log-probability?

Of two answers to a prompt one is better. DPO rewards an answer for being likelier than a base model
has it, and trains the model so that the better answer has the higher reward. An answer has many
tokens, a row has several pairs and some padding, and ranks have different numbers of pairs.

Read: the head of preferences.py, then Rafailov et al. 2023 (arXiv:2305.18290), section 4.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor


def prefer(microbatches: list[tuple[Tensor, Tensor, Tensor, Tensor]], beta: float) -> Tensor:
    """Return the mean of the pairs' losses over all microbatches and ranks, and let each log_p.grad
    be the gradient of that mean. Each rank calls this.

    A pair's loss is -log sigmoid(reward of its chosen answer - reward of its rejected one); an
    answer's reward is beta (log p(answer) - log p_base(answer)). A microbatch has four tensors:
    log_p [B, T]: of each token by the model; a leaf, so that backward fills its .grad; 0 where a
        token belongs to a prompt or is padding
    base_log_p [B, T]: the same by the base
    answers [B, T]: the number of a token's answer in its row: 0 and 1 are the chosen and the
        rejected one of the first pair, 2 and 3 those of the second; a prompt has the number of the
        answer that follows it, and padding the number after the last
    pairs [B]: how many pairs a row has. Rows may have none, and a rank may have none in all
    Differences of rewards may be so large that their exp is infinite. A rank sends two numbers.
    """
    # >>>
    losses = []
    for log_p, base_log_p, answers, pairs in microbatches:
        most = 2 * int(pairs.max())
        rewards = log_p.new_zeros(len(log_p), most + 1)
        rewards = rewards.scatter_add(1, answers, beta * (log_p - base_log_p))
        chosen, rejected = rewards[:, :most:2], rewards[:, 1:most:2]
        is_pair = torch.arange(most // 2) < pairs[:, None]
        losses.append(torch.where(is_pair, -F.logsigmoid(chosen - rejected), 0).sum())
    loss = torch.stack(losses).sum()
    count = sum(pairs.sum() for *_, pairs in microbatches)
    totals = torch.stack([loss.detach(), count.to(loss)])
    dist.all_reduce(totals)
    (loss / totals[1]).backward()
    return totals[0] / totals[1]
    # <<<


# Why: log p of an answer is the sum over its tokens, because p is their product: so rewards are
# sums, too. Their difference goes through the sigmoid as a whole, with beta inside, where it says
# how large a difference counts as learned. The base is another model, or the same one without its
# adapters: with the model's own log p, every loss is log 2. And the mean is over pairs, not over
# microbatches, and padding is no pair: it would add log 2 each time, and nothing to the gradient.
#
# Questions: 1. Both answers of a pair have the same prompt, so its log p is in both rewards and
# leaves their difference.
# 2. Which answer becomes likelier: by beta/2 for each pair the chosen one goes up and the rejected
# one down. log 2 is the loss of any pair whose rewards are equal, right or wrong.
