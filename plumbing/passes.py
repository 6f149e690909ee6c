"""RMSNorm and RoPE in few passes over memory, for a CPU that runs them uncompiled.

Between matrix products, time goes into reading and writing: an operator on [B, T, D] is a pass over
memory, however little it computes. On a CPU, torch's RMSNorm makes 4 such passes in forward and 11
in backward, and RoPE written with cosines 7 and 8, over half of x each. Here the norm makes 3 and
8, half of them in place, and RoPE one in each direction: a complex product. In bfloat16 each has
two or three more, to compute in float32.
"""

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable


def torch_fuses(x: Tensor) -> bool:
    """Return whether to use torch's own operators: torch.compile, the default on a GPU, makes one
    kernel of what lies between matrix products."""
    return x.is_cuda or torch.compiler.is_compiling()


class RMSNorm(nn.RMSNorm):
    """x / sqrt(mean(x²) + eps) * weight, with the mean over a token's D features (Zhang and
    Sennrich 2019, arXiv:1910.07467). Computes in float32 or float64. Unlike nn.RMSNorm, it always
    has a weight and an eps, and normalizes the last dimension."""

    def forward(self, x):  # [..., D] -> same shape
        if torch_fuses(x):
            return super().forward(x)
        return _RMSNorm.apply(x, self.weight, self.eps)


class _RMSNorm(torch.autograd.Function):
    """Saves x itself. With r = 1 / sqrt(mean(x²) + eps) and z = x r, the result is z w. If h is its
    gradient, that of w is the sum of h z over all tokens, that of z is g = h w, and that of x is
    r (g - z mean(g z))."""

    @staticmethod
    def forward(ctx, x, weight, eps):
        x32 = in_float(x)
        r = torch.linalg.vector_norm(x32, dim=-1, keepdim=True)  # [..., 1]; one pass over x
        r = r.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, r)
        return (x32 * r).mul_(weight).type_as(x)

    @staticmethod
    @once_differentiable  # r has no graph
    def backward(ctx, grad):
        saved, weight, r = ctx.saved_tensors
        x, grad = in_float(saved), in_float(grad)
        product = (grad * x).mul_(r)  # h z: the gradient of the weight, for each token
        weight_grad = None
        if ctx.needs_input_grad[1]:  # the weight is not frozen
            weight_grad = product.reshape(-1, len(weight)).sum(0).type_as(weight)
        mean = product.mul_(weight).mean(-1, keepdim=True)  # of g z
        x_grad = (grad * weight).addcmul_(x, mean * r, value=-1).mul_(r)
        return x_grad.type_as(saved), weight_grad, None


class Rotation(torch.autograd.Function):
    """RoPE by complex numbers: a pair of features times cos + i sin. Backward rotates back."""

    @staticmethod
    def forward(ctx, x, cos, sin):
        ctx.save_for_backward(cos, sin)
        return _rotated(x, cos, sin)

    @staticmethod
    def backward(ctx, grad):
        cos, sin = ctx.saved_tensors
        return _rotated(grad, cos, -sin), None, None


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    pairs = torch.view_as_complex(in_float(x).contiguous().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * torch.complex(cos, sin)).flatten(-2).type_as(x)


def in_float(x: Tensor) -> Tensor:
    """Return x in float32, or in float64 where it is."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
