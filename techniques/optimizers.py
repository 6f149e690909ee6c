"""The optimizer of a training: torch's AdamW, AdamW with moments in bfloat16, or Muon.

A step of train.py's `update` asks for this rank's gradients and their norm, scales the gradients,
and lets the optimizer take its step."""

from functools import partial

import torch
from torch import Tensor

from model import Llama
from plumbing.messages import UserError
from plumbing.shards import local_squared_norm, matrices_of, to_local
from techniques.bfloat16_moments import BFloat16AdamW
from techniques.muon import Muon
from techniques.zero1 import all_gather_updates, optimizer_parameters

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
    optimizer.register_step_post_hook(partial(all_gather_updates, model))  # only for ZeRO-1
    return optimizer


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


def scale_gradients(optimizer: torch.optim.Optimizer, gradients: list[Tensor], scale: Tensor):
    """Multiply the gradients by a scalar, or let the optimizer do it in its next step."""
    scale = scale.to(gradients[0])
    if isinstance(optimizer, BFloat16AdamW):
        optimizer.gradient_scale = scale
    else:
        torch._foreach_mul_(gradients, scale)
