"""Would NCCL deadlock? Arguments: names of meshes in MESHES; prints a line for each.

Each rank of a mesh is emulated alone, on a fake process group. What it sends in two steps and an
evaluation is recorded in the order of the program, over all groups. Then all ranks run their
records together, each with one queue for all communicators, which is stricter than NCCL: a
collective ends, and what follows it begins, when all its ranks have come to it; a message, or a
batch of them, when all partners have. The blocks are not compiled, and streams are not seen."""

import itertools
import sys
from collections import defaultdict
from dataclasses import replace

import torch
import torch.distributed as dist
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import evaluate
from config import ParallelConfig
from model import Llama, LlamaConfig
from parallel import finish_step, parallelize, with_mesh
from perf.instruments import _group_of, all_reduce_at_once, build_on_meta, needs_real_tensors
from plumbing.processes import Process
from plumbing.shards import assign_shard
from techniques.context_parallel import share_sequences
from techniques.optimizers import make_optimizer
from text.batch import Batch
from train import accumulate

CONFIG = LlamaConfig(64, 4, 4, 4, 96, vocab_size=64)
FSDP, HSDP = dict(dp="fsdp"), dict(dp="hsdp", replicate=2)
MESHES = {
    "fsdp": FSDP | dict(shard=8),
    "fsdp all": FSDP | dict(shard=8, reshard="all"),
    "hsdp": HSDP | dict(shard=4),
    "ddp": dict(replicate=8),
    "zero1": dict(dp="zero1", replicate=8),
    "zero1 muon": dict(dp="zero1", replicate=8, optimizer="muon"),
    "diloco": dict(dp="diloco", replicate=2, shard=4, every=2),
    "diloco tp": dict(dp="diloco", replicate=2, shard=2, tp=2, every=2),
    "tp": FSDP | dict(shard=4, tp=2),
    "tp muon": FSDP | dict(shard=4, tp=2, optimizer="muon"),
    "async tp": FSDP | dict(shard=2, tp=4, async_tp=True),
    "float8 tp": FSDP | dict(shard=4, tp=2, float8="tensorwise"),
    "cp tp": FSDP | dict(shard=4, tp=2, cp=2),
    "cp full": FSDP | dict(shard=8, cp=4, checkpointing="full"),
    "pp": FSDP | dict(shard=2, pp=4),
    "pp gpipe": FSDP | dict(shard=2, pp=4, schedule="gpipe"),
    "pp tied": FSDP | dict(shard=2, pp=4),
    "pp zero-bubble": FSDP | dict(shard=2, pp=4, schedule="zero-bubble"),
    "pp interleaved tp": FSDP
    | dict(shard=2, pp=2, tp=2, schedule="interleaved", stages_per_rank=2),
    "pp cp tp": FSDP | dict(shard=2, pp=2, cp=2, tp=2),
    "pp hsdp muon": HSDP | dict(shard=2, pp=2, optimizer="muon"),
}


class Record(TorchDispatchMode):
    """Keeps what this rank sends: ("all", group, ranks, name, bytes) of a collective; ("some",
    messages) of a batch, where a message is (is_send, ranks, peer, bytes)."""

    def __init__(self):
        super().__init__()
        self.items, self.batch = [], None

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        name, group = op._opname, _group_of(op, args)
        ranks = tuple(dist.get_process_group_ranks(group)) if group else ()
        if len(ranks) > 1 and name != "wait_tensor":
            sizes = [sum(getattr(t, "nbytes", 0) for t in tree_leaves(value)) for value in args]
            if name in ("send", "recv_"):
                message = name == "send", ranks, ranks[args[2]], max(sizes)
                if self.batch is None:
                    self.items.append(("some", [message]))
                else:
                    self.batch.append(message)
            else:  # of Muon's all-to-all each rank gives another number of bytes
                nbytes = 0 if "alltoall" in name else max(sizes)
                self.items.append(("all", group.group_name, ranks, name, nbytes))
        if name == "alltoall_base_":  # the fake group refuses a rank that sends nothing
            output, _, group, sizes, _, *others = args
            args = output, output, group, sizes, sizes, *others
        return op(*args, **(kwargs or {}))

    def batched(self, operations: list) -> list:
        """Take the place of dist.batch_isend_irecv."""
        self.batch = []
        works = BATCHED(operations)
        self.items.append(("some", self.batch))
        self.batch = None
        return works


BATCHED = dist.batch_isend_irecv


class Tokens:
    """Rows to evaluate."""

    def batch(self, rows: list) -> Batch:
        tokens = torch.zeros(len(rows), 32, dtype=torch.int64)
        return Batch(tokens, tokens, None, text_bytes=1)


def items_of(rank: int, size: int, parallel: ParallelConfig, config: LlamaConfig) -> list:
    """Return what a rank sends, from the making of its mesh on."""
    cpu = torch.device("cpu")
    process = Process(rank=rank, size=size, local_rank=rank, per_node=size, device=cpu)
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    record = Record()
    dist.batch_isend_irecv = record.batched
    try:
        with record:
            world = with_mesh(process, parallel)
            model = build_on_meta(config)
            initialize = lambda model: Llama.init_weights(model, assign=assign_shard)  # noqa: E731
            runner = parallelize(model, world, initialize)
            if needs_real_tensors(parallel):
                runner.register_comm_hook(world.mesh.get_group("replicate"), all_reduce_at_once)
            optimizer = make_optimizer(model, parallel)
            rows = Tokens().batch([None] * max(2, parallel.pp))
            batch = share_sequences(rows, world)
            for step in (1, 2):
                accumulate(runner, batch, 1, world)
                world.all_gather_scalars([0.0])
                optimizer.step()
                finish_step(optimizer, world, step)
            evaluate.row_sums(model, Tokens(), range(2 * size), 1, world)
        return record.items
    finally:
        dist.batch_isend_irecv = BATCHED
        _clear_sharding_prop_cache()
        dist.destroy_process_group()


def problems_of(records: list[list]) -> list[str]:
    """Return where ranks that run their records together get stuck, or do not match."""
    parts = defaultdict(dict)  # a call -> rank -> its place in the rank's record, name and bytes
    members, queues = {}, []  # a call -> its ranks; rank -> its items, each a list of calls
    for rank, items in enumerate(records):
        counts, groups, queue = defaultdict(int), defaultdict(list), []
        for place, item in enumerate(items):
            calls = []
            if item[0] == "all":
                _, group, ranks, name, nbytes = item
                # A group has another name in each emulation. Those of the same ranks are numbered.
                if group not in groups[ranks]:
                    groups[ranks].append(group)
                key = ranks, groups[ranks].index(group)
                calls.append((key, ranks, name, nbytes))
            else:
                for is_send, ranks, peer, nbytes in item[1]:
                    pair = (rank, peer) if is_send else (peer, rank)
                    calls.append(((ranks, "message", pair), pair, "message", nbytes))
            queue.append([])
            for key, ranks, name, nbytes in calls:
                call = key, counts[key]
                counts[key] += 1
                members[call] = ranks
                parts[call][rank] = place, name, nbytes
                queue[-1].append(call)
        queues.append(queue)
    found = []
    for call, of_ranks in parts.items():
        if {*of_ranks} != {*members[call]}:
            found.append(f"{call}: called by {sorted(of_ranks)} of {members[call]}")
        elif len({(name, nbytes) for _, name, nbytes in of_ranks.values()}) > 1:
            found.append(f"{call}: differs: {of_ranks}")
    at, moves = [0] * len(queues), True

    def is_met(call: tuple) -> bool:
        return all(r in parts[call] and at[r] >= parts[call][r][0] for r in members[call])

    while moves:
        moves = False
        for rank, queue in enumerate(queues):
            while at[rank] < len(queue) and all(map(is_met, queue[at[rank]])):
                at[rank] += 1
                moves = True
    stuck = [rank for rank, queue in enumerate(queues) if at[rank] < len(queue)]
    return found + [f"rank {rank} is stuck at {records[rank][at[rank]]}" for rank in stuck]


def main() -> None:
    for name in sys.argv[1:]:
        parallel = ParallelConfig(**MESHES[name])
        layers = max(2, parallel.pp * parallel.stages_per_rank)
        config = replace(CONFIG, n_layers=layers, tie_embeddings="tied" in name)
        records = [items_of(rank, 8, parallel, config) for rank in range(8)]
        count = sum(map(len, records))
        for problem in itertools.islice(problems_of(records), 5):
            print(f"{name}: {problem}")
        print(f"{name}: {count} calls", flush=True)


if __name__ == "__main__":
    main()
