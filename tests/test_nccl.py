"""What NCCL needs of us, shown without a GPU: an order of calls in which no rank gets stuck."""

import json
import math
import os
from dataclasses import replace

import pytest
import torch.distributed as dist
from conftest import slow, step_of, with_fault
from exact import FOUR_HEADS, GROUPED, assert_same, case, plain_training, train
from workers.nccl_order import problems, recorded
from workers.train_cases import SEQ

from config import ParallelConfig
from costs.page import sends
from model import LlamaConfig
from perf.instruments import build_on_meta

PIPELINE = dict(dp="fsdp", pp=4, shard=2)
INTERLEAVED = dict(schedule="interleaved", stages_per_rank=2)
MESHES = {
    "pp, tied": PIPELINE,
    "diloco": dict(dp="diloco", replicate=2, shard=4),
    "ddp": dict(replicate=8),
    "fsdp": dict(dp="fsdp", shard=8),
    "fsdp, all": dict(dp="fsdp", shard=8, reshard="all"),
    "hsdp": dict(dp="hsdp", replicate=2, shard=4),
    "zero1": dict(dp="zero1", replicate=8),
    "zero1, muon": dict(dp="zero1", replicate=8, optimizer="muon"),
    "tp": dict(dp="fsdp", shard=4, tp=2),
    "tp, muon": dict(dp="fsdp", shard=4, tp=2, optimizer="muon"),
    "tp, float8": dict(dp="fsdp", shard=4, tp=2, float8="tensorwise"),
    "async tp": dict(dp="fsdp", shard=2, tp=4, async_tp=True),
    "cp, full": dict(dp="fsdp", shard=8, cp=4, checkpointing="full"),
    "cp x tp": dict(dp="fsdp", shard=4, cp=2, tp=2),
    "pp": PIPELINE,
    "pp, gpipe": PIPELINE | dict(schedule="gpipe"),
    "pp, zero-bubble": PIPELINE | dict(schedule="zero-bubble"),
    "pp, interleaved": dict(dp="fsdp", pp=2, shard=2, tp=2) | INTERLEAVED,
    "pp x cp x tp": dict(dp="fsdp", pp=2, shard=2, cp=2, tp=2),
    "pp, muon": dict(dp="hsdp", pp=2, replicate=2, shard=2, optimizer="muon"),
}
QUICK = [*MESHES][:3]


def queues_of(name: str) -> list[list]:
    return [recorded(rank, ParallelConfig(**MESHES[name]), "tied" in name) for rank in range(8)]


@pytest.mark.parametrize("name", [name if name in QUICK else slow(name) for name in MESHES])
def test_no_rank_gets_stuck(name):
    """Nor does a group begin later than in with_mesh, or send messages outside of a batch."""
    queues = queues_of(name)
    assert problems(queues) == []
    for calls in queues:
        parts = [part for call in calls for part in call]
        first = {key[:2]: described for key, _, *described in reversed(parts)}
        assert all(described == ["allreduce_", 4] for described in first.values())
        assert "lone message" not in {part[2] for part in parts}


def test_launches_keep_their_order_with_two_groups_in_a_block(monkeypatch):
    for name, ordered in (("ddp", None), ("tp", "1")):
        monkeypatch.setenv(order := "NCCL_LAUNCH_ORDER_IMPLICIT", "")
        monkeypatch.delenv(order)
        recorded(0, ParallelConfig(**MESHES[name]), tied=False)
        assert os.environ.get(order) == ordered


def test_a_torch_without_the_old_name_of_a_collective(monkeypatch):
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    monkeypatch.setattr(dist, "all_gather_single", gather, raising=False)
    monkeypatch.delattr(dist, "all_gather_into_tensor")
    recorded(0, ParallelConfig(**MESHES["ddp"]), tied=False)


def test_ddp_sends_larger_buckets_on_a_gpu():
    config = LlamaConfig(1024, 7, 8, 8, 2816, vocab_size=8)
    work = step_of(build_on_meta(config), ParallelConfig(replicate=2), 1, 1, 16)
    for on_gpu, mebibytes in ((False, 25), (True, 100)):
        ((calls, nbytes),) = sends(replace(work, on_gpu=on_gpu)).values()
        assert calls == math.ceil(nbytes / (mebibytes << 20)) > 2


def test_what_gets_stuck_is_found():
    """Two neighbours that first send, one after the other; and two groups in another order."""
    queues = queues_of("pp, tied")
    alone = [[[part] for call in calls for part in call] for calls in queues]
    assert len([line for line in problems(alone) if "is stuck" in line]) == 8
    for place, (call, after) in enumerate(zip(queues[0], queues[0][1:])):
        if call[0][0] != after[0][0] and "message" != after[0][2]:
            queues[0][place : place + 2] = after, call
            break
    assert "rank 0 is stuck" in str(problems(queues))


def assert_late(directory, cases: dict, within=()) -> None:
    """Assert that training in which all arrives late is plain training."""
    results = train(directory, 4, cases, within=(*within, "tests/workers/late.py"))
    for name, result in results.items():
        given = [
            cases[name]["config"],
            False,
            None,
            False,
            cases[name].get("seq", SEQ),
            "adamw",
            None,
        ]
        assert_same(result, plain_training(json.dumps(given)))


LATE = {
    "ddp": case(GROUPED, 1, replicate=4),
    "zero1": case(GROUPED, 1, dp="zero1", replicate=4),
    "fsdp": case(GROUPED, 1, dp="fsdp", shard=4),
    "pp": case(FOUR_HEADS | dict(n_layers=4), 1, dp="fsdp", pp=4),
    "async tp": case(FOUR_HEADS, 4, tp=4, async_tp=True),
    "tp": case(GROUPED, 4, dp="fsdp", tp=2, shard=2),
    "cp": case(GROUPED, 4, dp="hsdp", replicate=2, shard=2, cp=2) | dict(seq=24),
}


FAULTS = [  # a case, a file, a line and its fault, and what is told
    ("pp", "pipeline", "    wait(works)\n            result =", "    result =", "modified inplace"),
    ("async tp", "async_tp", "return wait(under_way).view", "return under_way.view", "finite"),
    ("pp", "pipeline", "self.exchange(tick, result))", "self.exchange(tick, result));"
     " result is None or result.mul_(2)", "an input of send was changed before it was waited for"),
]  # fmt: skip


def test_nothing_is_used_before_it_has_arrived(tmp_path):
    assert_late(tmp_path, LATE)


@pytest.mark.parametrize("name, file, line, fault, told", FAULTS)
def test_a_missing_wait_is_found(tmp_path, name, file, line, fault, told):
    within = with_fault(tmp_path / "copy", file, line, fault)
    with pytest.raises(AssertionError, match=told):
        assert_late(tmp_path, {name: LATE[name]}, within)
