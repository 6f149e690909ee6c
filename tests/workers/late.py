"""Runs a script with a backend that is as late as a GPU's. Arguments: the script, and its own.

Beneath is gloo. But a collective works on copies of its inputs, its outputs are NaN until somebody
waits for it, and it fails there if an input or an output was changed meanwhile. So a missing wait,
a gradient that is changed under way, and a buffer that is used again too early are found, as they
are on a GPU, whose stream would read or overwrite what is still being sent."""

import runpy
import sys
import time
from datetime import timedelta
from functools import partial, partialmethod

import torch
import torch.distributed as dist
from torch import Tensor


def flat(tensors) -> list[Tensor]:
    """Return the tensors of lists of lists."""
    return [tensors] if isinstance(tensors, Tensor) else [t for each in tensors for t in flat(each)]


def copied(tensors):
    if isinstance(tensors, Tensor):
        return tensors.detach().clone(memory_format=torch.contiguous_format)
    return [copied(each) for each in tensors]


class LateWork(dist._Work):
    """A collective under way: `outputs` get the values of `copies` when it is waited for."""

    def __init__(self, name: str, inputs: list, outputs: list, copies: list, start):
        super().__init__()
        self.name, self.outputs, self.copies, self.finished = name, outputs, copies, False
        self.work = start()  # on copies, which must live as long as it runs
        for output in outputs:
            output.detach().fill_(float("nan") if output.is_floating_point() else 99)
        self.watched = [(tensor, tensor._version) for tensor in (*inputs, *outputs)]

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        self.work.wait()
        self.finish()
        return True

    def finish(self) -> None:
        if self.finished:
            return
        self.finished = True
        for tensor, version in self.watched:
            if tensor._version != version:
                raise RuntimeError(f"a tensor of {self.name} was changed before it was waited for")
        for output, copy in zip(self.outputs, self.copies):
            output.detach().copy_(copy)

    def get_future(self) -> torch.futures.Future:
        """DDP waits for this one instead, in another thread."""

        def finished(_) -> list[Tensor]:
            time.sleep(0.005)
            self.finish()
            return self.outputs

        return self.work.get_future().then(finished)


class LateGroup(dist.ProcessGroup):
    """A process group whose collectives are LateWorks, by the names that dist and C++ call."""

    supports_coalescing = False

    def __init__(self, gloo: dist.ProcessGroup, rank: int, size: int):
        super().__init__(rank, size)
        self.gloo = gloo

    def getBackendName(self) -> str:
        return "late"

    def _get_backend(self, device: torch.device) -> "LateGroup":
        return self

    @property
    def group_name(self) -> str:
        return dist.distributed_c10d._world.pg_names[self]

    def getGroupName(self) -> str:
        return self.group_name

    def in_place(self, name: str, tensors: list, *options) -> LateWork:
        copies = copied(tensors)
        start = partial(getattr(self.gloo, name), copies, *options)
        return LateWork(name, [], flat(tensors), flat(copies), start)

    def apart(self, name: str, outputs, inputs, *options) -> LateWork:
        copies = copied(outputs)
        start = partial(getattr(self.gloo, name), copies, copied(inputs), *options)
        return LateWork(name, flat(inputs), flat(outputs), flat(copies), start)

    def send(self, tensors: list, rank: int, tag: int) -> LateWork:
        copies = copied(tensors)
        return LateWork("send", tensors, [], copies, partial(self.gloo.send, copies, rank, tag))

    def barrier(self, *options):
        return self.gloo.barrier(*options)

    def all_gather_single_coalesced(self, outputs: list, inputs: list, *options) -> LateWork:
        (output,), (given,) = outputs, inputs
        return self.all_gather_single(output, given)

    def reduce_scatter_single_coalesced(self, outputs: list, inputs: list, options) -> LateWork:
        (output,), (given,) = outputs, inputs
        return self.reduce_scatter_single(output, given, options)


def give_names() -> None:
    """Add the collectives to LateGroup. torch 2.13 has new names for some."""
    for name in ("allreduce", "allreduce_coalesced", "broadcast", "recv"):
        setattr(LateGroup, name, partialmethod(LateGroup.in_place, name))
    apart = dict.fromkeys(("allgather", "reduce_scatter", "gather", "scatter"), ())
    apart |= {
        "_allgather_base": ("all_gather_single",),
        "_reduce_scatter_base": ("reduce_scatter_single",),
        "alltoall_base": ("all_to_all_single",),
    }
    for name, others in apart.items():
        for alias in (name, *others):
            setattr(LateGroup, alias, partialmethod(LateGroup.apart, name))
    LateGroup.allgather_into_tensor_coalesced = LateGroup.all_gather_single_coalesced
    LateGroup.reduce_scatter_tensor_coalesced = LateGroup.reduce_scatter_single_coalesced


def main() -> None:
    give_names()
    register = dist.Backend.register_backend

    def register_late(name: str, make, **options) -> None:
        def late(store, rank: int, size: int, timeout: timedelta) -> LateGroup:
            return LateGroup(make(store, rank, size, timeout), rank, size)

        register(name, late, **options)

    dist.Backend.register_backend = register_late
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
