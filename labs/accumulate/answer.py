"""What does the last microbatch have to carry?

A step's batch is computed in microbatches, so that fewer activations exist at a time. Gradients add
up over microbatches. DDP averages them over the ranks in backward: in every backward, unless it is
told otherwise. Once a step is enough.

Read: the documentation of DistributedDataParallel.no_sync, then `gradient_sync` in parallel.py.
"""

import contextlib

from torch import Tensor
from torch.nn.parallel import DistributedDataParallel


def accumulate(
    runner: DistributedDataParallel, microbatches: list[tuple[Tensor, Tensor]]
) -> Tensor:
    """Run forward and backward of all microbatches of this rank. Each rank calls this.

    runner(tokens, targets) returns the sum of the losses of a microbatch. Afterwards
    parameter.grad is the average over ranks of the sum over microbatches, and each gradient has
    been sent once. Returns the sum of the losses of this rank, 0-d, without a graph.
    """
    # >>>
    total = 0.0
    for i, (tokens, targets) in enumerate(microbatches):
        is_last = i == len(microbatches) - 1
        with contextlib.nullcontext() if is_last else runner.no_sync():
            loss = runner(tokens, targets)
            loss.backward()
        total += loss.detach()
    return total
    # <<<


# Why: DDP decides in *forward* whether the backward that follows will communicate. So forward has
# to be inside no_sync, too: build-nanogpt, ClassyVision and speechbrain had it outside, with the
# right numbers and m times the bytes (build-nanogpt PR #30, ClassyVision #706, speechbrain #1802).
# The last microbatch's backward then averages what has added up, not its own gradient alone.


WRONG = [
    dict(
        name="forward outside of no_sync (build-nanogpt PR #30)",
        says="Gradients are sent in each of the",
        numbers="right",
        change={
            """
        with contextlib.nullcontext() if is_last else runner.no_sync():
            loss = runner(tokens, targets)
""": """
        loss = runner(tokens, targets)
        with contextlib.nullcontext() if is_last else runner.no_sync():
"""
        },
    ),
    dict(
        name="without no_sync",
        says="Gradients are sent in each of the",
        numbers="right",
        change={"with contextlib.nullcontext() if is_last else runner.no_sync():": "if True:"},
    ),
    dict(
        name="switched between forward and backward",
        says="No gradient was exchanged",
        change={
            """
        with contextlib.nullcontext() if is_last else runner.no_sync():
            loss = runner(tokens, targets)
            loss.backward()
""": """
        with runner.no_sync():
            loss = runner(tokens, targets)
        runner.require_backward_grad_sync = is_last
        loss.backward()
"""
        },
    ),
    dict(
        name="first microbatch instead of the last",
        says="The first microbatch's gradient was averaged, the others' not",
        change={"is_last = i == len(microbatches) - 1": "is_last = i == 0"},
    ),
    dict(
        name="hook on the incoming gradient (picotron_tutorial, step 5)",
        says="The last microbatch's gradient was averaged, the others' not",
        change={
            "    total = 0.0\n": """\
    import torch.distributed as dist

    def average(gradient: Tensor) -> Tensor:
        if is_last:
            dist.all_reduce(gradient)
            gradient /= dist.get_world_size()
        return gradient

    for parameter in runner.module.parameters():
        parameter.register_hook(average)
    total = 0.0
""",
            """
        with contextlib.nullcontext() if is_last else runner.no_sync():
            loss = runner(tokens, targets)
            loss.backward()
""": """
        loss = runner.module(tokens, targets)
        loss.backward()
""",
        },
    ),
    dict(
        name="mean over microbatches",
        says="The gradient is divided by the number of microbatches",
        change={"loss.backward()": "(loss / len(microbatches)).backward()"},
    ),
    dict(
        name="one backward for all microbatches",
        says="Activations of all microbatches exist at once",
        numbers="right",
        change={
            """
            loss = runner(tokens, targets)
            loss.backward()
        total += loss.detach()
    return total
""": """
            total += runner(tokens, targets)
    total.backward()
    return total.detach()
"""
        },
    ),
    dict(
        name="losses with their graphs",
        says="Who keeps this loss keeps what its graph holds",
        numbers="right",
        change={"total += loss.detach()": "total += loss"},
    ),
]
