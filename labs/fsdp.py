"""What does it cost to lend a slice?

Each rank keeps only some rows of every matrix. It borrows the others just before the matrix is
used, and gives them back at once: in forward, and once more in backward. So more is sent than by
DDP, and no whole matrix is kept from forward to backward.

Read: the documentation of torch.autograd.Function, then the docstring of `fsdp` in parallel.py.
"""

import torch
import torch.distributed as dist
from torch import Tensor


def sharded_linear(x: Tensor, rows: Tensor, out: int) -> Tensor:
    """Return x @ weight.T [n, out], and let backward give x and rows their gradients.

    x [n, in]: this rank's own
    rows: this rank's rows of weight [out, in], cut as weight.chunk(number of ranks) cuts: all have
        ceil(out / ranks) rows but the last ones, which may have fewer
    The gradient of rows is the sum over all ranks. The whole weight is not kept until backward.
    """
    raise NotImplementedError("about 26 lines")
