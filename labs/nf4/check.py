"""The check of labs/nf4."""

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

import lora
import techniques.nf4 as nf4
from labs.machinery import compare
from labs.machinery.compare import Property
from labs.machinery.lab import drawn
from labs.machinery.student import check_returned
from labs.machinery.training import Run
from perf.instruments import Live

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
# Frozen matrices with adapters beside them. They weigh more than the few tokens that pass through.
WIDTHS = [128, 192] * 4 + [128]
TOKENS, RANK = 5, 3
WEIGHTS = sum(out * width for out, width in zip(WIDTHS[1:], WIDTHS))
STORED = WEIGHTS // 2 + 4 * WEIGHTS // BLOCK  # bytes of codes and of scales
# Bytes that may be kept from forward to backward: the inputs of products, and one matrix.
LIMIT = sum(4 * TOKENS * (width + RANK) * 8 for width in WIDTHS) + 128 * 192 * 4


def matrices(seed: int) -> dict[str, Tensor]:
    """Return matrices to quantize, in float32."""
    generator = torch.Generator().manual_seed(seed)
    found = {name: torch.randn(ROWS, COLUMNS, generator=generator) / 50
             for name in ("normal", "with outliers", "with zeros")}  # fmt: skip
    found["with outliers"][::3, ::50] *= 40
    found["with zeros"][3] = found["with zeros"][5, :BLOCK] = 0
    return {name: with_exact_scales(matrix) for name, matrix in found.items()}


def inexact(seed: int) -> Tensor:
    """Return a matrix whose scales show if they are rounded."""
    return drawn(seed + 2, (ROWS, COLUMNS))[0].float()


def with_exact_scales(matrix: Tensor) -> Tensor:
    """Return a matrix, whose blocks have a power of two as their largest absolute value. Then the
    scales are exact in any precision, and right answers equal to the last bit."""
    blocks = matrix.unflatten(1, (-1, BLOCK))
    largest = blocks.abs().amax(2, keepdim=True)
    power = torch.exp2(torch.log2(largest).ceil())
    return torch.where(largest == 0, 0, blocks / largest * power).flatten(1)


def stack(seed: int) -> tuple[list[Tensor], list[Tensor], Tensor]:
    """Return frozen matrices in float32, the factors of adapters, and an input, in float64."""
    generator = torch.Generator().manual_seed(seed + 1)
    shapes = list(zip(WIDTHS[1:], WIDTHS))
    frozen = [torch.randn(o, i, generator=generator) / i**0.5 for o, i in shapes]
    factors = [torch.randn(shape, generator=generator, dtype=torch.float64) / 10
               for o, i in shapes for shape in ((RANK, i), (o, RANK))]  # fmt: skip
    x = torch.randn(TOKENS, WIDTHS[0], generator=generator, dtype=torch.float64)
    frozen = [with_exact_scales(matrix) for matrix in frozen]
    return frozen, [f.requires_grad_() for f in factors], x.requires_grad_()


def run(x: Tensor, factors: list[Tensor], products: list[Callable]) -> Tensor:
    """Return what comes out of the stack, where products[i] multiplies by frozen matrix i."""
    for product, A, B in zip(products, factors[::2], factors[1::2]):
        y = check_returned(product(x), Tensor, "x @ matrix.T from multiply, a tensor")
        x = torch.tanh(y + x @ A.T @ B.T)
    return x


def on_rank(load: Callable, size: int, seed: int, rank: int) -> dict:
    """Quantize matrices with the student's functions, and run a stack of them with adapters. Return
    what came out, and what was held."""
    found = {"matrices": {}}
    frozen, factors, x = stack(seed)
    what = "three functions: quantize, dequantize and multiply"
    quantize, dequantize, multiply = check_returned(load()(), (Callable,) * 3, what)
    for name, matrix in matrices(seed).items():
        what = "codes and scales from quantize, two tensors"
        packed = check_returned(quantize(matrix), (Tensor, Tensor), what)
        dtype = torch.float64 if name == "with zeros" else torch.float32
        what = "the matrix from dequantize, a tensor"
        matrix = check_returned(dequantize(*packed, dtype), Tensor, what)
        if matrix.dtype != dtype:
            raise TypeError(f"dequantize gives {matrix.dtype} where it is asked for {dtype}")
        found["matrices"][name] = matrix
        if name == "normal":
            found["codes"] = packed[0]
    found["scales"] = quantize(inexact(seed))[1]
    with Live([*frozen, *factors, x]) as live:
        before = live.now
        packed = [quantize(matrix.clone()) for matrix in frozen]
        found["stored"] = live.now - before
        products = [lambda x, pair=pair: multiply(x, *pair) for pair in packed]
        before = live.now
        out = run(x, factors, products)
        found["kept"] = live.now - before
        before, alone = live.now, x * 1
        product = multiply(alone, *packed[0])
        del alone
        found["for x"] = live.now - before - product.nbytes
        if out.requires_grad:
            (out**2).sum().backward()
    found["output"] = out.detach()
    found["gradients"] = [t.grad for t in (x, *factors)]
    return found


# ---------------------------------------------------------------------------- what is expected


def of_block(blocks: Tensor) -> Tensor:
    return blocks.abs().amax(2, keepdim=True)


def of_row(blocks: Tensor) -> Tensor:
    return blocks.abs().amax((1, 2), keepdim=True).expand(*blocks.shape[:2], 1)


def of_matrix(blocks: Tensor) -> Tensor:
    return blocks.abs().max().expand(*blocks.shape[:2], 1)


def with_sign(blocks: Tensor) -> Tensor:
    """Return of each block the weight that is farthest from 0."""
    return blocks.gather(2, blocks.abs().argmax(2, keepdim=True))


def rounded(
    matrix: Tensor,
    scale_of: Callable[[Tensor], Tensor] = of_block,
    numbers: Tensor = NF4,
    allowed: Callable[[Tensor], Tensor] = torch.isfinite,
) -> tuple[Tensor, Tensor]:
    """Return the nearest of `numbers` times a scale for each weight, found by trying all of them,
    and the places of these numbers. `allowed` is given weight - number."""
    blocks = matrix.double().unflatten(1, (-1, BLOCK))
    scales = scale_of(blocks)
    apart = blocks[..., None] - scales[..., None] * numbers
    places = torch.where(allowed(apart), apart.abs(), torch.inf).argmin(-1)
    return (numbers[places] * scales).flatten(1), places.flatten(1)


def unscaled(matrix: Tensor) -> Tensor:
    """Return what weights are if they are compared with NF4 as they are, and then scaled."""
    numbers, _ = rounded(matrix, lambda blocks: torch.ones_like(blocks[..., :1]))
    blocks = numbers.unflatten(1, (-1, BLOCK))
    return (blocks * of_block(matrix.unflatten(1, (-1, BLOCK)))).flatten(1)


def by_column(matrix: Tensor) -> Tensor:
    """Return what weights are if blocks are neighbours in a column."""
    down = matrix.T.reshape(ROWS, COLUMNS)
    return rounded(down)[0].view(COLUMNS, ROWS).T


EVEN = (
    "These numbers are evenly spaced. Most weights are small beside their scale, and there the "
    "numbers of NF4 are closer together."
)
NEAREST = "and not the nearest: borders lie in the middle between two numbers."
OUTLIER = "so an outlier spoils all of it. Each block has its own."
# A sentence, and the matrix that such a mistake gives.
MISTAKES: list[tuple[str, Callable[[Tensor], Tensor]]] = [
    (EVEN, lambda m: rounded(m, numbers=torch.linspace(-1, 1, 16).double())[0]),
    (EVEN, lambda m: rounded(m, numbers=torch.arange(-7, 8).double() / 7)[0]),
    (f"A row has one scale, {OUTLIER}", lambda m: rounded(m, of_row)[0]),
    (f"The matrix has one scale, {OUTLIER}", lambda m: rounded(m, of_matrix)[0]),
    ("A block has neighbours of a row, and these are of a column.", by_column),
    (
        "The scale of a block is its largest absolute value, and not its largest weight: what lies "
        "below its negative is cut off.",
        lambda m: rounded(m, lambda blocks: blocks.amax(2, keepdim=True))[0],
    ),
    (
        "The scale of a block has the sign of the weight that is farthest from 0. NF4 has other "
        "numbers below 0 than above, which change places so.",
        lambda m: rounded(m, with_sign)[0],
    ),
    (
        f"Weights become the next number below, {NEAREST}",
        lambda m: rounded(m, allowed=lambda apart: apart >= 0)[0],
    ),
    (
        f"Weights become the next number above, {NEAREST}",
        lambda m: rounded(m, allowed=lambda apart: apart <= 0)[0],
    ),
    ("Weights are compared with NF4 as they are: divide them by their scales first.", unscaled),
    ("These are numbers of NF4, without their scales.", lambda m: NF4[rounded(m)[1]]),
    (
        "Neighbours have changed places: quantize and dequantize take the codes of a byte in "
        "different order.",
        lambda m: rounded(m)[0].unflatten(1, (-1, 2)).flip(2).flatten(1),
    ),
]


def about(found: Tensor, expected: Tensor) -> bool:
    """Return whether two matrices are equal, up to a scale that is rounded to float32."""
    same_shape = found.shape == expected.shape
    return same_shape and bool((found - expected).norm() <= 1e-6 * expected.norm())


def properties(results: dict[str, list], size: int, seed: int) -> Iterator[Property]:
    result, given = {name: value for name, (value,) in results.items()}, matrices(seed)
    found = {name: matrix.double() for name, matrix in result["matrices"].items()}
    expected = {name: rounded(matrix)[0] for name, matrix in given.items()}
    error = (expected["normal"] - given["normal"]).norm() / given["normal"].norm()
    names = "normal", "with outliers"
    recognized = (text for text, mistake in MISTAKES
                  if all(about(found[name], mistake(given[name])) for name in names))  # fmt: skip
    reference = f"the nearest number to each weight, {100 * error:.1f} % off"
    mistake = next(recognized, "")
    yield compare.tensors("matrix", [found], expected, {}, reference, mistake)

    scales = inexact(seed).unflatten(1, (-1, BLOCK)).abs().amax(2)
    found, reference = (
        [result["scales"].view_as(scales)],
        "the largest absolute value of each block",
    )
    mistake = "A scale is the largest absolute value of its block, in float32, and is not rounded."
    yield compare.tensors("scales", found, scales, {}, reference, mistake)
    frozen, factors, x = stack(seed)
    inputs = [x, *factors]
    names = ["x", *(f"{name} {i}" for i in range(len(frozen)) for name in "AB")]

    def run_in_full(**detached) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the output of the stack of dequantized matrices, and the gradients of its sum of
        squares."""
        products = [partial(in_full, rounded(matrix)[0], **detached) for matrix in frozen]
        out = run(x, factors, products)
        return out.detach(), dict(zip(names, torch.autograd.grad((out**2).sum(), inputs)))

    out, gradients = run_in_full()
    _, without_x = run_in_full(detached=True)
    reference = "those of the dequantized matrix"
    yield compare.tensors("output", [result["output"]], out, {}, reference)
    mistakes = {
        "Nothing comes back through the frozen matrix. The layers before this one learn from the "
        "gradient of x.": without_x
    }
    found = [dict(zip(names, result["gradients"]))]
    yield compare.tensors("gradients", found, gradients, mistakes, reference)
    codes, places = result["codes"], rounded(given["normal"])[1].int()
    dtype = str(codes.dtype).removeprefix("torch.")
    bits, wanted = (8 * nbytes / WEIGHTS for nbytes in (result["stored"], STORED))
    mistakes = {
        f"Codes are in {dtype}: two of them fit into one byte, uint8.": codes.dtype != torch.uint8,
        "A code takes a whole byte, and needs half of it: two fit into one.": (
            codes.numel() == places.numel()
        ),
        "The matrix itself is still in memory: something that you keep refers to it.": bits > 32,
        "A code has 4 bits, and a scale in float32 adds half a bit a weight.": True,
    }
    yield Property(
        "stored",
        f"{bits:.2f} bits a weight; {wanted:.2f} are wanted",
        abs(result["stored"] - STORED) < 1024,
        mistakes,
    )
    halves = codes.int() >> 4, codes.int() & 15
    first, second = (all(map(torch.equal, halves, (places[:, i::2], places[:, 1 - i :: 2])))
                     for i in (0, 1))  # fmt: skip
    mistakes = {
        "The first of two codes is in the low half. Who reads your files expects it in the high "
        "half.": second,
        f"They are uint8 {[ROWS, COLUMNS // 2]}, in the order of the weights.": True,
    }
    text = f"{dtype} {list(codes.shape)}, the first in the high half"
    yield Property("codes", text, first and codes.dtype == torch.uint8, mistakes)
    yield compare.at_most(
        "live memory",
        [result["kept"]],
        LIMIT,
        "{:,} bytes between forward and backward, and may be {:,}",
        "Every layer keeps its full matrix until backward, as autograd does for the gradient of x. "
        "Keep the codes, and dequantize them again.",
    )
    yield Property(
        "saved for x",
        f"{result['for x']:,} bytes of one product",
        result["for x"] < TOKENS * WIDTHS[0] * 8,
        "x is kept until backward: only the gradient of a matrix needs it, and this one is frozen.",
    )


def in_full(matrix: Tensor, x: Tensor, detached: bool = False) -> Tensor:
    return (x.detach() if detached else x) @ matrix.T


# The widths of matrices in 4 bits are multiples of BLOCK.
RUN = Run(1, "--base-bits 4", "finetune_lora.py", "--dim 128 --ffn-dim 256")


def install(four_bits: Callable) -> None:
    """Multiply by the student's function what the project has quantized, which rounds scales."""
    _, _, multiply = four_bits()

    def product_in_4_bits(x: Tensor, weight: Tensor, row_scale: Tensor) -> Tensor:
        scales = weight[..., 0] * row_scale.view(torch.float32)
        return multiply(x, weight[..., 1:].flatten(1), scales)

    lora.product_in_4_bits = product_in_4_bits
