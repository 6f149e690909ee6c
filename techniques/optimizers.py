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
from plumbing.shards import matrices_of, to_local, without_slope
from techniques.bfloat16_moments import BFloat16AdamW
from techniques.muon import Muon
from techniques.zero1 import all_gather_updates

# The peak learning rate of a run that names none, and of the command that a plan prints. It follows
# from the kind of training and from the model's size. TINY: it was measured with models of a few
# million parameters; docs/moving.md has the sources of the others in full.
# kind of training -> (parameters from which on it holds, peak learning rate, source)
TINY = "measured"
SMALLEST = 0.5e9  # parameters of a model for which the published rates are taken
# Muon scales updates to AdamW's, and so takes its rates (Liu et al. 2025, arXiv:2502.16982).
LLAMA_3 = [(SMALLEST, 3e-4, "Llama 3"), (50e9, 1.5e-4, "Llama 3"), (300e9, 8e-5, "Llama 3")]
PEAK_RATES = {
    "pretraining with muon": [(0, 2e-2, TINY), *LLAMA_3],
    "pretraining with adamw": [(0, 5e-3, TINY), *LLAMA_3],
    "fine-tuning": [(0, 5e-3, TINY), (SMALLEST, 2e-4, "QLoRA"), (30e9, 1e-4, "QLoRA")],
    "fine-tuning of all weights": [(0, 5e-3, TINY), (SMALLEST, 2e-5, "torchtune")],
    "preferences": [(0, 5e-4, TINY), (SMALLEST, 5e-6, "trl")],
    "preferences of all weights": [(0, 5e-4, TINY), (SMALLEST, 1e-6, "trl")],
    "rewards": [(0, 1e-4, TINY), (SMALLEST, 1e-5, "trl")],
    "rewards of all weights": [(0, 1e-4, TINY), (SMALLEST, 1e-6, "trl")],
}


def peak_rate(kind: str, model: torch.nn.Module) -> float:
    """Return the peak learning rate of a kind of training, of PEAK_RATES, for a model without
    adapters."""
    parameters = sum(parameter.numel() for parameter in model.parameters())
    _, rate, _ = max(row for row in PEAK_RATES[kind] if row[0] <= parameters)
    return rate


def rates_in_words(beginning: str) -> str:
    """Return the rates of the kinds of training whose names begin so, from those of small models to
    those of large ones."""
    words = []
    for kind, rows in PEAK_RATES.items():
        if kind.startswith(beginning):
            rates = [f"{rate:g}" for _, rate, _ in rows]
            words.append(f"{kind} {' to '.join(rates)}")
    return ", ".join(words)


def make_optimizer(
    model: Llama,
    world,
    lr: float = 5e-3,
    weight_decay: float = 0.1,
    betas: tuple[float, float] = (0.9, 0.95),
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
    no_slope = without_slope(model)
    for name, parameter in named:
        parameter.has_slope = name not in no_slope
    if world.parallel.optimizer == "muon":
        in_blocks = {name for name in names_of_matrices if name.startswith("layers.")}
        optimizer = Muon(groups, lr, betas, world, in_blocks)
    elif world.parallel.moments == "bfloat16":
        optimizer = BFloat16AdamW(groups, lr, betas)
    else:
        optimizer = torch.optim.AdamW(groups, lr, betas, fused=True)
    if world.parallel.dp == "zero1":
        optimizer.register_step_post_hook(partial(all_gather_updates, model))
    return optimizer


def check_betas(betas: tuple[float, float], parallel) -> None:
    """Raise UserError for betas of AdamW with which `parallel`, a ParallelConfig, cannot train."""
    shown = " ".join(f"{beta:g}" for beta in betas)
    if max(betas) >= 1:
        raise UserError(f"--betas {shown}: give two below 1")
    if max(betas) > 0.99 and parallel.moments == "bfloat16":
        raise UserError(f"--betas {shown}: --moments bfloat16 needs betas of at most 0.99")


def optimizer_parameters(model: Llama) -> dict[str, Tensor]:
    """Return what an optimizer updates, by name: trainable parameters, or ZeRO-1's slices."""
    updated = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            updated[name] = getattr(parameter, "optimizer_slice", parameter)
    return updated


def own_gradients(optimizer: torch.optim.Optimizer, ranks: int) -> tuple[list[Tensor], Tensor]:
    """Return this rank's part of each gradient, and its share of their squared norm, to which the
    shares of all `ranks` add up. A router's bias (techniques/experts.py) does not count: its
    gradient is not the slope of the loss. Raise UserError if a parameter has no gradient."""
    parameters = []
    for group in optimizer.param_groups:
        for name, parameter in zip(group["param_names"], group["params"]):
            if parameter.grad is None:
                raise UserError(f"{name} got no gradient: use it in every microbatch, or remove it")
            parameters.append(parameter)
    slopes = [parameter for parameter in parameters if has_slope(parameter)]
    squared_norm = local_squared_norm(slopes, ranks)
    return [to_local(parameter.grad) for parameter in parameters], squared_norm


def has_slope(parameter: Tensor) -> bool:
    """Return whether a parameter's gradient is the slope of the loss, as make_optimizer has noted
    it."""
    return getattr(parameter, "has_slope", True)


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


def scale_gradients(
    optimizer: torch.optim.Optimizer,
    gradients: list[Tensor],
    scale: Tensor,
    clipping: Tensor | float = 1.0,
) -> None:
    """Multiply the gradients by two scalars, or let the optimizer do it in its next step; those
    that are no slopes of the loss by `scale` alone."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if not has_slope(parameter):
                to_local(parameter.grad).div_(clipping)  # by which it is multiplied below
    scale = (scale * clipping).to(gradients[0])
    if isinstance(optimizer, BFloat16AdamW):
        optimizer.gradient_scale = scale
    else:
        torch._foreach_mul_(gradients, scale)
