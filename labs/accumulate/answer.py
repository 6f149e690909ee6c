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


WRONG = """
forward outside of no_sync (build-nanogpt PR #30) [right numbers]
> Gradients are sent in each of the
-         with contextlib.nullcontext() if is_last else runner.no_sync():
-             loss = runner(tokens, targets)
+         loss = runner(tokens, targets)
+         with contextlib.nullcontext() if is_last else runner.no_sync():

switched between forward and backward
> No gradient was exchanged
-         with contextlib.nullcontext() if is_last else runner.no_sync():
-             loss = runner(tokens, targets)
-             loss.backward()
+         with runner.no_sync():
+             loss = runner(tokens, targets)
+         runner.require_backward_grad_sync = is_last
+         loss.backward()

first microbatch instead of the last
> Gradients were averaged after microbatch 1 of 4
- is_last = i == len(microbatches) - 1
+ is_last = i == 0

hook on the incoming gradient (picotron_tutorial, step 5)
> The last microbatch's gradient was averaged, the others' not
-     total = 0.0
+     import torch.distributed as dist
+
+     def average(gradient: Tensor) -> Tensor:
+         if is_last:
+             dist.all_reduce(gradient)
+             gradient /= dist.get_world_size()
+         return gradient
+
+     for parameter in runner.module.parameters():
+         parameter.register_hook(average)
+     total = 0.0
-         with contextlib.nullcontext() if is_last else runner.no_sync():
-             loss = runner(tokens, targets)
-             loss.backward()
+         loss = runner.module(tokens, targets)
+         loss.backward()

mean over microbatches
> The gradient is divided by the number of microbatches
- loss.backward()
+ (loss / len(microbatches)).backward()

one backward for all microbatches [right numbers]
> Activations of all microbatches exist at once
-             loss = runner(tokens, targets)
- ...
-     return total
+             total += runner(tokens, targets)
+     total.backward()
+     return total.detach()

losses with their graphs [right numbers]
> Who keeps this loss keeps what its graph holds
- total += loss.detach()
+ total += loss
"""
