"""Float8: the three matrix products of a linear layer in 8 bits, which GPUs do twice as fast.

                sign  exponent  mantissa   largest   smallest   numbers in [1, 2)
    e4m3           1         4         3       448       2^-9                     8
    e5m2           1         5         2    57,344      2^-16                     4
    bfloat16       1         8         7    3.4e38     2^-133                   128

Inputs and weights are rounded to e4m3, which is finer; gradients to e5m2, which reaches farther (in
mxfp8 to e4m3). Neither reaches as far as the numbers of a network. So a tensor is multiplied by a
factor that brings its largest number to, or near, the format's largest, and the product is divided
by the factors of both operands. Rounding is then off by up to 1/17 (e4m3) or 1/9 (e5m2) of a
number; by more where that is 28,672 times (e4m3) or 9e8 times (e5m2) smaller than the largest:
below 2^-6 and 2^-14 there are fewer bits.

    recipe       one factor for
    tensorwise   a tensor, whose codes serve both of its products: the fastest
    rowwise      each row of the left and each column of the right operand: an outlier spoils no
                 other row, but a tensor has other codes in each of its two products
    mxfp8        each 32 of the numbers that are summed: a power of two (OCP Microscaling)

Factors follow the numbers of each product: there is nothing to tune or to save. Under tensor
parallelism ranks all-reduce the largest numbers over tp to round as one process does, in one call
for both operands of a product (mxfp8 needs none). Chunks of --async-tp, microbatches and data ranks
have their own factors. Without a GPU for it, the rounded numbers are multiplied in float32 or
float64.

torchao is the library to use instead. Left out here: FSDP's all-gathers in 8 bits (ours send
bfloat16, twice the bytes), the factors of all weights in one pass after the optimizer's step (each
forward reads its weights once more), and dW in bfloat16, for models that do not bear 8 bits there.
Use for large matrices, compiled, which repay a pass over memory. Avoid where training diverges.
"""

import math
from collections.abc import Iterator
from functools import partial

import torch
import torch.distributed._functional_collectives as collectives
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from model import Llama
from plumbing.devices import cast_by_autocast
from techniques.parallel_layers import product_of_shards, writes_to_stream
from techniques.technique import Technique

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
BLOCK = 32  # neighbours that share a factor in mxfp8
MULTIPLE = 16  # of which widths must be multiples, for the products of a GPU
GAIN = 1.9  # rate of products in 8 bits / rate in bfloat16; assumed, not measured


def float8_recipes(capability: tuple[int, int]) -> tuple[str, ...]:
    """Return the recipes that NVIDIA's GPUs of a compute capability have products for: from Ada and
    Hopper on those without blocks; Blackwell's data center GPUs (10.x) all."""
    if capability < (8, 9):
        return ()
    return ("tensorwise", "rowwise", "mxfp8")[: 3 if capability[0] == 10 else 2]


def has_float8(device: torch.device, dtype: torch.dtype, recipe: str) -> bool:
    """Return whether a device multiplies in 8 bits, with results in this dtype."""
    if device.type != "cuda" or dtype != torch.bfloat16 or torch.version.hip:
        return False
    return recipe in float8_recipes(torch.cuda.get_device_capability(device))


def largest_of(x: Tensor, recipe: str) -> Tensor:
    """Return the largest magnitudes in a matrix [m, k]: [] tensorwise, [m, 1] rowwise, and
    [m, k / BLOCK, 1] of blocks."""
    if recipe == "tensorwise":
        return x.abs().amax()
    if recipe == "rowwise":
        return x.abs().amax(1, keepdim=True)
    return x.float().unflatten(1, (-1, BLOCK)).abs().amax(-1, keepdim=True)


def factor_of(largest: Tensor, format: torch.dtype, recipe: str) -> Tensor:
    """Return the factors, in float32, that bring the largest numbers to, or near, the largest of a
    format; those of a block are repeated for all of its numbers, [m, k]."""
    largest = largest.double()
    limit = torch.finfo(format).max
    if recipe == "mxfp8":
        exponent = torch.log2(largest / limit).ceil().clamp(min=-127)  # of 1 / factor
        return torch.exp2(-exponent).float().expand(-1, -1, BLOCK).flatten(1)
    return (limit / largest.clamp(min=2.0**-100)).float()  # at most 2^116


def codes_of(x: Tensor, format: torch.dtype, factor: Tensor) -> Tensor:
    """Return a matrix [m, k], times a factor, in 8 bits."""
    limit = torch.finfo(format).max
    # Beyond the limit, codes would be NaN. An infinite x is: it makes the factor 0.
    return (x.float() * factor).clamp(-limit, limit).to(format)


def rounded(operands: list[tuple], recipe: str, group=None) -> list[tuple[Tensor, Tensor]]:
    """Return the codes of each operand, a matrix [m, k] and a format, and its factors. `group`:
    ranks that have other parts of what a factor is for."""
    largest = [largest_of(x, recipe) for x, _ in operands]
    if group is not None and recipe != "mxfp8":
        reduced = collectives.all_reduce_coalesced(largest, "max", group)
        largest = [collectives.wait_tensor(numbers) for numbers in reduced]
    found = []
    for (x, format), numbers in zip(operands, largest):
        factor = factor_of(numbers, format, recipe)
        found.append((codes_of(x, format, factor), factor))
    return found


def product(a8: tuple, b8: tuple, recipe: str, dtype: torch.dtype, fast: bool = False) -> Tensor:
    """Return a bᵀ [m, n] of rounded a [m, k] and b [n, k]. `fast`: sums may be less exact."""
    a, a_factor = a8
    b, b_factor = b8
    a_scale = a_factor.reciprocal()
    b_scale = b_factor.reciprocal()
    if not has_float8(a.device, dtype, recipe):
        wide = torch.promote_types(dtype, torch.float32)
        with torch.autocast(a.device.type, enabled=False):
            left = a.to(wide) * a_scale.to(wide)
            right = b.to(wide) * b_scale.to(wide)
            return (left @ right.T).to(dtype)
    if recipe == "mxfp8":
        a_scale = in_tiles(a_scale[:, ::BLOCK])
        b_scale = in_tiles(b_scale[:, ::BLOCK])
        fast = False
    left = a.contiguous()  # row-major
    right = b.contiguous().T  # column-major
    return torch._scaled_mm(left, right, a_scale, b_scale.t(), out_dtype=dtype, use_fast_accum=fast)


def in_tiles(scale: Tensor) -> Tensor:
    """Return scales [m, k / BLOCK] in the order in which a GPU reads them (cuBLAS, "1D block
    scaling factors layout"): in e8m0, padded to tiles of 128 rows and 4 columns, tile by tile; in a
    tile first those of rows 0, 32, 64 and 96, then those of rows 1, 33, 65, 97."""
    padding = 0, -scale.shape[1] % 4, 0, -scale.shape[0] % 128
    tiles = nn.functional.pad(scale, padding).unflatten(0, (-1, 4, 32)).unflatten(3, (-1, 4))
    return tiles.permute(0, 3, 2, 1, 4).to(torch.float8_e8m0fnu).flatten()  # row, column; 32, 4, 4


class Float8Product(torch.autograd.Function):
    """x Wᵀ, x [n, in], W [out, in]. `groups`: ranks over which `in` and `out` are sharded, or None.
    Tensorwise, x is saved as codes, which backward needs too. Those of W are made again: saved,
    they would lie unsharded on every rank, which FSDP avoids. labs/float8 writes it tensorwise."""

    @staticmethod
    def forward(ctx, x, weight, recipe, groups):
        in_group, out_group = groups
        ctx.recipe = recipe
        ctx.out_group = out_group
        # Tensorwise, codes of W serve both of its products, and need the largest number of all of
        # W. (Then the largest of x is all-reduced, too. Ranks of out_group have the same x.)
        group = (in_group or out_group) if recipe == "tensorwise" else in_group
        x8, weight8 = rounded([(x, E4M3), (weight, E4M3)], recipe, group)
        if recipe == "tensorwise":
            _, weight_factor = weight8
            ctx.save_for_backward(weight, weight_factor, *x8)
        else:
            ctx.save_for_backward(weight, None, x, None)
        return product(x8, weight8, recipe, x.dtype, fast=True)  # GEMM 1: y = x Wᵀ, over in

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        weight, weight_factor, x, x_factor = ctx.saved_tensors
        recipe = ctx.recipe
        format = E4M3 if recipe == "mxfp8" else E5M2
        if recipe == "tensorwise":
            [grad8] = rounded([(grad, format)], recipe, ctx.out_group)
            weight8 = codes_of(weight.T, E4M3, weight_factor), weight_factor
        else:
            operands = [(grad, format), (weight.T, E4M3)]
            grad8, weight8 = rounded(operands, recipe, ctx.out_group)
        x_grad = product(grad8, weight8, recipe, grad.dtype)  # GEMM 2: dx = g W, over out
        if recipe == "tensorwise":
            grad_codes, grad_factor = grad8
            grad8 = grad_codes.T, grad_factor
            x8 = x.T, x_factor
        else:
            grad8, x8 = rounded([(grad.T, format), (x.T, E4M3)], recipe)
        weight_grad = product(grad8, x8, recipe, grad.dtype)  # GEMM 3: dW = gᵀ x, over n
        return x_grad, weight_grad, None, None


def float8_product(x: Tensor, weight: Tensor, recipe: str, groups: tuple = (None, None)) -> Tensor:
    """Return x Wᵀ in 8 bits, x [..., in], both in the dtype to which autocast casts them."""
    x, weight = cast_by_autocast(x, weight)
    y = Float8Product.apply(x.flatten(0, -2), weight, recipe, groups)
    return y.unflatten(0, x.shape[:-1])


class Float8Linear(nn.Linear):
    """A linear layer that computes in 8 bits, by `product`, which tensor parallelism replaces."""

    def __init__(self, base: nn.Linear, recipe: str):
        super().__init__(base.in_features, base.out_features, bias=False, device="meta")
        self.weight = base.weight
        self.recipe = recipe
        self.product = partial(float8_product, recipe=recipe)

    def forward(self, x: Tensor) -> Tensor:
        return self.product(x, self.weight)

    def shard_product(self, mesh: DeviceMesh) -> None:
        group = mesh.get_group()
        shards_in = self.weight.placements[0].is_shard(1)
        groups = (group, None) if shards_in else (None, group)
        product = partial(self.product, groups=groups)
        self.product = product_of_shards(product, [self.weight.placements], mesh)


# ------------------------------------------------------------------ what others ask of a technique


def layers_in_8_bits(model: Llama, parallel) -> dict[str, nn.Linear]:
    """Return the layers that are multiplied in 8 bits, by name: matrices of the blocks, without
    bias or adapter, whose widths a GPU can multiply, also when tp divides one of them."""
    multiple = parallel.tp * (BLOCK if parallel.float8 == "mxfp8" else MULTIPLE)
    layers = {}
    for name, layer in model.layers.named_modules():
        if type(layer) is nn.Linear and layer.bias is None:
            if layer.in_features % multiple == layer.out_features % multiple == 0:
                layers[f"layers.{name}"] = layer
    return layers


def use_float8(model: Llama, world) -> None:
    torch.compiler.assume_constant_result(has_float8)  # as a decorator it would import the compiler
    if world.parallel.compile and world.parallel.checkpointing != "none":
        # Let the compiler round what it fuses. Where it recomputes a norm without rounding it to
        # bfloat16, one of some hundred codes is another than in forward. Backward would compute
        # attention from other queries than those whose logsumexp forward has saved.
        from torch._inductor import config  # takes a second

        config.emulate_precision_casts = True
    for name, layer in layers_in_8_bits(model, world.parallel).items():
        model.set_submodule(name, Float8Linear(layer, world.parallel.float8))


def refuses(work) -> str:
    parallel = work.parallel
    recipe = parallel.float8
    if any(not parameter.requires_grad for parameter in work.model.parameters()):
        return "--float8 is for training all weights: beside adapters no product is in 8 bits"
    multiple = MULTIPLE if work.on_gpu else 1
    if recipe == "mxfp8":
        multiple = BLOCK
    length = math.ceil(work.length / parallel.tp) if parallel.async_tp else work.length
    tokens = work.microbatch * length
    if tokens % multiple:
        return (
            f"--float8 {recipe} sums over the {tokens} tokens of a microbatch (--async-tp: of a "
            f"chunk), which must be a multiple of {multiple}: choose --microbatch and --seq-len so"
        )
    if not layers_in_8_bits(work.model, parallel):
        return f"--float8 {recipe} finds no matrix, without a bias, whose widths fit: leave it out"
    return ""


def sends(model: Llama, work) -> Iterator[tuple]:
    """Ranks all-reduce the largest numbers of both operands: in forward where each has a part of
    the input features (wo, w2), in backward elsewhere. Tensorwise, those of a weight are needed in
    forward, and x's go with them; backward then needs the gradient's alone."""
    parallel = work.parallel
    m, w = work.microbatches, parallel.weight_bytes
    if parallel.float8 == "mxfp8" or parallel.async_tp:
        return
    forwards = m * (1 + parallel.repeats_attention)  # else the numbers are saved
    for name, layer in layers_in_8_bits(model, parallel).items():
        has_part_of_inputs = writes_to_stream(model, name)
        if parallel.float8 == "tensorwise":
            yield "tp", "all-reduce", forwards, 2 * w
            if not has_part_of_inputs:
                yield "tp", "all-reduce", m, w
        elif has_part_of_inputs:  # one for each token, and for each row or column of the weight
            yield "tp", "all-reduce", forwards, (work.tokens + layer.out_features) * w
        else:
            yield "tp", "all-reduce", m, (work.tokens + layer.in_features) * w


def about(model: Llama, world) -> str:
    parallel = world.parallel
    recipe = parallel.float8
    names = [path.rpartition(".")[2] for path in layers_in_8_bits(model, parallel)]
    layers = " ".join(dict.fromkeys(names))
    note = f"{recipe} float8 in {layers} of {len(model.layers)} blocks"
    if not has_float8(world.device, parallel.dtype, recipe):
        note += ", emulated: 8-bit products need bfloat16 and a GPU that has them"
    return note


def suggests(facts) -> str:
    parallel = facts.parallel
    multiplies = has_float8(facts.device, parallel.dtype, "tensorwise")
    if parallel.float8 == "none" and parallel.compile and multiplies:
        return f"--float8 tensorwise multiplies up to {GAIN} times as fast, if the loss bears it"
    return ""


TECHNIQUE = Technique(
    "float8",
    use_float8,
    refuses,
    sends=sends,
    gain=GAIN,
    about=about,
    suggests=suggests,
    only_linear=True,
)
