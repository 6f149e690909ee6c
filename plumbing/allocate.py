"""Allocate a model that was built on the meta device, where tensors have shapes and no memory."""

import torch

from model import Llama
from plumbing.processes import UserError


def allocate(model: Llama, device: str | torch.device) -> None:
    """Allocate the parameters of a model, whose values are still to be set.

    Raises UserError for what would be lost without an error: the values of buffers, and parameters
    that are shared without Llama.tie_weights."""
    for name, _ in model.named_buffers():
        raise UserError(f"{name} is a buffer, which would lose its values: compute it in forward")
    distinct = dict(model.named_parameters())
    model.to_empty(device=device)
    model.tie_weights()  # to_empty makes two parameters of a shared one
    for name, _ in model.named_parameters():
        if name not in distinct:
            raise UserError(f"{name} is shared with another layer: do so in Llama.tie_weights, too")
