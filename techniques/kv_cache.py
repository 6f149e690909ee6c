"""A cache of keys and values, so that generation computes every token once.

A token attends to the keys and values of earlier tokens, which no later token changes. So they are
kept, and of a new token only its own are computed. Each row has S slots, and a new token is written
into the next one. Of two prompts the shorter is padded on the left (S = 8):

    slot       0     1     2     3     4     5     6     7
    row 0     the   sun    is    a   [star]  .     .     .     the new token has position 4
    row 1      .     .     a    red  [star]  .     .     .     the new token has position 2

A token of position p in slot s attends to slots s - p to s, which are its own text: padding and
free slots are hidden by a mask. Keys of one head lie side by side in memory, as attention reads
them. Nothing moves from one token to the next: a step has the same shapes at the same addresses
every time, so that it is compiled once and a GPU can repeat it (techniques/cuda_graph.py).

The cache holds 2 KV E numbers a layer and token. Only attention has one: another layer that mixes
tokens would need a cache of its own.
"""

from collections import defaultdict
from functools import partial

import torch
from torch import Tensor

from model import document_mask


class KVCache:
    """The keys and values of up to S tokens in each row. `model.forward` fills it. The exercise
    labs/sampling has a step of it."""

    def __init__(self, size: int = 0):
        self.size = size  # S
        self.seen = 0  # slots in use, as far as the host counts: not what a CUDA graph has filled
        self.next_slot: Tensor | None = None  # [1] on the device
        self.layers = defaultdict(partial(LayerCache, self))  # name of a block -> its cache
        # Under --pp: stage -> its cache, of the size at its first use. A conversation, whose cache
        # grows, needs --pp 1.
        self.parts = defaultdict(lambda: KVCache(self.size))

    def add_positions(self, positions: Tensor, dtype: torch.dtype) -> Tensor:
        """Take slots for new tokens at positions [B, T] of their documents. Return their mask
        [B, 1, T, slots]: 0 where they attend, else -infinity. Kernels would convert booleans, in
        every layer."""
        self.take_slots(positions.shape[1], positions.device)
        visible = document_mask(positions, self.slots, self.visible)
        return torch.zeros_like(visible, dtype=dtype).masked_fill_(~visible, -torch.inf)

    def take_slots(self, T: int, device: torch.device) -> None:
        """Take the next T slots for new tokens. Raise ValueError if there are not so many."""
        if self.seen + T > self.size:
            raise ValueError(f"{self.seen} + {T} tokens are more than a cache of {self.size} holds")
        if self.next_slot is None:
            self.next_slot = torch.tensor([self.seen], device=device)
        self.seen += T
        # A prompt attends to the slots in use. A single token is given all: its shapes stay.
        self.visible = self.size if T == 1 else self.seen
        self.slots = self.next_slot + torch.arange(T, device=device)  # [T]
        self.next_slot += T

    def take(self, rows: Tensor) -> None:
        """Keep these rows, in this order; a row may be taken several times."""
        for part in self.parts.values():
            part.take(rows)
        for layer in self.layers.values():
            layer.k = layer.k[rows]
            layer.v = layer.v[rows]

    def make_room(self, size: int) -> None:
        """Have slots for `size` tokens at least, and for twice as many as before if these do not
        suffice: so a conversation seldom gets other shapes."""
        if size > self.size:
            self.size = max(size, 2 * self.size)

    def go_back(self, seen: int) -> None:
        """Forget all but the first `seen` tokens."""
        self.seen = seen
        self.next_slot = None


class LayerCache:
    """The keys and values of one layer."""

    def __init__(self, whole: KVCache):
        self.whole = whole
        self.k: Tensor | None = None  # [B, KV, S, E]
        self.v: Tensor | None = None

    def add(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Write keys and values of new tokens [B, T, KV, E] into their slots. Return those of all
        slots that the mask shows [B, slots, KV, E]."""
        k = k.transpose(1, 2)  # [B, KV, T, E]
        v = v.transpose(1, 2)
        size = self.whole.size
        if self.v is None or self.v.shape[2] < size:
            self.k = with_slots(size, self.k, k)
            self.v = with_slots(size, self.v, v)
        self.k.index_copy_(2, self.whole.slots, k)
        self.v.index_copy_(2, self.whole.slots, v)
        visible = self.whole.visible
        k = self.k.transpose(1, 2)
        v = self.v.transpose(1, 2)
        return k[:, :visible], v[:, :visible]


def with_slots(size: int, old: Tensor | None, new: Tensor) -> Tensor:
    """Return zeros [B, KV, size, E] for what is to hold `new`, with what `old` held before."""
    B, KV, _, E = new.shape
    tensor = new.new_zeros(B, KV, size, E)
    if old is not None:
        tensor[:, :, : old.shape[2]] = old
    return tensor
