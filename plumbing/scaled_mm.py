"""Products in 8 bits on a GPU: which GPUs have them, and the memory layouts that they ask for."""

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK = 32  # neighbours that share a scale in mxfp8


def recipes_of(capability: tuple[int, int]) -> tuple[str, ...]:
    """Return the recipes of float8.py that NVIDIA's GPUs of a compute capability multiply: from Ada
    and Hopper on those without blocks; Blackwell's data center GPUs (10.x) all."""
    if capability < (8, 9):
        return ()
    return ("tensorwise", "rowwise", "mxfp8")[: 3 if capability[0] == 10 else 2]


@torch.compiler.assume_constant_result
def has_kernel(device: torch.device, dtype: torch.dtype, recipe: str) -> bool:
    """Return whether a device multiplies in 8 bits, with results in this dtype."""
    if device.type != "cuda" or dtype != torch.bfloat16 or torch.version.hip:
        return False
    return recipe in recipes_of(torch.cuda.get_device_capability(device))


def scaled_mm(
    a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, dtype: torch.dtype, fast: bool
) -> Tensor:
    """Return a bᵀ [m, n] of codes a [m, k] and b [n, k], with scales [], [m, 1] and [n, 1], or
    [m, k / BLOCK] and [n, k / BLOCK]. `fast`: sums may be less exact."""
    in_blocks = a_scale.ndim == 2 and a_scale.shape[1] > 1
    if in_blocks:
        a_scale, b_scale = in_tiles(a_scale), in_tiles(b_scale)
    elif b_scale.ndim:
        b_scale = b_scale.T.contiguous()
    left, right = a.contiguous(), b.contiguous().T  # row-major, column-major
    fast = fast and not in_blocks
    return torch._scaled_mm(left, right, a_scale, b_scale, out_dtype=dtype, use_fast_accum=fast)


def in_tiles(scale: Tensor) -> Tensor:
    """Return scales [m, k / BLOCK] in the order in which a GPU reads them (cuBLAS, "1D block
    scaling factors layout"): in e8m0, padded to tiles of 128 rows and 4 columns, tile by tile; in a
    tile first those of rows 0, 32, 64 and 96, then those of rows 1, 33, 65, 97."""
    m, blocks = scale.shape
    tiles = F.pad(scale, (0, -blocks % 4, 0, -m % 128)).unflatten(0, (-1, 4, 32))
    tiles = tiles.unflatten(3, (-1, 4)).permute(0, 3, 2, 1, 4)  # row, column; then 32, 4, 4
    return tiles.to(torch.float8_e8m0fnu).flatten()
