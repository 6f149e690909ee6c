"""NF4: a frozen matrix in 4 bits a weight (QLoRA, Dettmers et al. 2023, arXiv:2305.14314).

The weights of a trained matrix are about normally distributed, so the 16 values that 4 bits can
name are quantiles of the normal distribution: close together around 0, where most weights are, and
scaled to [-1, 1]. A row of the matrix is cut into blocks of 64 weights. Each block has a scale, so
that an outlier spoils mostly its own block:

    weight = NF4[code] * (scale of the block) * (scale of the row)
             4 bits       8 bits a block         32 bits a row

    weight     [out, in / 64, 33] uint8. Of a block: its scale, then 64 codes, two in a byte, the
               first in its high half
    row_scale  [out, 4] uint8, the bytes of one float32 a row

That is 4 + 8 / 64 + 32 / in bits a weight: 4.13 at in = 4096. The scale of a block is an integer,
1 to 255: times the scale of the row it is about the largest absolute value of the block.
bitsandbytes compresses scales with numbers of other rows. Here a row is whole in itself, so that
FSDP and column-parallel layers cut between rows, and row-parallel ones between blocks. All of it is
bytes, because FSDP in bfloat16 would round a scale in float32. Left out is bitsandbytes' kernel
that multiplies by codes (gemm_4bit): here each use writes the whole matrix, and reads it again.

Precision: the error of normally distributed weights is 9 % of their root mean square, as large as
with bitsandbytes.
"""

import functools
import itertools
from collections.abc import Iterator

import torch
from torch import Tensor

from model import LlamaConfig
from plumbing.devices import has_triton
from plumbing.messages import UserError
from techniques.technique import PRODUCTS, Technique

BLOCK = 64
# fmt: off
NF4 = (-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
       -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
       0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941,
       0.7229568362236023, 1.0)
# fmt: on
PAIRS = list(itertools.product(NF4, NF4))  # what each byte of two codes stands for
WEIGHTS_AT_ONCE = 1 << 20  # weights that are converted at a time: a CPU's caches hold them
ON_A_GPU = 1 << 26  # the same on a GPU, where fewer and larger kernels are faster


def packed_shape(out: int, width: int) -> tuple[int, int, int]:
    """Return the shape of `weight` for a matrix [out, width]."""
    if width % BLOCK:
        raise UserError(
            f"4 bits need rows of a multiple of {BLOCK} weights, not {width}: leave 4 bits out"
        )
    return out, width // BLOCK, 1 + BLOCK // 2


def quantized(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Return (weight, row_scale) of a matrix [out, in]: the nearest of the 16 values to each
    (labs/nf4 writes it with a scale in float32 for each block)."""
    out, width = matrix.shape
    weight = matrix.new_empty(packed_shape(out, width), dtype=torch.uint8)
    row_scale = matrix.new_empty(out, 1, dtype=torch.float32)
    values = torch.tensor(NF4, device=matrix.device)
    middles = (values[:-1] + values[1:]) / 2
    steps = values.new_full((), 255)  # a tensor: by a number, GPUs divide less exactly than CPUs
    for rows, packed, scale in some_rows(width, matrix, weight, row_scale):
        blocks = rows.float().unflatten(1, (-1, BLOCK))  # [rows, in / 64, 64]
        largest = blocks.abs().amax(-1)  # [rows, in / 64]
        # These views fill row_scale and weight. A row of zeros has a scale too: 0 / scale is 0.
        scale.copy_(largest.amax(1, keepdim=True) / steps).clamp_(min=1e-30)
        packed[..., 0] = (largest / scale).round().clamp(1, 255)
        blocks = blocks / (packed[..., :1] * scale[..., None])
        codes = torch.bucketize(blocks, middles, out_int32=True)
        high = codes[..., ::2]
        low = codes[..., 1::2]
        packed[..., 1:] = high * 16 + low
    return weight, row_scale.view(torch.uint8)


def some_rows(width: int, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield the tensors, whose rows belong together, some rows at a time, to take little memory."""
    at_once = ON_A_GPU if tensors[0].is_cuda else WEIGHTS_AT_ONCE
    n = max(1, at_once // width)
    yield from zip(*[tensor.split(n) for tensor in tensors])


@torch.library.custom_op("flatllama::dequantized", mutates_args=())
def dequantized(weight: Tensor, row_scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the matrix [out, in] that (weight, row_scale) stand for.

    A single operator: a compiler that saw inside could save its result for backward."""
    if has_triton(weight.device):
        return _compiled_values()(weight, row_scale, dtype)
    matrix = weight.new_empty(len(weight), weight.shape[1] * BLOCK, dtype=dtype)
    for rows, packed, scale in some_rows(matrix.shape[1], matrix, weight, row_scale):
        rows.copy_(_values(packed, scale, dtype))
    return matrix


@dequantized.register_fake
def _(weight, row_scale, dtype):
    return weight.new_empty(weight.shape[0], weight.shape[1] * BLOCK, dtype=dtype)


@torch.library.custom_op("flatllama::product_in_4_bits", mutates_args=())
def product_in_4_bits(x: Tensor, weight: Tensor, row_scale: Tensor) -> Tensor:
    """Return x Wᵀ [n, out], for x [n, in] and the matrix W that (weight, row_scale) stand for.

    A single operator, which checkpointing saves or recomputes as a whole. A compiler that saw
    inside, as it does with a torch.autograd.Function, would save the matrix for backward."""
    return x @ dequantized(weight, row_scale, x.dtype).T


@product_in_4_bits.register_fake
def _(x, weight, row_scale):
    return x.new_empty(x.shape[0], weight.shape[0])


def _save_for_backward(ctx, inputs, output):
    _, *stored = inputs
    ctx.save_for_backward(*stored)


def _backward(ctx, grad):
    return grad @ dequantized(*ctx.saved_tensors, grad.dtype), None, None


product_in_4_bits.register_autograd(_backward, setup_context=_save_for_backward)
PRODUCTS.add("product_in_4_bits")


def _values(weight: Tensor, row_scale: Tensor, dtype: torch.dtype) -> Tensor:
    pairs = torch.tensor(PAIRS, device=weight.device)
    scale = weight[..., 0] * row_scale.view(torch.float32)  # [out, in / 64]
    codes = weight[..., 1:].flatten().int()
    values = pairs.index_select(0, codes).view(*scale.shape, BLOCK)  # two for each byte
    return (values * scale[..., None]).flatten(1).to(dtype)


@functools.cache
def _compiled_values():
    """With Triton, one kernel that reads 0.5 bytes a weight and writes 2."""
    return torch.compile(_values, dynamic=True)


def rounded(matrix: Tensor) -> Tensor:
    """Return what is left of a matrix in 4 bits, in its dtype."""
    return dequantized(*quantized(matrix), matrix.dtype)


def why_not_in_4_bits(config: LlamaConfig, tp: int = 1) -> str:
    """Return why the matrices cannot be cut into blocks, on each of tp ranks; "" if they can."""
    # Of wo and w2 each rank has some columns, of other matrices whole rows (see packed_shape).
    for what, width in (("a row of wo has", config.q_dim), ("--ffn-dim is", config.ffn_dim)):
        if width % (BLOCK * tp):
            smaller_tp = "a smaller --tp, or " if tp > 1 else ""
            return (
                f"--base-bits 4 needs blocks of {BLOCK} weights for each of {tp} rank(s) along tp, "
                f"and {what} {width}: give {smaller_tp}--base-bits 16"
            )
    return ""


def refuses(work) -> str:
    parallel = work.parallel
    is_fsdp = parallel.dp != "auto" and parallel.strategy.uses_fsdp
    # torch compares its version by numbers, not as text.
    if is_fsdp and parallel.reshard != "adapters" and torch.__version__ < "2.13":
        return (
            f"torch {torch.__version__} cannot shard a base in 4 bits: use --dp ddp, --reshard "
            f"adapters, or torch 2.13"
        )
    return why_not_in_4_bits(work.model.config, parallel.tp)


TECHNIQUE = Technique("", refuses=refuses)  # lora.add_adapters changes the model
