"""Muon: the weights of a reference that takes singular values apart, however it is split."""

from dataclasses import replace

import pytest
import torch
from conftest import step_of
from exact import orthogonalized
from torch.utils.flop_counter import FlopCounterMode

from config import ParallelConfig
from costs.machines import assumed_machine
from costs.seconds import step_time
from model import Llama, LlamaConfig
from perf.instruments import build_on_meta
from techniques.optimizers import flops_of_muon, is_block_matrix, orthogonalize


@pytest.mark.parametrize("shape", [(8, 8), (5, 30), (30, 5), (1, 4), (4, 1)])
def test_singular_values_become_alike(shape):
    torch.manual_seed(0)
    matrix = torch.randn(shape, dtype=torch.float64)
    found = orthogonalize(matrix)
    torch.testing.assert_close(found, orthogonalized(matrix), rtol=1e-12, atol=1e-12)
    values = torch.linalg.svdvals(found)
    assert 0.6 < values.min() and values.max() < 1.25
    scaled = orthogonalize(1e-20 * matrix)
    torch.testing.assert_close(scaled, found, rtol=1e-12, atol=1e-12)
    assert not orthogonalize(torch.zeros(shape)).any()


def test_operations_are_counted():
    model = Llama(LlamaConfig(16, 3, 4, 2, 40))
    with FlopCounterMode(display=False) as counter:
        for name, parameter in model.named_parameters():
            if is_block_matrix(name, parameter):
                orthogonalize(parameter.detach())
    total = counter.get_total_flops()
    assert flops_of_muon(model, ParallelConfig()) == total
    # Of 21 matrices, 9 are in 3 batches of feed-forward's alone; no rank has more than rank 0.
    assert total / 3 <= flops_of_muon(model, ParallelConfig("fsdp", shard=3)) < total / 3 * 1.1
    assert flops_of_muon(model, ParallelConfig("hsdp", replicate=7, shard=3)) < total / 9


def test_a_plan_has_the_time_of_muon():
    """What rank 0 computes, and what it sends, which nothing hides: 2 bytes an element on a GPU in
    bfloat16, to owners and back."""
    model = build_on_meta(LlamaConfig(1024, 3, 8, 8, 4096))
    machine = assumed_machine("h100", "400gbit", 8)

    def times(parallel: ParallelConfig, microbatch: int) -> list[dict[str, float]]:
        """Return the seconds of each part of a step, by AdamW and by Muon."""
        options = parallel, replace(parallel, optimizer="muon")
        works = [step_of(model, option, microbatch, 1, 1024, on_gpu=True) for option in options]
        return [step_time(work, machine) for work in works]

    parallel = ParallelConfig("fsdp", shard=8, dtype=torch.bfloat16)
    adamw, muon = times(parallel, 1)
    matrices = 3 * (4 * 1024**2 + 3 * 1024 * 4096)
    rate, link = 989.4e12 * machine.matmul_fraction, machine.node_link
    seconds = flops_of_muon(model, parallel) / rate + 2 * 7 / 8 * 2 * matrices / 8 / link
    assert seconds < muon["optimizer"] - adamw["optimizer"] < 1.2 * seconds
    assert muon | {"optimizer": adamw["optimizer"]} == adamw  # all else is the same
    # Stages wait for forward and backward of others, and not for what Muon sends.
    adamw, muon = times(ParallelConfig("fsdp", shard=2, tp=2, pp=3, schedule="1f1b"), 4)
    assert adamw["pp"] == muon["pp"] > 0
