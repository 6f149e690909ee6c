"""perf/verdict.py: which sentences follow from which facts."""

from dataclasses import replace

import pytest
import torch

from config import ParallelConfig, Work
from model import PRESETS
from perf import verdict as rules
from perf.instruments import build_on_meta
from perf.verdict import EXPOSED, Facts, verdict

GB = 10**9
MODEL = build_on_meta(PRESETS["tiny"])
DDP = ParallelConfig(replicate=8)
FSDP = ParallelConfig(dp="fsdp", shard=8)


@pytest.fixture(autouse=True)
def restore_predictions(monkeypatch):
    monkeypatch.setattr(rules, "holds", rules.holds)  # which `facts` replaces


def facts(parallel=DDP, peak=99, sequences=4, microbatches=1, on_gpu=False, **given) -> Facts:
    """Return facts of a run with 10 GB a process. A step needs `peak` GB, unless `peaks` has
    another number for its --dp, --reshard or --checkpointing; `shares` are of the time."""
    peaks = given.pop("peaks", {})

    def predicted(work: Work) -> dict[str, float]:
        p = work.parallel
        known = (peaks[name] for name in (p.dp, p.reshard, p.checkpointing) if name in peaks)
        return {"peak": next(known, peak) * GB}

    rules.holds = predicted
    usual = dict(per_node=8, usable_memory=10 * GB, device=torch.device("cpu"), attentions=1)
    shares = {"forward": 0.3, "backward": 0.6, "data": 0.01, "other": 0.02} | given.pop("shares")
    batch = sequences * parallel.replicate * parallel.shard // parallel.cp
    work = Work(MODEL, parallel, batch, sequences // microbatches, 24, on_gpu=on_gpu)
    return Facts(shares=shares, work=work, **usual | given)


def test_nothing_to_improve():
    computes = "90 % of the step computes (forward 30 %, backward 60 %)"
    assert verdict(facts(shares={})) == [f"{computes}: nothing else takes more than 2 %"]
    compiled = replace(DDP, compile=True)
    fast = verdict(facts(compiled, shares={}, mfu=0.52, on_gpu=True))
    assert fast == [f"{computes}, at 52 % of the device's peak: nothing else takes more than 2 %"]


def test_largest_first():
    shares = {EXPOSED + "replicate": 0.2, EXPOSED + "shard": 0.3, "data": 0.06, "optimizer": 0.16,
              "other": 0.11, EXPOSED + "tp": 0.09}  # fmt: skip
    sentences = verdict(facts(replace(FSDP, replicate=2, shard=4), shares=shares))
    assert [sentence.split(" ")[0] for sentence in sentences] == ["30", "20", "16", "11", "6"]
    assert verdict(facts(shares={"data": 0.05, "optimizer": 0.15}))[0].startswith("90 % of")


def test_waiting_for_shard():
    shares = {EXPOSED + "shard": 0.61}
    within_node = verdict(facts(FSDP, shares=shares))
    assert within_node == [
        "61 % of the step waits for all-gathers and reduce-scatters over shard: a larger --batch "
        "computes more for the same payload"
    ]
    (across,) = verdict(facts(FSDP, shares=shares, per_node=4, peaks={"hsdp": 4}))
    assert "over shard, which crosses nodes: --dp hsdp keeps them within nodes" in across
    assert across.endswith("and fits: 4 of 10 GB") and "--dp ddp" not in across
    (one_a_node,) = verdict(facts(FSDP, shares=shares, per_node=1, peaks={"hsdp": 4}))
    assert "crosses nodes" in one_a_node and "hsdp" not in one_a_node  # no one to share with
    hsdp = ParallelConfig(dp="hsdp", replicate=2, shard=8)
    (too_large,) = verdict(facts(hsdp, shares=shares, per_node=4, peak=1))
    assert "--shard 4 keeps them within nodes" in too_large and "--dp ddp sends only" in too_large
    hsdp = ParallelConfig(dp="hsdp", replicate=2, shard=4)
    (apart,) = verdict(facts(hsdp, shares=shares, per_node=4, peak=1))
    assert "--dp ddp" not in apart  # which would send whole gradients across nodes
    (small,) = verdict(facts(FSDP, shares=shares, microbatches=2, peak=1))
    assert "--dp ddp sends only gradients, and a whole copy fits: 1 of 10 GB; or --reshard" in small
    assert "--reshard none all-gathers once a step" in small
    (tight,) = verdict(facts(FSDP, shares=shares, microbatches=2))
    assert tight.endswith("a larger --microbatch, if memory allows, all-gathers weights less often")
    (offload,) = verdict(facts(replace(FSDP, offload=True), shares=shares, peak=1))
    assert "--dp ddp" not in offload  # which does not combine with --offload


def test_waiting_for_tp():
    tp = ParallelConfig(tp=8)
    shares = {EXPOSED + "tp": 0.4}
    sentence, advice = verdict(facts(tp, shares=shares))
    assert "over tp: a smaller --tp, if memory allows" in sentence
    assert advice.endswith("over tp: --async-tp sends while it multiplies")
    assert len(verdict(facts(replace(tp, async_tp=True), shares=shares))) == 1
    assert "larger --batch" in verdict(facts(tp, shares=shares, sequences=1))[0]
    assert "crosses nodes: --tp 4 or less" in verdict(facts(tp, shares=shares, per_node=4))[0]


def test_waiting_for_cp():
    cp = replace(FSDP, cp=8)
    shares = {EXPOSED + "cp": 0.2}
    assert "keys and values over cp: a smaller --cp" in verdict(facts(cp, shares=shares))[0]
    (across,) = verdict(facts(replace(cp, shard=4, tp=2), shares=shares, per_node=4))
    assert "crosses nodes: --cp 2 or less" in across


def test_recomputing():
    full = replace(DDP, checkpointing="full")
    shares = {"recompute": 0.25}
    (lever,) = verdict(facts(full, shares=shares, peaks={"none": 8, "selective": 6}))
    assert lever == (
        "25 % of the step recomputes activations: --checkpointing none fits: 8 of 10 GB"
    )
    (lever,) = verdict(facts(full, shares=shares, peaks={"none": 11, "selective": 6}))
    assert lever.endswith("--checkpointing selective fits: 6 of 10 GB")
    offloading = replace(full, offload_activations=True)
    (lever,) = verdict(facts(offloading, shares=shares, peaks={"selective": 6}))  # refused with it
    assert "recompute 25 %" in lever
    lever, instead = verdict(facts(offloading, shares=shares, peak=6))
    assert lever.endswith("--checkpointing none fits: 6 of 10 GB")
    assert instead.startswith("without --offload-activations nothing is copied")
    (needed,) = verdict(facts(full, shares=shares))
    assert "recompute 25 %" in needed and "--checkpointing" not in needed


def test_updating():
    """ZeRO-1's all-gather of weights is part of the optimizer's time; DDP has none."""
    shares = {"optimizer": 0.3}
    (ddp,) = verdict(facts(DDP, shares=shares, peak=1))
    assert ddp == "30 % of the step updates weights: a larger --batch updates less often"
    same, instead = verdict(facts(replace(DDP, dp="zero1"), shares=shares, peaks={"ddp": 9}))
    assert same == ddp
    assert instead.endswith("--dp ddp sends only gradients, and a whole copy fits: 9 of 10 GB")
    (needed,) = verdict(facts(replace(DDP, dp="zero1"), shares=shares))
    assert needed == ddp
    by_muon, instead = verdict(facts(replace(DDP, optimizer="muon"), shares=shares))
    assert by_muon == ddp and "--optimizer adamw" in instead


def test_other_sentences():
    full = replace(DDP, checkpointing="full")
    sentences = verdict(facts(full, shares={}, attentions=3, graph_breaks=2, on_gpu=True))
    more, breaks, compiled = sentences
    assert "one more checkpoint" in more and "2 graph break(s)" in breaks
    assert "--compile" in compiled


def test_8_bits_are_named_where_the_device_has_them(monkeypatch):
    compiled = replace(DDP, compile=True)
    assert "--float8" not in str(verdict(facts(compiled, shares={}, on_gpu=True)))
    monkeypatch.setattr("techniques.float8.has_float8", lambda *_: True)
    assert "--float8 tensorwise" in verdict(facts(compiled, shares={}, on_gpu=True))[0]
    for parallel in (DDP, replace(compiled, float8="rowwise")):
        assert "--float8" not in verdict(facts(parallel, shares={}, on_gpu=True))[0]


def test_a_checkpoint_that_no_flag_asks_for():
    for checkpointing, expected in (("none", 1), ("selective", 1), ("full", 2)):
        parallel = replace(DDP, checkpointing=checkpointing)
        (usual,) = verdict(facts(parallel, shares={"forward": 1.0, "data": 0}, attentions=expected))
        assert "attention" not in usual
        (more,) = verdict(facts(parallel, shares={}, attentions=expected + 1))
        assert f"{checkpointing} needs {expected}: the model has one more" in more


def test_alternatives_are_what_flags_give(monkeypatch):
    parallel, asked = ParallelConfig(dp="fsdp", shard=8, tp=2, dtype=torch.bfloat16), []
    found = facts(parallel, shares={})
    monkeypatch.setattr(rules, "holds", lambda work: asked.append(work.parallel) or {"peak": 1})
    for changes in ({}, {"dp": "hsdp"}, {"dp": "ddp"}):
        assert found.fit_note(**changes) == "fits: 1e-09 of 10 GB"
    hsdp, ddp = (dict(replicate=2, shard=4), dict(replicate=8, shard=1))
    assert asked == [
        parallel,
        replace(parallel, dp="hsdp", **hsdp),
        replace(parallel, dp="ddp", **ddp),
    ]
