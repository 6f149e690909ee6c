"""Two nodes, and a slow link between them: who sits next to whom?

Within a node ranks talk fast, between nodes slowly. So each node shares one copy of the weights
among its ranks, and gathers them from neighbours. Across nodes go only gradients, already summed
and cut to slices. Other arrangements give the same numbers, many times slower.

Read: the pictures in the docstring of `fsdp` in parallel.py, and the documentation of
torch.distributed.device_mesh.init_device_mesh, and of two functions of torch.distributed:
all_gather_into_tensor and reduce_scatter_tensor.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh


def hybrid_sharding(per_node: int) -> tuple[Callable, Callable, Callable]:
    """Return three functions: shard, gather and reduce. Each rank calls this once.

    per_node: number of ranks in a node. Ranks 0 .. per_node - 1 are the first node, and so on.
    shard(weight [N, D]) -> [n, D]: a copy of this rank's rows; a node keeps each row once
    gather(rows [n, D]) -> weight [N, D], from the ranks of the node
    reduce(gradient [N, D]) -> [n, D]: this rank's rows of the sum over the ranks of all nodes
    per_node divides N.
    """
    # >>>
    nodes = dist.get_world_size() // per_node
    mesh = init_device_mesh("cpu", (nodes, per_node), mesh_dim_names=("replicate", "shard"))
    within, across = mesh.get_group("shard"), mesh.get_group("replicate")

    def shard(weight: Tensor) -> Tensor:
        return weight.chunk(within.size())[within.rank()].clone()

    def gather(rows: Tensor) -> Tensor:
        weight = rows.new_empty(within.size() * len(rows), rows.shape[1])
        dist.all_gather_into_tensor(weight, rows, group=within)
        return weight

    def reduce(gradient: Tensor) -> Tensor:
        rows = gradient.new_empty(len(gradient) // within.size(), gradient.shape[1])
        dist.reduce_scatter_tensor(rows, gradient, group=within)
        dist.all_reduce(rows, group=across)
        return rows

    return shard, gather, reduce
    # <<<


# Why: ranks are numbered node by node, and in a mesh the last dimension varies fastest: so `shard`
# comes last. Of gradients of P bytes the reduce-scatter leaves P / per_node on each rank, and that
# is all that crosses. A transposed mesh gives the same numbers, and gathers weights over the slow
# link for every microbatch. It is easily made: FSDP goes by the order of a mesh's dimensions and
# not by their names (pytorch #161776). The first version of PyTorch's own HSDP all-reduced before
# it reduce-scattered (pytorch PR #84590).
#
# Questions: 1. DDP's ring over four ranks sends 2 x 3/4 P across the link. In HSDP two pairs
# all-reduce half of P each, which is P/2 for each pair and P for the node: 4.1 / 2.7 is about 1.5.
# 2. Those of two nodes with the fastest link between them. Weights then cross only this link, and
# gradients go between the two pairs of nodes.
