"""The check of labs/accumulate."""

import itertools
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

import train
from labs.machinery import compare, student
from labs.machinery.compare import Property
from labs.machinery.lab import batch_of, share_of, small_model, summed_gradients, world_of
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
    check_returned(loss, Tensor, "the sum of the losses, a tensor")
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


def properties(results: dict[str, list], size: int, seed: int) -> Iterator[Property]:
    model, batch = small_model(seed), batch_of(seed)
    shares = [share_of(batch, rank, size) for rank in range(size)]
    losses = [summed_gradients(model, share)[0] for share in shares]
    # Of each rank, for each microbatch: loss, targets and gradient; and gradients as they add up.
    parts = [[summed_gradients(model, part) for part in share.microbatches(1)] for share in shares]
    so_far = [list(itertools.accumulate((g for *_, g in own), plus)) for own in parts]
    names, m = list(so_far[0][0]), len(parts[0])

    def averaged(own: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        return {name: sum(g[name] for g in own) / size for name in names}

    def averaged_after(i: int) -> list[dict[str, Tensor]]:
        """Return what there is if microbatch `i` averages what has added up, and no other does."""
        average = averaged([own[i] for own in so_far])
        return [plus(average, plus(own[-1], own[i], -1)) for own in so_far]

    last = averaged([own[-1][2] for own in parts])
    average = averaged([own[-1] for own in so_far])
    mistakes = {
        "This is the loss of the last microbatch: the sum over all is wanted.": [
            own[-1][0] for own in parts
        ],
        "This is the loss of all ranks: each returns that of its own microbatches.": sum(losses),
    }
    yield compare.numbers("loss", results["loss"], losses, mistakes)
    mistakes = {
        "No gradient was exchanged: DDP decides in forward whether the next backward will "
        "communicate, and in the last forward it was still told not to.": [
            own[-1] for own in so_far
        ],
        **{
            f"Gradients were averaged after microbatch {i + 1} of {m}: what adds up afterwards "
            f"stays on its rank.": averaged_after(i)
            for i in range(m - 1)
        },
        "The last microbatch's gradient was averaged, the others' not: a hook on the incoming "
        "gradient sees that of one microbatch, not the sum in parameter.grad.": [
            plus(last, plus(own[-1], of_last[-1][2], -1)) for own, of_last in zip(so_far, parts)
        ],
        "This is the gradient of the last microbatch alone: gradients add up over all.": last,
        f"The gradient is divided by the number of microbatches, {m}: these are sums, which are "
        f"divided once, by the number of targets.": compare.times(average, 1 / m),
    }
    yield compare.tensors("gradients", results["gradients"], average, mistakes)
    if student.AGAIN:
        first = averaged([own[0] for own in so_far])
        yield compare.tensors("one microbatch", results["one"], first)
    expected = sum(p.nbytes for p in model.parameters())
    yield compare.exactly(
        "bytes a step",
        [sent.get(GRADIENTS, (0, 0))[1] for sent in results["sent"]],
        expected,
        "{:,}; gradients have {:,}",
        {m * expected: f"Gradients are sent in each of the {m} microbatches: right, and slow."},
    )
    others = {name for sent in results["sent"] for _, name in sent.keys() - {GRADIENTS}}
    yield Property("nothing else", ", ".join(sorted(others)) or "is sent", not others)
    yield compare.exactly(
        "forwards",
        results["forwards"],
        m,
        "{}; {} are wanted, one of each microbatch",
        "Each microbatch runs forward once: what runs again costs a third of a step.",
    )
    off = any(results["off"])
    yield Property(
        "afterwards",
        f"DDP {'does not send' if off else 'sends'} in the next backward",
        not off,
        "DDP is still told not to send when your function returns: leave the context of no_sync.",
    )
    one, most = max(results["peaks"], key=lambda peaks: peaks[1] / peaks[0])
    yield Property(
        "live memory",
        f"{most:,} bytes at most, with one microbatch {one:,}",
        most < 2 * one,  # which has no gradients of earlier microbatches, nor DDP's buckets
        "Activations of all microbatches exist at once: backward of each frees them.",
    )
    has_graph = any(results["has a graph"])
    yield Property(
        "returned loss",
        "with its graph" if has_graph else "without a graph",
        not has_graph,
        "Who keeps this loss keeps what its graph holds: detach it.",
    )


def plus(a: dict[str, Tensor], b: dict[str, Tensor], times: int = 1) -> dict[str, Tensor]:
    return {name: a[name] + times * b[name] for name in a}


RUN = Run()


def install(student: Callable) -> None:
    def of_batch(runner, batch: Batch, microbatch: int, world: World) -> Tensor:
        return student(runner, [part.inputs[:2] for part in batch.microbatches(microbatch)])

    train.accumulate = of_batch
