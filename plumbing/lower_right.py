"""Causal attention of the last tokens of rows to whole rows, on the CPU and without a mask.

The scores of T queries and S keys form a rectangle, and the triangle of causal attention belongs in
its lower right corner. But without a mask, torch's kernel for the CPU lets query i attend to keys
0..i. So the tokens attend in two parts: to those before them, all of which they see, and to each
other. Beside its output, each part returns the logarithm of the sum of its exponentials:

    log_sum = log(exp(log_sum_1) + exp(log_sum_2))
    output = sum of output_i exp(log_sum_i - log_sum)

The gradients of a part need only the final output and the final log_sum. Parts from other ranks
could be added alike: that is a ring.
"""

import torch
from torch import Tensor

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


# A single operator, for torch.compile and so that selective checkpointing saves its output, which
# parallel.is_attention knows by the name.
@torch.library.custom_op("flatllama::scaled_dot_product_lower_right", mutates_args=())
def causal_lower_right(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Return causal attention of the last tokens of rows to the rows, and logarithms for backward.

    q [B, T, H, E] of the last T tokens, k and v [B, S, KV, E] of all -> as q, [B, T, H]."""
    past = k.shape[1] - q.shape[1]
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    out, log_sum = _flash(q, k[:, :, past:], v[:, :, past:], is_causal=True)
    if past:
        out_past, log_sum_past = _flash(q, k[:, :, :past], v[:, :, :past])
        parts, log_sums = (out, out_past), (log_sum, log_sum_past)
        log_sum = torch.logaddexp(*log_sums)
        out = sum(x * (part - log_sum).exp()[..., None].to(x) for x, part in zip(parts, log_sums))
    return out.transpose(1, 2).contiguous(), log_sum.transpose(1, 2).contiguous()


@causal_lower_right.register_fake
def _(q, k, v):
    log_sum = q.new_empty(q.shape[:3], dtype=torch.promote_types(q.dtype, torch.float32))
    return torch.empty_like(q, memory_format=torch.contiguous_format), log_sum


def _save_for_backward(ctx, inputs, output):
    ctx.save_for_backward(*inputs, *output)


def _backward(ctx, grad, _):
    q, k, v, out, log_sum = ctx.saved_tensors
    past = k.shape[1] - q.shape[1]
    grad, q, k, v, out, log_sum = (t.transpose(1, 2) for t in (grad, q, k, v, out, log_sum))
    own = k[:, :, past:], v[:, :, past:]
    q_grad, *gradients = _flash_backward(grad, q, *own, out, log_sum, 0.0, True)
    if past:
        seen = k[:, :, :past], v[:, :, :past]
        q_grad_past, *before = _flash_backward(grad, q, *seen, out, log_sum, 0.0, False)
        q_grad = q_grad + q_grad_past
        gradients = [torch.cat(pair, 2) for pair in zip(before, gradients)]
    return tuple(gradient.transpose(1, 2) for gradient in (q_grad, *gradients))


causal_lower_right.register_autograd(_backward, setup_context=_save_for_backward)
