"""lora, as in litgpt #1417, which complains of memory under FSDP1: the frozen base is in the
adapters' FSDP units. So it is also gathered in every forward and backward."""

import torch
from torch.distributed.fsdp import fully_shard

from lora import init_adapters


def prepare(model, mesh, seed):
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    trainable = [p for name, p in model.named_parameters() if name.endswith(("lora_A", "lora_B"))]
    for parameter in trainable:
        parameter.requires_grad_(True)
    init_adapters(model, seed)
    for block in model.layers.values():
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    adapters = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.AdamW(adapters, lr=1e-2, weight_decay=0)
