"""costs/seconds.py: a step's time beside formulas worked out by hand and beside published steps,
to which docs/calibrate.py has fitted the constants."""

import json
import runpy
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import ROOT, step_of

from config import ParallelConfig
from costs.machines import REACHED, Machine, assumed_machine, link_speed
from costs.page import sends
from costs.seconds import collective_time, compute_time, step_time
from lora import LoRA
from model import PRESETS, LlamaConfig
from perf.instruments import build_on_meta
from perf.measured import measured_machine
from perf.plan import SPREAD
from techniques.schedules import bubble, check_schedule, make_schedule

H100 = replace(assumed_machine("h100", "400gbit", 8), node_link=450e9)
ROUND = Machine("round", 1e9, 1e9, 1e9, 1e9, matmul_fraction=0.5, attention_fraction=0.25)
FAST = dict(dtype=torch.bfloat16, compile=True)


calibrate = SimpleNamespace(**runpy.run_path(str(ROOT / "docs/calibrate.py")))
FITS = json.loads(calibrate.RESULTS.read_text())


def measurement() -> dict:
    """A report as bench.py comm --model tiny writes it, with round numbers."""
    computed = {"model": "tiny", "config": vars(PRESETS["tiny"]), "dtype": "float32"}
    computed |= {"tokens": 256, "seq_len": 128, "update": 0.01}
    computed |= {"forward_backward": 0.2, "forward_backward_in_fsdp": 0.25}
    groups = {"world": {"ranks": 2, "times": {"all-gather": [(1024, 0.001), (1 << 20, 0.1)]}}}
    return {"device": "cpu", "backend": "gloo", "ranks": 2, "per_node": 2, "memory": 8e9,
            "groups": groups, "compute": computed}  # fmt: skip


def test_machines_by_name_and_by_numbers():
    assert (H100.peak, H100.memory, H100.bandwidth, H100.link) == (989.4e12, 80e9, 3.35e12, 50e9)
    capped = assumed_machine("h100-500w", "400gbit", 8, "cudnn")
    cap, cudnn = REACHED["h100-500w"], REACHED["attention h100 cudnn"]
    assert capped.matmul_fraction == pytest.approx(cap * H100.matmul_fraction)
    assert capped.attention_fraction == pytest.approx(cap * cudnn)
    by_numbers = assumed_machine("312:80:2039:300", "12.5GB/s", 4)
    assert (by_numbers.peak, by_numbers.memory, by_numbers.link) == (312e12, 80e9, 12.5e9)
    assert link_speed("400gbit") == link_speed("400Gb/s") == link_speed("50GB") == 50e9


def test_a_measured_machine_reproduces_its_measurement():
    """A step of two microbatches like the measured one, on two ranks."""
    machine = measured_machine(measurement())
    work = step_of(build_on_meta(PRESETS["tiny"]), ParallelConfig(replicate=2), 2, 2, 128)
    parts = step_time(work, machine)
    assert parts["products"] + parts["passes"] == pytest.approx(2 * 0.2)
    assert parts["optimizer"] == pytest.approx(0.01)
    ((calls, nbytes),) = sends(work).values()  # an all-reduce is two times an all-gather
    expected = 2 * 0.1 * nbytes / (1 << 20) + 0.001 * calls
    assert parts["replicate"] == pytest.approx(expected, rel=0.01)
    fsdp = step_time(replace(work, parallel=ParallelConfig(dp="fsdp", shard=2)), machine)
    assert fsdp["handling"] == pytest.approx(2 * 0.05) and parts["handling"] == 0


def test_computation_of_a_block():
    """Seven matrices and a vocabulary of 1: 2 FLOPs an element in forward, twice that in backward;
    attention over half the square, or the squares of documents, by flash kernels. LoRA adds its
    factors; frozen matrices have no gradient."""
    config = LlamaConfig(64, 1, 4, 2, 160, vocab_size=1)
    matrices, tokens = 2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 160, 128

    def seconds(lora: LoRA | None = None, document=0, **options) -> dict[str, float]:
        parallel = ParallelConfig(**dict(compile=True) | options)
        work = step_of(build_on_meta(config, lora), parallel, 1, 1, tokens, document=document)
        return compute_time(work, ROUND)

    attention = 2 * tokens * 64 / 0.25e9  # 4 H E for scores and sums, over half of the tokens
    products = tokens * (3 * 2 * (matrices + 64) / 0.5e9 + 3.5 * attention)
    assert seconds()["products"] == pytest.approx(products) and seconds()["recompute"] == 0
    assert seconds(tp=2)["products"] == pytest.approx(products / 2)
    in_documents = 3.5 * tokens * attention * (16 / tokens) * (0.25 / 1)  # of 16 tokens
    packed = products - 3.5 * tokens * attention + in_documents
    assert seconds(document=16)["products"] == pytest.approx(packed)
    again = tokens * 2 * (matrices - 64 * 160) / 0.5e9  # all but w2, which backward does not need
    assert seconds(checkpointing="full")["recompute"] == pytest.approx(again)
    eager = seconds(checkpointing="full", compile=False)["recompute"]
    assert eager == pytest.approx(tokens * (2 * matrices / 0.5e9 + attention))
    assert seconds(checkpointing="products")["recompute"] == 0
    again = tokens * 2 * 64 * (64 + 32 + 160) / 0.5e9  # wq, wv and w1
    assert seconds(checkpointing="selective")["recompute"] == pytest.approx(again)
    frozen = tokens * (2 * 2 * (matrices + 64) / 0.5e9 + 3.5 * attention)
    assert seconds(LoRA(4))["products"] == pytest.approx(frozen)
    elements = 10 * 64 + 2 * (64 + 32) + 3 * 160  # norms, sums, RoPE, SwiGLU; loss of 1 entry
    moved = tokens * (3 * 4 * elements + (2 * 4 + 16) * 1)
    assert seconds()["passes"] == pytest.approx(moved / 1e9)


def test_collectives_of_1_gb():
    """An all-gather over the 8 GPUs of a node sends 7/8 over NVLink; over two nodes their 8 links
    limit it. An all-reduce sends twice as much, here over one link. Of an all-to-all over two
    nodes, 8 of 15 parts go to the other node, over a rank's own link."""
    node, two_nodes = ParallelConfig(dp="fsdp", shard=8), ParallelConfig(dp="fsdp", shard=16)
    across = ParallelConfig(dp="hsdp", replicate=2, shard=8)
    for collective, dim, parallel, expected in [
        ("all-gather", "shard", node, 7 / 8 / 450),
        ("all-gather", "shard", two_nodes, 15 / 16 / 400),
        ("all-reduce", "replicate", across, 2 * 1 / 2 / 50),
        ("all-to-all", "shard", two_nodes, 8 / 15 / 50),
        ("send", "shard", node, 1 / 450),
    ]:
        seconds = collective_time(collective, 1e9, dim, parallel, H100)
        assert seconds == pytest.approx(expected, rel=0.05), (collective, dim)


def test_fsdp_hides_behind_computation_and_tensor_parallelism_does_not():
    model = build_on_meta(PRESETS["llama3.1-8b"])
    work = step_of(model, ParallelConfig(dp="fsdp", shard=8, **FAST), 2, 1, 8192)
    calls = [(name, nbytes / n) for (_, name), (n, nbytes) in sends(work).items()]
    exposed = 2 * sum(collective_time(*call, "shard", work.parallel, H100) for call in calls)
    assert step_time(work, H100)["shard"] == pytest.approx(exposed)  # the first and the last
    slow = step_time(work, replace(H100, node_link=1e9))
    payload = sum(nbytes for _, nbytes in sends(work).values())
    hidden = slow["products"] + slow["passes"]
    assert slow["shard"] == pytest.approx(7 / 8 * payload / 1e9 - hidden, rel=0.02)
    tp = replace(work, parallel=ParallelConfig(tp=8, **FAST))
    payload = sum(nbytes for (dim, _), (_, nbytes) in sends(tp).items() if dim == "tp")
    on_links = 7 / 8 * payload / H100.node_link
    assert on_links < step_time(tp, H100)["tp"] < 1.2 * on_links
    asynchronous = replace(tp, parallel=replace(tp.parallel, async_tp=True))
    assert step_time(asynchronous, H100)["tp"] < step_time(tp, H100)["tp"] / 3


def test_a_pipeline_waits_for_its_bubble():
    """Of equal stages (p - 1) / (m + p - 1) of the time, if messages are quick. Zero-bubble saves
    nothing beside a frozen base, whose matrices have no gradients to put off."""
    model = build_on_meta(LlamaConfig(1024, 4, 8, 8, 4096, vocab_size=8))
    machine = replace(H100, node_link=1e15, latency=0)
    work = step_of(model, ParallelConfig(pp=4, **FAST), 1, 8, 4096)
    parts = step_time(work, machine)
    busy = parts["products"] + parts["passes"]
    share = bubble(check_schedule(make_schedule("1f1b", 4, 8), 8, 4))
    assert parts["pp"] / (parts["pp"] + busy) == pytest.approx(share, rel=0.02)
    zero = replace(work, parallel=replace(work.parallel, schedule="zero-bubble"))
    assert step_time(zero, machine)["pp"] < 0.5 * parts["pp"]
    frozen = build_on_meta(model.config, LoRA(8))
    times = [step_time(replace(one, model=frozen), machine) for one in (work, zero)]
    assert times[0]["pp"] == times[1]["pp"]


def test_offloaded_activations_hide_beside_computation():
    """16 layers of the 1B on 8,192 tokens, 2 bytes an element: all that blocks save takes longer
    to move than forward; with full checkpointing a twentieth moves, in less time."""
    model, moved = build_on_meta(PRESETS["llama3.2-1b"]), 6 * 2048 + 2 * 512 + 3 * 8192
    parallel = ParallelConfig(dp="fsdp", offload_activations=True, **FAST)
    work = step_of(model, parallel, 1, 1, 8192)
    parts, seconds = step_time(work, H100), 16 * 8192 * 2 * moved / 50e9
    forward = (parts["products"] + parts["passes"]) / 3
    expected = seconds - forward + max(0, seconds - 2 * forward)
    assert parts["cpu"] == pytest.approx(expected, rel=0.01)
    full = replace(work, parallel=replace(parallel, checkpointing="full"))
    assert step_time(full, H100)["cpu"] == 0


# ------------------------------------------------------------------- beside published steps


@pytest.fixture(scope="module")
def rows():
    return calibrate.published()


def test_the_constants_are_those_that_fit_best(rows):
    """Another step of the fit leaves each where it is, for all rows and without a family."""
    assert FITS["fitted"] == REACHED
    one = "torchtitan-h100"
    some = [row for row in rows if calibrate.family(row) != one]
    for data, reached in ((rows, REACHED), (some, FITS["without"][one])):
        again = calibrate.fit(data, reached, 1)
        assert again == pytest.approx(reached, rel=0.01)
        moved = reached | {"products h100": 1.05 * reached["products h100"]}
        best, other = (np.sum(calibrate.residuals(data, r) ** 2) for r in (reached, moved))
        assert best < other


def test_errors_of_families_that_were_left_out(rows):
    families = set(map(calibrate.family, rows))
    assert len(families) == 10 and families == FITS["without"].keys()
    errors = calibrate.left_out_errors(rows, FITS["without"])
    by_family = calibrate.by_family(rows, errors).values()
    sizes = [abs(of_family).mean() for of_family in by_family]
    assert np.mean(sizes) <= 0.09 and max(sizes) <= 0.15
    means = [of_family.mean() for of_family in by_family]
    assert abs(np.mean(means)) < 0.03 and min(means) < -0.01 < 0.01 < max(means)
    assert calibrate.spread(rows, errors) == SPREAD


def test_the_page_has_the_table(rows):
    page = (ROOT / "docs/measured.md").read_text()
    for line in calibrate.table(rows, REACHED, FITS["without"]):
        assert line in page
