"""Who needs all scores at once?

The scores of T queries and T keys are T x T numbers for each head, of which softmax wants a whole
row. Flash attention computes a tile of them at a time. Of a row it remembers the largest score so
far, the sum of exponentials, and the sum of values; when a larger score comes, both sums shrink.

Read: Dao et al. 2022, FlashAttention (arXiv:2205.14135), algorithm 1; and the formula of the
gradient of a softmax.
Write it with matrix products, and without scaled_dot_product_attention.
"""

import itertools

import torch
from torch import Tensor


def flash_attention(q: Tensor, k: Tensor, v: Tensor, tile: int) -> Tensor:
    """Return causal attention, softmax(q k.T / root of E) v for each head, of the shape of q. Let
    backward give q, k and v their gradients.

    q, k, v [B, H, T, E]: B sequences, H heads, T tokens, and E numbers in a head. Query i meets the
    keys 0 to i. `tile` need not divide T
    Scores exist for `tile` queries and `tile` keys at a time. Forward computes each tile once, and
    tiles in which all keys come after all queries are never computed. No tensor has more elements
    than q, or than a tile has. From forward to backward are kept q, k, v, the output, and one
    number for each query and head. Scores may be so large that their exp is infinite.
    """
    # >>>
    scale = q.shape[3] ** -0.5
    tiles = torch.arange(q.shape[2]).split(tile)  # positions

    def scores(q: Tensor, k: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
        is_later = columns > rows[:, None]
        return (scale * q[:, :, rows] @ k[:, :, columns].mT).masked_fill(is_later, -torch.inf)

    class Flash(torch.autograd.Function):
        @staticmethod
        def forward(ctx, q, k, v):
            out, logsumexp = torch.empty_like(q), torch.empty_like(q[..., :1])
            for i, rows in enumerate(tiles):
                largest = torch.full_like(q[:, :, rows, :1], -torch.inf)
                total, values = torch.zeros_like(largest), torch.zeros_like(q[:, :, rows])
                for columns in tiles[: i + 1]:
                    s = scores(q, k, rows, columns)
                    before, largest = largest, torch.maximum(largest, s.amax(-1, keepdim=True))
                    p, shrink = (s - largest).exp(), (before - largest).exp()
                    total = shrink * total + p.sum(-1, keepdim=True)
                    values = shrink * values + p @ v[:, :, columns]
                out[:, :, rows] = values / total
                logsumexp[:, :, rows] = largest + total.log()
            ctx.save_for_backward(q, k, v, out, logsumexp)
            return out

        @staticmethod
        def backward(ctx, grad):
            q, k, v, out, logsumexp = ctx.saved_tensors
            q_grad, k_grad, v_grad = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
            mean = (grad * out).sum(-1, keepdim=True)  # of the gradients of a row of p
            for columns, rows in itertools.combinations_with_replacement(tiles, 2):
                p = (scores(q, k, rows, columns) - logsumexp[:, :, rows]).exp()
                of_p = grad[:, :, rows] @ v[:, :, columns].mT
                of_s = scale * p * (of_p - mean[:, :, rows])
                v_grad[:, :, columns] += p.mT @ grad[:, :, rows]
                q_grad[:, :, rows] += of_s @ k[:, :, columns]
                k_grad[:, :, columns] += of_s.mT @ q[:, :, rows]
            return q_grad, k_grad, v_grad

    return Flash.apply(q, k, v)
    # <<<


# Why: softmax is a quotient of two sums over keys, and a sum can be added up tile by tile, if all
# its terms have the same number subtracted in exp. So when a larger score comes, what was added up
# is multiplied by exp(old - new). Backward needs the probabilities again; the logarithm of each
# row's sum gives them back, one tile at a time, and the mean of their gradients is the product of
# the output and its gradient. So T x T numbers are computed twice and stored never. A kernel keeps
# the tile in fast memory, which is why it is faster although it computes more.
#
# Questions: 1. Seven products in place of six, since one of backward's five computes the scores
# again: 7/6 of the attention's FLOPs.
# 2. The larger maximum is that of the row. Multiply each part's two sums by exp(its maximum - the
# larger one), add them up, and divide values by exponentials at the end.
