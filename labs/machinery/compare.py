"""What ranks have, compared with what is right, and with what known mistakes give.

A mistake in numbers is known by the numbers themselves. labs/LAB/known.json has those that the
wrong answers in wrong.txt give, and the sentence of each (known.py).
"""

import json
import math
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

TOLERANCE = 1e-12
KNOWN_TOLERANCE = 1e-9  # of the numbers in known.json, since other machines round otherwise
NEAR = 1e-10, 1e-5  # of a number: so far off is one in float64 that was float32 on the way
ROUNDED = (
    "Nearly right, as if something was rounded to float32 on the way. All is float64 here, but "
    "torch.full, zeros, ones and tensor make float32 if no dtype is given."
)
NOTHING = "Nothing is there: is a return or a backward missing?"
RANK_0 = "Rank 0 alone has what is right, and every rank needs it."
# A power of the number of ranks, or a number, that all of it is multiplied by -> the sentence.
OF_RANKS = {
    1: "All of it is {size} times as large as it should be, and there are {size} ranks. Is a sum "
    "over the ranks left where an average is wanted, or the same gradient added up once for each?",
    2: "All of it is {size} x {size} times as large as it should be, and there are {size} ranks: "
    "two sums over them, where there should be none.",
    -1: "All of it is divided by {size} once too often, and there are {size} ranks. Is an average "
    "taken of what is one already, or where the sum is wanted?",
    -2: "All of it is divided by {size} x {size} too much, and there are {size} ranks: do two "
    "averages come one after the other?",
}
OTHERWISE = {
    0: "All of it is 0. Is backward missing? Or does a detach(), a copy or a call that autograd "
    "does not record stand in the way?",
    -1: "All of it has the wrong sign.",
}
BY_TWO = (
    "All of it is {size} / 2 times as large as it should be, on {size} ranks: something is divided "
    "by 2, and should be by the number of ranks."
)
NOT_RECORDED = "Collectives of torch.distributed are not recorded by autograd: "
ALL_REDUCED = (
    "An all-reduce gives every rank all of the sum, at twice the price of the slice that it needs: "
    "reduce-scatter."
)
ALL_GATHERED = "Here every rank receives the gradients of all others, to add them up itself."


class Property(NamedTuple):
    """A line of a check's report: what was checked, what was found, and if that is wrong, why."""

    name: str
    text: str
    ok: bool
    mistakes: str | dict[str, object] = ""  # a sentence; or several, and whether they hold
    found: object = None  # numbers of all ranks, if a wrong answer is known by them

    @property
    def mistake(self) -> str:
        """The first sentence that holds, "" if none does."""
        if isinstance(self.mistakes, str):
            return self.mistakes
        return next((text for text, holds in self.mistakes.items() if holds), "")


Values = list[dict[str, Tensor]]  # of each rank: name -> tensor
# Of each rank a tensor, or several by name; or, where all ranks have the same, that alone.
Given = list[Tensor | dict[str, Tensor]] | Tensor | dict[str, Tensor]


def by_name(results: list) -> dict[str, list] | list:
    """Return what each rank has by name, where ranks return dicts, as name -> that of each rank."""
    if not isinstance(results[0], dict):
        return results
    return {name: [of_rank[name] for of_rank in results] for name in results[0]}


def same(found: object, expected: Tensor | float) -> bool:
    """Return whether a tensor or number is the expected one, up to rounding in float64."""
    if not isinstance(found, Tensor | float | int):
        return False
    found, expected = (torch.as_tensor(v, dtype=torch.float64) for v in (found, expected))
    if found.shape != expected.shape:
        return False
    return bool((found - expected).norm() <= TOLERANCE * max(expected.norm(), 1e-300))


def are_finite(found: object) -> bool:
    """Return whether all tensors and numbers in `found` are finite, and none is missing."""
    leaves = [math.nan if leaf is None else leaf for leaf in tree_leaves(found)]
    return all(torch.as_tensor(leaf).isfinite().all() for leaf in leaves)


def of_ranks(given: Given, name: str, size: int) -> Values:
    given = given if isinstance(given, list) else [given] * size
    return [one if isinstance(one, dict) else {name: one} for one in given]


def times(given: Given, factor: float) -> Given:
    """Return what is given, multiplied."""
    if isinstance(given, list):
        return [times(one, factor) for one in given]
    if isinstance(given, dict):
        return {name: factor * tensor for name, tensor in given.items()}
    return factor * given


def tensors(
    name: str,
    found: list,
    expected: Given,
    reference: str = "those of one process",
    otherwise: str = "",
) -> Property:
    """Return whether each rank has the tensors that are expected there, those of `reference`.
    `otherwise` is the sentence for values that no known mistake gives."""
    is_common = not isinstance(expected, list)
    found, expected = (of_ranks(given, name, len(found)) for given in (found, expected))
    wrong = [(rank, key) for rank, of_rank in enumerate(expected) for key in of_rank
             if not same(found[rank][key], of_rank[key])
             or found[rank][key].dtype != of_rank[key].dtype]  # fmt: skip
    if not wrong:
        return Property(name, f"{reference}, on all ranks", True)
    rank, key = wrong[0]
    keys = {key for _, key in wrong}
    ranks = {rank for rank, _ in wrong}
    differ = "differs" if len(keys) == 1 else "differ"
    text = f"{len(keys)} of {len(expected[0])} {differ}, on {len(ranks)} of {len(expected)} ranks"
    one, other = found[rank][key], expected[rank][key]
    where = f"{key} on rank {rank}"
    if not isinstance(one, Tensor):
        text = f"{where} is {one}"
        otherwise = NOTHING if one is None else otherwise
    elif one.dtype != other.dtype:
        text = f"{where} is in {one.dtype}, not in {other.dtype}"
    elif one.shape != other.shape:
        text = f"{where} has shape {list(one.shape)}, and should have {list(other.shape)}"
    elif (apart := float((one - other).norm() / other.norm())) < max(NEAR):
        text = f"{text}; {where} is off by {apart:.0e} of it"
        otherwise = ROUNDED if apart > min(NEAR) else otherwise
    else:
        factor = factor_of([one], [other])
        multiple = "no multiple of it" if factor is None else f"{factor:.10g} times as large"
        text = f"{text}; {where} is {multiple}"
        shown = shown_mistake(found, expected, keys, ranks, is_common)
        is_no_gradient = factor == 0 and not name.startswith("gradients")
        otherwise = otherwise or ("" if is_no_gradient else shown)
    return Property(name, text, False, otherwise, found)


def shown_mistake(
    found: Values, expected: Values, keys: set[str], wrong_ranks: set[int], is_common: bool
) -> str:
    """Return the sentence for a mistake that the tensors under these keys show, "" if they show
    none. `is_common`: whether all ranks need the same tensors."""
    size = len(found)
    are_zero = any(not expected[0][key].any() for key in keys)
    if is_common and not are_zero and wrong_ranks == set(range(1, size)):
        return RANK_0
    try:
        one, other = ([of_rank[key] for of_rank in values for key in keys]
                      for values in (found, expected))  # fmt: skip
        factor = factor_of(one, other)
    except (RuntimeError, TypeError):  # another rank's have other shapes, or are no tensors
        return ""
    return "" if factor is None else sentence_of(factor, size)


def factor_of(found: list[Tensor], expected: list[Tensor]) -> float | None:
    """Return the number that all tensors are multiplied by, None if there is none."""
    products = sum(float((one * other).sum()) for one, other in zip(found, expected))
    squares = sum(float(other.norm() ** 2) for other in expected)
    if not squares:
        return None
    factor = products / squares
    are_multiples = all(same(one, factor * other) for one, other in zip(found, expected))
    return factor if are_multiples else None


def sentence_of(factor: float, size: int) -> str:
    """Return the sentence for what everything is multiplied by, on so many ranks."""
    known = dict(OTHERWISE)
    if size > 1:
        known |= {size**power: sentence for power, sentence in OF_RANKS.items()}
    if size > 2:
        known.setdefault(size / 2, BY_TWO)
    for number, sentence in known.items():
        if math.isclose(factor, number, rel_tol=TOLERANCE, abs_tol=TOLERANCE):
            return sentence.format(size=size)
    return ""


def numbers(
    name: str, found: list[float], expected: list[float] | float, otherwise: str = ""
) -> Property:
    """Return whether each rank has the number that is expected there. `otherwise` is the sentence
    for numbers that no known mistake gives."""
    expected = expected if isinstance(expected, list) else [expected] * len(found)
    wrong = [rank for rank, value in enumerate(found) if not same(value, expected[rank])]
    if not wrong:
        return Property(name, f"that of one process, {expected[0]:.6g} on rank 0", True)
    one, other = found[wrong[0]], expected[wrong[0]]
    text = f"{one:.10g} on rank {wrong[0]}, and {other:.10g} in one process"
    apart = max(abs(a - b) / abs(b) if b else math.inf for a, b in zip(found, expected))
    is_rounded = min(NEAR) < apart < max(NEAR)
    return Property(name, text, False, ROUNDED if is_rounded else otherwise, found)


def fingerprint(found: object) -> list[float]:
    """Return two numbers that stand for all in `found`: their sum, each with a weight of its own,
    and the sum of their sizes. Where there are no numbers, there is nothing to return."""
    leaves = [leaf for leaf in tree_leaves(found) if isinstance(leaf, Tensor | float | int)]
    if not leaves:
        return []
    flat = torch.cat([torch.as_tensor(leaf, dtype=torch.float64).flatten() for leaf in leaves])
    flat = flat.nan_to_num(nan=-1e9, posinf=1e9, neginf=-2e9)
    weights = torch.arange(1, len(flat) + 1, dtype=torch.float64).cos()
    return [float(flat @ weights), float(flat.abs().sum())]


def known_sentence(known: Path, size: int, wrong: Property) -> str:
    """Return the sentence of the wrong answer in known.json that gives what was found on `size`
    ranks; "" if none does. Where several do, nothing shows which it is, and all are returned."""
    numbers = fingerprint(wrong.found)
    if not numbers or not known.exists():
        return ""
    ours = size, wrong.name, *numbers
    sentences = [sentence for sentence, of_it in json.loads(known.read_text()).items()
                 if any(is_known(ours, theirs) for theirs in of_it)]  # fmt: skip
    return " Or: ".join(sentences)


def is_known(ours: tuple, theirs: list) -> bool:
    """Return whether two rows of known.json are equal, up to rounding."""
    most = KNOWN_TOLERANCE * theirs[3]
    return ours[:2] == tuple(theirs[:2]) and all(
        abs(a - b) <= most for a, b in zip(ours[2:], theirs[2:])
    )


def exactly(
    name: str, found: list, expected: object, text: str, mistakes: dict | str = ""
) -> Property:
    """Return whether each rank has what is expected. `text` is a format of what was found and what
    was expected; `mistakes` is the sentence for it, or maps what was found to one."""
    value = unexpected(found, expected)
    mistake = mistakes if isinstance(mistakes, str) else mistakes.get(value, "")
    return Property(name, text.format(value, expected), value == expected, mistake)


def at_most(
    name: str, found: list, limit: float, text: str, mistakes: str | dict[str, object]
) -> Property:
    """Return whether no rank has more than a limit. `text` is a format of the most and of that."""
    most = max(found)
    return Property(name, text.format(most, limit), most <= limit, mistakes)


def unexpected(values: list, expected: object) -> object:
    """Return the first of the ranks' values that is not the expected one, or else that one."""
    return next((value for value in values if value != expected), expected)


def by_kind(sent: dict[tuple, tuple[int, int]]) -> dict[str, tuple[int, int]]:
    """Return what was sent, (group, collective) -> (calls, bytes), by collective alone."""
    return {kind: total for (_, kind), total in sent.items()}


def nbytes_of(sent: dict[tuple, tuple[int, int]]) -> int:
    """Return the bytes of all that was sent."""
    return sum(nbytes for _, nbytes in sent.values())
