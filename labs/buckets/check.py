"""The check of labs/buckets."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise

import torch

from config import ParallelConfig
from costs.machines import assumed_machine
from costs.seconds import collective_time
from labs.ddp import check as ddp
from labs.machinery import compare
from labs.machinery.clock import Clock, Span
from labs.machinery.compare import Property
from labs.machinery.lab import CONFIG, batch_of, share_of, world_of
from labs.machinery.student import check_returned
from model import Llama
from perf.instruments import Counted
from text.batch import Batch

FUNCTION = "average_gradients"
ABOUT = "DDP that sends gradients in groups"
NEEDS = "hooks, `async_op`, `torch.cat` and `split`"
POINT = "latency against overlap, on 16 GPUs of a virtual clock"
LEADS_TO = "parallel.py", "ddp"
SIZES = 2, 3, 4
BARRED = ddp.BARRED
HINTS = (
    "Look at the two lanes below the report. When does the network wait for gradients, and when "
    "does it only start all-reduces?",
    "Count the all-reduces of a step, and the gradients that were ready before the first of them "
    "left. Which of the two costs more?",
    "A list that a hook fills, and that is joined, sent and emptied once it is large enough; a "
    "list of what is under way; a function that sends what is left, waits, and copies back.",
)
STEPS, LR = 2, ddp.LR
TWICE = "Some gradients are sent more than once a step: is a bucket emptied when it has left?"
BOUND = 1.03  # the longest step / one with the best of equal buckets

# The small model stands for one of 24 layers and 97 million parameters, with gradients in float32,
# of which each rank computes 32 sequences of 1,024 tokens.
LAYERS = 24
PARAMETERS = 2000  # for each that the small model has
TOKENS = 32 * 1024  # of a rank
MACHINE, RANKS = assumed_machine("h100", "25gbit", per_node=8), 16
BYTES_SCALE = PARAMETERS * 4 / 8


def deep_model(seed: int) -> Llama:
    model = Llama(replace(CONFIG, n_layers=LAYERS)).double()
    model.init_weights(seed)
    return model


def rows_of(seed: int, rank: int) -> Batch:
    """Return a rank's rows: as many on 2 ranks as on 4, so that the time is the same."""
    return share_of(batch_of(seed), rank, max(SIZES))


def new_clock() -> Clock:
    tokens = rows_of(0, 0).targets.numel()
    return Clock(MACHINE, RANKS, PARAMETERS * TOKENS / tokens, BYTES_SCALE)


def on_rank(load: Callable, size: int, seed: int, rank: int) -> dict:
    """Train a few steps with the student's function. Return gradients, and of the last step what
    was sent, and when."""
    world, model, batch = world_of(rank, size), deep_model(seed), rows_of(seed, rank)
    gradients = []
    with new_clock() as clock:
        finish = check_returned(load()(model), Callable, "a function")
        for _ in range(STEPS):
            model.zero_grad(set_to_none=False)  # who forgets a parameter finds zeros, and no error
            clock.restart()
            with Counted(world) as counted:
                model(*batch.inputs).backward()
                finish()
            gradients.append({name: p.grad.clone() for name, p in model.named_parameters()})
            torch.optim.SGD(model.parameters(), LR).step()
    return {
        "gradients": gradients,
        "sent": counted.sent,
        "pending": len(clock.under_way),
        "seconds": clock.end,
        "spans": clock.spans,
        "picture": clock.draw_text(),
        "drawing": clock.draw_svg(f"a step on {RANKS} GPUs"),
    }


def properties(results: dict[str, list], size: int, seed: int) -> Iterator[Property]:
    model, spans = deep_model(seed), results["spans"][0]
    sent = sum(span.lane == "network" for span in spans)
    pending = max(results["pending"])
    mistakes = {
        "Nothing is sent.": not sent,
        "Some all-reduces were not waited for: call wait() of what each returned.": pending,
    }
    text = f"{sent - pending} of {sent} all-reduces"
    yield Property("waited for", text, sent > 0 and not pending, mistakes)
    last = "tok_embeddings.weight"  # whose gradient is ready last
    yield ddp.compare_steps(
        results["gradients"],
        deep_model(seed),
        [rows_of(seed, rank) for rank in range(size)],
        lambda own, total: {
            "Each rank has the gradients of its own sequences. torch.cat copies: the averages are "
            "in what was sent, and have to be copied back.": own,
            "The gradient that is ready last was not exchanged. The last bucket is hardly ever "
            "full: send it when backward is over.": [{last: g[last]} for g in own],
            compare.SUMMED: total,
        },
    )
    expected = sum(p.nbytes for p in model.parameters())
    nbytes = compare.unexpected(map(compare.nbytes_of, results["sent"]), expected)
    tied = nbytes == expected + model.output.weight.nbytes
    text = f"{nbytes:,}; gradients have {expected:,}"
    yield Property("bytes a step", text, nbytes == expected, ddp.TIED if tied else TWICE)
    seconds = max(results["seconds"])
    best, number = best_of_equal_buckets(seed)
    yield Property(
        "step time",
        f"{1e3 * seconds:.1f} ms; with the best of equal buckets {1e3 * best:.1f} ms",
        seconds <= BOUND * best,
        why_slow(spans, len(list(model.parameters())), number),
    )


def best_of_equal_buckets(seed: int) -> tuple[float, int]:
    """Return the shortest time of a step, in seconds, with buckets that leave as soon as they have
    so many bytes: 1,000, 2,000 and so on. And the number of buckets."""
    model, ready = deep_model(seed), []  # when, and how many bytes
    with new_clock() as clock:
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(
                lambda p: ready.append((clock.now, p.grad.nbytes))
            )
        model(*rows_of(seed, 0).inputs).backward()
    mesh = ParallelConfig(replicate=RANKS)

    def step(limit: float) -> tuple[float, int]:
        end = bucket = number = 0
        for index, (when, nbytes) in enumerate(ready, 1):
            bucket += nbytes
            if bucket >= limit or index == len(ready):
                scaled = bucket * BYTES_SCALE
                cost = collective_time("all-reduce", scaled, "replicate", mesh, MACHINE)
                end, bucket, number = max(end, when) + cost, 0, number + 1
        return end, number

    return min(map(step, range(1000, 200_000, 1000)))


def why_slow(spans: list[Span], gradients: int, best: int) -> dict[str, bool]:
    """Return what may be wrong with the order of a step, where `best` buckets are best."""
    products = [span for span in spans if span.lane == "compute"]
    sent = [span for span in spans if span.lane == "network"]
    return {
        "Backward stands still while a bucket travels. Wait for all of them after backward, in the "
        "function that you return.": any(a.end < b.start for a, b in pairwise(products)),
        "All gradients are in one bucket, which leaves when the last of them is ready: nothing "
        "travels while backward computes.": len(sent) == 1,
        "Nothing travels while backward computes, as what leaves first waits for the gradient that "
        "is ready last. Backward begins with the last layer: begin with its "
        "gradients.": sent[0].start >= products[-1].end,
        "Every gradient travels alone, and every all-reduce takes some time to start, however "
        "little it sends: join several.": len(sent) >= gradients,
        "These buckets are too small: starting so many all-reduces takes too long.": (
            len(sent) > best
        ),
        "These buckets are too large: the network waits for the first to be full, or has much left "
        "to do when backward is over.": True,
    }


def picture(results: dict[str, list], size: int, seed: int) -> str:
    """Return the time line of rank 0."""
    legend = "F is forward, B backward, 1 2 3 ... are all-reduces, + is several, . is idle."
    return f"{results['picture'][0]}\n{legend}"


def drawing(results: dict[str, list], size: int, seed: int) -> str:
    """Draw the same as an SVG."""
    return results["drawing"][0]


# In training, a function of the same kind takes the same place as in ddp.
RUN, install = ddp.RUN, ddp.install
