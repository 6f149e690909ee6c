"""The loss in chunks of tokens, so that the logits of all tokens never exist at the same time.

All logits of 4,096 tokens of Llama 3 take 2.1 GB in float32, and a plain loss holds three tensors
of this size: the logits, their log-softmax and their gradient. Here they are computed for n tokens
at a time. Forward computes a chunk's gradients while its logits exist. So backward recomputes
nothing: it multiplies these gradients by the gradient of the loss.

    plain                3 N V elements, in float32
    in chunks            3 n V elements, and already in forward the gradients, N D + V D
    in compiled chunks   2 n V elements, in bfloat16: the logits and their gradient

Each chunk reads and writes the sum of the weight's gradients, V D elements. On a GPU this takes
longer than the matrix products of a small chunk, so chunks are larger there.

Autograd differentiates each chunk, so logits_of and loss_of of model.py may be changed freely. On a
GPU, with --compile, a chunk's loss is compiled: it reads the logits twice in forward and once in
backward. With tensor parallelism it is not compiled.
torch's F.linear_cross_entropy(options=...) computes in such chunks, too (torch 2.13). But it knows
no other loss than cross entropy, and needs the whole vocabulary on each rank. Liger Kernel fuses
the operations of the loss into one kernel. Here only those of compiled chunks are fused.
"""

from functools import partial

import torch
from torch import Tensor

from model import Llama, Vocabulary, sum_of_losses
from plumbing.devices import cast_by_autocast
from techniques.technique import Technique

# Tokens of a chunk (docs/measured.md compares sizes).
LOSS_CHUNK = 512
LOSS_CHUNK_ON_GPU = 2048
LOSS_CHUNK_COMPILED = 4096


def tokens_at_a_time(on_gpu: bool, compiled: bool) -> int:
    """Return how many tokens a chunk has."""
    if compiled:
        return LOSS_CHUNK_COMPILED
    return LOSS_CHUNK_ON_GPU if on_gpu else LOSS_CHUNK


def chunked_loss(
    hidden: Tensor, weight: Tensor, targets: Tensor, vocabulary: Vocabulary, compiled=None
) -> Tensor:
    """Return what model.py's sum_of_losses does for the same arguments. `compiled` is None or the
    compiled sum_of_losses, which is used in training.

    hidden [..., D], weight [V, D], targets [...] -> scalar."""
    in_training = torch.is_grad_enabled()
    loss_of_chunk = compiled if compiled and in_training else sum_of_losses
    size = tokens_at_a_time(hidden.is_cuda, loss_of_chunk is compiled)
    hidden = hidden.flatten(0, -2)
    targets = targets.flatten()
    return ChunkedLoss.apply(hidden, weight, targets, vocabulary, loss_of_chunk, size, in_training)


class ChunkedLoss(torch.autograd.Function):
    """Compute the loss and also its gradients in forward, for `size` tokens at a time.
    hidden [N, D], weight [V, D], targets [N]. `in_training` says whether to compute gradients:
    within a Function, torch.is_grad_enabled() is always False."""

    @staticmethod
    def forward(ctx, hidden, weight, targets, vocabulary, loss_of_chunk, size, in_training):
        wants_weight_grad = in_training and ctx.needs_input_grad[1]
        (w,) = cast_by_autocast(weight)  # once instead of in each chunk
        w = w.detach().requires_grad_(wants_weight_grad)
        sum_dtype = torch.promote_types(w.dtype, torch.float32)
        loss = torch.zeros((), dtype=sum_dtype, device=hidden.device)
        hidden_grad = torch.empty_like(hidden) if in_training else None
        weight_grad = torch.zeros_like(w, dtype=sum_dtype) if wants_weight_grad else None
        for start in range(0, len(targets), size):
            chunk = slice(start, start + size)
            h = hidden[chunk].detach().requires_grad_(in_training)
            with torch.set_grad_enabled(in_training):
                chunk_loss = loss_of_chunk(h, w, targets[chunk], vocabulary)
            loss += chunk_loss.detach()
            if wants_weight_grad:
                hidden_grad[chunk], w_grad = torch.autograd.grad(chunk_loss, (h, w))
                weight_grad += w_grad
            elif in_training:
                (hidden_grad[chunk],) = torch.autograd.grad(chunk_loss, (h,))
        ctx.save_for_backward(hidden_grad, weight_grad)
        ctx.dtype = weight.dtype
        return loss

    @staticmethod
    def backward(ctx, scale):
        # Scaled in place, to save memory. So backward can run only once, even with retain_graph.
        hidden_grad, weight_grad = ctx.saved_tensors
        if hidden_grad is not None:
            hidden_grad.mul_(scale)
        if weight_grad is not None:
            weight_grad = weight_grad.mul_(scale).to(ctx.dtype)
        return hidden_grad, weight_grad, None, None, None, None, None


def apply(model: Llama, world) -> None:
    if model.loss is sum_of_losses:  # a loss that the caller has set is kept
        model.loss = chunked_loss
        if world.parallel.compiles_loss(world.device.type == "cuda"):
            compiled = torch.compile(sum_of_losses, dynamic=False)
            model.loss = partial(chunked_loss, compiled=compiled)


TECHNIQUE = Technique("", apply)  # always used
