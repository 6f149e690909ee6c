"""The optimizer of a training: torch's AdamW, AdamW with moments in bfloat16, or Muon.

A step of train.py's `update` asks for this rank's gradients and their norm, scales the gradients,
and lets the optimizer take its step."""

from functools import partial

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from model import Llama
from plumbing.devices import widest_float
from plumbing.messages import UserError
from plumbing.shards import matrices_of, to_local
from techniques.bfloat16_moments import BFloat16AdamW
from techniques.muon import Muon
from techniques.zero1 import all_gather_updates

PEAK_RATES = {"muon": 0.02, "adamw": 0.005}  # of runs that ask for none


def make_optimizer(
    model: Llama, world, lr: float = 5e-3, weight_decay: float = 0.1
) -> torch.optim.Optimizer:
    """Return the optimizer that `world`, a World of parallel.py, asks for. Weight decay applies to
    matrices and not to vectors: norms, biases, magnitudes of DoRA."""
    named = optimizer_parameters(model).items()  # names identify their state in checkpoints
    names_of_matrices = matrices_of(model)
    matrices = [(name, p) for name, p in named if name in names_of_matrices]
    vectors = [(name, p) for name, p in named if name not in names_of_matrices]
    groups = [{"params": matrices, "weight_decay": weight_decay}]
    if vectors:  # a plain adapter has none
        groups.append({"params": vectors, "weight_decay": 0.0})
    options = dict(lr=lr, betas=(0.9, 0.95))
    if world.parallel.optimizer == "muon":
        in_blocks = {name for name in names_of_matrices if name.startswith("layers.")}
        optimizer = Muon(groups, **options, world=world, names=in_blocks)
    elif world.parallel.moments == "bfloat16":
        optimizer = BFloat16AdamW(groups, **options)
    else:
        optimizer = torch.optim.AdamW(groups, **options, fused=True)
    if world.parallel.dp == "zero1":
        optimizer.register_step_post_hook(partial(all_gather_updates, model))
    return optimizer


def optimizer_parameters(model: Llama) -> dict[str, Tensor]:
    """Return what an optimizer updates, by name: trainable parameters, or ZeRO-1's slices."""
    updated = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            updated[name] = getattr(parameter, "optimizer_slice", parameter)
    return updated


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


def local_squared_norm(parameters: list[Tensor], ranks: int) -> Tensor:
    """Return this rank's contribution to the squared norm of gradients: the sum over all ranks is
    the squared norm. A gradient that n ranks hold alike is weighted by 1/n: a plain tensor is held
    by all `ranks`; `copies` of a parameter are those in several stages of a pipeline."""
    by_copies = {}  # how many ranks hold a gradient alike -> this rank's part of such gradients
    for parameter in parameters:
        copies = ranks
        gradient = parameter.grad
        if isinstance(gradient, DTensor):
            copies = 1
            for mesh_dim, placement in enumerate(gradient.placements):
                if placement.is_replicate():
                    copies *= gradient.device_mesh.size(mesh_dim)
        copies *= getattr(parameter, "copies", 1)
        by_copies.setdefault(copies, []).append(to_local(gradient))
    squares = 0
    for copies, gradients in by_copies.items():
        norm = torch.nn.utils.get_total_norm(gradients)
        squares += norm.to(widest_float(norm.device)) ** 2 / copies
    return squares


def scale_gradients(optimizer: torch.optim.Optimizer, gradients: list[Tensor], scale: Tensor):
    """Multiply the gradients by a scalar, or let the optimizer do it in its next step."""
    scale = scale.to(gradients[0])
    if isinstance(optimizer, BFloat16AdamW):
        optimizer.gradient_scale = scale
    else:
        torch._foreach_mul_(gradients, scale)
