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

ELEMENTS_AT_A_TIME = 1 << 24  # updated together on a CPU; what is in float32 takes some 256 MB


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
            state["step"] = torch.zeros(())
            state["exp_avg"] = torch.zeros_like(parameter, dtype=torch.bfloat16)
            state["exp_avg_sq"] = torch.zeros_like(parameter, dtype=torch.bfloat16)
        state["step"] += 1
        # [n] each. What is written must be a view; the gradient may be a copy.
        written = parameter, state["exp_avg"], state["exp_avg_sq"]
        weight, mean, square = (to_local(tensor).view(-1) for tensor in written)
        gradient = to_local(parameter.grad).reshape(-1)
        # Numbers that change in every step: tensors, so that nothing is compiled anew, and on the
        # CPU, where reading them waits for nothing.
        (beta1, beta2), lr, step = group["betas"], group["lr"], state["step"].double()
        keep = torch.full_like(step, 1 - lr * group["weight_decay"])
        numbers = lr / (1 - beta1**step), 1 - beta2**step, keep
        on_gpu = weight.device.type == "cuda"
        update = make_update(beta1, beta2, group["eps"], compiled=on_gpu)
        size = max(1, len(weight)) if on_gpu else ELEMENTS_AT_A_TIME
        for parts in zip(*(tensor.split(size) for tensor in (weight, gradient, mean, square))):
            update(*parts, *numbers)


@functools.cache
def make_update(beta1: float, beta2: float, eps: float, compiled: bool) -> Callable[..., None]:
    """Return a function that updates a part of a parameter and of its moments in place. Compiled it
    is one kernel; uncompiled it reads and writes several times as many bytes."""

    def update(weight, grad, exp_avg, exp_avg_sq, rate, correction, keep):
        dtype = torch.promote_types(weight.dtype, torch.float32)
        grad = grad.to(dtype)
        mean = exp_avg.to(dtype).lerp_(grad, 1 - beta1)
        square = exp_avg_sq.to(dtype).mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        exp_avg.copy_(mean)
        exp_avg_sq.copy_(square)
        denominator = (square / correction).sqrt_().add_(eps)
        weight.mul_(keep).sub_((mean * rate).div_(denominator))

    return torch.compile(update, dynamic=True) if compiled else update
