"""Optimizers: Muon, and AdamW with moments in bfloat16.

Muon is an optimizer for matrices (Jordan 2024, kellerjordan.github.io/posts/muon).

AdamW treats a matrix as a list of numbers. But in the gradient of a matrix a few directions, which
most tokens share, are far larger than all others. Muon makes all directions of an update nearly
equally long: it replaces U S Vᵀ, the singular value decomposition, by U Vᵀ. So what is rare in the
text is learnt too.

    gradient ── momentum ── orthogonalize: U S Vᵀ -> U Vᵀ ── scale ── weight

Muon updates the matrices of the blocks. AdamW updates embedding and output, whose rows belong to
single tokens, and norms, which are not matrices. Both have the same learning rate. Muon keeps one
moment of each weight, AdamW two.

A shard of a matrix cannot be orthogonalized alone. So n ranks that have parts of the same layers
take n matrices at a time, and each orthogonalizes a whole one:

    rank i   part of each update ── all-to-all ── matrix i ── orthogonalize ── all-to-all ── parts

Of experts a rank has whole matrices, and orthogonalizes its own. Each replica repeats this.

Communication in a step: the matrices of the layers have M elements of e bytes (2 on a GPU with
--dtype bfloat16). In the first all-to-all a rank sends its parts of others' matrices, at most
M e / n bytes where they are sharded over all n ranks. In the second it sends the parts of its own
matrices, M e / n bytes to each replica. DDP needs only the second: each rank has whole updates.

torch.optim.Muon has settings for coefficients, iterations and scale, and this Muon has none. But
torch's updates only matrices, always in bfloat16, and does not divide the work among ranks.
"""

import functools
import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim.adamw import adamw

from model import Llama
from plumbing.devices import has_triton
from plumbing.messages import UserError
from plumbing.shards import dims_of, local_squared_norm, shard_of, sharded_over, to_local
from techniques.parallel_layers import writes_to_stream
from techniques.technique import Technique
from techniques.zero1 import all_gather_updates, optimizer_parameters

MOMENTUM = 0.95
# The Newton-Schulz iteration with Jordan's coefficients: five steps bring singular values from
# 0.0015 to 1 into 0.68 to 1.2, which is near enough to 1. Those below 0.0015 stay smaller.
A, B, C, ITERATIONS = 3.4445, -4.7750, 2.0315, 5


class Muon(torch.optim.Optimizer):
    """Muon for the matrices of the blocks, AdamW for all other parameters.

    groups: as for any optimizer, but of (name, parameter); each has its own weight_decay
    world: the World (parallel.py) that the model is split over; None for a single process"""

    def __init__(self, groups, lr: float, betas: tuple[float, float], world=None):
        super().__init__(groups, dict(lr=lr, betas=betas, eps=1e-8, weight_decay=0.0))
        self.peers = Peers(world)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Update all parameters."""
        for group in self.param_groups:
            matrices, stacks, others = [], [], []
            for name, parameter in zip(group["param_names"], group["params"]):
                if not is_block_matrix(name, parameter):
                    others.append(parameter)
                else:
                    (matrices if parameter.ndim == 2 else stacks).append(parameter)
            for batch in self.peers.batches(matrices):
                updates = self.peers.orthogonalize(batch, [self.advance(p) for p in batch])
                for matrix, update in zip(batch, updates):
                    self.change(matrix, update, group)
            for stack in stacks:  # of experts, of which each rank has whole ones
                update = self.advance(stack)
                part = update.bfloat16() if self.peers.in_bfloat16 else update
                self.change(stack, orthogonalize(part).to(update), group)
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
        gradient, state = parameter.grad, self.state[parameter]
        if not state:
            state["momentum"] = torch.zeros_like(gradient)
        momentum = state["momentum"].lerp_(gradient, 1 - MOMENTUM)
        return to_local(gradient.lerp(momentum, MOMENTUM))  # Nesterov: momentum looks a step ahead

    def update_by_adamw(self, parameters: list[Tensor], group: dict) -> None:
        for parameter in parameters:
            if not (state := self.state[parameter]):
                state["step"] = torch.zeros((), device=parameter.device)
                state["exp_avg"] = torch.zeros_like(parameter)
                state["exp_avg_sq"] = torch.zeros_like(parameter)
        keys = "exp_avg", "exp_avg_sq", "step"
        means, squares, steps = ([self.state[p][key] for p in parameters] for key in keys)
        beta1, beta2 = group["betas"]
        settings = {key: group[key] for key in ("lr", "weight_decay", "eps")}
        settings |= dict(beta1=beta1, beta2=beta2, amsgrad=False, maximize=False, fused=True)
        gradients = [parameter.grad for parameter in parameters]
        adamw(parameters, gradients, means, squares, [], steps, **settings)


def is_block_matrix(name: str, parameter: Tensor) -> bool:
    """Return whether Muon updates the parameter of this name, a matrix or the stacked matrices of
    experts; AdamW updates all others."""
    return name.startswith("layers.") and parameter.ndim >= 2


class Peers:
    """The ranks that have parts of the same layers: those along replicate, shard and tp."""

    def __init__(self, world):
        dims = "replicate", "shard", "tp"
        self.sizes = {dim: getattr(world.parallel, dim) if world else 1 for dim in dims}
        self.group = world.stage_group if world else None
        # A GPU multiplies many times as fast in bfloat16, and there are half as many bytes to send.
        on_gpu = world is not None and world.device.type == "cuda"
        self.in_bfloat16 = on_gpu and world.parallel.dtype == torch.bfloat16
        indices = itertools.product(*map(range, self.sizes.values()))
        self.places = [dict(zip(dims, index)) for index in indices]  # by rank
        self.rank = dist.get_rank(self.group) if len(self.places) > 1 else 0

    def batches(self, matrices: list[Tensor]) -> Iterator[list[Tensor]]:
        """Yield as many matrices at a time as there are ranks, sorted so that sizes are similar."""
        by_size = sorted(matrices, key=lambda matrix: math.prod(matrix.shape), reverse=True)
        for start in range(0, len(by_size), len(self.places)):
            yield by_size[start : start + len(self.places)]

    def orthogonalize(self, matrices: list[Tensor], updates: list[Tensor]) -> list[Tensor]:
        """Let rank i orthogonalize the update of matrix i. `updates` are this rank's parts of the
        updates; return its parts of the results."""
        parts = [update.bfloat16() if self.in_bfloat16 else update for update in updates]
        if len(self.places) == 1:
            return [orthogonalize(parts[0]).to(updates[0])]
        # If there are fewer matrices than ranks, the last ranks take empty ones.
        nothing = parts[0].new_empty(0, 0)
        padding = [nothing] * (len(self.places) - len(parts))
        matrices, parts = matrices + padding, parts + padding
        my_matrix, update = matrices[self.rank], parts[self.rank]
        # If matrices are sharded, send each rank my part of its update, and assemble my update.
        if any(self.sizes[dim] > 1 for matrix in matrices for dim in sharded_over(matrix)):
            sent = [part if self.sends_part(matrix, self.rank, owner) else nothing
                    for owner, (matrix, part) in enumerate(zip(matrices, parts))]  # fmt: skip
            update = nothing.new_empty(my_matrix.shape)  # filled through its views, the shards
            shards = [shard if self.sends_part(my_matrix, rank, self.rank) else nothing
                      for rank, shard in enumerate(self.shards_of(update, my_matrix))]  # fmt: skip
            for shard, part in zip(shards, self.all_to_all(sent, shards)):
                shard.copy_(part)
        update = orthogonalize(update)
        # Send each rank its part of my update.
        received = self.all_to_all(self.shards_of(update, my_matrix), parts)
        return [part.to(own) for part, own in zip(received, updates)]

    def shards_of(self, whole: Tensor, matrix: Tensor) -> list[Tensor]:
        """Return each rank's shard of a whole matrix."""
        return [shard_of(whole, matrix, at) for at in self.places]

    def sends_part(self, matrix: Tensor, rank: int, owner: int) -> bool:
        """Return whether `rank` sends its part to the owner of a matrix. Of several ranks with the
        same part, one does: its index is the owner's in each dimension that replicates the part."""
        place, owner_place = self.places[rank], self.places[owner]
        replicating = place.keys() - sharded_over(matrix)
        return all(place[dim] == owner_place[dim] for dim in replicating)

    def all_to_all(self, sent: list[Tensor], like: list[Tensor]) -> list[Tensor]:
        """Send tensor i to rank i; return what each rank sent here, in the shapes of `like`."""
        sizes, sent_sizes = ([tensor.numel() for tensor in tensors] for tensors in (like, sent))
        received = sent[0].new_empty(sum(sizes))
        flat = torch.cat([tensor.flatten() for tensor in sent])
        dist.all_to_all_single(received, flat, sizes, sent_sizes, group=self.group)
        return [part.view(t.shape) for part, t in zip(received.split(sizes), like)]


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


# ------------------------------------------------------------------- AdamW with moments in bfloat16
# With both moments in bfloat16, a parameter takes 12 bytes: weight 4, gradient 4, moments 2 + 2.
# With float32 moments it takes 16. torch's AdamW refuses moments of another dtype than the
# parameters' (torch 2.13), so this is a step of our own. In a step a moment changes by a fraction
# 1 - beta. bfloat16 rounds to 1 part in 256: changes with beta 0.95 are larger than that, but with
# 0.999 they would be lost.


ELEMENTS_AT_A_TIME = 1 << 18  # so many of a parameter fit in a CPU's cache


class BFloat16AdamW(torch.optim.Optimizer):
    """AdamW as in torch (Loshchilov and Hutter 2019, arXiv:1711.05101), but its moments are rounded
    to bfloat16 between steps. It computes in float32, for float64 parameters in float64.
    Each group has its own weight_decay. If `gradient_scale` is set before a step, the update
    multiplies gradients by it, which saves reading and writing them once more.

    Raises ValueError for a beta above 0.99."""

    def __init__(self, params, lr: float, betas: tuple[float, float], eps: float = 1e-8):
        if max(betas) > 0.99:
            raise ValueError(f"betas {betas}: bfloat16 moments need betas of at most 0.99")
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps, weight_decay=0.0))
        self.gradient_scale: Tensor | None = None

    @torch.no_grad()
    def step(self, closure=None) -> None:
        """Update all parameters that have a gradient. Those of a group have to have taken the same
        number of steps. `closure` is ignored; it is there for callers that pass None."""
        batches = defaultdict(list)  # of parameters: of each block, and of all outside of blocks
        for group in self.param_groups:
            names = group.get("param_names", [""] * len(group["params"]))
            factors, settings = None, (*group["betas"], group["eps"])
            for name, parameter in zip(names, group["params"]):
                if parameter.grad is not None:
                    tensors, step = self._advance(parameter)
                    factors = factors or factors_of_step(group, step)
                    # torch 2.11 cannot compile an update of one element.
                    compiled = len(tensors[0]) > 1 and has_triton(tensors[0].device)
                    block = name.split(".")[1] if name.startswith("layers.") else ""
                    batches[settings, compiled, block].append((*tensors, *factors))
        for (settings, compiled, _), batch in batches.items():
            make_update(*settings, compiled)(batch, self.gradient_scale)
        self.gradient_scale = None

    def _advance(self, parameter: Tensor) -> tuple[tuple[Tensor, ...], Tensor]:
        """Count a step. Return the parameter, its gradient and its moments, each flattened to [n],
        and the number of steps. The update writes to views of all but the gradient, which may
        therefore be a copy."""
        state = self.state[parameter]
        if not state:
            state["step"] = torch.zeros(())
            state["exp_avg"] = torch.zeros_like(parameter, dtype=torch.bfloat16)
            state["exp_avg_sq"] = torch.zeros_like(parameter, dtype=torch.bfloat16)
        state["step"] += 1
        outputs = parameter, state["exp_avg"], state["exp_avg_sq"]
        weight, mean, square = (to_local(tensor).view(-1) for tensor in outputs)
        return (weight, to_local(parameter.grad).reshape(-1), mean, square), state["step"].double()


def factors_of_step(group: dict, step: Tensor) -> tuple[Tensor, ...]:
    """Return the factors that change from step to step: the learning rate divided by the correction
    of the first moment; the correction of the second; the factor of weight decay. They are tensors,
    since Python numbers would be compiled in. They stay on the CPU: reading does not wait there."""
    (beta1, beta2), lr = group["betas"], group["lr"]
    keep = torch.full_like(step, 1 - lr * group["weight_decay"])
    return lr / (1 - beta1**step), 1 - beta2**step, keep


@functools.cache
def make_update(beta1: float, beta2: float, eps: float, compiled: bool) -> Callable[..., None]:
    """Return a function that updates parameters and their moments in place. Compiled, it runs one
    kernel for each parameter, which reads and writes 20 bytes a weight. Uncompiled, it reads and
    writes several times as many bytes. It is compiled for fixed shapes, since a kernel for any
    length reads its elements one by one."""

    def update(weight, grad, exp_avg, exp_avg_sq, rate, correction, keep, scale):
        dtype = torch.promote_types(weight.dtype, torch.float32)
        grad = grad.to(dtype) if scale is None else grad.to(dtype) * scale
        mean = exp_avg.to(dtype).lerp_(grad, 1 - beta1)
        square = exp_avg_sq.to(dtype).mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        exp_avg.copy_(mean)
        exp_avg_sq.copy_(square)
        denominator = (square / correction).sqrt_().add_(eps)
        weight.mul_(keep).sub_((mean * rate).div_(denominator))

    def update_whole(parameters, scale):
        for tensors_and_factors in parameters:
            update(*tensors_and_factors, scale)

    def update_parts(parameters, scale):
        for *tensors, rate, correction, keep in parameters:
            for parts in zip(*(tensor.split(ELEMENTS_AT_A_TIME) for tensor in tensors)):
                update(*parts, rate, correction, keep, scale)

    return torch.compile(update_whole, dynamic=False) if compiled else update_parts


# ------------------------------------------------------ the optimizer of a training, its gradients


def make_optimizer(
    model: Llama, parallel, lr: float = 5e-3, weight_decay: float = 0.1
) -> torch.optim.Optimizer:
    """Return Muon or an AdamW; weight decay applies to matrices and not to vectors."""
    named = optimizer_parameters(model).items()  # names identify their state in checkpoints
    matrices = [(name, p) for name, p in named if p.ndim >= 2]
    vectors = [(name, p) for name, p in named if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": weight_decay}]
    if vectors:  # norms, biases, magnitudes of DoRA; a plain adapter has none
        groups.append({"params": vectors, "weight_decay": 0.0})
    options = dict(lr=lr, betas=(0.9, 0.95))
    if parallel.optimizer == "muon":
        world = getattr(model, "world", None)  # set by parallelize
        optimizer = Muon(groups, **options, world=world)
    elif parallel.moments == "bfloat16":
        optimizer = BFloat16AdamW(groups, **options)
    else:
        optimizer = torch.optim.AdamW(groups, **options, fused=True)
    optimizer.register_step_post_hook(all_gather_updates)  # only for ZeRO-1
    return optimizer


def scale_gradients(optimizer: torch.optim.Optimizer, gradients: list[Tensor], scale: Tensor):
    """Multiply the gradients by a scalar, or let the optimizer do it in its next step."""
    scale = scale.to(gradients[0])
    if isinstance(optimizer, BFloat16AdamW):
        optimizer.gradient_scale = scale
    else:
        torch._foreach_mul_(gradients, scale)


def own_gradients(optimizer: torch.optim.Optimizer, ranks: int) -> tuple[list[Tensor], Tensor]:
    """Return this rank's part of each gradient, and a share of their squared norm: over all `ranks`
    the shares add up to it. Raise UserError if a parameter has no gradient."""
    parameters = []
    for group in optimizer.param_groups:
        for name, parameter in zip(group["param_names"], group["params"]):
            if parameter.grad is None:
                raise UserError(f"{name} got no gradient: use it in every microbatch, or remove it")
            parameters.append(parameter)
    squared_norm = local_squared_norm(parameters, ranks)
    return [to_local(parameter.grad) for parameter in parameters], squared_norm


# ------------------------------------------------------------------ what others ask of a technique


def batches_of_matrices(model: Llama, parallel) -> list[list[tuple[torch.Size, int, int]]]:
    """Return batches of matrices. Ranks orthogonalize a batch together: rank i takes matrix i. A
    matrix is given as (shape, its elements on rank 0, how many ranks along tp have these)."""
    block = next(iter(model.layers.values()))
    in_block = []
    for name, parameter in block.named_parameters():
        if parameter.ndim == 2 and parameter.requires_grad:
            path, _, own_name = name.rpartition(".")
            layer_dim = 1 if writes_to_stream(block, path) else 0
            dim = dims_of(block.get_submodule(path), layer_dim)[own_name]
            own_shape, copies = list(parameter.shape), parallel.tp
            if dim is not None:
                own_shape[dim], copies = math.ceil(own_shape[dim] / parallel.tp), 1
            own_shape[0] = math.ceil(own_shape[0] / parallel.shards("optimizer"))
            in_block.append((parameter.shape, math.prod(own_shape), copies))
    n, matrices = parallel.group_size("stage"), in_block * len(model.layers)
    matrices.sort(key=lambda matrix: math.prod(matrix[0]), reverse=True)
    return [matrices[start : start + n] for start in range(0, len(matrices), n)]


def stacks_on_rank(model: Llama, parallel) -> list[list[int]]:
    """Return the shapes of the stacks of matrices that rank 0 has and orthogonalizes alone."""
    block = next(iter(model.layers.values()))
    shapes = [p.shape for p in block.parameters() if p.ndim == 3 and p.requires_grad]
    own = [[math.ceil(n / parallel.stack_shard), *shape] for n, *shape in shapes]
    return own * len(model.layers)


def holds(model: Llama, work) -> dict[str, float]:
    """A matrix has one moment, not two as under AdamW. During an update rank 0 has its parts of two
    batches of matrices, and four whole matrices: its own, two powers of it, and what it sends."""
    parallel, batches = work.parallel, batches_of_matrices(model, work.parallel)
    parts = [sum(own for _, own, _ in batch) for batch in batches]
    update = 2 * parts[0] + 4 * math.prod(batches[0][0][0])  # batch 0 is the largest
    stacks = [math.prod(shape) for shape in stacks_on_rank(model, parallel)]
    return {
        "optimizer": -sum(parts + stacks) * parallel.moment_bytes,
        "update": max([update, *(4 * stack for stack in stacks)]) * parallel.grad_bytes,
    }


def sends(model: Llama, work) -> Iterator[tuple]:
    """Rank 0 takes the first matrix of each batch. It sends its parts of other matrices to their
    owners in its replica. After that it sends each rank its part of the first matrix."""
    parallel = work.parallel
    split_dims = [dim for dim in ("replicate", "shard", "tp") if parallel.group_size(dim) > 1]
    all_dims = "world" if parallel.pp == 1 else "stage"
    dim = split_dims[0] if len(split_dims) == 1 else all_dims
    replica_ranks = parallel.shards("optimizer") * parallel.tp  # rank 0's replica is the first
    replicas = parallel.group_size("stage") // replica_ranks
    e = 2 if work.on_gpu and parallel.dtype == torch.bfloat16 else parallel.grad_bytes
    for batch in batches_of_matrices(model, parallel):
        (shape, own, copies), *others = batch
        # Of owners along tp that have the same part, rank 0 sends it to the first alone.
        to_owners = [part * (i % same == 0) for i, (_, part, same) in enumerate(others, 1)]
        sent = sum(to_owners[: replica_ranks - 1]) + replicas * copies * math.prod(shape) - own
        # Where each rank has whole updates (DDP), it sends none to owners.
        calls = 1 + any(part < math.prod(whole) for whole, part, _ in batch)
        yield dim, "all-to-all", calls, sent * e / calls


def flops_of_muon(model: Llama, parallel) -> int:
    """Return how many floating-point operations rank 0 needs in a step to orthogonalize its share
    of a model's matrices, or of a stage's. No rank needs more: matrix 0 of a batch is its largest.
    """
    flops = 0
    first = [(1, *matrix[0]) for matrix, *_ in batches_of_matrices(model, parallel)]
    for number, *shape in first + stacks_on_rank(model, parallel):
        m, n = sorted(shape)
        gram, square, update = 2 * m * m * n, 2 * m**3, 2 * m * m * n
        flops += ITERATIONS * number * (gram + square + update)
    return flops


def refuses(work) -> str:
    parallel = work.parallel
    if parallel.moments == "bfloat16" or parallel.offload:
        flag = "--offload" if parallel.offload else "--moments bfloat16"
        return f"{flag} is for AdamW: give --optimizer adamw, too"
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


# make_optimizer applies it.
TECHNIQUE = Technique(
    "optimizer",
    refuses=refuses,
    holds=holds,
    sends=sends,
    about=about,
    suggests=suggests,
    value="muon",
)
