"""CUDA graphs: a GPU repeats a recorded step, all of whose kernels the host starts by one call.

A token of an 8B model takes some 1,600 kernels, most of them so short that the host needs longer to
start one than the GPU to run it. A step is recorded, without being run, and then repeated as a
whole:

    one by one    host  start  start  start  start        repeated    host  start
                  GPU     ▐k     ▐k     ▐k     ▐k                     GPU     ▐k▐k▐k▐k

A graph keeps addresses, shapes and Python's numbers as they were. So whatever changes from step
to step must lie in tensors that are written in place, and the host must not wait for any of them.

Use it for many short kernels of the same shapes: generation on one GPU. Avoid it where ranks
exchange messages or the host has to know a number, such as how many tokens an expert has: there a
step runs kernel by kernel.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Repeated:
    """A step that a GPU repeats from its third call on: in the first it may be compiled, and the
    second is watched for waits of the host. With other processes, or where the host waits, every
    call runs it as it is."""

    def __init__(self, step: Callable[[], None], device: torch.device):
        self.step = step
        self.device = device
        is_alone = not dist.is_initialized() or dist.get_world_size() == 1
        self.run = self.first if is_alone else step

    def __call__(self) -> None:
        self.run()

    def first(self) -> None:
        self.step()
        self.run = self.second

    def second(self) -> None:
        with Waits(self.device) as waits:
            self.step()
        self.run = self.step if waits.any else self.third

    def third(self) -> None:
        self.run = record(self.step)
        self.run()


class Waits(TorchDispatchMode):
    """Within this context, note in `any` whether the host waits for a number of the device."""

    # Operators of whose results the host reads the value, or the size.
    READS = ("_local_scalar_dense", "nonzero", "masked_select", "equal")
    READS += ("_unique2", "repeat_interleave")
    COPIES = ("_to_copy", "copy_")
    INDEXING = ("index", "index_put", "index_put_")

    def __init__(self, device: torch.device):
        super().__init__()
        self.device = device
        self.any = False

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        name = function.overloadpacket.__name__
        tensors = [leaf for leaf in tree_leaves((args, out)) if isinstance(leaf, Tensor)]
        if name in self.READS:
            self.any |= tensors[0].device.type == self.device.type
        elif name in self.COPIES:
            self.any |= len({tensor.device.type for tensor in tensors}) > 1
        elif name in self.INDEXING:  # by booleans: the host has to know how many are true
            _, indices, *values = args
            by_booleans = any(index.dtype == torch.bool for index in indices if index is not None)
            # But a number, which is on the CPU, is set wherever they are true, without a count.
            is_number = values and values[0].is_cpu and values[0].numel() == 1
            self.any |= by_booleans and not is_number
        return out


def record(step: Callable[[], None]) -> Callable[[], None]:
    """Record a step, without running it. Return a function that runs it."""
    graph = torch.cuda.CUDAGraph()
    # Other threads may use the GPU meanwhile, to save a checkpoint.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        step()
    return graph.replay
