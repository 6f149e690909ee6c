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
    raise NotImplementedError("about 8 lines")
