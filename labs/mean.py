"""Whose mean is it?

The loss of a step is the mean over all of its targets. But each rank knows only the sum over its
own, and ranks have different numbers of them. Turn what the ranks have into what one process would
have.

Read: `update` in train.py does it for all strategies.
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
    raise NotImplementedError("about 9 lines")
