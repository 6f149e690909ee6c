"""Asynchronous tensor parallelism: the same training, while messages travel."""

import re
from functools import partial

import pytest
import torch
import torch.distributed as dist
from conftest import changed_copy
from exact import assert_same, assert_traffic, case, train
from torch._inductor.utils import run_and_get_code
from torch.testing._internal.distributed.fake_pg import FakeStore

from config import ParallelConfig
from model import Llama, LlamaConfig
from parallel import parallelize, with_mesh
from perf.instruments import build_on_meta
from plumbing.processes import Process
from plumbing.shards import assign_shard

WIDE = dict(dim=64, n_layers=2, n_heads=4, n_kv_heads=4, ffn_dim=128, vocab_size=101)
OPERATORS = {"all_to_all_single.default(": "send", "wait_tensor.default(": "wait",
             "extern_kernels.": "product"}  # fmt: skip


def order_of(code: str) -> str:
    """Return the messages, waits and products of compiled code, in the order of its lines."""
    lines = code[code.index("def call(") :].splitlines()
    lines = [re.sub("#.*", "", line) for line in lines]
    return " ".join(name for line in lines for text, name in OPERATORS.items() if text in line)


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", ["none", "selective"])
def test_compiled_blocks_multiply_while_messages_travel(checkpointing):
    """In the code that torch.compile writes for a block of four ranks, forward and backward."""
    torch._dynamo.reset()
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=4)
    process = Process(rank=1, size=4, local_rank=1, per_node=4, device=torch.device("cpu"))
    options = dict(tp=4, async_tp=True, compile=True, checkpointing=checkpointing)
    model = build_on_meta(LlamaConfig(768, 1, 8, 4, 2304, vocab_size=64))
    initialize = partial(Llama.init_weights, assign=assign_shard)
    runner = parallelize(model, with_mesh(process, ParallelConfig(**options)), initialize)
    tokens = torch.zeros(2, 2048, dtype=torch.int64)
    _, codes = run_and_get_code(lambda: runner(tokens, targets=tokens).backward())
    dist.destroy_process_group()
    forward, backward = map(order_of, codes)
    assert "send wait" not in forward and forward.count("send") == 12
    assert ("send wait" in backward) == (checkpointing == "selective")  # of w2: see its docstring


# One process that rounds as each rank does: a chunk of tokens, and its part of a matrix, at a time.
BY_CHUNKS = """
        parts, chunks = 2, []
        for chunk in x.split(x.shape[1] // parts, 1):
            if self.by_rows:
                pairs = zip(chunk.chunk(parts, 2), self.weight.chunk(parts, 1))
                chunks.append(sum(self.product(c, w.contiguous()) for c, w in pairs))
            else:
                products = [self.product(chunk, w) for w in self.weight.chunk(parts, 0)]
                chunks.append(torch.cat(products, 2))
        return torch.cat(chunks, 1)
"""


def test_8_bits_are_those_of_each_chunk_and_part(tmp_path):
    layer = "model.set_submodule(name, Float8Linear(layer, world.parallel.float8))"
    by_rows = f"{layer}; model.get_submodule(name).by_rows = name.endswith(('wo', 'w2'))"
    edits = {"        return self.product(x, self.weight)\n": BY_CHUNKS, layer: by_rows}
    within = changed_copy(tmp_path / "copy", edits=edits, file="float8")
    recipes, options = ("tensorwise", "rowwise", "mxfp8"), {"seq": 64, "steps": 2}
    one = {recipe: case(WIDE, 2, float8=recipe) | options for recipe in recipes}
    two = {recipe: case(WIDE, 2, float8=recipe, tp=2, async_tp=True) | options for recipe in one}
    expected, found = train(tmp_path, 0, one, within=within), train(tmp_path, 2, two)
    for recipe in recipes:
        assert_same(found[recipe], expected[recipe])
        assert_traffic(found[recipe], two[recipe], 2)
