"""Would NCCL get stuck? What the ranks of a mesh send, run together, in a single process.

Each rank is emulated alone: torch's fake process group sends nothing. Its collectives and messages
are recorded in the order in which the host starts them: those that make the communicators, of a
training step, of an evaluation and of a sample. Then all ranks run them together, each in *one*
queue over all groups, the strictest order that NCCL could keep. A call ends when all its partners
have begun theirs; the messages of a batch are one call. It sees neither compiled blocks
nor streams."""

from collections import Counter, defaultdict
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from config import ParallelConfig
from evaluate import evaluate
from generate import generate
from model import Llama, LlamaConfig
from parallel import finish_step, parallelize, unsharded, with_mesh
from perf.instruments import (
    _group_of,
    all_reduce_at_once,
    build_on_meta,
    needs_real_tensors,
    random_batch,
)
from plumbing.processes import Process
from plumbing.shards import assign_shard
from techniques.context_parallel import share_sequences
from techniques.optimizers import make_optimizer
from text.batch import Batch
from train import accumulate

SEQ = 16
UNEQUAL = "all_to_all_single", "alltoall_base_"  # Muon's differ in size by rank


class Queue(TorchDispatchMode):
    """Records the calls of a rank. A call is a list of parts, one but for a batch of messages:
    (what partners match by, the partners, its name, its bytes)."""

    def __init__(self):
        super().__init__()
        self.calls, self.batch = [], None
        self.numbers = defaultdict(dict)  # ranks -> group's name -> how many of these came before

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        name, group = op._opname, _group_of(op, args)
        ranks = tuple(dist.get_process_group_ranks(group)) if group else ()
        if len(ranks) < 2 or name == "wait_tensor":
            return op(*args, **(kwargs or {}))
        numbers = self.numbers[ranks]
        key = ranks, numbers.setdefault(group.group_name, len(numbers))
        sizes = [sum(getattr(leaf, "nbytes", 0) for leaf in tree_leaves(arg)) for arg in args]
        if name in ("send", "recv_"):
            own, other = dist.get_rank(), ranks[args[2]]
            partners = (own, other) if name == "send" else (other, own)
            kind = "message" if self.batch is not None else "message outside of a batch"
            part = ((*key, partners), partners, kind, sizes[0])
        else:
            part = (key, ranks, name, name not in UNEQUAL and max(sizes))
        if self.batch is None:
            self.calls.append([part])
        else:
            self.batch.append(part)
        if name == "alltoall_base_":  # the fake one refuses unequal sizes
            args = (args[0], args[0], args[2], args[3], args[3], *args[5:])
        result = op(*args, **(kwargs or {}))
        for tensor in tree_leaves((args, result)):
            if isinstance(tensor, torch.Tensor):
                tensor.data.zero_()  # nothing has arrived, and memory may hold NaN
        return result

    def batched(self, send_and_receive):
        """Return batch_isend_irecv, whose messages become one call."""

        def batch_isend_irecv(operations):
            self.batch = []
            works = send_and_receive(operations)
            self.calls.append(self.batch)
            self.batch = None
            return works

        return batch_isend_irecv


class Windows:
    """Random rows to evaluate: for up to 8 ranks two batches of 2 rows."""

    def __init__(self, config: LlamaConfig):
        self.config = config

    def __len__(self) -> int:
        return 25

    def batch(self, rows: list) -> Batch:
        return random_batch(self.config, len(rows), SEQ)


def recorded(rank: int, parallel: ParallelConfig, tied: bool = False) -> list[list[tuple]]:
    """Return the calls of one rank, in the order in which it starts them."""
    layers = max(2, parallel.pp * parallel.stages_per_rank)
    config = LlamaConfig(64, layers, 4, 4, 96, vocab_size=64, tie_embeddings=tied)
    size, cpu = parallel.size, torch.device("cpu")
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        with pytest.MonkeyPatch.context() as patch, Queue() as queue:
            patch.setattr(dist, "batch_isend_irecv", queue.batched(dist.batch_isend_irecv))
            world = with_mesh(Process(rank, size, rank, size, cpu), parallel)
            model = build_on_meta(config)
            runner = parallelize(model, world, partial(Llama.init_weights, assign=assign_shard))
            if needs_real_tensors(parallel):
                runner.register_comm_hook(world.mesh.get_group("replicate"), all_reduce_at_once)
            optimizer = make_optimizer(model, parallel)
            batch = share_sequences(random_batch(config, max(2, parallel.pp), SEQ), world)
            loss = accumulate(runner, batch, 1, world)
            world.all_gather_scalars([loss])
            optimizer.step()
            finish_step(optimizer, world, step=parallel.every)  # DiLoCo's outer step, too
            evaluate(model, Windows(config), len(Windows(config)), 2, world)
            with unsharded(model, parallel):
                generate(model, [[1, 2, 3]], 2, temperature=0)
        return queue.calls
    finally:
        _clear_sharding_prop_cache()  # DTensor would go on with the groups of an equal mesh
        dist.destroy_process_group()


def problems(queues: list[list[list[tuple]]]) -> list[str]:
    """Return what goes wrong where these ranks run together; [] if nothing does."""
    found, places, keys = [], defaultdict(dict), []
    for rank, calls in enumerate(queues):
        count = Counter()
        keys.append([])  # of this rank's calls, with their partners
        for place, parts in enumerate(calls):
            keys[rank].append([])
            for key, partners, *described in parts:
                count[key] += 1
                keys[rank][place].append(((key, count[key]), partners))
                places[key, count[key]][rank] = place, described
    for (key, n), at in places.items():
        *_, partners = key if len(key) == 3 else key[:1]
        if at.keys() != set(partners):
            found.append(f"call {n} of {key}: made by {sorted(at)} of {partners}")
        if len({str(described) for _, described in at.values()}) > 1:
            found.append(f"call {n} of {key} differs: {at}")

    begun = [0] * len(queues)  # the place of the call that each rank has begun

    def can_end(rank: int) -> bool:
        return all(
            partner in places[key] and begun[partner] >= places[key][partner][0]
            for key, partners in keys[rank][begun[rank]]
            for partner in partners
        )

    def waiting() -> list[int]:
        return [rank for rank, calls in enumerate(keys) if begun[rank] < len(calls)]

    while ready := [rank for rank in waiting() if can_end(rank)]:
        for rank in ready:
            begun[rank] += 1
    return found + [f"rank {r} is stuck in {queues[r][begun[r]]}" for r in waiting()]
