"""Columns first or rows first?

In tensor parallelism all ranks see the same tokens, and each keeps a part of every matrix. Here the
matrices are those of a feed-forward block: x -> (silu(x @ w1.T) * (x @ w3.T)) @ w2.T. They can be
cut in two directions, and both give the right numbers. But one needs a single sum over ranks in
forward, and the other needs several, of wider tensors. And backward needs a sum of its own.

Read: the picture in `tensor_parallel` of parallel.py, and the documentation of
torch.autograd.Function.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor


def summed(tensor: Tensor) -> Tensor:
    """Return the sum of a tensor over all ranks. It is new: autograd may still need the old one."""
    total = tensor.clone()
    dist.all_reduce(total)
    return total


def feed_forward() -> tuple[Callable, Callable]:
    """Return two functions, shard and forward. Each rank calls this once.

    shard(w1 [F, D], w2 [D, F], w3 [F, D]) -> a list of the tensors that this rank keeps, with at
        most 3 * D * ceil(F / ranks) elements. Each element of the matrices is on exactly one
        rank. The number of ranks need not divide F.
    forward(x [N, D], *kept) -> (silu(x @ w1.T) * (x @ w3.T)) @ w2.T [N, D], on every rank
    x is the same on all ranks, and so is the gradient of the output. x is also used after the
    block, by the residual connection: the check compares gradients of x + forward(x, *kept).
    Backward gives x its whole gradient on every rank, and each kept tensor the gradient of its
    elements.
    """
    raise NotImplementedError("about 29 lines")
