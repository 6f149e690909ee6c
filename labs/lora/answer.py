"""Why are four GPUs slower than one?

LoRA trains two thin matrices beside each frozen one: less than one hundredth of the parameters. Put
under FSDP as it is, a model gathers and drops its whole frozen base in every microbatch, to train
what would fit in a pocket. Say what is trained, what is sharded, and what is left alone.

Read: the head of lora.py, and ignored_params in the documentation of fully_shard.
"""

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from lora import init_adapters
from model import Llama


def prepare(model: Llama, mesh: DeviceMesh, seed: int) -> torch.optim.Optimizer:
    """Let `model` train its adapters, and nothing else, on the ranks of `mesh`. Each rank calls it.

    Each rank holds all of the model: the weights of the base, and factors lora_A and lora_B without
    values: init_adapters(model, seed) gives them values. Call fully_shard on each block in
    model.layers.values(), then on the model; it must ignore the base. Returns an AdamW for what is
    trained, with lr = 0.01 and without weight decay.
    """
    # >>>
    for name, parameter in model.named_parameters():
        parameter.requires_grad = "lora_" in name
    init_adapters(model, seed)
    frozen = {p for p in model.parameters() if not p.requires_grad}
    for module in (*model.layers.values(), model):
        fully_shard(module, mesh=mesh, ignored_params=frozen)
    trained = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.AdamW(trained, lr=0.01, weight_decay=0.0)
    # <<<


# Why: FSDP gathers what it manages, trained or not. The frozen base is the same on every rank and
# stays so: it needs no gradient, no optimizer state and no exchange, only memory. Where it does not
# fit, fewer bits or tensor parallelism help; gathering it for every microbatch is the slowest way.
# LoRA under FSDP was slower than on one GPU in torchtune (#2264, #1734). In litgpt base and factors
# were in one unit, and FSDP1 took memory for gradients of both (#1417, PR #1538). The optimizer
# comes last, since fully_shard puts new parameters in place of the old ones.
#
# Questions: 1. It all-reduces the factors' gradients, two parts, where FSDP over factors gathers
# them twice and reduce-scatters once, three parts. But a rank keeps all factors, their gradients
# and moments.
# 2. Fewer bits, or a share that stays where it is: tensor parallelism, or a pipeline.
