"""The check of labs/ddp."""

import contextlib
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist

from labs.machinery.lab import (
    Property,
    batch_of,
    compare_tensors,
    plural,
    share_of,
    small_model,
    summed_gradients,
    unexpected,
    world_of,
)
from labs.machinery.ranks import NotedWork
from labs.machinery.student import Misuse, barred, check_returned, load_function, tensors_alive
from labs.machinery.training import Run, after_backward, replace_ddp
from model import Llama
from parallel import World
from perf.instruments import Counted

FUNCTION = "average_gradients"
ABOUT = "DDP, by hooks"
NEEDS = "closures, `async_op`"
POINT = "order: what may travel while backward computes"
LEADS_TO = "parallel.py", "ddp"
SIZES = 2, 3, 4
BARRED = (
    "torch.nn.parallel.DistributedDataParallel",
    "torch.distributed.fsdp.fully_shard",
    "parallel.parallelize",
    "parallel.ddp",
    "techniques.zero1.ZeRO1",
)
HINTS = (
    "Look up register_post_accumulate_grad_hook: when does it run, and what is it given?",
    "Count how many all-reduces are under way at once, and how many bytes a step sends in all.",
    "A list of what is under way; a hook that starts an all-reduce and adds it to the list; a "
    "function that waits for each and divides.",
)
STEPS, LR = 3, 0.01
SUMS = "all_reduce", "reduce", "reduce_scatter", "reduce_scatter_tensor"
KEPT = (
    "Each step keeps more tensors or handles in memory than the one before, for ever: empty the "
    "list of what was under way."
)


def on_rank(path: Path, size: int, seed: int, rank: int) -> dict:
    """Train a few steps with the student's function. Return gradients, what was sent, and when."""
    world, model = world_of(rank, size), small_model(seed)
    share, events, gradients, alive = share_of(batch_of(seed), rank, size), [], [], []
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: events.append("ready"))
    with barred(*BARRED), noted_order(events):
        finish = load_function(path, FUNCTION)(model)
        check_returned(finish, Callable, "a function")
        for _ in range(STEPS):
            model.zero_grad()
            with Counted(world) as counted:
                events.clear()
                model(*share.inputs).backward()
                finish()
            gradients.append({name: p.grad.clone() for name, p in model.named_parameters()})
            torch.optim.SGD(model.parameters(), LR).step()
            ours = sum(map(len, gradients))
            alive.append(tensors_alive(at_most=ours + (alive[-1] if alive else 0)) - ours)
    if alive[-1] > alive[-2]:
        raise Misuse(KEPT)
    return {"gradients": gradients, "sent": counted.sent, "events": events}


def noted_order(events: list[str]) -> contextlib.AbstractContextManager:
    """Return a context within which `events` gets when a sum is sent and waited for."""

    def noting(name: str) -> Callable:
        original = getattr(dist, name)

        def call(*args, **kwargs):
            events.append("sent")
            work, is_over = original(*args, **kwargs), []

            def on_wait() -> None:
                if not is_over:
                    is_over.append(events.append("waited"))

            if work is None:
                on_wait()
                return None
            return NotedWork(work, on_wait)

        return call

    return mock.patch.multiple(dist, **{name: noting(name) for name in SUMS})


def properties(results: list[dict], size: int, seed: int) -> Iterator[Property]:
    """Yield what is checked, in order, with what known mistakes would give."""
    counts = [[r["events"].count(event) for event in ("sent", "waited")] for r in results]
    sent, waited = max(counts, key=lambda n: n[0] - n[1])
    yield Property(
        "waited for",
        f"{waited} of {sent} sums",
        waited == sent,
        f"{plural(sent - waited, 'sum')} {'was' if sent - waited == 1 else 'were'} not "
        f"waited for: the optimizer would use gradients that are still "
        f"under way.",
    )
    model, batch = small_model(seed), batch_of(seed)
    expected = sum(p.nbytes for p in model.parameters())
    nbytes = unexpected([bytes_of(r["sent"], expected) for r in results], expected)
    mistakes = {
        expected + model.output.weight.nbytes: "A matrix that two layers share is one parameter, "
        "and is sent once.",
        0: "Nothing is sent.",
    }
    yield Property(
        "bytes a step",
        f"{nbytes:,}; gradients have {expected:,}",
        nbytes == expected,
        mistakes.get(nbytes, ""),
    )
    for step in range(STEPS):
        of_ranks = [summed_gradients(model, share_of(batch, rank, size))[2] for rank in range(size)]
        average = {name: sum(g[name] for g in of_ranks) / size for name in of_ranks[0]}
        found = compare_tensors(
            "gradients",
            [r["gradients"][step] for r in results],
            [average] * size,
            {
                "No gradient was exchanged, though bytes were sent. A hook is given the parameter: "
                "its gradient is parameter.grad.": of_ranks,
                "This is the sum over the ranks: the average is wanted.": [
                    {name: g * size for name, g in average.items()}
                ]
                * size,
            },
            f"the average, in {STEPS} steps",
        )
        if not found.ok:
            break
        for name, parameter in model.named_parameters():
            parameter.data -= LR * average[name]
    yield found
    early, sent = min((left_early(r["events"]) for r in results), key=lambda n: n[0] / n[1])
    yield Property(
        "leave early",
        f"{early} of {sent} left before the last gradient was ready",
        early >= sent / 2,
        "A rank sends when backward is over, so gradients wait for all others. A gradient may "
        "leave as soon as it is there.",
    )
    most = min(most_under_way(r["events"]) for r in results)
    yield Property(
        "under way",
        f"at most {most} at once",
        most > 1,
        "A rank waits for each all-reduce before it sends the next: backward stands still "
        "meanwhile.",
    )


def bytes_of(sent: dict, expected: int) -> int:
    """Return a rank's bytes. A reduce-scatter and an all-gather, a little padded, are what an
    all-reduce is."""
    of_kind = {kind: nbytes for (_, kind), (_, nbytes) in sent.items()}
    if of_kind.keys() == {"reduce-scatter", "all-gather"}:
        if all(expected <= nbytes < 1.02 * expected for nbytes in of_kind.values()):
            return expected
    return sum(of_kind.values())


def left_early(events: list[str]) -> tuple[int, int]:
    """Return how many sums left before the last gradient was ready, and of how many."""
    last_ready = len(events) - events[::-1].index("ready")
    return events[:last_ready].count("sent"), events.count("sent")


def most_under_way(events: list[str]) -> int:
    under_way = itertools.accumulate({"sent": 1, "waited": -1, "ready": 0}[e] for e in events)
    return max(under_way)


# ----------------------------------------------------------------- in training

RUN = Run(flags="--microbatch 6")


def install(average_gradients: Callable) -> None:
    def apply(model: Llama, world: World) -> Llama:
        after_backward(average_gradients(model))
        return model

    replace_ddp(apply)
