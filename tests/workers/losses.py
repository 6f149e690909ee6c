"""Losses as a student would write them in model.py. Run with FILE as argument: saves what a
small model computes with each, its vocabulary sharded over all ranks."""

import sys

import torch
from torch.distributed.tensor import DTensor

import model
from config import ParallelConfig
from files.published import with_fixed_weights
from model import LlamaConfig
from parallel import parallelize, with_mesh
from perf.instruments import build_on_meta
from plumbing.processes import init_distributed, run
from runs.equal import small_batch

CONFIG = LlamaConfig(32, 1, 4, 2, 24, vocab_size=101)
ROWS = 45, 15  # sequences, tokens of each: two chunks, and a third of the tokens have no target


def capped(hidden, weight):
    return 3 * torch.tanh(hidden @ weight.T / 3)


def smoothed(logits, targets, vocabulary):
    everywhere = vocabulary.logsumexp(logits) - vocabulary.sum(logits) / vocabulary.size
    return 0.9 * vocabulary.cross_entropy(logits, targets) + 0.1 * everywhere


def with_z(logits, targets, vocabulary):
    return vocabulary.cross_entropy(logits, targets) + 1e-2 * vocabulary.logsumexp(logits) ** 2


def focal(logits, targets, vocabulary):
    loss = vocabulary.cross_entropy(logits, targets)
    return (1 - torch.exp(-loss)) ** 2 * loss


PLAIN = {"logits_of": model.logits_of, "loss_of": model.loss_of}
LOSSES = {
    "plain": {},
    "capped": {"logits_of": capped},
    "smoothed": {"loss_of": smoothed},
    "z-loss": {"loss_of": with_z},
    "focal": {"loss_of": focal},
    "capped and smoothed": {"logits_of": capped, "loss_of": smoothed},
}


def main():
    process = init_distributed()
    world = with_mesh(process, ParallelConfig(tp=process.size, dtype=torch.float64))
    batch, results = small_batch(*ROWS, CONFIG), {}
    for name, changes in LOSSES.items():
        vars(model).update(PLAIN | changes)
        llama = build_on_meta(CONFIG)
        parallelize(llama, world, with_fixed_weights)
        loss = llama(*batch.inputs)
        loss.backward()
        gradients = {
            path: (p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad)
            for path, p in llama.named_parameters()
        }
        with torch.no_grad():
            validation, logits = llama(*batch.inputs), llama(batch.tokens[:2])
        results[name] = dict(loss=loss.detach(), gradients=gradients, validation=validation)
        results[name]["logits"] = logits
    if world.rank == 0:
        torch.save(results, sys.argv[1])


if __name__ == "__main__":
    run(main)
