"""Two nodes, and a slow link between them: who sits next to whom?

Within a node ranks talk fast, between nodes slowly. So each node shares one copy of the weights
among its ranks, and gathers them from neighbours. Across nodes go only gradients, already summed
and cut to slices. Other arrangements give the same numbers, many times slower.

Read: the pictures in the docstring of `fsdp` in parallel.py, and the documentation of
torch.distributed.device_mesh.init_device_mesh.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh


def hybrid_sharding(per_node: int) -> tuple[Callable, Callable, Callable]:
    """Return three functions: shard, gather and reduce. Each rank calls this once.

    per_node: number of ranks in a node. Ranks 0 .. per_node - 1 are the first node, and so on.
    shard(weight [N, D]) -> [n, D]: the rows that this rank keeps; a node keeps each row once
    gather(rows [n, D]) -> weight [N, D], from the ranks of the node
    reduce(gradient [N, D]) -> [n, D]: this rank's rows of the sum over the ranks of all nodes
    per_node divides N.
    """
    raise NotImplementedError("about 19 lines")
