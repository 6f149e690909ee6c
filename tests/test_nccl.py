"""What NCCL needs of us, shown without a GPU: an order of calls in which no rank gets stuck, and a
wait before what has arrived is used.

Each rank is emulated alone: torch's fake process group sends nothing. Its collectives and messages
are recorded in the order in which the host starts them: those that make the communicators, of a
training step, of an evaluation and of a sample. Then all ranks run them together, each in *one*
queue over all groups, the strictest order that NCCL could keep. Experts are left out, since a rank
alone does not know what others send it. A call ends when all its partners
have begun theirs; the messages of a batch are one call. Compiled blocks and streams are not seen.
"""

import itertools
import os
from collections import Counter, defaultdict
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from conftest import slow_after, with_fault
from exact import FOUR_HEADS, GROUPED, assert_trained, case, train
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from config import ParallelConfig
from model import Llama, LlamaConfig
from parallel import parallelize, weights_gathered, with_mesh
from perf import instruments
from plumbing.processes import Process
from plumbing.shards import assign_shard
from runs.scores import row_sums
from techniques.context_parallel import share_sequences
from techniques.decoding import generate
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
        name = op._opname
        group = instruments._group_of(op, args)
        ranks = tuple(dist.get_process_group_ranks(group)) if group else ()
        if len(ranks) < 2 or name == "wait_tensor":
            return op(*args, **(kwargs or {}))
        numbers = self.numbers[ranks]
        number = numbers.setdefault(group.group_name, len(numbers))
        sizes = [sum(getattr(leaf, "nbytes", 0) for leaf in tree_leaves(arg)) for arg in args]
        if name in ("send", "recv_"):
            own = dist.get_rank()
            other = ranks[args[2]]
            partners = (own, other) if name == "send" else (other, own)
            key = ranks, number, partners
            self.calls.append([(key, partners, "lone message", sizes[0])])
        else:  # all-to-alls differ in size by rank: Muon's, and messages of async TP
            is_all_to_all = name in ("alltoall_base_", "all_to_all_single")
            nbytes = 0 if is_all_to_all else max(sizes)
            key = ranks, number
            self.calls.append([(key, ranks, name, nbytes)])
        if name == "alltoall_base_":  # the fake one refuses unequal sizes
            args = (args[0], args[0], args[2], args[3], args[3], *args[5:])
        result = op(*args, **(kwargs or {}))
        for tensor in tree_leaves((args, result)):
            if isinstance(tensor, torch.Tensor):
                tensor.data.zero_()  # nothing has arrived, and memory may hold NaN
        return result


def recorded(rank: int, name: str) -> list[list[tuple]]:
    """Return the calls of one rank of eight in one of MESHES, in the order in which it starts
    them."""
    parallel = ParallelConfig(**MESHES[name])
    layers = max(2, parallel.pp * parallel.stages_per_rank)
    config = LlamaConfig(64, layers, 4, 4, 96, vocab_size=64, tie_embeddings="tied" in name)
    send_and_receive = dist.batch_isend_irecv
    queue = Queue()

    def batch_isend_irecv(operations: list[dist.P2POp]) -> list[dist.Work]:
        before = len(queue.calls)
        works = send_and_receive(operations)
        messages = [message for (message,) in queue.calls[before:]]
        queue.calls[before:] = [[(*by, "message", nbytes) for *by, _, nbytes in messages]]
        return works

    def rows(n: int):
        return instruments.random_batch(config, n, 16)

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=8)
    process = Process(rank, 8, local_rank=rank, per_node=8, device=torch.device("cpu"))
    try:
        with pytest.MonkeyPatch.context() as patch, queue:
            patch.setattr(dist, "batch_isend_irecv", batch_isend_irecv)
            world = with_mesh(process, parallel)
            model = instruments.build_on_meta(config)
            runner = parallelize(model, world, partial(Llama.init_weights, assign=assign_shard))
            if instruments.needs_real_tensors(parallel):
                hook = instruments.all_reduce_at_once
                runner.register_comm_hook(world.mesh.get_group("replicate"), hook)
            optimizer = make_optimizer(model, world)
            batch = share_sequences(rows(max(2, parallel.pp)), world)
            loss = accumulate(runner, batch, 1, world)
            world.all_gather_scalars([loss])
            optimizer.step()
            windows = SimpleNamespace(batch=lambda numbers: rows(len(numbers)))
            row_sums(model, windows, range(25), 2, world)
            with weights_gathered(model, parallel):
                generate(model, [[1, 2, 3]], 2, temperature=0)
        return queue.calls
    finally:
        _clear_sharding_prop_cache()  # DTensor would go on with the groups of an equal mesh
        dist.destroy_process_group()


def problems(queues: list[list[list[tuple]]]) -> list[str]:
    """Return what goes wrong where these ranks run together; [] if nothing does."""
    found = []
    places = defaultdict(dict)
    for rank, calls in enumerate(queues):
        count = Counter()
        for place, parts in enumerate(calls):
            for key, partners, *described in parts:
                count[key] += 1
                places[key, count[key], partners][rank] = place, described
    needs = [[set() for _ in calls] for calls in queues]  # the places that partners have to reach
    never = 1e9, None
    for (key, n, partners), at in places.items():
        descriptions = {str(described) for _, described in at.values()}
        if at.keys() != set(partners) or len(descriptions) > 1:
            found.append(f"call {n} of {key}, which {partners} should make: {at}")
        for rank, (place, _) in at.items():
            for partner in partners:
                place_of_partner, _ = at.get(partner, never)
                needs[rank][place].add((partner, place_of_partner))

    begun = [0] * len(queues)  # the place of the call that each rank has begun
    waiting = range(len(queues))
    some_ended = True
    while some_ended:
        waiting = [rank for rank in waiting if begun[rank] < len(queues[rank])]
        ended = []
        for rank in waiting:
            needed = needs[rank][begun[rank]]
            if all(begun[partner] >= place for partner, place in needed):
                ended.append(rank)
        for rank in ended:
            begun[rank] += 1
        some_ended = bool(ended)
    for rank in waiting:
        call = queues[rank][begun[rank]]
        found.append(f"rank {rank} is stuck in {call}")
    return found


PIPELINE = dict(dp="fsdp", pp=4, shard=2)
INTERLEAVED = dict(schedule="interleaved", stages_per_rank=2)
MESHES = {
    "pp, tied": PIPELINE,
    "ddp": dict(replicate=8),
    "fsdp, all": dict(dp="fsdp", shard=8, reshard="all"),
    "hsdp": dict(dp="hsdp", replicate=2, shard=4),
    "zero1": dict(dp="zero1", replicate=8),
    "zero1, muon": dict(dp="zero1", replicate=8, optimizer="muon"),
    "tp": dict(dp="fsdp", shard=4, tp=2),
    "tp, muon": dict(dp="fsdp", shard=4, tp=2, optimizer="muon"),
    "tp, float8": dict(dp="fsdp", shard=4, tp=2, float8="tensorwise"),
    "async tp": dict(dp="fsdp", shard=2, tp=4, async_tp=True),
    "cp, full": dict(dp="fsdp", shard=8, cp=4, checkpointing="full"),
    "cp x tp": dict(dp="fsdp", shard=4, cp=2, tp=2),
    "pp": PIPELINE,
    "pp, gpipe": PIPELINE | dict(schedule="gpipe"),
    "pp, interleaved": dict(dp="fsdp", pp=2, shard=2, tp=2) | INTERLEAVED,
    "pp x cp x tp": dict(dp="fsdp", pp=2, shard=2, cp=2, tp=2),
    "pp, muon": dict(dp="hsdp", pp=2, replicate=2, shard=2, optimizer="muon"),
}


@pytest.mark.parametrize("name", slow_after(3, MESHES))
def test_no_rank_gets_stuck(name):
    """Nor does a group begin later than in with_mesh, or send messages outside of a batch."""
    queues = [recorded(rank, name) for rank in range(8)]
    assert problems(queues) == []
    for calls in queues:
        groups = set()
        for call in calls:
            for (ranks, number, *_), _, kind, nbytes in call:
                assert kind != "lone message"
                if (ranks, number) not in groups:
                    assert (kind, nbytes) == ("allreduce_", 4)
                groups.add((ranks, number))
        assert groups


def test_launches_keep_their_order_with_two_groups_in_a_block(monkeypatch):
    order = "NCCL_LAUNCH_ORDER_IMPLICIT"
    for name, expected in (("ddp", None), ("tp", "1")):
        monkeypatch.setenv(order, "")  # so that what with_mesh sets is undone at the end
        monkeypatch.delenv(order)
        recorded(0, name)
        assert os.environ.get(order) == expected


def test_what_gets_stuck_is_found():
    """Two faults are planted: messages one after the other, and two groups in another order."""
    queues = [recorded(rank, "pp, tied") for rank in range(8)]
    alone = [[[part] for call in calls for part in call] for calls in queues]
    assert len([line for line in problems(alone) if "is stuck" in line]) == 8
    calls = queues[0]
    for place, (call, after) in enumerate(itertools.pairwise(calls)):
        key, *_ = call[0]
        key_after, _, kind_after, _ = after[0]
        if key != key_after and kind_after != "message":
            calls[place : place + 2] = after, call
            break
    assert "rank 0 is stuck" in str(problems(queues))


LATE_WORKER = "tests/workers/late.py"
LATE = {
    "ddp": case(GROUPED, 1, replicate=4),
    "zero1": case(GROUPED, 1, dp="zero1", replicate=4),
    "fsdp": case(GROUPED, 1, dp="fsdp", shard=4),
    "pp": case(FOUR_HEADS | dict(n_layers=4), 1, dp="fsdp", pp=4),
    "async tp": case(FOUR_HEADS, 4, tp=4, async_tp=True),
    "tp": case(GROUPED, 4, dp="fsdp", tp=2, shard=2),
    "cp": case(GROUPED, 4, dp="hsdp", replicate=2, shard=2, cp=2) | dict(seq=24),
    "ep": case(GROUPED | dict(family="mixtral"), 1, dp="fsdp", shard=4, ep=2),
}
FAULTS = [  # a case, a file, a line and its fault, and what is told
    ("pp", "pipeline", "    wait(works)\n            result =", "    result =", "modified inplace"),
    ("pp", "pipeline", "self.exchange(tick, result))", "self.exchange(tick, result));"
     " result is None or result.mul_(2)", "an input of send was changed before it was waited for"),
]  # fmt: skip


def test_nothing_is_used_before_it_has_arrived(tmp_path):
    """Training in which all arrives late is plain training."""
    for name, result in train(tmp_path, 4, LATE, within=[LATE_WORKER]).items():
        assert_trained(result, LATE[name])


@pytest.mark.slow
@pytest.mark.parametrize("name, file, line, fault, told", FAULTS)
def test_a_missing_wait_is_found(tmp_path, name, file, line, fault, told):
    within = *with_fault(tmp_path / "copy", file, line, fault), LATE_WORKER
    with pytest.raises(AssertionError, match=told):
        train(tmp_path, 4, {name: LATE[name]}, within=within)
