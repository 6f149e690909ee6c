"""What NCCL needs of us, shown without a GPU: an order of calls in which no rank gets stuck."""

import pytest
from conftest import slow
from workers.nccl_order import problems, recorded

from config import ParallelConfig

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
        assert "message outside of a batch" not in {part[2] for part in parts}


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
