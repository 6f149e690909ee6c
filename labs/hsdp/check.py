"""The check of labs/hsdp."""

from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

import train
from labs.machinery.lab import Property, compare_tensors
from labs.machinery.student import barred, check_returned, load_function
from labs.machinery.training import Run, after_backward, replace_ddp
from model import Llama
from parallel import World
from perf.instruments import Counted, Live

FUNCTION = "hybrid_sharding"
ABOUT = "the groups of two nodes, and two reductions"
NEEDS = "process groups"
POINT = "the same numbers, over the wrong link"
LEADS_TO = "parallel.py", "with_mesh"
SIZES = 4, 6, 8
NODES = {4: 2, 6: 2, 8: 4}  # of so many ranks
BARRED = (
    "torch.distributed.fsdp.fully_shard",
    "torch.distributed.fsdp.FullyShardedDataParallel",
    "parallel.with_mesh",
    "parallel.parallelize",
    "parallel.fsdp",
)
HINTS = (
    "Look at the mesh at the head of parallel.py: which ranks are neighbours?",
    "Count the bytes of each exchange whose ranks are in different nodes. Which one has to cross, "
    "and how small can it be made before?",
    "A mesh of nodes by ranks of a node, and the groups of its two dimensions. Gather within the "
    "node; reduce-scatter within the node, then all-reduce the slices across.",
)
ROWS, WIDTH = 48, 7  # of the weight
VIEW = (
    "A chunk is a view: as long as it lives, so does the whole matrix. Keep a copy of the rows and "
    "nothing else."
)


def tensors(seed: int, rank: int) -> tuple[Tensor, Tensor]:
    """Return the weight, and a rank's gradient of it."""
    weight = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(seed)).double()
    generator = torch.Generator().manual_seed(1000 * seed + rank + 1)
    return weight, torch.randn(ROWS, WIDTH, generator=generator).double()


def on_rank(path: Path, size: int, seed: int, rank: int) -> dict:
    """Shard, gather and reduce with the student's functions. Return what came out and was sent."""
    weight, gradient = tensors(seed, rank)
    with barred(*BARRED):
        three = load_function(path, FUNCTION)(size // NODES[size])
        check_returned(three, (Callable,) * 3, "three functions: shard, gather and reduce")
        shard, gather, reduce = three
        with Live([weight]) as live:
            rows = shard(weight)
        check_returned(rows, Tensor, "the rows of a rank from shard, a tensor")
        del weight  # from here on it lives only if the student keeps it
        kept = live.now
        with Counted(None) as gathered:
            whole = gather(rows + 1)  # as after an update
        with Counted(None) as reduced:
            total = reduce(gradient)
    # Which rows this rank has, found by asking shard for rows that name themselves.
    numbered = shard(torch.arange(ROWS, dtype=torch.float64)[:, None].expand(ROWS, WIDTH))
    return {
        "rows": [int(i) for i in numbered[:, 0]],
        "kept": kept,
        "whole": whole,
        "sum": total,
        "gather": gathered.sent,
        "reduce": reduced.sent,
    }


def properties(results: list[dict], size: int, seed: int) -> Iterator[Property]:
    """Yield what is checked, in order, with what known mistakes would give."""
    per_node = size // NODES[size]
    weight, _ = tensors(seed, 0)
    gradients = [tensors(seed, rank)[1] for rank in range(size)]
    total = sum(gradients)
    rows = [r["rows"] for r in results]
    counts = [len(own) for own in rows]
    yield Property("rows kept", f"{counts} of {ROWS}", len(set(counts)) == 1)
    yield compare_tensors(
        "gathered",
        [{"weight": r["whole"]} for r in results],
        [{"weight": weight + 1}] * size,
        {"gather returns the weight as it was when it was sharded.": [{"weight": weight}] * size},
        "the whole weight, of rows that have changed",
    )

    def slices(of_ranks: list[Tensor]) -> list[dict[str, Tensor]]:
        return [{"slice": value[own]} for value, own in zip(of_ranks, rows)]

    node_of = [range(first, first + per_node) for first in range(0, size, per_node)]
    of_nodes = [sum(gradients[rank] for rank in node) for node in node_of]
    own_node = [of_nodes[rank // per_node] for rank in range(size)]
    twice = [sum(own_node[rank][rows[other]] for other in node_of[rank // per_node])
             for rank in range(size)]  # fmt: skip
    yield compare_tensors(
        "gradients",
        [{"slice": r["sum"]} for r in results],
        slices([total] * size),
        {
            "Each node has the sum over its own ranks: nodes drift apart.": slices(own_node),
            "This is the average over the ranks: the sum is wanted.": slices([total / size] * size),
            "The sum was taken twice within the node, and never across: the second is for the "
            "ranks of other nodes that keep the same rows.": [
                {"slice": of_rank} for of_rank in twice
            ],
        },
        "the sum over all ranks",
    )

    def exchanges(what: str, across: bool) -> list[list[tuple]]:
        """Return each rank's collectives that cross between nodes, or do not: (name, bytes,
        ranks)."""
        return [[(name, nbytes, ranks) for (ranks, name), (_, nbytes) in r[what].items()
                 if (len({rank // per_node for rank in ranks}) > 1) == across]
                for r in results]  # fmt: skip

    def show(found: list[list[tuple]], rank: int) -> str:
        return "; ".join(f"{name} of {nbytes:,} bytes over ranks {', '.join(map(str, ranks))}"
                         for name, nbytes, ranks in found[rank]) or "nothing"  # fmt: skip

    def compare(name: str, found: list, is_right: Callable, mistake: str) -> Property:
        wrong = next((rank for rank in range(size) if not is_right(found[rank], rank)), None)
        where = f" on rank {wrong}" if wrong else ""
        return Property(name, show(found, wrong or 0) + where, wrong is None, mistake)

    def in_node(name: str) -> Callable:
        return lambda found, rank: found == [(name, nbytes, tuple(node_of[rank // per_node]))]

    nbytes, expected = weight.nbytes, weight.nbytes // per_node
    crossing = exchanges("gather", across=True)
    mistake = (
        "The ranks that share one copy of the weights are in different nodes: every all-gather "
        "crosses the slow link. The mesh is transposed."
    )
    if counts[0] * size == ROWS:
        mistake = (
            "A node does not hold a whole copy of the weights: this is FSDP over all ranks, whose "
            "all-gathers cross the slow link."
        )
    yield compare("gather crosses", crossing, lambda found, _: not found, mistake)
    within = exchanges("gather", across=False)
    yield compare("gather in node", within, in_node("all-gather"), "One all-gather is enough.")
    crossing = exchanges("reduce", across=True)
    total = [sum(n for _, n, _ in found) for found in crossing]
    yield compare(
        "reduce crosses",
        crossing,
        lambda _, rank: total[rank] == expected,
        f"The whole gradient crosses, {per_node} times as much as is needed: reduce-scatter within "
        f"the node first." * (per_node * expected in total),
    )
    yield compare(
        "reduce in node",
        exchanges("reduce", across=False),
        in_node("reduce-scatter"),
        "Within the node each rank needs its slice of the sum: one reduce-scatter.",
    )
    kept, limit = max(r["kept"] for r in results), max(counts) * WIDTH * 8
    yield Property("kept", f"{kept:,} bytes on a rank, and may be {limit:,}", kept <= limit, VIEW)


# ----------------------------------------------------------------- in training

# Two nodes of two ranks. The lab says nothing about the norm of sharded gradients: no clipping.
RUN = Run(4, "--microbatch 3 --clip 0")


def install(hybrid_sharding: Callable) -> None:
    """Let the optimizer have the rows that this rank keeps; gather them after each update."""
    per_node = 2

    def matrix(tensor: Tensor) -> Tensor:
        """Return a matrix whose rows per_node divides: a norm's weights stand below each other."""
        tensor = tensor[:, None] if tensor.ndim == 1 else tensor
        return F.pad(tensor, (0, 0, 0, -len(tensor) % per_node))

    def apply(model: Llama, world: World) -> Llama:
        shard, gather, reduce = hybrid_sharding(per_node)
        for parameter in model.parameters():
            rows = shard(matrix(parameter.detach()))
            parameter.optimizer_slice = rows.view(-1, *parameter.shape[1:])
            parameter.optimizer_slice.whole = parameter

        def finish() -> None:
            for parameter in model.parameters():
                rows = parameter.optimizer_slice
                rows.grad = reduce(matrix(parameter.grad)).view_as(rows) / world.size
                parameter.grad = None

        def all_gather_updates(optimizer: torch.optim.Optimizer, *_) -> None:
            for rows in (p for group in optimizer.param_groups for p in group["params"]):
                whole = gather(rows.view(len(rows), -1))[: len(rows.whole)]
                rows.whole.data.copy_(whole.view_as(rows.whole))

        after_backward(finish)
        train.all_gather_updates = all_gather_updates
        return model

    replace_ddp(apply)
