"""Float8: the three matrix products of a linear layer in 8 bits, which GPUs do twice as fast.

Which numbers 8 bits can hold, beside the 16 that training otherwise computes in (the smallest above
0; numbers at least 1 and below 2):

                sign  exponent  mantissa   largest   smallest   numbers in [1, 2)
    e4m3           1         4         3       448       2^-9                     8
    e5m2           1         5         2    57,344      2^-16                     4
    bfloat16       1         8         7    3.4e38     2^-133                   128

e4m3 is finer and is used for inputs and weights; e5m2 reaches farther and is used for gradients,
most of which are small beside their largest. Neither reaches as far as the numbers of a network,
so a tensor is divided by a scale before it is rounded, and the product is multiplied by the scales
of both. A scale brings the largest number to, or near, the largest that the format has. Rounding is
then off by up to 1/17 (e4m3) or 1/9 (e5m2) of a number; by more for those that are smaller than the
largest by a factor of 28,672 (e4m3) or 9e8 (e5m2), and the smallest become 0.

    y  = x Wᵀ    [n, out]    sums over in
    dx = g W     [n, in]     sums over out
    dW = gᵀ x    [out, in]   sums over the n tokens

    recipe       one scale for
    tensorwise   a tensor, which has the same codes in both of its products: the fastest
    rowwise      each row of the left and each column of the right operand: an outlier spoils no
                 other row. A tensor has other codes in each of its two products
    mxfp8        each 32 numbers in a row, of those that are summed; a power of two (e8m0). The
                 format of OCP's Microscaling specification. Its gradients are in e4m3

Scales follow the numbers of each product (dynamic scaling), so there is nothing to tune or to save:
weights stay float32 in AdamW and in checkpoints. In bfloat16 on a GPU that has them, products run
in 8 bits; elsewhere the rounded numbers are multiplied in float32, or in float64 in a float64
model, so that a laptop shows what 8 bits do to a gradient.

Under tensor parallelism a rank has a part of some tensors, but a scale is that of the whole: ranks
all-reduce the largest numbers over tp, two all-reduces a layer, so that they round as one process
does (mxfp8 needs none). With --async-tp, each chunk and each rank's part of a matrix has scales of
its own. Under FSDP, DDP and context parallelism, scales of inputs and gradients are those of a
rank's microbatch, as with accumulation in one process.

Use for models whose matrices are large, compiled: rounding is a pass over memory, which only large
products repay. Avoid where training already diverges. Embedding, output and norms stay as they are.
"""

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed._functional_collectives as collectives
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.experimental import local_map

from config import Work
from model import Llama
from plumbing.devices import cast_by_autocast
from plumbing.processes import UserError
from techniques.parallel_layers import writes_to_stream
from techniques.schedules import has_w
from techniques.technique import Technique

RECIPES = ("tensorwise", "rowwise", "mxfp8")
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
SMALLEST_AMAX = 2.0**-100  # with which the factor, up to 2^116, is still a float32
MULTIPLE = 16  # of which widths must be multiples, for the products of a GPU


# ------------------------------------------------------------------------------------ rounding


class Rounded(NamedTuple):
    """A matrix [m, k] in 8 bits. k is what a product sums over."""

    codes: Tensor  # [m, k] e4m3 or e5m2
    scale: Tensor  # what to multiply them by: [], [m, 1] or [m, k / BLOCK], float32

    @property
    def in_blocks(self) -> bool:
        return self.scale.ndim == 2 and self.scale.shape[1] > 1

    def numbers(self, dtype: torch.dtype) -> Tensor:
        """Return what the codes stand for."""
        codes, scale = self.codes.to(dtype), self.scale.to(dtype)
        if self.in_blocks:
            return (codes.unflatten(1, (-1, BLOCK)) * scale[..., None]).flatten(1)
        return codes * scale


def rounded(
    x: Tensor, format: torch.dtype, recipe: str, group=None, factor: Tensor | None = None
) -> Rounded:
    """Round a matrix [m, k] to 8 bits. `group`: ranks that have other parts of what a scale is for.
    `factor` is what factor_of returns, if that is known.

    Numbers are clamped to the format's largest: what is beyond would become infinite or NaN. A
    number that is not finite makes its row of the product not finite, tensorwise all of it."""
    if recipe == "mxfp8":
        return rounded_in_blocks(x, format)
    factor = factor_of(x, format, recipe, group) if factor is None else factor
    largest = torch.finfo(format).max
    return Rounded((x.float() * factor).clamp(-largest, largest).to(format), factor.reciprocal())


def factor_of(x: Tensor, format: torch.dtype, recipe: str, group=None) -> Tensor:
    """Return what brings the largest number of a tensor, or of each row, to the format's largest:
    float32 [] or [m, 1]."""
    amax = x.abs().amax() if recipe == "tensorwise" else x.abs().amax(1, keepdim=True)
    if group is not None:
        amax = collectives.wait_tensor(collectives.all_reduce(amax, "max", group))
    return (torch.finfo(format).max / amax.double().clamp(min=SMALLEST_AMAX)).float()


def rounded_in_blocks(x: Tensor, format: torch.dtype) -> Rounded:
    """The same with a power of two for each BLOCK of a row: the smallest with which no number is
    beyond the format's largest. Powers from 2^-127 to 2^127, as in e8m0."""
    if x.shape[1] % BLOCK:
        raise UserError(
            f"mxfp8 cannot sum over {x.shape[1]} numbers, which are no multiple of {BLOCK}: choose "
            f"--microbatch and --seq-len so that a microbatch has a multiple of {BLOCK} tokens"
        )
    largest = torch.finfo(format).max
    blocks = x.float().unflatten(1, (-1, BLOCK))
    amax = blocks.abs().amax(-1, keepdim=True)
    mantissa, exponent = torch.frexp(amax / largest)  # mantissa in [1/2, 1)
    exponent = exponent - (mantissa == 0.5).int()
    exponent = torch.where(amax == 0, -127, exponent).clamp(-127, 127)
    codes = torch.ldexp(blocks, -exponent).clamp(-largest, largest).to(format).flatten(1)
    scale = torch.where(amax.isfinite(), torch.ldexp(torch.ones_like(amax), exponent), torch.nan)
    return Rounded(codes, scale.squeeze(-1))


def product(a: Rounded, b: Rounded, dtype: torch.dtype, fast: bool = False) -> Tensor:
    """Return a bᵀ [m, n] of a [m, k] and b [n, k]. `fast`: sums may be less exact, as is usual in
    forward."""
    if has_kernel(a.codes.device, dtype, "mxfp8" if a.in_blocks else "rowwise"):
        return scaled_mm(a, b, dtype, fast)
    wide = torch.promote_types(dtype, torch.float32)
    return (a.numbers(wide) @ b.numbers(wide).T).to(dtype)


# ----------------------------------------------------------------------------------- the layer


class Float8Product(torch.autograd.Function):
    """x Wᵀ, x [n, in], W [out, in]. `groups`: ranks over which `in` and `out` are sharded.

    With one scale a tensor, backward needs the same codes of x, which are saved in its place. Those
    of W are made again: saved, they would lie unsharded on every rank, which FSDP avoids.
    labs/float8 writes it for one scale a tensor."""

    @staticmethod
    def forward(ctx, x, weight, recipe, groups):
        ctx.recipe, (of_in, ctx.of_out) = recipe, groups  # None where nothing is sharded
        x8, factor = rounded(x, E4M3, recipe, of_in), None
        if recipe == "tensorwise":
            factor = factor_of(weight, E4M3, recipe, of_in or ctx.of_out)
        weight8 = rounded(weight, E4M3, recipe, of_in, factor)
        ctx.save_for_backward(weight, factor, *(x8 if recipe == "tensorwise" else (x, None)))
        return product(x8, weight8, x.dtype, fast=True)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        with torch.autocast(grad.device.type, enabled=False):
            return *Float8Product.gradients(ctx, grad), None, None

    @staticmethod
    def gradients(ctx, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        recipe, dtype, x_grad, weight_grad = ctx.recipe, grad.dtype, None, None
        weight, factor, x, x_scale = ctx.saved_tensors
        format = E4M3 if recipe == "mxfp8" else E5M2
        grad8 = rounded(grad, format, recipe, ctx.of_out)
        if ctx.needs_input_grad[0]:
            weight8 = rounded(weight.T, E4M3, recipe, ctx.of_out, factor)
            x_grad = product(grad8, weight8, dtype)
        if ctx.needs_input_grad[1]:
            if recipe == "tensorwise":
                x8, grad8_transposed = Rounded(x.T, x_scale), Rounded(grad8.codes.T, grad8.scale)
            else:
                x8, grad8_transposed = rounded(x.T, E4M3, recipe), rounded(grad.T, format, recipe)
            weight_grad = product(grad8_transposed, x8, dtype)
        return x_grad, weight_grad


def float8_product(x: Tensor, weight: Tensor, recipe: str, groups: tuple = (None, None)) -> Tensor:
    """Return x Wᵀ in 8 bits, x [..., in]. Autocast applies to x and W, and not within."""
    x, weight = cast_by_autocast(x, weight)
    with torch.autocast(x.device.type, enabled=False):
        y = Float8Product.apply(x.flatten(0, -2), weight, recipe, groups)
    return y.unflatten(0, x.shape[:-1])


class Float8Linear(nn.Linear):
    """A linear layer that computes in 8 bits.

    `product` is the function that forward computes; tensor parallelism replaces it."""

    def __init__(self, base: nn.Linear, recipe: str):
        super().__init__(base.in_features, base.out_features, bias=False, device="meta")
        self.weight, self.recipe = base.weight, recipe
        self.product: Callable = partial(float8_product, recipe=recipe)

    def forward(self, x: Tensor) -> Tensor:
        return self.product(x, self.weight)

    def shard_product(self, mesh: DeviceMesh) -> None:
        """Let forward compute with this rank's shard of a weight that has become a DTensor."""
        weight, group = self.weight.placements, mesh.get_group()
        rows = weight[0].is_shard(1)  # `in` is sharded, else `out`
        x, y = ([Shard(2)], [Partial()]) if rows else ([Replicate()], [Shard(2)])  # [B, T, width]
        groups = (group, None) if rows else (None, group)
        product = partial(float8_product, recipe=self.recipe, groups=groups)
        gradients = x if rows else [Partial()], weight
        self.product = local_map(product, y, (x, weight), gradients, mesh)


# -------------------------------------------------------------------------------- products on a GPU
# Which GPUs multiply in 8 bits, and the memory layouts that they ask for.


BLOCK = 32  # neighbours that share a scale in mxfp8


def recipes_of(capability: tuple[int, int]) -> tuple[str, ...]:
    """Return the recipes of float8.py that NVIDIA's GPUs of a compute capability multiply: from Ada
    and Hopper on those without blocks; Blackwell's data center GPUs (10.x) all."""
    if capability < (8, 9):
        return ()
    return ("tensorwise", "rowwise", "mxfp8")[: 3 if capability[0] == 10 else 2]


def has_kernel(device: torch.device, dtype: torch.dtype, recipe: str) -> bool:
    """Return whether a device multiplies in 8 bits, with results in this dtype."""
    if device.type != "cuda" or dtype != torch.bfloat16 or torch.version.hip:
        return False
    return recipe in recipes_of(torch.cuda.get_device_capability(device))


def scaled_mm(a: Rounded, b: Rounded, dtype: torch.dtype, fast: bool) -> Tensor:
    """Return product(a, b, dtype, fast) where the device has a kernel for it."""
    a_scale, b_scale = a.scale, b.scale
    if a.in_blocks:
        a_scale, b_scale = in_tiles(a_scale), in_tiles(b_scale)
    elif b_scale.ndim:
        b_scale = b_scale.T.contiguous()
    left, right = a.codes.contiguous(), b.codes.contiguous().T  # row-major, column-major
    fast = fast and not a.in_blocks
    return torch._scaled_mm(left, right, a_scale, b_scale, out_dtype=dtype, use_fast_accum=fast)


def in_tiles(scale: Tensor) -> Tensor:
    """Return scales [m, k / BLOCK] in the order in which a GPU reads them (cuBLAS, "1D block
    scaling factors layout"): in e8m0, padded to tiles of 128 rows and 4 columns, tile by tile; in a
    tile first those of rows 0, 32, 64 and 96, then those of rows 1, 33, 65, 97."""
    m, blocks = scale.shape
    tiles = F.pad(scale, (0, -blocks % 4, 0, -m % 128)).unflatten(0, (-1, 4, 32))
    tiles = tiles.unflatten(3, (-1, 4)).permute(0, 3, 2, 1, 4)  # row, column; then 32, 4, 4
    return tiles.to(torch.float8_e8m0fnu).flatten()


# ------------------------------------------------------------------ what others ask of a technique


def layers_in_8_bits(model: Llama, recipe: str, tp: int = 1) -> list[str]:
    """Return the names of the layers that are multiplied in 8 bits: matrices of the blocks, without
    bias or adapter, whose widths can be, also when tp divides one of them."""
    multiple = tp * (BLOCK if recipe == "mxfp8" else MULTIPLE)
    return [
        name
        for name, layer in model.named_modules()
        if name.startswith("layers.") and type(layer) is nn.Linear and layer.bias is None
        if layer.in_features % multiple == layer.out_features % multiple == 0
    ]


def use_float8(model: Llama, recipe: str, tp: int = 1) -> None:
    """Replace the layers_in_8_bits by Float8Linear."""
    torch.compiler.assume_constant_result(has_kernel)  # not above: it imports the compiler
    for name in layers_in_8_bits(model, recipe, tp):
        parent, _, attribute = name.rpartition(".")
        layer = Float8Linear(model.get_submodule(name), recipe)
        setattr(model.get_submodule(parent), attribute, layer)


def refuses(work: Work) -> str:
    """Outputs are sums over widths; gradients of weights are sums over the tokens of a product,
    those of a microbatch, or of a chunk of it."""
    parallel, recipe = work.parallel, work.parallel.float8
    if not any(parameter.requires_grad for parameter in work.model.parameters()):
        return "--float8 is for train.py: with adapters, products are not in 8 bits"
    if parallel.pp > 1 and has_w(parallel.schedule):
        return "a backward in two parts does not combine with --float8: use --schedule 1f1b"
    device = torch.device("cuda" if work.on_gpu else "cpu")
    multiple = MULTIPLE if has_kernel(device, parallel.dtype, recipe) else 1
    multiple = BLOCK if recipe == "mxfp8" else multiple
    chunks = parallel.tp if parallel.async_tp else 1
    tokens = work.microbatch * math.ceil(work.seq_len // parallel.cp / chunks)
    if tokens % multiple:
        return (
            f"--float8 {recipe} sums over the {tokens} tokens of a microbatch (--async-tp: of a "
            f"chunk), which must be a multiple of {multiple}: choose --microbatch and --seq-len so"
        )
    if not layers_in_8_bits(work.model, recipe, parallel.tp):
        return f"{recipe} finds no matrix, without bias or adapter, with widths for 8 bits"
    return ""


def about(model: Llama, world) -> str:
    """Return which layers are multiplied in 8 bits, and whether the device can."""
    parallel, recipe = world.parallel, world.parallel.float8
    names = layers_in_8_bits(model, recipe, parallel.tp)
    layers = " ".join(dict.fromkeys(name.rpartition(".")[2] for name in names))
    emulated = not has_kernel(world.device, parallel.dtype, recipe)
    how = ", emulated: 8-bit products need bfloat16 and a GPU that has them" if emulated else ""
    return f"{recipe} float8 in {layers} of {len(model.layers)} blocks{how}"


def holds(work: Work) -> float:
    """Tensorwise, each product saves codes of a byte in place of its input."""
    config, parallel = work.model.config, work.parallel
    if parallel.float8 != "tensorwise":
        return 0.0
    inputs, byte = 2 if parallel.compile else 5, 1 / parallel.weight_bytes
    casts = parallel.weight_bytes < 4 and not parallel.strategy.uses_fsdp and not parallel.compile
    norms = (inputs * byte - (5 if casts else 2)) * config.dim
    return norms + ((config.q_dim + config.ffn_dim) * byte - config.ffn_dim) / parallel.tp


def sends(model: Llama, work: Work) -> Iterator[tuple]:
    """Yield the largest numbers that scales need of other ranks along tp. Of wo and w2 a rank has
    some input features, so forward needs those of the input and of the weight. Of other layers it
    has some output features: backward needs those of the output's gradient and of the weight, of
    which a tensorwise scale is known from forward."""
    parallel, recipe, m = work.parallel, work.parallel.float8, work.microbatches
    if parallel.tp == 1 or recipe == "mxfp8" or parallel.async_tp:
        return
    forwards = m * (1 if parallel.checkpointing == "none" else 2)
    block = next(iter(model.layers))
    for name in layers_in_8_bits(model, recipe, parallel.tp):
        if name.split(".")[1] != block:
            continue
        layer, shards_input = model.get_submodule(name), writes_to_stream(model, name)
        # A scale for each row of the input or gradient, and of the weight as this product has it.
        width = layer.out_features if shards_input else layer.in_features
        rows, columns = (1, 1) if recipe == "tensorwise" else (work.tokens, width)
        of_weight = forwards if shards_input or recipe == "tensorwise" else m
        L = len(model.layers)
        for n, size in ((forwards if shards_input else m, rows), (of_weight, columns)):
            yield "tp", "all-reduce", L * n, size * parallel.weight_bytes


def suggests(facts) -> str:
    parallel = facts.parallel
    if parallel.float8 != "none" or not (facts.work.on_gpu and parallel.compile):
        return ""
    if not has_kernel(facts.device, parallel.dtype, "tensorwise"):
        return ""
    return (
        "matrix products are in bfloat16: --float8 tensorwise takes half the time for those of "
        "the blocks, if the loss bears the rounding"
    )


TECHNIQUE = Technique(
    "float8",
    lambda model, world: use_float8(model, world.parallel.float8, world.parallel.tp),
    refuses,
    holds,
    sends,
    gain=1.9,  # rate of products in 8 bits / rate in bfloat16
    about=about,
    suggests=suggests,
)
