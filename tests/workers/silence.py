"""Run by torchrun on two ranks: real steps with silenced passes between them, and without. Prints
of each split whether a silenced collective did nothing, and whether both give the same weights."""

import argparse
import sys
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

from data import Batch
from diagnose import Run, plain_step, silenced, silenced_pass
from model import Llama, LlamaConfig
from parallel import Split, arrange, local, parallelize, put_shard, run, set_up
from train import make_optimizer

SPLITS = {
    "ddp": Split(replicate=2),
    "fsdp": Split(dp="fsdp", shard=2, checkpointing="full"),
    "none": Split(dp="fsdp", shard=2, reshard="none"),
    "tp": Split(tp=2),
}


def train(world, silent: bool) -> list[torch.Tensor]:
    """The weights after three steps, of two microbatches each."""
    with torch.device("meta"):
        model = Llama(LlamaConfig(32, 2, 4, 2, 48, vocab_size=101))
    runner = parallelize(model, world, partial(Llama.init_weights, put=put_shard))
    optimizer = make_optimizer(model, 1e-2, 0.1)
    args = argparse.Namespace(batch=2 * world.data_size, microbatch=1, clip=1.0)
    training = Run(args, world, model, runner, optimizer, batches=iter(()))
    for step in range(3):
        torch.manual_seed(10 * step + world.data_rank)
        tokens = torch.randint(101, (2, 17))
        batch = Batch(tokens[:, :-1], tokens[:, 1:].contiguous(), None, 1)
        plain_step(training, batch)
        if silent:
            assert "pass" in silenced_pass(training, training.dims, batch).seconds()
    return [local(p.detach()).clone() for p in model.parameters()]


def main():
    base = set_up()
    for name, split in SPLITS.items():
        world = arrange(base, split)
        (dim,) = (d for d in world.mesh.mesh_dim_names if world.mesh[d].size() > 1)
        one, group = torch.ones(1), world.mesh.get_group(dim)
        with silenced(torch.nn.Identity(), world, [dim]):
            dist.all_reduce(one, group=group)
        quiet = one.item() == 1
        dist.all_reduce(one, group=group)
        same = all(map(torch.equal, train(world, silent=True), train(world, silent=False)))
        if world.rank == 0:
            print(f"{name}: quiet {quiet}, again {one.item():g}, same weights {same}", flush=True)


if __name__ == "__main__":
    run(main)
