"""A backward in two parts: gradients of inputs now, those of weights later (pipeline.py).

Autograd computes both gradients of a matrix product in one node. So the products of a block become
nodes of our own: within `leave_for_later` their backward computes the gradient of the input alone,
and leaves a function that will compute that of the weight and add it.
"""

import contextlib
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from model import Llama


class DeferrableLinear(torch.autograd.Function):
    """x @ weight.T, x [..., in], whose backward can leave the gradient of the weight for later."""

    later: list[Callable] | None = None  # receives what is left for later, within leave_for_later

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x)
        ctx.weight = weight  # itself, to set its .grad: checkpointing would give back a copy
        return x @ weight.T

    @staticmethod
    def backward(ctx, grad):
        (x,), weight, later = ctx.saved_tensors, ctx.weight, DeferrableLinear.later
        if later is None:
            return grad @ weight, grad.flatten(0, -2).T @ x.flatten(0, -2)
        later.append(partial(add_gradient, weight, grad, x))
        return grad @ weight, None


@torch.no_grad()
def add_gradient(weight: Tensor, grad: Tensor, x: Tensor) -> None:
    new = grad.flatten(0, -2).T @ x.flatten(0, -2)
    if isinstance(new, DTensor):
        new = new.redistribute(placements=weight.placements)
    weight.grad = new if weight.grad is None else weight.grad.add_(new)


@contextlib.contextmanager
def leave_for_later(deferred: dict[tuple, list], key: tuple) -> Iterator[None]:
    """Within this context, backward leaves gradients of matrices as functions in deferred[key]."""
    DeferrableLinear.later = deferred.setdefault(key, [])
    try:
        yield
    finally:
        DeferrableLinear.later = None


def make_deferrable(model: Llama) -> None:
    """Let the blocks' matrices leave their gradients for W. All else, such as norms, adapters and
    layers with a bias, gets its gradients in B."""
    for block in model.layers.values():
        for module in block.modules():
            is_matrix = type(module) is nn.Linear and module.bias is None
            if is_matrix and module.weight.requires_grad:
                module.forward = partial(_deferrable_forward, module)


def _deferrable_forward(module: nn.Linear, x: Tensor) -> Tensor:
    return DeferrableLinear.apply(x, module.weight)
