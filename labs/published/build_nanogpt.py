"""accumulate, as before karpathy/build-nanogpt's PR #30: DDP decides in forward whether backward
communicates, and no_sync surrounds backward alone."""

from contextlib import nullcontext


def accumulate(runner, microbatches):
    loss_accum = 0.0
    for micro_step, (x, y) in enumerate(microbatches):
        loss = runner(x, y)
        loss_accum += loss.detach()
        last = micro_step == len(microbatches) - 1
        with nullcontext() if last else runner.no_sync():
            loss.backward()
    return loss_accum
