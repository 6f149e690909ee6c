"""Activation checkpointing: what backward repeats, counted in the graphs of compiled blocks."""

from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch._inductor.config
import torch.distributed as dist
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch._dynamo.backends.common import aot_autograd
from torch.fx import Graph
from torch.testing._internal.distributed.fake_pg import FakeStore

from config import ParallelConfig, Work
from costs.page import holds
from model import PRESETS, Llama, LlamaConfig
from parallel import parallelize, with_mesh
from perf.instruments import build_on_meta
from plumbing.processes import Process
from plumbing.shards import assign_shard
from techniques import recompute

CONFIG = LlamaConfig(64, 1, 4, 4, 176, vocab_size=64)


def graphs_of_a_block(monkeypatch, tp=1, config=CONFIG, **parallel) -> dict[str, Graph]:
    """Return the graphs that the compiler makes of a block's forward and backward."""
    graphs = {}

    def keep(name: str, module, inputs):
        graphs[name] = module.graph
        return make_boxed_func(module.forward)

    compilers = dict(fw_compiler=partial(keep, "forward"), bw_compiler=partial(keep, "backward"))
    partition = dict(partition_fn=min_cut_rematerialization_partition)
    backend = aot_autograd(**compilers, **partition)
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    torch._dynamo.reset()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=tp)
    process = Process(rank=0, size=tp, local_rank=0, per_node=tp, device=torch.device("cpu"))
    world = with_mesh(process, ParallelConfig(tp=tp, compile=True, **parallel))
    model = build_on_meta(config)
    runner = parallelize(model, world, partial(Llama.init_weights, assign=assign_shard))
    tokens = torch.zeros(2, 32, dtype=torch.int64)
    runner(tokens, tokens).backward()
    dist.destroy_process_group()
    return graphs


def count(graph: Graph, *names: str) -> int:
    """Return how many operators of a graph have one of these names."""
    called = (node.target.__name__ for node in graph.nodes if node.op == "call_function")
    return sum(operator.split(".")[0] in names for operator in called)


WITH_EXPERTS = replace(CONFIG, n_experts=4)


@pytest.mark.parametrize("kind", ["none", "products", "full"])
def test_a_run_says_that_blocks_with_experts_are_not_compiled(monkeypatch, kind):
    """The compiler leaves out experts, and within a checkpoint all else with them. On a GPU it
    compiles both in bfloat16, whose kernel takes all experts at once (tests/test_gpu.py)."""
    parallel = ParallelConfig(compile=True, checkpointing=kind)
    world = SimpleNamespace(parallel=parallel, device=torch.device("cpu"))
    for dtype, divided in ((torch.bfloat16, False), (torch.float32, kind != "none")):
        in_dtype = replace(parallel, dtype=dtype)
        of_gpu = SimpleNamespace(parallel=in_dtype, device=torch.device("cuda"))
        assert bool(recompute.about(build_on_meta(WITH_EXPERTS), of_gpu)) == divided
    for config, is_compiled in ((CONFIG, True), (WITH_EXPERTS, kind == "none")):
        with monkeypatch.context() as patch:
            assert bool(graphs_of_a_block(patch, config=config, checkpointing=kind)) == is_compiled
        told = recompute.about(build_on_meta(config), world)
        assert told.startswith("blocks are not compiled") != is_compiled
    with monkeypatch.context() as patch:
        patch.setattr(recompute, "stays_uncompiled", lambda *given: False)
        graphs = graphs_of_a_block(patch, config=WITH_EXPERTS, checkpointing=kind)
    assert bool(graphs) == (kind == "none"), "torch can now: compile these blocks, too"


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize(
    "checkpointing, products", [("none", 14), ("products", 14), ("selective", 17), ("full", 20)]
)
def test_a_compiled_block_repeats(monkeypatch, checkpointing, products, tp):
    """Of seven products backward has two each. Beside them it repeats those that are not saved: but
    w2's never, nor attention, nor a reduce-scatter, nor then wo's."""
    products -= checkpointing == "full" and tp > 1
    backward = graphs_of_a_block(monkeypatch, tp, checkpointing=checkpointing)["backward"]
    assert count(backward, "mm", "bmm", "addmm") == products
    assert count(backward, "_scaled_dot_product_flash_attention_for_cpu") == 0
    if tp > 1:  # backward has two of each kind of its own
        assert count(backward, "reduce_scatter_tensor") == 2
        gathers = 2 if checkpointing == "none" else 4
        assert count(backward, "all_gather_into_tensor") == gathers


def test_saved_products_take_bytes_of_one_gpu():
    """The outputs of wq, wv and w1, in bfloat16, of 8B and two sequences of 4,096 tokens."""
    selective = ParallelConfig(dtype=torch.bfloat16, compile=True, checkpointing="selective")
    model = build_on_meta(PRESETS["llama3.1-8b"])
    products = replace(selective, checkpointing="products")
    peaks = [
        holds(Work(model, parallel, 8, 2, 4096, on_gpu=True))["peak"]
        for parallel in (selective, products)
    ]
    assert peaks[1] - peaks[0] == 32 * 8192 * 2 * (4096 + 1024 + 14336)


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
@pytest.mark.parametrize("checkpointing", ["none", "products", "selective", "full"])
def test_largest_numbers_are_not_found_again(monkeypatch, checkpointing, recipe):
    """Backward has those of seven gradients; rowwise also of the rows and columns that are summed
    in its fourteen products, of which those of one input are the same."""
    rowwise = dict(none=24, products=25, selective=27, full=25)
    with torch._inductor.config.patch(emulate_precision_casts=False):
        graphs = graphs_of_a_block(monkeypatch, checkpointing=checkpointing, float8=recipe)
    most = rowwise[checkpointing] if recipe == "rowwise" else 7
    assert count(graphs["backward"], "amax") <= most
