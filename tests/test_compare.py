"""bench.py compare and limit: what they measure, and what is counted. Speed is not tested."""

import json
import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from conftest import slow, succeed

from bench import add_compare_flags, work_of
from config import ParallelConfig, Work
from costs.page import holds, sends
from costs.seconds import sent_bytes
from model import PRESETS, Llama
from perf.compare import Cost, compare_losses, default_contestants
from perf.instruments import build_on_meta
from plumbing.parser import Parser
from plumbing.processes import Process


def compare_two_ranks(directory: Path, *args) -> tuple[str, dict]:
    """Return what bench.py compare prints and writes."""
    file = directory / "results.json"
    given = ["--seq-len=16", "--repeats=1", "--json", file]
    out = succeed("bench.py", "compare", *args, *given, nproc=2).out
    return out, json.loads(file.read_text())


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
    out, results = compare_two_ranks(tmp_path, *names, "--batch=4")
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
        assert result["sends"] == (sent := sent_bytes(predicted, work.parallel))
        assert result["peak_bytes"] == pytest.approx(holds(work, 0)["peak"], rel=0.2), name
        assert len(result["seconds"]) == 1 and result["tokens_per_second"] > 0, name
        assert f"| {result['peak_bytes'] / 1e6:.2f} MB |" in out
        assert f"{name} sends {sent / 1e6:.2f} MB; payload " in out
    assert "losses of the first step agree to" in out and results["strategies"]["ddp"]["ratio"] == 1


def loss_of_plain_model() -> float:
    """Compute, without bench.py, the loss of tiny's initial weights on the contestants' batch."""
    model, generator = Llama(PRESETS["tiny"]), torch.Generator().manual_seed(0)
    model.init_weights()
    tokens = torch.randint(model.config.vocab_size, (4, 17), generator=generator)
    with torch.no_grad():
        return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()).item()


@pytest.mark.slow
def test_compare_adapters(tmp_path):
    """They have one loss in every strategy. Bare products and transformers' model of random weights
    have none to compare, and alone they send nothing."""
    names = ["bare", "one", "transformers", "ddp", "fsdp --reshard adapters", "fsdp"]
    out, results = compare_two_ranks(tmp_path, *names, "--lora", "--batch=2")
    bare, one, transformers, *others = (row["loss"] for row in results["strategies"].values())
    assert bare is transformers is None and one > 7 and results["lora"]
    assert others == pytest.approx([one] * 3, rel=1e-5)
    assert re.findall(r"^([\w -]+) sends ", out, re.MULTILINE) == names[3:]


def processes(nodes: int, per_node: int) -> Process:
    return Process(0, nodes * per_node, 0, per_node, torch.device("cpu"))


def test_what_is_compared_by_default():
    def chosen(*sizes: int) -> list[str]:
        names, args = default_contestants(processes(*sizes)), Parser.defaults(add_compare_flags)
        assert all(work_of(args, name, processes(*sizes)) for name in names)
        return names

    ways = [" --checkpointing selective", " --checkpointing full"]
    assert chosen(1, 1) == ["one", *(f"one{way}" for way in ways)]
    several = ["ddp", "zero1", "fsdp", "fsdp --reshard none"]
    assert chosen(1, 2) == chosen(2, 1) == [*several, *(f"ddp{way}" for way in ways)]
    assert chosen(2, 2) == ["ddp", "zero1", "hsdp", *several[2:], *(f"ddp{way}" for way in ways)]


@pytest.mark.parametrize(
    "contestant, parallel",
    [
        ("hsdp", ParallelConfig(dp="hsdp", replicate=2, shard=2)),
        ("wrong", ParallelConfig(dp="hsdp", replicate=2, shard=2)),
        ("one --compile", ParallelConfig(compile=True)),
        ("--tp 2 --dp fsdp", ParallelConfig(dp="fsdp", shard=2, tp=2)),
    ],
)
def test_a_contestant_stands_for_flags(contestant, parallel):
    args = Parser.defaults(add_compare_flags)
    assert work_of(args, contestant, processes(2, 2)).parallel == parallel


def test_losses_that_do_not_agree_are_named():
    losses = {"one": 7.0, "ddp": 7.0000014, "tp": 7.01}
    costs = {name: Cost(ParallelConfig(), loss) for name, loss in losses.items()}
    told = compare_losses(costs)
    assert told == "losses of the first step DO NOT AGREE: tp 7.01000, but one 7.00000"
    costs["tp"] = Cost(ParallelConfig(float8="tensorwise"), 7.01)  # which rounds
    assert compare_losses(costs) == "losses of the first step agree to 1e-03"


@pytest.mark.parametrize("more", [[], slow(["bare", "one --compile", "--lora"])])
def test_limit(more):
    out = succeed("bench.py", "limit", *more, "--model", "tiny", "--batch=1", "--seq-len=64",
                  "--repeats=2").out  # fmt: skip
    found = [line.split("|")[1].strip() for line in out.splitlines() if line.startswith("|")]
    assert found[2:] == (more[:2] or ["bare", "transformers", "one"])
    assert "losses of the first step agree" in out
