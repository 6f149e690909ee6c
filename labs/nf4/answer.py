"""Which sixteen numbers stand for a matrix?

A frozen matrix is only read, so it may lie in memory in 4 bits a weight: an eighth of float32. With
4 bits one can name 16 numbers. NF4, QLoRA's format, takes them from the normal distribution, as
weights are: close together around 0. They reach from -1 to 1, so blocks of weights have scales. The
matrix itself is there only while it is multiplied, in forward and once more in backward.

Read: the head of techniques/nf4.py, the docstring of `LoRALinear` in lora.py, and the documentation
of torch.bucketize.
"""

from collections.abc import Callable

import torch
from torch import Tensor

BLOCK = 64  # weights that share a scale
# fmt: off
NF4 = (-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
       -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
       0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941,
       0.7229568362236023, 1.0)
# fmt: on


def four_bits() -> tuple[Callable, Callable, Callable]:
    """Return three functions: quantize, dequantize and multiply.

    quantize(matrix [out, in]) -> (codes, scales): of a matrix in float32, whose `in` is a multiple
        of BLOCK. Each BLOCK neighbours of a row have one scale, float32 [out, in / BLOCK]: their
        largest absolute value. The code of a weight is the place in NF4, from 0 to 15, of the
        number that is nearest to weight / scale. A block of zeros has the scale 0, and its codes
        are the place of 0.0, which is 7. codes are uint8 [out, in / 2], two in a byte, of which the
        first is in the high half: first * 16 + second.
    dequantize(codes, scales, dtype) -> the matrix [out, in] that they stand for
    multiply(x [n, in], codes, scales) -> x @ matrix.T [n, out], in the dtype of x. Backward gives x
        its gradient. From forward to backward neither it nor x is kept.
    """
    # >>>
    values = torch.tensor(NF4)
    middles = (values[1:] + values[:-1]) / 2

    def quantize(matrix: Tensor) -> tuple[Tensor, Tensor]:
        blocks = matrix.unflatten(1, (-1, BLOCK))  # [out, in / 64, 64]
        scales = blocks.abs().amax(2)
        nonzero = scales.where(scales > 0, 1)[..., None]
        nearest = torch.bucketize(blocks / nonzero, middles).to(torch.uint8).flatten(1)
        return nearest[:, ::2] * 16 + nearest[:, 1::2], scales

    def dequantize(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
        places = torch.stack([codes >> 4, codes & 15], 2).flatten(1)  # [out, in]
        blocks = values[places.int()].unflatten(1, (-1, BLOCK))
        return (blocks * scales[..., None]).flatten(1).to(dtype)

    class Multiply(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, codes, scales):
            ctx.save_for_backward(codes, scales)
            return x @ dequantize(codes, scales, x.dtype).T

        @staticmethod
        def backward(ctx, grad):
            return grad @ dequantize(*ctx.saved_tensors, grad.dtype), None, None

    return quantize, dequantize, Multiply.apply
    # <<<


# Why: most weights of a block are small beside its largest, and there NF4 has its numbers. Evenly
# spaced ones lie where few weights are, and so err by more. (In blocks of 32 this turns around:
# bitsandbytes #2086.) A block confines an outlier, since no other block has its scale. Scales cost
# 32 / 64 bits a weight, 4.5 in all. techniques/nf4.py has 4.13, because it rounds scales to a byte
# and has one float32 a row. Autograd would save the matrix for the gradient of x, in every layer,
# and what 4 bits have saved would be lost, as in unsloth's experts (unsloth-zoo PR #838). A
# Function saves the codes. Two codes that share a byte once ruined large blocks in bitsandbytes
# (#565, PR #1721).
#
# Questions: 1. It rounds the scale of a block of 64 to an integer of 8 bits, 8/64 of a bit a
# weight, and has one float32 for each row, by which these are multiplied.
# 2. Of fewer weights the largest is less far out. So a scaled block fills the range more evenly
# than a normal distribution, and NF4 has few numbers near its ends.
