"""Whose mean is it?

The loss of a step is the mean over all of its targets. But each rank knows only the sum over its
own, and ranks have different numbers of them. Turn what the ranks have into what one process would
have.

Read: `update` in train.py does it for all strategies. Then write about 12 lines.
"""

import torch
import torch.distributed as dist
from torch import Tensor


def average(parameters: list[Tensor], loss: Tensor, targets: int, clip: float):
    """Make gradients of sums the gradient of the mean over the targets of all ranks, in place; then
    scale them down to the norm `clip` if theirs is larger. Each rank calls this.

    parameters: parameter.grad is the gradient of this rank's `loss`
    loss: 0-d, the sum of the losses of this rank's targets
    targets: their number
    Returns the mean loss over all ranks, and the norm of the gradient before it was clipped.
    """
    # >>>
    totals = torch.stack([loss.detach(), torch.tensor(float(targets), dtype=loss.dtype)])
    dist.all_reduce(totals)
    for parameter in parameters:
        dist.all_reduce(parameter.grad)
        parameter.grad /= totals[1]
    norm = torch.stack([parameter.grad.norm() for parameter in parameters]).norm()
    for parameter in parameters:
        parameter.grad *= min(1.0, clip / norm)
    return totals[0] / totals[1], norm
    # <<<


# Why: sums can be added up over ranks, whoever has the targets, before the one division. Means
# cannot: in the mean of two means a rank with few targets counts as much as one with many.
# transformers, torchtune and mlx-lm have each divided too early (transformers #24725, torchtune
# #1875, mlx-lm #1413). The norm of a step is that of the sum, so clipping comes last.


def wrong_mean_of_means(parameters, loss, targets, clip):  # transformers #24725
    """this is the mean of the ranks' means"""
    for parameter in parameters:
        parameter.grad /= targets
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()
    norm = torch.stack([parameter.grad.norm() for parameter in parameters]).norm()
    for parameter in parameters:
        parameter.grad *= min(1.0, clip / norm)
    totals = torch.tensor([loss.item(), targets], dtype=loss.dtype)
    dist.all_reduce(totals)
    return totals[0] / totals[1], norm


def wrong_own_count(parameters, loss, targets, clip):
    """each rank divides the sum by its own number of targets"""
    for parameter in parameters:
        dist.all_reduce(parameter.grad)
        parameter.grad /= targets
    norm = torch.stack([parameter.grad.norm() for parameter in parameters]).norm()
    for parameter in parameters:
        parameter.grad *= min(1.0, clip / norm)
    totals = torch.tensor([loss.item(), targets], dtype=loss.dtype)
    dist.all_reduce(totals)
    return totals[0] / totals[1], norm


def wrong_number_of_ranks(parameters, loss, targets, clip):  # what DDP does with sums
    """the sum is divided by the number of ranks"""
    for parameter in parameters:
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()
    norm = torch.stack([parameter.grad.norm() for parameter in parameters]).norm()
    for parameter in parameters:
        parameter.grad *= min(1.0, clip / norm)
    totals = torch.tensor([loss.item(), targets], dtype=loss.dtype)
    dist.all_reduce(totals)
    return totals[0] / totals[1], norm


def wrong_norm_of_own_gradients(parameters, loss, targets, clip):
    """each rank clips by the norm of its own gradients"""
    totals = torch.tensor([loss.item(), targets], dtype=loss.dtype)
    dist.all_reduce(totals)
    norm = torch.stack([p.grad.norm() for p in parameters]).norm() / totals[1]
    for parameter in parameters:
        dist.all_reduce(parameter.grad)
        parameter.grad *= min(1.0, clip / norm) / totals[1]
    return totals[0] / totals[1], norm


def wrong_own_loss(parameters, loss, targets, clip):
    """the loss is the mean over this rank's own targets"""
    total = torch.tensor(float(targets), dtype=loss.dtype)
    dist.all_reduce(total)
    for parameter in parameters:
        dist.all_reduce(parameter.grad)
        parameter.grad /= total
    norm = torch.stack([parameter.grad.norm() for parameter in parameters]).norm()
    for parameter in parameters:
        parameter.grad *= min(1.0, clip / norm)
    return loss / targets, norm


def wrong_gathers_gradients(parameters, loss, targets, clip):  # numbers pass
    """every rank receives the gradients of all others"""
    totals = torch.tensor([loss.item(), targets], dtype=loss.dtype)
    dist.all_reduce(totals)
    for parameter in parameters:
        of_ranks = [torch.empty_like(parameter.grad) for _ in range(dist.get_world_size())]
        dist.all_gather(of_ranks, parameter.grad)
        parameter.grad = sum(of_ranks) / totals[1]
    norm = torch.stack([parameter.grad.norm() for parameter in parameters]).norm()
    for parameter in parameters:
        parameter.grad *= min(1.0, clip / norm)
    return totals[0] / totals[1], norm


def wrong_one_rank_left_out(parameters, loss, targets, clip):  # hangs
    """They parted"""
    totals = torch.tensor([loss.item(), targets], dtype=loss.dtype)
    dist.all_reduce(totals)
    for parameter in parameters:
        if targets < 30:
            dist.all_reduce(parameter.grad)
    return totals[0] / totals[1], totals[0]
