"""Layers of tensor parallelism: torch's styles as used here, and what they cannot shard.

parallel.py chooses a style for every layer (PLAN). The styles here shard a layer parameter by
parameter, since an adapter adds some."""

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.experimental import local_map
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
)

from plumbing.messages import UserError
from plumbing.shards import dims_of, shard_parameters, to_local
from techniques.technique import Technique


def refuses(work) -> str:
    """Return why tensor parallelism cannot shard a step evenly, in a line, or ""."""
    config, parallel = work.model.config, work.parallel
    shareable = math.gcd(config.n_kv_heads, config.ffn_dim, config.dense_dim)
    if shareable % parallel.tp:
        widths = " and ".join(str(width) for width in (config.ffn_dim, config.dense_dim) if width)
        return (
            f"--tp {parallel.tp} cannot shard {config.n_kv_heads} key/value heads and a "
            f"feed-forward width of {widths} evenly: --tp must divide {shareable}"
        )
    if work.length % parallel.tp and torch.__version__ < "2.13":  # compared as versions
        multiple = parallel.tp if work.length == work.seq_len else parallel.multiple_of_tokens
        return (
            f"torch {torch.__version__} cannot shard --seq-len {work.seq_len} over --tp "
            f"{parallel.tp}: use --seq-len {math.ceil(work.seq_len / multiple) * multiple}, or "
            f"torch 2.13, which shards unevenly"
        )
    return ""


def suggests(facts) -> str:
    # With fewer ranks along tp, more ranks need sequences of their own.
    larger = "" if facts.work.sequences > 1 else " with a larger --batch"
    lever = f"a smaller --tp{larger}, if memory allows, waits less"
    if facts.crosses_nodes("tp"):
        lever = f"--tp {facts.per_node} or less stays within a node"
    return facts.waits("tp", "all-gathers and reduce-scatters", lever)


def writes_to_stream(model: nn.Module, name: str) -> bool:
    """Return whether a layer adds to the residual stream: tensor parallelism shards its input
    features, and of other layers the output features."""
    parent, _, attribute = name.rpartition(".")
    return attribute in getattr(model.get_submodule(parent), "writes_to_stream", ())


def sharded_dim(model: nn.Module, name: str) -> int | None:
    """Return the dimension of a linear layer's weight that tensor parallelism shards, as its parent
    says; None for a layer that multiplies a rank's tokens alone."""
    parent, _, attribute = name.rpartition(".")
    if attribute in getattr(model.get_submodule(parent), "token_layers", ()):
        return None
    return int(writes_to_stream(model, name))


def blocks_that_norm_outputs(model) -> int:
    """Return how many blocks need the outputs of their parts again, for the norms after them."""
    return sum(getattr(block, "norms_outputs", False) for block in model.layers.values())


def ends_before(model, *names: str) -> bool:
    """Return whether backward ends in the first of these blocks, since the embedding is frozen, and
    needs no gradient of what the layers `names` return, since none of them is trained, as when all
    adapters stand after them. Without names: none of the block's input."""
    is_frozen = "0" in model.layers and not model.tok_embeddings.weight.requires_grad
    return is_frozen and not any(
        parameter.requires_grad and name.startswith(names)
        for name, parameter in model.layers["0"].named_parameters()
    )


def shard_linear(style: ParallelStyle, name: str, layer: nn.Linear, mesh: DeviceMesh) -> None:
    """Shard a layer's parameters, and let it multiply by its shards. Replaces a private method of
    torch's styles, which would shard the weight and the bias alone."""
    shard_parameters(layer, mesh, style.weight_dim)
    if hasattr(layer, "shard_product"):
        layer.shard_product(mesh)


def product_of_shards(product: Callable, placements: list, mesh: DeviceMesh) -> Callable:
    """Return the function that calls product(x, weight, ...) with this rank's shards: `placements`
    are those of the weight and of what follows, None for what is no DTensor. The product of shards
    is a shard of the output [B, T, out], or a partial sum, and needs no communication."""
    shards_inputs = placements[0][0].is_shard(1)
    x, y = ([Shard(2)], [Partial()]) if shards_inputs else ([Replicate()], [Shard(2)])
    # Of a replicated tensor each rank computes a part of the gradient, to be summed.
    inputs = x, *placements
    gradients = tuple([Partial()] if p and p[0].is_replicate() else p for p in inputs)
    return local_map(product, y, inputs, gradients, mesh)


def local_operand(operand):
    """Return the part of a parameter that this rank multiplies by; what is no parameter, such as
    LoRA's scale, as it is. The gradient of a replicated one is the sum of what ranks compute."""
    if isinstance(operand, DTensor) and operand.placements[0].is_replicate():
        return operand.to_local(grad_placements=[Partial()])
    return to_local(operand)


class ColumnParallel(ColwiseParallel):
    """Shard the output features of a linear layer: weight [out, in] on dimension 0."""

    weight_dim, _partition_linear_fn = 0, shard_linear


class RowParallel(RowwiseParallel):
    """Shard the input features of a linear layer: weight [out, in] on dimension 1."""

    weight_dim, _partition_linear_fn = 1, shard_linear


class VocabularyParallel(RowwiseParallel):
    """Shard the rows of an embedding: weight [V, D] on dimension 0."""

    weight_dim = 0


class GatherTokens(ParallelStyle):
    """All-gather the tokens of x [B, T, D], the first input of attention or of a feed-forward; but
    a module that is `by_token` is given those that a rank has, and returns as many."""

    def _apply(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        def on_shards(x: DTensor, forward=module.forward) -> DTensor:
            whole = dict(shape=x.shape, stride=x.stride())
            return DTensor.from_local(forward(x.to_local()), mesh, x.placements, **whole)

        if getattr(module, "by_token", False):
            module.forward = on_shards
        else:
            module.register_forward_pre_hook(gather)
        return module


def sharded_by_tokens(x: Tensor, mesh: DeviceMesh, T: int) -> DTensor:
    """Return a rank's tokens as its part of a DTensor [B, T, D]; the last ranks may have fewer."""
    B, _, D = x.shape
    whole = dict(shape=torch.Size((B, T, D)), stride=(T * D, D, 1))
    return DTensor.from_local(x, mesh, [SEQUENCE_SHARDED], **whole)


def gather(module: nn.Module, inputs: tuple) -> tuple:
    """All-gather the tokens of x, the first input of a module: a hook before its forward."""
    x, *others = inputs
    n = x.device_mesh.size()
    x = x.redistribute(placements=[REPLICATED])
    if x.shape[1] % n:  # as of a prompt: x is not contiguous, and the matrix
        x = x.clone(memory_format=torch.contiguous_format)  # products of torch 2.11 need it
    return x, *others


class OfHeads(ParallelStyle):
    """For a module whose forward returns its `weight` [H], a number for each head: on each rank it
    then returns those of the rank's heads."""

    weight_dim = 0

    def _apply(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        shard_parameters(module, mesh, self.weight_dim)
        module.register_forward_hook(lambda module, inputs, weight: to_local(weight))
        return module


REPLICATED, SEQUENCE_SHARDED = Replicate(), Shard(1)  # placements of x [B, T, D]
NORM = SequenceParallel(use_local_output=False)
HEAD_NORM = SequenceParallel(sequence_dim=2, use_local_output=True)  # of q, k [B, T, heads, E]
COLUMNS = ColumnParallel()
ROWS = RowParallel(output_layouts=SEQUENCE_SHARDED, use_local_output=False)


def planned_dims(style: ParallelStyle | None, path: str, layer: nn.Module) -> dict[str, int | None]:
    """Return the dimension on which a style shards each parameter of the layer at `path`, None for
    a replicated one.

    Raises UserError for a parameter that the style does not cover: without an error, its gradient
    would not be summed over tp."""
    dims = {}
    if not isinstance(layer, getattr(style, "only_for", nn.Module)):
        style = None
    names = [name for name, _ in layer.named_parameters(recurse=False)]
    if isinstance(style, SequenceParallel):
        dims = dict.fromkeys(names)
    elif hasattr(style, "weight_dim"):
        dims = dims_of(layer, style.weight_dim)
    for name in names:
        if name not in dims:
            remedy = (
                "add its layer to PLAN in parallel.py, or to plan of its file: COLUMNS or ROWS for "
                "Linear, NORM for each token of the residual stream, that of tok_embeddings for an "
                "embedding, OfHeads() of techniques/parallel_layers.py for a number for each head"
            )
            if any(layer.children()):
                remedy = "move it into a module of its own, and add that to PLAN"
            elif style:
                remedy = "each rank would add it to a partial sum: build the layer with bias=False"
            full_name = f"{path}.{name}" if path else name
            raise UserError(f"--tp cannot shard {full_name}: {remedy}")
    return dims


TECHNIQUE = Technique("tp", refuses=refuses, suggests=suggests)
