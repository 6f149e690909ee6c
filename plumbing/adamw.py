"""AdamW with its two moments in bfloat16. A parameter then takes 12 bytes: weight 4, gradient 4,
moments 2 + 2. With float32 moments it takes 16.

torch's AdamW refuses moments of another dtype than the parameters' (torch 2.13), so this is a step
of our own. A moment changes by a share of 1 - beta in each step, and bfloat16 rounds to 1 in 256:
with beta 0.95 the changes are larger than the rounding, with 0.999 they would be lost.
"""

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from plumbing.shards import to_local

ELEMENTS_AT_A_TIME = 1 << 24  # updated together; in float32 their two moments take 128 MB


class BFloat16AdamW(torch.optim.Optimizer):
    """AdamW (Loshchilov and Hutter 2019, arXiv:1711.05101) as torch's, except that the moments are
    rounded to bfloat16 between steps. It computes in float32, for float64 parameters in float64.
    Each group has its own weight_decay.

    Raises ValueError for a beta above 0.99."""

    def __init__(self, params, lr: float, betas: tuple[float, float], eps: float = 1e-8):
        if max(betas) > 0.99:
            raise ValueError(f"betas {betas}: bfloat16 moments need betas of at most 0.99")
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps, weight_decay=0.0))

    @torch.no_grad()
    def step(self, closure=None) -> None:
        """Update all parameters that have a gradient. `closure`, for callers that pass None, is
        ignored."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)

    def _update(self, parameter: Tensor, group: dict) -> None:
        state = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), device=parameter.device)
            for name in ("exp_avg", "exp_avg_sq"):
                state[name] = torch.zeros_like(parameter, dtype=torch.bfloat16)
        state["step"] += 1
        # [n] each. What is written must be a view; the gradient may be a copy.
        written = parameter, state["exp_avg"], state["exp_avg_sq"]
        weight, mean, square = (to_local(tensor).view(-1) for tensor in written)
        gradient = to_local(parameter.grad).reshape(-1)
        # These change in every step. To read `step` as a number would wait for the GPU, and for
        # each new number `update` would be compiled again.
        step = state["step"].to(torch.promote_types(parameter.dtype, torch.float32))
        lr = torch.full_like(step, group["lr"])
        run = compiled_update() if parameter.device.type == "cuda" else update
        tensors = weight, gradient, mean, square
        for parts in zip(*(tensor.split(ELEMENTS_AT_A_TIME) for tensor in tensors)):
            run(*parts, step, lr, group["betas"], group["eps"], group["weight_decay"])


def update(
    weight: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    step: Tensor,
    lr: Tensor,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
) -> None:
    """Update a part of a parameter and of its moments in place, in the dtype of `step`."""
    beta1, beta2 = betas
    grad = grad.to(step.dtype)
    mean = exp_avg.to(step.dtype).lerp_(grad, 1 - beta1)
    square = exp_avg_sq.to(step.dtype).mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
    exp_avg.copy_(mean)
    exp_avg_sq.copy_(square)
    weight.mul_(1 - lr * weight_decay)
    denominator = (square / (1 - beta2**step)).sqrt_().add_(eps)
    weight.sub_((mean * (lr / (1 - beta1**step))).div_(denominator))


@functools.cache
def compiled_update() -> Callable:
    """Return `update` as one kernel, for any length: uncompiled it reads and writes several times
    as many bytes."""
    return torch.compile(update, dynamic=True)
