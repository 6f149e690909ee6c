"""The loss in chunks of tokens, so that the logits of all tokens never exist at the same time.

All logits of 4,096 tokens of Llama 3 take 2.1 GB in float32, and a plain loss holds them three
times: the logits, what backward needs of them, and their gradient. Here they are computed for
LOSS_CHUNK tokens at a time. Forward also computes the gradients of a chunk, while its logits exist,
and so backward has nothing to recompute: it scales them by the gradient of the loss.

    plain      3 N V numbers
    in chunks  3 LOSS_CHUNK V numbers, and N D + V D of gradients, which backward would make anyway

Autograd differentiates a chunk, whatever logits_of and loss_of of model.py compute. Where that is
the cross entropy, techniques/passes.py computes it in fewer passes.
"""

import torch
from torch import Tensor

from model import Vocabulary, sum_of_losses

LOSS_CHUNK = 512  # tokens


def chunked_loss(hidden: Tensor, weight: Tensor, targets: Tensor, vocabulary: Vocabulary) -> Tensor:
    """Return model.py's sum_of_losses(hidden, weight, targets, vocabulary).

    hidden [..., D], weight [V, D], targets [...] -> scalar."""
    device = hidden.device.type
    if torch.is_autocast_enabled(device):  # once, and not for each chunk
        dtype = torch.get_autocast_dtype(device)
        hidden, weight = hidden.to(dtype), weight.to(dtype)
    hidden, targets, in_training = hidden.flatten(0, -2), targets.flatten(), torch.is_grad_enabled()
    return ChunkedLoss.apply(hidden, weight, targets, vocabulary, in_training)


class ChunkedLoss(torch.autograd.Function):
    """hidden [N, D], weight [V, D], targets [N]. `in_training`: gradients are wanted; inside of a
    Function they are always disabled."""

    @staticmethod
    def forward(ctx, hidden, weight, targets, vocabulary, in_training):
        wants_weight = in_training and ctx.needs_input_grad[1]  # it is not frozen
        sum_dtype = torch.promote_types(hidden.dtype, torch.float32)
        loss = torch.zeros((), dtype=sum_dtype, device=hidden.device)
        hidden_grad = torch.empty_like(hidden) if in_training else None
        weight_grad = torch.zeros_like(weight, dtype=sum_dtype) if wants_weight else None
        w = weight.detach().requires_grad_(wants_weight)
        for start in range(0, len(targets), LOSS_CHUNK):
            chunk = slice(start, start + LOSS_CHUNK)
            h = hidden[chunk].detach().requires_grad_(in_training)
            with torch.set_grad_enabled(in_training):
                chunk_loss = sum_of_losses(h, w, targets[chunk], vocabulary)
            loss += chunk_loss.detach()
            if wants_weight:
                hidden_grad[chunk], of_weight = torch.autograd.grad(chunk_loss, (h, w))
                weight_grad += of_weight
            elif in_training:
                (hidden_grad[chunk],) = torch.autograd.grad(chunk_loss, (h,))
        ctx.save_for_backward(hidden_grad, weight_grad)
        ctx.dtype = weight.dtype
        return loss

    @staticmethod
    def backward(ctx, scale):
        gradients = [None if g is None else (g * scale).to(ctx.dtype) for g in ctx.saved_tensors]
        return *gradients, None, None, None
