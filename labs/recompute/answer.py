"""How often does attention run?

Backward needs what forward computed. A block saves all of that, until its backward has used it: for
long sequences this is most of the memory. Recomputation saves only what goes into the block, and in
backward runs the block's forward once more.

Read: the head of techniques/recompute.py, and the documentation of torch.autograd.Function.
Write it without torch.utils.checkpoint.
"""

from collections.abc import Callable

import torch
from torch import Tensor


def recompute(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a function with the results and gradients of `forward` that saves only its inputs.

    forward(x, *others) is that of a block: x [B, T, D] and the parameters need gradients, the
    others (rotation, mask; some are None) do not. It may use random numbers, as dropout does, from
    torch's generator: torch.get_rng_state, torch.set_rng_state.
    """

    # >>>
    class Recompute(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, *others):
            ctx.save_for_backward(x)
            ctx.others, ctx.rng_state = others, torch.get_rng_state()
            return forward(x, *others)

        @staticmethod
        def backward(ctx, grad):
            (x,) = ctx.saved_tensors
            x = x.detach().requires_grad_()
            now = torch.get_rng_state()
            torch.set_rng_state(ctx.rng_state)
            with torch.enable_grad():
                out = forward(x, *ctx.others)
            torch.set_rng_state(now)
            torch.autograd.backward(out, grad)  # adds to the gradients of parameters, too
            return x.grad, *(None for _ in ctx.others)

    return Recompute.apply
    # <<<


# Why: inside an autograd.Function nothing is recorded, so forward saves what it is told to save. In
# backward the same forward runs again, now recorded, from the same inputs and the same random
# numbers. A checkpoint around a block that has one already runs attention three times
# (llama-cookbook #740).
#
# Questions: 1. Forward saves still less, and takes as long. But backward first computes all blocks
# again, and what they all save exists at once: the peak is as without checkpoints.
# 2. Not under FSDP, whose backward gathers the weights anyway. Under tensor parallelism it repeats
# collectives of forward.
