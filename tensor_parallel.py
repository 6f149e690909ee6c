"""Tensor, sequence and loss parallelism: ranks along tp share every matrix product.

Ranks along tp see the same tokens. Each holds a shard of every matrix and, between the matrices, a
shard of the sequence (T/tp tokens):

                       x: T/tp tokens, D features
        norm                 |                      each rank its tokens
        all-gather           v                      x: T tokens
        wq wk wv, w1 w3   [ columns ]               each rank its heads, or F/tp features
        attention, SwiGLU    |                      each rank its heads, or F/tp features
        wo, w2            [ rows ]                  each rank a partial sum for T tokens
        reduce-scatter       v                      x: T/tp tokens, summed over ranks
        residual             |

torch stores W [out, in] and computes x Wᵀ. Column-parallel shards the output features, dimension 0
of W; row-parallel the input features, dimension 1. In this order, a pair of products needs one
collective before it and one after it. The vocabulary is sharded too: the embedding yields partial
sums, since each rank finds only the tokens of its shard, and in the loss logits never leave the
rank that computes them.

Communication over tp, with letters as in parallel.py and a = B T D w bytes: forward and backward
each run 2 L + 1 all-gathers and 2 L + 1 reduce-scatters of payload a. Each chunk of the loss all-
gathers tp float32 numbers a token, and each microbatch all-reduces one number, its loss. A norm is
replicated but sees only the tokens of its rank, so its gradient is a partial sum, which FSDP all-
reduces over tp just before its reduce-scatter: D elements per norm, once a step (with reshard =
all, once a microbatch).

Use when activations do not fit, or when there are more ranks than sequences, within a node: links
are fast there. Avoid elsewhere: in each block computation waits for 4 collectives in forward and
for 4 in backward, and smaller matrix products use a GPU less well. With --async-tp most of these
collectives travel while others compute (async_tp.py).
"""

import math
from functools import cache, partial

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from async_tp import GatherInChunks, InChunks
from model import Llama, cross_entropy_sum
from plumbing.processes import UserError
from plumbing.shards import dims_of, shard_parameters

REPLICATED, SEQUENCE_SHARDED = Replicate(), Shard(1)  # placements of x [B, T, D]


def shard_linear(style: ParallelStyle, name: str, layer: nn.Linear, mesh: DeviceMesh) -> None:
    """Shard a layer's parameters, and let it multiply by its shards."""
    shard_parameters(layer, mesh, style.weight_dim)
    if hasattr(layer, "shard_product"):
        layer.shard_product(mesh)


class ColumnParallel(ColwiseParallel):
    """Shard the output features of a linear layer: weight [out, in] on dimension 0."""

    weight_dim, _partition_linear_fn = 0, shard_linear


class RowParallel(RowwiseParallel):
    """Shard the input features of a linear layer: weight [out, in] on dimension 1."""

    weight_dim, _partition_linear_fn = 1, shard_linear


class VocabularyParallel(RowwiseParallel):
    """Shard the rows of an embedding: weight [V, D] on dimension 0."""

    weight_dim = 0


NORM = SequenceParallel(use_local_output=False)
COLUMNS = ColumnParallel()
ROWS = RowParallel(output_layouts=SEQUENCE_SHARDED, use_local_output=False)

# The parallel style of every layer that has parameters; * matches any block. An entry that matches
# no layer is ignored.
PLAN = {
    "tok_embeddings": VocabularyParallel(
        input_layouts=REPLICATED, output_layouts=SEQUENCE_SHARDED, use_local_output=False
    ),
    "layers.*.attention_norm": NORM,
    "layers.*.attention": PrepareModuleInput(
        input_layouts=(SEQUENCE_SHARDED, None, None, None, None),  # x, cos, sin, mask, cache
        desired_input_layouts=(REPLICATED, None, None, None, None),
    ),
    "layers.*.attention.wq": COLUMNS,
    "layers.*.attention.wk": COLUMNS,
    "layers.*.attention.wv": COLUMNS,
    "layers.*.attention.wo": ROWS,
    "layers.*.ffn_norm": NORM,
    "layers.*.feed_forward": PrepareModuleInput(
        input_layouts=(SEQUENCE_SHARDED,), desired_input_layouts=(REPLICATED,)
    ),
    "layers.*.feed_forward.w1": COLUMNS,
    "layers.*.feed_forward.w3": COLUMNS,
    "layers.*.feed_forward.w2": ROWS,
    "norm": NORM,
    "output": ColumnParallel(input_layouts=SEQUENCE_SHARDED, output_layouts=REPLICATED),
}


@cache
def style_of(path: str) -> ParallelStyle | None:
    """Return the style in PLAN of the layer at `path`, such as layers.3.ffn_norm."""
    parts = path.split(".")
    for entry, style in PLAN.items():
        wanted = entry.split(".")
        if len(wanted) == len(parts) and all(w in ("*", p) for w, p in zip(wanted, parts)):
            return style
    return None


def planned_dims(path: str, layer: nn.Module) -> dict[str, int | None]:
    """Return the dimension on which each parameter of the layer at `path` is sharded, None for a
    replicated one.

    Raises UserError for a parameter that PLAN does not cover. A rank would otherwise keep its own
    part of the gradient, which should be summed over tp, and train on without an error."""
    style, dims = style_of(path), {}
    names = [name for name, _ in layer.named_parameters(recurse=False)]
    if isinstance(style, SequenceParallel):
        dims = dict.fromkeys(names)
    elif hasattr(style, "weight_dim"):
        dims = dims_of(layer, style.weight_dim)
    for name in names:
        if name not in dims:
            remedy = "add its layer to PLAN in tensor_parallel.py, as COLUMNS, ROWS or NORM"
            if any(layer.children()):
                remedy = "move it into a module of its own, and add that to PLAN"
            elif style:
                remedy = "PLAN shards the weight of its layer alone, so build it with bias=False"
            raise UserError(f"--tp cannot shard {'.'.join(filter(None, (path, name)))}: {remedy}")
    return dims


def in_chunks(style: ParallelStyle) -> ParallelStyle:
    """Return the style that does the same while messages travel, if there is one (async_tp.py)."""
    if isinstance(style, PrepareModuleInput):
        return GatherInChunks()
    return InChunks(style.weight_dim) if style in (COLUMNS, ROWS) else style


def tensor_parallel(model: Llama, mesh: DeviceMesh, asynchronous: bool = False) -> None:
    """Shard a model over a mesh of one dimension, in place: parameters become DTensors.

    Raises UserError for a parameter or a loss that it does not know how to shard. labs/tp.py shards
    a feed-forward block by hand."""
    if model.loss is not cross_entropy_sum:
        raise UserError("--tp replaces model.loss by loss_parallel: shard your loss there")
    for path, layer in model.named_modules():
        planned_dims(path, layer)
    frozen = [name for name, p in model.named_parameters() if not p.requires_grad]
    styles = {path: style for path, _ in model.named_modules() if (style := style_of(path))}
    if asynchronous:
        styles = {path: in_chunks(style) for path, style in styles.items()}
    parallelize_module(model, mesh, styles)
    for block in [] if asynchronous else model.layers.values():
        for module in (block.attention, block.feed_forward):
            module.register_forward_pre_hook(_make_contiguous)
    for name in frozen:  # SequenceParallel makes every norm trainable
        model.get_parameter(name).requires_grad_(False)
    model.tie_weights()  # embedding and output each got a DTensor of its own
    model.loss = partial(loss_parallel, mesh)
    # The embedding's output is an AsyncCollectiveTensor, which still waits for its reduce-scatter.
    # A clone is a plain tensor: block 0 then gets the same type as the other blocks, and one
    # compiled graph serves all of them.
    if model.tok_embeddings:
        model.tok_embeddings.register_forward_hook(lambda module, inputs, x: x.clone())


def _make_contiguous(module: nn.Module, inputs: tuple) -> tuple | None:
    """Copy x [B, T, D] if T is no multiple of tp, as for a prompt: the uneven all-gather leaves it
    non-contiguous, and the matrix products of torch 2.11 need contiguous inputs."""
    x, *others = inputs
    if x.shape[1] % x.device_mesh.size():  # the shape of a DTensor is that of the whole tensor
        return x.clone(memory_format=torch.contiguous_format), *others


def loss_parallel(mesh: DeviceMesh, hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Return cross_entropy_sum with the vocabulary sharded over `mesh`: no rank holds [N, V].

    Each rank computes the logits of its vocabulary shard. Ranks exchange only the logsumexp of
    their logits, one number a token.
    hidden [B, T, D] sharded over the sequence, weight [V, D] sharded over the vocabulary, targets
    [B, T] -> scalar, the same on every rank. labs/logits.py writes it by hand."""

    def log_partition_offset(logits: Tensor) -> Tensor:
        sum_dtype = torch.promote_types(logits.dtype, torch.float32)
        lse = logits.to(sum_dtype).logsumexp(-1)  # [n]
        lse_of_ranks = DTensor.from_local(lse[None], mesh, [Shard(0)]).full_tensor()  # all-gather
        return (lse - lse_of_ranks.logsumexp(0))[:, None]  # [n, 1]

    hidden = hidden.redistribute(placements=[Replicate()])  # all-gather; backward: reduce-scatter
    vocab_start = math.ceil(weight.shape[0] / mesh.size()) * mesh.get_local_rank()
    share = cross_entropy_sum(
        hidden.to_local(grad_placements=[Partial()]),
        weight.to_local(),
        targets,
        vocab_start,
        log_partition_offset,
    )
    loss = DTensor.from_local(share, mesh, [Partial()]).full_tensor()  # all-reduce of one number
    return loss.clone()  # FSDP cannot hook a view
