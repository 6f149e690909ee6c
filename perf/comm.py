"""`bench.py comm`: latency and bandwidth of the links between ranks.

The collectives run in the groups that training uses, here on 2 nodes of 2 ranks:

    world     (0 1 2 3)        all ranks
    node      (0 1) (2 3)      the ranks of one node
    across    (0 2) (1 3)      ranks with the same place in their nodes

All groups of a kind run at once, as they do in training: so links that they share are shared.
`bench.py plan --measured` reads the file of --out in place of data sheets.
"""

import math
import statistics
import sys
from collections import defaultdict
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from config import ParallelConfig
from costs.search import USABLE_FRACTION, usable_memory
from model import Llama
from parallel import World, parallelize, with_mesh
from perf.instruments import (
    Contestants,
    Task,
    build_on_meta,
    check_writable,
    describe_machine,
    markdown_table,
    random_batch,
    time_interleaved,
    write_json,
)
from plumbing.processes import UserError, print_rank_zero
from plumbing.shards import assign_shard
from text.batch import Batch
from train import accumulate

SIZES = [1 << 10, 1 << 14, 1 << 18, 1 << 22, 1 << 25]  # bytes; small shows latency, large bandwidth

Times = dict[str, list[tuple[int, float]]]  # collective -> payload bytes and seconds, by size


def measure_comm(world: World, task: Task | None, repeats: int, out: Path | None) -> str:
    """Measure the links between all ranks, and the computation of a task; return the results as
    text and write them to --out."""
    if world.size < 2:
        raise UserError(
            "comm needs at least two processes: torchrun --nproc-per-node 2 bench.py comm"
        )
    check_writable("--out", out)
    groups = {}
    for name, group in process_groups(world).items():
        print_rank_zero(f"{name}: {number_of_groups(world.size, group.size())}", file=sys.stderr)
        times = time_collectives(group, repeats, world)
        groups[name] = {"ranks": group.size(), "times": times}
    report = describe_machine(world) | {
        "backend": "nccl" if world.device.type == "cuda" else "gloo",
        "memory": usable_memory(world.device, world.per_node) / USABLE_FRACTION,
        "groups": groups,
        "compute": time_computation(task, repeats, world) if task else None,
    }
    write_json(out, report)
    return text_report(report)


def process_groups(world: World) -> dict[str, dist.ProcessGroup]:
    """Return this rank's group of each kind: world, node, across. Where a node has one rank, or
    all of them, there is only the world."""
    groups = {"world": dist.group.WORLD}
    if 1 < world.per_node < world.size:
        nodes = world.size // world.per_node
        parallel = ParallelConfig(dp="hsdp", replicate=nodes, shard=world.per_node)
        mesh = with_mesh(world, parallel).mesh
        groups |= {"node": mesh.get_group("shard"), "across": mesh.get_group("replicate")}
    return groups


def time_collectives(group: dist.ProcessGroup, repeats: int, world: World) -> Times:
    """Time each collective with payloads of SIZES.

    A time is the median, over the rounds, of the slowest rank's. Sizes are rounded up so that every
    rank of the group has an equal number of float32 elements."""
    times = defaultdict(list)
    for size in SIZES:
        multiple = 4 * group.size()
        nbytes = math.ceil(size / multiple) * multiple
        contestants = collectives(group, nbytes, world.device)
        for name, seconds in time_slowest(contestants, repeats, world).items():
            times[name].append((nbytes, seconds))
    return times


def time_slowest(contestants: Contestants, repeats: int, world: World) -> dict[str, float]:
    """Return for each contestant the median, over the rounds, of the longest time of any rank."""
    seconds = time_interleaved(contestants, repeats)
    slowest = {name: world.all_gather_scalars(own).amax(0) for name, own in seconds.items()}
    return {name: statistics.median(times.tolist()) for name, times in slowest.items()}


def collectives(group: dist.ProcessGroup, nbytes: int, device: torch.device) -> Contestants:
    """Return functions that run each collective once, with a payload of `nbytes`. In send/recv,
    each rank sends to the next and receives from the previous, in a ring."""
    ranks, own = dist.get_process_group_ranks(group), group.rank()
    full, received = torch.zeros(2, nbytes // 4, device=device)
    shard = torch.zeros(len(full) // len(ranks), device=device)

    def send_and_receive() -> None:
        send = dist.P2POp(dist.isend, full, ranks[(own + 1) % len(ranks)], group)
        receive = dist.P2POp(dist.irecv, received, ranks[own - 1], group)
        # In a batch, NCCL uses the connections that the group has; alone, each would open one.
        for work in dist.batch_isend_irecv([send, receive]):
            work.wait()

    # torch 2.13 deprecates the names all_gather_into_tensor and reduce_scatter_tensor.
    all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
    reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
    return {
        "all-reduce": lambda: dist.all_reduce(full, group=group),
        "all-gather": lambda: all_gather(full, shard, group=group),
        "reduce-scatter": lambda: reduce_scatter(shard, full, group=group),
        "broadcast": lambda: dist.broadcast(full, ranks[0], group),
        "send/recv": send_and_receive,
    }


def time_computation(task: Task, repeats: int, world: World) -> dict:
    """Return the seconds that one microbatch and one update take without communication.

    Every rank trains a model of its own, all at once, since ranks of a node share its processors.
    It does so as plain modules, and in FSDP over one rank, which adds the time of FSDP's own code.
    Times are medians of the slowest rank's, since a training step waits for that rank."""
    config, dtype = task.model.config, task.parallel.dtype
    batch = random_batch(config, task.microbatch, task.seq_len).to(world.device)
    contestants = {}
    for dp in ("fsdp", "ddp"):
        # The mesh of `world` has one rank along shard: so FSDP communicates with no other rank.
        alone = replace(world, size=1, parallel=ParallelConfig(dp=dp, dtype=dtype))
        model = build_on_meta(config)
        parallelize(model, alone, partial(Llama.init_weights, assign=assign_shard))
        contestants[dp] = partial(forward_and_backward, model, batch, alone)
    optimizer = task.optimizer_of(model)  # of the last model, ddp's
    contestants["update"] = partial(clip_and_update, optimizer)
    medians = time_slowest(contestants, repeats, world)
    return {
        "model": task.name,
        "config": asdict(config),
        "dtype": str(dtype).removeprefix("torch."),
        "moments": task.parallel.moments,
        "tokens": task.microbatch * task.seq_len,
        "seq_len": task.seq_len,
        "forward_backward": medians["ddp"],
        "forward_backward_in_fsdp": medians["fsdp"],
        "update": medians["update"],
    }


def forward_and_backward(model: Llama, batch: Batch, world: World) -> None:
    model.zero_grad()
    accumulate(model, batch, len(batch.tokens), world)


def clip_and_update(optimizer: torch.optim.Optimizer) -> None:
    """Run what train.update computes on one rank: gradient norm, scaling, AdamW."""
    gradients = [p.grad for group in optimizer.param_groups for p in group["params"]]
    torch._foreach_mul_(gradients, 1 / (1 + torch.nn.utils.get_total_norm(gradients)))
    optimizer.step()


def bus_bandwidth(collective: str, n: int, nbytes: int, seconds: float) -> float:
    """Return the bytes per second that each rank's link carries, as nccl-tests define it.

    In a ring of n ranks, a rank sends (n - 1)/n of the payload `nbytes` for an all-gather or a
    reduce-scatter. An all-reduce is one of each. Unlike payload per second, the result compares
    with the nominal speed of a link, and between groups of different sizes."""
    fraction = (n - 1) / n
    factors = {"all-reduce": 2 * fraction, "all-gather": fraction, "reduce-scatter": fraction}
    return nbytes / seconds * factors.get(collective, 1.0)


def text_report(report: dict) -> str:
    lines = [
        f"{report['ranks']} ranks, {report['per_node']} per node, {report['backend']} on "
        f"{report['device']}. MB/s are bus bandwidth: payload per second, times 2(n-1)/n for an "
        "all-reduce of n ranks, (n-1)/n for all-gather and reduce-scatter, 1 for the others. The "
        "time of the smallest message is the latency."
    ]
    for name, group in report["groups"].items():
        lines += ["", f"{name}: {number_of_groups(report['ranks'], group['ranks'])}", ""]
        lines += collectives_table(group["ranks"], group["times"])
    return "\n".join(lines)


def number_of_groups(size: int, n: int) -> str:
    return f"{size // n} groups of {n} ranks at once" if n < size else f"all {n} ranks"


def collectives_table(n: int, times: Times) -> list[str]:
    """Return the lines of a table with one row per size, one column per collective."""
    rows = []
    for by_collective in zip(*times.values()):
        nbytes, _ = by_collective[0]
        cells = [
            f"{1e3 * seconds:,.3f} ms, {bus_bandwidth(name, n, nbytes, seconds) / 1e6:,.1f} MB/s"
            for name, (_, seconds) in zip(times, by_collective)
        ]
        rows.append([f"{nbytes:,}", *cells])
    return markdown_table(["bytes", *times], rows)
