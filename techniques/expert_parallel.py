"""Expert parallelism: each rank holds some of the experts; tokens travel to them and back.

With --ep N, N neighbours along replicate x shard x tp hold one copy of the experts, X / N each.
Their tokens differ, as before, and whatever is no expert is split as before, too:

    8 ranks, --ep 4, X = 8           experts       shares gradients of experts with
    rank 0  tokens 0     ─┐          0 1           rank 4
    rank 1  tokens 1      │ all-     2 3           rank 5
    rank 2  tokens 2      │ to-all   4 5           rank 6
    rank 3  tokens 3     ─┘          6 7           rank 7
    rank 4  tokens 4     ─┐          0 1           rank 0
    ...

In each block a rank (1) tells the others how many rows it has for each of their experts, (2) sends
the rows, (3) sorts by expert those that arrive, and computes them, (4) sends the results back. All
are all-to-alls, and backward sends gradients the same ways. An expert has then seen the tokens of N
ranks, so that its gradient is summed over those ranks alone that hold the same experts: n / N of n.
What a rank has of the experts, FSDP shards over these ranks.

Communication over ep, a microbatch and block: 4 all-to-alls of rows (2 in forward, 2 in backward)
and one of X counts. The payloads of the N ranks add up to 4 N (tokens of a rank) K D w bytes
whatever the routing, but the payload of one rank depends on it: a step is as slow as the rank that
gets most. FSDP would all-gather 3 X D F w bytes twice and reduce-scatter as many elements: --ep
sends less than FSDP of experts while (tokens of a rank) K < 1.5 X F (with w = g).
Use with many experts and few tokens, or when experts outnumber what a rank can gather. Avoid across
a slow link, and where FSDP hides its all-gathers behind computation.
"""

from collections.abc import Iterator
from functools import partial
from math import ceil

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial
from torch.distributed.tensor.parallel import ParallelStyle

from config import ParallelConfig, Work
from model import Llama
from plumbing.processes import UserError
from plumbing.shards import shard_parameters, to_local
from techniques.experts import Experts, MixtureOfExperts, on_host
from techniques.parallel_layers import GatherTokens
from techniques.technique import Technique

# ------------------------------------------------------------------------------ the exchange


@torch.compiler.disable
def exchange(forward, group: dist.ProcessGroup, rows: Tensor, counts: Tensor) -> Tensor:
    """Compute rows on the ranks that hold their experts.

    rows [n, D] sorted by expert, and so by rank; counts [X] rows of each -> [n, D] in that order.
    `forward` computes rows by this rank's experts."""
    ranks = group.size()
    arriving = counts.clone()  # which stays if `bench.py step` silences the group
    dist.all_to_all_single(arriving, counts, group=group)
    arriving = arriving.view(ranks, -1)  # [N, X/N] rows from each rank, for each expert here
    # The host has to know sizes before it can send: here it waits for all that a GPU has to do.
    sent = on_host(counts.view(ranks, -1).sum(1), len(rows))
    received = on_host(arriving.sum(1), len(rows))
    rows = AllToAll.apply(rows, sent, received, group)  # by rank, and those of a rank by expert
    experts = torch.arange(arriving.shape[1], device=rows.device).repeat(ranks)
    order = experts.repeat_interleave(arriving.flatten(), output_size=len(rows)).argsort(
        stable=True
    )
    out = forward(rows[order], arriving.sum(0))[order.argsort()]
    return AllToAll.apply(out, received, sent, group)


class AllToAll(torch.autograd.Function):
    """Send x [n, D] in parts of `sent` rows to the ranks of a group; return what they sent, parts
    of `received` rows. Backward sends the gradient of each row back to where it came from."""

    @staticmethod
    def forward(ctx, x, sent, received, group):
        ctx.splits = received, sent, group
        out = x.new_empty(sum(received), *x.shape[1:])
        dist.all_to_all_single(out, x.contiguous(), received, sent, group)
        return out

    @staticmethod
    def backward(ctx, gradient):
        return AllToAll.apply(gradient, *ctx.splits), None, None, None


# ------------------------------------------------------------------------- experts on their ranks


def why_no_mesh(parallel: ParallelConfig) -> str:
    ep, ranks = parallel.ep, parallel.shard * parallel.tp
    if parallel.replicate * ranks % ep == 0 and 0 in (ranks % ep, ep % ranks):
        return ""
    return (
        f"--ep {ep} must divide the {ranks} ranks along shard x tp, or be a multiple of {ranks} "
        f"that divides the {parallel.replicate * ranks} ranks along replicate x shard x tp"
    )


def make_mesh(parallel: ParallelConfig, kind: str) -> tuple[DeviceMesh, dict]:
    """Return the same ranks in a mesh with a dimension ep, and its groups by name. Along what is
    left of replicate and shard, ranks hold the same experts. Raises UserError for sizes that do not
    divide."""
    if reason := why_no_mesh(parallel):
        raise UserError(reason)
    dims = "pp", "expert_replicate", "expert_shard", "ep"
    sizes = tuple(getattr(parallel, dim) for dim in dims)
    mesh = init_device_mesh(kind, sizes, mesh_dim_names=dims)
    groups = {dim: mesh.get_group(dim) for dim in dims[1:3]}
    # A new group, as the mesh may have that of all ranks for it.
    groups["ep"], _ = dist.new_subgroups_by_enumeration(mesh.mesh.flatten(0, 2).tolist())
    return mesh, groups


def data_mesh(world) -> DeviceMesh:
    """Return the mesh of the ranks that hold the same experts, over which FSDP shards them."""
    dims = ("expert_replicate",) if world.parallel.expert_replicate > 1 else ()
    return world.expert_mesh[(*dims, "expert_shard")]


def spread_experts(model: Llama, world) -> None:
    """Shard the experts over ep, in place; their parameters become DTensors."""
    mesh, parallel = world.expert_mesh["ep"], world.parallel
    for experts in (module for module in model.modules() if isinstance(module, Experts)):
        for layer in (experts.w1, experts.w2, experts.w3):
            shard_parameters(layer, mesh, 0)
            layer.own = partial(own_experts, parallel.ep // parallel.tp)
        experts.forward = partial(exchange, experts.forward, world.own_groups["ep"])


def own_experts(averaged: int, weight: Tensor) -> Tensor:
    """Return this rank's part of a weight. Its gradient is a sum over the tokens of N ranks, which
    FSDP averages over n / N: divided by N, it is an average over n, as all others. With tensor
    parallelism n, of which averages are, counts ranks along tp once, and N each of them."""
    own = to_local(weight)
    if own.requires_grad:
        own.register_hook(lambda gradient: gradient / averaged)
    return own


# ------------------------------------------------------------------ beside tensor parallelism


class FeedForwardInput(GatherTokens):
    """All-gather the tokens that enter a feed-forward, but not those that enter a mixture: of x
    [B, T, D] a rank has T / tp tokens, and experts take them as those of any other rank."""

    def _apply(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        if not isinstance(module, MixtureOfExperts):
            return super()._apply(module, mesh)

        def forward(x: DTensor, own_tokens=module.forward) -> DTensor:
            whole = dict(shape=x.shape, stride=x.stride(), run_check=False)
            return DTensor.from_local(own_tokens(x.to_local()), mesh, x.placements, **whole)

        module.forward = forward
        return module


class ReplicatedRouter(ParallelStyle):
    """Each rank has the gradient of its tokens, which FSDP sums over tp, as that of a norm."""

    weight_dim = None

    def _apply(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        shard_parameters(module, mesh, self.weight_dim)
        module.own = lambda p: p if p is None else p.to_local(grad_placements=[Partial()])
        return module


class OverEP(ParallelStyle):
    """Leave the weight as it is: spread_experts shards it over ep, of which tp is a part."""

    weight_dim = 0

    def _apply(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        return module


PLAN = {
    "layers.*.feed_forward": FeedForwardInput(),
    "layers.*.feed_forward.router": ReplicatedRouter(),
    **{f"layers.*.feed_forward.experts.{matrix}": OverEP() for matrix in ("w1", "w2", "w3")},
}

# ------------------------------------------------------------------ what others ask of a technique


def refuses(work: Work) -> str:
    """Return why a step cannot compute the experts of its model, in a line, or ""."""
    parallel, X, ep, tp = (
        work.parallel,
        work.model.config.n_experts,
        work.parallel.ep,
        work.parallel.tp,
    )
    if not X:
        return "--ep is for models with experts: give --n-experts, or leave it out" * (ep > 1)
    refusals = {
        "--float8 is not for the products of experts: leave it out": parallel.float8 != "none",
        "--async-tp gathers what experts leave sharded: leave it out": parallel.async_tp,
        f"--tp {tp} with experts needs --ep {tp}, or a multiple of it": ep % tp,
        f"--ep {ep} must divide the {X} experts of the model": X % ep,
        f"--ep does not combine with --dp {parallel.dp}: use --dp fsdp": ep > 1
        and parallel.dp in ("diloco", "zero1"),
        why_no_mesh(parallel): ep > 1 and why_no_mesh(parallel),
    }
    return next((reason for reason, is_so in refusals.items() if is_so), "")


def sends(model: Llama, work: Work) -> Iterator[tuple]:
    """All-to-alls of rows and of counts; the bytes are those of a rank on average over ep. Under
    --tp mixtures do not gather tokens."""
    config, parallel = work.model.config, work.parallel
    again = parallel.checkpointing != "none"  # forward is computed twice
    rows = work.microbatch * work.length / parallel.tp * config.top_k
    blocks = work.microbatches * len(model.layers)
    yield "ep", "all-to-all", blocks * (4 + 2 * again), rows * config.dim * parallel.weight_bytes
    yield "ep", "all-to-all", blocks * (1 + again), 8 * config.n_experts
    whole = work.microbatch * ceil(work.length / parallel.tp) * parallel.tp
    whole *= config.dim * parallel.weight_bytes
    yield "tp", "all-gather", -blocks * (2 + again), whole
    yield "tp", "reduce-scatter", -blocks * 2, whole


def suggests(facts) -> str:
    return facts.waits("ep", "rows of experts", "a smaller --ep, if memory allows, sends fewer")


TECHNIQUE = Technique("ep", spread_experts, sends=sends)
