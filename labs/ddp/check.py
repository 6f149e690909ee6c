"""The check of labs/ddp."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

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
from labs.machinery.student import barred, check_returned, load_function
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


def on_rank(path: Path, size: int, seed: int, rank: int) -> dict:
    """Train a few steps with the student's function. Return gradients, what was sent, and when."""
    world, model = world_of(rank, size), small_model(seed)
    share, events, gradients = share_of(batch_of(seed), rank, size), [], []
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
    return {"gradients": gradients, "sent": counted.sent, "events": events}


class NotedWork:
    """What an asynchronous collective returned, with a note of when it was waited for."""

    def __init__(self, work: dist.Work, events: list[str]):
        self.work, self.events, self.waited_for = work, events, False

    def wait(self, *args):
        if not self.waited_for:
            self.events.append("waited")
        self.waited_for = True
        return self.work.wait(*args)

    def __getattr__(self, name: str):
        return getattr(self.work, name)


@contextlib.contextmanager
def noted_order(events: list[str]) -> Iterator[None]:
    """Within this context, append to `events` when an all-reduce is sent and waited for."""
    original = dist.all_reduce

    def all_reduce(*args, **kwargs):
        events.append("sent")
        work = original(*args, **kwargs)
        if work is None:
            events.append("waited")
            return None
        return NotedWork(work, events)

    dist.all_reduce = all_reduce
    try:
        yield
    finally:
        dist.all_reduce = original


def properties(results: list[dict], size: int, seed: int) -> Iterator[Property]:
    """Yield what is checked, in order, with what known mistakes would give."""
    counts = [[r["events"].count(event) for event in ("sent", "waited")] for r in results]
    sent, waited = max(counts, key=lambda n: n[0] - n[1])
    yield Property(
        "waited for",
        f"{waited} of {sent} all-reduces",
        waited == sent,
        f"{plural(sent - waited, 'all-reduce')} {'was' if sent - waited == 1 else 'were'} not "
        f"waited for: the optimizer would use gradients that are still "
        f"under way.",
    )
    model, batch = small_model(seed), batch_of(seed)
    expected = sum(p.nbytes for p in model.parameters())
    nbytes = unexpected([sum(n for _, n in r["sent"].values()) for r in results], expected)
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
    events = results[0]["events"]
    ready = events.count("ready")
    last_ready = len(events) - events[::-1].index("ready")
    early = events[:last_ready].count("sent")
    yield Property(
        "leave early",
        f"{early} of {ready} left before the last gradient was ready",
        early >= ready / 2,
        "You send when backward is over, so gradients wait for all others. A gradient may leave as "
        "soon as it is there.",
    )
    under_way = most = 0
    for event in events:
        under_way += {"sent": 1, "waited": -1, "ready": 0}[event]
        most = max(most, under_way)
    yield Property(
        "under way",
        f"at most {most} at once",
        most > 1,
        "Each all-reduce is waited for before the next is sent: backward stands still meanwhile.",
    )


# ----------------------------------------------------------------- in training

RUN = Run(flags="--microbatch 6")


def install(average_gradients: Callable) -> None:
    def apply(model: Llama, world: World) -> Llama:
        after_backward(average_gradients(model))
        return model

    replace_ddp(apply)
