"""A backward in two parts: gradients of inputs now, those of weights later (pipeline.py)."""

import contextlib
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from model import Llama


class DeferrableLinear(torch.autograd.Function):
    """x @ weight.T, whose backward can leave the gradient of the weight for later."""

    products: list[Callable] | None = None  # where to, within `deferred`

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x)
        ctx.weight = weight  # itself: under checkpointing a saved tensor would be a copy
        return x @ weight.T

    @staticmethod
    def backward(ctx, grad):
        (x,), weight, products = ctx.saved_tensors, ctx.weight, DeferrableLinear.products
        if products is None:
            return grad @ weight, grad.flatten(0, 1).T @ x.flatten(0, 1)
        products.append(partial(add_gradient, weight, grad, x))
        return grad @ weight, None


@torch.no_grad()
def add_gradient(weight: Tensor, grad: Tensor, x: Tensor) -> None:
    new = grad.flatten(0, 1).T @ x.flatten(0, 1)
    if isinstance(new, DTensor):
        new = new.redistribute(placements=weight.placements)
    weight.grad = new if weight.grad is None else weight.grad + new


@contextlib.contextmanager
def deferred(products: dict[tuple, list], key: tuple) -> Iterator[None]:
    """Within this context, backward leaves gradients of matrices in products[key]."""
    DeferrableLinear.products = products.setdefault(key, [])
    yield
    DeferrableLinear.products = None


def make_deferrable(model: Llama) -> None:
    """Let the blocks' matrices leave their gradients for W. All else, such as norms and adapters,
    is cheap, and gets its gradients in B."""
    for block in model.layers.values():
        for module in block.modules():
            if type(module) is nn.Linear and module.weight.requires_grad:
                module.forward = partial(_deferrable_forward, module)


def _deferrable_forward(module: nn.Linear, x: Tensor) -> Tensor:
    return DeferrableLinear.apply(x, module.weight)
