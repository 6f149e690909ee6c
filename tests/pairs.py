"""Draw cases so that every two values of two options meet in one of them, wherever they can."""

import functools
import itertools
import operator
import random
from collections.abc import Callable, Iterable, Iterator

import pytest


def walk(options: dict[str, tuple], possible: Callable[[dict], bool], seed) -> Iterator[dict]:
    """Yield cases (option -> value) without end, each a few changes away from the last; the first
    has the first value of each option. Of those that are not `possible`, none."""
    rng, first = random.Random(seed), {name: values[0] for name, values in options.items()}
    assert possible(first)
    case = first
    while True:
        yield case
        case = first if rng.random() < 0.02 else case  # not to stay where few changes are possible
        names = rng.sample(list(options), rng.randint(1, 5))
        changed = case | {name: rng.choice(options[name]) for name in names}
        if possible(changed):
            case = changed


def cover(
    options: dict[str, tuple], possible: Callable[[dict], bool], seed, steps: int = 16_000
) -> list[dict]:
    """Return cases of a walk that have every pair of values that a case of it has, the one with
    most new pairs first."""
    items = [(name, value) for name, values in options.items() for value in values]
    bits = {pair: 1 << i for i, pair in enumerate(itertools.combinations(items, 2))}
    walked = itertools.islice(walk(options, possible, seed), steps)
    cases = {tuple(case.values()): case for case in walked}.values()
    # Items are in the order of options, and so are those of a pair.
    pairs = [sum(bits[pair] for pair in itertools.combinations(case.items(), 2)) for case in cases]
    left, kept = functools.reduce(operator.or_, pairs), []
    while left:
        has, case = max(zip(pairs, cases), key=lambda given: (given[0] & left).bit_count())
        kept.append(case)
        left &= ~has
    return kept


def name_of(case: dict, options: dict[str, tuple]) -> str:
    """Return the options of a case that do not have their first value, as the name of a test."""
    named = (f"{name}={value}" for name, value in case.items() if value != options[name][0])
    return " ".join(named).replace("=True", "") or "plain"


def params(names: Iterable[str], quick: Iterable[str]) -> list:
    """Return cases for pytest, of which some are quick and the others slow."""
    return [
        pytest.param(name, id=name, marks=[pytest.mark.slow] * (name not in quick))
        for name in names
    ]
