"""What does a token cost that was read already?

A model writes a token, reads it, and writes the next one. Keys and values of earlier tokens do not
change any more, so they are kept in a cache, and a step computes the newest token of each row. Its
logits become probabilities, and temperature, top_k and top_p say which tokens may be drawn.

Read: the head of techniques/kv_cache.py, then Holtzman et al. 2020 (arXiv:1904.09751), section 3.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def next_token(
    model,
    tokens: Tensor,
    lengths: Tensor,
    cache: list[tuple[Tensor, Tensor]],
    temperature: float,
    top_k: int,
    top_p: float,
) -> Tensor:
    """Write the newest token of each row into the cache. Return the probabilities [B, V] by which
    the next one is drawn.

    B rows, S slots in each, model width D, H query heads and KV key/value heads of width E, and V
    tokens in the vocabulary
    model: its parts. model.embed(tokens [...]) -> x [..., D], model.logits(x) -> [..., V]. For a
        layer of model.layers, layer.heads(x) -> q [..., H, E], k and v [..., KV, E], and
        layer.rest(x, attended [..., H * E]) -> the x of the next layer. model.rotate(q or k,
        positions [...]) -> the same, for attention that knows positions. The first H / KV heads of
        q attend to the first head of k and v, and so on. There may be no layer
    tokens [B, S]: row b has lengths[b] tokens, one at least; what stands behind means nothing. B
        may be 0
    cache: keys and values of each layer [B, KV, S, E], which are yours to write. Slot i has those
        of the token at position i, with rotated keys. The newest token has none yet; its slot and
        those behind hold numbers of other texts
    temperature: logits are divided by it; 0 gives the most likely token the probability 1
    top_k: keep so many of the most likely tokens, 0 keeps all
    top_p: then keep the fewest most likely tokens whose probabilities, among those kept by top_k,
        have the sum top_p or more, and one at least
    The probabilities of the tokens that are kept have the sum 1. Of equally likely tokens the
    first is the more likely one.
    """
    # >>>
    rows = torch.arange(len(tokens))
    newest = lengths - 1  # position and slot
    x = model.embed(tokens[rows, newest])  # [B, D]
    for layer, (keys, values) in zip(model.layers, cache):
        q, k, v = layer.heads(x)
        keys[rows, :, newest] = model.rotate(k, newest)
        values[rows, :, newest] = v
        _, KV, S, E = keys.shape
        q = model.rotate(q, newest).unflatten(1, (KV, -1))  # [B, KV, H / KV, E]
        scores = q @ keys.mT / E**0.5  # [B, KV, H / KV, S]
        is_free = torch.arange(S) > newest[:, None]  # [B, S]
        scores = scores.masked_fill(is_free[:, None, None], -torch.inf)
        attended = scores.softmax(-1) @ values
        x = layer.rest(x, attended.flatten(1))
    logits = model.logits(x)  # [B, V]
    if temperature == 0:
        return F.one_hot(logits.argmax(-1), logits.shape[-1]).to(logits)
    ranked, order = (logits / temperature).sort(stable=True, descending=True)
    if top_k > 0:
        ranked[:, top_k:] = -torch.inf
    p = ranked.softmax(-1)
    before = p.cumsum(-1) - p  # the sum of all more likely tokens
    is_left_out = before >= top_p
    is_left_out[:, 0] = False
    p = p.masked_fill(is_left_out, 0)
    p = p / p.sum(-1, keepdim=True)
    return torch.zeros_like(p).scatter(1, order, p)
    # <<<


# Why: attention is causal, so no later token changes what an earlier one has in any layer. Its keys
# and values are all that later tokens ask for, and a step computes one token of each row in place
# of all. What is left is to read the cache: a step takes the time of reading it, which is why heads
# of q share keys, and why nobody copies these for each head. Rows have different lengths, so each
# has a position, a slot and a mask of its own. top_p comes after temperature, since it is about the
# probabilities that are drawn from; a token is kept if those before it do not reach top_p, so the
# one that crosses it is kept, too.
#
# Questions: 1. Its slots stay, and each step computes it in vain. A row that has ended can leave
# the batch, as in techniques/decoding.py, or its slots can be another text's.
# 2. Fewer: a low temperature makes likely tokens likelier, and so fewer of them reach 0.9.
