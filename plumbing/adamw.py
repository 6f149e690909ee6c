"""AdamW with its two moments in bfloat16: 12 bytes a parameter, where float32 takes 16.

torch's AdamW refuses moments of another dtype than the parameters' (torch 2.13), so this is a step
of our own. A moment changes by a share of 1 - beta in each step, and bfloat16 rounds to 1 in 256:
with beta 0.95 the changes are larger than the rounding, with 0.999 they would be lost.
"""

import torch
from torch import Tensor

from plumbing.shards import to_local

ELEMENTS_AT_A_TIME = 1 << 24  # converted to float32; their two moments take 128 MB


class BFloat16AdamW(torch.optim.Optimizer):
    """AdamW (Loshchilov and Hutter 2019, arXiv:1711.05101) as torch's, except that the moments are
    rounded to bfloat16 between steps. It computes in float32, or float64 for such parameters.

    Raises ValueError for a beta above 0.99."""

    def __init__(self, params, lr: float, betas: tuple[float, float], eps: float = 1e-8):
        if max(betas) > 0.99:
            raise ValueError(f"betas {betas}: bfloat16 moments need betas of at most 0.99")
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps, weight_decay=0.0))

    @torch.no_grad()
    def step(self, closure=None) -> None:
        """Update all parameters that have a gradient. `closure` is there for callers that pass None
        to any optimizer."""
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
        (beta1, beta2), lr = group["betas"], group["lr"]
        # Tensors, since a Python number would wait for the GPU.
        step = state["step"].to(torch.promote_types(parameter.dtype, torch.float32))
        unbias1, unbias2 = 1 - beta1**step, 1 - beta2**step
        tensors = (parameter, parameter.grad, state["exp_avg"], state["exp_avg_sq"])
        tensors = [to_local(tensor) for tensor in tensors]
        rows = max(1, ELEMENTS_AT_A_TIME * len(tensors[0]) // max(1, tensors[0].numel()))
        for weight, grad, exp_avg, exp_avg_sq in zip(*(t.split(rows) for t in tensors)):
            grad = grad.to(step.dtype)
            mean = exp_avg.to(step.dtype).lerp_(grad, 1 - beta1)
            square = exp_avg_sq.to(step.dtype).mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
            exp_avg.copy_(mean)
            exp_avg_sq.copy_(square)
            weight.mul_(1 - lr * group["weight_decay"])
            denominator = (square / unbias2).sqrt_().add_(group["eps"])
            weight.sub_((mean * (lr / unbias1)).div_(denominator))
