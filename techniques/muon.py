"""Muon, an optimizer for matrices (Jordan 2024, kellerjordan.github.io/posts/muon).

AdamW treats a matrix as a list of numbers. But in the gradient of a matrix a few directions, which
most tokens share, are far larger than all others. Muon makes all directions of an update nearly
equally long: it replaces U S Vᵀ, the singular value decomposition, by U Vᵀ. So what is rare in the
text is learnt too.

    gradient ── momentum ── orthogonalize: U S Vᵀ -> U Vᵀ ── scale ── weight

Muon updates the matrices of the blocks. AdamW updates embedding and output, whose rows belong to
single tokens, and norms and biases, which are no matrices. Both have the same learning rate. Muon
keeps one moment of each weight, AdamW two.

A shard of a matrix cannot be orthogonalized alone. So n ranks that have parts of the same layers
take n matrices at a time, and each orthogonalizes a whole one:

    rank i   part of each update ── all-to-all ── matrix i ── orthogonalize ── all-to-all ── parts

Of experts a rank has whole matrices, and orthogonalizes its own. Each replica repeats this.

Communication in a step: the matrices of the layers have M elements of e bytes (2 on a GPU with
--dtype bfloat16). In the first all-to-all a rank sends its parts of others' matrices, at most
M e / n bytes where they are sharded over all n ranks. In the second it sends the parts of its own
matrices, M e / n bytes to each replica. DDP needs only the second: each rank has whole updates.

Use to train from scratch, where it is the default: with two of three seeds it learned more in less
time (docs/speedrun.md). Avoid for adapters, whose factors are no matrices of the model, and to go
on from a base that AdamW has trained.
torch.optim.Muon has settings for coefficients, iterations and scale, and this Muon has none. But
torch's updates only matrices, always in bfloat16, and does not divide the work among ranks.
"""

import functools
import itertools
import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.adamw import adamw

from model import Llama
from plumbing.shards import dims_of, matrices_of, shard_of, sharded_over, to_local
from techniques.parallel_layers import sharded_dim
from techniques.technique import Technique

MOMENTUM = 0.95
# The Newton-Schulz iteration with Jordan's coefficients: five steps bring singular values from
# 0.0015 to 1 into 0.68 to 1.2, which is near enough to 1. Those below 0.0015 stay smaller.
A, B, C, ITERATIONS = 3.4445, -4.7750, 2.0315, 5


class Muon(torch.optim.Optimizer):
    """Muon for the parameters with these `names`, matrices or the stacked matrices of experts;
    AdamW for all others.

    groups: as for any optimizer, but of (name, parameter); each has its own weight_decay
    world: the World (parallel.py) that the model is split over"""

    def __init__(self, groups, lr: float, betas: tuple[float, float], world, names: set[str]):
        super().__init__(groups, dict(lr=lr, betas=betas, eps=1e-8, weight_decay=0.0))
        self.names = names
        self.peers = Peers(world)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Update all parameters."""
        for group in self.param_groups:
            matrices, stacks, others = [], [], []
            for name, parameter in zip(group["param_names"], group["params"]):
                if name not in self.names:
                    others.append(parameter)
                elif parameter.ndim == 2:
                    matrices.append(parameter)
                else:
                    stacks.append(parameter)
            for batch in self.peers.batches(matrices):
                advanced = [self.advance(matrix) for matrix in batch]
                for matrix, update in zip(batch, self.peers.orthogonalize(batch, advanced)):
                    self.change(matrix, update, group)
            for stack in stacks:  # of experts, of which each rank has whole ones
                advanced = self.advance(stack)
                update = orthogonalize(self.peers.rounded(advanced))
                self.change(stack, update.to(advanced), group)
            if others:
                self.update_by_adamw(others, group)

    def change(self, parameter: Tensor, update: Tensor, group: dict) -> None:
        """Change a matrix, or a stack of matrices, by this rank's part of U Vᵀ.

        U Vᵀ of m rows and n columns has a root mean square of 1 / sqrt(max(m, n)). Liu et al. 2025
        (arXiv:2502.16982) scale it to 0.2, to match AdamW's updates. Here both have the same
        learning rate, and 0.1 was better."""
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        scale = 0.1 * math.sqrt(max(parameter.shape[-2:]))
        to_local(parameter).sub_(update, alpha=group["lr"] * scale)

    def advance(self, parameter: Tensor) -> Tensor:
        """Advance a matrix's momentum; return this rank's part of the update to orthogonalize."""
        gradient = parameter.grad
        state = self.state[parameter]
        if not state:
            state["momentum"] = torch.zeros_like(gradient)
        momentum = state["momentum"].lerp_(gradient, 1 - MOMENTUM)
        return to_local(gradient.lerp(momentum, MOMENTUM))  # Nesterov: momentum looks a step ahead

    def update_by_adamw(self, parameters: list[Tensor], group: dict) -> None:
        states = [self.state[parameter] for parameter in parameters]
        for parameter, state in zip(parameters, states):
            if not state:
                state["step"] = torch.zeros((), device=parameter.device)
                state["exp_avg"] = torch.zeros_like(parameter)
                state["exp_avg_sq"] = torch.zeros_like(parameter)
        beta1, beta2 = group["betas"]
        adamw(
            parameters,
            [parameter.grad for parameter in parameters],
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [],  # the largest second moments, for AMSGrad
            [state["step"] for state in states],
            lr=group["lr"],
            beta1=beta1,
            beta2=beta2,
            eps=group["eps"],
            weight_decay=group["weight_decay"],
            amsgrad=False,
            maximize=False,
            fused=True,
        )


class Peers:
    """The ranks that have parts of the same layers: those along replicate, shard and tp."""

    def __init__(self, world):
        parallel = world.parallel
        self.sizes = dict(replicate=parallel.replicate, shard=parallel.shard, tp=parallel.tp)
        self.group = world.stage_group
        # A GPU multiplies many times as fast in bfloat16, and there are half as many bytes to send.
        on_gpu = world.device.type == "cuda"
        self.in_bfloat16 = on_gpu and parallel.dtype == torch.bfloat16
        indices = itertools.product(*map(range, self.sizes.values()))
        self.places = [dict(zip(self.sizes, index)) for index in indices]  # by rank
        self.rank = dist.get_rank(self.group) if len(self.places) > 1 else 0

    def rounded(self, update: Tensor) -> Tensor:
        """Return an update in the dtype in which it is sent and orthogonalized."""
        return update.bfloat16() if self.in_bfloat16 else update

    def batches(self, matrices: list[Tensor]) -> Iterator[list[Tensor]]:
        """Yield as many matrices at a time as there are ranks, sorted so that sizes are similar."""
        by_size = sorted(matrices, key=torch.numel, reverse=True)
        for start in range(0, len(by_size), len(self.places)):
            yield by_size[start : start + len(self.places)]

    def orthogonalize(self, matrices: list[Tensor], updates: list[Tensor]) -> list[Tensor]:
        """Let rank i orthogonalize the update of matrix i. `updates` are this rank's parts of the
        updates; return its parts of the results."""
        parts = [self.rounded(update) for update in updates]
        if len(self.places) == 1:
            return [orthogonalize(parts[0]).to(updates[0])]
        # If there are fewer matrices than ranks, the last ranks take empty ones.
        padding = [parts[0].new_empty(0, 0)] * (len(self.places) - len(parts))
        matrices = matrices + padding
        parts = parts + padding
        if any(self.is_sharded(matrix) for matrix in matrices):
            my_update = self.assembled(matrices, parts)
        else:
            my_update = parts[self.rank]
        my_update = orthogonalize(my_update)
        # Send each rank its part of my update.
        shards = self.shards_of(my_update, matrices[self.rank])
        received = self.all_to_all(shards, parts)
        return [part.to(update) for part, update in zip(received, updates)]

    def is_sharded(self, matrix: Tensor) -> bool:
        return any(self.sizes[dim] > 1 for dim in sharded_over(matrix))

    def assembled(self, matrices: list[Tensor], parts: list[Tensor]) -> Tensor:
        """Send each rank this rank's part of the update of that rank's matrix. Return the update of
        this rank's matrix, put together from what others send."""
        nothing = parts[0].new_empty(0, 0)
        my_matrix = matrices[self.rank]
        my_update = nothing.new_empty(my_matrix.shape)
        shards = self.shards_of(my_update, my_matrix)  # views, through which it is filled
        sent = []
        for rank, matrix in enumerate(matrices):
            sent.append(parts[rank] if self.sends_part(matrix, self.rank, rank) else nothing)
            if not self.sends_part(my_matrix, rank, self.rank):
                shards[rank] = nothing
        for shard, part in zip(shards, self.all_to_all(sent, shards)):
            shard.copy_(part)
        return my_update

    def shards_of(self, whole: Tensor, matrix: Tensor) -> list[Tensor]:
        """Return each rank's shard of a whole matrix."""
        return [shard_of(whole, matrix, at) for at in self.places]

    def sends_part(self, matrix: Tensor, rank: int, owner: int) -> bool:
        """Return whether `rank` sends its part to the owner of a matrix. Of several ranks with the
        same part, one does: its index is the owner's in each dimension that replicates the part."""
        place = self.places[rank]
        owner_place = self.places[owner]
        replicating = place.keys() - sharded_over(matrix)
        return all(place[dim] == owner_place[dim] for dim in replicating)

    def all_to_all(self, sent: list[Tensor], like: list[Tensor]) -> list[Tensor]:
        """Send tensor i to rank i; return what each rank sent here, in the shapes of `like`."""
        flat = torch.cat([tensor.flatten() for tensor in sent])
        sent_sizes = [tensor.numel() for tensor in sent]
        sizes = [tensor.numel() for tensor in like]
        received = flat.new_empty(sum(sizes))
        dist.all_to_all_single(received, flat, sizes, sent_sizes, group=self.group)
        return [part.view(tensor.shape) for part, tensor in zip(received.split(sizes), like)]


def orthogonalize(matrix: Tensor) -> Tensor:
    """Return nearly U Vᵀ for a matrix U S Vᵀ [m, n], or for each of a stack [X, m, n]. Division by
    the norm of a matrix makes its singular values s at most 1. Then each iteration turns s into
    A s + B s³ + C s⁵."""
    if matrix.shape[-2] > matrix.shape[-1]:
        return orthogonalize(matrix.mT).mT  # so that the gram matrix is small
    x = matrix if matrix.ndim == 3 else matrix[None]
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=1e-30)
    for _ in range(ITERATIONS):
        gram = x @ x.mT  # U S² Uᵀ
        polynomial = torch.baddbmm(gram, gram, gram, beta=B, alpha=C)  # B gram + C gram²
        x = torch.baddbmm(x, polynomial, x, beta=A)  # A x + polynomial x
    return x.view(matrix.shape)


# ------------------------------------------------------------------ what others ask of a technique


class BlockMatrix(NamedTuple):
    """A trained matrix of a block, as costs count it."""

    shape: torch.Size
    own: int  # its elements on rank 0
    copies: int  # how many ranks along tp have these

    @property
    def size(self) -> int:
        return math.prod(self.shape)


def matrices_in_blocks(model: Llama) -> Iterator[tuple[nn.Module, str, nn.Parameter]]:
    """Yield each block with the name and the value of each of its trained matrices and stacks."""
    for block in model.layers.values():
        names = matrices_of(block)
        for name, parameter in block.named_parameters():
            if name in names and parameter.requires_grad:
                yield block, name, parameter


@functools.lru_cache(1024)
def batches_of_matrices(model: Llama, parallel) -> list[list[BlockMatrix]]:
    """Return batches of matrices. Ranks orthogonalize a batch together: rank i takes matrix i."""
    matrices = []
    for block, name, parameter in matrices_in_blocks(model):
        if parameter.ndim == 3:
            continue
        path, _, own_name = name.rpartition(".")
        dim = dims_of(block.get_submodule(path), sharded_dim(block, path))[own_name]
        own_shape = list(parameter.shape)
        if dim is not None:
            own_shape[dim] = math.ceil(own_shape[dim] / parallel.tp)
        own_shape[0] = math.ceil(own_shape[0] / parallel.shards("optimizer"))
        copies = parallel.tp if dim is None else 1
        matrices.append(BlockMatrix(parameter.shape, math.prod(own_shape), copies))
    matrices.sort(key=lambda matrix: matrix.size, reverse=True)
    n = parallel.group_size("stage")
    return [matrices[start : start + n] for start in range(0, len(matrices), n)]


@functools.lru_cache(1024)
def stacks_on_rank(model: Llama, parallel) -> list[list[int]]:
    """Return the shapes of the stacks of matrices that rank 0 has and orthogonalizes alone."""
    stacks = []
    for _, _, parameter in matrices_in_blocks(model):
        if parameter.ndim == 3:
            n_matrices, *shape = parameter.shape
            # Ranks that share it; but ZeRO-1 slices it as any other parameter.
            sharing = max(parallel.stack_shard, parallel.shards("optimizer"))
            stacks.append([math.ceil(n_matrices / sharing), *shape])
    return stacks


def holds(model: Llama, work) -> dict[str, float]:
    """A matrix has one moment, not two as under AdamW. During an update rank 0 has its parts of two
    batches of matrices, and four whole matrices: its own, two powers of it, and what it sends."""
    parallel = work.parallel
    batches = batches_of_matrices(model, parallel)
    own = [sum(matrix.own for matrix in batch) for batch in batches]
    stacks = [math.prod(shape) for shape in stacks_on_rank(model, parallel)]
    # The first matrix of the first batch is the largest.
    updates = [2 * own[0] + 4 * batches[0][0].size, *(4 * stack for stack in stacks)]
    return {
        "optimizer": -sum(own + stacks) * parallel.moment_bytes,
        "update": max(updates) * parallel.grad_bytes,
    }


def sends(model: Llama, work) -> Iterator[tuple]:
    """Rank 0 takes the first matrix of each batch. It sends its parts of other matrices to their
    owners in its replica. After that it sends each rank its part of the first matrix."""
    parallel = work.parallel
    split_dims = [dim for dim in ("replicate", "shard", "tp") if parallel.group_size(dim) > 1]
    dim = "world" if parallel.pp == 1 else "stage"
    if len(split_dims) == 1:
        (dim,) = split_dims
    in_replica = parallel.shards("optimizer") * parallel.tp  # ranks; rank 0's replica is the first
    replicas = parallel.group_size("stage") // in_replica
    e = 2 if work.on_gpu and parallel.dtype == torch.bfloat16 else parallel.grad_bytes
    for batch in batches_of_matrices(model, parallel):
        first, *others = batch
        sent = replicas * first.copies * first.size - first.own
        for owner, matrix in enumerate(others[: in_replica - 1], 1):
            if owner % matrix.copies == 0:  # of owners along tp that have the same part, the first
                sent += matrix.own
        # Where each rank has whole updates (DDP), it sends none to owners, and one call is enough.
        calls = 1 + any(matrix.own < matrix.size for matrix in batch)
        yield dim, "all-to-all", calls, sent * e / calls


def flops_of_muon(model: Llama, parallel) -> int:
    """Return how many floating-point operations rank 0 needs in a step to orthogonalize its share
    of a model's matrices, or of a stage's. No rank needs more: matrix 0 of a batch is its largest.
    """
    own = [(1, *batch[0].shape) for batch in batches_of_matrices(model, parallel)]
    own += stacks_on_rank(model, parallel)
    flops = 0
    for number, *shape in own:
        m, n = sorted(shape)
        gram = 2 * m * m * n  # and as many for the product with x
        square = 2 * m**3
        flops += ITERATIONS * number * (2 * gram + square)
    return flops


def refuses(work) -> str:
    parallel = work.parallel
    if parallel.offload:
        return "--offload is for AdamW: give --optimizer adamw, too"
    if parallel.moments == "bfloat16":
        return "--moments bfloat16 is for AdamW: give --optimizer adamw, too"
    if not all(parameter.requires_grad for parameter in work.model.parameters()):
        return "--optimizer muon is for whole matrices, not for adapters: leave it out"
    return ""


def about(model: Llama, world) -> str:
    flops = flops_of_muon(model, world.parallel) // world.parallel.pp
    return f"Muon adds {flops / 1e12:.3g} TFLOP a step and rank"


def suggests(facts) -> str:
    if facts.parallel.optimizer == "adamw" or facts.shares.get("optimizer", 0) < 0.15:
        return ""
    return "Muon multiplies and sends matrices: --optimizer adamw does not, but trains differently"


# make_optimizer (optimizers.py) applies it.
TECHNIQUE = Technique(
    "optimizer",
    refuses=refuses,
    holds=holds,
    sends=sends,
    about=about,
    suggests=suggests,
    value="muon",
)
