"""What of AdamW must every rank hold?

AdamW keeps two moments of each weight: twice the memory of the weights. All ranks have the same
weights, and update them alike. So a rank may keep the moments of its share alone, update that, and
get the rest from the others: ZeRO-1. It sends no more than plain data parallelism.

Read: the head of techniques/zero1.py, and the documentation of reduce_scatter_tensor and
all_gather_into_tensor in torch.distributed.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

BETA1, BETA2, EPS = 0.9, 0.95, 1e-8


def adamw(
    weights: Tensor,
    grad: Tensor,
    first: Tensor,
    second: Tensor,
    lr: float,
    decay: float,
    count: int,
) -> None:
    """Update weights and both moments, in place, in AdamW's step `count` = 1, 2, ...

    All tensors have the same shape, of any kind. The moments are zeros before step 1.
    """
    first.lerp_(grad, 1 - BETA1)  # the running mean of gradients
    second.lerp_(grad**2, 1 - BETA2)  # and of their squares
    mean, square = first / (1 - BETA1**count), second / (1 - BETA2**count)
    weights *= 1 - lr * decay
    weights -= lr * mean / (square.sqrt() + EPS)


def sharded_adamw(groups: list[dict]) -> Callable[[float], None]:
    """Return step(lr), which updates all parameters by AdamW, alike on all ranks. Each rank calls
    this once, and then all ranks call step together.

    groups: as in torch.optim.AdamW, dicts with "params", a list, and their "weight_decay"
    Before each step, parameter.grad is the gradient of this rank's own sequences. The update is by
    the average over all ranks; parameter.grad stays as it was. Parameters have any shapes; some
    have fewer numbers than there are ranks. Between two steps, a rank keeps the two moments of
    1 / ranks of the weights, a little padding, and at most a copy of those weights.
    """
    # >>>
    rank, size = dist.get_rank(), dist.get_world_size()

    def padded(tensor: Tensor) -> Tensor:  # flat, with zeros up to a length that size divides
        return F.pad(tensor.detach().flatten(), (0, -tensor.numel() % size))

    parameters, moments, count = [], [], 0
    for group in groups:
        for parameter in group["params"]:
            share = len(padded(parameter)) // size
            parameters.append((parameter, group["weight_decay"]))
            moments.append(parameter.new_zeros(2, share))

    def step(lr: float) -> None:
        nonlocal count
        count += 1
        for (parameter, decay), (first, second) in zip(parameters, moments):
            grad = torch.empty_like(first)
            dist.reduce_scatter_tensor(grad, padded(parameter.grad))
            own = padded(parameter).chunk(size)[rank]
            adamw(own, grad / size, first, second, lr, decay, count)
            whole = own.new_empty(len(own) * size)
            dist.all_gather_into_tensor(whole, own)
            parameter.data.copy_(whole[: parameter.numel()].view_as(parameter))

    return step
    # <<<


# Why: AdamW updates each weight by its own gradient and moments, so any share can be updated alone.
# A reduce-scatter brings a rank its slice of the summed gradient, and after the update an
# all-gather completes the weights. These are the two halves of an all-reduce: nothing more is sent
# than by DDP. llm.c and DeepSpeed all-reduced all the same at first (llm.c PR #421, DeepSpeed
# #156), and PyTorch's ZeroRedundancyOptimizer broadcasts rank by rank (pytorch #69591). Where whole
# parameters are dealt out, one rank has the embedding, and some have nothing (ColossalAI #3953).
#
# Questions: 1. Gradients: reduce-scatter each as soon as it is there, and free the rest (ZeRO-2).
# Weights: gather each just before its use, and free it afterwards (ZeRO-3, FSDP).
# 2. All ranks after an all-reduce of one number, the sum of squares of a rank's slices: between the
# reduce-scatter and the update, which has to wait for it.
