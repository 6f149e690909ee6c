"""Whose mean is it?

The loss of a step is the mean over all of its targets. But each rank knows only the sum over its
own, and ranks have different numbers of them. Turn what the ranks have into what one process would
have.

Read: the documentation of torch.distributed.all_reduce and of torch.nn.utils.clip_grad_norm_.
"""

import torch
import torch.distributed as dist
from torch import Tensor


def average(parameters: list[Tensor], loss: Tensor, targets: int, clip: float):
    """Make gradients of sums the gradient of the mean over the targets of all ranks, in place; then
    scale them down to the norm `clip` if theirs is larger. Each rank calls this.

    parameters: parameter.grad is the gradient of this rank's `loss`
    loss: 0-d, the sum of the losses of this rank's targets
    targets: their number
    Returns the mean loss over all ranks, and the norm of the gradient before it was clipped.
    """
    # >>>
    totals = torch.stack([loss.detach(), torch.tensor(float(targets), dtype=loss.dtype)])
    dist.all_reduce(totals)
    for parameter in parameters:
        dist.all_reduce(parameter.grad)
        parameter.grad /= totals[1]
    norm = torch.stack([parameter.grad.norm() for parameter in parameters]).norm()
    for parameter in parameters:
        parameter.grad *= min(1.0, clip / norm)
    return totals[0] / totals[1], norm
    # <<<


# Why: sums can be added up over ranks, whoever has the targets, before the one division. Means
# cannot: in the mean of two means a rank with few targets counts as much as one with many.
# transformers had this for ranks (#34242). With microbatches in place of ranks it is the same
# mistake, and was in transformers (#24725), torchtune (PR #1875) and mlx-lm (PR #1413). The norm of
# a step is that of the sum, so clipping comes last.
#
# Questions: 1. Yes, wherever parts have different numbers of targets. The perplexity is the
# exponential of the mean over all: a mean of exponentials is larger, even if the parts are equal.
# 2. Backward of the sum of losses; then multiply by the number of ranks and divide by the targets
# of all ranks.
