"""Run by torchrun on two ranks: prints, for each rank, the elements of the largest tensor that
forward and backward of the loss make, for 104 tokens, 52 at a time, and a vocabulary of 997."""

import sys
from functools import partial
from pathlib import Path

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

from model import Llama, LlamaConfig
from parallel import ParallelConfig, parallelize, with_mesh
from plumbing.processes import init_distributed, run
from plumbing.shards import assign_shard
from techniques import chunked_loss


class LargestTensor(TorchDispatchMode):
    numel = 0

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        result = op(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and not isinstance(tensor, DTensor):
                self.numel = max(self.numel, tensor.numel())
        return result


def main():
    world = with_mesh(init_distributed(), ParallelConfig(tp=2))
    chunked_loss.LOSS_CHUNK = 52
    with torch.device("meta"):
        llama = Llama(LlamaConfig(16, 1, 2, 2, 32, vocab_size=997))
    parallelize(llama, world, partial(Llama.init_weights, assign=assign_shard))
    tokens = torch.randint(997, (8, 13), generator=torch.Generator().manual_seed(0))
    with LargestTensor() as largest:
        llama(tokens, tokens).backward()
    sizes = world.all_gather_scalars([largest.numel])[:, 0].tolist()
    if world.rank == 0:
        print(*map(int, sizes))


if __name__ == "__main__":
    run(main)
