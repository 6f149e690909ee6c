"""costs/search.py: --dp auto takes what fits, and what would fit is named."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from conftest import step_of
from exact import GROUPED

from config import ParallelConfig, Work
from costs.page import holds
from costs.search import choose_parallel, fits_unsharded, what_would_fit, with_mesh_sizes
from model import PRESETS, LlamaConfig
from perf.instruments import build_on_meta, emulate
from plumbing.processes import UserError
from runs.rules import check_parallel
from runs.setup import ratio_of_peaks


def world_of(nodes: int, per_node: int):
    return SimpleNamespace(size=nodes * per_node, per_node=per_node, device=torch.device("cpu"))


ACCUMULATING = dict(dp="fsdp", reshard="auto", checkpointing="full")
TAKEN = [  # preset; nodes, and GPUs of each; GB of a GPU; what is asked for, and what is taken
    ("llama3.2-1b", (1, 8), 80, dict(dp="auto"), ("ddp", 8, 1)),  # 16 bytes x 1.2 G fit
    ("llama3.2-1b", (4, 8), 80, dict(dp="auto"), ("ddp", 32, 1)),
    ("llama3.1-8b", (1, 8), 80, dict(dp="auto"), ("fsdp", 1, 8)),  # 128 GB do not; an eighth does
    ("llama3.1-8b", (4, 8), 80, dict(dp="auto"), ("hsdp", 4, 8)),
    ("llama3.1-8b", (4, 8), 16, dict(dp="auto"), ("fsdp", 1, 32)),  # not even in a node
    ("llama3.1-70b", (8, 8), 80, dict(dp="auto"), ("fsdp", 1, 64)),
    # Each rank of tp has an eighth of a copy; tp fills a node, and all else goes across.
    ("llama3.1-8b", (4, 8), 80, dict(dp="auto", tp=8), ("ddp", 4, 1)),
    ("llama3.1-70b", (4, 8), 80, dict(dp="auto", tp=8), ("fsdp", 1, 4)),
    ("llama3.1-8b", (2, 4), 999, dict(dp="ddp"), ("ddp", 8, 1)),
    ("llama3.1-8b", (2, 4), 999, dict(dp="zero1"), ("zero1", 8, 1)),
    ("llama3.1-8b", (2, 4), 999, dict(dp="fsdp", tp=2), ("fsdp", 1, 4)),
    ("llama3.1-8b", (2, 4), 999, dict(dp="hsdp"), ("hsdp", 2, 4)),  # shards lie within a node
    ("llama3.1-8b", (2, 4), 999, dict(dp="hsdp", tp=2), ("hsdp", 2, 2)),
    ("llama3.1-8b", (2, 4), 999, dict(dp="hsdp", shard=2), ("hsdp", 4, 2)),
    # An eighth of a copy takes 16 GB, whole gradients 32 GB; one microbatch has nothing to add up.
    ("llama3.1-8b", (1, 8), 60, ACCUMULATING, ("fsdp", 1, 8, "weights")),
    ("llama3.1-8b", (1, 8), 60, ACCUMULATING | dict(microbatches=4), ("fsdp", 1, 8, "weights")),
    ("llama3.1-8b", (1, 8), 40, ACCUMULATING, ("fsdp", 1, 8, "weights")),
    ("llama3.1-8b", (1, 8), 40, ACCUMULATING | dict(microbatches=4), ("fsdp", 1, 8, "all")),
]


@pytest.mark.parametrize("preset, nodes, gigabytes, asked, expected", TAKEN)
def test_what_fits_is_taken(preset, nodes, gigabytes, asked, expected):
    model, world, asked = build_on_meta(PRESETS[preset]), world_of(*nodes), dict(asked)
    shard, microbatches = asked.pop("shard", None), asked.pop("microbatches", 1)
    batch = microbatches * world.size // asked.get("tp", 1)
    work = Work(model, ParallelConfig(**asked), batch, 1, 2048)
    parallel, why = choose_parallel(work, shard, world, gigabytes * 1e9)
    taken = parallel.dp, parallel.replicate, parallel.shard, parallel.reshard
    assert taken[: len(expected)] == expected
    copy = 16 * sum(p.numel() for p in model.parameters()) / parallel.tp
    assert f"take {copy / 1e9:.3g} GB" in why and f"may use {gigabytes} GB" in why


@pytest.mark.parametrize(
    "ranks, asked, told",
    [
        (3, dict(dp="auto", tp=2), "3 processes are no multiple of --tp 2"),
        (8, dict(dp="auto", offload=True), "--offload .* --dp fsdp"),
        (8, dict(dp="ddp", reshard="none"), "--reshard none is for --dp hsdp or --dp fsdp"),
    ],
)
def test_impossible_configurations_are_refused(ranks, asked, told):
    work = Work(build_on_meta(LlamaConfig(**GROUPED)), ParallelConfig(**asked), 8, 1, 16)
    with pytest.raises(UserError, match=told):
        check_parallel(work, None, world_of(1, ranks))


def test_samples_gather_weights_once_only_where_they_fit(monkeypatch, capsys):
    model = build_on_meta(LlamaConfig(256, 4, 4, 4, 768, vocab_size=2048))
    parameters = sum(p.numel() for p in model.parameters())
    state = parameters * (4 + 8) // 4  # weights and moments, over 4 ranks
    monkeypatch.setattr("costs.search.print_rank_zero", print)
    for room, fits in ((state + 4 * parameters + 10**4, True), (state + 4 * parameters, False)):
        monkeypatch.setattr("costs.search.usable_memory", lambda *_, room=room: room)
        world = SimpleNamespace(
            parallel=ParallelConfig(dp="fsdp", shard=4), device=None, per_node=4, minimum=int
        )
        assert fits_unsharded(step_of(model, world.parallel, 1, 1, 16), world) == fits
    gigabytes = 4 * parameters * 3 / 4 / 1e9
    assert f"for each token: a rank sends {gigabytes:.3g} GB" in capsys.readouterr().out


@pytest.mark.parametrize(
    "gigabytes, size, given, flags",
    [
        (150, 1, dict(microbatch=2, moments="bfloat16"), "--checkpointing products"),
        (150, 1, dict(microbatch=4, moments="bfloat16", checkpointing="products"),
         "--checkpointing selective"),
        (150, 1, dict(microbatch=2), "--checkpointing full --offload-activations"),
        (80, 8, dict(microbatch=2), "--dp fsdp --microbatch 1"),
        (80, 8, dict(microbatch=1, seq_len=131072, dp="fsdp", checkpointing="full"),
         "--cp 2 --offload-activations"),
        (80, 4, dict(microbatch=1, seq_len=131072, dp="fsdp", checkpointing="full",
                     moments="bfloat16", offload_activations=True), "--cp 2"),
        (150, 1, dict(microbatch=1, seq_len=65536, offload_activations=True),
         "--checkpointing full --moments bfloat16"),
        (80, 1, dict(microbatch=1), None),
        (120, 2, dict(batch=12, microbatch=6, pp=2, schedule="interleaved", stages_per_rank=2),
         "--microbatch 1"),  # which refuses microbatches of 4, for 3 are no multiple of 2
    ],
)  # fmt: skip
def test_flags_that_would_fit(monkeypatch, gigabytes, size, given, flags):
    """8B in bfloat16 on GPUs of so many GB; what is suggested fits."""
    monkeypatch.setattr("costs.search.usable_memory", lambda device: 0.9e9 * gigabytes)
    process = SimpleNamespace(size=size, per_node=size, device=torch.device("cpu"))
    seq_len, microbatch = given.pop("seq_len", 4096), given.pop("microbatch")
    batch = given.pop("batch", 4 * size)
    parallel = ParallelConfig(**given | dict(dtype=torch.bfloat16, compile=True))
    parallel = with_mesh_sizes(parallel, size, size)
    model = build_on_meta(PRESETS["llama3.1-8b"])
    text = what_would_fit(Work(model, parallel, batch, microbatch, seq_len), process)
    if flags is None:
        assert text == "no flags make a step fit in 72 GB: use more GPUs, or a shorter --seq-len"
    else:
        assert f", and with {flags} " in text, text
        assert float(text.split()[-1]) <= 0.9 * gigabytes


def test_a_choice_that_barely_fits_is_counted():
    """DDP would fill 0.9 of the memory: where a count finds a third more, FSDP is taken. A choice
    with much room is not counted."""
    model, world, asked = build_on_meta(PRESETS["llama3.2-1b"]), world_of(1, 8), []
    work = Work(model, ParallelConfig(dp="auto"), 8, 1, 2048)
    peak = holds(replace(work, parallel=ParallelConfig(replicate=8)))["peak"]

    def count(choice: Work) -> float:
        asked.append(choice.parallel.dp)
        return 1.33 if choice.parallel.dp == "ddp" else 1.0

    for room, expected, counted in ((peak / 0.9, "fsdp", ["ddp"]), (2 * peak, "ddp", [])):
        asked.clear()
        parallel, _ = choose_parallel(work, None, world, room, count)
        assert (parallel.dp, asked) == (expected, counted)


def test_a_step_is_counted_in_another_process():
    parallel = ParallelConfig(dp="fsdp", shard=4, compile=True)
    work = Work(build_on_meta(LlamaConfig(64, 3, 4, 2, 160, 512)), parallel, 4, 1, 256, on_gpu=True)
    eager = replace(work, parallel=replace(parallel, compile=False), on_gpu=False)
    _, counted = emulate(eager)
    assert ratio_of_peaks(work) == pytest.approx(counted["peak"] / holds(eager, 0)["peak"])
