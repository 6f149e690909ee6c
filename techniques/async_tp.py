"""Asynchronous tensor parallelism: messages over tp travel while matrices are multiplied.

Plain tensor parallelism waits for its collectives: it all-gathers all tokens, then multiplies by
wq, wk and wv; it multiplies by wo, then reduce-scatters (parallel.py). Here tokens are cut
into chunks, one for each of the n ranks, which pass them around in a ring. What rank 0 of 3 does:

    columns (wq wk wv, w1 w3)                rows (wo, w2)
    send chunk 0, its own, and multiply it   multiply chunk 2
    send chunk 2, which has arrived,         send the product, and multiply chunk 1; add rank 2's
        and multiply it                          product of it, which has arrived
    multiply chunk 1, which has arrived      send the sum, and multiply chunk 0; add what has
                                                 arrived: now it is the sum over all ranks

A message is started before a product and waited for after it, so that both happen at once. Backward
is the mirror image: gradients go around the other way, as sums for columns, as copies for rows.

Communication over tp: a gather or scatter of payload a (parallel.py) becomes n - 1 messages
of a / n bytes, which is what a ring of n ranks sends for either; embedding and loss keep their
collectives. If a message takes no longer than the product beside it, the wait is gone. Only the
first layer that reads gathered tokens hides their arrival: wq, or w1. With --checkpointing backward
repeats messages, and more of them than plain tensor parallelism repeats collectives: see `sends`.
A weight's gradient is a sum over n chunks in the dtype of computation: in bfloat16 less exact, the
larger n is.

Use with --tp where bench.py step shows time exposed over tp, with long enough sequences: chunks
have T / n tokens, and smaller products use a GPU less well. Avoid where it shows none. A pass of
torch.compile also fuses products with collectives, but says nothing where it finds none: here
nothing depends on it. With NVLink, torch's symmetric memory could also do without NCCL's kernels,
which compete with the products.
"""

import math
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ParallelStyle

from model import Llama
from plumbing.shards import shard_parameters
from techniques.parallel_layers import (
    COLUMNS,
    ROWS,
    GatherTokens,
    blocks_that_norm_outputs,
    ends_before,
    local_operand,
    sharded_by_tokens,
)
from techniques.technique import Technique

wait = torch.ops._c10d_functional.wait_tensor


# ----------------------------------------------------------------------------------- the messages


class Ring:
    """The ranks along tp, in a ring."""

    def __init__(self, mesh: DeviceMesh):
        self.mesh = mesh
        self.group = mesh.get_group().group_name
        self.size = mesh.size()
        self.rank = mesh.get_local_rank()

    def send(self, x: Tensor, step: int) -> Tensor:
        """Start to send x to the rank `step` farther on. Returns what arrives from the other side,
        a flat tensor [x.numel()], valid after `wait` on itself: where a view of it is waited for,
        torch.compile frees x too early."""
        sent = [0] * self.size  # elements to each rank
        sent[(self.rank + step) % self.size] = x.numel()
        received = [0] * self.size  # elements from each rank
        received[(self.rank - step) % self.size] = x.numel()
        all_to_all = torch.ops._c10d_functional.all_to_all_single
        return all_to_all(x.contiguous().flatten(), received, sent, self.group)


class Depart(torch.autograd.Function):
    """Start to send a chunk to the next rank, and return what only Arrive may use; in backward,
    wait for the chunk's gradient."""

    @staticmethod
    def forward(ctx, x, ring):
        ctx.shape = x.shape
        return ring.send(x, 1)

    @staticmethod
    def backward(ctx, grad):
        return wait(grad).view(ctx.shape), None


class Arrive(torch.autograd.Function):
    """Return the chunk that Depart has begun to receive; in backward, start to send its gradient
    back."""

    @staticmethod
    def forward(ctx, under_way, shape, ring):
        ctx.ring = ring
        return wait(under_way).view(shape)

    @staticmethod
    def backward(ctx, grad):
        return ctx.ring.send(grad, -1), None, None


def keep_messages_early(model: Llama, world) -> None:
    """Stop torch.compile from reordering operators for a lower peak of memory: it would move many a
    message next to its wait, with nothing to compute in between."""
    if world.parallel.compile:
        import torch._inductor.config  # takes a second, which only compiled runs have to spend

        torch._inductor.config.reorder_for_peak_memory = False


# ----------------------------------------------------------------------------------- the products


class Arriving:
    """The input x [B, T, D] of attention or of a feed-forward, while its chunks arrive.

    The first layer that multiplies it takes each chunk as it comes; others find them all here."""

    def __init__(self, x: DTensor, ring: Ring):
        self.shape = x.shape
        self.ring = ring
        # Chunk i, [B, ceil(T / n), D], is that of rank (rank - i) % n. At first there is our own.
        size = math.ceil(x.shape[1] / ring.size)
        self.chunks = [with_tokens(x.to_local(), size)]

    @classmethod
    def __torch_function__(cls, function, *_):
        raise TypeError(f"{function.__name__} needs all tokens at once: leave out --async-tp")

    def product(self, multiply) -> Tensor:
        """Return multiply(chunk) of all chunks, in the order of tokens: [B, T, out / n]."""
        ring = self.ring
        products = {}  # rank -> that of its tokens
        for step in range(ring.size):
            chunk = self.chunks[step]
            under_way = None
            if len(self.chunks) == step + 1 < ring.size:
                under_way = Depart.apply(chunk, ring)
            products[(ring.rank - step) % ring.size] = multiply(chunk)
            if under_way is not None:
                self.chunks.append(Arrive.apply(under_way, chunk.shape, ring))
        in_order = [products[rank] for rank in range(ring.size)]
        return with_tokens(torch.cat(in_order, 1), self.shape[1])


def summed_product(x: Tensor, multiply, ring: Ring, mark) -> DTensor:
    """Return the sum over ranks of multiply(x): [B, T, out], sharded by tokens. x [B, T, in / n].
    `mark` announces a message to selective checkpointing, which then saves it."""
    T = x.shape[1]
    size = math.ceil(T / ring.size)  # tokens of a chunk
    chunks = with_tokens(x, size * ring.size).split(size, 1)
    total = multiply(chunks[(ring.rank - 1) % ring.size])
    for step in range(1, ring.size):
        under_way = Depart.apply(mark(total), ring)
        try:
            own = multiply(chunks[(ring.rank - 1 - step) % ring.size])
        finally:  # also where checkpointing stops a recomputation, by an exception in multiply
            arrived = Arrive.apply(under_way, total.shape, ring)
        total = own + arrived
    n_tokens = min(size, max(0, T - ring.rank * size))  # of this rank: the last may have fewer
    return sharded_by_tokens(with_tokens(total, n_tokens), ring.mesh, T)


def with_tokens(x: Tensor, n: int) -> Tensor:
    """Return x [B, T, D] with n tokens, by cutting off or by appending zeros: all chunks have the
    same length, although the last ranks may have fewer tokens."""
    return x if x.shape[1] == n else F.pad(x, (0, 0, 0, n - x.shape[1]))


# ------------------------------------------------------------------------------ styles for the PLAN


class GatherInChunks(ParallelStyle):
    """For a module whose input is sharded by tokens: let its layers multiply what arrives."""

    def _apply(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        ring = Ring(mesh)

        def let_arrive(module: nn.Module, inputs: tuple) -> tuple:
            x, *others = inputs
            return Arriving(x, ring), *others

        module.register_forward_pre_hook(let_arrive)
        return module


class InChunks(ParallelStyle):
    """Shard a linear layer by columns (dimension 0 of its weight) or rows (1); multiply in chunks.
    recompute.mark_products sets the layer's `saves_chunks`, where selective checkpointing saves its
    products."""

    def __init__(self, weight_dim: int):
        self.weight_dim = weight_dim

    def _apply(self, layer: nn.Linear, mesh: DeviceMesh) -> nn.Linear:
        shard_parameters(layer, mesh, self.weight_dim)
        ring = Ring(mesh)
        product = getattr(layer, "product", F.linear)
        layer.saves_chunks = False

        def product_in_chunks(x, *operands):
            mark = torch.ops.aten.alias if layer.saves_chunks else unmarked
            parts = [local_operand(operand) for operand in operands]

            def multiply(chunk: Tensor) -> Tensor:
                # One matrix product over all tokens of the chunk, also where the weight is frozen.
                return product(mark(chunk.contiguous()), *parts)

            if self.weight_dim == 1:
                return summed_product(x, multiply, ring, mark)
            return x.product(multiply)

        if hasattr(layer, "product"):
            layer.product = product_in_chunks
        else:
            layer.forward = lambda x: product_in_chunks(x, layer.weight, layer.bias)
        return layer


def unmarked(x: Tensor) -> Tensor:
    return x


def in_chunks(style: ParallelStyle) -> ParallelStyle:
    """Return the style that does the same while messages travel, if there is one."""
    if isinstance(style, GatherTokens):
        return GatherInChunks()
    return InChunks(style.weight_dim) if style in (COLUMNS, ROWS) else style


def refuses(work) -> str:
    if work.parallel.tp == 1:
        return "--async-tp is for --tp 2 or more: give --tp, or leave it out"
    return ""


def sends(model: Llama, work) -> Iterator[tuple]:
    """Messages in place of the blocks' collectives, n - 1 for each. What backward multiplies again,
    it also sends again: at each level of --checkpointing both gathers and the sums of w2, and with
    full the sums of wo. A compiled block repeats those of w2 only if it normalizes them."""
    parallel = work.parallel
    n = parallel.tp
    m = work.microbatches
    blocks = len(model.layers)
    with_w2 = blocks_that_norm_outputs(model)
    # Two of each in a block's forward, and in backward; two in a reference's forward. If backward
    # ends before the attention of the first block, it gathers no gradient of attention's output.
    both = (4 + 2 * work.references) * blocks - ends_before(model, "attention")
    gathers = both + 2 * parallel.recomputes * blocks
    # `scatters` are the reduce-scatters that costs/page.py counts, which are taken back. `sums` are
    # those that messages make instead. A recomputation repeats those of w2, and with full of wo.
    sent_once = both - ends_before(model)
    scatters = sent_once + parallel.repeats_attention * (blocks + with_w2)
    sums = sent_once + (parallel.checkpointing == "full") * blocks
    sums += parallel.recomputes * (with_w2 if parallel.compile else blocks)
    tokens = work.microbatch * math.ceil(work.length / n)
    message = tokens * model.config.dim * parallel.weight_bytes  # bytes of a chunk
    yield "tp", "all-gather", -gathers * m, n * message
    yield "tp", "reduce-scatter", -scatters * m, n * message
    yield "tp", "send", (gathers + sums) * (n - 1) * m, message


def suggests(facts) -> str:
    if facts.parallel.async_tp:
        return ""
    return facts.waits("tp", "plain collectives", "--async-tp sends while it multiplies")


TECHNIQUE = Technique(
    "async_tp",
    keep_messages_early,
    refuses,
    sends=sends,
    suggests=suggests,
    only_linear=True,
)
