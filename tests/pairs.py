"""Pairwise testing: few cases in which every two values of two options occur together."""

import functools
import itertools
import operator
import random
from collections.abc import Callable, Iterable, Iterator

SHORT, LONG = 400, 16_000  # steps of a walk that meets some of the possible pairs, or all


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
    """Return few cases that, with those that are `covered` already, cover every pair of values that
    a random walk of so many steps meets. In each turn it takes the case of the walk with most new
    pairs for its cost (a greedy cover), and changes single values of it as long as that adds more.
    """
    items = [(name, value) for name, values in options.items() for value in values]
    numbers = {item: i for i, item in enumerate(items)}
    walked = itertools.islice(random_walk(options, possible, seed), steps)
    cases = list({tuple(case.values()): case for case in walked}.values())

    def pairs_of(case: dict) -> int:  # bit j of the i-th block of bits stands for items i < j
        own = [numbers[item] for item in case.items()]
        bits = sum(1 << i for i in own)
        return sum((bits >> i + 1 << i + 1) << i * len(items) for i in own)

    def worth(pairs: int, cost: float) -> float:
        return (pairs & uncovered).bit_count() / cost

    def improve(case: dict, so_far: float) -> dict:
        for name, value in items:
            changed = case | {name: value}
            more = worth(pairs_of(changed), cost(changed))
            if more > so_far and possible(changed):
                return improve(changed, more)
        return case

    pairs, costs = [*map(pairs_of, cases)], [*map(cost, cases)]
    uncovered, chosen = functools.reduce(operator.or_, pairs), []
    for case in covered:
        uncovered &= ~pairs_of(case)
    while uncovered:
        worths = [*map(worth, pairs, costs)]
        best = max(worths)
        chosen.append(improve(cases[worths.index(best)], best))
        uncovered &= ~pairs_of(chosen[-1])
    return chosen


def case_name(case: dict, options: dict[str, tuple]) -> str:
    """Return the name of a test: the options of its case that do not have their first value."""
    named = (f"{name}={value}" for name, value in case.items() if value != options[name][0])
    return " ".join(named).replace("=True", "") or "plain"
