"""perf/verdict.py: which sentences follow from which facts."""

from dataclasses import replace

import pytest
import torch

from config import DIMS, ParallelConfig, Work
from model import PRESETS
from perf import verdict as rules
from perf.instruments import build_on_meta
from perf.verdict import EXPOSED, Facts, verdict

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


@pytest.fixture(autouse=True)
def restore_predictions(monkeypatch):
    monkeypatch.setattr(rules, "holds", rules.holds)  # which `facts` replaces


def facts(parallel=DDP, shares=None, peak=99, sequences=4, microbatches=1, on_gpu=False, **given):
    """Return facts of a run with 10 GB a process. A step needs `peak` GB, unless `peaks` has
    another number for its --dp, --reshard or --checkpointing; `shares` are of the time."""
    peaks = given.pop("peaks", {})

    def predicted(work: Work) -> dict[str, float]:
        p = work.parallel
        known = (peaks[name] for name in (p.dp, p.reshard, p.checkpointing) if name in peaks)
        return {"peak": next(known, peak) * GB}

    rules.holds = predicted
    times = 2 if parallel.repeats_attention else 1
    usual = dict(per_node=8, usable_memory=10 * GB, device=torch.device("cpu"), attentions=times)
    shares = {"forward": 0.3, "backward": 0.6, "data": 0.01, "other": 0.02} | (shares or {})
    batch = sequences * parallel.replicate * parallel.shard // parallel.cp
    work = Work(MODEL, parallel, batch, sequences // microbatches, 24, on_gpu=on_gpu)
    return Facts(shares=shares, work=work, **usual | given)


SENTENCES = [  # a layout, the part that takes 30 %, other facts; what is said, and what is not
    (FSDP, "shard", {}, "30 % of the step waits for all-gathers and reduce-scatters over shard: "
     "a larger --batch computes more for the same payload", "crosses nodes"),
    (FSDP, "shard", dict(per_node=4, peaks={"hsdp": 4}), "over shard, which crosses nodes: "
     "--dp hsdp keeps them within nodes, and fits: 4 of 10 GB", "--dp ddp"),
    (FSDP, "shard", dict(per_node=1, peaks={"hsdp": 4}), "crosses nodes", "hsdp"),
    (replace(HSDP, shard=8), "shard", dict(per_node=4, peak=1), "--shard 4 keeps them within nodes "
     "... --dp ddp sends only", "--dp hsdp"),
    # DDP would send whole gradients across nodes.
    (HSDP, "shard", dict(per_node=4, peak=1), "over shard: a larger --batch", "--dp ddp"),
    (FSDP, "shard", dict(microbatches=2, peak=1), "--dp ddp sends only gradients, and a whole copy "
     "fits: 1 of 10 GB; or --reshard none all-gathers once a step", "hsdp"),
    (FSDP, "shard", dict(microbatches=2), "a larger --microbatch, if memory allows", "--reshard"),
    # DDP would be refused with --offload.
    (replace(FSDP, offload=True), "shard", dict(peak=1), "larger --batch", "--dp ddp"),
    (TP, "tp", {}, "over tp: a smaller --tp, if memory allows ... over tp: --async-tp sends while "
     "it multiplies", "crosses nodes"),
    (replace(TP, async_tp=True), "tp", {}, "a smaller --tp", "--async-tp"),
    (TP, "tp", dict(sequences=1), "larger --batch", "crosses nodes"),
    (TP, "tp", dict(per_node=4), "crosses nodes: --tp 4 or less", "smaller --tp"),
    (CP, "cp", {}, "keys and values over cp: a smaller --cp", "crosses nodes"),
    (replace(CP, shard=4, tp=2), "cp", dict(per_node=4), "crosses nodes: --cp 2 or less", "larger"),
    (FULL, "recompute", dict(peaks={"none": 8, "selective": 6}), "30 % of the step recomputes "
     "activations: --checkpointing none fits: 8 of 10 GB", "selective"),
    (FULL, "recompute", dict(peaks={"none": 11, "selective": 6}), "--checkpointing selective fits: "
     "6 of 10 GB", "--checkpointing none"),
    (SELECTIVE, "recompute", dict(peaks={"none": 11, "products": 8}), "--checkpointing products "
     "fits: 8 of 10 GB", "--checkpointing none"),
    (FULL, "recompute", {}, "recompute 30 %", "--checkpointing"),
    # Selective checkpointing would be refused with it.
    (OFFLOADED, "recompute", dict(peaks={"selective": 6}), "recompute 30 %", "selective"),
    (OFFLOADED, "recompute", dict(peak=6), "--checkpointing none fits: 6 of 10 GB ... without "
     "--offload-activations nothing is copied", "selective"),
    (DDP, "optimizer", dict(peak=1), "30 % of the step updates weights: a larger --batch updates "
     "less often", "--dp ddp"),
    # ZeRO-1's all-gather of weights is part of the optimizer's time.
    (ZERO1, "optimizer", dict(peaks={"ddp": 9}), "--dp ddp sends only gradients, and a whole copy "
     "fits: 9 of 10 GB", "--optimizer"),
    (ZERO1, "optimizer", {}, "updates less often", "--dp ddp"),
    (replace(DDP, optimizer="muon"), "optimizer", {}, "updates ... --optimizer adamw", "--dp"),
    (DDP, "", dict(on_gpu=True), "--compile", "--float8"),
    (DDP, "", dict(graph_breaks=2), "2 graph break(s)", "--compile"),
    (COMPILED, "", dict(mfu=0.52, on_gpu=True), "90 % of the step computes (forward 30 %, backward "
     "60 %), at 52 % of the device's peak: nothing else takes more than 2 %", "--"),
    (FULL, "", {}, "nothing else takes more", "attention"),
    *[(replace(DDP, checkpointing=name), "", dict(attentions=needed + 1), f"{name} needs {needed}: "
       "the model has one more checkpoint", "--dp")
      for name, needed in (("none", 1), ("products", 1), ("selective", 1), ("full", 2))],
]  # fmt: skip


@pytest.mark.parametrize("parallel, part, given, said, unsaid", SENTENCES)
def test_sentences(parallel, part, given, said, unsaid):
    shares = {EXPOSED + part if part in DIMS else part: 0.3} if part else {}
    told = "\n".join(verdict(facts(parallel, shares, **given)))
    assert all(words in told for words in said.split(" ... ")), told
    assert unsaid not in told


def test_largest_first():
    shares = {EXPOSED + "replicate": 0.2, EXPOSED + "shard": 0.3, "data": 0.06, "optimizer": 0.16,
              "other": 0.11, EXPOSED + "tp": 0.09}  # fmt: skip
    sentences = verdict(facts(HSDP, shares))
    assert [sentence.split(" ")[0] for sentence in sentences] == ["30", "20", "16", "11", "6"]
    assert verdict(facts(shares={"data": 0.05, "optimizer": 0.15}))[0].startswith("90 % of")


def test_8_bits_are_named_where_the_device_has_them(monkeypatch):
    assert "--float8" not in str(verdict(facts(COMPILED, on_gpu=True)))
    monkeypatch.setattr("techniques.float8.has_float8", lambda *_: True)
    assert "--float8 tensorwise" in verdict(facts(COMPILED, on_gpu=True))[0]
    for parallel in (DDP, replace(COMPILED, float8="rowwise")):
        assert "--float8" not in verdict(facts(parallel, on_gpu=True))[0]


def test_alternatives_are_what_flags_give(monkeypatch):
    parallel, asked = ParallelConfig(dp="fsdp", shard=8, tp=2, dtype=torch.bfloat16), []
    found = facts(parallel)
    monkeypatch.setattr(rules, "holds", lambda work: asked.append(work.parallel) or {"peak": 1})
    for changes in ({}, {"dp": "hsdp"}, {"dp": "ddp"}):
        assert found.fit_note(**changes) == "fits: 1e-09 of 10 GB"
    hsdp = replace(parallel, dp="hsdp", replicate=2, shard=4)
    assert asked == [parallel, hsdp, replace(parallel, dp="ddp", replicate=8, shard=1)]
