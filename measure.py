"""Instruments: what is measured with, whatever is measured.

Timings on a shared machine wander. So what is compared runs interleaved in one process, and what is
reported is the median of the ratios of neighbours, with the quartiles. What is sent, and what is
held, is counted operator by operator; both also in a world of any size that is not there.
"""

import contextlib
import statistics
import time
import weakref
from collections.abc import Callable, Iterable
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from data import Batch
from lora import LoRA, adapt_loss, add_adapters, init_adapters
from model import Llama, LlamaConfig
from parallel import Split, World, arrange, local, parallelize, put_shard
from train import accumulate, drop_gradients, make_optimizer, train_step


def interleaved(contestants: dict[str, Callable], repeats: int) -> dict[str, list[float]]:
    """Seconds of every contestant in `repeats` rounds, after one round to warm up."""
    seconds = {name: [] for name in contestants}
    for turn in range(repeats + 1):
        for name, step in contestants.items():
            if dist.is_initialized():
                dist.barrier()  # nobody computes beside a step that is not theirs
            start = time.perf_counter()
            step()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            if turn:
                seconds[name].append(time.perf_counter() - start)
    return seconds


def table(
    seconds: dict[str, list[float]], tokens: int, more: dict[str, list[str]] | None = None
) -> str:
    """Markdown: each contestant's median time, and its ratio to the first's in the same round; then
    `more` columns, heading -> a cell for each."""
    more = more or {}
    headings = ["step", "seconds", "tokens/s", "ratio to the first (quartiles)", *more]
    lines = [f"| {' | '.join(headings)} |", f"|---|{'--:|' * (len(headings) - 1)}"]
    for (name, times), *cells in zip(seconds.items(), *more.values()):
        low, middle, high = quartiles(ratios(seconds, name))
        median = statistics.median(times)
        ratio = f"{middle:.3f} ({low:.3f}-{high:.3f})"
        cells = [name, f"{median:.3f}", f"{tokens / median:,.0f}", ratio, *cells]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def ratios(seconds: dict[str, list[float]], name: str) -> list[float]:
    """What each round took of the first contestant's time in it."""
    first = next(iter(seconds.values()))
    return [ours / theirs for ours, theirs in zip(seconds[name], first)]


def quartiles(values: list[float]) -> list[float]:
    """The lower, the median and the upper."""
    return statistics.quantiles(values, n=4) if len(values) > 1 else values * 3


def megabytes(nbytes: int | None) -> str:
    return "-" if nbytes is None else f"{nbytes / 1e6:,.2f} MB"


# ------------------------------------------------------------------------------------ what is sent

# What torch calls them -> what everybody does.
COLLECTIVES = {
    "allreduce_": "all-reduce",
    "all_reduce": "all-reduce",
    "allgather_": "all-gather",
    "_allgather_base_": "all-gather",
    "all_gather_into_tensor": "all-gather",
    "_reduce_scatter_base_": "reduce-scatter",
    "reduce_scatter_tensor": "reduce-scatter",
    "broadcast_": "broadcast",
}


class Counted(TorchDispatchMode):
    """Counts what a rank sends while it is entered, and how often attention runs forward.

    `sent` is as cost.predict_traffic gives it: (mesh dimension, collective) -> (calls, bytes);
    the world of all ranks, where it is no dimension of the mesh, is called so.
    """

    def __init__(self, world: World):
        super().__init__()
        self.dims = {tuple(range(world.size)): "world"}  # ranks that talk -> what they are
        for dim in world.mesh.mesh_dim_names:
            ranks = tuple(dist.get_process_group_ranks(world.mesh.get_group(dim)))
            self.dims[ranks] = dim if len(ranks) > 1 else "nobody"
        self.sent: dict[tuple[str, str], tuple[int, int]] = {}
        self.attentions = 0

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        out = op(*args, **(kwargs or {}))
        name = op._opname
        if op.namespace in ("c10d", "_c10d_functional") and name in COLLECTIVES:
            given = {slot.name: arg for slot, arg in zip(op._schema.arguments, args)}
            if "group_name" in given:
                group = dist.distributed_c10d._resolve_process_group(given["group_name"])
            else:
                group = dist.ProcessGroup.unbox(given["process_group"])
            key = self.dims[tuple(dist.get_process_group_ranks(group))], COLLECTIVES[name]
            calls, nbytes = self.sent.get(key, (0, 0))
            sides = [sum(getattr(t, "nbytes", 0) for t in tree_leaves(s)) for s in (*args, out)]
            self.sent[key] = calls + 1, nbytes + max(sides)
        self.attentions += "scaled_dot_product" in name and not name.endswith("_backward")
        return out


class Live(TorchDispatchMode):
    """Counts the bytes of tensors on this rank, `now` and at their `peak`: of those `held` from the
    start, and those that an operator has touched while it is entered, until they are freed.

    What a kernel needs for itself is not seen, nor is anything within a compiled block."""

    def __init__(self, held: Iterable[Tensor] = ()):
        super().__init__()
        self.storages: dict[int, tuple[weakref.ref, int]] = {}  # address -> storage, bytes
        self.now = self.peak = 0
        self.see(held)

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        if op.namespace in ("fsdp", "c10d"):  # FSDP lends and takes back memory by resizing it
            for address, (storage, _) in list(self.storages.items()):
                self.count(address, storage())
        out = op(*args, **(kwargs or {}))
        self.see(tree_leaves((args, kwargs, out)))
        return out

    def see(self, tensors: Iterable) -> None:
        for tensor in tensors:
            if isinstance(tensor, Tensor):
                storage = getattr(local(tensor), "elem", local(tensor)).untyped_storage()
                self.count(storage._cdata, storage)
        self.peak = max(self.peak, self.now)

    def count(self, address: int, storage: torch.UntypedStorage) -> None:
        if address not in self.storages:
            self.storages[address] = weakref.ref(storage, lambda _: self.forget(address)), 0
        known, nbytes = self.storages[address]
        self.storages[address] = known, storage.nbytes()
        self.now += storage.nbytes() - nbytes

    def forget(self, address: int) -> None:
        self.now -= self.storages.pop(address)[1]


def emulate(
    model: Llama, split: Split, share: int, microbatch: int, seq_len: int
) -> tuple[dict[tuple[str, str], tuple[int, int]], dict[str, int]]:
    """The first rank's part in a step of a whole cluster, in this process alone: what it sent, as
    cost.predict_traffic, and the bytes it held of each kind and at the peak, as cost.memory.

    The other ranks are not there: torch's fake process group sends nothing. And tensors have shapes
    but no contents, so that a laptop holds its part of a model of any size; but for DDP, whose C++
    wants contents. `model` is on `meta`; the rank's share of the step has so many sequences."""
    size = split.replicate * split.shard * split.tp
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
    meta, cpu = torch.device("meta"), torch.device("cpu")
    world = arrange(World(0, size, 0, size, cpu, split, mesh=None), replace(split, compile=False))
    if split.fully_sharded or size == 1:  # FSDP cuts what is still on meta
        runner = parallelize(model, replace(world, device=meta), fill=lambda model: None)
        mode = FakeTensorMode(allow_non_fake_inputs=True)
    else:
        runner = parallelize(model, world, fill=Llama.init_weights)
        runner.register_comm_hook(world.mesh.get_group("replicate"), all_reduce_at_once)
        mode = contextlib.nullcontext()
    with mode:
        if isinstance(mode, FakeTensorMode):
            model.to_empty(device=cpu)
            model.tie_weights()
        adapt_loss(model)
        optimizer = make_optimizer(model, lr=1e-4, weight_decay=0.1)
        tokens = torch.zeros(share, seq_len, dtype=torch.int64)
        batch = Batch(tokens, tokens, None, text_bytes=1)
        for _ in range(3):  # the first makes AdamW's moments, and DDP settles its buckets in two
            kinds = state_tensors(model, optimizer)
            with Counted(world) as counted, Live(tree_leaves(kinds)) as live:
                accumulate(runner, batch, microbatch, world)
                held = state_bytes(model, optimizer)
                optimizer.step()
                drop_gradients(optimizer, world)
    dist.destroy_process_group()
    return counted.sent, held | {"peak": live.peak}


def state_tensors(model: Llama, optimizer: torch.optim.Optimizer) -> dict[str, list[Tensor]]:
    """What a rank holds between steps, by kind."""
    parameters = list(model.parameters())
    moments = [t for state in optimizer.state.values() for t in state.values()]
    gradients = [p.grad for p in parameters if p.grad is not None]
    return {"parameters": parameters, "gradients": gradients, "optimizer": moments}


def state_bytes(model: Llama, optimizer: torch.optim.Optimizer) -> dict[str, int]:
    """The bytes of a rank's part of these."""
    kinds = state_tensors(model, optimizer)
    return {kind: sum(local(t).nbytes for t in tensors) for kind, tensors in kinds.items()}


def all_reduce_at_once(
    group: dist.ProcessGroup, bucket: dist.GradBucket
) -> torch.futures.Future[Tensor]:
    """What DDP does with a bucket, but for waiting: a fake group has no result to wait for."""
    dist.all_reduce(bucket.buffer(), group=group)
    done = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done


def on_meta(config: LlamaConfig, lora: LoRA | None) -> Llama:
    """A model, with adapters or without, that has shapes and takes no memory yet."""
    with torch.device("meta"):
        model = Llama(config)
        if lora:
            add_adapters(model, lora)
    return model


def step_of(
    config: LlamaConfig, batch: Batch, microbatch: int, world: World, lora: LoRA | None
) -> Callable:
    """The step of a new model, with adapters or without, split as the world says."""
    model = on_meta(config, lora)

    def fill(model: Llama) -> None:
        model.init_weights(put=put_shard)
        init_adapters(model, put=put_shard)

    runner = parallelize(model, world, fill)
    adapt_loss(model)
    optimizer = make_optimizer(model, lr=1e-4, weight_decay=0.1)
    return lambda: train_step(runner, optimizer, batch, microbatch, 1.0, world, step=0)
