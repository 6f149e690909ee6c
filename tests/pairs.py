"""Pairwise testing: few cases in which every two values of two options occur together."""

import functools
import itertools
import operator
import random
from collections.abc import Callable, Iterable, Iterator

SHORT, LONG = 1_000, 16_000  # steps of a walk that meets some of the possible pairs, or all


def random_walk(options: dict[str, tuple], possible: Callable, seed) -> Iterator[dict]:
    """Walk at random, without end, through the cases (option -> value) that are `possible`, with
    one to five options redrawn in each step. The first case has the first value of each option."""
    rng, first = random.Random(seed), {name: values[0] for name, values in options.items()}
    assert possible(first)
    case = first
    while True:
        yield case
        case = first if rng.random() < 0.02 else case  # or it stays in corners with few neighbours
        names = rng.sample(list(options), rng.randint(1, 5))
        changed = case | {name: rng.choice(options[name]) for name in names}
        if possible(changed):
            case = changed


def pairwise(
    options: dict[str, tuple],
    possible: Callable[[dict], bool],
    seed,
    steps: int,
    cost: Callable[[dict], float] = lambda case: 1,
    covered: Iterable[dict] = (),
) -> list[dict]:
    """Return few cases of a random walk that, with those that are `covered` already, cover every
    pair of values in it: in each turn the case with most new pairs, for its cost (a greedy cover).
    """
    items = [(name, value) for name, values in options.items() for value in values]
    bits = {pair: 1 << i for i, pair in enumerate(itertools.combinations(items, 2))}
    walked = itertools.islice(random_walk(options, possible, seed), steps)
    cases = list({tuple(case.values()): case for case in walked}.values())

    def pairs_of(case: dict) -> int:  # as bits of an integer; items are in the order of options
        return sum(bits[pair] for pair in itertools.combinations(case.items(), 2))

    masks, costs = [pairs_of(case) for case in cases], [cost(case) for case in cases]
    uncovered, chosen = functools.reduce(operator.or_, masks), []
    for case in covered:
        uncovered &= ~pairs_of(case)
    while uncovered:
        worth = [(mask & uncovered).bit_count() / cost for mask, cost in zip(masks, costs)]
        best = worth.index(max(worth))
        chosen.append(cases[best])
        uncovered &= ~masks[best]
    return chosen


def case_name(case: dict, options: dict[str, tuple]) -> str:
    """Return the name of a test: the options of its case that do not have their first value."""
    named = (f"{name}={value}" for name, value in case.items() if value != options[name][0])
    return " ".join(named).replace("=True", "") or "plain"
