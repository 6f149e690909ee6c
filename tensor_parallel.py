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

Columns and rows are those of Wᵀ; torch's weight is W [out, in]. Column-parallel first, row-parallel
second: so a pair of products needs one collective before it
and one after it. The vocabulary is sharded too: the embedding yields partial sums, since each rank
finds only the tokens of its shard, and in the loss logits never leave the rank that computes them.

Communication over tp, payload of a = B T D w bytes: forward and backward each run 2 L + 1
all-gathers and 2 L + 1 reduce-scatters of a. Each chunk of the loss all-gathers tp float32 numbers
a token, and each microbatch all-reduces one number, its loss. A norm is replicated but sees only
the tokens of its rank, so its gradient is a partial sum, which FSDP all-reduces over tp just before
its reduce-scatter: D numbers a norm, once a step (with reshard = all, once a microbatch).

Use when activations do not fit, or when there are more ranks than sequences, within a node: links
are fast there. Avoid elsewhere: in each block computation waits for 4 collectives in forward and
for 4 in backward, and smaller matrix products use a GPU less well.

Letters as in parallel.py.
"""

import math
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor import distribute_tensor as distribute
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from model import Llama, cross_entropy_sum


def tensor_parallel(model: Llama, mesh: DeviceMesh) -> None:
    """Shard a model over a mesh of one dimension, in place: parameters become DTensors."""
    frozen = [name for name, p in model.named_parameters() if not p.requires_grad]
    replicated, sequence_sharded = Replicate(), Shard(1)  # placements of x [B, T, D]
    norm = SequenceParallel(use_local_output=False)
    columns = ColumnParallel()
    rows = RowParallel(output_layouts=sequence_sharded, use_local_output=False)
    embedding = RowwiseParallel(
        input_layouts=replicated, output_layouts=sequence_sharded, use_local_output=False
    )
    output = ColumnParallel(input_layouts=sequence_sharded, output_layouts=replicated)
    parallelize_module(model, mesh, {"tok_embeddings": embedding, "norm": norm, "output": output})
    for block in model.layers.values():
        parallelize_module(
            block,
            mesh,
            {
                "attention_norm": norm,
                "attention": PrepareModuleInput(
                    input_layouts=(sequence_sharded, None, None, None, None),  # x, cos, sin, ...
                    desired_input_layouts=(replicated, None, None, None, None),
                ),
                "attention.wq": columns,
                "attention.wk": columns,
                "attention.wv": columns,
                "attention.wo": rows,
                "ffn_norm": norm,
                "feed_forward": PrepareModuleInput(
                    input_layouts=(sequence_sharded,), desired_input_layouts=(replicated,)
                ),
                "feed_forward.w1": columns,
                "feed_forward.w3": columns,
                "feed_forward.w2": rows,
            },
        )
        for module in (block.attention, block.feed_forward):
            module.register_forward_pre_hook(_make_contiguous)
    for name in frozen:  # SequenceParallel makes every norm trainable
        model.get_parameter(name).requires_grad_(False)
    model.tie_weights()  # embedding and output each got a DTensor of its own
    model.loss = partial(loss_parallel, mesh)
    # The embedding's output is an AsyncCollectiveTensor, which still waits for its reduce-scatter.
    # A clone is a plain tensor: block 0 then gets the same type as the other blocks, and one
    # compiled graph serves all of them.
    model.tok_embeddings.register_forward_hook(lambda module, inputs, x: x.clone())


class ColumnParallel(ColwiseParallel):
    """Shard the output features of a linear layer: weight [out, in] on dimension 0."""

    def _partition_linear_fn(self, name, module, mesh):
        shard_linear(module, mesh, Shard(0))


class RowParallel(RowwiseParallel):
    """Shard the input features of a linear layer: weight [out, in] on dimension 1."""

    def _partition_linear_fn(self, name, module, mesh):
        shard_linear(module, mesh, Shard(1))


def shard_linear(layer: nn.Linear, mesh: DeviceMesh, placement: Placement) -> None:
    """Shard the weight of a layer. A layer with more parameters, such as LoRALinear, shards itself
    in its method `shard`."""
    if hasattr(layer, "shard"):
        layer.shard(mesh, placement)
    else:
        weight = distribute(layer.weight, mesh, [placement])
        layer.weight = nn.Parameter(weight, requires_grad=layer.weight.requires_grad)


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
    [B, T] -> scalar, the same on every rank."""

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
