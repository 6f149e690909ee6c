"""The loss in chunks of tokens, so that the logits of all tokens never exist at the same time.

All logits of 4,096 tokens of Llama 3 take 2.1 GB in float32, and a plain loss holds them three
times: the logits, what backward needs of them, and their gradient. Here they are computed for
LOSS_CHUNK tokens at a time. Forward also computes the gradients of a chunk, while its logits exist,
and so backward has nothing to recompute: it scales them by the gradient of the loss.

    plain      3 N V elements
    in chunks  3 LOSS_CHUNK V elements, and N D + V D of gradients, which a plain loss has as well

Autograd differentiates each chunk, so logits_of and loss_of of model.py may be changed freely. The
cross entropy in them is that of techniques/passes.py, with fewer passes over memory.
"""

import torch
from torch import Tensor

from model import Vocabulary, sum_of_losses

LOSS_CHUNK = 512  # tokens


def chunked_loss(hidden: Tensor, weight: Tensor, targets: Tensor, vocabulary: Vocabulary) -> Tensor:
    """Return model.py's sum_of_losses(hidden, weight, targets, vocabulary).

    hidden [..., D], weight [V, D], targets [...] -> scalar."""
    device = hidden.device.type
    if torch.is_autocast_enabled(device):  # cast once, and not in each chunk
        dtype = torch.get_autocast_dtype(device)
        hidden, weight = hidden.to(dtype), weight.to(dtype)
    hidden, targets, in_training = hidden.flatten(0, -2), targets.flatten(), torch.is_grad_enabled()
    return ChunkedLoss.apply(hidden, weight, targets, vocabulary, in_training)


class ChunkedLoss(torch.autograd.Function):
    """hidden [N, D], weight [V, D], targets [N]. `in_training` says whether to compute gradients:
    within a Function, torch.is_grad_enabled() is always False."""

    @staticmethod
    def forward(ctx, hidden, weight, targets, vocabulary, in_training):
        weight_trains = in_training and ctx.needs_input_grad[1]
        sum_dtype = torch.promote_types(hidden.dtype, torch.float32)
        loss = torch.zeros((), dtype=sum_dtype, device=hidden.device)
        hidden_grad = torch.empty_like(hidden) if in_training else None
        weight_grad = torch.zeros_like(weight, dtype=sum_dtype) if weight_trains else None
        w = weight.detach().requires_grad_(weight_trains)
        for start in range(0, len(targets), LOSS_CHUNK):
            chunk = slice(start, start + LOSS_CHUNK)
            h = hidden[chunk].detach().requires_grad_(in_training)
            with torch.set_grad_enabled(in_training):
                chunk_loss = sum_of_losses(h, w, targets[chunk], vocabulary)
            loss += chunk_loss.detach()
            if weight_trains:
                hidden_grad[chunk], w_grad = torch.autograd.grad(chunk_loss, (h, w))
                weight_grad += w_grad
            elif in_training:
                (hidden_grad[chunk],) = torch.autograd.grad(chunk_loss, (h,))
        ctx.save_for_backward(hidden_grad, weight_grad)
        ctx.dtype = weight.dtype
        return loss

    @staticmethod
    def backward(ctx, scale):
        gradients = [None if g is None else (g * scale).to(ctx.dtype) for g in ctx.saved_tensors]
        return *gradients, None, None, None
