"""The check of labs/context."""

import math
from collections import Counter
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from labs.machinery import compare
from labs.machinery.compare import Property
from labs.machinery.lab import attend, drawn
from labs.machinery.student import check_returned
from perf.instruments import Counted

FUNCTION = "context_attention"
ABOUT = "the chunks of each rank, and their attention"
NEEDS = "causal masks, `autograd.Function`"
POINT = "equal tokens are not equal work"
LEADS_TO = "techniques/context_parallel.py", "SharedSequences"
SIZES = 2, 3, 4
BARRED = (
    "techniques.context_parallel.SharedSequences",
    "techniques.context_parallel.own_tokens",
    "techniques.context_parallel.whole_sequences",
)
HINTS = (
    "Draw the square of queries and keys, and shade what causal attention needs. Which rows of it "
    "are one rank's?",
    "Count the shaded pairs in each rank's rows, and those that your products compute. Then count "
    "who uses a key, and who has to learn of its gradient.",
    "Two chunks of the sequence for each rank. A Function gathers keys and values, and its "
    "backward reduce-scatters; put them in order of position. For each chunk, its queries and the "
    "keys up to its end.",
)
ERRORS = {"Mismatch in shape": "The output of attention has the shape of q."}
B, H, KV, E = 2, 10, 2, 6
CHUNK = 5  # tokens; a sequence has two chunks for each rank
LARGE = 1800  # of the scores times the root of E in the last call: their exp is infinite
MISTAKES = {
    "again": "The second call with the same tensors is not right, in which the outputs of rank 0 "
    "have no gradient. Hooks stay on tensors. And a rank takes part in backward whatever it has.",
    "large": "exp of a large score is infinite: subtract the largest of a query first, or use "
    "scaled_dot_product_attention.",
}


def inputs(seed: int, size: int) -> tuple[list[Tensor], Tensor]:
    """Return q, k and v of whole sequences, and the gradient of the output."""
    T = 2 * size * CHUNK
    *whole, grad = drawn(seed, *((B, heads, T, E) for heads in (H, KV, KV, H)))
    return whole, grad


def make_large(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Add the same large number to all scores, in place. The softmax stays what it was."""
    q.data[..., 0] = 1
    k.data[..., 0] = LARGE


def of_tensors(q: Tensor, k: Tensor, v: Tensor) -> dict[str, Tensor]:
    """Return gradients, without the place of the large number: there q's is a sum of rounding."""
    gradients = dict(zip("qkv", (q.grad, k.grad, v.grad)))
    return {name: g if g is None else g[..., 1:] for name, g in gradients.items()}


class Pairs(TorchDispatchMode):
    """A context that counts the pairs of a query and a key that attention computes for each head,
    by its FLOPs: two products of 2 E FLOPs a pair."""

    pairs = 0.0

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        result = op(*args, **(kwargs or {}))
        if "scaled_dot_product" in op._opname:
            (*heads, queries, _), keys = args[0].shape, args[1].shape[-2]
            pairs = queries * keys
            if any(argument is True for argument in args):  # is_causal: query i, keys 0 to i
                pairs = sum(min(i + 1, keys) for i in range(queries))
            self.pairs += pairs * math.prod(heads) / (B * H)
        elif op.overloadpacket in flop_registry:
            flops = flop_registry[op.overloadpacket](*args, **(kwargs or {}), out_val=result)
            self.pairs += flops / (4 * E * B * H)
        return result


def on_rank(load: Callable, size: int, seed: int, rank: int) -> dict:
    """Attend forward and backward with the student's function. Return what came out and was sent,
    and how much was computed."""
    whole, grad = inputs(seed, size)
    T = grad.shape[2]
    what = "a tensor of positions and a function"
    positions, attention = check_returned(load()(T), (Tensor, Callable), what)
    if positions.dim() != 1 or positions.dtype != torch.int64:
        raise TypeError(
            f"positions have shape {list(positions.shape)} and dtype {positions.dtype}, and "
            f"not [{T // size}] and torch.int64"
        )
    of_ranks = [None] * size
    dist.all_gather_object(of_ranks, positions.tolist())
    if problem(of_ranks, T):
        return {"positions": of_ranks[rank]}
    own = [tensor[:, :, positions].requires_grad_() for tensor in whole]
    with Counted(None) as forward, Pairs() as computed:
        out = check_returned(attention(*own), Tensor, "the output of attention, a tensor")
    with Counted(None) as backward:
        out.backward(grad[:, :, positions])
    gradients = dict(zip("qkv", (tensor.grad for tensor in own)))
    more = {}
    for name in MISTAKES:
        is_idle = name == "again" and rank == 0
        if name == "large":
            make_large(*own)
        for tensor in own:
            tensor.grad = None
        again = attention(*own)
        again.backward(grad[:, :, positions] * (not is_idle))
        more[name] = {"out": again.detach()} | of_tensors(*own)
    return {
        "positions": of_ranks[rank],
        "out": out.detach(),
        "gradients": gradients,
        "more": more,
        "forward": forward.sent,
        "backward": backward.sent,
        "pairs": round(computed.pairs),
    }


def problem(positions: list[list[int]], T: int) -> str:
    """Return what is wrong with the positions of all ranks, "" if each token is on one of them."""
    each = T // len(positions)
    for rank, own in enumerate(positions):
        if len(own) != each:
            return f"rank {rank} should have {each} of {T} positions, and has {len(own)}"
    counts = Counter(position for own in positions for position in own)
    several = (f"position {p} is on {counts[p]} ranks" for p in range(T) if counts[p] != 1)
    return next(several, "")


def properties(results: dict[str, list], size: int, seed: int) -> Iterator[Property]:
    whole, grad = inputs(seed, size)
    T = grad.shape[2]
    wrong = problem(results["positions"], T)
    text = wrong or f"each of {T} tokens is on one rank, {T // size} on each"
    yield Property("positions", text, not wrong, "Each token belongs to one rank.")
    q, k, v = (tensor.requires_grad_() for tensor in whole)
    out = attend(q, k, v)
    out.backward(grad)
    positions = list(map(torch.tensor, results["positions"]))
    yield compare.tensors("output", results["out"], [out.detach()[:, :, own] for own in positions])
    gradients = [{name: tensor.grad[:, :, own] for name, tensor in zip("qkv", whole)}
                 for own in positions]  # fmt: skip
    yield compare.tensors("gradients", results["gradients"], gradients)
    for name, mistake in MISTAKES.items():
        q, k, v = (tensor.detach().clone().requires_grad_() for tensor in whole)
        of_out = grad.clone()
        if name == "again":
            of_out[:, :, positions[0]] = 0  # rank 0's tokens have no loss
        else:
            make_large(q, k, v)
        out = attend(q, k, v)
        out.backward(of_out)
        tensors = {"out": out.detach()} | of_tensors(q, k, v)
        wanted = [{key: tensor[:, :, own] for key, tensor in tensors.items()} for own in positions]
        found = [of_rank[name] for of_rank in results["more"]]
        yield compare.tensors(name, found, wanted, otherwise=mistake)
    for name in ("forward", "backward"):
        yield check_bytes(name, results[name], k.nbytes + v.nbytes)
    yield check_pairs(results["pairs"], T, positions)


def check_bytes(name: str, sent: list[dict], whole: int) -> Property:
    """Return whether keys and values, or their gradients, are sent once. Where a rank sends to one
    other at a time, it may be less."""
    kinds = compare.by_kind(max(sent, key=compare.nbytes_of))
    total = sum(nbytes for _, nbytes in kinds.values())
    mistakes = {
        "An all-reduce sends twice as much as an all-gather of all ranks' parts, or as a "
        "reduce-scatter, which gives each rank the sum of its own part.": "all-reduce" in kinds,
        "Keys and values are repeated for each query head before they are sent. Send the few heads "
        "that there are.": total == whole * H // KV,
        "Keys and values are gathered more than once: once serves all chunks.": name == "forward",
        "Each rank gathers all ranks' gradients of whole sequences to add them up: a "
        "reduce-scatter sums on the way.": total == whole * len(sent),
    }
    shown = ", ".join(f"{kind} of {kinds[kind][1]:,} bytes" for kind in sorted(kinds))
    text = f"{shown or 'nothing'}; keys and values have {whole:,}"
    is_right = total <= whole and "all-reduce" not in kinds
    return Property(name, text, is_right, mistakes)


def check_pairs(pairs: list[int], T: int, positions: list[Tensor]) -> Property:
    """Return whether all ranks compute about as much, and little for nothing."""
    size = len(pairs)
    needed = T * (T + 1) // 2
    are_mixed = all(own.min() < T // 2 <= own.max() for own in positions)
    limit = (2 * size + 1) * CHUNK**2  # one of a rank's chunks sees r + 1, the other 2 size - r
    most = pairs.index(max(pairs))
    mistakes = {
        "Pairs are counted in scaled_dot_product_attention and matrix products: use them.": (
            sum(pairs) < needed
        ),
        "Each query meets all keys, and a mask hides the later ones: so nearly half of the pairs "
        "are computed for nothing. Give a chunk the keys up to its end.": (
            min(pairs) == T * T // size
        ),
        f"Late tokens attend to more keys than early ones, so rank {most} computes "
        f"{max(pairs) / max(min(pairs), 1):.1f} times as much as another, and all wait for it. "
        f"Give each rank early and late tokens.": not are_mixed,
        "Each chunk needs keys only up to its own end, also where a rank has an early and a late "
        "one.": True,
    }
    text = f"{pairs} of query and key; at most {limit} on each rank"
    is_right = sum(pairs) >= needed and max(pairs) <= limit
    return Property("pairs", text, is_right, mistakes)
