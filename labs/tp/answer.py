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
        rank. The number of ranks need not divide F, and F may be smaller.
    forward(x [N, D], *kept) -> (silu(x @ w1.T) * (x @ w3.T)) @ w2.T [N, D], on every rank
    x is the same on all ranks, and so is the gradient of the output. x is also used after the
    block, by the residual connection: the check compares gradients of x + forward(x, *kept).
    Backward gives x its whole gradient on every rank, and each kept tensor the gradient of its
    elements.
    """
    # >>>
    rank, size = dist.get_rank(), dist.get_world_size()

    class SumInBackward(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.view_as(x)

        @staticmethod
        def backward(ctx, grad):
            return summed(grad)

    class SumInForward(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return summed(x)

        @staticmethod
        def backward(ctx, grad):
            return grad

    def shard(w1: Tensor, w2: Tensor, w3: Tensor) -> list[Tensor]:
        return [w.tensor_split(size, dim)[rank].clone() for w, dim in ((w1, 0), (w2, 1), (w3, 0))]

    def forward(x: Tensor, w1: Tensor, w2: Tensor, w3: Tensor) -> Tensor:
        x = SumInBackward.apply(x)
        hidden = F.silu(x @ w1.T) * (x @ w3.T)
        return SumInForward.apply(hidden @ w2.T)

    return shard, forward
    # <<<


# Why: silu(a + b) is not silu(a) + silu(b), so silu needs whole sums, and no partial ones. A rank
# has them for its own features if w1 and w3 are cut by output features: these are rows of w1, and
# columns of the product. The rank's columns of w2 multiply just these features, and one sum of
# [N, D] is left. In backward that sum passes its gradient on, which every rank has already
# (Megatron-LM #559 asks why). But all ranks used x, so backward has to sum the gradient of x: in
# torchtitan #1805 it did not, in AReno PR #496 it did so twice. Where gate and up are one matrix,
# each half has to be cut by itself (tt-forge-models PR #855, xLLM PR #1616).
#
# Questions: 1. Each rank has the whole gradient of the sum already, and that is the gradient of
# each summand, too. To sum it once more would multiply it by the number of ranks.
# 2. wq, wk and wv by columns, wo by rows, as w1 and w2. A head plays the part of a hidden feature,
# because the softmax needs whole heads, and no other heads.
