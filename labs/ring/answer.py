"""Why does an all-reduce cost 2 (n - 1)/n of its bytes, and not n?

Each rank has a tensor, and each needs the sum of all. If rank 0 added them up, everything would go
through its link while the other links are idle. In a ring each rank sends to one neighbour and
receives from the other, so that all links are busy all the time. For large tensors the sum then
takes hardly longer on 1,000 ranks than on 10. You have only sends and receives.

Read: the documentation of torch.distributed.isend, recv and batch_isend_irecv, and the docstring of
`collective_time` in costs/seconds.py.
"""

import torch
import torch.distributed as dist
from torch import Tensor


def ring_all_reduce(tensor: Tensor) -> Tensor:
    """Return the sum of all ranks' tensors, in the shape of `tensor`. Each rank calls this.

    tensor: of any shape, strides, dtype and number of elements S. It may be overwritten.
    Each of n ranks sends at most 2 (n - 1) ceil(S / n) elements. When the function returns, nothing
    is still being sent or received.
    """
    # >>>
    rank, size = dist.get_rank(), dist.get_world_size()
    left, right = (rank - 1) % size, (rank + 1) % size
    total = tensor.flatten().clone()
    chunks = total.tensor_split(size)  # views of total; their sizes differ by at most 1

    for step in range(2 * (size - 1)):
        outgoing = chunks[(rank - step) % size]
        incoming = chunks[(rank - step - 1) % size]  # the left rank's outgoing
        arrived = torch.empty_like(incoming)
        sending = dist.isend(outgoing, right)
        dist.recv(arrived, left)
        sending.wait()
        if step < size - 1:  # the first time around, a chunk collects the sum: reduce-scatter
            incoming += arrived
        else:  # the second time around, the finished chunk is copied: all-gather
            incoming.copy_(arrived)
    return total.view_as(tensor)
    # <<<


# Why: a chunk starts on one rank, and each rank that it comes to adds its own elements. After n - 1
# steps each rank has one finished chunk, and the finished chunks go around once more. In every step
# every rank sends 1/n of the tensor, so 2 (n - 1)/n of it in all, and no algorithm needs less.
# Through rank 0 it is n - 1 tensors on one link: so do ARENA's exercise, and the docstring of
# myAllreduce in UCSD's CSE 234. PyTorch's tutorial dist_tuto passes on whole tensors and leaves the
# chunks to the reader; kiankyars/microddp starts from a copy of it. The price of the ring is that
# its 2 (n - 1) messages follow one another: for small tensors, libraries use trees.
#
# Questions: 1. Where one link is slow: the ring crosses it with 2 (n - 1)/n of the tensor in each
# direction, and each chunk has one way. Sent straight, every rank of a node sends a chunk to each
# rank of the other, in both rounds: n/2 tensors with n/2 ranks a node. Where all links are alike
# and tensors small, fewer steps win.
# 2. Yes: one rank has finished each chunk, and the others copy it. If each adds in its own order,
# ranks differ in the last bits, and replicas drift apart.
