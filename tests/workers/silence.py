"""Run by torchrun on two ranks: train with silenced passes between the steps, and without. For each
configuration of the arguments, print whether silenced collectives do nothing and both trainings
give the same weights."""

import sys
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

from config import ParallelConfig, Work
from model import LlamaConfig
from parallel import World, with_mesh
from perf.instruments import build_on_meta, make_step, silenced
from perf.step import dims_of, stamped_step
from plumbing.processes import init_distributed, run
from plumbing.shards import to_local
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
    torch.manual_seed(world.data_rank)
    tokens = torch.randint(101, (2, 17))
    batch = Batch(tokens[:, :-1], tokens[:, 1:].contiguous(), None, text_bytes=1)
    model = build_on_meta(LlamaConfig(32, 2, 4, 2, 48, vocab_size=101))
    training = make_step(Work(model, world.parallel, 4, 1, 16), world, batch)
    for _ in range(3):
        training()
        if with_silenced_passes:
            assert "pass" in stamped_step(training, dims_of(world))()
    return [to_local(p.detach()).clone() for p in training.model.parameters()]


def main():
    process = init_distributed()
    for name in sys.argv[1:]:
        world = with_mesh(process, CONFIGS[name])
        (dim,) = dims_of(world)
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
