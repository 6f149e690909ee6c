"""The check of labs/accumulate."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

import train
from labs.machinery import student
from labs.machinery.lab import (
    Property,
    batch_of,
    compare_numbers,
    compare_tensors,
    exactly,
    share_of,
    small_model,
    summed_gradients,
    world_of,
)
from labs.machinery.student import check_returned
from labs.machinery.training import Run
from parallel import World
from perf.instruments import Counted, Live
from text.batch import Batch

FUNCTION = "accumulate"
ABOUT = "the loop over microbatches, on PyTorch's DDP"
NEEDS = "a context manager"
POINT = "right numbers, four times the bytes"
LEADS_TO = "parallel.py", "gradient_sync"
SIZES = 2, 3, 4
BARRED = "train.accumulate", "train.train_step", "parallel.gradient_sync"
HINTS = (
    "Look for the sentence on forward in the documentation of no_sync.",
    "Count the all-reduces of a step. Which microbatch needs one, and what does it average?",
    "A loop; in it one `with`, whose context depends on whether this is the last; forward and "
    "backward inside.",
)
GRADIENTS = "replicate", "all-reduce"
KEPT = (
    "Each call keeps more tensors in memory than the one before, for ever: a sum of the losses "
    "needs one."
)


def on_rank(load: Callable, size: int, seed: int, rank: int) -> dict:
    world, model = world_of(rank, size), small_model(seed)
    runner = torch.nn.parallel.DistributedDataParallel(model, init_sync=False)
    microbatches = [
        part.inputs[:2] for part in share_of(batch_of(seed), rank, size).microbatches(1)
    ]
    peaks = []
    with Live(model.parameters()) as live, runner.no_sync():  # one microbatch, to compare with
        runner(*microbatches[-1]).backward()
    peaks.append(live.peak)
    model.zero_grad()
    forwards = []
    model.register_forward_pre_hook(lambda *_: forwards.append(1))
    accumulate = load()
    with Live(model.parameters()) as live, Counted(world) as counted:
        loss = accumulate(runner, microbatches)
    check_returned(loss, torch.Tensor, "the sum of the losses, a tensor")
    peaks.append(live.peak)
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    ran, off = len(forwards), not runner.require_backward_grad_sync
    one = {}
    if student.AGAIN:
        if student.kept_by_call(lambda: accumulate(runner, microbatches)) > 0:
            raise student.Misuse(KEPT)
        model.zero_grad(set_to_none=False)
        accumulate(runner, microbatches[:1])
        one = {name: p.grad.clone() for name, p in model.named_parameters()}
    return {
        "one": one,
        "forwards": ran,
        "off": off,
        "loss": loss.item(),
        "has a graph": loss.requires_grad,
        "gradients": gradients,
        "sent": counted.sent,
        "peaks": peaks,
    }


def properties(results: list[dict], size: int, seed: int) -> Iterator[Property]:
    model, batch = small_model(seed), batch_of(seed)
    shares = [share_of(batch, rank, size) for rank in range(size)]
    of_ranks = [summed_gradients(model, share) for share in shares]
    firsts, lasts = ([summed_gradients(model, share.microbatches(1)[i])[2] for share in shares]
                     for i in (0, -1))  # fmt: skip
    names, m = list(of_ranks[0][2]), len(shares[0].tokens)
    average = {name: sum(g[name] for *_, g in of_ranks) / size for name in names}
    first, last = ({name: sum(g[name] for g in own) / size for name in names}
                   for own in (firsts, lasts))  # fmt: skip
    losses = [loss for loss, *_ in of_ranks]
    last_losses = [summed_gradients(model, share.microbatches(1)[-1])[0] for share in shares]
    mistakes = {
        "This is the loss of the last microbatch: the sum over all is wanted.": last_losses,
        "This is the loss of all ranks: each returns that of its own microbatches.": sum(losses),
    }
    yield compare_numbers("loss", [r["loss"] for r in results], losses, mistakes)
    yield compare_tensors(
        "gradients",
        [r["gradients"] for r in results],
        average,
        {
            "No gradient was exchanged: DDP decides in forward whether the next backward will "
            "communicate, and in the last forward it was still told not to.": [
                g for *_, g in of_ranks
            ],
            "The first microbatch's gradient was averaged, the others' not: what adds up "
            "afterwards stays on its rank.": [
                {name: first[name] + g[name] - own[name] for name in names}
                for (*_, g), own in zip(of_ranks, firsts)
            ],
            "The last microbatch's gradient was averaged, the others' not: a hook on the incoming "
            "gradient sees that of one microbatch, not the sum in parameter.grad.": [
                {name: last[name] + g[name] - own[name] for name in names}
                for (*_, g), own in zip(of_ranks, lasts)
            ],
            "This is the gradient of the last microbatch alone: gradients add up over all.": last,
            f"The gradient is divided by the number of microbatches, {m}: these are sums, which "
            f"are divided once, by the number of targets.": {
                name: g / m for name, g in average.items()
            },
        },
    )
    if student.AGAIN:
        yield compare_tensors("one microbatch", [r["one"] for r in results], first)
    expected = sum(p.nbytes for p in model.parameters())
    yield exactly(
        "bytes a step",
        [r["sent"].get(GRADIENTS, (0, 0))[1] for r in results],
        expected,
        "{:,}; gradients have {:,}",
        {
            m * expected: f"Gradients are sent in each of the {m} microbatches: numbers are right, "
            "and slow."
        },
    )
    others = {name for r in results for key in r["sent"] if key != GRADIENTS for name in key[1:]}
    yield Property("nothing else", ", ".join(sorted(others)) or "is sent", not others)
    yield exactly(
        "forwards",
        [r["forwards"] for r in results],
        m,
        "{}; {} are wanted, one of each microbatch",
        "Each microbatch runs forward once: what runs again costs a third of a step.",
    )
    off = any(r["off"] for r in results)
    yield Property(
        "afterwards",
        f"DDP {'does not send' if off else 'sends'} in the next backward",
        not off,
        "DDP is still told not to send when your function returns: leave the context of no_sync.",
    )
    one, most = max((r["peaks"] for r in results), key=lambda peaks: peaks[1] / peaks[0])
    yield Property(
        "live memory",
        f"{most:,} bytes at most, with one microbatch {one:,}",
        most < 1.5 * one,
        "Activations of all microbatches exist at once: backward of each frees them.",
    )
    has_graph = any(r["has a graph"] for r in results)
    yield Property(
        "returned loss",
        "with its graph" if has_graph else "without a graph",
        not has_graph,
        "Who keeps this loss keeps what its graph holds: detach it.",
    )


RUN = Run()


def install(student: Callable) -> None:
    def of_batch(runner, batch: Batch, microbatch: int, world: World) -> Tensor:
        return student(runner, [part.inputs[:2] for part in batch.microbatches(microbatch)])

    train.accumulate = of_batch
