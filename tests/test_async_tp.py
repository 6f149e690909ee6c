"""Asynchronous tensor parallelism: the same training, while messages travel."""

import json

import pytest
from conftest import changed_copy, slow, succeed
from exact import assert_same, assert_traffic, case, train

WIDE = dict(dim=64, n_layers=2, n_heads=4, n_kv_heads=4, ffn_dim=128, vocab_size=101)


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", ["none", "selective"])
def test_compiled_blocks_multiply_while_messages_travel(tmp_path, checkpointing):
    """In the code that torch.compile writes for a block of four ranks, forward and backward."""
    file = tmp_path / "order.json"
    succeed("tests/workers/message_order.py", checkpointing, file)
    forward, backward = json.loads(file.read_text())
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


@pytest.mark.parametrize("recipe", ["tensorwise", *map(slow, ("rowwise", "mxfp8"))])
def test_8_bits_are_those_of_each_chunk_and_part(tmp_path, recipe):
    layer = "model.set_submodule(name, Float8Linear(layer, world.parallel.float8))"
    by_rows = f"{layer}; model.get_submodule(name).by_rows = name.endswith(('wo', 'w2'))"
    edits = {"        return self.product(x, self.weight)\n": BY_CHUNKS, layer: by_rows}
    within = changed_copy(tmp_path / "copy", edits=edits, file="float8")
    seq = {"seq": 64 if recipe == "mxfp8" else 16, "steps": 2}
    one = case(WIDE, 2, float8=recipe) | seq
    (expected,) = train(tmp_path, 0, {"one": one}, within=within).values()
    ranks = case(WIDE, 2, tp=2, async_tp=True, float8=recipe) | seq
    (found,) = train(tmp_path, 2, {"ranks": ranks}).values()
    assert_same(found, expected)
    assert_traffic(found, ranks, 2)
