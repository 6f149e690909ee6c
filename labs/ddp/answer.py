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
    # >>>
    pending = []

    def send(parameter: Tensor) -> None:
        work = dist.all_reduce(parameter.grad, async_op=True)
        pending.append((parameter, work))

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(send)

    def finish() -> None:
        for parameter, work in pending:
            work.wait()
            parameter.grad /= dist.get_world_size()
        pending.clear()

    return finish
    # <<<


# Why: the hook runs when a parameter's gradient is complete, long before backward ends, and on all
# ranks in the same order. async_op=True returns at once, so that backward goes on while the
# gradient travels. Each all-reduce has to be waited for before the optimizer uses its result. The
# real DDP does the same with buckets of 25 MB, since many small messages are slow.
# model.parameters() has a tied matrix once, whose gradient is complete after its last use.
#
# Questions: 1. After the last of its two uses in backward, which is the embedding, the first layer:
# so it leaves last.
# 2. Its hook does not run, so this rank sends nothing for it: the others wait for ever, or their
# sum meets that of another parameter. All ranks must send alike, a rank without a gradient zeros.
