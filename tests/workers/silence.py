"""Run on two ranks: in each configuration of the arguments, silenced collectives do
nothing, and training with silenced passes between the steps gives the same weights as without."""

import sys

import torch
import torch.distributed as dist

from config import ParallelConfig, Work
from model import LlamaConfig
from models.mixtral import MixtralConfig
from parallel import World, with_mesh
from perf.instruments import build_on_meta, make_step, silenced
from perf.step import dims_of, stamped_step
from plumbing.joining import init_distributed
from plumbing.processes import run
from plumbing.shards import to_local
from text.batch import Batch

CONFIGS = {
    "ddp": ParallelConfig(replicate=2),
    "zero1": ParallelConfig(dp="zero1", replicate=2),
    "fsdp": ParallelConfig(dp="fsdp", shard=2, checkpointing="full"),
    "reshard none": ParallelConfig(dp="fsdp", shard=2, reshard="none"),
    "tp": ParallelConfig(tp=2),
    "ep": ParallelConfig(dp="fsdp", shard=2, ep=2),
}


def train(world: World, with_silenced_passes: bool) -> list[torch.Tensor]:
    """Return this rank's weights after three steps of two microbatches each."""
    torch.manual_seed(world.data_rank)
    tokens = torch.randint(101, (2, 17))
    batch = Batch(tokens[:, :-1], tokens[:, 1:].contiguous(), None, text_bytes=1)
    kind = MixtralConfig if world.parallel.ep > 1 else LlamaConfig
    model = build_on_meta(kind(32, 2, 4, 2, 48, vocab_size=101))
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
        for dim in dims_of(world):
            one = torch.ones(1)
            group = world.own_groups.get(dim) or world.mesh.get_group(dim)
            with silenced(torch.nn.Identity(), world, [dim]):
                dist.all_reduce(one, group=group)
            assert one.item() == 1
            dist.all_reduce(one, group=group)
            assert one.item() == 2
        for ours, expected in zip(train(world, True), train(world, False), strict=True):
            assert torch.equal(ours, expected), name


if __name__ == "__main__":
    run(main)
