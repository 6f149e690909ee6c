"""Where does the gradient die?

A GPU multiplies in 8 bits twice as fast as in 16. But 8 bits hold few numbers: e4m3 none above 448,
and none between 0 and 2^-9. Activations may lie above, gradients below. So a tensor is scaled by
its largest number before it is rounded, and a product is scaled back. Under tensor parallelism a
rank has only a part of a tensor, and has to ask for the largest number of the whole.

Read: the head of techniques/float8.py (the table of formats, and the recipe "tensorwise"), and the
documentation of torch.autograd.Function.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from techniques.float8 import E4M3, E5M2  # torch.float8_e4m3fn and torch.float8_e5m2


def product(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor) -> Tensor:
    """Return a bᵀ [m, n] of codes a [m, k] and b [n, k] in 8 bits, multiplied by their scales [].
    A GPU does this in one kernel, which is emulated here in float64."""
    return (a.double() * a_scale.double()) @ (b.double() * b_scale.double()).T


def float8_linear(x: Tensor, weight: Tensor) -> Tensor:
    """Return x @ weight.T [n, out], and let backward give x and weight their gradients. All three
    products are made by `product`, of codes in 8 bits.

    x [n, in / ranks], weight [out, in / ranks], in float64: this rank's columns of both. So each
        rank returns its part of a sum, which is not added up here. The gradient that backward is
        given is the same on all ranks.
    Codes are number * factor, clamped to the format's largest number, torch.finfo(format).max, and
        then cast: x and weight to E4M3, the gradient to E5M2.
    A tensor has one factor. It brings the largest absolute value of the whole tensor, over all
        ranks, to the format's largest number. The scale is 1 / factor. Both are in float32.
    A tensor of zeros stays one. Between forward and backward x takes one byte a number. The weight
        stays as it is, for the optimizer.
    """

    # >>>
    def rounded(tensor: Tensor, amax: Tensor, format: torch.dtype) -> tuple[Tensor, Tensor]:
        largest = torch.finfo(format).max
        factor = (largest / amax.clamp(min=2.0**-100)).float()
        codes = (tensor.float() * factor).clamp(-largest, largest).to(format)
        return codes, 1 / factor

    class Float8Linear(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight):
            amax = torch.stack([x.abs().max(), weight.abs().max()])
            dist.all_reduce(amax, dist.ReduceOp.MAX)
            x8, weight8 = rounded(x, amax[0], E4M3), rounded(weight, amax[1], E4M3)
            ctx.save_for_backward(*x8, *weight8)
            return product(*x8, *weight8)

        @staticmethod
        def backward(ctx, grad):
            x8, x_scale, weight8, weight_scale = ctx.saved_tensors
            grad8, grad_scale = rounded(grad, grad.abs().max(), E5M2)
            x_grad = product(grad8, grad_scale, weight8.T, weight_scale)
            weight_grad = product(grad8.T, grad_scale, x8.T, x_scale)
            return x_grad, weight_grad

    return Float8Linear.apply(x, weight)
    # <<<


# Why: a floating point format covers a range, and the scale moves a tensor into it. Without one,
# what is too small becomes 0, and what is too large stops at the largest number. The scale follows
# from the numbers of each step, so a tensor is read twice. Casts are hidden from autograd, which
# would cast the gradient back in 8 bits. A rank's own scale would be as exact, but then two ranks
# round otherwise than one. Tensors of zeros became NaN in torchao (#4713). Its Float8Linear saves x
# as it came, and leaves codes to the compiler (#1850; nanochat PR #531 saves them). Saved codes of
# weights are a copy of what FSDP gathers (torchao #562): the project makes them again in backward.
#
# Questions: 1. The rest ends at 0.45 of 448. What is 29 times smaller than that lies below 2^-6 and
# has fewer bits, and what is 460 times smaller becomes 0. rowwise keeps this to the outlier's row,
# mxfp8 to its block of 32.
# 2. One scale of a tensor can be taken out of both products. One of each token can be taken out of
# the product for x, and not out of that for the weight, which sums over tokens: it needs other
# scales, one for each column, and so other codes.
