"""Sliding windows: a token attends to itself and to the W - 1 tokens before it.

A mask of T x T scores would cost as much as attention to all tokens. So sequences are folded: W
queries at a time attend to their own W tokens and to the W before these, and no scores are computed
for any other token. Of 12 tokens with W = 4, in which x is a score that counts:

    keys      0  1  2  3  4  5  6  7  8  9 10 11
    query 4      x  x  x  x                             queries 4 to 7 attend to keys 0 to 7,
    query 5         x  x  x  x                          queries 8 to 11 to keys 4 to 11
    query 6            x  x  x  x
    query 7               x  x  x  x

About half of the scores that are computed count, for any T. A kernel that knows windows computes
those alone: varlen_attn does, which attends within packed documents on a GPU (text/batch.py).

Windows are of some models and no choice of a run (models/olmo3.py, models/gemma3.py). Use them for
long sequences: attention costs T W in place of T^2 / 2. Some layers of a model have to attend to
everything, or nothing would be seen further away than windows reach, layer by layer.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from model import attend


def attend_within(q: Tensor, k: Tensor, v: Tensor, mask, window: int) -> Tensor:
    """Return attention as model.attend does, in a window of W tokens. Several queries are those of
    the last T keys. A single query, as in generation, may stand at any key: the mask says at which.

    q [B, T, H, E], k, v [B, S, KV, E], mask as there -> same shape as q."""
    if hasattr(mask, "attention"):  # as in model.attend
        return mask.attention(q, k, v, window)
    T = q.shape[1]
    if T == 1 and mask is not None:
        return attend(q, k, v, last_visible(mask, window))
    S = min(k.shape[1], T + window - 1)  # the last S keys are in some query's window
    k = k[:, -S:]
    v = v[:, -S:]
    if mask is not None:
        mask = mask[..., -S:]
    if T > 2 * window:  # fold computes 2 W scores for a query, where a mask of all has S
        return fold(q, k, v, mask, window)
    if mask is None:
        if S <= window:  # causal attention sees no more than the window
            return attend(q, k, v, None)
        mask = torch.ones(T, S, dtype=torch.bool, device=q.device).tril(S - T)
    return attend(q, k, v, last_visible(mask, window))


def last_visible(mask: Tensor, window: int) -> Tensor:
    """Return a mask of the last `window` keys that another mask shows of each row: a key is not
    among them if the key `window` later is shown, too. Keys that are shown follow each other."""
    S = mask.shape[-1]
    shown = mask if mask.dtype == torch.bool else mask == 0
    shown_later = shown[..., window:]
    shown_later = F.pad(shown_later, (0, min(window, S)))
    return both(~shown_later, mask)


def both(visible: Tensor, mask: Tensor | None) -> Tensor:
    """Return a mask of what is visible and allowed by another mask, boolean or of 0 and -inf."""
    if mask is None:
        return visible
    if mask.dtype == torch.bool:
        return mask & visible
    return mask.masked_fill(~visible, -torch.inf)


def fold(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, window: int) -> Tensor:
    """Return attention in a window, for n groups of W queries, each of which has 2 W keys. There
    are at most W keys before the first query."""
    B, T = q.shape[:2]
    W = window
    n = math.ceil(T / W)
    after = n * W - T  # keys and queries to fill up the last group
    before = W + T - k.shape[1]  # keys that the first group lacks

    def groups_of_keys(x: Tensor) -> Tensor:
        padded = F.pad(x, (0, 0, 0, 0, before, after))  # [B, (n + 1) W, KV, E]
        groups = padded.unfold(1, 2 * W, W)  # [B, n, KV, E, 2 W]
        return groups.movedim(-1, 2).flatten(0, 1)  # [B n, 2 W, KV, E]

    queries = F.pad(q, (0, 0, 0, 0, 0, after))
    queries = queries.view(B * n, W, *q.shape[2:])
    query = torch.arange(W, device=q.device)[:, None]
    key = torch.arange(2 * W, device=q.device)
    first_key = W * torch.arange(n, device=q.device)[:, None, None]  # of each group
    in_window = (key > query) & (key <= query + W)  # [W, 2 W]
    exists = first_key + key >= before  # [n, 1, 2 W]
    visible = in_window & exists  # [n, W, 2 W]
    visible = visible[:, None].repeat(B, 1, 1, 1)  # [B n, 1, W, 2 W]
    if mask is not None:
        rows = mask.expand(B, -1, -1, -1)
        # Any value will do: `visible` hides padded keys, and padded queries are cut off.
        padded = F.pad(rows, (before, after, 0, after), value=True)
        groups = padded.unflatten(2, (n, W))
        # Of every group of queries with every group of keys, those of the same number.
        pairs = groups.unfold(-1, 2 * W, W)  # [B, 1, n, W, n, 2 W]
        mask = pairs.diagonal(dim1=2, dim2=4)  # [B, 1, W, 2 W, n]
        mask = mask.movedim(-1, 1).flatten(0, 1)  # [B n, 1, W, 2 W]
    keys = groups_of_keys(k)
    values = groups_of_keys(v)
    out = attend(queries, keys, values, both(visible, mask))
    out = out.reshape(B, n * W, *q.shape[2:])
    return out[:, :T]
