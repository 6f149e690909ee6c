"""Run by torchrun: DIR WORK..., where WORK is LAYOUT or SOURCE>LAYOUT.

LAYOUT trains four steps and saves DIR/LAYOUT after the second. SOURCE>LAYOUT resumes DIR/SOURCE in
LAYOUT and trains the other two. Losses and gradient norms of these two go to DIR/WORK.json."""

import json
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

import checkpoint
from config import ParallelConfig
from model import Llama, LlamaConfig
from parallel import parallelize, with_mesh
from plumbing.processes import init_distributed, run
from plumbing.shards import assign_shard
from techniques.optimizers import make_optimizer
from text.batch import Batch
from text.tokenizer import load_tokenizer
from train import train_step

LAYOUTS = {
    "one": ParallelConfig(),
    "ddp2": ParallelConfig("ddp", replicate=2),
    "zero2": ParallelConfig("zero1", replicate=2),
    "fsdp2": ParallelConfig("fsdp", shard=2),
    "tp2": ParallelConfig("ddp", tp=2),
    "fsdp4": ParallelConfig("fsdp", shard=4),
    "hsdp2x2": ParallelConfig("hsdp", replicate=2, shard=2),
    "fsdp2tp2": ParallelConfig("fsdp", shard=2, tp=2),
    "pp2": ParallelConfig("ddp", pp=2),
    "pp2fsdp2": ParallelConfig("fsdp", shard=2, pp=2, schedule="zero-bubble"),
    "pp4": ParallelConfig("ddp", pp=4),
    "muon-fsdp2": ParallelConfig("fsdp", shard=2, optimizer="muon"),
    "muon-tp2": ParallelConfig("ddp", tp=2, optimizer="muon"),
}
BATCH, SEQ, VOCAB = 8, 13, 269
# Neither the vocabulary nor the feed-forward can be sharded evenly over 4 ranks.
CONFIG = LlamaConfig(36, 4, 6, 2, 46, vocab_size=VOCAB)


def steps(first, last, runner, optimizer, world) -> list[list[float]]:
    local_size = BATCH // world.data_size
    rows = []
    for step in range(first, last + 1):
        generator = torch.Generator().manual_seed(step)
        tokens = torch.randint(VOCAB, (BATCH, SEQ + 1), generator=generator)
        tokens = tokens[world.data_rank * local_size :][:local_size]
        batch = Batch(tokens[:, :-1], tokens[:, 1:], None, text_bytes=1)
        totals = train_step(runner, optimizer, batch, local_size // 2, 0.1, world, step)
        rows.append([totals.mean_loss, totals.grad_norm])
    return rows


def main() -> None:
    process = init_distributed()
    directory, tokenizer = Path(sys.argv[1]), load_tokenizer("bytes")
    for work in sys.argv[2:]:
        source, _, layout = work.rpartition(">")
        world = with_mesh(process, replace(LAYOUTS[layout], dtype=torch.float64))
        with torch.device("meta"):
            model = Llama(CONFIG)
        runner = parallelize(model, world, partial(Llama.init_weights, seed=3, assign=assign_shard))
        optimizer = make_optimizer(model, world.parallel, lr=1e-2)
        if source:
            saved = directory / source / "step-00000002"
            assert checkpoint.resume(saved, model, optimizer, tokenizer) == 2
        else:
            steps(1, 2, runner, optimizer, world)
            checkpoint.Saver(directory / layout, model, optimizer, tokenizer, {}).save(2)
        rows = steps(3, 4, runner, optimizer, world)
        if world.rank == 0:
            (directory / f"{work}.json").write_text(json.dumps(rows))


if __name__ == "__main__":
    run(main)
