"""recompute, as in llama-cookbook #740: the block is checkpointed by the model, and what comes out
is checkpointed once more by the script."""

import torch


class Checkpoint(torch.autograd.Function):
    @staticmethod
    def forward(ctx, run, x, *rest):
        ctx.run, ctx.rest = run, rest
        ctx.state = torch.get_rng_state()
        ctx.save_for_backward(x)
        with torch.no_grad():
            return run(x, *rest)

    @staticmethod
    def backward(ctx, dy):
        (saved,) = ctx.saved_tensors
        x = saved.detach()
        x.requires_grad = True
        before = torch.get_rng_state()
        torch.set_rng_state(ctx.state)
        with torch.enable_grad():
            y = ctx.run(x, *ctx.rest)
        torch.set_rng_state(before)
        y.backward(dy)
        return (None, x.grad) + (None,) * len(ctx.rest)


def checkpointed(run):
    return lambda *inputs: Checkpoint.apply(run, *inputs)


def recompute(forward):
    gradient_checkpointing = checkpointed(forward)
    apply_fsdp_checkpointing = checkpointed(gradient_checkpointing)
    return apply_fsdp_checkpointing
