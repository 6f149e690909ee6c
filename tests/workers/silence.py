"""Run by torchrun on two ranks: train with silenced passes between the steps, and without. For each
configuration of the arguments, print whether silenced collectives do nothing and both trainings
give the same weights."""

import sys
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

from config import ParallelConfig
from model import Llama, LlamaConfig
from parallel import World, parallelize, with_mesh
from perf.instruments import Training, build_on_meta, silenced
from perf.step import dims_of, stamped_step
from plumbing.processes import init_distributed, run
from plumbing.shards import assign_shard, to_local
from techniques.optimizers import make_optimizer
from text.batch import Batch

CONFIGS = {
    "ddp": ParallelConfig(replicate=2),
    "zero1": ParallelConfig(dp="zero1", replicate=2),
    "fsdp": ParallelConfig(dp="fsdp", shard=2, checkpointing="full"),
    "reshard none": ParallelConfig(dp="fsdp", shard=2, reshard="none"),
    "tp": ParallelConfig(tp=2),
}


def train(world: World, with_silenced_passes: bool) -> list[torch.Tensor]:
    """Return this rank's weights after three steps of two microbatches each."""
    model = build_on_meta(LlamaConfig(32, 2, 4, 2, 48, vocab_size=101))
    runner = parallelize(model, world, partial(Llama.init_weights, assign=assign_shard))
    optimizer = make_optimizer(model, ParallelConfig(), lr=1e-2)
    for step in range(3):
        torch.manual_seed(10 * step + world.data_rank)
        tokens = torch.randint(101, (2, 17))
        batch = Batch(tokens[:, :-1], tokens[:, 1:].contiguous(), None, 1)
        training = Training(world, model, runner, optimizer, iter([batch, batch]), microbatch=1)
        training()
        if with_silenced_passes:
            assert "pass" in stamped_step(training, dims_of(world))()
    return [to_local(p.detach()).clone() for p in model.parameters()]


def main():
    process = init_distributed()
    for name in sys.argv[1:]:
        world = with_mesh(process, CONFIGS[name])
        (dim,) = (d for d in world.mesh.mesh_dim_names if world.mesh[d].size() > 1)
        one, group = torch.ones(1), world.mesh.get_group(dim)
        with silenced(torch.nn.Identity(), world, [dim]):
            dist.all_reduce(one, group=group)
        is_silenced = one.item() == 1
        dist.all_reduce(one, group=group)
        same = all(map(torch.equal, train(world, True), train(world, False)))
        if world.rank == 0:
            found = f"silenced {is_silenced}, sum after it {one.item():g}, same weights {same}"
            print(f"{name}: {found}", flush=True)


if __name__ == "__main__":
    run(main)
