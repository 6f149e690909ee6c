"""Would NCCL get stuck? What the ranks of a mesh send, run together, in a single process.

Each rank is emulated alone: torch's fake process group sends nothing. Its collectives and messages
are recorded in the order in which the host starts them: those that make the communicators, of a
training step, of an evaluation and of a sample. Then all ranks run them together, each in *one*
queue over all groups, the strictest order that NCCL could keep. A call ends when all its partners
have begun theirs; the messages of a batch are one call. Compiled blocks and streams are not seen.
"""

from collections import Counter, defaultdict
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from config import ParallelConfig
from evaluate import row_sums
from generate import generate
from model import Llama, LlamaConfig
from parallel import finish_step, parallelize, unsharded, with_mesh
from perf import instruments
from plumbing.processes import Process
from plumbing.shards import assign_shard
from techniques.context_parallel import share_sequences
from techniques.optimizers import make_optimizer
from train import accumulate


class Queue(TorchDispatchMode):
    """Records the calls of a rank. A call is a list of parts, one but for a batch of messages:
    (what partners match by, the partners, its name, its bytes)."""

    def __init__(self):
        super().__init__()
        self.calls = []
        self.numbers = defaultdict(dict)  # ranks -> group's name -> how many of these came before

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        name, group = op._opname, instruments._group_of(op, args)
        ranks = tuple(dist.get_process_group_ranks(group)) if group else ()
        if len(ranks) < 2 or name == "wait_tensor":
            return op(*args, **(kwargs or {}))
        numbers = self.numbers[ranks]
        key = ranks, numbers.setdefault(group.group_name, len(numbers))
        sizes = [sum(getattr(leaf, "nbytes", 0) for leaf in tree_leaves(arg)) for arg in args]
        if name in ("send", "recv_"):
            own, other = dist.get_rank(), ranks[args[2]]
            partners = (own, other) if name == "send" else (other, own)
            self.calls.append([((*key, partners), partners, "lone message", sizes[0])])
        else:  # all-to-alls differ in size by rank: Muon's, and messages of async TP
            is_all_to_all = name in ("alltoall_base_", "all_to_all_single")
            self.calls.append([(key, ranks, name, 0 if is_all_to_all else max(sizes))])
        if name == "alltoall_base_":  # the fake one refuses unequal sizes
            args = (args[0], args[0], args[2], args[3], args[3], *args[5:])
        result = op(*args, **(kwargs or {}))
        for tensor in tree_leaves((args, result)):
            if isinstance(tensor, torch.Tensor):
                tensor.data.zero_()  # nothing has arrived, and memory may hold NaN
        return result


def recorded(rank: int, parallel: ParallelConfig, tied: bool) -> list[list[tuple]]:
    """Return the calls of one rank, in the order in which it starts them."""
    layers, size, cpu = max(2, parallel.pp * parallel.stages_per_rank), 8, torch.device("cpu")
    config = LlamaConfig(64, layers, 4, 4, 96, vocab_size=64, tie_embeddings=tied)
    send_and_receive, queue = dist.batch_isend_irecv, Queue()

    def batch_isend_irecv(operations: list[dist.P2POp]) -> list[dist.Work]:
        before = len(queue.calls)
        works = send_and_receive(operations)
        messages = [message for (message,) in queue.calls[before:]]
        queue.calls[before:] = [[(*by, "message", nbytes) for *by, _, nbytes in messages]]
        return works

    def rows(n: int):
        return instruments.random_batch(config, n, 16)

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        with pytest.MonkeyPatch.context() as patch, queue:
            patch.setattr(dist, "batch_isend_irecv", batch_isend_irecv)
            world = with_mesh(Process(rank, size, rank, size, cpu), parallel)
            model = instruments.build_on_meta(config)
            runner = parallelize(model, world, partial(Llama.init_weights, assign=assign_shard))
            if instruments.needs_real_tensors(parallel):
                hook = instruments.all_reduce_at_once
                runner.register_comm_hook(world.mesh.get_group("replicate"), hook)
            optimizer = make_optimizer(model, parallel)
            loss = accumulate(runner, share_sequences(rows(max(2, parallel.pp)), world), 1, world)
            world.all_gather_scalars([loss])
            optimizer.step()
            finish_step(optimizer, world, step=parallel.every)  # DiLoCo's outer step, too
            windows = SimpleNamespace(batch=lambda numbers: rows(len(numbers)))
            row_sums(model, windows, range(25), 2, world)
            with unsharded(model, parallel):
                generate(model, [[1, 2, 3]], 2, temperature=0)
        return queue.calls
    finally:
        _clear_sharding_prop_cache()  # DTensor would go on with the groups of an equal mesh
        dist.destroy_process_group()


def problems(queues: list[list[list[tuple]]]) -> list[str]:
    """Return what goes wrong where these ranks run together; [] if nothing does."""
    found, places = [], defaultdict(dict)
    for rank, calls in enumerate(queues):
        count = Counter()
        for place, parts in enumerate(calls):
            for key, partners, *described in parts:
                count[key] += 1
                places[key, count[key], partners][rank] = place, described
    needs = [[set() for _ in calls] for calls in queues]  # the places that partners have to reach
    for (key, n, partners), at in places.items():
        if at.keys() != set(partners) or len({str(described) for _, described in at.values()}) > 1:
            found.append(f"call {n} of {key}, which {partners} should make: {at}")
        for rank, (place, _) in at.items():
            needs[rank][place] |= {(partner, at.get(partner, [1e9])[0]) for partner in partners}

    begun = [0] * len(queues)  # the place of the call that each rank has begun
    waiting = ended = range(len(queues))
    while ended:
        waiting = [rank for rank in waiting if begun[rank] < len(queues[rank])]
        ended = [r for r in waiting if all(begun[p] >= place for p, place in needs[r][begun[r]])]
        for rank in ended:
            begun[rank] += 1
    return found + [f"rank {rank} is stuck in {queues[rank][begun[rank]]}" for rank in waiting]
