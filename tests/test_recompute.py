"""What blocks save for backward, which repeats the rest; and what they keep in CPU memory.

Repetitions are counted in the graphs of compiled blocks. That no result changes is tested in
test_exact.py and, for offloading bit for bit, in test_gpu.py."""

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

from config import ParallelConfig
from model import Block, Llama, LlamaConfig
from parallel import parallelize, with_mesh
from perf.instruments import build_on_meta
from plumbing.processes import Process
from plumbing.shards import assign_shard
from techniques import offload
from techniques.offload import offload_activations

CONFIG = LlamaConfig(64, 1, 4, 4, 176, vocab_size=64)


def graphs_of_a_block(monkeypatch, tp=1, **parallel) -> dict[str, Graph]:
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
    model = build_on_meta(CONFIG)
    runner = parallelize(model, world, partial(Llama.init_weights, assign=assign_shard))
    tokens = torch.zeros(2, 32, dtype=torch.int64)
    runner(tokens, tokens).backward()
    dist.destroy_process_group()
    return graphs


def count(graph: Graph, *names: str) -> int:
    """Return how many operators of a graph have one of these names."""
    called = (node.target.__name__ for node in graph.nodes if node.op == "call_function")
    return sum(operator.split(".")[0] in names for operator in called)


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


# ------------------------------------------------------------------------------------ offloading

ON_CPU = SimpleNamespace(device=torch.device("cpu"))  # a World


def small_model() -> Llama:
    torch.manual_seed(0)
    (model := Llama(LlamaConfig(32, 3, 4, 2, 48, vocab_size=50)).double()).init_weights()
    return model


def test_blocks_take_turns_on_the_gpu(monkeypatch):
    """After forward the GPU has what the last block saved; in backward also what comes next.
    Evaluation offloads nothing."""
    monkeypatch.setattr(offload, "MIN_BYTES", 0)
    blocks, used = [], []  # what each block saved; in each use, of which block something is there

    class Watched(offload.SavedByBlock):
        def __init__(self, *args):
            super().__init__(*args)
            blocks.append(self.tensors)

        def use(self, saved):
            result = super().use(saved)
            used.append([any(t.on_gpu is not None for t in tensors) for tensors in blocks])
            return result

    monkeypatch.setattr(offload, "SavedByBlock", Watched)
    offload_activations(model := small_model(), ON_CPU)
    tokens = torch.arange(24).view(2, 12)
    with torch.no_grad():
        model(tokens, targets=tokens)
    assert not blocks
    loss = model(tokens, targets=tokens)
    assert [all(t.on_gpu is None for t in tensors) for tensors in blocks] == [True, True, False]
    # q, attention's output, two norms' inputs, outputs and what their weights multiply; k, v; gate,
    # silu(gate), up and their product; lse in float32 or float64
    nbytes = 8 * 24 * (8 * 32 + 2 * 16 + 4 * 48)
    for tensors in blocks:
        assert nbytes < sum(t.on_cpu.nbytes for t in tensors) < 1.1 * nbytes
    loss.backward()
    assert used[0] == [False, True, True] and used[-1][0]


def test_a_change_in_place_is_refused_as_without(monkeypatch):
    """Hooks switch off PyTorch's own check: without another, gradients would be wrong."""
    monkeypatch.setattr(offload, "MIN_BYTES", 0)

    def forward(self, x, *rest):
        h = (x * 2).exp()
        return x + h.mul_(3)  # exp has saved h

    monkeypatch.setattr(Block, "forward", forward)
    tokens = torch.arange(12).view(1, 12)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        small_model()(tokens, targets=tokens).backward()
    offload_activations(model := small_model(), ON_CPU)
    with pytest.raises(RuntimeError, match="changed in place a tensor"):
        model(tokens, targets=tokens).backward()
