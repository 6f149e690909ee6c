"""The check of labs/zero1."""

import time
from collections.abc import Callable, Iterator

import torch
import torch.distributed.optim  # imports more than torch does: here once, and not on each rank
from torch import Tensor, nn

import train
from labs.machinery import student
from labs.machinery.lab import (
    Property,
    at_most,
    by_kind,
    compare_tensors,
    drawn,
    plural,
    sentence,
    unexpected,
)
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
    "torch.distributed.optim.ZeroRedundancyOptimizer",
    "torch.distributed.fsdp.fully_shard",
    "torch.distributed.fsdp.FullyShardedDataParallel",
    "torch.distributed.tensor.DTensor",
    "torch.distributed.tensor.distribute_tensor",
    "parallel.parallelize",
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
    "all-reduce": "An all-reduce gives every rank all of the sum, at twice the price of the slice "
    "that it needs: reduce-scatter.",
    "broadcast": "A broadcast has one sender, and the others wait for it: in an all-gather all "
    "ranks send at once.",
}
GATHERED = "Here every rank receives the gradients of all others, to add them up itself."
# Neither 3 nor 4 ranks divide all of them, and more than half of the numbers are the embedding's.
MATRICES = {"embedding": (101, 16), "wq": (16, 16), "w1": (24, 16), "w2": (16, 24)}
VECTORS = {"norm": (16,), "bias": (13,), "scales": (2,)}
SHAPES = MATRICES | VECTORS
P = sum(torch.Size(shape).numel() for shape in SHAPES.values())
DECAYS = 0.1, 0.0  # of matrices and vectors
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
        step = sharded_adamw(groups)
    check_returned(step, Callable, "a function: step")
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
    return {"weights": weights, "kept": kept, "sent": by_kind(counted.sent)}


def reference(
    seed: int,
    ranks: range,
    factor: float = 1.0,
    decays: tuple[float, float] = DECAYS,
    count: Callable[[int, int], int] = lambda step, index: step,
) -> dict[str, Tensor]:
    """Return the weights after all steps of PyTorch's AdamW, by the average gradient of `ranks`
    times `factor`. Parameter `index` takes `step` = 1, 2, ... as its step count(step, index)."""
    named, groups = parameters_of(seed)
    for group, decay in zip(groups, decays):
        group["weight_decay"] = decay
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95))
    for parameter in named.values():
        zeros = (torch.zeros_like(parameter) for _ in range(2))
        optimizer.state[parameter] = dict(zip(("exp_avg", "exp_avg_sq"), zeros))
    for number, lr in enumerate(LRS):
        of_ranks = [gradients_of(seed, number, rank) for rank in ranks]
        for index, (name, parameter) in enumerate(named.items()):
            parameter.grad = factor * sum(g[name] for g in of_ranks) / len(ranks)
            before = torch.tensor(count(number + 1, index) - 1.0)
            optimizer.state[parameter]["step"] = before
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.step()
    return {name: parameter.detach() for name, parameter in named.items()}


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


def properties(results: list[dict], size: int, seed: int) -> Iterator[Property]:
    found, everyone = [r["weights"] for r in results], range(size)
    right = reference(seed, everyone)
    start = {name: parameter.detach() for name, parameter in parameters_of(seed)[0].items()}
    own = [reference(seed, range(rank, rank + 1)) for rank in everyone]
    n = len(right)
    of_everyone = {
        "The parameters are as they were before the first step: copy the updated weights into "
        "them, when the update is done.": start,
        "This is the update by the sum over the ranks: take the average.": reference(
            seed, everyone, factor=size
        ),
        "Weight decay is applied to all parameters alike: each group has its own.": reference(
            seed, everyone, decays=(DECAYS[0], DECAYS[0])
        ),
        "Here no weight decays: each group has its own weight decay.": reference(
            seed, everyone, decays=(0.0, 0.0)
        ),
        "Every step is taken for the first: AdamW divides by 1 - beta ** count, with the number of "
        "the step.": reference(seed, everyone, count=lambda step, index: 1),
        "`count` is AdamW's number of the step, the same for all parameters: here it grows with "
        "each parameter.": reference(
            seed, everyone, count=lambda step, index: (step - 1) * n + index + 1
        ),
        "Each share is updated by the gradient of the rank that keeps it: all ranks' average is "
        "wanted.": pieced(found[0], own),
    }
    alike = all(torch.equal(found[0][name], weights[name]) for weights in found for name in right)
    mistakes = of_everyone | {
        "Nothing was exchanged: each rank has trained by itself.": own,
        NOT_UPDATED if alike else NOT_GATHERED: [
            pieced(weights, [start, right]) for weights in found
        ],
        "`count` is AdamW's number of the step: here it grows with each group.": reference(
            seed,
            everyone,
            count=lambda step, index: 2 * (step - 1) + 1 + (index >= len(MATRICES)),
        ),
    }
    reference_name = f"those of one process's AdamW after {len(LRS)} steps"
    yield compare_tensors("weights", found, right, mistakes, reference_name)

    kept = [r["kept"] for r in results]
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
        sentence(mistakes),
    )
    yield at_most(
        "balance",
        [of_rank * size / total for of_rank in kept],
        PADDED,
        "the fullest rank keeps {:.2f} times the average",
        "Ranks have unequal shares, as when whole parameters are dealt out, and one rank gets the "
        "embedding. Cut each parameter, or all of them laid end to end.",
    )
    sent = unexpected([r["sent"] for r in results], results[0]["sent"])
    others = ", ".join(sorted(sent.keys() - {"reduce-scatter", "all-gather"}))
    instead = [INSTEAD[name] for name in INSTEAD if name in sent]
    instead += [f"Instead there is {others}."] * bool(others)
    for name, otherwise in (("reduce-scatter", GATHERED), ("all-gather", "")):
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
