"""Run on several ranks: DIR WORK..., where WORK is LAYOUT or SOURCE>LAYOUT, or FILE:LAYOUT or
FILE:SOURCE>LAYOUT for the model of a student's file in tests/changes.

LAYOUT trains four steps and saves DIR/LAYOUT after the second. SOURCE>LAYOUT resumes DIR/SOURCE in
LAYOUT and trains the other two. Losses and gradient norms of these two go to DIR/WORK.json."""

import json
import sys
from pathlib import Path

import torch
from train_cases import BATCH, CLIP, SIZES_OF_FILES, batch_of, build, initialize

import checkpoint
from config import ParallelConfig
from parallel import parallelize, with_mesh
from perf.instruments import Training
from plumbing.joining import init_distributed
from plumbing.processes import run
from techniques.optimizers import make_optimizer
from text.tokenizer import load_tokenizer

CHANGES = Path(__file__).parents[1] / "changes"
LAYOUTS = {
    "one": dict(), "ddp2": dict(replicate=2), "zero2": dict(dp="zero1", replicate=2),
    "fsdp2": dict(dp="fsdp", shard=2), "fsdp4": dict(dp="fsdp", shard=4),
    "hsdp2x2": dict(dp="hsdp", replicate=2, shard=2), "tp2": dict(tp=2), "pp2": dict(pp=2),
    "pp4": dict(pp=4), "pp2fsdp2": dict(dp="fsdp", shard=2, pp=2),
    "fsdp2tp2": dict(dp="fsdp", shard=2, tp=2), "muon-tp2": dict(tp=2, optimizer="muon"),
    "muon-fsdp2": dict(dp="fsdp", shard=2, optimizer="muon"),
    "ep2": dict(dp="fsdp", shard=2, ep=2),
}  # fmt: skip
# Neither the vocabulary nor the feed-forward can be sharded evenly over 4 ranks.
CONFIG = dict(dim=36, n_layers=4, n_heads=6, n_kv_heads=2, ffn_dim=46, vocab_size=269)


def steps(first, last, runner, optimizer, world) -> list[list[float]]:
    share = BATCH // world.parallel.data_size
    rows = []
    for step in range(first, last + 1):
        batch = batch_of(packed=False, seq=14, seed=step)
        own = batch.microbatches(share)[world.data_rank]
        train = Training(world, None, runner, optimizer, iter([own]), share // 2, CLIP)
        totals = train()
        rows.append([totals.mean_loss, totals.grad_norm])
    return rows


def main() -> None:
    process = init_distributed()
    directory = Path(sys.argv[1])
    tokenizer = load_tokenizer("bytes")
    for work in sys.argv[2:]:
        name, _, route = work.rpartition(":")
        source, _, layout = route.rpartition(">")
        family = {"family": str(CHANGES / name)} if name else {}
        sizes = SIZES_OF_FILES.get(name, {})
        parallel = ParallelConfig(**LAYOUTS[layout], dtype=torch.float64)
        world = with_mesh(process, parallel)
        model = build(CONFIG | family | sizes)
        runner = parallelize(model, world, initialize)
        optimizer = make_optimizer(model, world, lr=1e-2)
        if source:
            saved = directory / f"{name}{source}" / "step-00000002"
            assert checkpoint.resume(saved, model, optimizer, tokenizer) == 2
        else:
            steps(1, 2, runner, optimizer, world)
            saver = checkpoint.Saver(
                directory / f"{name}{layout}", model, optimizer, tokenizer, {}, {}
            )
            saver.save(2)
        rows = steps(3, 4, runner, optimizer, world)
        if world.rank == 0:
            (directory / f"{work}.json").write_text(json.dumps(rows))


if __name__ == "__main__":
    run(main)
