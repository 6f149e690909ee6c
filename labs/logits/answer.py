"""Who holds the vocabulary?

The logits of a language model are its largest activation: a number for each token and each entry of
the vocabulary. In tensor parallelism each rank computes those of its part of the vocabulary. Most
targets lie in another rank's part, and a softmax needs all logits of a token. Yet no rank needs to
see another's: a few numbers a token are enough.

Read: the documentation of torch.logsumexp and of torch.autograd.Function.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from model import IGNORE


def cross_entropy(logits: Tensor, targets: Tensor, vocab_start: int) -> Tensor:
    """Return the sum over targets of -log softmax(logits of all ranks)[target], a scalar, the same
    on all ranks. Let backward give logits their gradient. Each rank calls this.

    logits [N, v]: of N tokens and this rank's part of the vocabulary, the entries from vocab_start
        to vocab_start + v - 1. The last rank may have fewer than the others.
    targets [N]: entries of the whole vocabulary, the same on all ranks. IGNORE, -100, is none.
    Logits may be as large as 1e4. No tensor has more elements than the first rank's logits, and a
    rank sends at most 4 numbers a token, in at most 8 collectives.
    """
    # >>>
    token = torch.arange(len(targets))
    counts = targets != IGNORE
    column = targets - vocab_start
    is_here = counts & (0 <= column) & (column < logits.shape[1])
    column = torch.where(is_here, column, 0)

    class CrossEntropy(torch.autograd.Function):
        @staticmethod
        def forward(ctx, logits):
            largest = logits.amax(1)
            dist.all_reduce(largest, dist.ReduceOp.MAX)
            p = (logits - largest[:, None]).exp()
            of_target = torch.where(is_here, logits[token, column] - largest, 0)
            sums = torch.stack([p.sum(1), of_target])
            dist.all_reduce(sums)
            total, of_target = sums
            p /= total[:, None]
            p[token, column] -= is_here.to(p.dtype)
            ctx.save_for_backward(p * counts[:, None])
            return ((total.log() - of_target) * counts).sum()

        @staticmethod
        def backward(ctx, scale):
            (grad,) = ctx.saved_tensors
            return grad * scale

    return CrossEntropy.apply(logits)
    # <<<


# Why: the loss of a token is the logarithm of a sum over the vocabulary, minus the target's logit.
# The sum can be added up over ranks, and the target's logit too, if ranks that do not have it add
# 0. All ranks subtract the same largest logit first, so that exp does not overflow. The gradient,
# softmax - onehot, then needs no other message. Ranks without the target have one as well: their
# softmax (ms-swift PR #9947). Gathered logits give the same loss, and need as much memory as
# without tensor parallelism (AReaL #664, torchforge PR #608, tt-metal #39998). What is computed
# from one part alone depends on the number of ranks, as in Megatron-LM #7464.
#
# Questions: 1. The logarithm of the sum of exp of a rank's own logits, and the target's logit, or 0
# where others have it. From these follow the sum over the vocabulary, the loss and its gradient.
# 2. 4,096 x 128,256 numbers in float32 are 2.1 GB, and a plain loss holds three such tensors.
# chunked_loss.py computes the logits of some tokens at a time, and their gradients at once.
