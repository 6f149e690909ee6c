"""Run by torchrun: three steps on sequences that hold 1, 6, 11 and 16 targets, two a rank of two.

Saves losses, gradient norms and final weights to the file that is its argument."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

from data import Batch
from model import IGNORE, Llama, LlamaConfig
from parallel import parallelize, run, set_up
from train import make_optimizer, train_step

CONFIG = LlamaConfig(32, 2, 4, 2, 48, vocab_size=101)
TOKENS = torch.randint(101, (4, 17), generator=torch.Generator().manual_seed(0))
TARGETS = TOKENS[:, 1:].clone()
for row in range(4):
    TARGETS[row, 1 + 5 * row :] = IGNORE


def main():
    world = set_up()
    with torch.device("meta"):
        model = Llama(CONFIG)
    runner = parallelize(model, world, Llama.init_weights, torch.float64)
    optimizer = make_optimizer(model, 1e-2, 0.1)
    share = slice(world.rank * 4 // world.size, (world.rank + 1) * 4 // world.size)
    batch = Batch(TOKENS[share, :-1], TARGETS[share], None, 1)
    results = []
    for step in (1, 2, 3):
        totals = train_step(runner, optimizer, batch, 1, 0.5, world, step)
        results.append((totals.mean_loss, totals.grad_norm))
    if world.rank == 0:
        torch.save({"results": results, "weights": model.state_dict()}, sys.argv[1])


if __name__ == "__main__":
    run(main)
