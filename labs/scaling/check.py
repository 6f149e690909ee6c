"""The check of labs/scaling.

The model is a language model with one matrix that learns: its embedding is given, and the next
token depends on the last one alone. A text is such a model, of the greatest width. So a run takes
milliseconds, its loss is known exactly, and there is an entropy that no loss is below.
"""

from collections.abc import Callable, Iterator
from functools import lru_cache

import torch
from torch import Tensor

from labs.machinery.compare import Property
from labs.machinery.student import Misuse, check_returned

FUNCTION = "scaling_law"
ABOUT = "runs under a budget, a law, and the width and loss of a larger run"
NEEDS = "logarithms, and a fit by least squares"
POINT = "a law of runs that were the best of their cost, and a floor"
LEADS_TO = "costs/shapes.py", "flops_per_token"
SIZES = (1,)
HINTS = (
    "Draw losses over widths for runs that have the same FLOPs. Why does the curve fall first, and "
    "why does it rise then?",
    "Count what each of your runs costs: how many widths, at how many costs, can the budget pay? "
    "How do the lowest points move from one cost to the next?",
    "For each of some costs: runs of several widths, and the lowest point of a parabola over the "
    "logarithm of the width. Then a line through the logarithms of these widths; and for their "
    "losses a constant and a power, whose exponent is the best of many.",
)
V = 128  # tokens of the vocabulary, and greatest width
LEARNING_RATE = 16.0
BUDGET, LARGER = 60_000, 120_000  # width times steps
NEAR_BEST = 48  # a width that is nearly the best of the larger run
LOSS_BOUND, WIDTH_BOUND = 0.045, 0.006  # nats
MOST = 10  # budgets: what is spent beyond ends the check
TOO_LOW = (
    "The loss is predicted too low. Does your law have a constant? A power of FLOPs or a line "
    "falls for ever, and below the entropy of the text."
)
TOO_HIGH = (
    "The loss is predicted too high. Are there runs in your fit whose width is not the best for "
    "their FLOPs?"
)
SEEN = "This is the lowest loss of your own runs: the larger run has a lower one."
NARROW = (
    "The width is too small: the best one grows with FLOPs. Which law do the best widths follow?"
)
WIDE = (
    "The width is too large: the larger run has too few steps then. Compare widths at equal FLOPs, "
    "and let width and steps share what is more."
)
SPENT = "Your runs cost more than the budget: count the FLOPs of all of them."
LARGE = (
    "A run may have a tenth of the budget: one large run knows its own loss, and no law. Make "
    "several at each of several costs."
)
MISTAKES = {
    " again": "The first call is right, and a second one is not: keep nothing between calls."
}
CASES = {"": 0, " again": 0, " other": 1}  # name -> which text of the seed


@lru_cache
def text(seed: int) -> tuple[Tensor, Tensor]:
    """Return the embedding [V, V], its most important features first, and the probabilities of the
    token that follows each token [V, V]."""
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randn(2, V, V, generator=generator, dtype=torch.float64)
    features, output = V**0.5 * torch.linalg.qr(numbers)[0]
    embedding = features * torch.arange(1, V + 1, dtype=torch.float64) ** -0.8
    return embedding, (embedding @ output.T).softmax(-1)


def flops(width: int, steps: int) -> int:
    """Return what a run costs: a step has each token of the vocabulary once."""
    return 6 * (V * width) * (V * steps)


@lru_cache(None)
def train(seed: int, width: int, steps: int) -> float:
    """Return the loss after a run. The targets of a step are probabilities, as in a batch without
    end; so its gradient has no noise."""
    embedding, following = text(seed)
    embedding = embedding[:, :width]
    output = embedding.new_zeros(V, width)
    for step in range(steps):
        of_logits = ((embedding @ output.T).softmax(-1) - following) / V
        rate = LEARNING_RATE * (1 - step / steps)
        output -= rate * of_logits.T @ embedding
    log_p = (embedding @ output.T).log_softmax(-1)
    return -(following * log_p).sum().item() / V


def text_of(seed: int, name: str) -> int:
    return 2 * seed + CASES[name]


class Runs:
    """The runs that a student's function makes with a text."""

    def __init__(self, seed: int):
        self.seed, self.made = seed, []

    def train(self, width: int, steps: int) -> float:
        if not (1 <= width <= V and steps >= 1):
            raise Misuse(f"train({width}, {steps}): widths are 1 to {V}, and steps 1 or more.")
        self.made.append((int(width), int(steps)))
        if spent(self.made) > MOST * flops(1, BUDGET):
            raise Misuse(f"Your runs cost more than {MOST} times the budget.")
        return train(self.seed, *self.made[-1])


def on_rank(load: Callable, size: int, seed: int, rank: int) -> dict:
    """Return the width and loss that the student's function predicts, and its runs."""
    scaling_law = load()
    found = {}
    for name in CASES:
        runs = Runs(text_of(seed, name))
        returned = scaling_law(runs.train, flops, flops(1, BUDGET), flops(1, LARGER))
        what = "the width, an int, and the loss, a float"
        width, loss = check_returned(returned, (int, float), what)
        if not 1 <= width <= V:
            raise Misuse(f"The width is {width}, and widths are 1 to {V}.")
        found[name] = {"width": width, "loss": loss, "runs": runs.made}
    return found


def spent(runs: list[tuple[int, int]]) -> int:
    return sum(flops(width, steps) for width, steps in runs)


def properties(results: dict[str, list], size: int, seed: int) -> Iterator[Property]:
    for name in CASES:
        (found,) = results[name]
        number, width, loss = text_of(seed, name), found["width"], found["loss"]
        chosen, other = (train(number, w, LARGER // w) for w in (width, NEAR_BEST))
        best = min(chosen, other)
        seen = [train(number, *run) for run in found["runs"]]
        mistakes = {
            MISTAKES.get(name, ""): name in MISTAKES,
            SEEN: loss in seen,
            TOO_LOW: loss < best,
            TOO_HIGH: True,
        }
        words = f"{loss:.4f} predicted; {best:.4f} trained, and {LOSS_BOUND} allowed between them"
        yield Property(f"loss{name}", words, abs(loss - best) <= LOSS_BOUND, mistakes, [loss])
        is_near = chosen - best <= WIDTH_BOUND
        words = f"{width}, trained to {chosen:.4f}; {best + WIDTH_BOUND:.4f} at most"
        yield Property(f"width{name}", words, is_near, NARROW if width < NEAR_BEST else WIDE)
        budget = flops(1, BUDGET)
        words = f"{spent(found['runs']):,}, of a budget of {budget:,}"
        yield Property(f"FLOPs{name}", words, spent(found["runs"]) <= budget, SPENT)
        largest = max((flops(*run) for run in found["runs"]), default=0)
        words = f"{largest:,} of the largest; {budget // 10:,} at most"
        yield Property(f"each run{name}", words, largest <= budget // 10, LARGE)
