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
    raise NotImplementedError("about 30 lines")
