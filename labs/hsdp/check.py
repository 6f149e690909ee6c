"""The check of labs/hsdp."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from labs.machinery import compare
from labs.machinery.compare import Property
from labs.machinery.lab import drawn
from labs.machinery.student import SHARDING, check_returned
from perf.instruments import Counted, Live

FUNCTION = "hybrid_sharding"
ABOUT = "the groups of two nodes, and two reductions"
NEEDS = "process groups, `all_gather_into_tensor`, `reduce_scatter_tensor`"
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
ASKED = "A node keeps each row once, and all the same the gather asks ranks of other nodes."
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
    [weight], [gradient] = (drawn(n, (ROWS, WIDTH)) for n in (seed, 1000 * seed + rank + 1))
    return weight, gradient


def on_rank(load: Callable, size: int, seed: int, rank: int) -> dict:
    """Shard, gather and reduce with the student's functions. Return what came out and was sent."""
    weight, gradient = tensors(seed, rank)
    what = "three functions: shard, gather and reduce"
    shard, gather, reduce = check_returned(load()(size // NODES[size]), (Callable,) * 3, what)
    with Live([weight]) as live:
        rows = check_returned(shard(weight), Tensor, "the rows of a rank from shard, a tensor")
    del weight  # from here on it lives only if the student keeps it
    kept = live.now
    check_returned(gather(rows), Tensor, "the whole weight from gather, a tensor")
    rows += 1  # an update
    with Counted(None) as gathered:
        whole = gather(rows)
    with Counted(None) as reduced:
        total = reduce(gradient.clone())
    check_returned(total, Tensor, "this rank's rows of the sum from reduce, a tensor")
    again = reduce(gradient * (rank > 0))  # as of a rank that has no tokens
    # Which rows this rank has, found by asking shard for rows that name themselves.
    numbered = shard(torch.arange(ROWS, dtype=torch.float64)[:, None].expand(ROWS, WIDTH))
    return {
        "rows": [int(i) for i in numbered[:, 0]],
        "kept": kept,
        "whole": whole,
        "sum": total,
        "again": again,
        "gather": gathered.sent,
        "reduce": reduced.sent,
    }


def properties(results: dict[str, list], size: int, seed: int) -> Iterator[Property]:
    per_node = size // NODES[size]
    weight, _ = tensors(seed, 0)
    total, again = (sum(tensors(seed, rank)[1] for rank in range(first, size)) for first in (0, 1))
    counts = [len(rows) for rows in results["rows"]]
    mistake = "A rank keeps as many rows as any other."
    yield Property("rows kept", f"{counts} of {ROWS}", len(set(counts)) == 1, mistake)
    reference = "the whole weight, of rows that have changed"
    yield compare.tensors("gathered", results["whole"], weight + 1, reference)
    wanted = [total[rows] for rows in results["rows"]]
    yield compare.tensors("gradients", results["sum"], wanted, "the sum over all ranks")
    wanted = [again[rows] for rows in results["rows"]]
    reference = "where that of rank 0 is 0"
    yield compare.tensors("gradients again", results["again"], wanted, reference)

    def exchanges(what: str, across: bool) -> list[str]:
        """Return each rank's collectives that cross between nodes, or do not."""
        of_ranks = ([f"{name} of {nbytes:,} bytes over {len(ranks)} ranks"
                     for (ranks, name), (_, nbytes) in sent.items()
                     if (len({rank // per_node for rank in ranks}) > 1) == across]
                    for sent in results[what])  # fmt: skip
        return ["; ".join(found) or "nothing" for found in of_ranks]

    in_node = f" of {weight.nbytes:,} bytes over {per_node} ranks"
    of_node = sorted(row for rows in results["rows"][:per_node] for row in rows)
    if counts[0] * size == ROWS:
        mistake = FSDP
    elif of_node == [*range(ROWS)]:
        mistake = ASKED
    else:
        mistake = TRANSPOSED
    found = exchanges("gather", across=True)
    yield compare.exactly("gather crosses", found, "nothing", "{}; {} has to", mistake)
    found = exchanges("gather", across=False)
    mistake = "One all-gather is enough."
    yield compare.exactly("gather in node", found, f"all-gather{in_node}", "{}", mistake)
    found = exchanges("reduce", across=True)
    slices = f"all-reduce of {weight.nbytes // per_node:,} bytes over {NODES[size]} ranks"
    mistake = "What crosses is the sum of a rank's slice: reduce-scatter within the node first."
    if f" of {weight.nbytes:,} bytes" in compare.unexpected(found, slices):
        mistake = (
            f"The whole gradient crosses, {per_node} times as much as is needed: reduce-scatter "
            f"within the node first."
        )
    yield compare.exactly("reduce crosses", found, slices, "{}", mistake)
    mistake = "Within the node each rank needs its slice of the sum: one reduce-scatter."
    found = exchanges("reduce", across=False)
    yield compare.exactly("reduce in node", found, f"reduce-scatter{in_node}", "{}", mistake)
    limit = max(counts) * WIDTH * 8
    text = "{:,} bytes on a rank, and may be {:,}"
    yield compare.at_most("kept", results["kept"], limit, text, VIEW)
