"""float8: rounding to 8 bits, and a linear layer whose products are of rounded numbers."""

import math
from types import SimpleNamespace

import pytest
import torch
import torch._inductor.config
from exact import GROUPED

from config import ParallelConfig
from model import Llama, LlamaConfig, rms_norm
from techniques import float8
from techniques.float8 import BLOCK, E4M3, E5M2, Float8Linear, float8_product, rounded

RECIPES = ("tensorwise", "rowwise", "mxfp8")


@pytest.mark.parametrize("format", [E4M3, E5M2])
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_scale_brings_the_largest_to_the_formats_largest(recipe, format):
    torch.manual_seed(0)
    largest, unit = torch.finfo(format).max, torch.finfo(format).eps
    smallest = torch.finfo(format).smallest_normal * unit
    x = torch.randn(48, 64) * torch.logspace(-6, 6, 48)[:, None]
    x[3] = 0
    codes, factor = rounded(x, format, recipe)
    scale = 1 / factor.double()
    blocks = {"tensorwise": x.flatten(), "rowwise": x, "mxfp8": x.unflatten(1, (-1, BLOCK))}[recipe]
    amax = blocks.abs().amax(-1)
    if recipe == "mxfp8":  # the smallest power of two with which the largest number fits
        exact = torch.log2((amax / largest).double()).ceil().clamp(-127, 127)
        assert torch.equal(scale, torch.exp2(exact).repeat_interleave(BLOCK, 1))
    else:
        exact = (largest / amax.double().clamp(min=2.0**-100)).float()
        assert torch.equal(factor.flatten(), exact.flatten())
    half_a_unit = x.double().abs() * unit / 2  # in the last place
    error = (codes.double() * scale - x.double()).abs()
    assert (error <= torch.maximum(half_a_unit * (1 + 1e-6), scale * smallest)).all()


@pytest.mark.parametrize("recipe", RECIPES)
def test_what_is_not_finite_is_not_hidden(recipe):
    for bad in (math.inf, -math.inf, math.nan):
        x = torch.ones(32, 32)
        x[0, 5] = bad
        y = float8_product(x, torch.ones(32, 32), recipe)
        assert not y[0].isfinite().any()


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize(
    "dtype, tolerance", [(torch.float64, 1e-15), (torch.float32, 1e-6), (torch.bfloat16, 6e-3)]
)
def test_products_are_those_of_rounded_numbers(recipe, dtype, tolerance):
    """Output and both gradients, beside float64 products of what the codes stand for."""
    torch.manual_seed(0)
    x, weight, grad = (torch.randn(*shape, dtype=dtype) for shape in ((64, 96), (32, 96), (64, 32)))
    weight[2] *= 1000  # an outlier
    inputs = x.requires_grad_(), weight.requires_grad_()
    y = float8_product(*inputs, recipe)
    found = y.detach(), *torch.autograd.grad(y, inputs, grad)
    of_gradients = E4M3 if recipe == "mxfp8" else E5M2

    def numbers(x: torch.Tensor, format: torch.dtype) -> torch.Tensor:
        codes, factor = rounded(x.detach(), format, recipe)
        return codes.double() * factor.reciprocal().double()

    expected = (
        numbers(x, E4M3) @ numbers(weight, E4M3).T,
        numbers(grad, of_gradients) @ numbers(weight.T, E4M3).T,
        numbers(grad.T, of_gradients) @ numbers(x.T, E4M3).T,
    )
    for ours, theirs in zip(found, expected, strict=True):
        assert (ours.double() - theirs).norm() <= tolerance * theirs.norm()


def test_emulated_products_are_those_of_torchs_scaled_mm():
    """Bit for bit in bfloat16, in which the CPU has them for one scale a tensor."""
    torch.manual_seed(0)
    a, b = (rounded(torch.randn(48, 64), E4M3, "tensorwise") for _ in "ab")
    operands = a[0], b[0].T, 1 / a[1], 1 / b[1]
    theirs = torch._scaled_mm(*operands, out_dtype=torch.bfloat16)
    assert torch.equal(float8.product(a, b, "tensorwise", torch.bfloat16), theirs)


@pytest.mark.slow
def test_codes_of_a_recomputed_norm_are_those_of_forward():
    """Forward writes the norm in bfloat16, and backward fuses it with the rounding: without the
    setting of the compiler that use_float8 makes, some codes would be others."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    x, weight = torch.randn(256, 512).bfloat16(), (torch.rand(512) + 0.5).bfloat16()
    parallel = ParallelConfig(compile=True, checkpointing="selective", float8="tensorwise")
    world = SimpleNamespace(parallel=parallel, device=torch.device("cpu"))

    def forward(x):
        y = rms_norm(x, weight, 1e-5)
        return y, rounded(y, E4M3, "tensorwise")[0]

    with torch._inductor.config.patch(emulate_precision_casts=False):
        float8.use_float8(Llama(LlamaConfig(**GROUPED)), world)
        _, codes = torch.compile(forward)(x)
        again = torch.compile(lambda x: forward(x)[1])(x)
    assert torch.equal(codes.float(), again.float())


def test_scales_of_blocks_in_the_order_of_a_gpu():
    """By the formula of cuBLAS's documentation: where the scale of row r and column c lies."""
    scales = torch.exp2(torch.randint(-126, 127, (200, 6)).float())
    tiles = float8.in_tiles(scales)
    assert len(tiles) == 256 * 8
    for r in range(200):
        for c in range(6):
            tile = (r // 128) * 2 + c // 4
            place = tile * 512 + (r % 32) * 16 + (r % 128 // 32) * 4 + c % 4
            assert tiles[place].float() == scales[r, c]


def test_which_gpus_multiply_in_8_bits():
    found = [float8.float8_recipes(capability) for capability in ((8, 0), (8, 9), (12, 0), (10, 3))]
    assert found == [(), RECIPES[:2], RECIPES[:2], RECIPES]


@pytest.mark.parametrize("recipe, tp", [("rowwise", 1), ("rowwise", 2), ("mxfp8", 1)])
def test_matrices_of_blocks_are_replaced_where_their_widths_allow(recipe, tp):
    """48 / 2 is no multiple of 16, nor 48 one of 32. Parameters keep their names, so that weights
    load anywhere."""
    model = Llama(LlamaConfig(**GROUPED | dict(dim=64, ffn_dim=48)))
    names = [name for name, _ in model.named_parameters()]
    parallel = ParallelConfig(float8=recipe, tp=tp)
    float8.use_float8(model, SimpleNamespace(parallel=parallel, device=torch.device("cpu")))
    replaced = {name: m for name, m in model.named_modules() if isinstance(m, Float8Linear)}
    wanted = "wq wk wv wo" if tp == 2 or recipe == "mxfp8" else "wq wk wv wo w1 w2 w3"
    assert sorted(name.split(".")[-1] for name in replaced) == sorted(2 * wanted.split())
    assert all(name.startswith("layers.") for name in replaced)
    assert {layer.recipe for layer in replaced.values()} == {recipe}
    assert [name for name, _ in model.named_parameters()] == names
