"""float8: rounding to 8 bits, and a linear layer whose products are of rounded numbers."""

import math

import pytest
import torch
from conftest import succeed
from exact import GROUPED
from test_train import flags
from torch.utils.flop_counter import FlopCounterMode

from costs.traffic import flops_per_token
from model import Llama, LlamaConfig
from parallel import ParallelConfig
from plumbing.processes import UserError
from techniques.float8 import (
    BLOCK,
    E4M3,
    E5M2,
    RECIPES,
    Float8Linear,
    float8_product,
    has_kernel,
    in_tiles,
    layers_in_8_bits,
    product,
    recipes_of,
    rounded,
    use_float8,
)

WIDE = dict(dim=64, n_layers=2, n_heads=4, n_kv_heads=4, ffn_dim=128, vocab_size=101)
FORMATS = {E4M3: (4, 3, 7), E5M2: (5, 2, 15)}  # bits of exponent and mantissa, bias


def decoded(code: int, format: torch.dtype) -> float:
    """The number of a code, by its bits. e4m3 has no infinity, and one NaN of each sign."""
    exponent_bits, mantissa_bits, bias = FORMATS[format]
    sign = -1 if code >> 7 else 1
    exponent = code >> mantissa_bits & (1 << exponent_bits) - 1
    mantissa = code & (1 << mantissa_bits) - 1
    if format == E4M3 and code & 0x7F == 0x7F:
        return math.nan
    if format == E5M2 and exponent == 31:
        return math.nan if mantissa else sign * math.inf
    fraction = mantissa / (1 << mantissa_bits)
    if exponent == 0:
        return sign * fraction * 2.0 ** (1 - bias)
    return sign * (1 + fraction) * 2.0 ** (exponent - bias)


@pytest.mark.parametrize("format", FORMATS)
def test_all_codes_and_what_is_between_them(format):
    """The docstring's table; rounding is to the nearest, of two to the one with an even code."""
    codes = torch.arange(256, dtype=torch.uint8).view(format).double()
    expected = torch.tensor([decoded(code, format) for code in range(256)], dtype=torch.float64)
    torch.testing.assert_close(codes, expected, rtol=0, atol=0, equal_nan=True)
    positive = sorted(value for value in expected[:128].tolist() if math.isfinite(value))
    assert positive[-1] == torch.finfo(format).max == {E4M3: 448, E5M2: 57344}[format]
    assert positive[1] == {E4M3: 2**-9, E5M2: 2**-16}[format]
    assert sum(1 <= value < 2 for value in positive) == {E4M3: 8, E5M2: 4}[format]
    for low, (i, high) in zip(positive, enumerate(positive[1:], 1)):
        middle = (low + high) / 2
        near = torch.tensor([middle * (1 - 1e-6), middle, middle * (1 + 1e-6)])
        even = low if (i - 1) % 2 == 0 else high
        assert near.to(format).double().tolist() == [low, even, high]


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_scale_brings_the_largest_to_the_formats_largest(recipe, format):
    torch.manual_seed(0)
    largest = torch.finfo(format).max
    x = torch.randn(48, 64) * torch.logspace(-6, 6, 48)[:, None]
    x[3] = 0
    eight = rounded(x, format, recipe)
    scale = eight.scale
    blocks = {"tensorwise": x.flatten(), "rowwise": x, "mxfp8": x.unflatten(1, (-1, BLOCK))}[recipe]
    amax = blocks.abs().amax(-1)
    if recipe == "mxfp8":  # the smallest power of two with which the largest number fits
        exact = torch.log2((amax / largest).double()).ceil().clamp(-127, 127)
        assert torch.equal(scale.double(), torch.exp2(exact))
    else:
        factor = (largest / amax.double().clamp(min=2.0**-100)).float()
        assert torch.equal(scale.flatten(), factor.reciprocal().flatten())
    step = 2.0 ** -(FORMATS[format][1] + 1)  # half of a unit in the last place
    error = (eight.numbers(torch.float64) - x.double()).abs()
    smallest = scale.double() * torch.tensor(decoded(1, format), dtype=torch.float64)
    if recipe == "mxfp8":
        smallest = smallest.repeat_interleave(BLOCK, 1)
    assert (error <= torch.maximum(step * x.double().abs() * (1 + 1e-6), smallest)).all()


@pytest.mark.parametrize("recipe", RECIPES)
def test_what_is_not_finite_is_not_hidden(recipe):
    for bad in (math.inf, -math.inf, math.nan):
        x = torch.ones(32, 32)
        x[0, 5] = bad
        y = float8_product(x, torch.ones(32, 32), recipe)
        assert not y[0].isfinite().any()


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize(
    "dtype, tolerance", [("float64", 1e-15), ("float32", 1e-6), ("bfloat16", 6e-3)]
)
def test_products_are_those_of_rounded_numbers(recipe, dtype, tolerance):
    """Output and both gradients, beside float64 products of what the codes stand for."""
    torch.manual_seed(0)
    dtype = getattr(torch, dtype)
    x, weight, grad = (torch.randn(*shape, dtype=dtype) for shape in ((64, 96), (32, 96), (64, 32)))
    weight[2] *= 1000  # an outlier
    inputs = x.requires_grad_(), weight.requires_grad_()
    y = float8_product(*inputs, recipe)
    found = y.detach(), *torch.autograd.grad(y, inputs, grad)
    of_gradients = E4M3 if recipe == "mxfp8" else E5M2

    def numbers(x: torch.Tensor, format: torch.dtype) -> torch.Tensor:
        return rounded(x.detach(), format, recipe).numbers(torch.float64)

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
    theirs = torch._scaled_mm(a.codes, b.codes.T, a.scale, b.scale, out_dtype=torch.bfloat16)
    assert torch.equal(product(a, b, torch.bfloat16), theirs)


def test_scales_of_blocks_in_the_order_of_a_gpu():
    """By the formula of cuBLAS's documentation: where the scale of row r and column c lies."""
    scales = torch.exp2(torch.randint(-126, 127, (200, 6)).float())
    tiles = in_tiles(scales)
    assert len(tiles) == 256 * 8
    for r in range(200):
        for c in range(6):
            tile = (r // 128) * 2 + c // 4
            place = tile * 512 + (r % 32) * 16 + (r % 128 // 32) * 4 + c % 4
            assert tiles[place].float() == scales[r, c]


def test_which_gpus_multiply_in_8_bits():
    assert recipes_of((8, 0)) == ()
    assert recipes_of((8, 9)) == recipes_of((9, 0)) == recipes_of((12, 0)) == RECIPES[:2]
    assert recipes_of((10, 0)) == recipes_of((10, 3)) == RECIPES
    assert not has_kernel(torch.device("cpu"), torch.bfloat16, "rowwise")


def test_products_in_8_bits_count_half_for_mfu():
    model = Llama(LlamaConfig(**GROUPED | dict(dim=64, ffn_dim=48, n_heads=4, n_kv_heads=2)))
    in_8_bits = sum(model.get_parameter(f"{n}.weight").numel()
                    for n in layers_in_8_bits(model, "rowwise"))  # fmt: skip
    assert in_8_bits == 2 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 48)
    plain = flops_per_token(model, 16)
    assert plain - flops_per_token(model, 16, ParallelConfig(float8="rowwise")) == 3 * in_8_bits


def test_matrices_of_blocks_are_replaced_where_their_widths_allow():
    config = LlamaConfig(**GROUPED | dict(dim=64, ffn_dim=48, n_heads=4, n_kv_heads=2))
    model = Llama(config)
    names = {name for name, _ in model.named_parameters()}
    use_float8(model, "mxfp8")
    replaced = {name for name, m in model.named_modules() if isinstance(m, Float8Linear)}
    attention = [f"layers.{i}.attention.{w}" for i in range(2) for w in ("wq", "wk", "wv", "wo")]
    assert replaced == set(attention)  # 48 is no multiple of 32
    assert model.layers["0"].attention.wq.recipe == "mxfp8"
    assert {name for name, _ in model.named_parameters()} == names
    model = Llama(config)
    use_float8(model, "rowwise", tp=2)  # 48 / 2 is no multiple of 16
    replaced = {name for name, m in model.named_modules() if isinstance(m, Float8Linear)}
    assert replaced == set(attention)
    for recipe, widths in (("row-wise", 64), ("rowwise", 40)):
        small = Llama(LlamaConfig(**GROUPED | dict(dim=widths, ffn_dim=44)))
        with pytest.raises(UserError, match=r"no recipe|no matrix"):
            use_float8(small, recipe)


def test_only_what_is_asked_for_is_computed():
    x, weight = torch.randn(32, 64), torch.randn(32, 64)
    for needs_x, needs_weight in ((True, False), (False, True)):
        inputs = x.clone().requires_grad_(needs_x), weight.clone().requires_grad_(needs_weight)
        with FlopCounterMode(display=False) as counted:
            float8_product(*inputs, "rowwise").sum().backward()
        assert counted.get_total_flops() == 2 * 2 * 32 * 64 * 32
        assert (inputs[0].grad is not None, inputs[1].grad is not None) == (needs_x, needs_weight)


def test_an_odd_number_of_tokens_is_refused_in_blocks():
    x = torch.randn(33, 64, requires_grad=True)
    weight = torch.randn(32, 64, requires_grad=True)
    with pytest.raises(UserError, match="33 numbers"):
        float8_product(x, weight, "mxfp8").sum().backward()


def test_a_run_says_which_layers_and_its_weights_load_anywhere(corpus, tmp_path):
    """train.py in 8 bits, resumed without them."""
    out = tmp_path / "run"
    given = flags(corpus, out, steps=2, float8="tensorwise")
    told = succeed("train.py", *given).out
    assert "tensorwise float8 in wq wk wv wo w1 w2 w3 of 2 blocks, emulated" in told
    resumed = succeed("train.py", *flags(corpus, out, steps=3), "--resume")
    assert "warning: --float8 was tensorwise, is now none" in resumed.err
    assert "float8" not in resumed.out
