"""The part of a tensor that this rank holds, and memory for it."""

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from plumbing.messages import UserError


def to_local(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a tensor, sharing its memory; a plain tensor as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def allocate(model: nn.Module, device: str | torch.device) -> None:
    """Allocate the parameters of a model on `meta`, whose values are still to be set.

    Raises UserError for what would be lost without an error: the values of buffers, and parameters
    that are shared without Llama.tie_weights."""
    for name, _ in model.named_buffers():
        raise UserError(f"{name} is a buffer, which would lose its values: compute it in forward")
    distinct = dict(model.named_parameters())
    model.to_empty(device=device)
    model.tie_weights()  # to_empty makes two parameters of a shared one
    for name, _ in model.named_parameters():
        if name not in distinct:
            raise UserError(f"{name} is shared with another layer: do so in Llama.tie_weights, too")


def assign_shard(parameter: Tensor, full: Tensor) -> None:
    """Copy into a parameter this rank's shard of its full value, which every rank has."""
    to_local(parameter).copy_(shard_of(full, parameter))


def shard_of(full: Tensor, parameter: Tensor, place: dict[str, int] | None = None) -> Tensor:
    """Return this rank's shard of the full value of a parameter, or that of the rank at a `place`,
    its index along each mesh dimension. It shares the memory of `full`.

    A tensor is sharded over `tp` first, and what a rank then has over `shard`: so go through the
    mesh dimensions from the last to the first."""
    for name, dim in reversed(sharded_over(parameter).items()):
        mesh = parameter.device_mesh
        mesh_dim = mesh.mesh_dim_names.index(name)
        rank = place[name] if place else None
        full = chunk_of(full, mesh, mesh_dim, dim, rank)
    return full


def sharded_over(parameter: Tensor) -> dict[str, int]:
    """Return the mesh dimensions over which a parameter is sharded, and which of its own dimensions
    each shards."""
    if not isinstance(parameter, DTensor):
        return {}
    dims = {}
    names = parameter.device_mesh.mesh_dim_names
    for name, placement in zip(names, parameter.placements, strict=True):
        if not placement.is_replicate():
            dims[name] = placement.dim
    return dims


def dims_of(layer: nn.Module, weight_dim: int) -> dict[str, int | None]:
    """Return the dimension on which each parameter of a layer is sharded, given that of its weight;
    None for a replicated one. A layer with more parameters than a weight, such as LoRALinear, says
    so in a method `sharded_dims`.

    A bias is sharded with the output features. Where input features are sharded, each rank would
    add it to its partial sum: it is not covered, so that planned_dims refuses it."""
    if hasattr(layer, "sharded_dims"):
        dims = layer.sharded_dims(weight_dim)
    else:
        dims = {"weight": weight_dim}
    has_bias = getattr(layer, "bias", None) is not None
    if has_bias and weight_dim == 0:
        dims = dims | {"bias": 0}
    return dims


def matrices_of(model: nn.Module) -> set[str]:
    """Return the names of the parameters that are matrices, or stacks of them, for weight decay and
    for optimizers of matrices: the weights of Linear and Embedding, and what other layers name in
    `matrices`."""
    found = set()
    for path, layer in model.named_modules():
        known = ("weight",) if isinstance(layer, nn.Linear | nn.Embedding) else ()
        names = getattr(layer, "matrices", known)
        found |= {f"{path}.{name}".lstrip(".") for name in names}
    return found


def without_slope(model: nn.Module) -> set[str]:
    """Return the names of the parameters whose gradient is not the slope of the loss."""
    found = set()
    for path, layer in model.named_modules():
        found |= {f"{path}.{name}".lstrip(".") for name in getattr(layer, "no_slope", ())}
    return found


def shard_parameters(layer: nn.Module, mesh: DeviceMesh, weight_dim: int) -> None:
    """Replace the parameters of a layer by DTensors. torch's own styles would shard all of them
    alike, but of LoRA's factors one is replicated."""
    for name, dim in dims_of(layer, weight_dim).items():
        placement = Replicate() if dim is None else Shard(dim)
        old = layer.get_parameter(name)
        new = distribute_tensor(old, mesh, [placement])
        setattr(layer, name, nn.Parameter(new, requires_grad=old.requires_grad))


def chunk_of(
    tensor: Tensor, mesh: DeviceMesh, mesh_dim: int, dim: int, rank: int | None = None
) -> Tensor:
    """Return this rank's chunk, or that of another `rank` along a mesh dimension, of a tensor that
    is sharded along `dim` over it. It is empty on the last ranks if the dimension is too short."""
    if rank is None:
        rank = mesh.get_local_rank(mesh_dim)
    chunks = tensor.chunk(mesh.size(mesh_dim), dim)
    return chunks[rank] if rank < len(chunks) else tensor.narrow(dim, 0, 0)
