"""Run train_cases.py where nothing has arrived before somebody waits for it.

    late.py tests/workers/train_cases.py ARGUMENTS ...

NCCL runs beside the host: outputs hold anything until `wait`, and inputs must not change before.
gloo hides both mistakes on small tensors. Here outputs are NaN until `wait`, and `wait` raises if
an input was changed in place meanwhile."""

import contextlib
import re
import runpy
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves, tree_map_only

from perf import instruments


class LateWork(dist.Work):
    def __init__(self, work: dist.Work, name: str, outputs: list, arriving: list, inputs: list):
        super().__init__()
        self.work = work
        self.name = name
        self.arrives = list(zip(outputs, arriving))
        self.versions = [(tensor, tensor._version) for tensor in inputs]

    def wait(self, timeout=None) -> bool:
        self.work.wait()
        return bool(self.finish())

    def finish(self, *_) -> list[torch.Tensor]:
        if any(tensor._version != version for tensor, version in self.versions):
            raise RuntimeError(f"an input of {self.name} was changed before it was waited for")
        outputs = []
        for output, arrived in self.arrives:
            output.detach().copy_(arrived)
            outputs.append(output)
        self.arrives = []
        self.versions = []
        return outputs

    def get_future(self) -> torch.futures.Future:  # for which DDP waits
        return self.work.get_future().then(self.finish)


class LateGroup(dist.ProcessGroup):
    supports_coalescing = False  # torch 2.14 asks a group's backend

    def __init__(self, gloo, store: dist.Store, rank: int, size: int):
        super().__init__(rank, size)
        kind = dist.ProcessGroup.BackendType.GLOO
        self.real = dist.ProcessGroup(store, rank, size)
        self.real._register_backend(torch.device("cpu"), kind, gloo)
        self.real._set_default_backend(kind)
        self.barrier = self.real.barrier
        self.name = ""

    def _get_backend(self, device: torch.device) -> "LateGroup":
        return self

    def setGroupName(self, name: str) -> None:
        self.name = name

    def getGroupName(self) -> str:
        return self.name


def late(name: str):
    """Return the method of this name, which starts to send copies and returns a LateWork. Its
    arguments are outputs and inputs, or only one of these."""

    def start(self, first, *rest) -> LateWork:
        in_place = re.match("allreduce|broadcast|send", name)
        outputs = [] if name == "send" else tree_leaves(first)
        inputs = [] if name == "recv" else tree_leaves(first if in_place else rest[0])
        copies = tree_map_only(torch.Tensor, lambda x: x.detach().clone(), (first, *rest))
        work = getattr(self.real, name)(*copies)
        for output in outputs:
            output.detach().fill_(torch.nan if output.is_floating_point() else 99)
        return LateWork(work, name, outputs, tree_leaves(copies[0]), inputs)

    return start


for name in dir(dist.ProcessGroup):  # by the names that this torch has for them
    if re.match("_?(all|reduce_scatter|broadcast|gather|scatter|send|recv$)", name):
        setattr(LateGroup, name, late(name))


def register(name: str, make_gloo, devices: list[str]) -> None:
    """Register a backend of the project as one that is late."""
    register_backend(name, lambda *given: LateGroup(make_gloo(*given), *given[:3]), devices=devices)


register_backend, dist.Backend.register_backend = dist.Backend.register_backend, register
# Counted does not know the groups within LateGroups.
instruments.Counted = type("Uncounted", (contextlib.nullcontext,), dict(sent={}, attentions=0))
sys.argv.pop(0)
runpy.run_path(str(Path(__file__).with_name("train_cases.py")), run_name="__main__")
