"""What does it cost to lend a slice?

Each rank keeps only some rows of every matrix. It borrows the others just before the matrix is
used, and gives them back at once: in forward, and once more in backward. So more is sent than by
DDP, and no whole matrix is kept from forward to backward.

Read: the documentation of torch.autograd.Function, then the docstring of `fsdp` in parallel.py.
"""

import torch
import torch.distributed as dist
from torch import Tensor


def sharded_linear(x: Tensor, rows: Tensor, out: int) -> Tensor:
    """Return x @ weight.T [n, out], and let backward give x and rows their gradients.

    x [n, in]: this rank's own
    rows: this rank's rows of weight [out, in], cut as weight.chunk(number of ranks) cuts: all have
        ceil(out / ranks) rows but the last ones, which may have fewer
    The gradient of rows is the sum over all ranks. The whole weight is not kept until backward.
    """
    # >>>
    size = dist.get_world_size()
    most = -(-out // size)  # rows that the first rank has; collectives want as many of each rank

    def borrow(rows: Tensor) -> Tensor:
        padded = torch.cat([rows, rows.new_zeros(most - len(rows), rows.shape[1])])
        weight = rows.new_empty(size * most, rows.shape[1])
        dist.all_gather_into_tensor(weight, padded)
        return weight[:out]

    class ShardedLinear(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, rows):
            ctx.save_for_backward(x, rows)
            return x @ borrow(rows).T

        @staticmethod
        def backward(ctx, grad):
            x, rows = ctx.saved_tensors
            x_grad = grad @ borrow(rows)
            weight_grad = rows.new_zeros(size * most, rows.shape[1])
            weight_grad[:out] = grad.T @ x
            rows_grad = rows.new_empty(most, rows.shape[1])
            dist.reduce_scatter_tensor(rows_grad, weight_grad)
            return x_grad, rows_grad[: len(rows)]

    return ShardedLinear.apply(x, rows)
    # <<<


# Why: what a Function saves lives until backward, so it saves the slice and not the matrix, and
# gathers twice. A reduce-scatter adds up and gives each rank its slice: an all-reduce would give
# all of the sum to everyone, at twice the price. With P bytes of matrices a rank takes part in
# all-gathers of 2 P and in a reduce-scatter of P, where DDP has an all-reduce of P, which counts
# twice: 1.5 times as much. The real FSDP gathers all matrices of a block in one call, and the next
# block's while this one computes.
#
# Questions: 1. AdamW treats each number by itself: a slice of the gradient, of the moments and of
# the weights is all that its update needs. A product needs the whole matrix.
# 2. The whole weights, which then are gathered once; or whole gradients, added up on the rank and
# reduce-scattered once. Both cost the memory that FSDP was to save.
