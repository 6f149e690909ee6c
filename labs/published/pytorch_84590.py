"""hsdp, as in the first version of pytorch's PR #84590, which introduced it: the whole gradient is
all-reduced across nodes, and then cut within each."""

import torch
import torch.distributed as dist


def hybrid_sharding(per_node):
    rank, world = dist.get_rank(), dist.get_world_size()
    intra = [dist.new_group(list(range(s, s + per_node))) for s in range(0, world, per_node)]
    inter = [dist.new_group(list(range(j, world, per_node))) for j in range(per_node)]
    within, across = intra[rank // per_node], inter[rank % per_node]
    position = rank % per_node

    def shard(weight):
        rows = len(weight) // per_node
        return weight[position * rows : (position + 1) * rows].clone()

    def gather(rows):
        full = torch.empty(len(rows) * per_node, *rows.shape[1:], dtype=rows.dtype)
        dist.all_gather_into_tensor(full, rows, group=within)
        return full

    def reduce(gradient):
        dist.all_reduce(gradient, group=across)
        piece = torch.empty(len(gradient) // per_node, *gradient.shape[1:], dtype=gradient.dtype)
        dist.reduce_scatter_tensor(piece, gradient, group=within)
        return piece

    return shard, gather, reduce
