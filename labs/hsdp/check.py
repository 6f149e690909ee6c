"""The check of labs/hsdp."""

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from labs.machinery import compare
from labs.machinery.compare import Property
from labs.machinery.student import SHARDING, check_returned
from labs.machinery.training import Run, after_backward, replace_ddp
from model import Llama
from parallel import World
from perf.instruments import Counted, Live
from techniques import optimizers

FUNCTION = "hybrid_sharding"
ABOUT = "the groups of two nodes, and two reductions"
NEEDS = "process groups"
POINT = "the same numbers, over the wrong link"
LEADS_TO = "parallel.py", "with_mesh"
SIZES = 4, 6, 8
NODES = {4: 2, 6: 2, 8: 4}  # of so many ranks
BARRED = *SHARDING, "parallel.with_mesh", "parallel.fsdp"
HINTS = (
    "Look at the mesh at the head of parallel.py: which ranks are neighbours?",
    "Count the bytes of each exchange whose ranks are in different nodes. Which one has to cross, "
    "and how small can it be made before?",
    "A mesh of nodes by ranks of a node, and the groups of its two dimensions. Gather within the "
    "node; reduce-scatter within the node, then all-reduce the slices across.",
)
ROWS, WIDTH = 48, 7  # of the weight
TRANSPOSED = (
    "The ranks that share one copy of the weights are in different nodes: every all-gather crosses "
    "the slow link. The mesh is transposed."
)
FSDP = (
    "A node does not hold a whole copy of the weights: this is FSDP over all ranks, whose "
    "all-gathers cross the slow link."
)
VIEW = (
    "A chunk is a view: as long as it lives, so does the whole matrix. Keep a copy of the rows and "
    "nothing else."
)


def tensors(seed: int, rank: int) -> tuple[Tensor, Tensor]:
    """Return the weight, and a rank's gradient of it."""
    weight = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(seed)).double()
    generator = torch.Generator().manual_seed(1000 * seed + rank + 1)
    return weight, torch.randn(ROWS, WIDTH, generator=generator).double()


def on_rank(load: Callable, size: int, seed: int, rank: int) -> dict:
    """Shard, gather and reduce with the student's functions. Return what came out and was sent."""
    weight, gradient = tensors(seed, rank)
    what = "three functions: shard, gather and reduce"
    shard, gather, reduce = check_returned(load()(size // NODES[size]), (Callable,) * 3, what)
    with Live([weight]) as live:
        rows = check_returned(shard(weight), Tensor, "the rows of a rank from shard, a tensor")
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


def properties(results: dict[str, list], size: int, seed: int) -> Iterator[Property]:
    per_node = size // NODES[size]
    weight, _ = tensors(seed, 0)
    gradients = [tensors(seed, rank)[1] for rank in range(size)]
    total = sum(gradients)
    rows = results["rows"]
    counts = [len(own) for own in rows]
    yield Property("rows kept", f"{counts} of {ROWS}", len(set(counts)) == 1)
    yield compare.tensors(
        "gathered",
        results["whole"],
        weight + 1,
        {"gather returns the weight as it was when it was sharded.": weight},
        "the whole weight, of rows that have changed",
    )

    node_of = [range(first, first + per_node) for first in range(0, size, per_node)]
    of_nodes = [sum(gradients[rank] for rank in node) for node in node_of]
    own_node = [of_nodes[rank // per_node] for rank in range(size)]
    wanted = [total[own] for own in rows]
    mistakes = {
        "Each node has the sum over its own ranks: nodes drift apart.": [
            of_node[own] for of_node, own in zip(own_node, rows)
        ],
        compare.AVERAGED: compare.times(wanted, 1 / size),
        "Sums are divided by the number of nodes: the sum over all ranks is wanted.": compare.times(
            wanted, 1 / NODES[size]
        ),
        "The sum was taken twice within the node, and never across: the second is for the ranks of "
        "other nodes that keep the same rows.": [
            sum(own_node[rank][rows[other]] for other in node_of[rank // per_node])
            for rank in range(size)
        ],
    }
    yield compare.tensors("gradients", results["sum"], wanted, mistakes, "the sum over all ranks")

    def exchanges(what: str, across: bool) -> list[list[tuple]]:
        """Return each rank's collectives that cross between nodes, or do not."""
        return [[(name, nbytes, len(ranks)) for (ranks, name), (_, nbytes) in sent.items()
                 if (len({rank // per_node for rank in ranks}) > 1) == across]
                for sent in results[what]]  # fmt: skip

    def shown(what: str, across: bool) -> list[str]:
        texts = ([f"{name} of {nbytes:,} bytes over {n} ranks" for name, nbytes, n in of_rank]
                 for of_rank in exchanges(what, across))  # fmt: skip
        return ["; ".join(of_rank) or "nothing" for of_rank in texts]

    mistake = FSDP if counts[0] * size == ROWS else TRANSPOSED
    crossing = shown("gather", across=True)
    yield compare.exactly("gather crosses", crossing, "nothing", "{}; {} has to", mistake)
    in_node = f" of {weight.nbytes:,} bytes over {per_node} ranks"
    found, mistake = shown("gather", across=False), "One all-gather is enough."
    yield compare.exactly("gather in node", found, f"all-gather{in_node}", "{}", mistake)
    whole = (
        f"The whole gradient crosses, {per_node} times as much as is needed: reduce-scatter within "
        f"the node first."
    )
    yield compare.exactly(
        "reduce crosses",
        [sum(nbytes for _, nbytes, _ in found) for found in exchanges("reduce", across=True)],
        weight.nbytes // per_node,
        "{:,} bytes; {:,} have to",
        {weight.nbytes: whole},
    )
    mistake = "Within the node each rank needs its slice of the sum: one reduce-scatter."
    found = shown("reduce", across=False)
    yield compare.exactly("reduce in node", found, f"reduce-scatter{in_node}", "{}", mistake)
    limit, text = max(counts) * WIDTH * 8, "{:,} bytes on a rank, and may be {:,}"
    yield compare.at_most("kept", results["kept"], limit, text, VIEW)


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
        optimizers.all_gather_updates = all_gather_updates
        return model

    replace_ddp(apply)
