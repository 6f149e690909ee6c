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
LEADS_TO = "techniques/diloco.py of commit 86671ca", "outer_step"
SIZES = 2, 3, 4
HINTS = (
    "Look at the picture of the page: what travels, and from where is it measured?",
    "Write down which of these tensors are the same on all ranks before a meeting, and after it.",
    "One loop over the parameters; in it one all-reduce; then the formulas of SGD with Nesterov, "
    "and a copy back.",
)
MEETINGS, STEPS = 3, 3  # meetings, and the steps before each; before the last, rank 0 has none
LR, MOMENTUM = 0.7, 0.9
MODEL_LR = 1e-2
ALL_GATHERED = (
    "Here every rank receives the tensors of all others, to add them up itself. An all-reduce puts "
    "out one sum."
)
COPY = "the outer copy, a tensor for each of the weights"
IDLE = "A rank that has not trained has the drift 0, and takes part all the same."


class Alone:
    """A rank's model and optimizer, which train by themselves."""

    def __init__(self, seed: int, rank: int, size: int):
        self.model: Llama = small_model(seed)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), MODEL_LR)
        self.place = seed, rank, size

    def train(self, meeting: int) -> None:
        """Take the steps before a meeting."""
        seed, rank, size = self.place
        has_none = rank == 0 and meeting == MEETINGS - 1
        for step in range(0 if has_none else STEPS):
            batch = share_of(batch_of(seed + STEPS * meeting + step), rank, size)
            _, count, gradients = summed_gradients(self.model, batch)
            for name, parameter in self.model.named_parameters():
                parameter.grad = gradients[name] / count
            self.optimizer.step()

    def weights(self) -> dict[str, Tensor]:
        return {name: p.detach().clone() for name, p in self.model.named_parameters()}

    def moments(self) -> list[Tensor]:
        state = self.optimizer.state.values()
        return [moments[name].clone() for moments in state for name in ("exp_avg", "exp_avg_sq")]


def on_rank(load: Callable, size: int, seed: int, rank: int) -> dict:
    world = world_of(rank, size)
    alone = Alone(seed, rank, size)
    outer_step = load(overwrites=True)
    weights = [p.detach() for p in alone.model.parameters()]
    outer = [weight.clone() for weight in weights]
    momenta = [torch.zeros_like(weight) for weight in weights]
    found = {"weights": [], "outer": [], "changed": [], "sent": [], "gathered": []}
    for meeting in range(MEETINGS):
        alone.train(meeting)
        moments = alone.moments()
        with Counted(world) as counted:
            result = outer_step(weights, [*outer], [*momenta], LR, MOMENTUM, alone.optimizer)
        check_returned(result, list, f"{COPY}, in a list")
        if len(result) != len(weights):
            counts = f"{len(result)} tensors, and should return {len(weights)}"
            raise TypeError(f"your function returned {counts}: {COPY}")
        found["weights"].append(alone.weights())
        copies = [copy.clone() for copy in result]
        found["outer"].append(dict(zip(alone.weights(), copies)))
        found["changed"].append(not all(map(torch.equal, moments, alone.moments())))
        found["sent"].append(compare.nbytes_of(counted.sent))
        found["gathered"].append("all-gather" in compare.by_kind(counted.sent))
    return found


def reference(seed: int, size: int) -> Iterator[dict[str, Tensor]]:
    """Yield the weights after each meeting, by PyTorch's SGD with the mean drift as gradient."""
    ranks = [Alone(seed, rank, size) for rank in range(size)]
    outer = small_model(seed)
    optimizer = torch.optim.SGD(outer.parameters(), LR, MOMENTUM, nesterov=True)
    for meeting in range(MEETINGS):
        for rank in ranks:
            rank.train(meeting)
        for copy, *of_ranks in zip(outer.parameters(), *(r.model.parameters() for r in ranks)):
            copy.grad = sum(copy.detach() - own.detach() for own in of_ranks) / size
        optimizer.step()
        for rank in ranks:
            rank.model.load_state_dict(outer.state_dict())
        yield ranks[0].weights()


def properties(results: dict[str, list], size: int, seed: int) -> Iterator[Property]:
    first, second, last = map(list, zip(*results["weights"]))
    after_first, after_second, after_last = reference(seed, size)
    yield compare.tensors("weights", first, after_first, "those of the outer step")
    changed = any(map(any, results["changed"]))
    yield Property(
        "AdamW's moments",
        "changed" if changed else "each rank's own, as they were",
        not changed,
        "The moments are about a rank's own gradients: they stay as they are, and do not travel.",
    )
    yield compare.tensors("weights again", second, after_second, "those of the outer step")
    copies = [of_rank[1] for of_rank in results["outer"]]
    yield compare.tensors("outer copy", copies, after_second, "the weights after that meeting")
    text = "those where rank 0 has not trained"
    yield compare.tensors("weights, idle", last, after_last, text, IDLE)
    nbytes = sum(weight.nbytes for weight in after_second.values())
    mistakes = {0: "Nothing was sent."}
    if all(map(any, results["gathered"])):
        mistakes[size * nbytes] = ALL_GATHERED
    yield compare.exactly(
        "bytes a meeting",
        [sent for of_rank in results["sent"] for sent in of_rank],
        nbytes,
        "{:,}; weights have {:,}",
        mistakes,
    )
