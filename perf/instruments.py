"""Measuring instruments, and what the commands of bench.py share.

    run_in_turns        seconds of several contestants, a round after the other
    Counted             collectives of a rank and their payload
    Live                bytes of the tensors on a rank, and their peak
    silenced            a step whose collectives return at once
    emulate             the same counts for one rank of a cluster that does not exist

On a shared machine the speed changes from one minute to the next. So contestants take turns in one
process, and a result is the median, over all rounds, of the ratio of two times of the same round.
"""

import contextlib
import copy
import itertools
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import FakeProcessGroup
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import train
from config import PART_OF, ParallelConfig, Totals, Work
from costs.page import Traffic
from lora import LoRA, add_adapters, init_adapters, quantize_base
from model import Llama, LlamaConfig
from parallel import World, parallelize, with_mesh, zero_gradients
from plumbing.messages import UserError, is_rank_zero, with_progress
from plumbing.processes import Process
from plumbing.shards import allocate, assign_shard, to_local
from techniques import bfloat16_moments
from techniques.context_parallel import share_sequences
from techniques.optimizers import make_optimizer
from techniques.recompute import is_attention
from text.batch import Batch

# ---------------------------------------------------------------------------------------- timing

LEARNING_RATE = 1e-4  # of a measured step: the loss stays finite
# Name -> what runs a step. It may return a function that gives the seconds of parts of the step.
Contestants = dict[str, Callable[[], object]]
Rounds = dict[str, dict[str, list[float]]]  # contestant -> part -> its seconds in each round


def run_in_turns(contestants: Contestants, repeats: int) -> Rounds:
    """Call every contestant once in each of `repeats` rounds, after one that warms up and does not
    count. The part `step` is the whole call."""
    rounds = {name: defaultdict(list) for name in contestants}
    for i in with_progress(range(repeats + 1), "rounds"):
        for name, run_step in contestants.items():
            if dist.is_initialized():
                dist.barrier()  # a rank that still runs the previous contestant would disturb
            start = time.perf_counter()
            result = run_step()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            seconds = {"step": time.perf_counter() - start}
            if callable(result):  # time stamps, which are read when the clock has stopped
                seconds |= result()
            if i > 0:  # round 0 warms up
                for part, time_of_part in seconds.items():
                    rounds[name][part].append(time_of_part)
    return rounds


def check_writable(flag: str, file: Path | None) -> None:
    """Raise UserError if the file that a flag names is a directory, or in one that is missing."""
    if file and is_rank_zero():
        if not file.parent.is_dir():
            raise UserError(f"{flag} {file}: there is no directory {file.parent}; make it first")
        if file.is_dir():
            raise UserError(f"{flag} {file} is a directory: give a file in it")


# ----------------------------------------------------------------------- counting collectives


class Instrument(TorchDispatchMode):
    """A context that shows every operator that runs in it, and its result, to `see`. Avoid when
    blocks are compiled: under a dispatch mode they would run uncompiled."""

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        result = op(*args, **(kwargs or {}))
        self.see(op, args, kwargs, result)
        return result


# Each is run by several of torch's operators, such as all_gather_into_tensor and _allgather_base_.
# An operator whose name has none of these is counted under its own.
COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "broadcast")


class Counted(Instrument):
    """Counts this rank's collectives, and its forward runs of attention.

    `sent` is a Traffic of costs/page.py: (mesh dimension, collective) -> (calls, payload bytes).
    A group of all ranks that is no dimension of the mesh is called "world", that of the ranks with
    the same layers "stage"; one without a name, as all are without a `world`, is a tuple of ranks.
    Collectives in a group of one rank are not counted.
    """

    def __init__(self, world: World | None):
        super().__init__()
        self.sent: Traffic = {}
        self.attentions = 0
        self.group_names = {}  # ranks of a group -> its name
        self.own_groups = {}  # torch's names of groups whose ranks may also be a group of the mesh
        if world:
            self.own_groups = {group.group_name: dim for dim, group in world.own_groups.items()}
            groups = {"stage": world.stage_group, "world": None}
            groups |= {dim: world.mesh.get_group(dim) for dim in world.mesh.mesh_dim_names}
            for name, group in groups.items():  # the last of several names counts
                self.group_names[tuple(dist.get_process_group_ranks(group))] = name

    def see(self, op, args, kwargs, result) -> None:
        name = op._opname
        self.attentions += is_attention(name)
        group = _group_of(op, args)
        ranks = tuple(dist.get_process_group_ranks(group)) if group else ()
        if len(ranks) < 2 or name == "recv_":  # which is counted where it is sent
            return
        own_dim = self.own_groups.get(group.group_name)
        dim = own_dim or self.group_names.get(ranks, ranks)
        # The payload is the larger side: an all-gather's output, a reduce-scatter's input.
        payload = max(_bytes_of(operand) for operand in (*args, result))
        if name == "alltoall_base_":
            _, given, _, _, rows_to_each = args[:5]
            payload = given.nbytes
            if rows_to_each and not own_dim:  # of Muon's, what goes to others counts
                payload -= rows_to_each[group.rank()] * given[:1].nbytes
        key = dim, _collective(name, args)
        calls, nbytes = self.sent.get(key, (0, 0))
        self.sent[key] = calls + 1, nbytes + payload


def _bytes_of(operand) -> int:
    return sum(getattr(leaf, "nbytes", 0) for leaf in tree_leaves(operand))


def _collective(operator: str, args: tuple) -> str:
    """Return the name under which an operator is counted."""
    if operator == "alltoall_base_":
        return "all-to-all"
    if operator == "all_to_all_single" and sum(map(bool, args[2])) == 1:  # to one rank
        return "send"
    for kind in COLLECTIVES:
        if kind.replace("-", "") in operator.replace("_", ""):
            return kind
    return operator


def _group_of(op, args: tuple) -> dist.ProcessGroup | None:
    """Return the process group in which an operator communicates, None if it does not."""
    if op.namespace not in ("c10d", "_c10d_functional"):
        return None
    named = {argument.name: value for argument, value in zip(op._schema.arguments, args)}
    if "group_name" in named:
        return dist.distributed_c10d._resolve_process_group(named["group_name"])
    if "process_group" in named:
        return dist.ProcessGroup.unbox(named["process_group"])
    return None


# ---------------------------------------------------------------------------- counting memory


class Live(Instrument):
    """Counts the bytes of tensors on this rank: `now`, and at their `peak`.

    It counts the tensors `held` from the start, and every tensor that an operator touches, until
    the tensor's storage is freed. It does not see what a kernel allocates for itself."""

    def __init__(self, held: Iterable[Tensor] = ()):
        super().__init__()
        # Address of a storage -> a weak reference to it, and its bytes when it was last counted.
        self.storages: dict[int, tuple[weakref.ref, int]] = {}
        self.now = self.peak = 0
        self._count_tensors(held)

    def see(self, op, args, kwargs, result) -> None:
        if op.namespace in ("fsdp", "c10d"):  # FSDP allocates and frees by resizing storages
            for address, (reference, _) in list(self.storages.items()):
                storage = reference()
                if storage is not None:  # another thread may just have freed it
                    self._count_storage(address, storage)
        self._count_tensors(tree_leaves((args, kwargs, result)))

    def _count_tensors(self, values: Iterable) -> None:
        for value in values:
            if isinstance(value, Tensor) and value.device.type != "meta":  # that has no memory
                # What a DTensor or an AsyncCollectiveTensor wraps; to_local would be an operator.
                tensor = getattr(value, "_local_tensor", value)
                tensor = getattr(tensor, "elem", tensor)
                storage = tensor.untyped_storage()
                self._count_storage(storage._cdata, storage)
        self.peak = max(self.peak, self.now)

    def _count_storage(self, address: int, storage: torch.UntypedStorage) -> None:
        if address in self.storages:
            reference, counted = self.storages[address]
        else:
            reference = weakref.ref(storage, lambda _: self._forget(address))
            counted = 0
        self.storages[address] = reference, storage.nbytes()
        self.now += storage.nbytes() - counted

    def _forget(self, address: int) -> None:
        _, counted = self.storages.pop(address)
        self.now -= counted


# ------------------------------------------------------------------------------------- a training


@dataclass(frozen=True)
class Training:
    """A training as train.py sets it up. A call runs its step on the next batch."""

    world: World
    model: Llama  # what this rank has of it
    runner: nn.Module  # what parallelize returned
    optimizer: torch.optim.Optimizer
    batches: Iterator[Batch]  # this rank's sequences of each step
    microbatch: int
    clip: float = 1.0
    before_step: str = "data"  # what makes the batches
    loss_of: Callable | None = None  # those of a task
    count_of: Callable[[Batch], Tensor] = Batch.count

    def __call__(self) -> Totals:
        batch = next(self.batches)
        return self.update(self.accumulate(batch), batch)

    def accumulate(self, batch: Batch) -> Tensor:
        """Run forward and backward of a batch, and return the sum of its losses."""
        return train.accumulate(self.runner, batch, self.microbatch, self.world, self.loss_of)

    def update(self, loss: Tensor, batch: Batch) -> Totals:
        return train.update(
            self.optimizer,
            loss,
            self.count_of(batch),
            [0, 0, 0],  # bytes of text, tokens and FLOPs, which are not asked for here
            self.clip,
            self.world,
            step=1,
        )

    def count(self) -> tuple[Counted | None, dict[str, int | None]]:
        """Run a step without clipping under counters. Return what was counted, and the bytes of
        parameters, gradients and optimizer state, and at the `peak`. None stands for unknown: under
        counters compiled blocks would run uncompiled."""
        counted = live = None
        with contextlib.ExitStack() as counters:
            if not self.world.parallel.compile:
                state = tree_leaves(state_tensors(self.model, self.optimizer))
                counted = counters.enter_context(Counted(self.world))
                live = counters.enter_context(Live(state))
            batch = next(self.batches)
            if counted:
                counted.attentions = 0  # those of a reference or of sampling are no recomputation
            self.accumulate(batch)
            kinds = state_tensors(self.model, self.optimizer)
            self.optimizer.step()
            zero_gradients(self.optimizer, self.world)
        memory = {}
        for kind, tensors in kinds.items():
            memory[kind] = sum(to_local(tensor).nbytes for tensor in tensors)
        return counted, memory | {"peak": live and live.peak}


def state_tensors(model: Llama, optimizer: torch.optim.Optimizer) -> dict[str, list[Tensor]]:
    """Return the parameters, the gradients (as the optimizer sees them: ZeRO-1's are sharded), and
    the optimizer state."""
    updated = [p for group in optimizer.param_groups for p in group["params"]]
    return {
        "parameters": list(model.parameters()),
        "gradients": [p.grad for p in updated if p.grad is not None],
        "optimizer": [t for state in optimizer.state.values() for t in state.values()],
    }


class WithoutInit(TorchFunctionMode):
    """Leaves out the functions of torch.nn.init, which on meta begin by importing the compiler."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if getattr(function, "__module__", "") == "torch.nn.init":
            return args[0] if args else kwargs["tensor"]
        return function(*args, **(kwargs or {}))


def build_on_meta(config: LlamaConfig, lora: LoRA | None = None, **options) -> Llama:
    """Return a model, with adapters or without, whose parameters have shapes and no memory."""
    with torch.device("meta"), WithoutInit():
        model = config.build()
        if lora:
            add_adapters(model, lora, **options)
    return model


def random_batch(config: LlamaConfig, sequences: int, seq_len: int) -> Batch:
    """Return a batch of random tokens on the CPU, the same in every call and on every rank."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(config.vocab_size, (sequences, seq_len + 1), generator=generator)
    return Batch(tokens[:, :-1], tokens[:, 1:].contiguous(), None, 1)


def fill_randomly(model: Llama) -> None:
    """Give a model, or this rank's shards of it, random weights and new adapters."""
    device = next(model.parameters()).device

    def random_matrix(name: str) -> Tensor:
        layer = model.get_submodule(name.removesuffix(".weight"))
        return torch.randn(layer.out_features, layer.in_features, device=device) / 50

    model.init_weights(assign=assign_shard)
    quantize_base(model, random_matrix, assign_shard)
    init_adapters(model, assign=assign_shard, device=device)


def make_step(work: Work, world: World, batch: Batch) -> Training:
    """Return a training of a new model, with adapters or without, on `world`. In every step `batch`
    holds this rank's sequences."""
    model = copy.deepcopy(work.model)
    runner = parallelize(model, world, fill_randomly)
    optimizer = make_optimizer(model, world, LEARNING_RATE)
    return Training(world, model, runner, optimizer, itertools.repeat(batch), work.microbatch)


# --------------------------------------------------------------------------------------- silencing


@contextlib.contextmanager
def silenced(runner: nn.Module, world: World, dims: list[str]) -> Iterator[None]:
    """Make collectives over the mesh dimensions `dims` return at once, without communicating.

    The process group of each dimension gets torch's fake backend for a while. Results are garbage,
    which must never reach the weights. DDP's C++ code does not accept a fake backend, but `no_sync`
    stops its collectives."""
    device = world.device
    backend_types = dist.ProcessGroup.BackendType
    groups = {dim: world.mesh.get_group(dim) for dim in world.mesh.mesh_dim_names}
    groups |= world.own_groups
    with contextlib.ExitStack() as undo:
        for dim, group in groups.items():
            if PART_OF[dim] not in dims:
                continue
            if dim == "replicate" and isinstance(runner, DistributedDataParallel):
                undo.enter_context(runner.no_sync())
                continue
            real = group._get_backend(device)
            options = FakeProcessGroup.Options()
            fake = FakeProcessGroup._create_internal(group.rank(), group.size(), options)
            # A type that no real backend has: a group keeps the first backend of each type.
            group._register_backend(device, backend_types.UNDEFINED, fake)
            real_type = getattr(backend_types, real.name().upper())
            undo.callback(group._register_backend, device, real_type, real)
        yield


# --------------------------------------------------------------------------------- emulating


def emulate(work: Work, pp_rank: int = 0) -> tuple[Traffic, dict[str, int]]:
    """Run training steps of one rank of a cluster, in this process alone, and count the last.
    It is the first rank of those that are `pp_rank` along pp; blocks are not compiled.

    Returns what `sends` of costs/page.py predicts, and of what `holds` does the bytes of each kind
    of state and of the `peak`.

    The other ranks do not exist: torch's fake process group sends nothing. Tensors are fake, too:
    they have shapes and no contents, so that a laptop holds a rank's part of a model of any size.
    """
    parallel = replace(work.parallel, compile=False)
    size = parallel.size
    rank = pp_rank * size // parallel.pp
    process = Process(rank, size, local_rank=0, per_node=size, device=torch.device("cpu"))
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        return _few_steps(work, with_mesh(process, parallel))
    finally:
        from torch.distributed.tensor.debug import _clear_sharding_prop_cache  # and the compiler

        _clear_sharding_prop_cache()  # DTensor would go on with the groups of an equal mesh
        dist.destroy_process_group()


def _few_steps(work: Work, world: World) -> tuple[Traffic, dict[str, int]]:
    model = copy.deepcopy(work.model)
    parallel = world.parallel
    tokens = torch.zeros(work.sequences, work.seq_len, dtype=torch.int64)
    batch = share_sequences(Batch(tokens, tokens, None, 1), world)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    if needs_real_tensors(parallel):
        mode = contextlib.nullcontext()
        runner = parallelize(model, world, lambda model: model.init_weights())
        runner.register_comm_hook(world.mesh.get_group("replicate"), all_reduce_at_once)
    else:

        def allocate_fake(model: Llama) -> None:  # not the meshes, which need contents
            with mode:
                allocate(model, world.device)

        runner = parallelize(model, replace(world, device=torch.device("meta")), allocate_fake)
    # AdamW's update in parts would take minutes, and it neither sends nor keeps anything.
    skipped = mock.patch.object(bfloat16_moments, "make_update", lambda *_: lambda *_: None)
    with mode, skipped:
        optimizer = make_optimizer(model, world)
        training = Training(
            world, model, runner, optimizer, itertools.repeat(batch), work.microbatch
        )
        # Step 1 makes the optimizer's state, and step 2 DDP's final buckets. For both a microbatch
        # is enough; it has no name, so that it is gone when the last step is counted. A pipeline
        # needs all of them: its schedule may be a file for just so many.
        for _ in range(2 if needs_real_tensors(parallel) else 1):
            training.accumulate(
                batch if parallel.pp > 1 else batch.microbatches(work.microbatch)[0]
            )
            optimizer.step()
            zero_gradients(optimizer, world)
        counted, memory = training.count()
    return counted.sent, memory


def needs_real_tensors(parallel: ParallelConfig) -> bool:
    """Return whether an emulation cannot use fake tensors: DDP's C++ code reads the contents."""
    return parallel.replicate > 1 and parallel.strategy.wrapper == "ddp"


def all_reduce_at_once(
    group: dist.ProcessGroup, bucket: dist.GradBucket
) -> torch.futures.Future[Tensor]:
    """All-reduce a bucket of DDP without waiting: a fake group's collective never finishes."""
    dist.all_reduce(bucket.buffer(), group=group)
    done = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done
