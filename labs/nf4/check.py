"""The check of labs/nf4."""

from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from labs.machinery import compare
from labs.machinery.compare import Property
from labs.machinery.lab import drawn
from labs.machinery.student import check_returned
from perf.instruments import Live
from techniques import nf4

FUNCTION = "four_bits"
ABOUT = "a matrix in 4 bits, and its product"
NEEDS = "`unflatten`, `bucketize`, `autograd.Function`"
POINT = "right numbers, and yet every matrix is kept"
LEADS_TO = "techniques/nf4.py", "quantized"
SIZES = (1,)
BARRED = (
    "techniques.nf4.quantized",
    "techniques.nf4.dequantized",
    "techniques.nf4.rounded",
    "lora.dequantized",
)
HINTS = (
    "Look at torch.bucketize: between which borders lies what is nearest to a number of NF4?",
    "Count the bytes of what quantize returns, and the bytes that live between forward and "
    "backward. Which of those does autograd keep for you?",
    "Cut rows into blocks with unflatten, divide by their largest absolute values, bucketize by "
    "middles of NF4, and put two codes together. A Function whose forward saves codes and scales, "
    "and whose backward dequantizes once more.",
)
ERRORS = {
    "same dtype": "The matrix has to have the dtype of x: dequantize is given it.",
    "too many indices for tensor": "Indices in uint8 are taken for a mask: make them int first.",
}
BLOCK, NF4 = nf4.BLOCK, torch.tensor(nf4.NF4, dtype=torch.float64)
ROWS, COLUMNS = 13, 192
# What is quantized, and the dtype in which it is asked for again.
DTYPES = {"normal": torch.float32, "outliers, zeros": torch.float64, "zeros": torch.float64}
EXTREMES = {"tiny": 2.0**-110, "huge": 2.0**120}  # times "normal": squares are 0, or infinite
DTYPES |= dict.fromkeys(EXTREMES, torch.float64)
# Frozen matrices with adapters beside them. They weigh more than the few tokens that pass through.
WIDTHS = [128, 192] * 4 + [128]
TOKENS, RANK = 5, 3
HOOKED = (
    "The first run is right, and the second with the same tensors is not: a hook on x stays there, "
    "and so does what a call keeps."
)
NAMES = "x", *(f"{factor} {i}" for i in range(len(WIDTHS) - 1) for factor in "AB")
WEIGHTS = sum(out * width for out, width in zip(WIDTHS[1:], WIDTHS))
STORED = WEIGHTS // 2 + 4 * WEIGHTS // BLOCK  # bytes of codes and of scales
# Bytes that may be kept from forward to backward: the inputs of products, and one matrix.
LIMIT = sum(4 * TOKENS * (width + RANK) * 8 for width in WIDTHS) + 128 * 192 * 4


def matrices(seed: int) -> dict[str, Tensor]:
    """Return matrices to quantize, in float32."""
    normal, rough = (matrix.float() / 50 for matrix in drawn(seed, *[(ROWS, COLUMNS)] * 2))
    rough[::3, ::50] *= 40
    rough[4] = rough[5, :BLOCK] = 0
    found = {"normal": normal, "outliers, zeros": rough, "zeros": torch.zeros(ROWS, COLUMNS)}
    found |= {name: normal * factor for name, factor in EXTREMES.items()}
    return {name: with_exact_scales(matrix) for name, matrix in found.items()}


def with_exact_scales(matrix: Tensor) -> Tensor:
    """Return a matrix, whose blocks have a power of two as their largest absolute value. Then the
    scales are exact in any precision, and right answers equal to the last bit."""
    blocks = matrix.unflatten(1, (-1, BLOCK))
    largest = blocks.abs().amax(2, keepdim=True)
    power = torch.exp2(torch.log2(largest).ceil())
    return torch.where(largest == 0, 0, blocks / largest * power).flatten(1)


def inexact(seed: int) -> Tensor:
    """Return a matrix whose scales show if they are rounded."""
    return drawn(seed + 2, (ROWS, COLUMNS))[0].float()


def stack(seed: int) -> tuple[list[Tensor], list[Tensor], Tensor]:
    """Return frozen matrices in float32, the factors of adapters, and an input, in float64."""
    shapes = list(zip(WIDTHS[1:], WIDTHS))
    of_factors = [shape for o, i in shapes for shape in ((RANK, i), (o, RANK))]
    frozen = [matrix.float() / matrix.shape[1] ** 0.5 for matrix in drawn(seed + 1, *shapes)]
    frozen[1][2, :BLOCK] = 0
    x, *factors = drawn(seed + 3, (TOKENS, WIDTHS[0]), *of_factors)
    factors = [(factor / 10).requires_grad_() for factor in factors]
    return [with_exact_scales(matrix) for matrix in frozen], factors, x.requires_grad_()


def run(x: Tensor, factors: list[Tensor], products: list[Callable]) -> Tensor:
    """Return what comes out of the stack, where products[i] multiplies by frozen matrix i."""
    for product, A, B in zip(products, factors[::2], factors[1::2]):
        y = check_returned(product(x), Tensor, "x @ matrix.T from multiply, a tensor")
        x = torch.tanh(y + x @ A.T @ B.T)
    return x


def on_rank(load: Callable, size: int, seed: int, rank: int) -> dict:
    """Quantize matrices with the student's functions, and run a stack of them with adapters. Return
    what came out, and what was held."""
    matrix_of = {}
    codes_of = {}
    scales_of = {}
    frozen, factors, x = stack(seed)
    what = "three functions: quantize, dequantize and multiply"
    quantize, dequantize, multiply = check_returned(load()(), (Callable,) * 3, what)
    for name, matrix in matrices(seed).items():
        what = "codes and scales from quantize, two tensors"
        codes, scales = check_returned(quantize(matrix), (Tensor, Tensor), what)
        what = "the matrix from dequantize, a tensor"
        matrix_of[name] = check_returned(dequantize(codes, scales, DTYPES[name]), Tensor, what)
        codes_of[name], scales_of[name] = codes, scales
    extremes = {name: matrix_of.pop(name) / factor for name, factor in EXTREMES.items()}
    for name, factor in EXTREMES.items():
        extremes[f"scales, {name}"] = scales_of.pop(name) / factor
    scales_of["inexact"] = quantize(inexact(seed))[1]
    with Live([*frozen, *factors, x]) as live:
        before = live.now
        packed = [quantize(matrix.clone()) for matrix in frozen]
        stored = live.now - before
        products = [lambda x, pair=pair: multiply(x, *pair) for pair in packed]
        before = live.now
        out = run(x, factors, products)
        kept = live.now - before
        before = live.now
        alone = x * 1
        product = multiply(alone, *packed[0])
        del alone
        kept_for_x = live.now - before - product.nbytes
        if out.requires_grad:
            (out**2).sum().backward()
    gradients = gradients_of(x, factors)
    for tensor in (x, *factors):
        tensor.grad = None
    again = run(x, factors, products)
    if again.requires_grad:
        (again**2).sum().backward()
    return {
        "again": {"output": again.detach()} | gradients_of(x, factors),
        "matrix": matrix_of,
        "extremes": extremes,
        "codes": codes_of,
        "scales": scales_of,
        "output": out.detach(),
        "gradients": gradients,
        "stored": stored,
        "kept": kept,
        "kept for x": kept_for_x,
    }


def gradients_of(x: Tensor, factors: list[Tensor]) -> dict[str, Tensor | None]:
    return dict(zip(NAMES, (tensor.grad for tensor in (x, *factors))))


def nearest(matrix: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the nearest number of NF4 to each weight, found by trying all of them, times the scale
    of its block; the places of these numbers; and the scales. All are in float64."""
    blocks = matrix.double().unflatten(1, (-1, BLOCK))
    scales = blocks.abs().amax(2, keepdim=True)
    scaled = blocks / scales.where(scales > 0, 1)
    places = (scaled[..., None] - NF4).abs().argmin(-1)
    return (NF4[places] * scales).flatten(1), places.flatten(1), scales[..., 0]


def properties(results: dict[str, list], size: int, seed: int) -> Iterator[Property]:
    given = matrices(seed)
    expected = {name: nearest(matrix)[0].to(DTYPES[name]) for name, matrix in given.items()}
    extremes = {name: expected.pop(name) / factor for name, factor in EXTREMES.items()}
    error = (expected["normal"] - given["normal"]).norm() / given["normal"].norm()
    text = f"the nearest number to each weight, {100 * error:.1f} % off"
    yield compare.tensors("matrix", results["matrix"], expected, text)
    given["inexact"] = inexact(seed)
    scales = {name: nearest(matrix)[2].float() for name, matrix in given.items()}
    for name, factor in EXTREMES.items():
        extremes[f"scales, {name}"] = scales.pop(name) / factor
    text = "the largest absolute value of each block"
    mistake = (
        "A scale is the largest absolute value of its block, in float32: it is not rounded, and "
        "that of zeros is 0."
    )
    yield compare.tensors("scales", results["scales"], scales, text, mistake)
    text = "the same of matrices that are tiny and huge"
    yield compare.tensors("extremes", results["extremes"], extremes, text)

    frozen, factors, x = stack(seed)
    out = run(x, factors, [partial(F.linear, weight=nearest(matrix)[0]) for matrix in frozen])
    (out**2).sum().backward()
    text = "those of the dequantized matrix"
    yield compare.tensors("output", results["output"], out.detach(), text)
    gradients = gradients_of(x, factors)
    yield compare.tensors("gradients", results["gradients"], gradients, text)
    wanted = {"output": out.detach()} | gradients
    text = "the same, of the same tensors"
    yield compare.tensors("again", results["again"], wanted, text, HOOKED)

    (stored,), (codes,) = results["stored"], results["codes"]
    dtype = codes["normal"].dtype
    bits, wanted = (8 * nbytes / WEIGHTS for nbytes in (stored, STORED))
    mistakes = {
        f"Codes are in {dtype}: two of them fit into one byte, uint8.": dtype != torch.uint8,
        "A code takes a whole byte, and needs half of it: two fit into one.": (
            codes["normal"].numel() == ROWS * COLUMNS
        ),
        "The matrix itself is still in memory: something that you keep refers to it.": bits > 32,
        "A code has 4 bits, and a scale in float32 adds half a bit a weight.": True,
    }
    text = f"{bits:.2f} bits a weight; {wanted:.2f} are wanted"
    yield Property("stored", text, abs(stored - STORED) < 1024, mistakes)
    found = [{name: of_matrix.double() for name, of_matrix in codes.items()}]
    places = {name: nearest(given[name])[1].double() for name in codes}
    expected = {name: 16 * of[:, ::2] + of[:, 1::2] for name, of in places.items()}
    mistake = "They are uint8 [out, in / 2], in the order of the weights."
    yield compare.tensors("codes", found, expected, "two a byte, first in the high half", mistake)
    yield compare.at_most(
        "live memory",
        results["kept"],
        LIMIT,
        "{:,} bytes between forward and backward, and may be {:,}",
        "Every layer keeps its full matrix until backward, as autograd does for the gradient of x. "
        "Keep the codes, and dequantize them again.",
    )
    (for_x,) = results["kept for x"]
    yield Property(
        "saved for x",
        f"{for_x:,} bytes of one product",
        for_x < TOKENS * WIDTHS[0] * 8,
        "x is kept until backward: only the gradient of a matrix needs it, and this one is frozen.",
    )
