"""Run by torchrun: prints, for one training step, the collectives and their payload in bytes."""

import json
import sys
from pathlib import Path

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

import torch.distributed as dist

from data import Batch
from model import Llama, LlamaConfig
from parallel import parallelize, run, set_up
from train import make_optimizer, train_step


class Collectives(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "c10d":
            sizes = [t.nbytes for t in tree_leaves(args) if isinstance(t, torch.Tensor)]
            self.seen.append((function._opname, sizes))
        return function(*args, **(kwargs or {}))


def main():
    world = set_up()
    with torch.device("meta"):
        model = Llama(LlamaConfig(32, 2, 4, 2, 48, vocab_size=267))
    runner = parallelize(model, world, Llama.init_weights)
    optimizer = make_optimizer(model, 1e-3, 0.1)
    tokens = torch.randint(267, (4, 16))
    for warm, microbatch in enumerate((4, 4, 4, 1)):  # DDP settles its buckets at first
        with Collectives() as collectives:
            batch = Batch(tokens, tokens, None, 1)
            train_step(runner, optimizer, batch, microbatch, 1.0, world, step=1)
        if warm > 1 and dist.get_rank() == 0:
            parameters = sum(p.numel() for p in model.parameters())
            print(json.dumps({"parameters": parameters, "seen": collectives.seen}))


run(main)
