"""The check of labs/float8."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from labs.machinery import compare
from labs.machinery.compare import Property, Values
from labs.machinery.student import check_returned
from perf.instruments import Counted, Live
from techniques.float8 import E4M3, E5M2

FUNCTION = "float8_linear"
ABOUT = "a linear layer in 8 bits, forward and backward"
NEEDS = "`autograd.Function`, `all_reduce` with MAX"
POINT = "without a scale the gradient is zero"
LEADS_TO = "techniques/float8.py", "Float8Product"
SIZES = 1, 2, 3
BARRED = (
    "techniques.float8.rounded",
    "techniques.float8.float8_product",
    "techniques.float8.Float8Product",
)
HINTS = (
    "Look at the table in the head of techniques/float8.py: between which two numbers must those "
    "of a tensor lie, so that rounding keeps them? And of which tensors has a rank only a part?",
    "Count the zeros among the codes of a small gradient, before and after it is multiplied by its "
    "factor. Then count the bytes that are kept for backward.",
    "A function that is given a tensor and its largest absolute value, and returns codes and a "
    "scale. A Function whose forward all-reduces two maxima, rounds two tensors, saves codes and "
    "scales, and multiplies. Backward rounds the gradient, and multiplies twice.",
)
ERRORS = {
    "Mismatch in shape: grad_output": "The output is [n, out], as that of x @ weight.T.",
    "not implemented for 'Float8": "Codes are for `product`. PyTorch does little else with them "
    "than to cast them.",
    "'float' object has no attribute 'double'": "`product` is given scales as tensors.",
}
HOOKED = (
    "The first call is right, and the second with the same weight is not: a hook on the weight "
    "stays there, and so does a largest number that a call keeps."
)
TOKENS, IN, OUT = 13, 50, 11  # 3 ranks do not divide `in`
# The largest x, weight and gradient are the largest of their format times a power of two. So the
# right factors are exact in any precision, and right answers are equal to the last bit.
CASES = {  # name -> the exponents of these powers; below e4m3's 2^-9 there is nothing but 0
    "near 1": (-7, -8, -16),
    "far apart": (8, -9, -36),  # x up to 114,688, and gradients from 8e-7 down to 8e-15
    "zeros": None,  # x and the gradient
    "zeros here": (-7, -8, -16),  # x of rank 0
}


def tensors(seed: int, case: str) -> tuple[Tensor, Tensor, Tensor]:
    """Return x [n, in], weight [out, in] and the gradient [n, out] of a case, in float64."""
    generator = torch.Generator().manual_seed(seed)
    shapes = (TOKENS, IN), (OUT, IN), (TOKENS, OUT)
    x, weight, grad = (torch.randn(shape, generator=generator) for shape in shapes)
    if case == "zeros":
        return x.double() * 0, weight.double(), grad.double() * 0
    if case == "far apart":
        grad *= torch.logspace(0, -8, TOKENS)[:, None]  # from token to token
    if case == "zeros here":
        x[:, : -(-IN // 2)] = 0
    x[:, -1] *= 4  # so the last rank has the largest number
    weight[:, -1] *= 4
    largest = (
        torch.finfo(format).max * 2.0**power
        for format, power in zip((E4M3, E4M3, E5M2), CASES[case])
    )
    return tuple(t.double() / t.abs().max() * to for t, to in zip((x, weight, grad), largest))


def on_rank(load: Callable, size: int, seed: int, rank: int) -> dict:
    """Run the student's layer on this rank's columns, in each case. Return what came out, what was
    kept between forward and backward, and what was sent."""
    found = {"output": {}, "gradients": {}, "again": {}, "kept": 0}
    float8_linear = load()
    for case in CASES:
        *wholes, grad = tensors(seed, case)
        parts = (whole.chunk(size, dim=1)[rank].clone() for whole in wholes)
        source, weight = (part.requires_grad_() for part in parts)
        with Live([source, weight, grad]) as live, Counted(None) as counted:
            before = live.now
            x = source * 1  # a tensor that nobody else keeps
            y = check_returned(float8_linear(x, weight), Tensor, "x @ weight.T, a tensor")
            del x
            found["kept"] = max(found["kept"], live.now - before - y.nbytes)
            if y.requires_grad:
                y.backward(grad)
        found["output"] |= {case: y.detach(), f"weight, {case}": weight.detach()}
        of_x = of_tokens(source.grad, grad)
        found["gradients"] |= {f"x, {case}": of_x, f"weight, {case}": weight.grad}
        found["sent"] = counted.sent
        source.grad = weight.grad = None
        again = float8_linear(source * 1, weight)
        if again.requires_grad:
            again.backward(grad)
        of_x = of_tokens(source.grad, grad)
        found["again"] |= {case: again.detach(), f"x, {case}": of_x, f"weight, {case}": weight.grad}
    return found


def of_tokens(x_grad: Tensor | None, grad: Tensor) -> Tensor | None:
    """Return the gradient of x in units of the largest number that backward is given for a token,
    since those of tokens have very different sizes."""
    if x_grad is None:
        return None
    return x_grad / grad.abs().amax(1, keepdim=True).clamp(min=1e-300)


def rounded(tensor: Tensor, format: torch.dtype) -> Tensor:
    """Return the numbers that the codes of a tensor stand for."""
    scale = tensor.abs().max() / torch.finfo(format).max
    return (tensor / (scale or 1)).to(format).double() * scale


def layer(seed: int, size: int) -> tuple[Values, Values]:
    """Return each rank's outputs and gradients, in all cases."""
    outputs = [{} for _ in range(size)]
    gradients = [{} for _ in range(size)]
    for case in CASES:
        x, weight, grad = tensors(seed, case)
        g = rounded(grad, E5M2)
        wholes = (rounded(x, E4M3), rounded(weight, E4M3), weight)
        parts = zip(*(whole.chunk(size, dim=1) for whole in wholes))
        for rank, (a, w, weight) in enumerate(parts):
            outputs[rank] |= {case: a @ w.T, f"weight, {case}": weight}
            of_x = of_tokens(g @ w, grad)
            gradients[rank] |= {f"x, {case}": of_x, f"weight, {case}": g.T @ a}
    return outputs, gradients


def properties(results: dict[str, list], size: int, seed: int) -> Iterator[Property]:
    outputs, gradients = layer(seed, size)
    x, weight, _ = (whole.chunk(size, dim=1)[0] for whole in tensors(seed, "near 1"))
    exact = x @ weight.T
    off = 100 * (outputs[0]["near 1"] - exact).norm() / exact.norm()
    reference = f"that of rounded numbers, {off:.1f} % off the exact one"
    yield compare.tensors("output", results["output"], outputs, reference)
    found = results["gradients"]
    of_x = [of_rank["x, far apart"] for of_rank in found if of_rank["x, far apart"] is not None]
    zeros = sum(int((gradient == 0).sum()) for gradient in of_x)
    text = f"{zeros} of {TOKENS * IN} numbers of x's gradient are 0"
    yield Property("died", text, not zeros, "The gradient dies.", found)
    yield compare.tensors("gradients", found, gradients, "those of rounded numbers")
    wanted = [{case: output[case] for case in CASES} | of_rank
              for output, of_rank in zip(outputs, gradients)]  # fmt: skip
    yield compare.tensors("again", results["again"], wanted, "the same", HOOKED)

    yield compare.at_most(
        "live memory",
        results["kept"],
        -(-IN // size) * (TOKENS + OUT) + 64,
        "{:,} bytes between forward and backward, and may be {:,}",
        "A number of x takes 8 bytes, and its code 1: keep the codes, and not x.",
    )
    sent = list(map(compare.nbytes_of, results["sent"]))
    mistakes = {
        "All ranks have the whole gradient, and find its largest number by themselves.": (
            max(sent) == 24
        ),
        "A rank finds the largest number of its own columns, and sends only that.": True,
    }
    yield compare.at_most("bytes sent", sent, 16, "{}; two numbers have {}", mistakes)
