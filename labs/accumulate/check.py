"""The check of labs/accumulate."""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn

from labs.machinery import compare, student
from labs.machinery.compare import Property
from labs.machinery.lab import (
    ROWS,
    batch_of,
    gradient_of,
    share_of,
    small_model,
    summed_gradients,
    world_of,
)
from labs.machinery.student import check_returned
from model import IGNORE
from perf.instruments import Counted, Live
from text.batch import Batch

FUNCTION = "accumulate"
ABOUT = "the loop over microbatches, on PyTorch's DDP"
NEEDS = "a context manager"
POINT = "right numbers, four times the bytes"
LEADS_TO = "parallel.py", "gradient_sync"
SIZES = 2, 3, 4
BARRED = "train.accumulate", "parallel.gradient_sync"
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
    """Accumulate twice over the same microbatches, and then over the first alone. Return what came
    out, and what the first call sent and held."""
    world = world_of(rank, size)
    model = small_model(seed)
    runner = torch.nn.parallel.DistributedDataParallel(model, init_sync=False)
    parts = share(seed, rank, size).microbatches(1)
    microbatches = [part.inputs[:2] for part in parts]
    with Live(model.parameters()) as of_one, runner.no_sync():  # one microbatch, to compare with
        runner(*microbatches[-1]).backward()
    model.zero_grad()
    forwards = []
    model.register_forward_pre_hook(lambda *_: forwards.append(1))
    accumulate = load()
    with Live(model.parameters()) as live, Counted(world) as counted:
        loss = accumulate(runner, [*microbatches])
    check_returned(loss, Tensor, "the sum of the losses, a tensor")
    found = {
        "loss": loss.item(),
        "has a graph": loss.requires_grad,
        "gradients": gradients_of(model),
        "sent": counted.sent,
        "forwards": len(forwards),
        "off": not runner.require_backward_grad_sync,
        "peaks": (of_one.peak, live.peak),
    }
    for name, given in (("again", microbatches), ("one", microbatches[:1])):
        model.zero_grad(set_to_none=False)
        accumulate(runner, [*given])
        found[name] = gradients_of(model)
    if student.AGAIN and student.kept_by_call(lambda: accumulate(runner, microbatches)) > 0:
        raise student.Misuse(KEPT)
    return found


def share(seed: int, rank: int, size: int) -> Batch:
    """Return a rank's rows. The last one of rank 0 has no targets."""
    batch = share_of(batch_of(seed), rank, size)
    if rank == 0:
        batch.targets[-1].fill_(IGNORE)
    return batch


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: gradient_of(p).clone() for name, p in model.named_parameters()}


def facts(size: int) -> dict:
    """Return what sentences of wrong.txt say of the ranks."""
    return {"m": ROWS // size}


def properties(results: dict[str, list], size: int, seed: int) -> Iterator[Property]:
    model = small_model(seed)
    m = ROWS // size
    shares = [share(seed, rank, size) for rank in range(size)]
    losses, _, gradients = zip(*(summed_gradients(model, share) for share in shares))
    yield compare.numbers("loss", results["loss"], list(losses))
    yield compare.tensors("gradients", results["gradients"], average(gradients))
    mistake = "The second call on the same model gives others: hooks, for example, stay there."
    yield compare.tensors(
        "gradients again", results["again"], average(gradients), otherwise=mistake
    )
    first = [summed_gradients(model, share.microbatches(1)[0])[2] for share in shares]
    mistake = "There may be a single microbatch: it is the first, and the last one, too."
    yield compare.tensors("one microbatch", results["one"], average(first), otherwise=mistake)
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


def average(of_ranks: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {name: sum(own[name] for own in of_ranks) / len(of_ranks) for name in of_ranks[0]}
