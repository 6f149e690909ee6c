"""bench.py step, compare and limit: what they measure and count, and what they say of it.

Bytes are those that costs/page.py predicts, and losses those of model.py as written. How long
anything takes is not tested: the parts of a step add up to it, and what is said of shares that are
given follows from them."""

import json
import re
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from conftest import slow, succeed
from test_train import CONFIG, SIZES

from bench import Comparison, work_of
from config import DIMS, ParallelConfig, Work, flags_of
from costs.page import holds, sends, sent_bytes
from distill import Distillation, OnPolicy
from model import IGNORE, PRESETS, Llama
from parallel import with_mesh
from perf import verdict as rules
from perf.compare import Cost, compare_losses, default_contestants
from perf.instruments import Training, build_on_meta, random_batch
from perf.reports import megabytes
from perf.step import parts_of_step
from perf.verdict import EXPOSED, Facts, verdict
from plumbing.joining import init_distributed
from plumbing.messages import UserError
from plumbing.processes import Process
from preferences import Preferences
from rewards import Rewards
from runs.task import Task
from techniques.optimizers import make_optimizer


def step(corpus, parallel: ParallelConfig, microbatch: int, *more) -> tuple[str, dict[str, float]]:
    """Run bench.py step, and compare its sums and bytes. Return what it prints, and the seconds of
    each part."""
    flags = *SIZES, *flags_of(parallel).split(), "--data", corpus, "--seq-len=24", "--repeats=2"
    rows = 4  # of a step
    flags += f"--batch={rows}", f"--microbatch={microbatch}", *more
    nproc = parallel.size if parallel.size > 1 else 0
    out = succeed("bench.py", "step", *flags, nproc=nproc).out
    cells = [line.strip("| ").split(" | ") for line in out.splitlines() if line.startswith("| ")]
    parts = {row[0]: float(row[1]) for row in cells if len(row) == 3 and row[0] != "part"}
    memory = {row[0]: row[1] for row in cells if len(row) == 2}
    whole = parts.pop("the step")
    assert sum(parts.values()) == pytest.approx(whole, abs=1e-4 * len(parts))
    speed = float(out.split(" tokens/s")[0].splitlines()[-1].replace(",", ""))
    assert rows * 24 / speed == pytest.approx(whole, rel=0.02)
    assert out.splitlines()[-1].startswith("- ") and "MFU unknown" in out
    if parallel.compile:
        assert memory["peak"] == "-"
        return out, parts
    predicted = holds(Work(build_on_meta(CONFIG), parallel, rows, microbatch, 24))
    for kind in ("parameters", "gradients", "optimizer"):
        assert memory[kind] == megabytes(predicted[kind]), kind
    assert memory["predicted peak"] == megabytes(predicted["peak"])
    peak = float(memory["peak"].split()[0])
    assert peak == pytest.approx(predicted["peak"] / 1e6, rel=0.1)
    return out, parts


@pytest.mark.parametrize(
    "parallel",
    [
        ParallelConfig(checkpointing="selective"),
        ParallelConfig(dp="fsdp", shard=2, checkpointing="full"),
        slow(ParallelConfig(dp="fsdp", shard=2, cp=2)),
        # Recomputation within a compiled block.
        slow(ParallelConfig(replicate=2, cp=2, checkpointing="full", compile=True)),
    ],
    ids=flags_of,
)
def test_a_step(corpus, tmp_path, parallel):
    """An OUT with a run in it is accepted and left as it is."""
    left = tmp_path / "run" / "step-00000001"
    left.mkdir(parents=True)
    microbatch = 1 if parallel.size > parallel.cp else 2
    out, parts = step(corpus, parallel, microbatch, "--out", left.parent)
    assert list(left.parent.rglob("*")) == [left]
    within = parallel.compile and parallel.checkpointing != "none"
    recompute = ["recompute"] * (parallel.checkpointing != "none" and not within)
    exposed = [EXPOSED + d for d in ("replicate", "shard", "cp") if getattr(parallel, d) > 1]
    others = "optimizer", "data", "other"
    assert list(parts) == ["forward", "backward", *recompute, *exposed, *others]
    times = 2 if parallel.repeats_attention else 1
    assert f"attention runs forward {times} time(s)" in out
    assert ("recompute is compiled into backward" in out) == within
    assert ("1 graph(s) compiled, 0 graph break(s)" in out) == parallel.compile
    if not parallel.compile:
        sends = r"per step, each rank sends .*"  # as train.py announces, if anything
        predicted = re.findall(f"^{sends}", out, re.M) or ["per step, each rank sends nothing"]
        assert re.findall(f"counted: ({sends})", out) == predicted


def test_a_pipeline(corpus):
    """Waiting for the other stage is a part."""
    out, parts = step(corpus, ParallelConfig(pp=2, optimizer="muon"), 1)
    assert list(parts)[:3] == ["forward", "backward", EXPOSED + "pp"]
    predicted, counted = re.findall(r"(?:a rank sends up to|rank 0 sends) (.*)", out)
    assert predicted == counted and " send over pp" in counted
    assert "backward, ranks wait for other stages 20.0% by the schedule alone" in out


@pytest.mark.parametrize("names", [["ddp", "fsdp"], slow(["zero1", "reshard none", "tp", "ep"])])
def test_silenced_passes_leave_no_trace(names):
    succeed("tests/workers/silence.py", *names, nproc=2)


def test_parts():
    """Medians of three rounds: what silencing a dimension saves is its exposed communication."""

    def rounds(**seconds) -> dict[str, list[float]]:
        return {part: [s + noise for noise in (9.0, 0.0, -1.0)] for part, s in seconds.items()}

    variants = {
        "whole": rounds(**{"pass": 50, "forward": 30, "optimizer": 4, "step": 60, "data": 3}),
        "without replicate": rounds(**{"pass": 45, "forward": 29}),
        "without replicate shard": rounds(**{"pass": 30, "forward": 10, "recompute": 8}),
    }
    parts = parts_of_step(variants, ["replicate", "shard"])
    assert parts == {"forward": 10, "backward": 12, "recompute": 8, EXPOSED + "replicate": 5,
                     EXPOSED + "shard": 15, "optimizer": 4, "data": 3, "other": 3}  # fmt: skip


@pytest.fixture
def world():
    yield with_mesh(init_distributed(), ParallelConfig())
    dist.destroy_process_group()


def test_a_parameter_without_a_gradient_is_named(world):
    model = Llama(CONFIG)
    model.init_weights()
    model.layers["1"].attention.unused = torch.nn.Linear(4, 4, bias=False)
    optimizer = make_optimizer(model, world)
    with pytest.raises(UserError, match=r"layers\.1\.attention\.unused\.weight got no gradient"):
        batches = iter([random_batch(CONFIG, 1, 8)])
        Training(world, model, model, optimizer, batches, microbatch=1)()


def test_the_gradient_of_a_single_target_is_not_scaled(world):
    model, batch = Llama(CONFIG), random_batch(CONFIG, 2, 8)
    model.init_weights()
    batch.targets.view(-1)[1:] = IGNORE
    gradients = torch.autograd.grad(model(*batch.inputs), [*model.parameters()])
    optimizer = make_optimizer(model, world)
    norm = Training(world, model, model, optimizer, iter([batch]), microbatch=1)().grad_norm
    assert norm == pytest.approx(torch.nn.utils.get_total_norm(gradients).item(), rel=1e-5)


# ---------------------------------------------------------------------- the verdict

GB = 10**9
MODEL = build_on_meta(PRESETS["tiny"])
DDP = ParallelConfig(replicate=8)
COMPILED = replace(DDP, compile=True)
FULL = replace(DDP, checkpointing="full")
SELECTIVE = replace(DDP, checkpointing="selective")
OFFLOADED = replace(FULL, offload_activations=True)
ZERO1 = replace(DDP, dp="zero1")
FSDP = ParallelConfig(dp="fsdp", shard=8)
HSDP = ParallelConfig(dp="hsdp", replicate=2, shard=4)
TP = ParallelConfig(tp=8)
CP = replace(FSDP, cp=8)


SENTENCES = [  # a layout, the part that takes 30 %, other facts; what is said, and what is not
    (FSDP, "shard", {}, "30 % of the step waits for all-gathers and reduce-scatters over shard: "
     "a larger --batch computes more for the same payload", "crosses nodes"),
    (FSDP, "shard", dict(per_node=4, peaks={"hsdp": 4}), "over shard, which crosses nodes: "
     "--dp hsdp keeps them within nodes, and fits: 4 of 10 GB", "--dp ddp"),
    (replace(HSDP, shard=8), "shard", dict(per_node=4, peak=1), "--shard 4 keeps them within nodes "
     "... --dp ddp sends only", "--dp hsdp"),
    # DDP would send whole gradients across nodes.
    (HSDP, "shard", dict(per_node=4, peak=1), "over shard: a larger --batch", "--dp ddp"),
    (FSDP, "shard", dict(microbatches=2, peak=1), "--dp ddp sends only gradients, and a whole copy "
     "fits: 1 of 10 GB; or --reshard none all-gathers once a step", "hsdp"),
    # DDP would be refused with --offload.
    (replace(FSDP, offload=True), "shard", dict(peak=1), "larger --batch", "--dp ddp"),
    (TP, "tp", {}, "a smaller --tp, if memory ... --async-tp sends while", "crosses nodes"),
    (replace(TP, async_tp=True), "tp", {}, "a smaller --tp", "--async-tp"),
    (TP, "tp", dict(per_node=4), "crosses nodes: --tp 4 or less", "smaller --tp"),
    (replace(FSDP, ep=8), "ep", dict(per_node=4), "over ep, which ... --ep 4 or less", "\n"),
    (replace(CP, shard=4, tp=2), "cp", dict(per_node=4), "crosses nodes: --cp 2 or less", "larger"),
    (SELECTIVE, "recompute", dict(peaks={"none": 11, "products": 8}), "--checkpointing products "
     "fits: 8 of 10 GB", "--checkpointing none"),
    # Other checkpointing would be refused with it.
    (OFFLOADED, "recompute", dict(peaks={"selective": 6}), "recompute 30 %", "selective"),
    (OFFLOADED, "recompute", dict(peak=6), "without --offload-activations nothing is copied, and "
     "a step fits: 6 of 10 GB", "--checkpointing"),
    # ZeRO-1's all-gather of weights is part of the optimizer's time.
    (ZERO1, "optimizer", dict(peaks={"ddp": 9}), "--dp ddp sends only gradients, and a whole copy "
     "fits: 9 of 10 GB", "--optimizer"),
    (replace(DDP, optimizer="muon"), "optimizer", {}, "updates ... --optimizer adamw", "--dp"),
    (DDP, "sampling", {}, "30 % of the step samples answers and rewards them: a smaller "
     "--max-new-tokens", "computes"),
    (DDP, "", dict(on_gpu=True), "--compile", "--float8"),
    (DDP, "", dict(graph_breaks=2), "2 graph break(s)", "--compile"),
    (COMPILED, "", dict(mfu=0.52, on_gpu=True), "90 % of the step computes (forward 30 %, backward "
     "60 %), at 52 % of the device's peak: nothing else takes more than 2 %", "--"),
    *[(DDP, task.before_step, {}, "30 % of the step ", "\n")  # one sentence
      for task in (Task, Preferences, Rewards, Distillation, OnPolicy)],
    *[(replace(DDP, checkpointing=name), "", dict(attentions=needed + 1), f"{name} needs {needed}: "
       "the model has one more checkpoint", "--dp") for name, needed in (("none", 1), ("full", 2))],
]  # fmt: skip


@pytest.mark.parametrize("parallel, part, given, said, unsaid", SENTENCES)
def test_sentences(parallel, part, given, said, unsaid, monkeypatch):
    """A process has 10 GB. A step needs `peak` GB, unless `peaks` has another number for its --dp,
    --reshard or --checkpointing."""
    facts = dict(per_node=8, attentions=2 if parallel.repeats_attention else 1) | given
    peaks = facts.pop("peaks", {})
    peak = facts.pop("peak", 99)
    microbatches = facts.pop("microbatches", 1)
    on_gpu = facts.pop("on_gpu", False)

    def predicted(work: Work) -> dict[str, float]:
        p = work.parallel
        known = [peaks[name] for name in (p.dp, p.reshard, p.checkpointing) if name in peaks]
        return {"peak": [*known, peak][0] * GB}

    monkeypatch.setattr(rules, "holds", predicted)
    shares = {"forward": 0.3, "backward": 0.6, "data": 0.01, "other": 0.02}
    if part:
        shares[EXPOSED + part if part in DIMS else part] = 0.3
    batch = 4 * parallel.replicate * parallel.shard // parallel.cp
    work = Work(MODEL, parallel, batch, 4 // microbatches, 24, on_gpu=on_gpu)
    device = torch.device("cpu")
    told = "\n".join(verdict(Facts(shares, work, usable_memory=10 * GB, device=device, **facts)))
    assert all(words in told for words in said.split(" ... ")), told
    assert unsaid not in told


# ------------------------------------------------------------------------------ the other commands

CONTESTANTS = {
    "one": ParallelConfig(),  # on rank 0 alone, with the whole batch
    "ddp": ParallelConfig(replicate=2),
    "fsdp": ParallelConfig(dp="fsdp", shard=2),
    "zero1": ParallelConfig(dp="zero1", replicate=2),
    "fsdp --reshard none": ParallelConfig(dp="fsdp", shard=2, reshard="none"),
    "wrong": ParallelConfig(dp="hsdp", shard=2),
    "--tp 2": ParallelConfig(tp=2),
    "--tp 2 --async-tp": ParallelConfig(tp=2, async_tp=True),
    "fsdp --cp 2": ParallelConfig(dp="fsdp", shard=2, cp=2),
    "fsdp --pp 2": ParallelConfig(dp="fsdp", pp=2),
    "--pp 2 --schedule gpipe": ParallelConfig(pp=2, schedule="gpipe"),
    "ddp --checkpointing selective": ParallelConfig(replicate=2, checkpointing="selective"),
    "ddp --checkpointing full": ParallelConfig(replicate=2, checkpointing="full"),
}


@pytest.mark.parametrize("names", [["one", "ddp", "fsdp"], slow([*CONTESTANTS])])
def test_contestants_have_the_same_loss_and_the_costs_that_are_predicted(names, tmp_path):
    file = tmp_path / "results.json"
    flags = "--batch=4", "--seq-len=16", "--repeats=1", "--json", file
    out = succeed("bench.py", "compare", *names, *flags, nproc=2).out
    results = json.loads(file.read_text())
    given = dict(model="tiny", batch=4, microbatch=1, seq_len=16, ranks=2, per_node=2, device="cpu")
    assert given.items() <= results.items() and results["lora"] is False and results["date"]
    assert list(results["strategies"]) == names
    plain, generator = Llama(PRESETS["tiny"]), torch.Generator().manual_seed(0)
    plain.init_weights()
    tokens = torch.randint(plain.config.vocab_size, (4, 17), generator=generator)
    with torch.no_grad():
        logits = plain(tokens[:, :-1])
    loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).item()
    for name, result in results["strategies"].items():
        work = Work(MODEL, CONTESTANTS[name], 4, 1, 16)
        predicted = sends(work, 0)
        assert result["loss"] == pytest.approx(loss, rel=1e-5), name
        payload = sum(nbytes for _, nbytes in result["payload"].values())
        assert payload == sum(nbytes for _, nbytes in predicted.values()), name
        assert result["sends"] == sent_bytes(predicted, work.parallel)
        assert result["peak_bytes"] == pytest.approx(holds(work)["peak"], rel=0.2), name
        assert len(result["seconds"]) == 1 and result["tokens_per_second"] > 0, name
    assert "losses of the first step agree to" in out
    assert results["strategies"][names[0]]["ratio"] == 1


def test_contestants_stand_for_flags():
    """On two processes; those of several nodes on two nodes of two."""
    two, four = (Process(0, size, 0, 2, torch.device("cpu")) for size in (2, 4))
    for name, parallel in CONTESTANTS.items():
        assert work_of(Comparison(), name, two).parallel == parallel
    hsdp = ParallelConfig(dp="hsdp", replicate=2, shard=2)
    for name, parallel in (("one --compile", ParallelConfig(compile=True)), ("hsdp", hsdp)):
        assert work_of(Comparison(), name, four).parallel == parallel
    for process in (two, four):
        assert all(work_of(Comparison(), name, process) for name in default_contestants(process))


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
