"""Context parallelism: several ranks share each sequence, where sequences are too long for one.

A sequence is cut into 2 n chunks for n ranks, and rank r has chunks r and 2 n - 1 - r, so that all
ranks attend to equally many tokens:

    chunk   0  1  2  3  4  5  6  7        n = 4. The queries of chunk c attend to c + 1 chunks:
    rank    0  1  2  3  3  2  1  0        those of rank 0 to 1 and 8, those of rank 3 to 4 and 5

A rank computes everything for its own tokens alone, but attention needs the others. So each block
gathers the keys and values of whole sequences, and the queries of a chunk attend to all tokens up
to its end. Grouped-query attention makes this cheap: keys and values are narrow. In backward each
rank has a part of their gradients, and a reduce-scatter sums them. (Llama 3 was trained like this:
Grattafiori et al. 2024, arXiv:2407.21783, section 3.3.2.)

All of it hangs on the batch: `share_sequences` leaves a rank its own tokens, and hands attention
what it needs to know of the others. To everything else, ranks along cp are data ranks, which have
different tokens: FSDP shards over them, DDP averages over them, and losses and targets add up. They
are `cp` consecutive ranks of replicate x shard, so the mesh has no dimension for them.

Communication over cp, a block and microbatch, with kv = 2 B T KV E w / tp bytes (T tokens of whole
sequences; other letters as in parallel.py): all-gather of kv in forward, reduce-scatter of kv in
backward. Checkpointing, selective or full, repeats the all-gather in backward.

Use when the activations of one sequence do not fit, even with checkpointing, or when there are
more ranks than sequences. Avoid for short sequences: attention waits for each collective. Without
checkpointing a block saves keys and values of whole sequences for backward, n times its own.

A ring (Liu et al. 2023, arXiv:2310.01889) passes keys and values from rank to rank in place of the
gathering, and adds up the softmax part by part. It never holds a whole sequence's keys, and can
compute while it sends, but sends (3 n - 2) / n kv a block where this sends 2 (n - 1) / n kv.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Shard

from data import Batch, document_starts, flat_starts
from model import DOCUMENT_KERNELS, Documents, attend, document_mask
from parallel import World
from plumbing.lower_right import causal_lower_right


def chunks_of(rank: int, n: int) -> tuple[int, int]:
    """Return which of the 2 n chunks of a sequence a rank has."""
    return rank, 2 * n - 1 - rank


def own_tokens(tensor: Tensor, rank: int, n: int) -> Tensor:
    """Return a rank's part [B, T/n] of a tensor [B, T], of which 2 n must divide T."""
    chunks = tensor.chunk(2 * n, 1)
    return torch.cat([chunks[i] for i in chunks_of(rank, n)], 1)


def whole_sequences(parts: Tensor) -> Tensor:
    """Put the chunks of all ranks in order: parts [n, ..., T/n, KV, E] -> [..., T, KV, E]."""
    first, second = parts.chunk(2, -3)  # of each rank, its first and its second chunk
    return torch.cat([*first.unbind(0), *second.flip(0).unbind(0)], -3)


class SharedSequences(NamedTuple):
    """Attention of a rank's tokens to whole sequences. It takes the place of a mask (model.py)."""

    mesh: DeviceMesh  # the ranks that share
    ends: list[int]  # of each of the rank's two chunks: where it ends in the sequence
    masks: list  # and the mask or Documents of its queries, None where they see all tokens up to it
    needs_kernel = False

    def attention(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [B, T/n, H, E], k and v [B, T/n, KV, E] of this rank's tokens -> as q."""
        own = torch.stack([k, v])[None]
        parts = DTensor.from_local(own, self.mesh, [Shard(0)], run_check=False)
        parts = parts.full_tensor(grad_placements=[Partial()])  # [n, 2, B, T/n, KV, E]
        return self.attend_to(q, *whole_sequences(parts))

    def attend_to(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """The same, given keys and values [B, T, KV, E] of whole sequences."""
        attended = []
        for queries, end, mask in zip(q.chunk(2, 1), self.ends, self.masks):
            seen = queries, k[:, :end], v[:, :end]
            out = causal_lower_right(*seen)[0] if mask is None else attend(*seen, mask)
            attended.append(out)
        return torch.cat(attended, 1)


@dataclass
class SharedBatch(Batch):
    """This rank's tokens of a batch. `starts` and `max_length` are those of whole sequences."""

    all_positions: Tensor | None = None  # [B, T] of whole sequences
    packed: bool = False  # whether rows may hold several documents
    mesh: DeviceMesh | None = None  # the ranks that share
    dtype: torch.dtype = torch.float32  # of computation

    @property
    def documents(self) -> SharedSequences:
        """Return what a model's forward takes as `documents`."""
        rank, n = self.mesh.get_local_rank(), self.mesh.size()
        size = self.all_positions.shape[1] // (2 * n)
        ends = [(chunk + 1) * size for chunk in chunks_of(rank, n)]
        device = self.tokens.device.type
        if device == "cpu" and not self.packed:
            return SharedSequences(self.mesh, ends, [None, None])
        has_kernel = (device, self.dtype) in DOCUMENT_KERNELS
        make = self.documents_until if has_kernel else self.mask_until
        return SharedSequences(self.mesh, ends, [make(end, size) for end in ends])

    def mask_until(self, end: int, queries: int) -> Tensor:
        """Return a mask for a chunk: 0 where its queries may attend, else -infinity. As numbers,
        since attention would turn truth values into numbers in each block, and keep them."""
        visible = document_mask(self.all_positions[:, :end], queries)  # [B, 1, queries, end]
        return torch.zeros_like(visible, dtype=self.dtype).masked_fill_(~visible, -torch.inf)

    def documents_until(self, end: int, queries: int) -> Documents:
        """Return the same by lengths: of each document the part of its queries that lies in the
        chunk, and its keys up to the chunk's end. The kernel lets the last query attend to the last
        key, the one before to all keys but the last, and so on."""
        of_queries = self.starts.clamp(end - queries, end) - (end - queries)
        return Documents(
            flat_starts(of_queries, queries),
            flat_starts(self.starts.clamp(max=end), end),
            min(queries, self.max_length),
            min(end, self.max_length),
        )


def share_sequences(batch: Batch, world: World) -> Batch:
    """Return this rank's tokens of a batch of whole sequences, which all ranks along cp have."""
    mesh, n = world.cp_mesh, world.parallel.cp
    if n == 1:
        return batch
    positions, rank = batch.positions, mesh.get_local_rank()
    if positions is None:
        positions = torch.arange(batch.tokens.shape[1]).expand_as(batch.tokens)
    starts, max_length = document_starts(positions)
    own = (own_tokens(t, rank, n) for t in (batch.tokens, batch.targets, positions))
    text_bytes = batch.text_bytes if rank == 0 else 0  # counted once
    packed = batch.positions is not None
    more = positions, packed, mesh, world.parallel.dtype
    return SharedBatch(*own, text_bytes, starts, max_length, *more)
