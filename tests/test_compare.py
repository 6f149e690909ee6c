"""bench.py compare, limit and comm: what they measure, and what is counted. Speed is not tested."""

import json
from datetime import datetime

import pytest
import torch
import torch.nn.functional as F
from conftest import slow, succeed

from bench import add_compare_flags, work_of
from config import ParallelConfig, Work
from costs.page import holds, sends
from costs.seconds import sent_bytes
from model import PRESETS, Llama
from perf import comm
from perf.compare import Cost, compare_losses, default_contestants
from perf.instruments import build_on_meta
from plumbing.parser import Parser
from plumbing.processes import Process

CONTESTANTS = {
    "ddp": ParallelConfig(replicate=2),
    "fsdp": ParallelConfig(dp="fsdp", shard=2),
    "zero1": ParallelConfig(dp="zero1", replicate=2),
    "fsdp --reshard none": ParallelConfig(dp="fsdp", shard=2, reshard="none"),
    "wrong": ParallelConfig(dp="hsdp", shard=2),
    "--tp 2": ParallelConfig(tp=2),
    "--tp 2 --async-tp": ParallelConfig(tp=2, async_tp=True),
    "fsdp --cp 2": ParallelConfig(dp="fsdp", shard=2, cp=2),
    "fsdp --pp 2": ParallelConfig(dp="fsdp", pp=2),
    "--pp 2 --schedule zero-bubble": ParallelConfig(pp=2, schedule="zero-bubble"),
    "ddp --checkpointing selective": ParallelConfig(replicate=2, checkpointing="selective"),
    "ddp --checkpointing full": ParallelConfig(replicate=2, checkpointing="full"),
}


@pytest.mark.parametrize("names", [["ddp", "fsdp"], slow([*CONTESTANTS])])
def test_contestants_have_the_same_loss_and_the_costs_that_are_predicted(names, tmp_path):
    file = tmp_path / "results.json"
    flags = "--batch=4", "--seq-len=16", "--repeats=1", "--json", file
    out = succeed("bench.py", "compare", *names, *flags, nproc=2).out
    results = json.loads(file.read_text())
    given = dict(model="tiny", batch=4, microbatch=1, seq_len=16, ranks=2, per_node=2, device="cpu")
    assert given.items() <= results.items() and results["lora"] is False and results["date"]
    assert list(results["strategies"]) == names
    loss, model = loss_of_plain_model(), build_on_meta(PRESETS["tiny"])
    for name, result in results["strategies"].items():
        work = Work(model, CONTESTANTS[name], 4, 1, 16)
        predicted = sends(work, 0)
        assert result["loss"] == pytest.approx(loss, rel=1e-5), name
        payload = sum(nbytes for _, nbytes in result["payload"].values())
        assert payload == sum(nbytes for _, nbytes in predicted.values()), name
        assert result["sends"] == sent_bytes(predicted, work.parallel)
        assert result["peak_bytes"] == pytest.approx(holds(work, 0)["peak"], rel=0.2), name
        assert len(result["seconds"]) == 1 and result["tokens_per_second"] > 0, name
    assert "losses of the first step agree to" in out and results["strategies"]["ddp"]["ratio"] == 1


def loss_of_plain_model() -> float:
    """Compute, without bench.py, the loss of tiny's initial weights on the contestants' batch."""
    model, generator = Llama(PRESETS["tiny"]), torch.Generator().manual_seed(0)
    model.init_weights()
    tokens = torch.randint(model.config.vocab_size, (4, 17), generator=generator)
    with torch.no_grad():
        return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()).item()


def test_contestants_stand_for_flags():
    """On two processes; those of several nodes on two nodes of two."""
    args = Parser.defaults(add_compare_flags)
    two, four = (Process(0, size, 0, 2, torch.device("cpu")) for size in (2, 4))
    for name, parallel in CONTESTANTS.items():
        assert work_of(args, name, two).parallel == parallel
    hsdp = ParallelConfig(dp="hsdp", replicate=2, shard=2)
    for name, parallel in (("one --compile", ParallelConfig(compile=True)), ("hsdp", hsdp)):
        assert work_of(args, name, four).parallel == parallel
    for process in (two, four):
        assert all(work_of(args, name, process) for name in default_contestants(process))


def test_losses_that_do_not_agree_are_named():
    losses = {"one": 7.0, "ddp": 7.0000014, "tp": 7.01}
    costs = {name: Cost(ParallelConfig(), loss) for name, loss in losses.items()}
    told = compare_losses(costs)
    assert told == "losses of the first step DO NOT AGREE: tp 7.01000, but one 7.00000"
    costs["tp"] = Cost(ParallelConfig(float8="tensorwise"), 7.01)  # which rounds
    assert compare_losses(costs) == "losses of the first step agree to 1e-03"


@pytest.mark.parametrize("more", [[], slow(["bare", "one --compile", "--lora"])])
def test_limit(more):
    flags = "--model=tiny", "--batch=1", "--seq-len=64", "--repeats=2"
    out = succeed("bench.py", "limit", *more, *flags).out
    found = [line.split("|")[1].strip() for line in out.splitlines() if line.startswith("|")]
    assert found[2:] == (more[:2] or ["bare", "transformers", "one"])
    assert "losses of the first step agree" in out


def test_comm(tmp_path):
    """Two ranks on one node: a single kind of group with every collective."""
    file = tmp_path / "comm.json"
    succeed("bench.py", "comm", "--repeats=2", "--out", file, nproc=2)
    report = json.loads(file.read_text())
    facts = dict(device="cpu", backend="gloo", ranks=2, per_node=2, torch=torch.__version__)
    assert {name: report[name] for name in facts} == facts
    assert datetime.fromisoformat(report["date"]).tzinfo
    (world,) = report["groups"].values()
    times = world["times"]
    assert list(times) == ["all-reduce", "all-gather", "reduce-scatter"]
    for points in times.values():
        assert [nbytes for nbytes, _ in points] == comm.SIZES
        assert all(seconds > 0 for _, seconds in points)


def test_bus_bandwidth():
    """A million bytes in a millisecond, by the table in nccl-tests' doc/PERFORMANCE.md."""
    for collective, factor in (("all-reduce", 7 / 4), ("all-gather", 7 / 8)):
        assert comm.bus_bandwidth(collective, 8, 10**6, 1e-3) == pytest.approx(factor * 1e9)
    assert comm.bus_bandwidth("reduce-scatter", 2, 10**6, 1e-3) == pytest.approx(0.5e9)
