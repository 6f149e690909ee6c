"""costs/seconds.py: a step's time against the same formulas worked out by hand."""

import json
import math
from dataclasses import replace

import pytest
import torch
from conftest import step_of

from config import ParallelConfig
from costs.machines import REACHED, Machine, assumed_machine, link_speed
from costs.seconds import (
    collective_time,
    compute_time,
    find_measured_group,
    group_shape,
    measured_machine,
    read_measurement,
    step_time,
    update_bytes,
)
from costs.page import sends
from lora import LoRA
from model import PRESETS, LlamaConfig
from perf.instruments import build_on_meta
from plumbing.processes import UserError

H100 = assumed_machine("h100", "400gbit", 8)
BLOCK = LlamaConfig(64, 1, 4, 2, 160, vocab_size=1)
MATRICES = 64 * 64 * 2 + 64 * 32 * 2 + 3 * 64 * 160  # elements of its seven
ROUND = Machine("round", 1e9, 1e9, 1e9, 1e9, matmul_fraction=1, attention_fraction=1)
FAST = dict(dtype=torch.bfloat16, compile=True)


def measurement() -> dict:
    """A report as bench.py comm --model tiny writes it, with round numbers."""
    names = ("all-reduce", "all-gather", "reduce-scatter")
    times = {name: [(1024, 0.001), (1 << 20, 0.1)] for name in names}
    computed = {"model": "tiny", "config": vars(PRESETS["tiny"]), "dtype": "float32"}
    computed |= {"tokens": 256, "seq_len": 128, "update": 0.01}
    computed |= {"forward_backward": 0.2, "forward_backward_in_fsdp": 0.25}
    groups = {"world": {"ranks": 2, "times": times}}
    return {"device": "cpu", "backend": "gloo", "ranks": 2, "per_node": 2, "memory": 8e9,
            "groups": groups, "compute": computed}  # fmt: skip


def test_machines_by_name_and_by_numbers():
    assert (H100.peak, H100.memory, H100.bandwidth) == (989.4e12, 80e9, 3.35e12)
    assert H100.link == 50e9 and H100.node_link == 450e9 * REACHED["node link"]
    assert H100.attention_fraction == REACHED["attention h100"] < H100.matmul_fraction
    capped = assumed_machine("h100-500w", "400gbit", 8, "cudnn")
    cap, cudnn = REACHED["500 of 700 W"], REACHED["attention h100 cudnn"]
    assert capped.matmul_fraction == pytest.approx(cap * H100.matmul_fraction)
    assert capped.attention_fraction == pytest.approx(cap * cudnn)
    by_numbers = assumed_machine("312:80:2039:300", "12.5GB/s", 4)
    node_link = 300e9 * REACHED["node link"]
    assert (by_numbers.peak, by_numbers.node_link, by_numbers.link) == (312e12, node_link, 12.5e9)
    assert link_speed("ndr") == link_speed("400gbit") == link_speed("50GB")
    assert link_speed("200mbit") == link_speed("200Mb/s") == 25e6
    with pytest.raises(UserError, match="no GPU 'h1000': choose one of h100"):
        assumed_machine("h1000", "ndr", 8)
    with pytest.raises(UserError, match="no link 'fast': choose one of ndr"):
        link_speed("fast")


def test_files_that_are_no_measurement(tmp_path):
    file = tmp_path / "comm.json"
    for text in ("[]", '{"compute": {"x": 1}}', "{"):
        file.write_text(text)
        with pytest.raises(UserError, match=r"no result of bench\.py comm"):
            read_measurement(file)
    file.write_text(json.dumps(measurement()))
    assert read_measurement(file)["ranks"] == 2


def test_a_measured_machine_reproduces_its_measurement():
    """A step of two microbatches like the measured one, on two ranks."""
    machine = measured_machine(measurement())
    model, parallel = build_on_meta(PRESETS["tiny"]), ParallelConfig(replicate=2)
    work = step_of(model, parallel, 2, 2, 128)
    parts = step_time(work, machine)
    assert parts["products"] + parts["passes"] == pytest.approx(2 * 0.2)
    assert parts["optimizer"] == pytest.approx(0.01)
    ((calls, nbytes),) = predict_traffic(work).values()
    assert parts["replicate"] == pytest.approx(0.1 * nbytes / (1 << 20), rel=0.01) and calls == 2
    fsdp = step_time(replace(work, parallel=ParallelConfig(dp="fsdp", shard=2)), machine)
    assert fsdp["handling"] == pytest.approx(2 * 0.05) and parts["handling"] == 0


def test_computation_of_a_block():
    """One layer and a vocabulary of 1: seven matrices, 2 FLOPs an element, three times."""
    machine = replace(ROUND, matmul_fraction=0.5, attention_fraction=0.25)

    def seconds(**options) -> dict[str, float]:
        return compute_time(BLOCK, ParallelConfig(compile=True, **options), 10, 128, machine)

    scores = 2 * 2 * 64 * 128 / 2 / 0.25e9  # and weighted sums, half the square
    products = 10 * (3 * 2 * (MATRICES + 64) / 0.5e9 + 3.5 * scores)
    assert seconds()["products"] == pytest.approx(products) and seconds()["recompute"] == 0
    recompute = 10 * (2 * MATRICES / 0.5e9 + scores)
    assert seconds(checkpointing="full")["recompute"] == pytest.approx(recompute)
    assert seconds(tp=2)["products"] == pytest.approx(products / 2)


def test_adapters_of_a_block():
    """Frozen matrices take 4 FLOPs an element, factors 6. Of 4 bits 0.52 bytes are read, and the
    numbers written, twice; DoRA reads and writes numbers in float32, and handles each output."""
    given = (BLOCK, ParallelConfig(compile=True), 10, 128, ROUND, None)
    widths, attention = 4 * 64 + 2 * 96 + 3 * 224, 10 * 3.5 * 2 * 64 * 128
    plain, lora = compute_time(*given), compute_time(*given, LoRA(4))
    assert plain["products"] == pytest.approx((10 * 6 * (MATRICES + 64) + attention) / 1e9)
    products = 10 * (4 * (MATRICES + 64) + 6 * 4 * widths) + attention
    assert lora["products"] == pytest.approx(products / 1e9)
    assert lora["passes"] == plain["passes"]
    in_4_bits, dora = (
        1e9 * (compute_time(*given, *more)["passes"] - lora["passes"])
        for more in ((LoRA(4), True), (LoRA(4, dora=True), False))
    )
    assert in_4_bits == pytest.approx(2 * MATRICES * (0.52 + 4))
    assert dora == pytest.approx(MATRICES * (4 + 16) + 10 * 4 * 2.5 * widths)


def test_collectives_of_1_gb():
    """An all-gather over the 8 GPUs of a node sends 7/8 over NVLink. Over two nodes it is limited
    by their 8 links together, if NVLink is faster. An all-reduce sends twice as much, and here over
    one link."""
    machine = replace(H100, node_link=450e9)
    node, two_nodes = ParallelConfig(dp="fsdp", shard=8), ParallelConfig(dp="fsdp", shard=16)
    across = ParallelConfig(dp="hsdp", replicate=2, shard=8)

    def seconds(collective, dim, parallel):
        return collective_time(collective, 1e9, dim, parallel, machine)

    assert seconds("all-gather", "shard", node) == pytest.approx(7 / 8 / 450, rel=0.02)
    assert seconds("all-gather", "shard", two_nodes) == pytest.approx(15 / 16 / 400, rel=0.05)
    assert seconds("all-reduce", "replicate", across) == pytest.approx(1 / 50, rel=0.01)


def test_measured_times_are_interpolated():
    groups = {"world": {"ranks": 2, "times": {"all-reduce": [(1000, 1.0), (3000, 2.0)]}}}
    machine = Machine("cpu", 1, 1, 1, 1, per_node=2, measured=groups)
    parallel = ParallelConfig(replicate=2)
    for nbytes, expected in [(0, 1.0), (1000, 1.0), (2000, 1.5), (3000, 2.0), (6000, 4.0)]:
        seconds = collective_time("all-reduce", nbytes, "replicate", parallel, machine)
        assert seconds == pytest.approx(expected)


def test_groups_match_measured_ones_by_size_and_nodes():
    """4 ranks in 2 nodes: replicas and shards lie as measured; tp of 4 is the world."""
    ranks = {"world": 4, "node": 2, "across": 2}
    groups = {name: {"ranks": n} for name, n in ranks.items()}
    machine = Machine("cpu", 1, 1, 1, 1, per_node=2, measured=groups)
    for dim, parallel, expected in [
        ("replicate", ParallelConfig(replicate=4), "world"),
        ("shard", ParallelConfig(dp="hsdp", replicate=2, shard=2), "node"),
        ("replicate", ParallelConfig(dp="hsdp", replicate=2, shard=2), "across"),
        ("tp", ParallelConfig(tp=4), "world"),
        ("shard", ParallelConfig(dp="fsdp", shard=2, tp=2), "across"),
        ("shard", ParallelConfig(dp="fsdp", shard=3), None),
    ]:
        assert find_measured_group(*group_shape(dim, parallel, machine), machine) == expected


def test_fsdp_hides_behind_computation_and_tensor_parallelism_does_not():
    model = build_on_meta(PRESETS["llama3.1-8b"])
    fsdp = ParallelConfig(dp="fsdp", shard=8, **FAST)
    work = step_of(model, fsdp, 2, 1, 8192)
    quick = step_time(work, H100)
    assert quick["shard"] < 0.05 * quick["products"]  # only the first and the last are exposed
    slow = step_time(work, replace(H100, node_link=1e9))
    payload = sum(nbytes for _, nbytes in predict_traffic(work).values())
    hidden = slow["products"] + slow["recompute"] + slow["passes"]
    assert slow["shard"] == pytest.approx(7 / 8 * payload / 1e9 - hidden, rel=0.02)
    tp = step_of(model, replace(fsdp, shard=1, tp=8), 2, 1, 8192)
    traffic = predict_traffic(tp)
    payload = sum(nbytes for (dim, _), (_, nbytes) in traffic.items() if dim == "tp")
    on_links = 7 / 8 * payload / H100.node_link
    assert on_links < step_time(tp, H100)["tp"] < 1.2 * on_links


def seconds_of_collectives(work, machine: Machine) -> dict[tuple[str, str], tuple[int, float]]:
    """Return how many collectives of each kind a step has, and the seconds of one."""
    return {
        (dim, name): (calls, collective_time(name, nbytes / calls, dim, work.parallel, machine))
        for (dim, name), (calls, nbytes) in predict_traffic(work).items()
    }


def test_asynchronous_messages_hide_beside_products():
    """On a fast link all of them, but not the collectives of embedding and loss; on a slow one as
    much as the products of wq, wo, w1 and w2 take, of all chunks but the last."""
    model = build_on_meta(LlamaConfig(512, 4, 8, 4, 1536, vocab_size=512))
    machine = Machine("gpu", 1e14, 1e11, 3e12, node_link=4e11, matmul_fraction=0.7)
    plain = step_of(model, ParallelConfig(tp=4, **FAST), 8, 2, 2048)
    work = replace(plain, parallel=replace(plain.parallel, async_tp=True))
    products = 3 * 2 * 2 * (512 * 512 + 512 * 1536) * 4 * 2 * 8 * 2048 / 4 * 3 / 4 / 0.7e14
    for link, hidden in ((machine, math.inf), (replace(machine, node_link=1e9), products)):
        found = seconds_of_collectives(work, link)
        calls, message = found.pop(("tp", "send"))
        ends = sum(calls * seconds for calls, seconds in found.values())
        exposed = max(0, calls * message - hidden)
        assert step_time(work, link)["tp"] == pytest.approx(ends + exposed)
    assert step_time(work, machine)["tp"] < step_time(plain, machine)["tp"] / 3


def test_zero1_hides_its_gradients_and_never_its_weights():
    """With much computation a ZeRO-1 step waits for every all-gather, and for one reduce-scatter;
    a rank updates an eighth of the parameters."""
    model = build_on_meta(PRESETS["llama3.2-1b"])
    ddp = step_of(model, ParallelConfig(replicate=8, dtype=torch.bfloat16), 8, 1, 8192)
    zero1 = replace(ddp, parallel=replace(ddp.parallel, dp="zero1"))
    seconds = seconds_of_collectives(zero1, H100)
    calls, gather = seconds["replicate", "all-gather"]
    _, scatter = seconds["replicate", "reduce-scatter"]
    parts = step_time(zero1, H100)
    assert parts["replicate"] == pytest.approx(calls * gather + scatter)
    parameters = sum(p.numel() for p in model.parameters())
    assert parts["optimizer"] == pytest.approx(update_bytes(4) * parameters / 8 / H100.bandwidth)
    assert step_time(ddp, H100)["optimizer"] == pytest.approx(8 * parts["optimizer"])


def test_zero_bubble_saves_nothing_beside_a_frozen_base():
    """Its matrices have no gradients, which W would compute while a rank waits."""

    def waits(schedule: str, lora: LoRA | None) -> float:
        model = build_on_meta(PRESETS["llama3.2-1b"], lora)
        parallel = ParallelConfig(pp=4, schedule=schedule, dtype=torch.bfloat16)
        return step_time(step_of(model, parallel, 1, 8, 4096), H100)["pp"]

    assert waits("zero-bubble", LoRA(8)) == waits("1f1b", LoRA(8))
    assert waits("zero-bubble", None) < 0.8 * waits("1f1b", None)


@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_offloaded_activations_hide_beside_computation(checkpointing):
    """The 1B on 8,192 tokens: with full checkpointing D elements a token and block move, and take
    less time than the computation; without it ten times as many, and take longer."""
    model, tokens = build_on_meta(PRESETS["llama3.2-1b"]), 8192
    parallel = ParallelConfig(dp="fsdp", checkpointing=checkpointing, **FAST)
    work = step_of(model, parallel, 1, 2, tokens)
    without = step_time(work, H100)
    offloaded = replace(parallel, offload_activations=True)
    offloading = step_time(replace(work, parallel=offloaded), H100)
    forward = (without["products"] + without["passes"]) / 3
    backward = 2 * forward + without["recompute"]
    # Inputs and outputs of two norms, q and attention's output; k, v; gate, up, their product; lse
    # in float32.
    elements = 6 * 2048 + 2 * 512 + 3 * 8192 + 2 * 32 if checkpointing == "none" else 2048
    moved = 2 * 16 * tokens * 2 * elements / 50e9  # two microbatches, 16 layers, 2 bytes
    expected = max(0, moved - forward) + max(0, moved - backward)
    assert offloading["to the CPU"] == pytest.approx(expected)
    assert (expected > 0) == (checkpointing == "none") and without["to the CPU"] == 0
    assert sum(offloading.values()) == pytest.approx(sum(without.values()) + expected)
