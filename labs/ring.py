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

    tensor: of any shape and number of elements S. It may be overwritten.
    Each of n ranks sends at most 2 (n - 1) ceil(S / n) elements. When the function returns, nothing
    is still being sent or received.
    """
    raise NotImplementedError("about 17 lines")
