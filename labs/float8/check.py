"""The check of labs/float8."""

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

import techniques.float8 as float8
from labs.machinery import compare
from labs.machinery.compare import Property, Values
from labs.machinery.student import check_returned
from labs.machinery.training import Run
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
TOKENS, IN, OUT = 13, 50, 11  # 3 ranks do not divide `in`
# The largest x, weight and gradient are the largest of their format times a power of two. So the
# right factors are exact in any precision, and right answers are equal to the last bit.
CASES = {  # name -> the exponents of these powers; below e4m3's 2^-9 there is nothing but 0
    "near 1": (-7, -8, -16),
    "far apart": (8, -9, -36),  # x up to 114,688, and gradients from 8e-7 down to 8e-15
    "zeros": None,  # x and the gradient
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
    found = {"output": {}, "gradients": {}, "weights": {}, "recorded": False, "kept": 0}
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
            found["recorded"] |= "ToCopyBackward0" in recorded(y.grad_fn)
            if y.requires_grad:
                y.backward(grad)
        found["output"][case] = y.detach().double()
        found["gradients"] |= {f"{case}, x": source.grad, f"{case}, weight": weight.grad}
        found["weights"][case] = weight.detach()
        found["sent"] = counted.sent
    return found


def recorded(node) -> set[str]:
    """Return the names of the operators that autograd will go back through, from `node` on."""
    if node is None:
        return set()
    return {node.name()}.union(*(recorded(before) for before, _ in node.next_functions))


# ---------------------------------------------------------------------------- what is expected

# A format, and a function of all ranks' parts of a tensor and the rank: what it returns becomes the
# format's largest number. Or None: nothing is rounded.
Rounding = tuple[torch.dtype, Callable[[tuple[Tensor, ...], int], Tensor | float]] | None


def of_all(parts: tuple[Tensor, ...], rank: int) -> Tensor:
    return max(part.abs().max() for part in parts)


def of_rank(parts: tuple[Tensor, ...], rank: int) -> Tensor:
    return parts[rank].abs().max()


def signed(parts: tuple[Tensor, ...], rank: int) -> Tensor:
    return max(part.max() for part in parts)


def added(parts: tuple[Tensor, ...], rank: int) -> Tensor:
    return sum(part.abs().max() for part in parts)


class Roundings(NamedTuple):
    """How a layer's tensors are rounded; as it should be, unless it is said."""

    x: Rounding = (E4M3, of_all)
    weight: Rounding = (E4M3, of_all)
    gradient: Rounding = (E5M2, of_all)


def rounded(parts: tuple[Tensor, ...], rank: int, rounding: Rounding) -> Tensor:
    """Return the numbers that the codes of a rank's part stand for."""
    if rounding is None:
        return parts[rank]
    format, choose = rounding
    largest = torch.finfo(format).max
    scale = choose(parts, rank) / largest
    return (parts[rank] / (scale or 1)).clamp(-largest, largest).to(format).double() * scale


def layer(seed: int, size: int, how: Roundings) -> tuple[Values, Values]:
    """Return each rank's outputs and gradients, in all cases."""
    outputs, gradients = [{} for _ in range(size)], [{} for _ in range(size)]
    for case in CASES:
        x, weight, grad = tensors(seed, case)
        x, weight = x.chunk(size, dim=1), weight.chunk(size, dim=1)
        g = rounded((grad,), 0, how.gradient)
        for rank in range(size):
            a, w = rounded(x, rank, how.x), rounded(weight, rank, how.weight)
            outputs[rank][case] = a @ w.T
            gradients[rank] |= {f"{case}, x": g @ w, f"{case}, weight": g.T @ a}
    return outputs, gradients


def same_for_both(rounding: Rounding) -> Roundings:
    return Roundings(rounding, rounding)


# Sentence -> the roundings with which such a mistake gives the same.
OF_OUTPUT = {
    "Nothing is rounded: this is the product of x and weight as they are.": same_for_both(None),
    "x is not rounded.": Roundings(x=None),
    "The weight is not rounded.": Roundings(weight=None),
    "x and weight are rounded without a scale: what is beyond 448 has become 448.": same_for_both(
        (E4M3, lambda parts, rank: 448.0)
    ),
    "The factor is that of the largest number, and not of the largest absolute value: what is far "
    "below 0 is cut off.": same_for_both((E4M3, signed)),
    "Each rank scales by the largest number of its own columns, so the result depends on the "
    "number of ranks. The scale is that of the whole tensor.": same_for_both((E4M3, of_rank)),
    "The largest numbers of the ranks are added up, which all_reduce does by default: "
    "dist.ReduceOp.MAX takes the largest.": same_for_both((E4M3, added)),
    "x and weight are rounded to E5M2, which is coarser than E4M3.": same_for_both((E5M2, of_all)),
}
OF_GRADIENTS = {
    "It is rounded without a scale, and below 2^-17 nothing is left of it.": Roundings(
        gradient=(E5M2, lambda parts, rank: 57344.0)
    ),
    "It is rounded to E4M3, which does not reach as far down as E5M2.": Roundings(
        gradient=(E4M3, of_all)
    ),
    "E5M2 reaches up to 57,344, and not only to the 448 of E4M3.": Roundings(
        gradient=(E5M2, lambda parts, rank: of_all(parts, rank) * (57344 / 448))
    ),
    "The gradient is not rounded: the products of backward are of codes, too.": Roundings(
        gradient=None
    ),
    "Backward multiplies x or weight as it is, and not its codes.": same_for_both(None),
    "Backward multiplies x, weight and gradient as they are, and not their codes.": Roundings(
        None, None, None
    ),
}


def about(found: Tensor, expected: Tensor) -> bool:
    """Return whether the rows of two matrices are equal, up to a scale that is rounded to float32.
    Each row by itself: those of the gradients of tokens have very different sizes."""
    if found.shape != expected.shape:
        return False
    return bool(((found - expected).norm(dim=1) <= 1e-6 * expected.norm(dim=1)).all())


def sentence_for(found: Values, expected: Values, mistakes: Iterable[tuple[str, Values]]) -> str:
    """Return the sentence for what differs from the expected tensors, "" if it is not known."""
    pairs = [(rank, key) for rank, of_rank in enumerate(expected) for key in of_rank]
    wrong = [(r, k) for r, k in pairs if not about(found[r][k], expected[r][k])]
    if not wrong:
        return "The codes are right, and something is in float32. `product` returns float64."
    if not all(found[r][k].isfinite().all() for r, k in wrong):
        return (
            "Some numbers are NaN. A tensor of zeros has no factor, since 448 / 0 is infinite; and "
            "what is beyond a format's largest number has no code."
        )
    for sentence, values in mistakes:
        if all(about(found[r][k], values[r][k]) for r, k in wrong):
            return sentence
    ratios = [ratio(found[r][k], expected[r][k]) for r, k in wrong]
    if None in ratios:
        return ""
    if all(0.99 < value < 1.01 for value in ratios):
        return (
            "The codes are right, and a scale is a little off. Is something added to the largest "
            "number, so that it is not 0? Clamp it."
        )
    return (
        "The codes are right, and their product is multiplied by a wrong number. `product` is "
        "given scales: what makes numbers of codes again, in float32."
    )


def ratio(found: Tensor, expected: Tensor) -> float | None:
    """Return how many times as large as expected a tensor is; None if it is no such multiple."""
    if found.shape != expected.shape or not found.any():
        return None
    value = found.norm() / expected.norm()
    is_multiple = (found - value * expected).norm() <= 1e-6 * found.norm()
    return value.item() if is_multiple else None


def properties(results: dict[str, list], size: int, seed: int) -> Iterator[Property]:
    outputs, gradients = layer(seed, size, Roundings())
    exact, _ = layer(seed, size, Roundings(None, None, None))
    off = (outputs[0]["near 1"] - exact[0]["near 1"]).norm() / exact[0]["near 1"].norm()
    found = results["output"]
    mistakes = ((text, layer(seed, size, how)[0]) for text, how in OF_OUTPUT.items())
    reference = f"that of rounded numbers, {100 * off:.1f} % off the exact one"
    sentence = sentence_for(found, outputs, mistakes)
    yield compare.tensors("output", found, outputs, {}, reference, sentence)
    found = results["gradients"]
    if missing := [name for of_rank in found for name, g in of_rank.items() if g is None]:
        mistake = "Backward returns two gradients, that of x and that of weight."
        yield Property("gradients", f"{missing[0]} has none", False, mistake)
        return
    mistakes = ((text, layer(seed, size, how)[1]) for text, how in OF_GRADIENTS.items())
    sentence = sentence_for(found, gradients, mistakes)
    if any(results["recorded"]):
        sentence = (
            "Autograd has recorded your casts: backward of a cast casts the gradient to 8 bits, "
            "and that without a scale."
        )
    zeros = sum(int((of_rank["far apart, x"] == 0).sum()) for of_rank in found)
    text = f"{zeros} of {TOKENS * IN} numbers of x's gradient"
    yield Property("died", text, not zeros, f"The gradient dies: {text} are 0. {sentence}")
    yield compare.tensors("gradients", found, gradients, {}, "those of rounded numbers", sentence)

    weights = [tensors(seed, "near 1")[1].chunk(size, dim=1)[rank] for rank in range(size)]
    mistake = (
        "You have rounded the weight in place. An update is much smaller than the distance of two "
        "codes, so a weight that is kept in 8 bits would not learn."
    )
    found = [of_rank["near 1"] for of_rank in results["weights"]]
    yield compare.tensors("untouched", found, weights, {}, "as they were", mistake)
    columns = max(weight.shape[1] for weight in weights)
    yield compare.at_most(
        "live memory",
        results["kept"],
        columns * (TOKENS + OUT) + 64,
        "{:,} bytes between forward and backward, and may be {:,}",
        "A number of x takes 8 bytes, and its code 1: keep the codes, and not x.",
    )
    of_gradient = "All ranks have the whole gradient, and find its largest number by themselves."
    own = "A rank finds the largest number of its own columns, and sends only that."
    sent = list(map(compare.nbytes_of, results["sent"]))
    yield compare.at_most(
        "bytes sent", sent, 16, "{}; two numbers have {}", of_gradient if max(sent) == 24 else own
    )


# A rank has columns of the weights of wo and w2, whose products are the student's.
RUN = Run(flags="--tp 2 --float8 tensorwise --microbatch 6")


def install(float8_linear: Callable) -> None:
    """Multiply in 8 bits by the student's function where ranks have columns."""
    project = float8.float8_product

    def product(x: Tensor, weight: Tensor, recipe: str, groups: tuple = (None, None)) -> Tensor:
        if groups[0] is None:
            return project(x, weight, recipe, groups)
        return float8_linear(x.flatten(0, -2), weight).unflatten(0, x.shape[:-1])

    float8.float8_product = product
