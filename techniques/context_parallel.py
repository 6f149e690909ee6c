"""Context parallelism: several ranks share each sequence, where sequences are too long for one.

A sequence is cut into 2 n chunks for n ranks, and rank r has chunks r and 2 n - 1 - r (a zigzag
split). Where each row is one document, all ranks then attend to equally many tokens:

    chunk   0  1  2  3  4  5  6  7        n = 4. Queries of chunk c attend to c + 1 chunks: those of
    rank    0  1  2  3  3  2  1  0        rank 0 to 1 + 8 chunks, those of rank 3 to 4 + 5

A rank computes everything for its own tokens alone, but attention needs the others. So each block
all-gathers the keys and values of whole sequences, and the queries of a chunk attend, causally, to
keys up to the chunk's end. Grouped-query attention makes this cheap: keys and values are narrow. In
backward each rank has a part of their gradients, and a reduce-scatter sums them. (Llama 3 was
trained like this: Grattafiori et al. 2024, arXiv:2407.21783, section 3.3.2.)

Only the batch and attention know about it: `share_sequences` leaves a rank its own tokens, and
hands attention what it needs to know of the others. To everything else, ranks along cp are data
ranks, which have different tokens: FSDP shards over them, DDP averages over them, and losses and
targets add up. They are `cp` consecutive ranks of replicate x shard, so the mesh has no dimension
for them: on 4 ranks with --tp 2 --cp 2, ranks 0 and 2 share sequences, and ranks 1 and 3.

Letters as in parallel.py; T tokens of a whole sequence, of which a rank has T/n, while in model.py
T are the tokens of a rank. Communication over cp, a block and microbatch, with
kv = 2 B T KV E w / tp bytes: all-gather of kv in forward, reduce-scatter of kv in backward.
Checkpointing repeats the all-gather in backward.

Use when the activations of one sequence do not fit, even with checkpointing, or when there are
more ranks than sequences. Avoid for short sequences: attention waits for each collective. Without
checkpointing a block saves the keys and values of whole sequences for backward, n times those of
its own tokens. On a CPU, and in float32 on a GPU, attention needs a mask of (2 n + 1) / (4 n^2) T^2
elements, and saves a copy of keys and values for each query head. So on a CPU this is for learning:
in bfloat16 a GPU's kernel needs neither.

A ring (Liu et al. 2023, arXiv:2310.01889; torch's experimental context_parallel) instead passes
keys and values from rank to rank, and adds up the softmax part by part. It never holds a whole
sequence's keys, and can compute while it sends. But in backward keys travel again, and their
gradients with them: for each block it sends (3 n - 2) / n kv. Here that is 2 (n - 1) / n kv.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Shard

from model import attend, document_mask
from techniques.technique import Technique
from text.batch import Batch, Documents, document_starts, flat_starts, kernel_widths


def refuses(work) -> str:
    """Return why cp ranks cannot share sequences, in a line, or "". Each takes two equal chunks.
    Padding could make them equal, but ranks would compute it."""
    cp, seq_len = work.parallel.cp, work.seq_len
    if cp == 1:
        return ""
    chunks = 2 * cp
    if seq_len % chunks:
        return (
            f"--seq-len {seq_len} cannot be cut into the {chunks} chunks of --cp {cp}: use "
            f"--seq-len {math.ceil(seq_len / chunks) * chunks}"
        )
    head_dim = work.model.config.head_dim
    device = "cuda" if work.on_gpu else "cpu"
    widths = kernel_widths(device, work.parallel.dtype)
    if widths and head_dim not in widths:
        return (
            f"--cp needs heads of a width in {widths} on this device, and they have {head_dim}: "
            f"choose other --dim or --n-heads, or --dtype float32"
        )
    return ""


def suggests(facts) -> str:
    lever = "a smaller --cp, if memory allows, waits less, and needs a larger --batch"
    if facts.crosses_nodes("cp"):
        lever = f"--cp {facts.per_node // facts.parallel.tp} or less stays within a node"
    return facts.waits("cp", "keys and values", lever)


def chunks_of(rank: int, n: int) -> tuple[int, int]:
    """Return which of the 2 n chunks of a sequence a rank has."""
    return rank, 2 * n - 1 - rank


def own_tokens(tensor: Tensor, rank: int, n: int) -> Tensor:
    """Return a rank's part [B, T/n] of a tensor [B, T], of which 2 n must divide T."""
    chunks = tensor.chunk(2 * n, 1)
    return torch.cat([chunks[i] for i in chunks_of(rank, n)], 1)


def whole_sequences(parts: Tensor) -> Tensor:
    """Put the chunks of all ranks in order: the first ones by rank, then the second ones backwards.

    parts [n, ..., T/n, KV, E] -> [..., T, KV, E]."""
    first, second = parts.chunk(2, -3)
    return torch.cat([*first.unbind(0), *second.flip(0).unbind(0)], -3)


def make_mesh(mesh: DeviceMesh, cp: int, kind: str, groups: dict) -> DeviceMesh:
    """Return the ranks that share this rank's sequences, `cp` neighbours along replicate x shard.
    Their group is new, even where replicate or shard has the same ranks; add it to `groups`."""
    ranks = mesh.mesh.movedim(-1, 1).reshape(-1, cp).tolist()  # tp moves behind pp
    groups["cp"], _ = dist.new_subgroups_by_enumeration(ranks)
    return DeviceMesh.from_group(groups["cp"], kind, mesh_dim_names=("cp",))


class SharedSequences(NamedTuple):
    """Attention of a rank's tokens to whole sequences. It takes the place of a mask (model.py).
    labs/context writes it for sequences of one document."""

    mesh: DeviceMesh  # the ranks that share
    ends: list[int]  # where each of the rank's two chunks ends in the sequence
    masks: list  # for each chunk, its queries' mask or Documents

    def have_kernel(self, dtype: torch.dtype, head_dim: int) -> bool:
        return True  # always: a mask made by Llama.forward would know nothing of other ranks

    def attention(self, q: Tensor, k: Tensor, v: Tensor, window: int = 0) -> Tensor:
        """q [B, T/n, H, E], k and v [B, T/n, KV, E] of this rank's tokens -> as q."""
        own = torch.stack([k, v])[None]  # [1, 2, B, T/n, KV, E], with a dimension for ranks
        parts = DTensor.from_local(own, self.mesh, [Shard(0)])
        # An all-gather; in backward, gradients that are partial sums make it a reduce-scatter.
        parts = parts.full_tensor(grad_placements=[Partial()])  # [n, 2, B, T/n, KV, E]
        k, v = whole_sequences(parts)  # [B, T, KV, E] both
        return self.attend_to(q, k, v, window)

    def attend_to(self, q: Tensor, k: Tensor, v: Tensor, window: int = 0) -> Tensor:
        """The same, given keys and values [B, T, KV, E] of whole sequences."""
        attended = []
        for queries, end, mask in zip(q.chunk(2, 1), self.ends, self.masks):
            seen = k[:, :end], v[:, :end], mask
            if window:
                from techniques.windows import attend_within  # here, since few models have any

                attended.append(attend_within(queries, *seen, window))
            else:
                attended.append(attend(queries, *seen))
        return torch.cat(attended, 1)


@dataclass
class SharedBatch(Batch):
    """This rank's tokens of a batch. `starts` are those of whole sequences."""

    all_positions: Tensor | None = None  # [B, T] of whole sequences
    mesh: DeviceMesh | None = None  # the ranks that share
    dtype: torch.dtype = torch.float32  # of computation

    def sums_of_documents(self, x: Tensor) -> Tensor:
        """Return the sums over whole documents on the first rank of `mesh`, and 0 on the others, so
        that each is counted once. Communication: an all-reduce of [B, documents], also in backward:
        it takes the first rank's gradient to the others."""
        parts = super().sums_of_documents(x)
        sums = DTensor.from_local(parts, self.mesh, [Partial()])
        return sums.full_tensor(grad_placements=[Partial()]) * (self.mesh.get_local_rank() == 0)

    @property
    def document_numbers(self) -> Tensor:
        numbers = (self.all_positions == 0).cumsum(1) - 1
        return own_tokens(numbers, self.mesh.get_local_rank(), self.mesh.size())

    @property
    def documents(self) -> SharedSequences:
        """Return what a model's forward takes as `documents`."""
        rank = self.mesh.get_local_rank()
        n = self.mesh.size()
        size = self.all_positions.shape[1] // (2 * n)  # tokens of a chunk
        ends = [(chunk + 1) * size for chunk in chunks_of(rank, n)]
        has_kernel = kernel_widths(self.tokens.device.type, self.dtype)
        make = self.documents_until if has_kernel else self.mask_until
        masks = [make(end, size) for end in ends]
        return SharedSequences(self.mesh, ends, masks)

    def mask_until(self, end: int, queries: int) -> Tensor:
        """Return a mask for a chunk: 0 where its queries may attend, else -infinity. A boolean mask
        would be converted in every block, and every block would save its copy."""
        slots = torch.arange(end - queries, end, device=self.all_positions.device)
        visible = document_mask(self.all_positions[:, slots], slots, end)  # [B, 1, queries, end]
        return torch.zeros_like(visible, dtype=self.dtype).masked_fill_(~visible, -torch.inf)

    def documents_until(self, end: int, queries: int) -> Documents:
        """Return what a kernel needs in place of a mask: each document's queries in the chunk, if
        there are any, and its keys before the chunk's end. The kernel lets the last query attend
        to all keys, the query before it to all but the last, and so on."""
        before = end - queries  # tokens before the chunk
        starts = self.starts.clamp(before, end) - before
        key_starts = self.starts.clamp(max=end)
        return Documents(flat_starts(starts, queries), flat_starts(key_starts, end), queries, end)


def share_sequences(batch: Batch, world) -> Batch:
    """Return this rank's tokens of a batch of whole sequences, which all ranks along cp have. Raise
    ValueError for sequences that cannot be cut into 2 cp equal chunks."""
    n = world.parallel.cp
    if n == 1:
        return batch
    mesh, positions = world.cp_mesh, batch.positions
    rank = mesh.get_local_rank()
    T = batch.tokens.shape[1]
    if T % (2 * n):
        raise ValueError(f"sequences of {T} tokens cannot be cut into {2 * n} equal chunks")
    if positions is None:
        one_row = torch.arange(T, device=batch.tokens.device)
        positions = one_row.repeat(len(batch.tokens), 1)
    own = [own_tokens(t, rank, n) for t in (batch.tokens, batch.targets, positions)]
    return SharedBatch(
        *own,
        target_values={name: own_tokens(t, rank, n) for name, t in batch.target_values.items()},
        text_bytes=batch.text_bytes if rank == 0 else 0,  # counted once
        lengths=batch.lengths if rank == 0 else (),
        starts=document_starts(positions),
        all_positions=positions,
        mesh=mesh,
        dtype=world.parallel.dtype,
    )


TECHNIQUE = Technique("cp", refuses=refuses, suggests=suggests)
