"""`bench.py compare` and `limit`: the same training step, distributed and computed in many ways.

    torchrun --nproc-per-node 2 bench.py compare ddp fsdp "fsdp --reshard none" "--tp 2 --async-tp"
    python bench.py limit --lora        how far a step is from what the machine can do

A contestant is a name, such as a value of --dp, and flags of train.py that say how a step is split
and computed. All start from the same weights and train on the same batch: so their losses must
agree, and they differ in time, memory and communication. Two are for scale: the bare matrix
products and attention of a step, and transformers' step with weights of its own (perf/rivals.py).
All run in turns and stay in memory together.
"""

import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch.distributed.device_mesh import DeviceMesh

from config import ARITHMETIC, FLAGS, STRATEGIES, ParallelConfig, Work
from costs.page import Traffic, sent_bytes
from parallel import World, with_mesh
from perf.instruments import Rounds, Training, make_step, random_batch, run_in_turns
from perf.reports import (
    describe_machine,
    markdown_table,
    megabytes,
    quartiles,
    traffic_in_words,
    write_json,
)
from perf.rivals import bare_step, transformers_step
from plumbing.flags import values_of
from plumbing.messages import UserError, print_rank_zero
from plumbing.processes import Process
from techniques.context_parallel import share_sequences

# What rank 0 runs alone, with the whole batch -> what makes its step.
ALONE = {"one": make_step, "bare": bare_step, "transformers": transformers_step}
NAMES = {  # of contestants -> the flags that they stand for
    **dict.fromkeys(ALONE, ""),
    **{name: f"--dp {name}" for name in STRATEGIES},
    "wrong": "--dp hsdp",  # all-gathers weights across nodes, all-reduces gradients in them
}

# ------------------------------------------------------------------------------- contestants


def flags_of_contestant(contestant: str) -> str:
    """Return all flags that a contestant stands for: those of its name, and its own."""
    if contestant.startswith("--"):
        return contestant
    name, _, more = contestant.partition(" ")
    if name not in NAMES:
        raise UserError(f"no contestant {name}: choose from {', '.join(NAMES)}, or '--tp 2'")
    return f"{NAMES[name]} {more}"


def is_alone(contestant: str) -> bool:
    return contestant.split()[0] in ALONE


def default_contestants(process: Process) -> list[str]:
    """Return strategies that differ on these processes, and ways to keep activations."""
    several_nodes = 1 < process.per_node < process.size  # else HSDP is DDP or FSDP
    names = ["one"]
    if process.size > 1:
        names = [n for n, s in STRATEGIES.items() if several_nodes or s.copy_spans != "node"]
        names.append("fsdp --reshard none")
    plain = names[0]
    return [*names, f"{plain} --checkpointing selective", f"{plain} --checkpointing full"]


def world_of(name: str, parallel: ParallelConfig, process: Process) -> World:
    """Return the processes in the mesh of a contestant. Alone, rank 0 communicates with nobody."""
    world = with_mesh(replace(process, size=parallel.size), parallel)
    if name.split()[0] != "wrong":
        return world
    # The ranks of a node lie along replicate, and shard crosses nodes.
    sizes = parallel.pp, parallel.shard, parallel.replicate, parallel.tp
    ranks = world.mesh.mesh.view(sizes).transpose(1, 2)
    names = world.mesh.mesh_dim_names
    return replace(world, mesh=DeviceMesh(process.device.type, ranks, mesh_dim_names=names))


# --------------------------------------------------------------------------------- measuring


@dataclass(frozen=True)
class Cost:
    """What was counted in a contestant's steps. None: not counted."""

    parallel: ParallelConfig
    loss: float | None = None  # of the first step, mean over the batch
    traffic: Traffic | None = None  # of a step
    peak: int | None = None  # bytes of tensors on a rank


def measure_compare(works: dict[str, Work], asked, process: Process) -> str:
    """Run the contestants as bench.py's Comparison asks. Return the results as text, and write them
    to --json with the flags."""
    steps = {}
    costs = {}
    for name, work in works.items():
        print_rank_zero(f"counting {name}", file=sys.stderr)
        world = world_of(name, work.parallel, process)
        if process.rank > 0 and is_alone(name):  # this rank waits for rank 0
            steps[name] = lambda: None
            costs[name] = Cost(work.parallel)
            continue
        make = ALONE.get(name.split()[0], make_step)
        batch = random_batch(work.model.config, work.batch, work.seq_len)
        share = batch.microbatches(work.batch // world.parallel.data_size)[world.data_rank]
        own_batch = share_sequences(share, world).to(world.device)
        before = torch.cuda.memory_allocated() if world.device.type == "cuda" else 0
        steps[name] = make(work, world, own_batch)
        costs[name] = count_costs(steps[name], world, before)
    rounds = run_in_turns(steps, asked.repeats)
    text, results = report(works, rounds, costs)
    flags = values_of(asked)
    del flags["json"]
    write_json(asked.json, flags | describe_machine(process) | {"strategies": results})
    return text


def count_costs(step: Callable[[], object], world: World, before: int) -> Cost:
    """Run a contestant's first steps and count the last of them. The peak is that of the rank with
    most: uneven shards differ in size. `before` are the bytes that the GPU held already."""
    first = step()
    step()  # DDP makes its final buckets in step 2
    loss = traffic = peak = None
    if isinstance(step, Training):
        loss = first.mean_loss
        counted, memory = step.count()
        traffic = counted.sent if counted else None
        peak = memory["peak"]
    if world.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        step()
        peak = torch.cuda.max_memory_allocated() - before
    if peak is not None:
        peak = round(world.all_gather_scalars([peak]).amax().item())
    return Cost(world.parallel, loss, traffic, peak)


# --------------------------------------------------------------------------------- reporting


def report(works: dict[str, Work], rounds: Rounds, costs: dict[str, Cost]) -> tuple[str, dict]:
    """Return the results as text, and for --json: a table, whether the losses agree, and each
    contestant's traffic."""
    columns = "step, seconds, tokens/s, ratio to the first (quartiles), peak memory, sends, loss"
    rows = []
    traffic = []
    results = {}
    first = next(iter(rounds.values()))["step"]
    for name, work in works.items():
        cost = costs[name]
        seconds = rounds[name]["step"]
        median = statistics.median(seconds)
        speed = work.batch * work.seq_len / median
        ratios = [own / of_first for own, of_first in zip(seconds, first)]
        lower, ratio, upper = quartiles(ratios)
        ratio_in_words = f"{ratio:.3f} ({lower:.3f}-{upper:.3f})"
        sends = None if cost.traffic is None else sent_bytes(cost.traffic, cost.parallel)
        payload = {" ".join(key): counts for key, counts in (cost.traffic or {}).items()}
        loss = "-" if cost.loss is None else f"{cost.loss:.5f}"
        row = [name, f"{median:.3f}", f"{speed:,.0f}", ratio_in_words, megabytes(cost.peak)]
        rows.append([*row, megabytes(sends), loss])
        if not is_alone(name):
            traffic.append(f"{name} sends {traffic_in_words(cost.traffic, cost.parallel)}")
        results[name] = {
            "seconds": seconds,
            "tokens_per_second": speed,
            "ratio": ratio,
            "peak_bytes": cost.peak,
            "sends": sends,
            "payload": payload,
            "loss": cost.loss,
        }
    table = markdown_table(columns.split(", "), rows)
    return "\n".join([*table, "", compare_losses(costs), *traffic]), results


def compare_losses(costs: dict[str, Cost]) -> str:
    """Say whether all contestants computed the same loss in the first step, as they must."""
    costs = {name: cost for name, cost in costs.items() if cost.loss is not None}
    if not costs:
        return "no contestant trains flatllama's model"
    (first, reference), *_ = costs.items()
    arithmetic = [name for name, field in FLAGS.items() if field.metadata["kind"] == ARITHMETIC]
    differ = any(
        getattr(cost.parallel, name) != getattr(reference.parallel, name)
        for cost in costs.values()
        for name in arithmetic
    )
    is_rough = differ or reference.parallel.dtype == torch.bfloat16
    tolerance = 1e-2 if is_rough else 1e-4  # the latter for sums in another order
    errors = {name: abs(cost.loss / reference.loss - 1) for name, cost in costs.items()}
    different = [name for name, error in errors.items() if error > tolerance]
    if different:
        losses = ", ".join(f"{name} {costs[name].loss:.5f}" for name in different)
        return f"losses of the first step DO NOT AGREE: {losses}, but {first} {reference.loss:.5f}"
    return f"losses of the first step agree to {max(errors.values()):.0e}"
