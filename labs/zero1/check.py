"""The check of labs/zero1."""

import time
from collections.abc import Callable, Iterable, Iterator

import torch
import torch.distributed.optim  # imports more than torch does: here once, and not on each rank
from torch import Tensor, nn

import train
from labs.machinery import compare, student
from labs.machinery.compare import Property
from labs.machinery.lab import drawn, plural
from labs.machinery.student import check_returned
from labs.machinery.training import Run, replace_ddp
from perf.instruments import Counted, Live

FUNCTION = "sharded_adamw"
ABOUT = "a step of AdamW with sharded moments"
NEEDS = "`reduce_scatter_tensor`, `all_gather_into_tensor`, padding"
POINT = "what is computed alike need not be kept by all"
LEADS_TO = "techniques/zero1.py", "ZeRO1"
SIZES = 2, 3, 4
BARRED = (
    *student.SHARDING,
    "torch.distributed.optim.ZeroRedundancyOptimizer",
    "techniques.zero1.ZeRO1",
    "techniques.zero1.all_gather_updates",
)
HINTS = (
    "Look at the two pictures, of `ddp` and of `ZeRO1`, in parallel.py: what does a rank hold, and "
    "what does it get from the others?",
    "Count the numbers that a rank keeps from step to step, and those that it receives in a step. "
    "For the weights that it does not update, does it need the gradients?",
    "A function that makes a tensor flat and pads it. In a step, for each parameter: reduce-"
    "scatter, update the own slice of the weights, all-gather, copy into the parameter.",
)
UNEVEN = "Collectives take equally much of each rank, and ranks do not divide all shapes: pad them."
ERRORS = {
    "outputShape": UNEVEN,
    "invalid tensor size": UNEVEN,
    "out of range": "Tensor.chunk gives fewer chunks than ranks where there are too few rows: "
    "flatten, and pad them.",
    "a leaf Variable that requires grad": "An update is not part of the graph: write into "
    "parameter.data, or under torch.no_grad().",
}
INSTEAD = {
    "all-reduce": compare.ALL_REDUCED,
    "broadcast": "A broadcast has one sender, and the others wait for it: in an all-gather all "
    "ranks send at once.",
}
# Neither 3 nor 4 ranks divide all of them, and more than half of the numbers are the embedding's.
MATRICES = {"embedding": (101, 16), "wq": (16, 16), "w1": (24, 16), "w2": (16, 24)}
VECTORS = {"norm": (16,), "bias": (13,), "scales": (2,)}
SHAPES = MATRICES | VECTORS
P = sum(torch.Size(shape).numel() for shape in SHAPES.values())
DECAYS = 0.1, 0.0  # of matrices and vectors
BETA1, BETA2, EPS = 0.9, 0.95, 1e-8
LRS = 0.01, 0.02, 0.03, 0.02, 0.01
NOT_GATHERED = "Each rank has updated its own share, and the others never get it: all-gather."
NOT_UPDATED = "Some numbers are never updated: ranks do not divide all shapes, so pad them."
CHANGED = (
    "A step has changed parameter.grad, which the caller may still use: average into a tensor of "
    "your own."
)
PADDED = 1.1  # times as many numbers, at most


def parameters_of(seed: int) -> tuple[dict[str, nn.Parameter], list[dict]]:
    """Return the parameters by name, the same on each rank, and the groups that they form."""
    named = dict(zip(SHAPES, map(nn.Parameter, drawn(seed, *SHAPES.values()))))
    groups = [
        {"params": [named[name] for name in shapes], "weight_decay": decay}
        for shapes, decay in zip((MATRICES, VECTORS), DECAYS)
    ]
    return named, groups


def gradients_of(seed: int, step: int, rank: int) -> dict[str, Tensor]:
    """Return a rank's gradients of a step: those of its own sequences."""
    return dict(zip(SHAPES, drawn(10_000 * seed + 100 * step + rank, *SHAPES.values())))


def on_rank(load: Callable, size: int, seed: int, rank: int) -> dict:
    """Take steps with the student's function. Return the weights, the bytes that are kept after the
    last step besides them, and what that step has sent."""
    named, groups = parameters_of(seed)
    live = Live(named.values())
    held = live.now
    others = parameters_of(seed + 1)
    sharded_adamw = load()
    with live:
        step = check_returned(sharded_adamw(groups), Callable, "a function: step")
    step_others = sharded_adamw(others[1]) if student.AGAIN else lambda lr: None
    for number, lr in enumerate(LRS):
        gradients = gradients_of(seed, number, rank)
        for name, gradient in gradients.items():
            named[name].grad = gradient.clone()
            others[0][name].grad = -gradient
        step_others(lr)
        with live, Counted(None) as counted:
            step(lr)
        if student.AGAIN and not all(
            torch.equal(named[name].grad, g) for name, g in gradients.items()
        ):
            raise student.Misuse(CHANGED)
        for parameter in named.values():
            parameter.grad = None
    for _ in range(20):  # a collective may free its buffers a little later
        if (kept := live.now - held) <= 2 * PADDED * P / size * 8:
            break
        time.sleep(0.01)
    weights = {name: parameter.detach() for name, parameter in named.items()}
    return {"weights": weights, "kept": kept, "sent": compare.by_kind(counted.sent)}


def reference(seed: int, size: int) -> dict[str, Tensor]:
    """Return the weights after all steps of PyTorch's AdamW, by the average gradient."""
    named, groups = parameters_of(seed)
    optimizer = torch.optim.AdamW(groups, betas=(BETA1, BETA2))
    for step, lr in enumerate(LRS):
        of_ranks = [gradients_of(seed, step, rank) for rank in range(size)]
        for name, parameter in named.items():
            parameter.grad = sum(g[name] for g in of_ranks) / size
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.step()
    return {name: parameter.detach() for name, parameter in named.items()}


def by_hand(
    seed: int,
    ranks: Iterable[int],
    factor: float = 1.0,
    decays: tuple[float, float] = DECAYS,
    count: Callable[[int, int], int] = lambda step, index: step,
    lr: Callable[[int], float] = lambda step: LRS[step - 1],
    batch: Callable[[int], int] = lambda step: step,
    root: Callable[[Tensor, float], Tensor] = lambda v, left: (v / left).sqrt() + EPS,
    coupled: bool = False,
) -> dict[str, Tensor]:
    """Return the weights after all steps of AdamW by its formula, or by one that is changed. It
    takes `ranks`' average gradient times `factor`, and the decays of matrices and of vectors.

    In `step` = 1, 2, ... it takes the step number count(step, index of the parameter), lr(step) and
    the gradient of step batch(step). It divides by root(second moment, 1 - beta2 ** count); and
    `coupled`, the decay is a part of the gradient, as in Adam."""
    weights = {name: parameter.detach() for name, parameter in parameters_of(seed)[0].items()}
    for index, (name, weight) in enumerate(weights.items()):
        first, second, decay = 0.0, 0.0, decays[name in VECTORS]
        for step in range(1, len(LRS) + 1):
            of_ranks = [gradients_of(seed, batch(step) - 1, rank)[name] for rank in ranks]
            grad = factor * sum(of_ranks) / len(of_ranks) + coupled * decay * weight
            first = BETA1 * first + (1 - BETA1) * grad
            second = BETA2 * second + (1 - BETA2) * grad**2
            n = count(step, index)
            update = first / (1 - BETA1**n) / root(second, 1 - BETA2**n)
            weight = (1 - lr(step) * decay * (not coupled)) * weight - lr(step) * update
        weights[name] = weight
    return weights


# Sentence -> what by_hand changes, where all ranks make this mistake.
FORMULAS = {
    "Weight decay is applied to all parameters alike: each group has its own.": dict(
        decays=(DECAYS[0], DECAYS[0])
    ),
    "Here no weight decays: each group has its own weight decay.": dict(decays=(0.0, 0.0)),
    "The decay is a part of the gradient, as in Adam. In AdamW it shrinks the weights.": dict(
        coupled=True
    ),
    "eps is added under the root: it belongs beside the root of the corrected second moment.": dict(
        root=lambda v, left: (v / left + EPS).sqrt()
    ),
    "eps is added before the second moment is corrected: divide by 1 - beta2 ** count first.": dict(
        root=lambda v, left: (v.sqrt() + EPS) / left**0.5
    ),
    "Every step is taken for the first: AdamW divides by 1 - beta ** count, with the number of "
    "the step.": dict(count=lambda step, index: 1),
    "`count` is AdamW's number of the step, the same for all parameters: here it grows with each "
    "parameter.": dict(count=lambda step, index: (step - 1) * len(SHAPES) + index + 1),
    "`count` is AdamW's number of the step: here it grows with each group.": dict(
        count=lambda step, index: 2 * (step - 1) + 1 + (index >= len(MATRICES))
    ),
    "Every step has the lr of the first: it is given anew in each.": dict(lr=lambda step: LRS[0]),
    "Every step has the gradients of the first: read parameter.grad in each.": dict(
        batch=lambda step: 1
    ),
}


def pieced(found: dict[str, Tensor], sources: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Return tensors of which each number is that of the source which has the one that was found,
    or else the first source's."""
    pieces = dict(sources[0])
    for source in sources[1:]:
        for name, tensor in source.items():
            if found[name].shape == tensor.shape:
                is_equal = torch.isclose(found[name], tensor, rtol=1e-12, atol=1e-12)
                pieces[name] = torch.where(is_equal, tensor, pieces[name])
    return pieces


def properties(results: dict[str, list], size: int, seed: int) -> Iterator[Property]:
    found, ranks = results["weights"], range(size)
    right = reference(seed, size)
    start = {name: parameter.detach() for name, parameter in parameters_of(seed)[0].items()}
    alike = all(torch.equal(found[0][name], weights[name]) for weights in found for name in right)

    def mistakes() -> Iterator[tuple[str, compare.Given]]:
        yield (
            "The parameters are as they were before the first step: copy the updated weights into "
            "them, when the update is done.",
            start,
        )
        own = [by_hand(seed, [rank]) for rank in ranks]
        yield "Nothing was exchanged: each rank has trained by itself.", own
        yield compare.SUMMED, by_hand(seed, ranks, factor=size)
        for text, change in FORMULAS.items():
            yield text, by_hand(seed, ranks, **change)
        yield (
            "Each share is updated by the gradient of the rank that keeps it: all ranks' average "
            "is wanted.",
            pieced(found[0], own),
        )
        pieces = [pieced(weights, [start, right]) for weights in found]
        yield NOT_UPDATED if alike else NOT_GATHERED, pieces

    reference_name = f"those of one process's AdamW after {len(LRS)} steps"
    yield compare.tensors("weights", found, right, mistakes(), reference_name)

    kept = results["kept"]
    total, two = sum(kept), 2 * P * 8
    mistakes = {
        "Two moments of each weight have to be kept by some rank, in tensors.": total < two,
        "Each rank keeps as many bytes as both moments of all weights have: of those, it needs "
        "its share alone.": total >= size * two,
        "All that a rank needs from one step to the next are the moments of its share, and it may "
        "keep a copy of that share of the weights.": True,
    }
    yield Property(
        "kept by all",
        f"{total:,} bytes; moments have {two:,}, and a copy of weights {two // 2:,}",
        two <= total <= 1.5 * PADDED * two,
        mistakes,
    )
    yield compare.at_most(
        "balance",
        [of_rank * size / total for of_rank in kept],
        PADDED,
        "the fullest rank keeps {:.2f} times the average",
        "Ranks have unequal shares, as when whole parameters are dealt out, and one rank gets the "
        "embedding. Cut each parameter, or all of them laid end to end.",
    )
    sent = compare.unexpected(results["sent"], results["sent"][0])
    others = ", ".join(sorted(sent.keys() - {"reduce-scatter", "all-gather"}))
    instead = [INSTEAD[name] for name in INSTEAD if name in sent]
    instead += [f"Instead there is {others}."] * bool(others)
    for name, otherwise in (("reduce-scatter", compare.ALL_GATHERED), ("all-gather", "")):
        calls, nbytes = sent.get(name, (0, 0))
        yield Property(
            name,
            f"{nbytes:,} bytes a step by {plural(calls, 'call')}; the weights have {P * 8:,}",
            P * 8 <= nbytes <= PADDED * P * 8,
            [*instead, otherwise][0],
        )
    yield Property("nothing else", others or "is sent", not others)


# `update` takes the norm of averaged gradients, and here they are averaged later: no clipping.
RUN = Run(flags="--microbatch 6 --clip 0")


def install(sharded_adamw: Callable) -> None:
    """Give the student's function each rank's own gradients, and let it take the step."""
    original = train.make_optimizer

    def make_optimizer(*args) -> torch.optim.Optimizer:
        optimizer = original(*args)
        step = sharded_adamw(optimizer.param_groups)
        optimizer.step = lambda: step(optimizer.param_groups[0]["lr"])
        return optimizer

    replace_ddp(lambda model, world: model)
    train.make_optimizer = make_optimizer
