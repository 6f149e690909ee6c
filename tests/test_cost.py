"""costs/traffic.py: predicted memory and traffic equal the counted; --dp auto chooses by them."""

from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from conftest import slow, step_of
from exact import GROUPED
from torch import nn
from torch.utils._pytree import tree_leaves

from config import ParallelConfig, Work
from costs.memory import predict_memory, prediction_caveat, saved_elements
from costs.search import choose_parallel, fits_unsharded, what_would_fit, with_mesh_sizes
from costs.traffic import predict_traffic, sent_bytes
from model import PRESETS, FeedForward, Llama, LlamaConfig, attend, rope_angles
from parallel import parallelize, with_mesh
from perf.instruments import Live, build_on_meta, emulate, state_tensors
from plumbing.parser import Parser
from plumbing.processes import UserError, init_distributed
from runs.flags import add_optimizer_flags
from runs.rules import check_parallel
from techniques.recompute import recompute_and_compile
from text.batch import Batch
from train import accumulate, make_optimizer

CHUNKY = LlamaConfig(64, 3, 4, 2, 160, vocab_size=512)
WIDE = LlamaConfig(256, 4, 4, 4, 768, vocab_size=2048)
TIED = LlamaConfig(128, 6, 4, 2, 384, vocab_size=4096, tie_embeddings=True)
LOW = torch.bfloat16


@pytest.mark.parametrize("checkpointing", ["none", "selective", "full"])
def test_a_mask_takes_what_is_predicted(checkpointing):
    """Attention by a mask: a row of it for each token, k and v for each query head."""
    parallel = ParallelConfig(checkpointing=checkpointing)
    world = with_mesh(init_distributed(), parallel)
    model = build_on_meta(CHUNKY)
    expected = predict_memory(Work(model, parallel, 2, 2, 512, document=50))["peak"]
    runner = parallelize(model, world, Llama.init_weights)
    optimizer = make_optimizer(model, Parser.defaults(add_optimizer_flags))
    tokens = torch.zeros(2, 512, dtype=torch.int64)
    positions = (torch.arange(1024) % 50).view(2, 512)
    for _ in range(2):  # step 1 makes AdamW's moments
        with Live(tree_leaves(state_tensors(model, optimizer))) as live:
            accumulate(runner, Batch(tokens, tokens, positions, 1), 2, world)
            optimizer.step()
            optimizer.zero_grad()
    torch.distributed.destroy_process_group()
    assert expected == pytest.approx(live.peak, rel=0.05)


@pytest.mark.parametrize(
    "gigabytes, size, given, flags",
    [
        (150, 1, dict(microbatch=4, moments="bfloat16"), "--checkpointing selective"),
        (150, 1, dict(microbatch=2), "--checkpointing full --offload-activations"),
        (80, 8, dict(microbatch=2), "--dp fsdp --microbatch 1"),
        (80, 8, dict(microbatch=1, seq_len=131072, dp="fsdp", checkpointing="full"),
         "--moments bfloat16 --offload-activations"),
        (80, 4, dict(microbatch=1, seq_len=131072, dp="fsdp", checkpointing="full",
                     moments="bfloat16", offload_activations=True), "--cp 4"),
        (150, 1, dict(microbatch=1, seq_len=65536, offload_activations=True),
         "--moments bfloat16 --checkpointing full"),
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
    parallel = ParallelConfig(**given | dict(dtype=LOW, compile=True))
    parallel = with_mesh_sizes(parallel, size, size)
    model = build_on_meta(PRESETS["llama3.1-8b"])
    text = what_would_fit(Work(model, parallel, batch, microbatch, seq_len), process)
    if flags is None:
        assert text == "no flags make a step fit in 72 GB: use more GPUs, or a shorter --seq-len"
    else:
        assert f", and with {flags} " in text, text
        assert float(text.split()[-1]) <= 0.9 * gigabytes


@pytest.mark.parametrize("checkpointing", ["selective", slow("full")])
def test_a_compiled_block_that_recomputes_saves_no_copies_of_weights(monkeypatch, checkpointing):
    """What the compiler saves for backward under autocast, counted, is what is predicted to be
    saved; and of weights in bfloat16 only those of one block and the root are."""
    partition = partial(torch.compile, backend="aot_eager_decomp_partition")  # without kernels
    monkeypatch.setattr(torch, "compile", partition)
    model, T, storages = Llama(WIDE), 256, {}
    model.init_weights()
    recompute_and_compile(model, checkpointing, compile=True)
    x = torch.randn(1, T, WIDE.dim, requires_grad=True)
    angles = rope_angles(WIDE, torch.arange(T)[None])

    def count(saved: torch.Tensor) -> torch.Tensor:
        storages[saved.untyped_storage()._cdata] = saved.untyped_storage().nbytes()
        return saved

    hooks = torch.autograd.graph.saved_tensors_hooks(count, lambda saved: saved)
    with torch.autocast("cpu", LOW), hooks:
        y = model.layers["0"](x, *angles)
    for tensor in (*model.parameters(), *angles):
        storages.pop(tensor.untyped_storage()._cdata, None)
    parallel = ParallelConfig(dtype=LOW, compile=True, checkpointing=checkpointing)
    assert sum(storages.values()) == 2 * T * saved_elements(WIDE, parallel)[0]
    assert y.requires_grad
    counts = [sum(p.numel() for p in module.parameters()) for module in (model, model.layers["0"])]
    copied = predict_memory(step_of(model, parallel, 1, 1, T))["gathered"]
    assert copied == 2 * (counts[0] - (WIDE.n_layers - 1) * counts[1])


@pytest.mark.slow
def test_a_large_world_sends_what_is_predicted():
    """A layer of 405 B on 512 ranks, of which one is here."""
    model = build_on_meta(replace(PRESETS["llama3.1-405b"], n_layers=1))
    sizes = dict(dp="hsdp", replicate=4, shard=16, tp=8)
    parallel = ParallelConfig(**sizes, dtype=LOW, checkpointing="full")
    work = step_of(model, parallel, 1, 1, 2048)
    expected = predict_memory(work)
    sent, held = emulate(work)
    assert sent == predict_traffic(work)
    for kind in ("parameters", "gradients", "optimizer"):
        assert held[kind] == expected[kind], kind


def test_zero1_sends_what_ddp_sends_and_fsdp_half_as_much_again():
    """Of P float32 gradients on n ranks: 2 (n-1)/n 4 P, and (n-1)/n of 4 P three times over."""
    config = LlamaConfig(64, 3, 4, 4, 160, vocab_size=512)
    model = build_on_meta(config)
    once = 3 / 4 * 4 * sum(p.numel() for p in model.parameters())  # 4 ranks, 4 bytes
    root = 3 / 4 * 4 * (2 * 512 * 64 + 64)  # gathered once and not twice
    for expected, parallel in [
        (2 * once, ParallelConfig(dp="ddp", replicate=4)),
        (2 * once, ParallelConfig(dp="zero1", replicate=4)),
        (3 * once - root, ParallelConfig(dp="fsdp", shard=4)),
    ]:
        traffic = predict_traffic(step_of(model, parallel, 2, 1, 64))
        assert sent_bytes(traffic, parallel) == expected


def test_a_prediction_says_that_the_model_is_no_llama(monkeypatch):
    for config in (CHUNKY, TIED, PRESETS["llama3.1-405b"]):
        assert prediction_caveat(build_on_meta(config)) == ""
    model = build_on_meta(CHUNKY)
    model.layers["1"].feed_forward.w4 = nn.Linear(64, 64, device="meta")
    assert "assume equal blocks" in prediction_caveat(model)
    # Without silu it saves 160 elements less than 8 D + 2 KV E + 4 F and a number for each head and
    # norm.
    monkeypatch.setattr(FeedForward, "forward", lambda m, x: m.w2(m.w1(x) * m.w3(x)))
    llama = 8 * 64 + 2 * 32 + 4 * 160 + 4 + 2
    note = prediction_caveat(build_on_meta(CHUNKY))
    assert f"saves {llama - 160:,} elements a token" in note
    assert f"one of a Llama {llama:,}" in note
    monkeypatch.undo()  # a number for each pair of tokens, under 1 % of what 8 tokens save
    monkeypatch.setattr("model.attend", with_scores)
    assert "of a Llama" in prediction_caveat(build_on_meta(CHUNKY))


def with_scores(q, k, v, mask):
    scores = q[:, :, 0] @ k[:, :, 0].transpose(1, 2)
    return attend(q, k, v, mask) + (0 * scores.sigmoid()).sum()


def test_parameters_at_the_root_are_counted_whatever_their_name():
    model, parallel = build_on_meta(CHUNKY), ParallelConfig(dp="fsdp", shard=2)
    before = predict_memory(step_of(build_on_meta(CHUNKY), parallel, 2, 1, 256))["parameters"]
    work = step_of(model, parallel, 2, 1, 256)
    model.positions = nn.Embedding(100, 64, device="meta")
    model.scale = nn.Parameter(torch.empty(64, device="meta"))
    assert predict_memory(work)["parameters"] == before + 101 * 64 * 4 // 2


# ------------------------------------------------------------------- choosing a configuration


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
    model = build_on_meta(WIDE)
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


@pytest.mark.parametrize("schedule, v", [("1f1b", 1), ("interleaved", 2), ("zero-bubble", 1)])
def test_more_microbatches_take_no_more_memory(schedule, v, monkeypatch):
    """The schedule of 2 p microbatches needs what that of all of them does."""
    model = build_on_meta(LlamaConfig(64, 8, 4, 2, 128, vocab_size=256))
    parallel = ParallelConfig(pp=4, schedule=schedule, stages_per_rank=v)
    work = step_of(model, parallel, 1, 20, 64)
    short = [predict_memory(work, rank) for rank in range(4)]
    monkeypatch.setattr("costs.memory.STEADY", ())
    assert short == [predict_memory(work, rank) for rank in range(4)]
    fewer = predict_memory(step_of(model, parallel, 1, 2 * v, 64), 0)
    assert fewer["peak"] < short[0]["peak"]
