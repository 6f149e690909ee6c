"""The check of labs/flash."""

from collections.abc import Callable, Iterator

from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from labs.machinery import compare
from labs.machinery.compare import Property
from labs.machinery.lab import LargestTensor, attend, drawn
from labs.machinery.student import check_returned
from perf.instruments import Live

FUNCTION = "flash_attention"
ABOUT = "attention in tiles, with a running maximum and sum, forward and backward"
NEEDS = "softmax and its gradient, `autograd.Function`"
POINT = "a sum over keys can be added up, and shrunk"
LEADS_TO = "model.py", "attend"
SIZES = (1,)
BARRED = (
    "torch.nn.functional.scaled_dot_product_attention",
    "torch.nn.functional.multi_head_attention_forward",
    "torch.nn.attention.flex_attention.flex_attention",
)
HINTS = (
    "Write softmax of a row as a quotient of two sums over keys. What do you know of them after "
    "the first tile, and what is wrong with it when the second has a larger score?",
    "Count the numbers of a row that you remember from tile to tile, and those that backward "
    "needs to make the probabilities of a tile again.",
    "Two loops, over tiles of queries and over the tiles of keys up to theirs. A Function whose "
    "forward saves the output and the logarithm of each row's sum, and whose backward has the same "
    "two loops and adds up three gradients.",
)
ERRORS = {
    "must match the size of tensor": "Tiles at the end may be smaller: `tile` need not divide T.",
}
B, H, E = 2, 3, 8
TILE = 16
LARGE = 3000  # is added to all scores times the root of E: their exp is infinite
# Name -> T, and whether scores are large. The first two calls have the same tensors.
CASES = {"": (61, False), " again": (61, False), " large": (61, True), " short": (5, False)}
MISTAKES = {
    " again": "The first call is right, and the second with the same tensors is not: hooks stay on "
    "tensors, and so does what a call keeps.",
    " large": "exp of a large score is infinite: subtract the largest score of the row so far.",
    " short": "A sequence may be shorter than a tile.",
}
WHOLE_ROWS = (
    "All queries meet a tile of keys at once, or all keys a tile of queries: a tile has `tile` of "
    "both."
)
KEPT = (
    "Probabilities, or other tensors as large as q, are kept for backward: it can make a tile's "
    "probabilities again from q, k and the logarithm of each row's sum."
)
PEAK = "More exists at once than the output, three gradients and a few tiles."


def tensors(seed: int, name: str) -> list[Tensor]:
    """Return q, k, v and the gradient of the output of a case."""
    T, is_large = CASES[name]
    q, k, v, grad = drawn(seed, *[(B, H, T, E)] * 4)
    if is_large:  # the same number for all keys of a query: the softmax stays what it was
        q[..., 0] = 1
        k[..., 0] = LARGE
    return [q, k, v, grad]


def on_rank(load: Callable, size: int, seed: int, rank: int) -> dict:
    """Attend in all cases. Return what came out, and of the first case what was computed, held and
    kept."""
    flash_attention = load()
    found = {}
    for name in CASES:
        if name != " again":
            *given, grad = tensors(seed, name)
            given = [tensor.requires_grad_() for tensor in given]
        for tensor in given:
            tensor.grad = None
        with (
            LargestTensor() as largest,
            FlopCounterMode(display=False) as flops,
            Live(given) as live,
        ):
            before = live.now
            out = check_returned(flash_attention(*given, TILE), Tensor, "the output, a tensor")
            kept = live.now - before - out.nbytes
            forward = flops.get_total_flops()
            if out.requires_grad:
                out.backward(grad)
            backward = flops.get_total_flops() - forward
        gradients = of_tensors(*given)
        found[name] = {"out": out.detach(), "gradients": gradients}
        if name == "":
            product = 2 * E * B * H  # FLOPs for each pair of a query and a key
            found |= {"pairs": forward / 2 / product, "backward": backward / product}
            found |= {"largest": largest.shape, "kept": kept}
            found |= {"peak": live.peak - before, "kernels": sorted(largest.kernels)}
    return found


def of_tensors(q: Tensor, k: Tensor, v: Tensor) -> dict[str, Tensor]:
    """Return gradients. Where a large number was put in, q's is a sum of rounding, and left out."""
    gradients = dict(zip("qkv", (q.grad, k.grad, v.grad)))
    if gradients["q"] is not None and k[0, 0, 0, 0] == LARGE:
        gradients["q"] = gradients["q"][..., 1:]
    return gradients


def properties(results: dict[str, list], size: int, seed: int) -> Iterator[Property]:
    for name in CASES:
        *given, grad = tensors(seed, name)
        given = [tensor.requires_grad_() for tensor in given]
        out = attend(*given)
        out.backward(grad)
        gradients = of_tensors(*given)
        (found,), mistake = results[name], MISTAKES.get(name, "")
        text = "those of all scores at once"
        yield compare.tensors(f"output{name}", [found["out"]], out.detach(), text, mistake)
        found = [found["gradients"]]
        yield compare.tensors(f"gradients{name}", found, gradients, text, mistake)
    T = CASES[""][0]
    (kernels,), (shape,), (pairs,) = (results[key] for key in ("kernels", "largest", "pairs"))
    (kept,) = results["kept"]
    text = ", ".join(kernels) or "matrix products"
    yield Property("computed by", text, not kernels, "Attention is what you are to write.")
    whole = B * H * T * E
    mistakes = {
        f"A tensor has all {T} x {T} scores of a head.": shape.numel() >= B * H * T * T,
        WHOLE_ROWS: shape.numel() >= B * H * T * TILE,
        "A tensor has more elements than q: no step needs one.": True,
    }
    text = f"{list(shape)}; q has {[B, H, T, E]}"
    yield Property("largest tensor", text, shape.numel() <= whole, mistakes)
    wanted = sum(min(TILE, T - start) * (T - start) for start in range(0, T, TILE))
    mistakes = {
        "Tiles in which all keys come after all queries are computed for nothing.": pairs >= T * T,
        "Scores are computed more often than once in forward.": pairs > wanted,
        "Pairs are counted in matrix products: use them.": True,
    }
    text = f"{pairs:,.0f} of query and key; tiles up to the diagonal have {wanted:,}"
    yield Property("pairs", text, round(pairs) == wanted, mistakes)
    yield compare.at_most(
        "backward",
        results["backward"],
        7 * wanted,
        "{:,.0f} products of query and key; two passes over tiles need {:,}",
        "Backward computes more than tiles need: also those whose keys all come after the queries?",
    )
    one_number = B * H * T * 8
    limit = one_number + 4 * T * 8  # and a few numbers for each position, which serve all heads
    text = f"{kept:,} bytes beside the output; a number a query and head has {one_number:,}"
    mistakes = {KEPT: kept >= whole * 8, "One number for each query and head is enough.": True}
    yield Property("kept", text, kept <= limit, mistakes)
    limit = 8 * whole * 5 + 8 * B * H * TILE * TILE * 8
    text = "{:,} bytes at most; five tensors like q, and eight tiles, have {:,}"
    yield compare.at_most("live memory", results["peak"], limit, text, PEAK)
