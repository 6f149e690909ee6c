"""What does the last microbatch have to carry?

A step's batch is computed in microbatches, so that fewer activations exist at a time. Gradients add
up over microbatches. DDP averages them over the ranks in backward: in every backward, unless it is
told otherwise. Once a step is enough.

Read: the documentation of DistributedDataParallel.no_sync.
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
#
# Questions: 1. To reduce-scatter each time sends m times the bytes, and a rank holds its shard of
# the gradients alone. To add up sends once, and a rank holds whole gradients until then.
# 2. Nothing, if each rank sends in its own last one: all send once, and who has fewer waits. Where
# every backward sends, the counts differ and the others wait for ever.
