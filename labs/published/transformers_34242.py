"""mean, as in transformers #34242: each rank takes the mean over its own targets, and the ranks'
means are averaged as if they counted alike."""

import torch
import torch.distributed as dist


def average(parameters, loss, targets, clip):
    n_gpu = dist.get_world_size()
    mean = loss.detach() / targets
    dist.all_reduce(mean)
    mean /= n_gpu
    for p in parameters:
        p.grad.div_(targets)
        dist.all_reduce(p.grad)
        p.grad.div_(n_gpu)
    total_norm = torch.sqrt(sum(p.grad.pow(2).sum() for p in parameters))
    if total_norm > clip:
        for p in parameters:
            p.grad.mul_(clip / total_norm)
    return mean, total_norm
