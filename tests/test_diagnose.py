"""bench.py step: its parts add up, its counts are those of cost.py, it leaves no trace in the
weights, and its verdict follows from the facts. How long anything takes is no test's matter."""

from dataclasses import replace

import pytest
import torch
from conftest import launch, refused, succeed
from test_train import CONFIG, SIZES

from compare import megabytes
from cost import memory
from diagnose import EXPOSED, Facts, alternatives, parts_of, verdict
from measure import on_meta
from parallel import Split

GB = 10**9


def step(shards, *more, nproc: int) -> tuple[str, dict[str, float], dict[str, str]]:
    """What bench.py step prints, the seconds of each part, and the bytes of each kind."""
    out = succeed("bench.py", "step", *SIZES, "--data", shards, "--seq-len=24", "--batch=4",
                  "--repeats=2", *more, nproc=nproc).out  # fmt: skip
    rows = [line.strip("| ").split(" | ") for line in out.splitlines() if line.startswith("| ")]
    parts = {row[0]: float(row[1]) for row in rows if len(row) == 3 and row[0] != "part"}
    held = {row[0]: row[1] for row in rows if len(row) == 2}
    whole = parts.pop("the step")
    assert sum(parts.values()) == pytest.approx(whole, abs=1e-4 * len(parts))
    speed = float(out.split(" tokens/s")[0].splitlines()[-1].replace(",", ""))
    assert 4 * 24 / speed == pytest.approx(whole, rel=0.02)
    assert out.splitlines()[-1].startswith("- ") and "MFU unknown" in out
    return out, parts, held


def test_fully_sharded(shards, tmp_path):
    """What a run left in its OUT is no hindrance, and stays."""
    left = tmp_path / "run" / "step-00000001"
    left.mkdir(parents=True)
    out, parts, held = step(shards, "--dp=fsdp", "--checkpointing=full", "--microbatch=1", "--out",
                            left.parent, nproc=2)  # fmt: skip
    assert list(left.parent.rglob("*")) == [left]
    assert list(parts) == ["forward", "backward", "recompute", EXPOSED + "shard", "optimizer",
                           "data", "other"]  # fmt: skip
    assert "attention runs forward 2 time(s)" in out
    split = Split(dp="fsdp", shard=2, checkpointing="full")
    needs = memory(on_meta(CONFIG, None), split, 24, 2)
    for kind in ("parameters", "gradients", "optimizer"):
        assert held[kind] == megabytes(needs[kind]), kind
    assert held["peak as predicted"] == megabytes(needs["peak"])
    assert float(held["peak"].split()[0]) == pytest.approx(needs["peak"] / 1e6, rel=0.1)
    said = next(line for line in out.splitlines() if line.startswith("a step sends "))
    assert said.removeprefix("a step sends ") in out.split("a rank sends in a step ")[1]


def test_one_process(shards):
    out, parts, _ = step(shards, "--checkpointing=selective", nproc=0)
    assert "attention runs forward 1 time(s)" in out and "a rank sends in a step nothing" in out
    assert parts["recompute"] > 0 and not any(part.startswith(EXPOSED) for part in parts)


@pytest.mark.slow
def test_replicas(shards):
    out, parts, _ = step(shards, "--dp=ddp", nproc=2)
    assert EXPOSED + "replicate" in parts and "recompute" not in parts
    assert "attention runs forward 1 time(s)" in out


@pytest.mark.slow
def test_compiled(shards):
    """Full checkpointing is around the compiled block, selective within."""
    out, parts, held = step(shards, "--compile", "--checkpointing=full", nproc=1)
    assert "attention runs forward 2 time(s)" in out and parts["recompute"] > 0
    assert "1 graph(s) compiled, 0 graph break(s)" in out and held["peak"] == "-"
    out, parts, _ = step(shards, "--compile", "--checkpointing=selective", nproc=1)
    assert "attention runs forward 1 time(s)" in out and "recompute" not in parts
    assert "recompute is part of backward" in out


def test_silenced_passes_leave_no_trace():
    out = succeed("tests/workers/silence.py", nproc=2).out
    names = [line.split(":")[0] for line in out.splitlines()]
    assert names == ["ddp", "fsdp", "none", "tp"]
    for line in out.splitlines():
        assert line.endswith("quiet True, again 2, same weights True"), line


@pytest.mark.slow
def test_refuses_what_train_refuses(shards):
    wrong = ["bench.py", "step", *SIZES, "--data", shards, "--seq-len=24"]
    result = launch(*wrong, "--batch=3", nproc=2)
    assert result.err.count("error: --batch 3 cannot be shared by 2 processes evenly") == 1
    assert result.code != 0 and result.err.count("exitcode  : 2 ") == 2
    refused(launch(*wrong, "--shard=2"), "--shard 2 is for --dp hsdp")
    refused(launch(*wrong, "--repeats=0"), "expected a whole number above 0")


def test_parts():
    """Of the medians of three rounds: what a dimension's silence saves is its exposed part."""

    def rounds(**seconds) -> list[dict[str, float]]:
        return [{part: s + noise for part, s in seconds.items()} for noise in (9.0, 0.0, -9.0)]

    records = {
        "marked": rounds(**{"pass": 50, "forward": 30, "optimizer": 4, "step": 99, "data": 1}),
        "plain": rounds(step=60, data=3),
        "without replicate": rounds(**{"pass": 45, "forward": 29}),
        "without replicate shard": rounds(**{"pass": 30, "forward": 10, "recompute": 8}),
    }
    parts = parts_of(records, ["replicate", "shard"], recompute=True)
    assert parts == {"forward": 10, "backward": 12, "recompute": 8, EXPOSED + "replicate": 5,
                     EXPOSED + "shard": 15, "optimizer": 4, "data": 3, "other": 3}  # fmt: skip


# ------------------------------------------------------------------------------------- the verdict


def facts(split: Split = Split(), peak: float = 99.0, **given) -> Facts:  # noqa: B008
    """Of a run that has room for 10 GB, and for each alternative needs `peak` unless it is given
    in `peaks`; of shares those given as `shares`."""
    usual = dict(size=8, per_node=8, sequences=4, microbatches=1, room=10 * GB, attentions=1)
    peaks = dict.fromkeys(alternatives(split, 8), int(peak * GB)) | given.pop("peaks", {})
    shares = {"forward": 0.3, "backward": 0.6, "data": 0.01, "other": 0.02} | given.pop("shares")
    return Facts(shares=shares, split=split, peaks=peaks, **usual | given)


FSDP = Split(dp="fsdp", shard=8)


def test_nothing_to_mend():
    said = "90 % of the step computes (forward 30 %, backward 60 %)"
    assert verdict(facts(shares={})) == [f"{said}: nothing else takes more than 2 %"]
    fast = verdict(facts(shares={}, mfu=0.52, on_gpu=True, split=Split(compile=True)))
    assert fast == [f"{said}, at 52 % of the device's peak: nothing else takes more than 2 %"]


def test_largest_first():
    shares = {EXPOSED + "replicate": 0.2, EXPOSED + "shard": 0.3, "data": 0.06, "optimizer": 0.16,
              "other": 0.11, EXPOSED + "tp": 0.09}  # fmt: skip
    said = verdict(facts(replace(FSDP, replicate=2, shard=4), shares=shares))
    assert [line.split(" ")[0] for line in said] == ["30", "20", "16", "11", "6"]
    assert verdict(facts(shares={"data": 0.05, "optimizer": 0.15}))[0].startswith("90 % of")


def test_shards_that_wait():
    shares = {EXPOSED + "shard": 0.61}
    near = verdict(facts(FSDP, shares=shares))
    assert near == [
        "61 % of the step waits for all-gathers and reduce-scatters over shard: a larger --batch "
        "computes more for the same bytes"
    ]
    (far,) = verdict(facts(FSDP, shares=shares, per_node=4, peaks={"hsdp": 4 * GB}))
    assert "over shard, which crosses nodes: --dp hsdp keeps them within nodes" in far
    assert far.endswith("and fits: 4 of 10 GB") and "--dp ddp" not in far
    (alone,) = verdict(facts(FSDP, shares=shares, per_node=1, peaks={"hsdp": 4 * GB}))
    assert "crosses nodes" in alone and "hsdp" not in alone  # a node of one process shares nothing
    wide = Split(dp="hsdp", replicate=2, shard=8)
    (wrong,) = verdict(facts(wide, shares=shares, size=16, per_node=4, peak=1))
    assert "--shard 4 keeps them within nodes" in wrong and "--dp ddp sends only" in wrong
    (small,) = verdict(facts(FSDP, shares=shares, microbatches=2, peak=1))
    assert "--dp ddp sends only gradients, and a whole copy fits: 1 of 10 GB; or --reshard" in small
    assert "--reshard none gathers once a step" in small
    (tight,) = verdict(facts(FSDP, shares=shares, microbatches=2))
    assert tight.endswith("a larger --microbatch, where there is room, gathers weights less often")
    (offload,) = verdict(facts(replace(FSDP, offload=True), shares=shares, peak=1))
    assert "--dp ddp" not in offload  # which it cannot have


def test_other_levers():
    tp = Split(tp=8)
    shares = {EXPOSED + "tp": 0.4}
    assert "a smaller --tp, where there is room" in verdict(facts(tp, shares=shares))[0]
    assert "larger --batch" in verdict(facts(tp, shares=shares, sequences=1))[0]
    assert "crosses nodes: --tp 4 or less" in verdict(facts(tp, shares=shares, per_node=4))[0]

    full = Split(checkpointing="full")
    shares = {"recompute": 0.25}
    (lever,) = verdict(facts(full, shares=shares, peaks={"none": 8 * GB, "selective": 6 * GB}))
    assert lever == (
        "25 % of the step computes activations again: --checkpointing none fits: 8 of 10 GB"
    )
    (lever,) = verdict(facts(full, shares=shares, peaks={"none": 11 * GB, "selective": 6 * GB}))
    assert lever.endswith("--checkpointing selective fits: 6 of 10 GB")
    (needed,) = verdict(facts(full, shares=shares))
    assert "recompute 25 %" in needed and "--checkpointing" not in needed

    said = verdict(facts(full, shares={}, attentions=3, graph_breaks=2, on_gpu=True))
    assert len(said) == 3 and "a checkpoint within a checkpoint" in said[0]
    assert "2 graph break(s)" in said[1] and "--compile" in said[2]


def test_alternatives_are_what_flags_give():
    split = Split(dp="fsdp", shard=8, tp=2, dtype=torch.bfloat16)
    others = alternatives(split, per_node=8)
    assert others["this"] == split
    assert others["hsdp"] == replace(split, dp="hsdp", replicate=2, shard=4)
    assert others["ddp"] == replace(split, dp="ddp", replicate=8, shard=1)
