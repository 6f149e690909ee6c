"""The check of labs/zero1."""

import time
from collections.abc import Callable, Iterator

import torch
import torch.distributed.optim  # imports more than torch does: here once, and not on each rank
from torch import Tensor, nn

from labs.machinery import compare, student
from labs.machinery.compare import Property
from labs.machinery.lab import drawn, plural
from labs.machinery.student import check_returned
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
    "Look at the pictures in the docstring of `ddp` in parallel.py and at the head of "
    "techniques/zero1.py: what does a rank hold, and what does it get from the others?",
    "Count the numbers that a rank keeps from step to step, and those that it receives in a step. "
    "For the weights that it does not update, does it need the gradients?",
    "A function that makes a tensor flat and pads it. In a step, for each parameter: reduce-"
    "scatter, update the own slice of the weights, all-gather, copy into the parameter.",
)
UNEVEN = "Collectives take equally much of each rank, and ranks do not divide all shapes: pad them."
ERRORS = {
    "outputShape": UNEVEN,
    "invalid tensor size": UNEVEN,
    "tuple index out of range": "Tensor.chunk gives fewer chunks than ranks where there are too "
    "few rows: flatten, and pad them.",
    "a leaf Variable that requires grad": "An update is not part of the graph: write into "
    "parameter.data, or under torch.no_grad().",
}
BROADCAST = (
    "A broadcast has one sender, and the others wait for it: in an all-gather all ranks send at "
    "once."
)
# Neither 3 nor 4 ranks divide all of them, and more than half of the numbers are the embedding's.
MATRICES = {"embedding": (101, 16), "wq": (16, 16), "w1": (24, 16), "w2": (16, 24)}
VECTORS = {"norm": (16,), "bias": (13,), "scales": (2,), "scale": (1,)}  # of one, most have none
SHAPES = MATRICES | VECTORS
P = sum(torch.Size(shape).numel() for shape in SHAPES.values())
DECAYS = 0.1, 0.0  # of matrices and vectors
BETAS = 0.9, 0.95
LRS = 0.01, 0.02, 0.03, 0.02, 0.01
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
    return named, [*groups, {"params": [], "weight_decay": 0.1}]


def gradients_of(seed: int, step: int, rank: int) -> dict[str, Tensor]:
    """Return a rank's gradients of a step: those of its own sequences. One is so small that AdamW's
    eps matters, and with it what the gradients are divided by."""
    gradients = dict(zip(SHAPES, drawn(10_000 * seed + 100 * step + rank, *SHAPES.values())))
    return gradients | {"bias": 1e-8 * gradients["bias"]}


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
    optimizer = torch.optim.AdamW(groups, betas=BETAS)
    for step, lr in enumerate(LRS):
        of_ranks = [gradients_of(seed, step, rank) for rank in range(size)]
        for name, parameter in named.items():
            parameter.grad = sum(g[name] for g in of_ranks) / size
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.step()
    return {name: parameter.detach() for name, parameter in named.items()}


def properties(results: dict[str, list], size: int, seed: int) -> Iterator[Property]:
    name = f"those of one process's AdamW after {len(LRS)} steps"
    yield compare.tensors("weights", results["weights"], reference(seed, size), name)
    kept = results["kept"]
    total = sum(kept)
    two = 2 * P * 8
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
    mistakes = {
        compare.ALL_REDUCED: "all-reduce" in sent,
        BROADCAST: "broadcast" in sent,
        f"Instead there is {others}.": others,
        compare.ALL_GATHERED: "reduce-scatter" not in sent,
    }
    for name in ("reduce-scatter", "all-gather"):
        calls, nbytes = sent.get(name, (0, 0))
        text = f"{nbytes:,} bytes a step by {plural(calls, 'call')}; the weights have {P * 8:,}"
        yield Property(name, text, P * 8 <= nbytes <= PADDED * P * 8, mistakes)
    yield Property("nothing else", others or "is sent", not others)
