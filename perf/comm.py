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
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from config import ParallelConfig, Work
from costs.search import USABLE_FRACTION, usable_memory
from model import PRESETS
from parallel import World, with_mesh
from perf.instruments import (
    Contestants,
    Training,
    build_on_meta,
    check_writable,
    describe_machine,
    make_step,
    markdown_table,
    random_batch,
    run_in_turns,
    write_json,
)
from plumbing.devices import has_bfloat16
from plumbing.messages import UserError
from train import accumulate

SIZES = [1 << 10, 1 << 14, 1 << 18, 1 << 22, 1 << 25]  # bytes; small shows latency, large bandwidth


def measure_comm(
    world: World, preset: str | None, microbatch: int, seq_len: int, repeats: int, out: Path | None
) -> str:
    """Measure the links between all ranks, and the computation of a microbatch of a preset; return
    the results as text and write them to --out."""
    if world.size < 2:
        raise UserError(
            "comm needs at least two processes: torchrun --nproc-per-node 2 bench.py comm"
        )
    check_writable("--out", out)
    groups = {
        name: {"ranks": group.size(), "times": time_collectives(group, repeats, world)}
        for name, group in process_groups(world).items()
    }
    report = describe_machine(world) | {
        "backend": "nccl" if world.device.type == "cuda" else "gloo",
        "memory": usable_memory(world.device) / USABLE_FRACTION,
        "groups": groups,
        "compute": time_computation(preset, microbatch, seq_len, repeats, world),
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


def time_slowest(contestants: Contestants, repeats: int, world: World) -> dict[str, float]:
    """Return for each contestant the median, over the rounds, of the longest time of any rank."""
    medians = {}
    for name, seconds in run_in_turns(contestants, repeats).items():
        slowest = world.all_gather_scalars(seconds["step"]).amax(0)
        medians[name] = statistics.median(slowest.tolist())
    return medians


# ----------------------------------------------------------------------------------- the links


def time_collectives(group: dist.ProcessGroup, repeats: int, world: World) -> dict[str, list]:
    """Return by collective, for each payload of SIZES, its bytes and the seconds that it takes.
    Sizes are rounded up so that every rank of the group has an equal number of float32 elements."""
    times = {}
    for size in SIZES:
        multiple = 4 * group.size()
        nbytes = math.ceil(size / multiple) * multiple
        medians = time_slowest(collectives(group, nbytes, world.device), repeats, world)
        for name, seconds in medians.items():
            times.setdefault(name, []).append((nbytes, seconds))
    return times


def collectives(group: dist.ProcessGroup, nbytes: int, device: torch.device) -> Contestants:
    """Return functions that run each collective once, with a payload of `nbytes`."""
    full = torch.zeros(nbytes // 4, device=device)
    shard = torch.zeros(len(full) // group.size(), device=device)
    # torch 2.13 deprecates the names all_gather_into_tensor and reduce_scatter_tensor.
    all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    return {
        "all-reduce": lambda: dist.all_reduce(full, group=group),
        "all-gather": lambda: all_gather(full, shard, group=group),
        "reduce-scatter": lambda: reduce_scatter(shard, full, group=group),
    }


def bus_bandwidth(collective: str, n: int, nbytes: int, seconds: float) -> float:
    """Return the bytes per second that each rank's link carries, as nccl-tests define it.

    In a ring of n ranks, a rank sends (n - 1)/n of the payload `nbytes` for an all-gather or a
    reduce-scatter. An all-reduce is one of each. Unlike payload per second, the result compares
    with the nominal speed of a link, and between groups of different sizes."""
    times = 2 if collective == "all-reduce" else 1
    return times * (n - 1) / n * nbytes / seconds


def text_report(report: dict) -> str:
    """Return a table for each kind of group, with a row for each size."""
    lines = [
        f"{report['ranks']} ranks, {report['per_node']} per node, {report['backend']} on "
        f"{report['device']}. MB/s are bus bandwidth: payload per second, times 2(n-1)/n for an "
        "all-reduce of n ranks, (n-1)/n for the others. The time of the smallest message is the "
        "latency."
    ]
    for name, group in report["groups"].items():
        n, times, rows = group["ranks"], group["times"], []
        for of_size in zip(*times.values()):
            row = [f"{of_size[0][0]:,}"]
            for kind, (nbytes, seconds) in zip(times, of_size):
                speed = bus_bandwidth(kind, n, nbytes, seconds) / 1e6
                row.append(f"{1e3 * seconds:,.3f} ms, {speed:,.1f} MB/s")
            rows.append(row)
        at_once = f"{report['ranks'] // n} group(s) of {n} ranks at once"
        lines += ["", f"{name}: {at_once}", "", *markdown_table(["bytes", *times], rows)]
    return "\n".join(lines)


# --------------------------------------------------------------------------------- computation


def time_computation(
    preset: str | None, microbatch: int, seq_len: int, repeats: int, world: World
) -> dict | None:
    """Return the seconds that one microbatch and one update take without communication.

    Every rank trains a model of its own, all at once, since ranks of a node share its processors.
    It does so as plain modules, and in FSDP over one rank, which adds the time of FSDP's own code.
    Times are medians of the slowest rank's, since a training step waits for that rank."""
    if not preset:
        return None
    dtype = torch.bfloat16 if has_bfloat16(world.device) else torch.float32
    model, trainings = build_on_meta(PRESETS[preset]), {}
    for dp in ("ddp", "fsdp"):
        # The mesh of `world` has one rank along shard: so FSDP communicates with no other rank.
        alone = replace(world, size=1, parallel=ParallelConfig(dp=dp, dtype=dtype))
        work = Work(model, alone.parallel, microbatch, microbatch, seq_len)
        batch = random_batch(model.config, microbatch, seq_len)
        trainings[dp] = make_step(work, alone, batch.to(world.device))
    contestants = {dp: partial(forward_and_backward, t) for dp, t in trainings.items()}
    contestants["update"] = partial(clip_and_update, trainings["ddp"])
    medians = time_slowest(contestants, repeats, world)
    return {
        "model": preset,
        "config": asdict(model.config),
        "dtype": str(dtype).removeprefix("torch."),
        "tokens": microbatch * seq_len,
        "seq_len": seq_len,
        "forward_backward": medians["ddp"],
        "forward_backward_in_fsdp": medians["fsdp"],
        "update": medians["update"],
    }


def forward_and_backward(training: Training) -> None:
    training.model.zero_grad()
    accumulate(training.runner, next(training.batches), training.microbatch, training.world)


def clip_and_update(training: Training) -> None:
    """Run what train.update computes on one rank: gradient norm, scaling, AdamW."""
    parameters = [p for group in training.optimizer.param_groups for p in group["params"]]
    gradients = [parameter.grad for parameter in parameters]
    torch._foreach_mul_(gradients, 1 / (1 + torch.nn.utils.get_total_norm(gradients)))
    training.optimizer.step()
