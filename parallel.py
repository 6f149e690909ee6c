"""One training over many processes: how they find each other, and how the model is split over them.

    torchrun train.py                                      one process
    torchrun --nproc-per-node 8 train.py                   one node, a process for each of 8 GPUs
    torchrun --nnodes 2 --nproc-per-node 8 --node-rank 0 \
             --master-addr HOST train.py                   two nodes; on the second, --node-rank 1

Every process runs the same script from the top; `rank` is the only thing that tells them apart.
One process is a world of one: it takes the same path, with collectives that have nobody to talk to.
"""

import argparse
import contextlib
import math
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from model import Llama, UserError

TIMEOUT = timedelta(minutes=10)  # a collective that waits longer ends the run


@dataclass(frozen=True)
class World:
    """Who this process is among `size` processes, and the device it computes on."""

    rank: int
    size: int
    local_rank: int
    device: torch.device
    mesh: DeviceMesh

    def one_first(self, name: str, make: Callable):
        """make(), on one process of each node before the others: it fills a cache, they read it.

        They wait at the store and not in a collective, which would give up after TIMEOUT."""
        key = f"{name} made on node {os.environ.get('GROUP_RANK', 0)}"
        if self.local_rank == 0:
            made = make()
            _store().set(key, "")
            return made
        _store().wait([key], timedelta(days=7))
        return make()

    def gather(self, values: list[float | torch.Tensor]) -> torch.Tensor:
        """Everybody's row of a few numbers, [size, len(values)] float64 on every rank."""
        row = torch.zeros(len(values), dtype=torch.float64, device=self.device)
        for slot, value in zip(row, values):
            slot.add_(value)  # a number goes with the kernel: no copy that waits for the device
        rows = [torch.empty_like(row) for _ in range(self.size)]
        dist.all_gather(rows, row)  # 8 bytes a number and rank, over the whole world
        return torch.stack(rows)


def set_up() -> World:
    """Join the other processes that torchrun started; without torchrun, be a world of one."""
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    device = torch.device("cpu")
    if torch.cuda.is_available():
        wanted, gpus = int(os.environ.get("LOCAL_WORLD_SIZE", "1")), torch.cuda.device_count()
        if wanted > gpus:
            raise UserError(f"--nproc-per-node {wanted} on a node of {gpus} GPUs: at most {gpus}")
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
    if "RANK" in os.environ:
        store, rank, size = next(dist.rendezvous("env://"))
        # After a restart by torchrun the store still holds the keys of those who died.
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        store = dist.PrefixStore(f"attempt {attempt}", store)
    else:
        store, rank, size = dist.HashStore(), 0, 1
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=TIMEOUT)
    mesh = init_device_mesh(device.type, (size,), mesh_dim_names=("replicate",))
    return World(rank, size, local_rank, device, mesh)


def run(main: Callable[[], None]) -> None:
    """Run a script. A user's mistake ends it with one line and exit code 2, on all ranks.

    Most mistakes are met by every rank alike, some by one: whoever comes first speaks, and ranks
    that lose it in the middle of a collective know by the store that all is said."""
    try:
        main()
    except UserError as error:
        if _count_errors(1) == 1:
            print(f"error: {error}", file=sys.stderr, flush=True)
        sys.exit(2)
    except Exception:
        if _count_errors(0) > 0:
            sys.exit(2)
        raise
    if dist.is_initialized():
        dist.destroy_process_group()


def _count_errors(new: int) -> int:
    """Errors of users that ranks have met so far, `new` ones of this rank included."""
    if dist.is_initialized():
        return _store().add("errors", new)
    # Before they join, the ranks of a node meet the same: the first of them speaks.
    return new if os.environ.get("LOCAL_RANK", "0") == "0" else 2 * new


def _store() -> dist.Store:
    """Where ranks leave each other small messages without meeting in a collective."""
    return dist.distributed_c10d._get_default_store()


def parallelize(
    model: Llama,
    world: World,
    fill: Callable[[Llama], None],
    dtype: torch.dtype = torch.float32,
    compile_blocks: bool = False,
) -> nn.Module:
    """Put a model that was built on `meta` to work on this world: the one place that composes.

    `fill` gives the parameters their values. Returns what a training step calls; `model` itself
    stays the plain Llama, for its parameters' names, for evaluation and for generation.
    """
    if dtype == torch.float64:
        model.double()
    model.to_empty(device=world.device)
    model.tie_weights()  # to_empty makes two of a shared parameter
    fill(model)
    if dtype == torch.bfloat16:
        mixed_precision(model)
    if compile_blocks:
        for block in model.layers.values():
            block.compile()  # one graph serves all blocks; parameters keep their names
    return data_parallel(model, world)


def mixed_precision(model: Llama) -> None:
    """Compute in bfloat16 what gains from it, chiefly matrix products; keep the rest in float32.

    Parameters, gradients and AdamW's moments stay float32: an update is often smaller than the
    step between two neighbouring bfloat16 numbers, and would be lost.
    """
    model.compute_dtype = torch.bfloat16


def data_parallel(model: Llama, world: World) -> nn.Module:
    """DDP: every rank holds the whole model and works on its own part of the batch.

        rank 0  [ weights ] [ gradients ] [ AdamW ]      sequences 0..b-1
        rank 1  [ weights ] [ gradients ] [ AdamW ]      sequences b..2b-1

    Backward all-reduces gradients in buckets while it still computes: 4 bytes a parameter, once a
    step, over the replicate dimension. Nothing else is sent. It is the fastest split wherever a
    whole copy (16 bytes a parameter in float32: weight, gradient, two moments) fits on a device.

    DDP averages over ranks where a step needs a sum; the step multiplies by their number.
    """
    if world.size == 1:
        return model
    return DistributedDataParallel(
        model,
        device_ids=[world.device] if world.device.type == "cuda" else None,
        process_group=world.mesh.get_group("replicate"),
        init_sync=False,  # weights are a function of the seed or the checkpoint: alike already
        gradient_as_bucket_view=True,  # one copy of the gradients instead of two
    )


def synchronize(runner: nn.Module, wanted: bool) -> contextlib.AbstractContextManager:
    """Context for a microbatch's forward and backward: whether its backward sends gradients.

    Only a step's last microbatch has to: until then they add up where they are."""
    if wanted or not isinstance(runner, DistributedDataParallel):
        return contextlib.nullcontext()
    return runner.no_sync()


# ----------------------------------------------------------------------------------- command line


class Parser(argparse.ArgumentParser):
    """argparse whose complaints are a UserError: one line, once, and not a page from every rank."""

    def error(self, message: str) -> None:
        raise UserError(f"{message}; see --help")


def positive(text: str) -> int:
    """Type of a flag that counts something."""
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"expected a whole number above 0, got '{text}'")
    return int(text)


def count(text: str) -> int:
    """Type of a flag that counts something, or has a meaning at 0."""
    return 0 if text == "0" else positive(text)


def amount(text: str) -> float:
    """Type of a flag that measures something."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 <= number < math.inf:
        raise argparse.ArgumentTypeError(f"expected a number of at least 0, got '{text}'")
    return number
