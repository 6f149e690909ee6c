"""Asynchronous tensor parallelism: the same training, while messages travel."""

import json

import pytest
from conftest import changed_copy, launch, refused, slow, succeed, with_fault
from test_float8 import WIDE
from test_parallel import (
    FOUR,
    GROUPED,
    RSLORA,
    SEVEN,
    TIED,
    beside,
    case,
    equals_plain,
    holds,
    same_training,
    sends_as_predicted,
    train,
)
from test_pipeline import selected
from test_train import flags

# Rows have 13 tokens, so that no number of ranks divides them, and 16 where `seq` says so.


def sharing(config: dict, microbatch: int | None = None, packed: bool = False, **options) -> dict:
    return case(config, microbatch, packed, async_tp=True, **options)


TWO = {
    "tp": sharing(GROUPED | TIED, 2, packed=True, tp=2) | {"generate": True},
    "whole": sharing(GROUPED, 4, tp=2) | {"seq": 16},
    "full": sharing(GROUPED, 4, tp=2, checkpointing="full"),
    "selective": sharing(GROUPED, 2, packed=True, tp=2, checkpointing="selective"),
    "lora": sharing(GROUPED | TIED, 4, lora=SEVEN, tp=2),
    "lora w2": sharing(GROUPED, 4, lora=beside("w2"), tp=2, checkpointing="selective"),
    "lora w1": sharing(GROUPED, 2, lora=beside("w1 w3"), tp=2, checkpointing="full"),
    "offloaded": sharing(GROUPED, 4, tp=2, offload_activations=True),
    "offloaded full": sharing(GROUPED, 4, tp=2, offload_activations=True, checkpointing="full"),
    "compiled": sharing(GROUPED, 4, tp=2, compile=True),
    "compiled selective": sharing(GROUPED, 4, tp=2, compile=True, checkpointing="selective"),
    "compiled full": sharing(GROUPED, 4, tp=2, compile=True, checkpointing="full"),
    "compiled lora": sharing(GROUPED, 4, lora=RSLORA, tp=2, compile=True),
}
QUICK = ("tp", "selective", "lora")
FOURFOLD = {
    "fsdp": sharing(GROUPED, 1, packed=True, dp="fsdp", shard=2, tp=2) | {"generate": True},
    "fsdp full": sharing(GROUPED, 2, dp="fsdp", shard=2, tp=2, checkpointing="full"),
    "tp 4": sharing(FOUR | TIED, 2, packed=True, dp="fsdp", tp=4, checkpointing="selective"),
    "tp 4 even": sharing(FOUR, 2, dp="fsdp", tp=4, checkpointing="full") | {"seq": 16},
    "ddp": sharing(GROUPED, 1, dp="ddp", replicate=2, tp=2, checkpointing="selective"),
    "cp": sharing(GROUPED, 4, packed=True, dp="fsdp", shard=2, cp=2, tp=2) | {"seq": 16},
    "pp": sharing(GROUPED | TIED, 2, pp=2, tp=2) | {"steps": 3},
    "pp interleaved": sharing(
        FOUR | {"n_layers": 4}, 2, pp=2, tp=2, schedule="interleaved", stages_per_rank=2
    )
    | {"steps": 3},
    "lora reshard all": sharing(GROUPED, 1, lora=SEVEN, dp="fsdp", shard=2, tp=2, reshard="all"),
    "lora tp 4": sharing(FOUR, 2, lora=RSLORA, dp="fsdp", tp=4),
    "compiled": sharing(GROUPED, dp="fsdp", shard=2, tp=2, compile=True),
}


@pytest.fixture(scope="module")
def two(request, tmp_path_factory):
    return train(tmp_path_factory.mktemp("two"), 2, selected(request, TWO), timeout=600)


@pytest.mark.parametrize("name", [name if name in QUICK else slow(name) for name in TWO])
def test_two_ranks_equal_one(two, name):
    holds(two[name], TWO[name], 2)


@pytest.fixture(scope="module")
def four(request, tmp_path_factory):
    return train(tmp_path_factory.mktemp("four"), 4, selected(request, FOURFOLD), timeout=600)


@pytest.mark.parametrize("name", ["tp 4", *map(slow, sorted(FOURFOLD.keys() - {"tp 4"}))])
def test_four_ranks_equal_one(four, name):
    holds(four[name], FOURFOLD[name], 4)


@pytest.mark.slow
def test_eight_ranks_equal_one(tmp_path):
    cases = {"hsdp": sharing(GROUPED, 1, packed=True, dp="hsdp", replicate=2, shard=2, tp=2)}
    for name, result in train(tmp_path, 8, cases, timeout=600).items():
        holds(result, cases[name], 8)


@pytest.mark.slow
@pytest.mark.parametrize(
    "old, new",
    [
        (
            "products[(ring.rank - step) % ring.size]",
            "products[(ring.rank + step + 1) % ring.size]",
        ),
        ("ring.rank - 1 - step", "ring.rank - step"),
        ("return ctx.ring.send(grad, -1), None", "return ctx.ring.send(grad, 1) * 0, None"),
        ("total = own + arrived", "total = own"),
        ("[Partial()] if replicated else None", "None"),
    ],
)
def test_planted_faults_are_found(tmp_path, old, new):
    """Chunks in another order, sums of other chunks, gradients or sums that are lost, and a
    replicated factor's gradient that is not summed."""
    within = with_fault(tmp_path / "copy", "async_tp", old, new)
    faulty = sharing(FOUR, 4, lora=SEVEN, dp="fsdp", tp=4)
    (result,) = train(tmp_path, 4, {"faulty": faulty}, within=within).values()
    with pytest.raises(AssertionError):
        equals_plain(result, faulty)


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
    within = with_fault(
        tmp_path / "copy", "float8", "        return self.product(x, self.weight)\n", BY_CHUNKS
    )
    path = tmp_path / "copy" / "techniques/float8.py"
    layer = "layer = Float8Linear(model.get_submodule(name), recipe)"
    by_rows = f"{layer}; layer.by_rows = attribute in ('wo', 'w2')"
    path.write_text(path.read_text().replace(layer, by_rows))
    options = dict(float8=recipe)
    seq = {"seq": 64 if recipe == "mxfp8" else 16}
    one = case(WIDE, 2, **options) | seq
    (expected,) = train(tmp_path, 0, {"one": one}, within=within).values()
    ranks = sharing(WIDE, 2, tp=2, **options) | seq
    (found,) = train(tmp_path, 2, {"ranks": ranks}).values()
    same_training(found, expected)
    sends_as_predicted(found, ranks, 2)


# ------------------------------------------------------------------------------------ wrong input


@pytest.mark.parametrize(
    "nproc, options, parts",
    [
        (0, {}, ["--async-tp is for --tp 2 or more"]),
        (2, dict(tp=2, float8="mxfp8", batch=4, dim=64, ffn_dim=64), ["sums over the 48 tokens"]),
        (
            4,
            dict(tp=2, pp=2, schedule="zero-bubble"),
            ["a backward in two parts does not combine with --async-tp", "1f1b"],
        ),
    ],
)
def test_wrong_flags_are_refused(corpus, tmp_path, nproc, options, parts):
    given = flags(corpus, tmp_path / "run", **options)
    refused(launch("train.py", *given, "--async-tp", nproc=nproc), *parts)


CHANGES = {
    "q of a norm": ("self.wq(x)", "self.wq(F.rms_norm(x, x.shape[-1:]))"),
    "a sum": ("self.w1(x), self.w3(x)", "self.w1(x), self.w3(x + 1)"),
}


@pytest.mark.parametrize("name", ["q of a norm", slow("a sum")])
def test_what_needs_all_tokens_at_once_is_refused(corpus, tmp_path, name):
    """A change of model.py that plain tensor parallelism can split, and this cannot."""
    old, new = CHANGES[name]
    changed = changed_copy(tmp_path / "copy", edits={old: new})
    given = flags(corpus, tmp_path / "run", tp=2)
    refused(launch(*changed, "train.py", *given, "--async-tp", nproc=2), "leave out --async-tp")
