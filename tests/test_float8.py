"""techniques/float8.py: rounding to 8 bits, and a linear layer that multiplies rounded numbers.

Scales are compared with formulas, products with float64's of what the codes stand for, and with
torch's own product of 8 bits."""

import math

import pytest
import torch
import torch._inductor.config
from conftest import alone
from exact import GROUPED

from model import Llama, LlamaConfig, rms_norm
from techniques import float8
from techniques.float8 import BLOCK, E4M3, E5M2, Float8Linear, float8_product, rounded

RECIPES = ("tensorwise", "rowwise", "mxfp8")


@pytest.mark.parametrize("format", [E4M3, E5M2])
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_scale_brings_the_largest_to_the_formats_largest(recipe, format):
    torch.manual_seed(0)
    described = torch.finfo(format)
    largest = described.max
    unit = described.eps
    smallest = described.smallest_normal * unit
    magnitudes = torch.logspace(-6, 6, 48)
    x = torch.randn(48, 64) * magnitudes[:, None]
    x[3] = 0
    [(codes, factor)] = rounded([(x, format)], recipe)
    scale = 1 / factor.double()
    if recipe == "tensorwise":
        blocks = x.flatten()
    elif recipe == "rowwise":
        blocks = x
    else:
        blocks = x.unflatten(1, (-1, BLOCK))
    amax = blocks.abs().amax(-1)
    if recipe == "mxfp8":  # the smallest power of two with which the largest number fits
        ratio = (amax / largest).double()
        exponent = torch.log2(ratio).ceil().clamp(-127, 127)
        expected = torch.exp2(exponent).repeat_interleave(BLOCK, 1)
        assert torch.equal(scale, expected)
    else:
        amax = amax.double().clamp(min=2.0**-100)
        expected = (largest / amax).float()
        assert torch.equal(factor.flatten(), expected.flatten())
    exact = x.double()
    half_a_unit = exact.abs() * unit / 2  # in the last place
    allowed = torch.maximum(half_a_unit * (1 + 1e-6), scale * smallest)
    assert ((codes.double() * scale - exact).abs() <= allowed).all()


@pytest.mark.parametrize("recipe", RECIPES)
def test_what_is_not_finite_is_not_hidden(recipe):
    for bad in (math.inf, -math.inf, math.nan):
        x = torch.ones(32, 32)
        x[0, 5] = bad
        weight = torch.ones(32, 32)
        y = float8_product(x, weight, recipe)
        assert not y[0].isfinite().any()


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize(
    "dtype, tolerance", [(torch.float64, 1e-15), (torch.float32, 1e-6), (torch.bfloat16, 6e-3)]
)
def test_products_are_those_of_rounded_numbers(recipe, dtype, tolerance):
    """Output and both gradients, beside float64 products of what the codes stand for."""
    torch.manual_seed(0)
    x = torch.randn(64, 96, dtype=dtype, requires_grad=True)
    weight = torch.randn(32, 96, dtype=dtype)
    weight[2] *= 1000  # an outlier
    weight.requires_grad_()
    grad = torch.randn(64, 32, dtype=dtype)
    y = float8_product(x, weight, recipe)
    found = y.detach(), *torch.autograd.grad(y, (x, weight), grad)
    of_gradients = E4M3 if recipe == "mxfp8" else E5M2

    def numbers(x: torch.Tensor, format: torch.dtype) -> torch.Tensor:
        [(codes, factor)] = rounded([(x.detach(), format)], recipe)
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
    operands = [(torch.randn(48, 64), E4M3), (torch.randn(48, 64), E4M3)]
    a, b = rounded(operands, "tensorwise")
    ours = float8.product(a, b, "tensorwise", torch.bfloat16)
    a_codes, a_factor = a
    b_codes, b_factor = b
    operands = a_codes, b_codes.T, 1 / a_factor, 1 / b_factor
    theirs = torch._scaled_mm(*operands, out_dtype=torch.bfloat16)
    assert torch.equal(ours, theirs)


@pytest.mark.slow
def test_codes_of_a_recomputed_norm_are_those_of_forward():
    """Forward writes the norm in bfloat16, and backward fuses it with the rounding: without the
    setting of the compiler that use_float8 makes, some codes would be others."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    x = torch.randn(256, 512).bfloat16()
    weight = (torch.rand(512) + 0.5).bfloat16()
    world = alone(compile=True, checkpointing="selective", float8="tensorwise")

    def forward(x):
        y = rms_norm(x, weight, 1e-5)
        [(codes, _)] = rounded([(y, E4M3)], "tensorwise")
        return y, codes

    def recompute(x):
        _, codes = forward(x)
        return codes

    with torch._inductor.config.patch(emulate_precision_casts=False):
        model = Llama(LlamaConfig(**GROUPED))
        float8.use_float8(model, world)
        _, codes = torch.compile(forward)(x)
        again = torch.compile(recompute)(x)
    assert torch.equal(codes.float(), again.float())


def test_scales_of_blocks_in_the_order_of_a_gpu():
    """By the formula of cuBLAS's documentation: where the scale of row r and column c lies."""
    exponents = torch.randint(-126, 127, (200, 6))
    scales = torch.exp2(exponents.float())
    tiles = float8.in_tiles(scales)
    assert len(tiles) == 256 * 8
    for r in range(200):
        for c in range(6):
            tile = (r // 128) * 2 + c // 4
            within = (r % 32) * 16 + (r % 128 // 32) * 4 + c % 4
            place = tile * 512 + within
            assert tiles[place].float() == scales[r, c]


def test_which_gpus_multiply_in_8_bits():
    without_blocks = ("tensorwise", "rowwise")
    assert float8.float8_recipes((8, 0)) == ()
    assert float8.float8_recipes((8, 9)) == without_blocks
    assert float8.float8_recipes((12, 0)) == without_blocks
    assert float8.float8_recipes((10, 3)) == RECIPES


@pytest.mark.parametrize("recipe, tp", [("rowwise", 1), ("rowwise", 2), ("mxfp8", 1)])
def test_matrices_of_blocks_are_replaced_where_their_widths_allow(recipe, tp):
    """48 / 2 is no multiple of 16, nor 48 one of 32. Parameters keep their names, so that weights
    load anywhere."""
    config = GROUPED | dict(dim=64, ffn_dim=48)
    model = Llama(LlamaConfig(**config))
    names = [name for name, _ in model.named_parameters()]
    float8.use_float8(model, alone(float8=recipe, tp=tp))
    replaced = []
    for name, module in model.named_modules():
        if isinstance(module, Float8Linear):
            assert name.startswith("layers.")
            assert module.recipe == recipe
            replaced.append(name.rpartition(".")[2])
    expected = ["wq", "wk", "wv", "wo"]
    if tp == 1 and recipe == "rowwise":
        expected += ["w1", "w2", "w3"]
    assert sorted(replaced) == sorted(2 * expected)  # of two layers
    assert [name for name, _ in model.named_parameters()] == names
