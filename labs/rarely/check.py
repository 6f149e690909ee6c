"""The check of labs/rarely."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from labs.machinery import compare
from labs.machinery.compare import Property
from labs.machinery.lab import batch_of, share_of, small_model, summed_gradients, world_of
from labs.machinery.student import check_returned
from model import Llama
from perf.instruments import Counted

FUNCTION = "outer_step"
ABOUT = "the outer step of DiLoCo, at which ranks meet that train by themselves"
NEEDS = "`all_reduce`, Nesterov's momentum"
POINT = "what is common to all, and what is each one's own"
LEADS_TO = "techniques/diloco.py", "outer_step"
SIZES = 2, 3, 4
BARRED = ("techniques.diloco.outer_step",)
HINTS = (
    "Look at the picture in the docstring of techniques/diloco.py: what travels, and from where is "
    "it measured?",
    "Write down which of these tensors are the same on all ranks before a meeting, and after it.",
    "One loop over the parameters; in it one all-reduce; then the formulas of SGD with Nesterov, "
    "and a copy back.",
)
MEETINGS, STEPS = 2, 3  # meetings, and the steps before each
LR, MOMENTUM = 0.7, 0.9
MODEL_LR = 1e-2

Named = dict[str, Tensor]


class Alone:
    """A rank's model and optimizer, which train by themselves."""

    def __init__(self, seed: int, rank: int, size: int):
        self.model: Llama = small_model(seed)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), MODEL_LR)
        self.place = seed, rank, size

    def train(self, meeting: int) -> Named:
        """Take the steps before a meeting, and return a copy of the weights."""
        seed, rank, size = self.place
        for step in range(STEPS):
            batch = share_of(batch_of(seed + STEPS * meeting + step), rank, size)
            _, count, gradients = summed_gradients(self.model, batch)
            for name, parameter in self.model.named_parameters():
                parameter.grad = gradients[name] / count
            self.optimizer.step()
        return self.weights()

    def weights(self) -> Named:
        return {name: p.detach().clone() for name, p in self.model.named_parameters()}

    def moments(self) -> Named:
        named = self.model.named_parameters()
        return {
            f"{name} {key}": self.optimizer.state[p][key].clone()
            for name, p in named
            for key in ("exp_avg", "exp_avg_sq")
        }


def on_rank(load: Callable, size: int, seed: int, rank: int) -> dict:
    world, alone, outer_step = world_of(rank, size), Alone(seed, rank, size), load(overwrites=True)
    weights = [p.detach() for p in alone.model.parameters()]
    outer = [weight.clone() for weight in weights]
    momenta = [torch.zeros_like(weight) for weight in weights]
    found = {"weights": [], "outer": [], "changed": [], "sent": []}
    for meeting in range(MEETINGS):
        alone.train(meeting)
        moments = alone.moments()
        with Counted(world) as counted:
            result = outer_step(weights, outer, momenta, LR, MOMENTUM, alone.optimizer)
        check_returned(result, list, "the outer copy, a list")
        found["weights"].append(alone.weights())
        found["outer"].append(dict(zip(alone.weights(), [copy.clone() for copy in outer])))
        after = alone.moments()
        found["changed"].append(any(not torch.equal(moments[name], after[name]) for name in after))
        found["sent"].append(compare.nbytes_of(counted.sent))
    return found


def mean(of_ranks: list[Named]) -> Named:
    return {name: sum(rank[name] for rank in of_ranks) / len(of_ranks) for name in of_ranks[0]}


def plus(a: Named, b: Named, times: float = 1.0) -> Named:
    return {name: a[name] + times * b[name] for name in a}


def nesterov(start: Named, drift: Named, sums: Named) -> Named:
    """Return start - LR (drift + MOMENTUM sums)."""
    return plus(start, plus(drift, sums, MOMENTUM), -LR)


def properties(results: dict[str, list], size: int, seed: int) -> Iterator[Property]:
    ranks = [Alone(seed, rank, size) for rank in range(size)]
    first, second = ([of_rank[i] for of_rank in results["weights"]] for i in range(MEETINGS))
    W = ranks[0].weights()
    local = [rank.train(0) for rank in ranks]
    drifts = [plus(W, weights, -1) for weights in local]
    drift = mean(drifts)
    expected = nesterov(W, drift, drift)
    away = (
        "The step goes away from where the ranks went: the drift is the outer copy minus weights."
    )
    mistakes = {
        "This is the mean of the ranks' weights, which is no outer step: neither lr nor momentum "
        "had a part in it.": mean(local),
        "Nothing was exchanged: each rank made an outer step with its own drift.": [
            nesterov(W, own, own) for own in drifts
        ],
        "The momentum of each rank adds up its own drift, so that ranks part: it follows the mean "
        "drift.": [nesterov(W, drift, own) for own in drifts],
        "The step begins at the rank's own weights: it begins at the outer copy, which all have in "
        "common.": [nesterov(weights, drift, drift) for weights in local],
        away: nesterov(W, compare.times(drift, -1), compare.times(drift, -1)),
        "This is the step of the sum of the drifts: their mean is wanted.": nesterov(
            W, compare.times(drift, size), compare.times(drift, size)
        ),
        "This is a step of momentum that is not Nesterov's, which adds momentum times the sums to "
        "the drift itself.": plus(W, drift, -LR),
        "The ranks' own weights stayed as they were: all go on from the outer copy.": local,
    }
    yield compare.tensors("weights", first, expected, mistakes, "those of the outer step")

    changed = any(any(of_rank) for of_rank in results["changed"])
    yield Property(
        "AdamW's moments",
        "changed" if changed else "each rank's own, as they were",
        not changed,
        "The moments are about a rank's own gradients: they stay as they are, and do not travel.",
    )

    for rank in ranks:
        for name, parameter in rank.model.named_parameters():
            parameter.data.copy_(expected[name])
    local = [rank.train(1) for rank in ranks]
    again = mean([plus(expected, weights, -1) for weights in local])
    from_start = mean([plus(W, weights, -1) for weights in local])
    mistakes = {
        "The outer copy is still that of the start: it has to become what the meeting ended with, "
        "or the next drift is measured from the wrong place.": nesterov(
            W, from_start, plus(from_start, drift, MOMENTUM)
        ),
        "The outer momentum was forgotten between the meetings: keep it in `momenta`.": nesterov(
            expected, again, again
        ),
    }
    right = nesterov(expected, again, plus(again, drift, MOMENTUM))
    yield compare.tensors("weights again", second, right, mistakes, "those of the outer step")
    copies = [of_rank[-1] for of_rank in results["outer"]]
    yield compare.tensors("outer copy", copies, right, (), "the weights after the second meeting")
    nbytes = sum(weight.nbytes for weight in W.values())
    yield compare.exactly(
        "bytes a meeting",
        [sent for of_rank in results["sent"] for sent in of_rank],
        nbytes,
        "{:,}; weights have {:,}",
        {
            0: "Nothing was sent.",
            size * nbytes: f"{compare.ALL_GATHERED} An all-reduce puts out one sum.",
        },
    )
