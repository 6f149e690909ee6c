"""Two ranks that share experts answer different prompts. One ends after a token, the other reads
more pieces of a prompt and draws more tokens. Writes to argument 1, for each rank, what it has
sampled by the whole model and by its share."""

import sys
from types import SimpleNamespace

import torch
import torch.distributed as dist

from config import ParallelConfig
from models.family import families
from parallel import parallelize, with_mesh
from plumbing.joining import init_distributed
from plumbing.processes import run
from plumbing.shards import assign_shard
from runs.answers import sample
from techniques import decoding

SIZES = dict(vocab_size=300, n_layers=2, dim=32, n_heads=4, n_kv_heads=2, ffn_dim=48)
CONFIG = families()["mixtral"].config(**SIZES)
PROMPTS = [[[1, 2, 3]] * 2, [[*range(4, 15)], [7, 8]]]  # of each rank
RUN = SimpleNamespace(max_new_tokens=12, seed=0)
NUMBERS = [[0, 1], [2, 3]]


def main():
    process = init_distributed()
    rank = process.rank
    decoding.AT_A_TIME = 4  # tokens of a prompt
    one = with_mesh(process, ParallelConfig(replicate=process.size))
    whole = CONFIG.build().double()
    whole.init_weights(1)
    firsts = sample(whole, PROMPTS[0], NUMBERS[0], RUN, (), one).answers
    stop = tuple(answer[0] for answer in firsts)  # so rank 0 draws a token a row
    alone = sample(whole, PROMPTS[rank], NUMBERS[rank], RUN, stop, one)
    world = with_mesh(process, ParallelConfig(dp="fsdp", shard=2, ep=2, dtype=torch.float64))
    with torch.device("meta"):
        model = CONFIG.build()
    parallelize(model, world, lambda model: model.init_weights(1, assign_shard))
    both = sample(model, PROMPTS[rank], NUMBERS[rank], RUN, stop, world)
    found = [None] * process.size
    dist.all_gather_object(found, (alone[:2], both[:2]))
    if rank == 0:
        torch.save(found, sys.argv[1])


if __name__ == "__main__":
    run(main)
