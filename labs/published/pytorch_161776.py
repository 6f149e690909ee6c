"""hsdp, as in pytorch #161776: the dimensions have the right names and the wrong order, so the mesh
is transposed, and a copy of the weights is spread over nodes."""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh


def hybrid_sharding(per_node):
    world = dist.get_world_size()
    nodes = world // per_node
    ids = torch.arange(world).reshape(nodes, per_node).t()  # "shard" by "replicate"
    mesh = DeviceMesh("cpu", ids, mesh_dim_names=("replicate", "shard"))
    shard_group, replicate_group = mesh["shard"].get_group(), mesh["replicate"].get_group()
    n, i = dist.get_world_size(shard_group), dist.get_rank(shard_group)

    def shard(weight):
        return torch.tensor_split(weight, n)[i].clone()

    def gather(rows):
        parts = [torch.empty_like(rows) for _ in range(n)]
        dist.all_gather(parts, rows, group=shard_group)
        return torch.cat(parts)

    def reduce(gradient):
        out = torch.empty_like(torch.tensor_split(gradient, n)[i])
        dist.reduce_scatter(out, list(torch.tensor_split(gradient, n)), group=shard_group)
        dist.all_reduce(out, group=replicate_group)
        return out

    return shard, gather, reduce
