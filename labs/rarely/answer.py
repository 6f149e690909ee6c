"""What may travel rarely?

Over a slow link the gradients of every step take longer than the step. So each rank here trains by
itself, with an optimizer of its own, and after some steps they meet. Between two meetings all that
is common is the outer copy: the weights with which the last one ended. How far a rank has gone from
there is its drift. DiLoCo takes the mean of the drifts for a gradient, and with it makes a step of
SGD with Nesterov's momentum on the outer copy.

Read: the formulas of torch.optim.SGD with nesterov=True.
"""

import torch
import torch.distributed as dist
from torch import Tensor


def outer_step(
    weights: list[Tensor],
    outer: list[Tensor],
    momenta: list[Tensor],
    lr: float,
    momentum: float,
    optimizer: torch.optim.Optimizer,
) -> list[Tensor]:
    """Meet: take the outer step, and let all ranks go on from the same weights. Changes tensors in
    place. Each rank calls this after some steps of its own.

    weights: this rank's, of all parameters; they need no gradients here
    outer: the outer copy of each, the same on all ranks
    momenta: the outer momentum of each, zeros at first, the same on all ranks
    lr, momentum: of the outer step, which goes from the outer copy towards the ranks' weights
    optimizer: this rank's own, an AdamW
    Returns the outer copy, the given list.
    """
    # >>>
    for local, copy, sums in zip(weights, outer, momenta):
        drift = copy - local
        dist.all_reduce(drift)
        drift /= dist.get_world_size()
        sums.mul_(momentum).add_(drift)
        copy.sub_(lr * (drift + momentum * sums))
        local.copy_(copy)
    return outer
    # <<<


# Why: the drift is a gradient that took several steps to compute. It is sent once in H steps, so
# the link sees 1 / H of the bytes. The outer copy is what all have in common: without it nobody
# knows from where the others came. Momentum adds up what all agreed on, so it follows the mean. The
# moments of AdamW are about a rank's own gradients. Averaging them, too, would send three times as
# much; Douillard et al. 2023 (arXiv:2311.08105) tried it and saw no gain worth that.
#
# Questions: 1. Data parallelism: the mean of the drifts is then the learning rate times the mean
# gradient.
# 2. Of each rank its own weights, AdamW's moments and its place in the data; the outer copy and its
# momentum; and how many steps it is to the next meeting.
