"""Which tokens of a long sequence does each rank take?

A sequence is too long for one rank, so several ranks share it. Most layers work on each token by
itself, and so on a rank's own tokens. Attention does not: a token's query needs the keys and values
of all tokens before it, which other ranks have. And a late token needs more of them than an early
one, so that some ranks may have more to do than others.

Read: the documentation of torch.nn.functional.scaled_dot_product_attention, on is_causal above all,
and that of torch.autograd.Function.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor


def context_attention(T: int) -> tuple[Tensor, Callable]:
    """Return this rank's positions in a sequence of T tokens, and its attention.

    positions [T / ranks] of int64: which tokens this rank has, in the order of the rows of q, k and
        v. Each token is on one rank. q and k are already rotated by RoPE for these positions.
        2 x ranks divides T.
    attention(q [B, H, T / ranks, E], k, v [B, KV, T / ranks, E]) -> as q: causal attention of this
        rank's queries to the keys and values of the whole sequence. B is the number of sequences,
        E the width of a head, H the number of heads of queries, and KV that of keys and values.
        Each head of keys and values serves H / KV neighbouring heads of queries: enable_gqa=True.
    Gradients are those of the sum of all ranks' losses. Keys and values are sent once, and their
    gradients once. All ranks compute about equally many pairs of a query and a key. Of pairs that
    causal attention does not need, there are at most those of the squares on the diagonal: a chunk,
    one of 2 x ranks, may meet all of its own keys.
    """
    # >>>
    rank, ranks = dist.get_rank(), dist.get_world_size()
    chunks = torch.arange(T).chunk(2 * ranks)
    parts = [torch.cat([chunks[r], chunks[-1 - r]]) for r in range(ranks)]  # positions of each rank
    sorting = torch.cat(parts).argsort()

    class Gather(torch.autograd.Function):  # [T / ranks, ...] -> [T, ...], rank after rank
        @staticmethod
        def forward(ctx, part):
            whole = part.new_empty(T, *part.shape[1:])
            dist.all_gather_into_tensor(whole, part)
            return whole

        @staticmethod
        def backward(ctx, grad):
            part = grad.new_empty(T // ranks, *grad.shape[1:])
            dist.reduce_scatter_tensor(part, grad.contiguous())
            return part

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        own = torch.stack([k, v]).movedim(3, 0).contiguous()  # [T / ranks, 2, B, KV, E]
        k, v = Gather.apply(own)[sorting].movedim(0, 3)  # [B, KV, T, E] both
        outs = []
        for chunk, queries in zip((chunks[rank], chunks[-1 - rank]), q.chunk(2, 2)):
            end = int(chunk[-1]) + 1  # nothing that comes later is computed
            mask = chunk[:, None] >= torch.arange(end)
            seen = k[:, :, :end], v[:, :, :end]
            outs.append(F.scaled_dot_product_attention(queries, *seen, mask, enable_gqa=True))
        return torch.cat(outs, 2)

    return parts[rank], attention
    # <<<


# Why: of 2 n chunks, chunk c sees c + 1. So a rank with chunks r and 2 n - 1 - r computes 2 n + 1
# of them, whatever r is. With chunks in a row the numbers are the same, but the last rank has
# several times the first one's work: PyTorch's own balancer did that to packed documents, and no
# test of numbers could see it (pytorch PR #189902). Grouped keys and values are narrow, so that
# gathering them costs little, unless they are repeated first (torchtitan #1283). All ranks' queries
# use a key, and a reduce-scatter adds up what they say of it (lightly #1528 and pytorch/xla #5784
# left that out). is_causal=True takes a rank's queries for the first of the sequence (pytorch
# #103082).
#
# Questions: 1. No: a query meets its own document alone, so work depends on the lengths of
# documents, and not on where a chunk lies in the row.
# 2. The same forward, more backward, where keys travel once more beside their gradients: (3 n -
# 2)/n of keys and values for both, where gathering sends 2 (n - 1)/n.
