"""When may a gradient leave?

Ranks have the same weights and different sequences. Each needs the average of all ranks' gradients.
Backward computes the gradients of the last layer first: they can be sent while it is still busy
with the other layers.

Read: the documentation of Tensor.register_post_accumulate_grad_hook, and of async_op in
torch.distributed.
"""

from collections.abc import Callable

import torch.distributed as dist
from torch import Tensor, nn


def average_gradients(model: nn.Module) -> Callable[[], None]:
    """Let every backward of `model` send its gradients while it computes. Each rank calls this.

    Returns a function that is called after each backward. When it returns, each parameter.grad is
    the average over all ranks. All parameters of `model` get gradients.
    """
    raise NotImplementedError("about 16 lines")
