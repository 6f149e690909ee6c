"""The check of labs/speculative.

Nothing is sampled: the student's function is called once for each way in which its draws can end.
With the probability of each way, this is the distribution of its tokens, exactly.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor

from labs.machinery import compare, student
from labs.machinery.compare import Property
from labs.machinery.lab import drawn
from labs.machinery.student import Misuse, check_returned

FUNCTION = "speculate"
ABOUT = "the acceptance rule of speculative decoding"
NEEDS = "probabilities, and no more than slices of PyTorch"
POINT = "a bad draft costs time and no quality"
LEADS_TO = "techniques/decoding.py", "sample"
SIZES = (1,)
BARRED = "torch.multinomial", "torch.rand", "random.random", "random.choices"
HINTS = (
    "Draw two bars for each token, one as high as the large model's probability and one as the "
    "draft's. Where is a draft right too often, and where too rarely?",
    "Count how often a token comes out that was drafted and accepted. What is missing to the large "
    "model's probability, and from which distribution must the rest be drawn?",
    "A loop that drafts; one call of the large model; a loop that accepts by a quotient, and at "
    "the first rejection draws from what is missing and returns; one more token at the end.",
)
V = 3
SUM_IS_1 = "probabilities have the sum"
NEGATIVE = "a probability is negative"
ERRORS = {
    NEGATIVE: "What is missing is max(0, p - q): where the draft gives more, nothing is.",
    "is what you are to write": "All that is random comes from `choose` and `accept`.",
    SUM_IS_1: "What `choose` is given has to have the sum 1: divide what is missing by its sum.",
}
MOST = 5000  # ways in which draws may end
# Name -> how many tokens are drafted, and what is special. Contexts have 1 to 3 tokens.
CASES = {"": (2, ""), " alone": (0, ""), " zeros": (2, "zeros"), " alike": (2, "alike")}
MISTAKES = {
    " alone": "With nothing drafted, the next token is drawn from the large model.",
    " alike": "A draft that is always right is always accepted: p / q is 1.",
    " zeros": "Some tokens have the probability 0 by one model, and not by the other.",
}
ONE_CALL = "The large model judges all drafted tokens in one call: that is what saves its time."


class Way(NamedTuple):
    """A way in which the draws of a call end."""

    tokens: list[int]
    probability: float
    calls: tuple[int, int]  # of the large model, and of the draft


def model(seed: int, name: str, is_large: bool) -> Callable[[list[int]], Tensor]:
    """Return a model of a case: tokens -> probabilities [T, V], which depend on the last token and
    on the number of tokens before it."""
    special = CASES[name][1]
    (scores,) = drawn(2 * seed + (is_large or special == "alike"), (4 * V, V, V))
    p = scores.mul(1.5).softmax(-1)
    if special == "zeros":
        for last in range(V):
            p[:, last, (last + 1 + is_large) % V] = 0
        p /= p.sum(-1, keepdim=True)
    return lambda tokens: torch.stack([p[i, token] for i, token in enumerate(tokens)])


class Draws:
    """One way in which the draws of a call end. At first they take the outcomes of `beginning`,
    and then the first that is possible; `others` are beginnings with one of the other outcomes."""

    def __init__(self, beginning: list[int]):
        self.beginning, self.taken, self.others = beginning, [], []
        self.probability, self.calls = 1.0, Counter()

    def draw(self, weights: list[float]) -> int:
        possible = [outcome for outcome, weight in enumerate(weights) if weight > 0]
        number = len(self.taken)
        if number < len(self.beginning):
            outcome = self.beginning[number]
        else:
            outcome, *others = possible
            self.others += [[*self.taken, other] for other in others]
        self.taken.append(outcome)
        self.probability *= weights[outcome]
        return outcome

    def choose(self, p: Tensor) -> int:
        total = float(p.sum())
        if (p < 0).any():
            raise ValueError(f"{NEGATIVE}: {float(p.min()):.2g}")
        if not abs(total - 1) < 1e-9:
            raise ValueError(f"{SUM_IS_1} {total:.6g}")
        return self.draw(p.tolist())

    def accept(self, chance: float) -> bool:
        chance = min(1.0, float(chance))
        return self.draw([chance, 1 - chance]) == 0

    def counted(self, name: str, asked: Callable) -> Callable:
        def call(tokens: list[int]) -> Tensor:
            self.calls[name] += 1
            return asked(list(tokens))

        return call


def ways_of(speculate: Callable, seed: int, name: str, context: list[int]) -> Iterator[Way]:
    """Yield all ways in which a call of the student's function can end."""
    large, draft = (model(seed, name, is_large) for is_large in (True, False))
    left = [[]]
    for _ in range(MOST):
        if not left:
            return
        draws = Draws(left.pop())
        models = draws.counted("large", large), draws.counted("draft", draft)
        text = list(context)
        given = *models, text, CASES[name][0], draws.choose, draws.accept
        tokens = check_returned(speculate(*given), list, "a list of tokens")
        if text != context:
            raise Misuse("`tokens` is changed. It belongs to the caller: work on a copy.")
        check_returned(tuple(tokens), (int,) * len(tokens), "a list of integers")
        left += draws.others
        yield Way(tokens, draws.probability, (draws.calls["large"], draws.calls["draft"]))
    raise Misuse(f"There are more than {MOST:,} ways in which your draws can end: draw less often.")


def contexts(seed: int) -> list[list[int]]:
    return [[seed % V], [0, 2], [1, (seed + 1) % V, 0]]


def on_rank(load: Callable, size: int, seed: int, rank: int) -> dict:
    """Return all ways, for each case and context."""
    speculate = load()
    return {name: [[tuple(way) for way in ways_of(speculate, seed, name, context)]
                   for context in contexts(seed)] for name in cases()}  # fmt: skip


def cases() -> list[str]:
    """Return the cases. A draft that is always right comes last, for rules that are right: others
    have 0 / 0 there."""
    return [name for name in CASES if name != " alike" or student.AGAIN]


def distribution(ways: list[Way], large: Callable, context: list[int], length: int) -> Tensor:
    """Return the probability of each text of so many tokens, where the large model writes what is
    missing to a way's tokens."""
    texts = torch.zeros([V] * length, dtype=torch.float64)
    for way in ways:
        given = way.tokens[:length]
        for rest in product(range(V), repeat=length - len(given)):
            text = [*context, *given, *rest]
            following = large(text)[len(context) + len(given) - 1 : -1]
            p = following[range(len(rest)), list(rest)].prod() if rest else 1.0
            texts[tuple(text[len(context) :])] += way.probability * p
    return texts


def tokens_a_call(seed: int, name: str, context: list[int]) -> float:
    """Return the largest mean number of tokens that one call of the large model allows."""
    large, draft = (model(seed, name, is_large) for is_large in (True, False))
    mean = 1.0
    ahead = CASES[name][0]
    for drafted in range(1, ahead + 1):
        for text in product(range(V), repeat=drafted):
            accepted = torch.stack([large([*context, *text]), draft([*context, *text])]).amin(0)
            mean += float(accepted[len(context) - 1 : -1][range(drafted), list(text)].prod())
    return mean


def properties(results: dict[str, list], size: int, seed: int) -> Iterator[Property]:
    for name in cases():
        ahead, _ = CASES[name]
        (of_contexts,), large = results[name], model(seed, name, is_large=True)
        of_contexts = [[Way(*way) for way in ways] for ways in of_contexts]
        lengths = {len(way.tokens) for ways in of_contexts for way in ways}
        text = f"{min(lengths)} to {max(lengths)}; 1 to {ahead + 1} are wanted"
        is_right = min(lengths) >= 1 and max(lengths) <= ahead + 1
        mistake = "Each call returns a token at least, and one more than was drafted at most."
        yield Property(f"tokens{name}", text, is_right, mistake)
        found = {}
        wanted = {}
        for context, ways in zip(contexts(seed), of_contexts):
            found[f"after {context}"] = distribution(ways, large, context, ahead + 1)
            empty = Way([], 1.0, (0, 0))
            wanted[f"after {context}"] = distribution([empty], large, context, ahead + 1)
        reference = "that of the large model, exactly"
        yield compare.tensors(f"output{name}", [found], [wanted], reference, MISTAKES.get(name, ""))
    ways = [way for ways in results[""][0] for way in map(Way._make, ways)]
    yield calls("large model", max(way.calls[0] for way in ways), 1, ONE_CALL)
    drafted = CASES[""][0]
    mistake = "The draft is called once for each token that it drafts."
    yield calls("draft", max(way.calls[1] for way in ways), drafted, mistake)
    for name in cases():
        for context, ways in zip(contexts(seed), results[name][0]):
            mean = sum(len(way.tokens) * way.probability for way in map(Way._make, ways))
            most = tokens_a_call(seed, name, context)
            yield tokens_on_average(mean, most, CASES[name][0] + 1)


def calls(what: str, found: int, most: int, mistake: str) -> Property:
    return Property(what, f"{found} calls, and {most} allowed", found <= most, mistake)


def tokens_on_average(mean: float, most: float, all_accepted: int) -> Property:
    """Return whether as many tokens come out of a call as can."""
    mistakes = {
        "One token comes out of each call of the large model: it saves nothing.": mean < 1 + 1e-9,
        f"If all drafts are accepted, the same call gives one token more: {all_accepted}.": True,
    }
    text = f"{mean:.4f} on average; {most:.4f} are possible"
    return Property("tokens a call", text, abs(mean - most) < 1e-9, mistakes)
