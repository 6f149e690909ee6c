"""Run by torchrun on two ranks: the loss of rank 1 is not finite. Prints each rank's error, and
whether its weights and moments stayed as they were."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

from model import Llama, LlamaConfig
from parallel import parallelize, with_mesh
from plumbing.parser import Parser
from plumbing.processes import UserError, init_distributed, run
from runs.flags import add_optimizer_flags
from text.batch import Batch
from train import make_optimizer, train_step


def main():
    world = with_mesh(init_distributed())
    with torch.device("meta"):
        model = Llama(LlamaConfig(32, 2, 4, 2, 48, vocab_size=101))
    runner = parallelize(model, world, Llama.init_weights)
    optimizer = make_optimizer(model, Parser.defaults(add_optimizer_flags, lr=1e-2))
    tokens = torch.arange(34).view(2, 17)
    batch = Batch(tokens[:, :-1], tokens[:, 1:], None, 1)
    train_step(runner, optimizer, batch, 1, 1.0, world, step=1)
    if world.rank == 1:
        runner.register_forward_hook(lambda module, inputs, loss: loss * torch.nan)
    weights = [p.clone() for p in model.parameters()]
    moments = [optimizer.state[p]["exp_avg"].clone() for p in model.parameters()]
    try:
        train_step(runner, optimizer, batch, 1, 1.0, world, step=2)
    except UserError as error:
        kept = all(map(torch.equal, weights, model.parameters())) and all(
            torch.equal(m, optimizer.state[p]["exp_avg"])
            for m, p in zip(moments, model.parameters())
        )
        print(f"rank {world.rank} kept {kept}: {error}", flush=True)


if __name__ == "__main__":
    run(main)
