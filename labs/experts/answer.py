"""Who computes which token?

A block has several experts, and each rank holds some of them. A token's row travels to the rank of
its expert, is computed there, and travels back. Rows arrive in another order than experts need
them in; and a rank that has nothing to send still has to take part.

Read: the head of techniques/experts.py, on rows that are sorted by expert, and the documentation of
torch.distributed.all_to_all_single.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor


def exchange(
    compute: Callable, all_to_all: Callable, weight: Tensor, rows: Tensor, counts: Tensor
) -> Tensor:
    """Let the ranks of their experts compute `rows` [n, D]; return the results [n, D], in order.

    Of X experts, rank r of N holds those from r X / N on; `weight` [X / N, D, D] is theirs.
    rows are sorted by expert: the first counts[0] are for expert 0, the next counts[1] for expert 1
    compute(rows, weight, counts) -> results, of rows for this rank's experts, sorted by expert
    all_to_all(x, sent, received) -> x of others; two lists have the rows to send to each rank, and
        those that come from it. Its backward sends each row's gradient back to where it came from.
    Each rank then calls backward for a loss of its own rows. Afterwards weight.grad shall be the
    average over N ranks, as all gradients in data parallelism, of what their losses give.
    """
    # >>>
    ranks = dist.get_world_size()
    arriving = torch.empty_like(counts)
    dist.all_to_all_single(arriving, counts)
    arriving = arriving.view(ranks, -1)  # rows from each rank, for each expert here
    sent, received = counts.view(ranks, -1).sum(1).tolist(), arriving.sum(1).tolist()
    rows = all_to_all(rows, sent, received)
    experts = torch.arange(arriving.shape[1]).repeat(ranks).repeat_interleave(arriving.flatten())
    order = experts.argsort(stable=True)
    own = weight.view_as(weight)
    own.register_hook(lambda gradient: gradient / ranks)
    out = compute(rows[order], own, arriving.sum(0))[order.argsort()]
    return all_to_all(out, received, sent)
    # <<<


# Why: an expert sees the rows of all ranks, so that its gradient is a sum over them; an average has
# the N-th part of that. AdamW divides by the size of gradients, so that a wrong factor hardly shows
# in a loss. Rows in a wrong order, or results given back in a wrong order, only make experts worse:
# training goes on, and its loss falls.
#
# Questions: 1. N K rows of D numbers there and back, in forward and in backward, of which (n - 1)/n
# leave the rank: 4 N K D (n - 1)/n numbers, whatever the experts' size. FSDP gathers their P
# weights twice and reduce-scatters once: 3 P (n - 1)/n, whatever the number of tokens.
# 2. The router. So it gets a loss or a bias that spreads tokens evenly, or experts a limit.
