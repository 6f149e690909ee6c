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
from runs.setup import counted_by_predicted


def world_of(nodes: int, per_node: int):
    return SimpleNamespace(size=nodes * per_node, per_node=per_node, device=torch.device("cpu"))


@pytest.mark.parametrize(
    "preset, nodes, per_node, tp, room, expected",
    [
        ("llama3.2-1b", 1, 8, 1, 80e9, ("ddp", 8, 1)),  # 16 bytes x 1.2 G fit
        ("llama3.2-1b", 4, 8, 1, 80e9, ("ddp", 32, 1)),
        ("llama3.1-8b", 1, 8, 1, 80e9, ("fsdp", 1, 8)),  # 128 GB do not; an eighth does
        ("llama3.1-8b", 4, 8, 1, 80e9, ("hsdp", 4, 8)),
        ("llama3.1-8b", 4, 8, 1, 16e9, ("fsdp", 1, 32)),  # not even in a node
        ("llama3.1-70b", 8, 8, 1, 80e9, ("fsdp", 1, 64)),
        ("llama3.1-8b", 4, 8, 8, 80e9, ("ddp", 4, 1)),  # an eighth of a copy on each rank of tp
        ("llama3.1-70b", 4, 8, 8, 80e9, ("fsdp", 1, 4)),  # tp fills a node: all else goes across
    ],
)
def test_auto_takes_what_fits(preset, nodes, per_node, tp, room, expected):
    model = build_on_meta(PRESETS[preset])
    world, asked = world_of(nodes, per_node), ParallelConfig(dp="auto", tp=tp)
    work = Work(model, asked, world.size // tp, 1, 2048)
    parallel, why = choose_parallel(work, None, world, room)
    assert (parallel.dp, parallel.replicate, parallel.shard) == expected
    copy = 16 * sum(p.numel() for p in model.parameters()) / tp
    assert f"take {copy / 1e9:.3g} GB" in why and f"{room / 1e9:.3g}" in why


def test_gradients_accumulate_unsharded_where_there_is_room():
    """8 G parameters: an eighth of a copy takes 16 GB, whole gradients 32 GB."""
    model = build_on_meta(PRESETS["llama3.1-8b"])
    for room, microbatches, expected in [
        (60e9, 1, "weights"),
        (60e9, 4, "weights"),
        (40e9, 1, "weights"),  # one microbatch has nothing to add up
        (40e9, 4, "all"),
    ]:
        asked = ParallelConfig(dp="fsdp", reshard="auto", checkpointing="full")
        work = Work(model, asked, 8 * microbatches, 1, 2048)
        parallel, _ = choose_parallel(work, None, world_of(1, 8), room)
        assert parallel.reshard == expected


def test_mesh_sizes():
    model = build_on_meta(LlamaConfig(**GROUPED))
    world = world_of(nodes=2, per_node=4)
    for dp, shard, tp, expected in [
        ("ddp", None, 1, (8, 1)),
        ("zero1", None, 1, (8, 1)),
        ("fsdp", None, 2, (1, 4)),
        ("hsdp", None, 1, (2, 4)),  # shards lie within a node
        ("hsdp", None, 2, (2, 2)),
        ("hsdp", 2, 1, (4, 2)),
    ]:
        work = Work(model, ParallelConfig(dp=dp, tp=tp), 8 // tp, 1, 8)
        parallel, _ = choose_parallel(work, shard, world, room=10**9)
        assert (parallel.replicate, parallel.shard) == expected


@pytest.mark.parametrize(
    "ranks, asked, parts",
    [
        (3, dict(dp="auto", tp=2), ["3 processes are no multiple of --tp 2"]),
        (8, dict(dp="auto", offload=True), ["--offload", "--dp fsdp"]),
        (8, dict(dp="ddp", reshard="none"), ["--reshard none is for --dp hsdp or --dp fsdp"]),
    ],
)
def test_impossible_configurations_are_refused(ranks, asked, parts):
    model = build_on_meta(LlamaConfig(**GROUPED))
    with pytest.raises(UserError) as refusal:
        check_parallel(Work(model, ParallelConfig(**asked), 8, 1, 16), None, world_of(1, ranks))
    assert all(part in str(refusal.value) for part in parts), refusal.value


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
        (150, 1, dict(microbatch=4, moments="bfloat16"), "--checkpointing selective"),
        (150, 1, dict(microbatch=2), "--checkpointing full --offload-activations"),
        (80, 8, dict(microbatch=2), "--dp fsdp --microbatch 1"),
        (80, 8, dict(microbatch=1, seq_len=131072, dp="fsdp", checkpointing="full"),
         "--offload-activations --moments bfloat16"),
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
    monkeypatch.setattr("costs.search.usable_memory", lambda device, n: 0.9e9 * gigabytes)
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
    assert counted_by_predicted(work) == pytest.approx(counted["peak"] / holds(eager, 0)["peak"])
