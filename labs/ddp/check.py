"""The check of labs/ddp."""

import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from unittest import mock

import torch
import torch.distributed as dist

from labs.machinery import compare, student
from labs.machinery.compare import Property
from labs.machinery.lab import batch_of, plural, share_of, small_model, summed_gradients, world_of
from labs.machinery.ranks import NotedWork
from labs.machinery.student import check_returned, kept_by_call
from model import IGNORE
from perf.instruments import Counted, Instrument
from text.batch import Batch

FUNCTION = "average_gradients"
ABOUT = "DDP, by hooks"
NEEDS = "closures, `async_op`"
POINT = "order: what may travel while backward computes"
LEADS_TO = "parallel.py", "ddp"
SIZES = 2, 3, 4
BARRED = (
    *student.SHARDING,
    "torch.nn.parallel.DistributedDataParallel",
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
TIED = "A matrix that two layers share is one parameter, and is sent once."
KEPT = (
    "Each step keeps more tensors or handles in memory than the one before, for ever: empty the "
    "list of what was under way."
)
HOOKED = (
    f"In step {STEPS}, {STEPS} times as much as one all-reduce of each gradient sends: hooks stay, "
    f"so register them once, and not in each step."
)


def on_rank(load: Callable, size: int, seed: int, rank: int) -> dict:
    """Train a few steps. Return gradients, and of the last step what was sent, and when."""
    world = world_of(rank, size)
    model = small_model(seed)
    order = Order()
    gradients = []
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: order.events.append("ready"))
    with order, mock.patch.multiple(dist, **{n: order.noting(getattr(dist, n)) for n in SUMS}):
        finish = check_returned(load()(model), Callable, "a function")

        def accumulate(step: int = 0) -> None:
            order.events.clear()
            model.zero_grad()
            model(*share(seed, rank, size, step).inputs).backward()
            finish()

        for step in range(STEPS):
            with Counted(world) as counted:
                accumulate(step)
            gradients.append({name: p.grad.clone() for name, p in model.named_parameters()})
            torch.optim.SGD(model.parameters(), LR).step()
        events = [*order.events]
        kept = kept_by_call(accumulate)
    return {"gradients": gradients, "sent": counted.sent, "events": events, "kept": kept}


def share(seed: int, rank: int, size: int, step: int) -> Batch:
    """Return a rank's rows. In the last step rank 0 has no targets, so that its gradient is 0."""
    batch = share_of(batch_of(seed), rank, size)
    if step == STEPS - 1 and rank == 0:
        batch.targets.fill_(IGNORE)
    return batch


class Order(Instrument):
    """Notes in `events` when a sum is sent, and waited for."""

    def __init__(self):
        super().__init__()
        self.events = []

    def see(self, op, args, kwargs, result) -> None:
        if op.namespace == "_c10d_functional":
            is_sum = op._opname.startswith(("all_reduce", "reduce_scatter"))
            self.events += ["sent"] * is_sum + ["waited"] * (op._opname == "wait_tensor")

    def noting(self, original: Callable) -> Callable:
        """Return a function of torch.distributed that is noted; functional ones are operators."""

        def call(*args, **kwargs):
            self.events.append("sent")
            work = original(*args, **kwargs)
            is_over = False
            tensor = next(a for a in (*args, *kwargs.values()) if isinstance(a, torch.Tensor))
            version = tensor._version

            def on_wait() -> None:
                nonlocal is_over
                if is_over:
                    return
                is_over = True
                self.events.append("waited")
                if tensor._version > version and not noted.has_future:
                    self.events.append("changed")

            if work is None:
                self.events.append("waited")
                return None
            noted = NotedWork(work, on_wait)
            return noted

        return call


def averages(seed: int, size: int) -> Iterator[dict[str, torch.Tensor]]:
    """Yield the average gradients of each step, on weights that follow them."""
    model = small_model(seed)
    for step in range(STEPS):
        shares = [share(seed, rank, size, step) for rank in range(size)]
        of_ranks = [summed_gradients(model, batch)[2] for batch in shares]
        average = {name: sum(g[name] for g in of_ranks) / size for name in of_ranks[0]}
        yield average
        for name, parameter in model.named_parameters():
            parameter.data -= LR * average[name]


def properties(results: dict[str, list], size: int, seed: int) -> Iterator[Property]:
    events = results["events"]
    counts = list(map(Counter, events))
    sent, waited = max(((n["sent"], n["waited"]) for n in counts), key=lambda n: n[0] - n[1])
    yield Property(
        "waited for",
        f"{waited} of {sent} sums",
        waited == sent,
        f"Nobody waits for {plural(sent - waited, 'sum')}: the optimizer would use gradients that "
        f"are still under way.",
    )
    text = "{} tensors or handles more after a step than before"
    yield compare.at_most("kept", results["kept"], 0, text, KEPT)
    model = small_model(seed)
    expected = sum(p.nbytes for p in model.parameters())
    sent = [bytes_of(of_rank, expected) for of_rank in results["sent"]]
    fewer = "Fewer than the gradients have: each is sent, whole, however small it is."
    mistakes = {n: fewer for n in sent if n < expected} | {
        expected + model.output.weight.nbytes: TIED,
        2 * expected: "Twice as much as one all-reduce of each gradient sends.",
        STEPS * expected: HOOKED,
        expected // 2: "Half of the bytes: gradients are in float64, and are sent so.",
        0: "Nothing is sent.",
    }
    text = "{:,}; gradients have {:,}"
    yield compare.exactly("bytes a step", sent, expected, text, mistakes)
    changed = max(count["changed"] for count in counts)
    text = f"{plural(changed, 'gradient')} changed while under way"
    yield Property("untouched", text, not changed, "Divide when the sum is there, after wait().")
    for found, average in zip(zip(*results["gradients"]), averages(seed, size)):
        reference = f"the average, in {STEPS} steps"
        compared = compare.tensors("gradients", list(found), average, reference)
        if not compared.ok:
            break
    yield compared
    early = min(map(left_early, events))
    sent = counts[0]["sent"]
    mistakes = {
        "No sum of torch.distributed is seen here: send by all_reduce.": not sent,
        "A rank sends when backward is over, so gradients wait for all others. A gradient may "
        "leave as soon as it is there.": True,
    }
    text = f"{early} of {sent} left before the last gradient was ready"
    yield Property("leave early", text, early >= max(sent, 1) / 2, mistakes)
    most = min(map(most_under_way, events))
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
    halves = compare.by_kind(sent)
    if halves.keys() == {"reduce-scatter", "all-gather"}:
        if all(expected <= nbytes < 1.02 * expected for _, nbytes in halves.values()):
            return expected
    return compare.nbytes_of(sent)


def left_early(events: list[str]) -> int:
    """Return how many sums left before the last gradient was ready."""
    last_ready = len(events) - events[::-1].index("ready")
    return events[:last_ready].count("sent")


def most_under_way(events: list[str]) -> int:
    return max(itertools.accumulate({"sent": 1, "waited": -1}.get(event, 0) for event in events))
