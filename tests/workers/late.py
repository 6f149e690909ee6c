"""Run train_cases.py where nothing has arrived before somebody waits for it.

    late.py tests/workers/train_cases.py ARGUMENTS ...

NCCL runs beside the host: outputs hold anything until `wait`, and inputs must not change before.
gloo hides both mistakes on small tensors. Here outputs are NaN until `wait`, and `wait` raises if
an input was changed in place meanwhile. Nothing is counted."""

import runpy
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves, tree_map

from perf import instruments
from plumbing import processes

IN_PLACE = "allreduce", "allreduce_coalesced", "broadcast", "send", "recv"
TWO_SIDED = """
allgather _allgather_base all_gather_single allgather_into_tensor_coalesced
all_gather_single_coalesced reduce_scatter _reduce_scatter_base reduce_scatter_single
reduce_scatter_tensor_coalesced reduce_scatter_single_coalesced alltoall_base all_to_all_single
alltoall gather scatter
""".split()  # by torch 2.11's and by later names: outputs come first, then inputs
DELAY = 0.002  # seconds after the arrival of what DDP waits for in C++


class LateWork(dist.Work):
    def __init__(self, work: dist.Work, name: str, outputs: list, arriving: list, inputs: list):
        super().__init__()
        self.work, self.name, self.arrives = work, name, list(zip(outputs, arriving, strict=True))
        self.versions = [(tensor, tensor._version) for tensor in inputs]

    def wait(self, timeout=None) -> bool:
        self.work.wait()
        self.finish()
        return True

    def finish(self, *_) -> list[torch.Tensor]:
        if any(tensor._version != version for tensor, version in self.versions):
            raise RuntimeError(f"an input of {self.name} was changed before it was waited for")
        for output, arrived in self.arrives:
            output.detach().copy_(arrived)
        outputs = [output for output, _ in self.arrives]
        self.arrives, self.versions = [], []
        return outputs

    def get_future(self) -> torch.futures.Future:
        def finish(_):
            time.sleep(DELAY)
            return self.finish()

        return self.work.get_future().then(finish)


class LateGroup(dist.ProcessGroup):
    def __init__(self, gloo, store: dist.Store, rank: int, size: int):
        super().__init__(rank, size)
        kind = dist.ProcessGroup.BackendType.GLOO
        self.real = dist.ProcessGroup(store, rank, size)
        self.real._register_backend(torch.device("cpu"), kind, gloo)
        self.real._set_default_backend(kind)

    def getBackendName(self) -> str:
        return "late"

    def setGroupName(self, name: str) -> None:
        self.given_name = name

    def getGroupName(self) -> str:
        return self.given_name

    def setGroupDesc(self, description: str) -> None:
        self.description = description

    def getGroupDesc(self) -> str:
        return self.description

    def barrier(self, *options) -> dist.Work:
        return self.real.barrier(*options)


def late(name: str):
    """Return the method of this name, which starts to send copies and returns a LateWork."""

    def start(self, first, *rest) -> LateWork:
        outputs = [] if name == "send" else tree_leaves(first)
        inputs = [] if name == "recv" else tree_leaves(first if name in IN_PLACE else rest[0])
        copies = tree_map(
            lambda x: x.detach().clone() if isinstance(x, torch.Tensor) else x, (first, *rest)
        )
        work = getattr(self.real, name)(*copies)
        for output in outputs:
            output.detach().fill_(torch.nan if output.is_floating_point() else 99)
        return LateWork(work, name, outputs, tree_leaves(copies[0])[: len(outputs)], inputs)

    return start


for name in (*IN_PLACE, *TWO_SIDED):
    if hasattr(dist.ProcessGroup, name):
        setattr(LateGroup, name, late(name))


def register(address: str | None) -> None:
    """Register a LateGroup under the name of the project's backend."""
    given, register_backend = {}, dist.Backend.register_backend
    dist.Backend.register_backend = lambda name, make, **options: given.update({name: make})
    register_gloo(address)
    dist.Backend.register_backend = register_backend

    def make(store, rank, size, timeout) -> LateGroup:
        gloo = given["one_thread_gloo"](store, rank, size, timeout)
        return LateGroup(gloo, store, rank, size)

    register_backend("one_thread_gloo", make, devices=["cpu"])


class Uncounted:
    """Stands for Counted, which does not know the groups within LateGroups."""

    def __init__(self, world):
        self.sent, self.attentions = {}, 0

    def __enter__(self):
        return self

    def __exit__(self, *error) -> None:
        pass


_, script, *arguments = sys.argv
sys.argv = [script, *arguments]
register_gloo, processes.register_gloo = processes.register_gloo, register
instruments.Counted = Uncounted
runpy.run_path(str(Path(__file__).with_name(Path(script).name)), run_name="__main__")
