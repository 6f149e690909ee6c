"""Expert parallelism: each rank holds some of the experts; tokens travel to them and back.

With --ep N, N neighbours along replicate x shard x tp hold one copy of the X experts, X / N each.
Their tokens differ, as before, and whatever is no expert is split as before, too:

    8 ranks, --ep 4, X = 8           experts       shares gradients of experts with
    rank 0  tokens 0     ─┐          0 1           rank 4
    rank 1  tokens 1      │ all-     2 3           rank 5
    rank 2  tokens 2      │ to-all   4 5           rank 6
    rank 3  tokens 3     ─┘          6 7           rank 7

In each block a rank (1) tells the others how many rows it has for each of their experts, (2) sends
the rows, (3) sorts by expert those that arrive, and computes them, (4) sends the results back. All
are all-to-alls, and backward sends gradients the same ways. An expert has then seen the tokens of N
ranks. So its gradient is summed over those ranks alone that hold the same experts, every N-th one,
and over these ranks FSDP shards what a rank has of the experts.

Communication over ep, a microbatch and block: 4 all-to-alls of rows (2 in forward, 2 in backward)
and one of X counts. The payloads of the N ranks add up to 4 N (tokens of a rank) K D elements
whatever the routing; that of one rank depends on it, and a step is as slow as the rank that gets
most. FSDP of experts would all-gather 3 X D F elements twice in a microbatch: even without its
reduce-scatter, once a step, --ep sends less while (tokens of a rank) K < 1.5 X F.
Use with many experts and few tokens, or when the experts of a block do not fit in a rank's memory.
Avoid across a slow link, and where FSDP hides its all-gathers behind computation.
"""

from collections.abc import Iterator
from functools import lru_cache, partial
from math import ceil

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import ParallelStyle

from config import STRATEGIES, ParallelConfig
from model import Llama
from plumbing.host_reads import read_counts
from plumbing.shards import shard_parameters, to_local
from techniques.experts import Experts, GroupedLinear, Reordered, Router
from techniques.parallel_layers import local_operand
from techniques.technique import Technique


@torch.compiler.disable
def exchange(forward, group: dist.ProcessGroup, rows: Tensor, counts: Tensor) -> Tensor:
    """Compute rows on the ranks that hold their experts.

    rows [n, D] sorted by expert, and so by rank; counts [X] rows of each -> [n, D] in that order.
    `forward` computes rows by this rank's experts. In labs/experts you write it."""
    ranks = group.size()
    arriving = counts.clone()  # likely values, for `bench.py step` may silence the group
    dist.all_to_all_single(arriving, counts, group=group)
    arriving = arriving.view(ranks, -1)  # [N, X/N] rows from each rank, for each expert here
    # The host has to know sizes before it can send: here it waits for all that a GPU has to do,
    # once in a block and microbatch, and not where backward computes forward again.
    sizes = torch.stack([counts.view(ranks, -1).sum(1), arriving.sum(1)])  # [2, N]
    sent, received = read_counts(sizes, total=len(rows))
    rows = AllToAll.apply(rows, sent, received, group)  # by rank, and those of a rank by expert
    experts = torch.arange(arriving.shape[1], device=rows.device).repeat(ranks)
    expert_of = experts.repeat_interleave(arriving.flatten(), output_size=len(rows))
    order = expert_of.argsort(stable=True)
    back = order.argsort()
    out = forward(Reordered.apply(rows, order, back, 1), arriving.sum(0))
    out = Reordered.apply(out, back, order, 1)
    return AllToAll.apply(out, received, sent, group)


class AllToAll(torch.autograd.Function):
    """Send x [n, D] in parts of `sent` rows to the ranks of a group, and return what they sent.
    Backward sends the gradient of each row back to where it came from."""

    @staticmethod
    def forward(ctx, x, sent, received, group):
        ctx.splits = received, sent, group
        out = x.new_empty(sum(received), *x.shape[1:])
        dist.all_to_all_single(out, x.contiguous(), received, sent, group)
        return out

    @staticmethod
    def backward(ctx, gradient):
        return AllToAll.apply(gradient, *ctx.splits), None, None, None


def make_mesh(parallel: ParallelConfig, kind: str, groups: dict) -> DeviceMesh:
    """Return the same ranks in a mesh with a dimension ep; add its groups to `groups`. Along
    expert_replicate ranks hold the same parts of the same experts, along expert_shard other parts
    of them."""
    dims = "pp", "expert_replicate", "expert_shard", "ep"
    sizes = tuple(getattr(parallel, dim) for dim in dims)
    mesh = init_device_mesh(kind, sizes, mesh_dim_names=dims)
    groups |= {dim: mesh.get_group(dim) for dim in dims[1:3]}
    # A new group: that of the mesh may be the one of all ranks, which has other messages.
    groups["ep"], _ = dist.new_subgroups_by_enumeration(mesh.mesh.flatten(0, 2).tolist())
    return mesh


def spread_experts(model: Llama, world) -> None:
    """Shard the experts over ep, in place; their parameters become DTensors."""
    mesh = world.expert_mesh["ep"]
    parallel = world.parallel

    def local_part(weight: Tensor) -> Tensor:
        """Return this rank's part. Gradients are divided by replicate x shard. FSDP divides that of
        an expert by the number of ranks that hold it, replicate x shard x tp / ep: so it is
        multiplied by tp / ep."""
        part = to_local(weight)
        if part.requires_grad:
            part.register_hook(lambda gradient: gradient * parallel.tp / parallel.ep)
        return part

    for module in model.modules():
        if isinstance(module, Experts):
            for layer in module.children():  # w1, w2 and w3
                shard_parameters(layer, mesh, 0)
                layer.local_part = local_part
            module.forward = partial(exchange, module.forward, world.own_groups["ep"])


class OfMixture(ParallelStyle):
    """Replicate a router (weight_dim None): each rank has the gradient of its tokens, which FSDP
    sums over tp, as that of a norm. Experts (weight_dim 0) are left as they are: spread_experts
    shards them over ep, which contains tp."""

    only_for = Router, GroupedLinear

    def __init__(self, weight_dim: int | None):
        self.weight_dim = weight_dim

    def _apply(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        if self.weight_dim is None:
            shard_parameters(module, mesh, None)
            module.local_part = local_operand
        return module


PLAN = {
    "layers.*.feed_forward.router": OfMixture(None),
    **{f"layers.*.feed_forward.experts.{w}": OfMixture(0) for w in ("w1", "w2", "w3")},
}


def refuses(work) -> str:
    """Return why a step cannot compute the experts of its model, in a line, or ""."""
    parallel = work.parallel
    n = work.model.config.n_experts
    ep, tp, dp = parallel.ep, parallel.tp, parallel.dp
    if not n and ep > 1:
        return "--ep is for models with experts: give --model tiny-experts, or leave it out"
    if not n:
        return ""
    if ep % tp:
        return f"--tp {tp} with experts needs --ep {tp}, or a multiple of it"
    if ep > 1 and dp in STRATEGIES and not STRATEGIES[dp].automatic:
        return f"--ep does not combine with --dp {dp}: use --dp fsdp"
    if n % ep:
        return f"--ep {ep} must divide the {n} experts of the model"
    ranks = parallel.shard * tp
    every = parallel.replicate * ranks
    if every % ep or (ranks % ep and ep % ranks):
        return f"--ep {ep} must divide {ranks} (shard x tp), or be a multiple that divides {every}"
    return ""


@lru_cache(256)
def mixtures_of(model: Llama) -> int:
    return sum(isinstance(module, Experts) for module in model.modules())


def sends(model: Llama, work) -> Iterator[tuple]:
    """The bytes of all-to-alls are those of a rank on average over ep. Under --tp a mixture does
    not gather tokens. But costs/page.py counts gathers for every feed-forward: negative calls take
    those of mixtures back."""
    config = work.model.config
    tp = work.parallel.tp
    forwards = 1 + work.parallel.recomputes + work.references
    calls = work.microbatches * mixtures_of(model)
    row = config.dim * work.parallel.weight_bytes  # bytes
    rows = work.tokens / tp * config.top_k
    yield "ep", "all-to-all", calls * (2 + 2 * forwards), rows * row
    yield "ep", "all-to-all", calls * forwards, 8 * config.n_experts
    gathered = work.microbatch * ceil(work.length / tp) * tp * row
    yield "tp", "all-gather", -calls * (1 + forwards), gathered
    yield "tp", "reduce-scatter", -calls * (2 + work.references), gathered


def suggests(facts) -> str:
    lever = "a smaller --ep, if memory allows, sends fewer rows"
    if facts.crosses_nodes("ep"):
        lever = f"--ep {facts.per_node} or less stays within a node"
    return facts.waits("ep", "rows of experts", lever)


TECHNIQUE = Technique("ep", spread_experts, refuses, sends=sends, suggests=suggests)
