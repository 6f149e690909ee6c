"""AdamW with moments in bfloat16: --moments bfloat16.

                       weight   gradient   moments   bytes a parameter
    --moments float32       4          4     4 + 4                  16
    --moments bfloat16      4          4     2 + 2                  12

torch's AdamW refuses moments of another dtype than the parameters' (torch 2.13), so this is a step
of our own. In a step a moment changes by a fraction 1 - beta. bfloat16 rounds to 1 part in 256:
changes with beta 0.95 are larger than that, but with 0.999 they would be lost.
Use when weights, gradients and moments nearly fit. Avoid when they fit with --moments float32, and
with a beta of 0.999.
torchao's AdamW has moments in 8 and 4 bits, with a scale for each block of them.
"""

import functools
from collections import defaultdict
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from plumbing.devices import has_triton
from plumbing.shards import to_local

ELEMENTS_AT_A_TIME = 1 << 18  # so many of a parameter fit in a CPU's cache


class BFloat16AdamW(torch.optim.Optimizer):
    """AdamW as in torch (Loshchilov and Hutter 2019, arXiv:1711.05101), but its moments are rounded
    to bfloat16 between steps. It computes in float32, for float64 parameters in float64.
    Each group has its own weight_decay. If `gradient_scale` is set before a step, the update
    multiplies gradients by it, which saves reading and writing them once more.

    Raises ValueError for a beta above 0.99."""

    def __init__(self, params, lr: float, betas: tuple[float, float], eps: float = 1e-8):
        if max(betas) > 0.99:
            raise ValueError(f"betas {betas}: bfloat16 moments need betas of at most 0.99")
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps, weight_decay=0.0))
        self.gradient_scale: Tensor | None = None

    @torch.no_grad()
    def step(self, closure=None) -> None:
        """Update all parameters that have a gradient. Those of a group have to have taken the same
        number of steps. `closure` is ignored; it is there for callers that pass None."""
        batches = defaultdict(list)  # of parameters: of each block, and of all outside of blocks
        for group in self.param_groups:
            names = group.get("param_names", [""] * len(group["params"]))
            settings = (*group["betas"], group["eps"])
            factors = None
            for name, parameter in zip(names, group["params"]):
                if parameter.grad is None:
                    continue
                tensors, step = self.advance(parameter)
                factors = factors or factors_of_step(group, step)
                # torch 2.11 cannot compile an update of one element.
                compiled = len(tensors[0]) > 1 and has_triton(tensors[0].device)
                block = name.split(".")[1] if name.startswith("layers.") else ""
                batches[settings, compiled, block].append((*tensors, *factors))
        for (settings, compiled, _), batch in batches.items():
            update = make_update(*settings, compiled)
            update(batch, self.gradient_scale)
        self.gradient_scale = None

    def advance(self, parameter: Tensor) -> tuple[tuple[Tensor, ...], Tensor]:
        """Count a step. Return the parameter, its gradient and its moments, each flattened to [n],
        and the number of steps. The update writes to views of all but the gradient, which may
        therefore be a copy."""
        state = self.state[parameter]
        if not state:
            state["step"] = torch.zeros(())
            state["exp_avg"] = torch.zeros_like(parameter, dtype=torch.bfloat16)
            state["exp_avg_sq"] = torch.zeros_like(parameter, dtype=torch.bfloat16)
        state["step"] += 1
        weight = to_local(parameter).view(-1)
        gradient = to_local(parameter.grad).reshape(-1)
        mean = to_local(state["exp_avg"]).view(-1)
        square = to_local(state["exp_avg_sq"]).view(-1)
        return (weight, gradient, mean, square), state["step"].double()


class Factors(NamedTuple):
    """What changes from step to step. Tensors, since Python numbers would be compiled in. They stay
    on the CPU: reading does not wait there."""

    rate: Tensor  # the learning rate divided by the correction of the first moment
    correction: Tensor  # of the second moment
    keep: Tensor  # the factor of weight decay


def factors_of_step(group: dict, step: Tensor) -> Factors:
    beta1, beta2 = group["betas"]
    keep = 1 - group["lr"] * group["weight_decay"]
    return Factors(
        rate=group["lr"] / (1 - beta1**step),
        correction=1 - beta2**step,
        keep=torch.full_like(step, keep),
    )


@functools.cache
def make_update(beta1: float, beta2: float, eps: float, compiled: bool) -> Callable[..., None]:
    """Return a function that updates parameters and their moments in place. Compiled, it runs one
    kernel for each parameter, which reads and writes 20 bytes a weight. Uncompiled, it reads and
    writes several times as many bytes. It is compiled for fixed shapes, since a kernel for any
    length reads its elements one by one."""

    def update(weight, grad, exp_avg, exp_avg_sq, rate, correction, keep, scale):
        dtype = torch.promote_types(weight.dtype, torch.float32)
        grad = grad.to(dtype)
        if scale is not None:
            grad = grad * scale
        mean = exp_avg.to(dtype).lerp_(grad, 1 - beta1)
        square = exp_avg_sq.to(dtype).mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        exp_avg.copy_(mean)
        exp_avg_sq.copy_(square)
        denominator = (square / correction).sqrt_().add_(eps)
        weight.mul_(keep).sub_((mean * rate).div_(denominator))

    def update_whole(parameters, scale):
        for tensors_and_factors in parameters:
            update(*tensors_and_factors, scale)

    def update_parts(parameters, scale):
        for *tensors, rate, correction, keep in parameters:
            split = [tensor.split(ELEMENTS_AT_A_TIME) for tensor in tensors]
            for parts in zip(*split):
                update(*parts, rate, correction, keep, scale)

    return torch.compile(update_whole, dynamic=False) if compiled else update_parts
