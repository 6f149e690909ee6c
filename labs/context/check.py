"""The check of labs/context."""

import functools
import math
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

import techniques.context_parallel as context_parallel
from labs.machinery import compare
from labs.machinery.compare import Property
from labs.machinery.lab import drawn
from labs.machinery.student import check_returned
from labs.machinery.training import Run
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
    "techniques.context_parallel.causal_lower_right",
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
B, H, KV, E = 2, 10, 2, 6
CHUNK = 5  # tokens; a sequence has two chunks for each rank


def inputs(seed: int, size: int) -> tuple[list[Tensor], Tensor]:
    """Return q, k and v of whole sequences, and the gradient of the output."""
    T = 2 * size * CHUNK
    *whole, grad = drawn(seed, *((B, heads, T, E) for heads in (H, KV, KV, H)))
    return whole, grad


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
    if out.shape != own[0].shape:
        raise TypeError(
            f"the output of attention has shape {list(out.shape)}, and q "
            f"{list(own[0].shape)}: they should be the same"
        )
    with Counted(None) as backward:
        out.backward(grad[:, :, positions])
    return {
        "positions": of_ranks[rank],
        "out": out.detach(),
        "gradients": dict(zip("qkv", (tensor.grad for tensor in own))),
        "forward": forward.sent,
        "backward": backward.sent,
        "pairs": round(computed.pairs),
    }


def problem(positions: list, T: int) -> str:
    """Return what is wrong with the positions of all ranks, "" if each token is on one of them."""
    each = T // len(positions)
    for rank, own in enumerate(positions):
        if not isinstance(own, list) or len(own) != each:
            has = len(own) if isinstance(own, list) else f"the number {own}"
            return f"rank {rank} should have {each} of {T} positions, and has {has}"
    counts = {position: sum(own.count(position) for own in positions) for position in range(T)}
    return next(
        (f"position {p} is on {count} ranks" for p, count in counts.items() if count != 1), ""
    )


def attend(
    q: Tensor, k: Tensor, v: Tensor, visible: Tensor, tiled: bool = False, scale: float = E**-0.5
) -> Tensor:
    """Return attention of queries to the keys that are visible [queries, keys] to them, 0 where
    none is. By mistake heads are `tiled`: 0 1 0 1 in place of 0 0 1 1."""
    heads = torch.arange(KV).repeat(H // KV)
    k, v = (tensor[:, heads if tiled else heads.sort().values] for tensor in (k, v))
    scores = (scale * (q @ k.mT)).masked_fill(~visible, -torch.inf)
    return scores.softmax(-1).nan_to_num() @ v


# Sentence -> what is changed of `attend`.
CHANGES = {
    "Products of queries and keys are not divided by the root of E.": dict(scale=1.0),
    "Products of queries and keys are divided by E, and not by its root.": dict(scale=1 / E),
    "Heads of keys and values are repeated as 0 1 0 1: neighbours share one, 0 0 1 1, as "
    "repeat_interleave gives.": dict(tiled=True),
}


def known_mistakes(own: Tensor, positions: list[Tensor]) -> dict[str, tuple[Tensor, Tensor]]:
    """Return for a rank with the tokens `own`: sentence -> keys in the order in which a mistake
    has them, and which of them the rank's queries then see."""
    by_rank, at, half = torch.cat(positions), own[:, None], len(own) // 2
    every, place = torch.arange(len(by_rank)), by_rank.argsort() % len(own)  # within its rank
    row = torch.arange(len(own))[:, None]
    ends = torch.cat([chunk.max().expand(half) for chunk in own.chunk(2)])[:, None]
    own_chunk = row // half == row.T // half
    by_place = place[own][:, None] >= place
    upper_left = (
        "A mask, or is_causal, that starts at key 0 lets query i see keys 0 to i. But before query "
        "i of a"
    )
    return {
        "Gathered keys stand rank after rank. Put them in order of position: otherwise the mask "
        "hides the wrong keys.": (by_rank, at >= every),
        f"{upper_left} chunk there are many tokens.": (every, row % half >= every),
        f"{upper_left} rank there are many tokens.": (every, row >= every),
        "The mask compares places within a rank, and not positions.": (every, by_place),
        "Queries attend to the keys of their own rank alone.": (own, at >= own),
        "Queries attend to all keys of their own rank, and to no others.": (own, at >= 0 * own),
        "Queries attend to the keys of their own chunk alone.": (own, own_chunk & (at >= own)),
        "No mask: queries see later tokens, too.": (every, row >= 0 * every),
        "No mask: queries see later tokens of their chunk, too.": (every, ends >= every),
        "A token does not see itself: query i sees key i, too.": (every, at > every),
    }


def reference(seed: int, size: int, positions: list[Tensor]) -> tuple[list, list]:
    """Return each rank's outputs, and the gradients of all q, k and v that they cause."""
    whole, grad = inputs(seed, size)
    q, k, v = (tensor.requires_grad_() for tensor in whole)
    outputs, gradients = [], []
    for own in positions:
        out = attend(q[:, :, own], k, v, own[:, None] >= torch.arange(q.shape[2]))
        gradients.append(torch.autograd.grad(out, (q, k, v), grad[:, :, own]))
        outputs.append(out.detach())
    return outputs, gradients


def properties(results: dict[str, list], size: int, seed: int) -> Iterator[Property]:
    (q, k, v), _ = inputs(seed, size)
    T = q.shape[2]
    wrong = problem(results["positions"], T)
    text = wrong or f"each of {T} tokens is on one rank, {T // size} on each"
    yield Property("positions", text, not wrong, "Each token belongs to one rank.")
    positions = list(map(torch.tensor, results["positions"]))
    outputs, gradients = reference(seed, size, positions)

    def mistakes() -> Iterator[tuple[str, list[Tensor]]]:
        known = [known_mistakes(own, positions) for own in positions]
        for text in known[0]:
            pairs = zip(positions, (of_rank[text] for of_rank in known))
            yield text, [attend(q[:, :, own], k[:, :, keys], v[:, :, keys], visible)
                         for own, (keys, visible) in pairs]  # fmt: skip
        causal = [(q[:, :, own], own[:, None] >= torch.arange(T)) for own in positions]
        for text, change in CHANGES.items():
            yield text, [attend(own, k, v, visible, **change) for own, visible in causal]
        first = [tensor[:1].expand_as(tensor) for tensor in (k, v)]
        text = "All sequences attend to the keys and values of the first."
        yield text, [attend(own, *first, visible) for own, visible in causal]

    nan = "Some numbers are NaN, as softmax gives for a query that sees no key: it sees its own."
    has_nan = any(bool(out.isnan().any()) for out in results["out"])
    yield compare.tensors("output", results["out"], outputs, mistakes(), otherwise=nan * has_nan)
    yield check_gradients(results["gradients"], gradients, positions)
    whole = k.nbytes + v.nbytes
    for name in ("forward", "backward"):
        yield check_bytes(name, results[name], whole, q.nbytes)
    yield check_pairs(results["pairs"], T, positions)


def check_gradients(
    found: list[dict], of_ranks: list[tuple[Tensor, ...]], positions: list[Tensor]
) -> Property:
    """Return whether each rank has its rows of the sums of what all ranks' outputs cause."""

    def rows(values: tuple[Tensor, ...], own: Tensor) -> dict[str, Tensor]:
        return {name: value[:, :, own] for name, value in zip("qkv", values)}

    size = len(found)
    q, k, v = sums = [sum(of_tensor) for of_tensor in zip(*of_ranks)]
    in_a_row = torch.arange(q.shape[2]).chunk(size)
    mistakes = {
        "Other ranks' queries use these keys and values, too: their part of the gradients is not "
        "added.": list(map(rows, of_ranks, positions)),
        compare.AVERAGED: [rows((q, k / size, v / size), own) for own in positions],
        "Gradients come back in order of position, and a rank got those of tokens that it does not "
        "have.": [rows(sums, part) | {"q": q[:, :, own]} for part, own in zip(in_a_row, positions)],
    }
    expected, unrecorded = [rows(sums, own) for own in positions], ""
    if any(of_rank["k"] is None for of_rank in found):
        unrecorded = f"{compare.NOT_RECORDED}k and v get their gradients by your backward."
    return compare.tensors("gradients", found, expected, mistakes, otherwise=unrecorded)


def check_bytes(name: str, sent: list[dict], whole: int, queries: int) -> Property:
    """Return whether keys and values, or their gradients, are sent once. Where a rank sends to one
    other at a time, it may be less."""
    kinds = compare.by_kind(max(sent, key=compare.nbytes_of))
    total = sum(nbytes for _, nbytes in kinds.values())
    mistakes = {
        "An all-reduce sends twice as much as an all-gather of all ranks' parts, or as a "
        "reduce-scatter, which gives each rank the sum of its own part.": "all-reduce" in kinds,
        "The queries of other ranks are sent as well. A rank computes its own rows of the output, "
        "and needs its own queries for them.": total == whole + queries,
        "Keys and values are repeated for each query head before they are sent. Send the few heads "
        "that there are.": total == whole * H // KV,
        "Each rank gathers all ranks' gradients of whole sequences to add them up: a "
        "reduce-scatter sums on the way.": name == "backward" and total == whole * len(sent),
        "Keys and values are gathered more than once: once serves all chunks.": (
            name == "forward" and kinds.keys() == {"all-gather"} and total % whole == 0
        ),
    }
    shown = ", ".join(f"{kind} of {kinds[kind][1]:,} bytes" for kind in sorted(kinds))
    text = f"{shown or 'nothing'}; keys and values have {whole:,}"
    is_right = total <= whole and "all-reduce" not in kinds
    return Property(name, text, is_right, mistakes)


def check_pairs(pairs: list[int], T: int, positions: list[Tensor]) -> Property:
    """Return whether all ranks compute about as much, and little for nothing."""
    size, needed = len(pairs), T * (T + 1) // 2
    is_mixed = all(own.min() < T // 2 <= own.max() for own in positions)
    up_to_last = [len(own) * (int(own.max()) + 1) for own in positions]
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
        "A rank's early tokens meet as many keys as its late ones. Each chunk needs keys only up "
        "to its own end.": is_mixed and pairs == up_to_last,
        f"Late tokens attend to more keys than early ones, so rank {most} computes "
        f"{max(pairs) / max(min(pairs), 1):.1f} times as much as another, and all wait for it. "
        f"Give each rank early and late tokens.": max(pairs) > min(pairs),
        "A rank computes pairs that none of its own queries needs.": True,
    }
    text = f"{pairs} of query and key; at most {limit} on each rank"
    is_right = sum(pairs) >= needed and max(pairs) <= limit
    return Property("pairs", text, is_right, mistakes)


RUN = Run(flags="--cp 2")


def install(context_attention: Callable) -> None:
    """Cut sequences as the student does, and attend to them so."""
    shared = functools.cache(context_attention)

    def own_tokens(tensor: Tensor, rank: int, n: int) -> Tensor:
        positions, _ = shared(tensor.shape[1])
        return tensor[:, positions]

    def attention(sequences, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        _, attend = shared(q.shape[1] * sequences.mesh.size())
        return attend(*(tensor.transpose(1, 2) for tensor in (q, k, v))).transpose(1, 2)

    context_parallel.own_tokens = own_tokens
    context_parallel.SharedSequences.attention = attention
