"""The loss in chunks of tokens, so that the logits of all tokens never exist at the same time.

All logits of 4,096 tokens of Llama 3 take 2.1 GB in float32, and a plain loss holds them three
times: the logits, what backward needs of them, and their gradient. Here they are computed for n
tokens at a time. Forward also computes the gradients of a chunk, while its logits exist, and so
backward has nothing to recompute: it scales them by the gradient of the loss.

    plain      3 N V elements
    in chunks  3 n V elements, and N D + V D of gradients, which a plain loss has as well

Each chunk reads and writes the sum of the weight's gradients, V D elements. On a GPU that takes
longer than the product of few tokens, and so chunks there are larger.

Autograd differentiates each chunk, so logits_of and loss_of of model.py may be changed freely.
That is what torch's F.linear_cross_entropy(options=...) cannot do, which has the same chunks (torch
2.13) but knows no shard of the vocabulary. Left out is a kernel that fuses the parts of the loss,
as Liger Kernel has: here they read and write a chunk's logits several times.
"""

import torch
from torch import Tensor

from model import Llama, Vocabulary, sum_of_losses
from plumbing.devices import cast_by_autocast
from techniques.technique import Technique

LOSS_CHUNK, LOSS_CHUNK_ON_GPU = 512, 2048  # tokens (docs/measured.md has others)


def tokens_at_a_time(on_gpu: bool) -> int:
    """Return the tokens of a chunk."""
    return LOSS_CHUNK_ON_GPU if on_gpu else LOSS_CHUNK


def chunked_loss(hidden: Tensor, weight: Tensor, targets: Tensor, vocabulary: Vocabulary) -> Tensor:
    """Return model.py's sum_of_losses(hidden, weight, targets, vocabulary).

    hidden [..., D], weight [V, D], targets [...] -> scalar."""
    hidden, targets, in_training = hidden.flatten(0, -2), targets.flatten(), torch.is_grad_enabled()
    return ChunkedLoss.apply(hidden, weight, targets, vocabulary, in_training)


class ChunkedLoss(torch.autograd.Function):
    """hidden [N, D], weight [V, D], targets [N]. `in_training` says whether to compute gradients:
    within a Function, torch.is_grad_enabled() is always False."""

    @staticmethod
    def forward(ctx, hidden, weight, targets, vocabulary, in_training):
        weight_trains = in_training and ctx.needs_input_grad[1]
        (w,) = cast_by_autocast(weight)  # once instead of in each chunk
        w = w.detach().requires_grad_(weight_trains)
        sum_dtype = torch.promote_types(w.dtype, torch.float32)
        loss = torch.zeros((), dtype=sum_dtype, device=hidden.device)
        hidden_grad = torch.empty_like(hidden) if in_training else None
        weight_grad = torch.zeros_like(w, dtype=sum_dtype) if weight_trains else None
        size = tokens_at_a_time(hidden.is_cuda)
        for start in range(0, len(targets), size):
            chunk = slice(start, start + size)
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
        # In place: with retain_graph, too, a second backward is an error.
        hidden_grad, weight_grad = (g if g is None else g.mul_(scale) for g in ctx.saved_tensors)
        weight_grad = weight_grad if weight_grad is None else weight_grad.to(ctx.dtype)
        return hidden_grad, weight_grad, None, None, None


def apply(model: Llama, world) -> None:
    if model.loss is sum_of_losses:  # not one of the caller's
        model.loss = chunked_loss


TECHNIQUE = Technique("", apply)
