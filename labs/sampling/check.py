"""The check of labs/sampling.

The cache is compared with the project's own model, which computes all tokens of a text at once.
Nothing is drawn: the probabilities themselves are compared, with those of a loop over tokens.
"""

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from labs.machinery import compare
from labs.machinery.compare import Property
from labs.machinery.lab import CONFIG, LargestTensor, drawn, small_model
from labs.machinery.student import Misuse, check_returned
from model import Block, Llama, rotate

FUNCTION = "next_token"
ABOUT = "a step with a cache of keys and values, and temperature, top_k and top_p"
NEEDS = "indexing by tensors, `sort`, `cumsum`, `scatter`"
POINT = "old tokens cost memory to be read, and nothing to be computed"
LEADS_TO = "techniques/kv_cache.py", "KVCache"
SIZES = (1,)
BARRED = "techniques.decoding.sample", "techniques.kv_cache.KVCache"
HINTS = (
    "Write down two rows of different lengths, with their slots. Which slot and which position has "
    "the newest token of each, and which slots may it see?",
    "Count the tokens that go through a layer in one step. For top_p, add up probabilities from "
    "the most likely token on: which token is the first that is not needed any more?",
    "For each layer: heads of the newest tokens, keys and values into their slots, scores with all "
    "slots, a mask, softmax, values. Then logits over temperature, sorted; all after the first k "
    "hidden; softmax; what is left out by the sum of those before; divided; and sorted back.",
)
NO_ROW = "There may be no row, as all have ended."
ERRORS = {
    "input.numel() == 0": NO_ROW,
    "non-empty TensorList": NO_ROW,
    "selected index k out of range": "top_k may be more than there are tokens: all are kept then.",
    "is out of bounds for dimension": "Slots are 0 to S - 1, and the newest token of a row with "
    "`length` tokens has the position length - 1.",
}
B, S = 4, 16
LENGTHS = torch.tensor([1, 3, 9, 14])  # at first; then each row gets two tokens more
# Step -> the tokens that rows have by then more, in the order of calls.
STEPS = {"": 0, " again": 0, " next": 1, " full": 2}


class Drawing(NamedTuple):
    """A case without layers: logits [B, V], and how to draw from them."""

    logits: Tensor
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0


def drawings(seed: int) -> dict[str, Drawing]:
    logits = 2 * drawn(seed + 1, (3, 8))[0]
    ties = torch.tensor([[1.0, 3, 1, 0, 1, 3, 1, 0], [0] * 8, [2, 2, 2, 2, 2, 1, 1, 1]]).double()
    return {
        " warm": Drawing(logits, temperature=0.6),
        " top_k": Drawing(logits, top_k=3),
        " top_p": Drawing(logits, top_p=0.8),
        " three": Drawing(logits, 1.7, 5, 0.8),
        " ties": Drawing(ties, top_k=3),
        " half": Drawing(torch.zeros_like(logits), top_p=0.5),  # exactly four of eight tokens
        " least": Drawing(logits, top_p=0.0),
        " most": Drawing(logits, top_k=99, top_p=0.9),
        " cold": Drawing(ties, temperature=0.0, top_k=3, top_p=0.5),
        " large": Drawing(logits + 1000, temperature=0.5, top_p=0.9),
        " no row": Drawing(logits[:0], 0.6, 3, 0.8),
    }


MISTAKES = {
    " again": "The first call is right, and the second with the same tensors is not: the same "
    "token belongs into the same slot.",
    " next": "The first step is right, and the next one is not: it reads what the first has "
    "written.",
    " full": "A row is full now: the last slot is one like the others.",
    " ties": "Some tokens are equally likely: top_k keeps k tokens all the same, and of equal ones "
    "the first.",
    " half": "Eight tokens are equally likely, and top_p is a half: four of them are enough, the "
    "first four.",
    " least": "top_p is 0: the most likely token is kept all the same.",
    " most": "top_k is more than there are tokens: all are kept then, and top_p decides.",
    " cold": "With temperature 0 the most likely token has the probability 1, the first of equal "
    "ones.",
    " large": "exp of a large logit is infinite: subtract the largest first, as softmax does.",
    " no row": NO_ROW,
}
AGAIN_COMPUTED = (
    "Earlier tokens go through the layers once more. Their keys and values are in the cache: "
    "compute the newest token of each row alone."
)
COPIED = (
    "A tensor larger than the keys of a layer is made. Are keys or values repeated for each head "
    "of q? Several heads can read the same ones: as queries of one head of k."
)


class Layer(NamedTuple):
    """A layer's parts, as the student has them."""

    heads: Callable
    rest: Callable


class Model(NamedTuple):
    """A model's parts, as the student has them."""

    embed: Callable
    rotate: Callable
    layers: tuple
    logits: Callable


class Parts:
    """The parts of a Llama, and how many tokens one of its layers computes at most."""

    def __init__(self, seed: int):
        self.llama = large_model(seed)
        self.computed = 0
        layers = tuple(self.layer(block) for block in self.llama.layers.values())
        embed = apart(self.llama.tok_embeddings)
        self.model = Model(embed, apart(self.rotate), layers, apart(self.logits))

    def layer(self, block: Block) -> Layer:
        attention = block.attention

        def heads(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            self.computed = max(self.computed, x.numel() // x.shape[-1])
            x = block.attention_norm(x)
            return attention.queries(x), attention.keys(x), attention.values(x)

        def rest(x: Tensor, attended: Tensor) -> Tensor:
            x = x + attention.wo(attended)
            return x + block.feed_forward(block.ffn_norm(x))

        return Layer(apart(heads), apart(rest))

    def rotate(self, heads: Tensor, positions: Tensor) -> Tensor:
        return rotate(heads, self.llama.rotation(positions))

    def logits(self, x: Tensor) -> Tensor:
        return self.llama.output(self.llama.norm(x))


def apart(part: Callable) -> Callable:
    """Return a part of a model whose tensors do not count as the student's."""

    def call(*given: Tensor) -> Tensor:
        with _disable_current_modes():
            return part(*given)

    return call


def large_model(seed: int) -> Llama:
    """Return a model whose attention is far from uniform. It is not trained."""
    llama = small_model(seed).requires_grad_(False)
    for parameter in llama.parameters():
        if parameter.dim() > 1:
            parameter.mul_(20)
    return llama


def texts_of(seed: int) -> Tensor:
    """Return the rows' texts [B, S], as they are in the end."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(CONFIG.vocab_size, (B, S), generator=generator)


def is_read(lengths: Tensor) -> Tensor:
    """Return which slots [B, S] have a token, in rows of these lengths."""
    return torch.arange(S) < lengths[:, None]


def kept_of(seed: int) -> list[tuple[Tensor, Tensor]]:
    """Return the keys and values of whole texts, for each layer [B, KV, S, E], by the model."""
    llama = large_model(seed)
    blocks = llama.layers.values()
    given = []
    for block in blocks:
        block.attention.register_forward_pre_hook(lambda _, args: given.append(args[:2]))
    llama(texts_of(seed))
    kept = []
    for block, (x, rotation) in zip(blocks, given):
        k = rotate(block.attention.keys(x), rotation)
        v = block.attention.values(x)
        kept.append((k.transpose(1, 2), v.transpose(1, 2)))
    return kept


def cache_at_first(seed: int) -> list[tuple[Tensor, Tensor]]:
    """Return a cache without the newest tokens, in whose other slots are large numbers."""
    is_kept = is_read(LENGTHS - 1)[:, None, :, None]
    cache = []
    for k, v in kept_of(seed):
        other_k, other_v = drawn(seed, k.shape, v.shape)
        k = torch.where(is_kept, k, 100 * other_k)
        v = torch.where(is_kept, v, 100 * other_v)
        cache.append((k, v))
    return cache


def on_rank(load: Callable, size: int, seed: int, rank: int) -> dict:
    """Return the probabilities and caches of all steps, and what was computed and made."""
    next_token = load(overwrites=True)
    parts = Parts(seed)
    cache = cache_at_first(seed)
    found = {}
    for name, more in STEPS.items():
        lengths = LENGTHS + more
        texts = texts_of(seed) * is_read(lengths)
        parts.computed = 0
        with LargestTensor() as largest:
            p = called(next_token, parts.model, texts, lengths, cache, 1.0, 0, 1.0)
        found[f"output{name}"] = {"p": p}
        found[f"cache{name}"] = flat(cache, lengths)
    for name, (logits, *how) in drawings(seed).items():
        model = Model(logits.__getitem__, parts.rotate, (), lambda x: x)
        rows = torch.arange(len(logits))
        p = called(next_token, model, rows[:, None], torch.ones_like(rows), [], *how)
        found[f"output{name}"] = {"p": p}
    return found | {"computed": parts.computed, "largest": largest.nbytes}


def called(next_token: Callable, model: Model, tokens: Tensor, lengths: Tensor, *others) -> Tensor:
    """Return the probabilities that the student's function gives. Raises Misuse if it changes what
    is not the cache."""
    before = tokens.clone(), lengths.clone()
    p = next_token(model, tokens, lengths, *others)
    for name, one, other in zip(("tokens", "lengths"), (tokens, lengths), before):
        if not one.equal(other):
            raise Misuse(f"`{name}` is changed. It belongs to the caller: work on a copy.")
    return check_returned(p, Tensor, "probabilities [B, V], a tensor")


def flat(cache: list[tuple[Tensor, Tensor]], lengths: Tensor) -> dict[str, Tensor]:
    """Return what a cache has of the tokens that were read, by name."""
    found = {}
    for layer, pair in enumerate(cache):
        for what, one in zip(("keys", "values"), pair):
            found[f"{what} of layer {layer}"] = one * is_read(lengths)[:, None, :, None]
    return found


def by_loop(drawing: Drawing) -> Tensor:
    """Return the probabilities of a case, a token at a time."""
    p = torch.zeros_like(drawing.logits)
    for row, logits in enumerate(drawing.logits.tolist()):
        ranked = sorted(range(len(logits)), key=lambda token: -logits[token])  # stable
        if drawing.temperature == 0:
            p[row, ranked[0]] = 1
            continue
        if drawing.top_k:
            ranked = ranked[: drawing.top_k]
        largest = logits[ranked[0]]
        weights = [math.exp((logits[token] - largest) / drawing.temperature) for token in ranked]
        kept = 1
        while kept < len(ranked) and sum(weights[:kept]) < drawing.top_p * sum(weights):
            kept += 1
        for token, weight in zip(ranked[:kept], weights):
            p[row, token] = weight / sum(weights[:kept])
    return p


def by_model(seed: int, lengths: Tensor) -> Tensor:
    """Return the probabilities [B, V] of the next tokens, by all tokens of each row at once."""
    llama = large_model(seed)
    rows = [llama(text[None, :length])[0, -1] for text, length in zip(texts_of(seed), lengths)]
    return torch.stack(rows).softmax(-1)


def properties(results: dict[str, list], size: int, seed: int) -> Iterator[Property]:
    kept = kept_of(seed)
    for name, more in STEPS.items():
        lengths = LENGTHS + more
        reference = "those of the model without a cache"
        mistake = MISTAKES.get(name, "")
        wanted = {"p": by_model(seed, lengths)}
        yield compare.tensors(f"output{name}", results[f"output{name}"], wanted, reference, mistake)
        yield compare.tensors(
            f"cache{name}", results[f"cache{name}"], flat(kept, lengths), reference, mistake
        )
    for name, drawing in drawings(seed).items():
        wanted = {"p": by_loop(drawing)}
        reference = "those of a loop over tokens"
        found = results[f"output{name}"]
        yield compare.tensors(f"output{name}", found, wanted, reference, MISTAKES.get(name, ""))
    yield compare.at_most(
        "computed", results["computed"], B, "{} tokens a step; {} rows are there", AGAIN_COMPUTED
    )
    keys = kept[0][0].nbytes
    text = "the largest tensor has {} bytes; keys of a layer have {}"
    yield compare.at_most("memory", results["largest"], keys, text, COPIED)
