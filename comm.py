"""`bench.py comm`: what the links between ranks give, and which of them are slow.

Ranks are tried in the groups that training has: all of them, those of a node, and those with the
same place in their nodes. A planner can start from the result file instead of data sheets.
"""

import argparse
import itertools
import json
import math
import statistics
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, replace
from datetime import datetime
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from cost import ROOM, device_room
from data import Batch
from measure import interleaved
from model import PRESETS, Llama, UserError
from parallel import Split, World, arrange, local, parallelize, put_shard, set_up
from train import accumulate, make_optimizer, show, write_whole

SIZES = [1 << 10, 1 << 14, 1 << 18, 1 << 22, 1 << 25]  # where latency is all, to bandwidth
ALL_PAIRS = 32  # so many ranks are tried each with each


def measure_comm(args: argparse.Namespace) -> str:
    """What the links between ranks give, for people as text and for programs in --out."""
    world = set_up()
    if world.size < 2:
        raise UserError(
            "one process has nobody to talk to: torchrun --nproc-per-node 2 bench.py comm"
        )
    world.agree(vars(args) | {"nproc_per_node": world.per_node})
    if args.out and not world.from_first(args.out.parent.is_dir):
        raise UserError(f"--out {args.out}: there is no directory {args.out.parent}")
    groups = {}
    for name, group in groupings(world).items():
        n = group.size()
        show(f"{name}: {of_ranks(world.size, n)}", file=sys.stderr)
        times = time_collectives(group, sorted(set(args.sizes)), args.repeats, world)
        groups[name] = {"ranks": n, "times": times}
    computed = time_computation(args, world) if args.model else None
    tried = pairs_to_try(world.size, world.per_node)
    show(f"pairs: {len(tried)}, one after the other", file=sys.stderr)
    pairs = time_pairs(tried, args.repeats, world)
    on_gpu = world.device.type == "cuda"
    report = {
        "device": torch.cuda.get_device_name(world.device) if on_gpu else "cpu",
        "backend": "nccl" if on_gpu else "gloo",
        "ranks": world.size,
        "per_node": world.per_node,
        "torch": str(torch.__version__),
        "date": datetime.now().astimezone().isoformat(timespec="seconds"),
        "memory": device_room(world.device, world.per_node) / ROOM,
        "groups": groups,
        "pairs": pairs,
        "compute": computed,
    }
    if args.out and world.rank == 0:
        write_whole(args.out, json.dumps(report) + "\n")
    return in_words(report)


def groupings(world: World) -> dict[str, dist.ProcessGroup]:
    """This rank's group of each kind, but for kinds that are the world once more or one rank.

    With 2 nodes of 2 the world is (0 1 2 3), the nodes are (0 1) (2 3), and across: (0 2) (1 3)."""
    groups = {"world": dist.group.WORLD}
    if 1 < world.per_node < world.size:
        nodes = world.size // world.per_node
        mesh = arrange(world, Split(dp="hsdp", replicate=nodes, shard=world.per_node)).mesh
        groups |= {"node": mesh.get_group("shard"), "across": mesh.get_group("replicate")}
    return groups


def time_collectives(
    group: dist.ProcessGroup, sizes: list[int], repeats: int, world: World
) -> dict[str, list[tuple[int, float]]]:
    """(bytes, seconds) of every collective and size, the median of what the slowest rank took.

    All groups of a kind work at once, as they do in training: links that they share are shared."""
    times = {}
    for size in sizes:
        evenly = 4 * group.size()  # float32 numbers, as many for each rank
        nbytes = math.ceil(size / evenly) * evenly
        for name, ours in interleaved(collectives(group, nbytes, world.device), repeats).items():
            slowest = world.gather(ours).amax(0).tolist()
            times.setdefault(name, []).append((nbytes, statistics.median(slowest)))
    return times


def collectives(group: dist.ProcessGroup, nbytes: int, device: torch.device) -> dict[str, Callable]:
    """What is measured, each with a payload of so many bytes; send/recv goes around in a ring."""
    ranks, me = dist.get_process_group_ranks(group), group.rank()
    whole, other = torch.zeros(2, nbytes // 4, device=device)
    part = torch.zeros(len(whole) // len(ranks), device=device)
    after, before = ranks[(me + 1) % len(ranks)], ranks[me - 1]
    # torch 2.13 warns of the older names
    all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
    reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
    ring = (dist.isend, whole, after, group), (dist.irecv, other, before, group)
    return {
        "all-reduce": lambda: dist.all_reduce(whole, group=group),
        "all-gather": lambda: all_gather(whole, part, group=group),
        "reduce-scatter": lambda: reduce_scatter(part, whole, group=group),
        "broadcast": lambda: dist.broadcast(whole, ranks[0], group),
        "send/recv": lambda: exchange(*ring),
    }


def time_computation(args: argparse.Namespace, world: World) -> dict:
    """Seconds of forward and backward of one microbatch, and of clipping and AdamW, without
    communication: every rank trains a model of its own, all at once, as they share cores. And of
    forward and backward in FSDP with nobody else, which shows what FSDP's own work takes.
    A step waits for its slowest rank: theirs are the times."""
    show(f"computation: {args.model}, a microbatch of {args.microbatch}", file=sys.stderr)
    config = PRESETS[args.model]
    dtype = torch.bfloat16 if world.device.type == "cuda" else torch.float32
    tokens = torch.randint(config.vocab_size, (args.microbatch, args.seq_len)).to(world.device)
    batch = Batch(tokens, tokens, None, text_bytes=1)
    contestants = {}
    for dp in ("ddp", "fsdp"):
        alone = replace(world, size=1, split=Split(dp=dp, dtype=dtype))  # the mesh has 1 shard
        with torch.device("meta"):
            model = Llama(config)
        parallelize(model, alone, partial(Llama.init_weights, put=put_shard))
        optimizer = make_optimizer(model, lr=1e-4, weight_decay=0.1)
        gradient = partial(gradient_of, model, optimizer, batch, alone)
        contestants |= {f"{dp} gradient": gradient, f"{dp} update": partial(clip, optimizer)}
    seconds = interleaved(contestants, args.repeats)
    slowest = (world.gather(times).amax(0).tolist() for times in seconds.values())
    forward_backward, update, in_fsdp, _ = map(statistics.median, slowest)
    return {
        "model": args.model,
        "config": asdict(config),
        "dtype": str(dtype).removeprefix("torch."),
        "tokens": args.microbatch * args.seq_len,
        "seq_len": args.seq_len,
        "forward_backward": forward_backward,
        "forward_backward_in_fsdp": in_fsdp,
        "update": update,
    }


def gradient_of(model: Llama, optimizer: torch.optim.Optimizer, batch: Batch, world: World) -> None:
    optimizer.zero_grad()
    accumulate(model, batch, len(batch.tokens), world)


def clip(optimizer: torch.optim.Optimizer) -> None:
    """What an update computes, without the sums over ranks: the norm, scaling, AdamW."""
    gradients = [local(p.grad) for group in optimizer.param_groups for p in group["params"]]
    torch._foreach_mul_(gradients, 1 / (1 + torch.nn.utils.get_total_norm(gradients)))
    optimizer.step()


def exchange(*transfers: tuple) -> None:
    """Send and receive at once. In a batch NCCL does so over the connections that the group has;
    single sends would open new ones for every pair of ranks."""
    for work in dist.batch_isend_irecv([dist.P2POp(*transfer) for transfer in transfers]):
        work.wait()


def pairs_to_try(size: int, per_node: int) -> list[tuple[int, int]]:
    """All pairs of few ranks; of many, neighbours within a node and across."""
    if size <= ALL_PAIRS:
        return list(itertools.combinations(range(size), 2))
    return sorted({(i, i + step) for step in (1, per_node) for i in range(size - step)})


def time_pairs(
    pairs: list[tuple[int, int]], repeats: int, world: World
) -> list[tuple[int, int, float]]:
    """(i, j, bytes a second) of one message to and fro, pair after pair while the others wait.

    The best of the rounds: a bad link is slow in each, a processor that was busy is not."""
    # Enough that bandwidth shows beside latency; GPUs' faster links need more.
    message = torch.zeros(4 << 20 if world.device.type == "cuda" else 1 << 18, device=world.device)
    seconds = []
    for i, j in pairs:
        both = partial(there_and_back, message, world.rank, i, j)
        best = min(interleaved({"pair": both}, repeats)["pair"])
        seconds.append(best if world.rank == i else 0.0)  # who sends first sees all of it
    seconds = world.gather(seconds).amax(0).tolist()
    return [(i, j, 2 * message.nbytes / took) for (i, j), took in zip(pairs, seconds)]


def there_and_back(message: Tensor, rank: int, i: int, j: int) -> None:
    """The part of a rank in sending a message from i to j and back: of most ranks, none."""
    for source, target in ((i, j), (j, i)):
        if rank == source:
            exchange((dist.isend, message, target))
        elif rank == target:
            exchange((dist.irecv, message, source))


def bus_bandwidth(collective: str, n: int, nbytes: int, seconds: float) -> float:
    """Bytes a second that a link of each rank must carry, as nccl-tests count them.

    Of its payload a rank sends (n - 1)/n in an all-gather or a reduce-scatter, and an all-reduce is
    both; so this compares with the link's nominal speed, and between groups of any size."""
    part = (n - 1) / n
    factors = {"all-reduce": 2 * part, "all-gather": part, "reduce-scatter": part}
    return nbytes / seconds * factors.get(collective, 1.0)


def slow_pairs(
    pairs: list[tuple[int, int, float]], per_node: int
) -> list[tuple[int, int, float, float]]:
    """(i, j, speed, usual speed) of pairs below half of what is usual in a node or across, as the
    case may be; the worst first."""
    kinds = {True: [], False: []}
    for i, j, speed in pairs:
        kinds[i // per_node == j // per_node].append((i, j, speed))
    slow = []
    for kind in filter(None, kinds.values()):
        usual = statistics.median(speed for *_, speed in kind)
        slow += [(i, j, speed, usual) for i, j, speed in kind if speed < usual / 2]
    return sorted(slow, key=lambda pair: pair[2] / pair[3])


def common_rank(pairs: list[tuple]) -> int | None:
    """The one rank that is in most of these pairs, if there is one."""
    (rank, most), (_, next_most) = Counter(r for i, j, *_ in pairs for r in (i, j)).most_common(2)
    return rank if most > max(next_most, len(pairs) / 2) else None


def slow_grouping(groups: dict[str, dict]) -> tuple[str, str, float] | None:
    """(slowest, fastest, how many times slower) by the all-reduce of the largest message."""
    speeds = {
        name: bus_bandwidth("all-reduce", group["ranks"], *group["times"]["all-reduce"][-1])
        for name, group in groups.items()
    }
    slow, fast = min(speeds, key=speeds.get), max(speeds, key=speeds.get)
    return (slow, fast, speeds[fast] / speeds[slow]) if len(speeds) > 1 else None


def in_words(report: dict) -> str:
    lines = [
        f"{report['ranks']} ranks, {report['per_node']} to a node, {report['backend']} on "
        f"{report['device']}. MB/s are bus bandwidth: payload per second, times 2(n-1)/n for an "
        "all-reduce of n ranks, (n-1)/n for all-gather and reduce-scatter, 1 for the others."
    ]
    for name, group in report["groups"].items():
        lines += ["", f"{name}: {of_ranks(report['ranks'], group['ranks'])}", ""]
        lines += comm_table(group["ranks"], group["times"])
    lines += ["", *pairs_in_words(report["pairs"], report["per_node"])]
    if found := slow_grouping(report["groups"]):
        slow, fast, factor = found
        lines.append(f"the slow dimension is {slow}: all-reduce at 1/{factor:.1f} of {fast}'s MB/s")
    return "\n".join(lines)


def of_ranks(size: int, n: int) -> str:
    return f"{size // n} groups of {n} ranks at once" if n < size else f"all {n} ranks"


def comm_table(n: int, times: dict[str, list[tuple[int, float]]]) -> list[str]:
    """Markdown: a row for each size; and below it the latency, which is the smallest one's time."""
    lines = [f"| bytes | {' | '.join(times)} |", "|--:|" + "--:|" * len(times)]
    for row in zip(*times.values()):
        cells = [
            f"{1e3 * seconds:,.3f} ms, {bus_bandwidth(name, n, nbytes, seconds) / 1e6:,.1f} MB/s"
            for name, (nbytes, seconds) in zip(times, row)
        ]
        lines.append(f"| {row[0][0]:,} | {' | '.join(cells)} |")
    latency = (f"{name} {1e3 * rows[0][1]:,.3f} ms" for name, rows in times.items())
    return [*lines, "", f"latency: {', '.join(latency)}"]


def pairs_in_words(pairs: list[tuple[int, int, float]], per_node: int) -> list[str]:
    slow = slow_pairs(pairs, per_node)
    if not slow:
        return ["no pair of ranks is slower than half the median of its kind"]
    lines = [
        f"ranks {i} and {j}: {speed / 1e6:,.1f} MB/s, where {usual / 1e6:,.1f} are usual"
        for i, j, speed, usual in slow[:8]
    ]
    if len(slow) > 8:
        lines.append(f"and {len(slow) - 8} more pairs below half of what is usual")
    if (rank := common_rank(slow)) is not None:
        its = sum(rank in pair[:2] for pair in slow)
        lines.append(f"rank {rank} pairs badly: it is in {its} of these {len(slow)} pairs")
    return lines
