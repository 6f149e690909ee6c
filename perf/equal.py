"""Compare one training step on this mesh with the same step on one process, in float64.

    torchrun --nproc-per-node 2 bench.py equal --tp 2        model.py as it stands, other flags too

Every rank also takes the whole step by itself, so choose a small --model. Compared are, in the
order in which a step computes them: the output of every module (forward), its gradient (backward),
the gradient of every parameter after it was summed over ranks (reduction), and the weights after
the optimizer's step (update). If they differ, the first difference is where to look: all that comes
later only follows from it.

A rank computes some rows of the batch, along cp some tokens of a row, and along tp some tokens or
features; it compares them with the same part of what one process computes.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from model import Llama
from parallel import World, parallelize
from plumbing.shards import chunk_of
from runs.check_model import one_process
from runs.setup import Job
from techniques.context_parallel import own_tokens
from techniques.zero1 import optimizer_parameters
from text.batch import Batch
from train import accumulate, update

# DTensor warns that gathering a matrix that is sharded twice is slow: here it need not be fast.
logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)

TOLERANCE = 1e-9  # of relative differences; rounding in float64 causes about 1e-14
CAUSES = {
    "forward": "a mean, a norm or a mask that takes a rank's heads, features, tokens or entries of "
    "the vocabulary for all of them; heads in another order; a wrong entry in PLAN",
    "backward": "a collective without its backward: partial gradients have to be summed over the "
    "ranks; .detach() around a collective",
    "reduction": "a parameter whose gradient is not summed over tp or data ranks (its entry in "
    "PLAN), or is scaled by a number of ranks; a microbatch that counts twice or not at all",
    "update": "an optimizer that takes a shard for the whole matrix, or weights that other ranks "
    "have updated and that were not gathered",
}


@dataclass
class RecordedStep:
    """The tensors of a step by name, for each phase in the order in which they were computed."""

    forward: dict[str, list[Tensor]] = field(default_factory=dict)  # one for each microbatch
    backward: dict[str, list[Tensor]] = field(default_factory=dict)
    reduction: dict[str, Tensor] = field(default_factory=dict)
    update: dict[str, Tensor] = field(default_factory=dict)
    loss: float = 0.0
    grad_norm: float = 0.0


def measure_equality(
    job: Job,
    world: World,
    whole_batch: Batch,
    batch: Batch,
    microbatch: int,
    optimizer_of: Callable,
) -> str:
    """Take one step on `whole_batch` in this process, and the same step on the mesh, where `batch`
    is this rank's share; return a report. optimizer_of(model) returns an optimizer."""
    group, _ = dist.new_subgroups(1)  # this rank alone
    with torch.device("meta"):
        model = Llama(job.whole.config)
    unsplit = replace(one_process(world), group=group)
    expected = take_step(model, job.initialize, whole_batch, microbatch, optimizer_of, unsplit)
    found = take_step(job.model, job.initialize, batch, microbatch, optimizer_of, world)
    return report(expected, found, world, len(whole_batch.tokens))


def take_step(
    model: Llama,
    initialize: Callable,
    batch: Batch,
    microbatch: int,
    optimizer_of: Callable,
    world: World,
) -> RecordedStep:
    """Split and initialize a model on meta, and train it for one step on `batch`."""
    runner, recorded = parallelize(model, world, initialize), RecordedStep()
    for name, module in model.named_modules():
        if name:
            module.register_forward_hook(partial(record_output, recorded, name))
    optimizer = optimizer_of(model)
    loss = accumulate(runner, batch.to(world.device), microbatch, world)
    averaged_over = world.parallel.replicate * world.parallel.shard  # by DDP and FSDP
    for name, parameter in reversed(optimizer_parameters(model).items()):
        if parameter.grad is not None:  # `update` raises if it is None
            recorded.reduction[name] = whole_tensor(parameter.grad) * averaged_over
    totals = update(optimizer, loss, batch, clip=1.0, world=world, step=1)
    recorded.loss, recorded.grad_norm = totals.loss, totals.grad_norm
    for name, parameter in model.named_parameters():
        recorded.update[name] = whole_tensor(parameter)
    return recorded


def record_output(recorded: RecordedStep, name: str, module: nn.Module, inputs, output) -> None:
    """Keep the output of a module, and its gradient as soon as backward has computed it."""
    recomputes = torch._C._current_graph_task_id() != -1  # in backward, with checkpointing
    if isinstance(output, Tensor) and not recomputes:
        recorded.forward.setdefault(name, []).append(output.detach().clone())
        if output.requires_grad:
            gradients = recorded.backward.setdefault(name, [])
            output.register_hook(lambda grad: gradients.append(grad.detach().clone()))


@torch.no_grad()
def whole_tensor(tensor: Tensor) -> Tensor:
    """Return a copy of a tensor, gathered if it is a DTensor."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


# --------------------------------------------------------------------------------------- comparing


def own_part(expected: Tensor, found: Tensor, world: World, batch_size: int) -> Tensor:
    """Return the part of `expected` [B, T, ...] that this rank computes: its rows, its tokens along
    cp and, unless `found` was gathered over tp and has them all, its features or heads."""
    rows = batch_size // world.data_size
    part = expected[world.data_rank * rows : (world.data_rank + 1) * rows]
    if world.cp_mesh is not None:
        part = own_tokens(part, world.cp_mesh.get_local_rank(), world.parallel.cp)
    for dim, (n, own) in enumerate(zip(part.shape, found.shape)):
        if n != own and dim > 1:
            part = chunk_of(part, world.mesh["tp"], 0, dim)
    return part


def differences(expected: RecordedStep, found: RecordedStep, world: World, batch_size: int) -> dict:
    """Return, for each phase, (name, relative difference, factor) of each tensor, in the order of
    one process, from the rank where they differ most. `factor` is the c that minimizes the norm of
    found - c expected."""
    results = {}
    for phase in CAUSES:
        theirs, ours = getattr(expected, phase), getattr(found, phase)
        if phase == "backward":  # forward made its entries, from the first module to the last
            theirs = dict(reversed(theirs.items()))
        rows = torch.zeros(len(theirs), 3, dtype=torch.float64)  # |a - b|², |b|², a · b
        for row, (name, b) in zip(rows, theirs.items()):
            if name not in ours:
                continue  # another stage of the pipeline has it
            a = ours[name]
            if phase in ("forward", "backward"):
                a, b = torch.cat([whole_tensor(part) for part in a]), torch.cat(b)
                b = own_part(b, a, world, batch_size)
            if a.shape != b.shape:
                row[:] = torch.tensor([torch.inf, 1.0, 0.0])
            elif b.numel():
                row[:] = torch.stack([(a - b).norm() ** 2, b.norm() ** 2, (a * b).sum()])
        gathered = [None] * world.size
        dist.all_gather_object(gathered, rows)
        error, norm, product = torch.stack(gathered).unbind(-1)  # [ranks, tensors]
        relative = (error / norm.clamp(min=1e-300)).sqrt().where(norm > 0, error.sqrt())
        worst, rank = relative.max(0)
        factor = (product / norm).gather(0, rank[None])[0]
        results[phase] = list(zip(theirs, worst.tolist(), factor.tolist()))
    return results


def report(expected: RecordedStep, found: RecordedStep, world: World, batch_size: int) -> str:
    """Return in words whether two steps are equal, and if not, where they first differ."""
    ranks, lines, largest = f"{world.size} processes", [], 0.0
    for name in ("loss", "grad_norm"):
        a, b = getattr(found, name), getattr(expected, name)
        name = name.replace("grad_norm", "gradient norm")
        lines.append(f"{name:14}{b:.15g} on one process, {a:.15g} on {ranks}")
    for phase, tensors in differences(expected, found, world, batch_size).items():
        for name, error, factor in tensors:
            largest = max(largest, error)
            if not error <= TOLERANCE:
                is_scaled = abs(factor - 1) > 1e-3 and abs(abs(factor - 1) / error - 1) < 1e-6
                scaled = f", {factor:.4g} times what it should be" * is_scaled
                what = {"forward": "the output of ", "backward": "the gradient of the output of "}
                return "\n".join([
                    *lines,
                    f"different    first in {phase}: {what.get(phase, '')}{name}{scaled}, relative "
                    f"difference {error:.2g}",
                    f"usual causes {CAUSES[phase]}",
                ])  # fmt: skip
        lines.append(f"{phase:14}equal: {len(tensors)} tensors")
    return "\n".join([*lines, f"equal         the largest relative difference is {largest:.1e}"])
