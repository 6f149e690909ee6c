"""Collectives as NCCL runs them, shown without it: an order that ends, outputs that come late."""

import math
import os
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from conftest import slow, succeed, with_fault
from exact import GROUPED, ODD, assert_trained, case, train
from test_exact import QUICK, reference_of, train_references
from torch.testing._internal.distributed.fake_pg import FakeStore
from workers.nccl_order import MESHES, Record, problems_of

from config import ParallelConfig, Work
from costs.page import sends
from model import PRESETS
from parallel import ddp, with_mesh
from perf.comm import collectives
from perf.instruments import COLLECTIVES, build_on_meta
from plumbing.processes import Process

LATE = ("tests/workers/late.py",)
FAST = ("fsdp", "ddp", "pp tied")


@pytest.mark.parametrize("names", [FAST, *(slow([name]) for name in MESHES if name not in FAST)])
def test_eight_ranks_meet_in_every_collective(names):
    """Each with one queue for all communicators: a step, an exchange of DiLoCo, an evaluation."""
    out = succeed("tests/workers/nccl_order.py", *names, timeout=600).out
    assert [line.rpartition(": ")[0] for line in out.splitlines()] == [*names], out


@pytest.mark.parametrize(
    "records, problem",
    [
        # Two groups of two ranks, which make their communicators in one order.
        (["a all, b all, a all, b all"] * 2, ""),
        (["a all, b all, a all, b all", "a all, b all, b all, a all"], "rank 0 is stuck"),
        (["a all", "a all, b all"], "called by [1] of (0, 1)"),
        (["a all", "a sum"], "differs"),
        # Two messages, each of which is sent before the other is received, and a batch of both.
        (["send, recv", "send, recv"], "rank 0 is stuck"),
        (["send+recv", "send+recv"], ""),
    ],
)
def test_what_gets_stuck_is_found(records, problem):
    def item(rank: int, text: str) -> tuple:
        if " " in text:
            group, name = text.split()
            return "all", group, (0, 1), name, 8
        return "some", [(kind == "send", (0, 1), 1 - rank, 8) for kind in text.split("+")]

    read = [[item(rank, text) for text in row.split(", ")] for rank, row in enumerate(records)]
    found = problems_of(read)
    assert problem in "; ".join(found) if problem else not found


@pytest.fixture
def process():
    """Rank 0 of four, of which the others do not exist."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    yield Process(rank=0, size=4, local_rank=0, per_node=4, device=torch.device("cpu"))
    dist.destroy_process_group()


def test_communicators_are_made_with_the_mesh(process, monkeypatch):
    """Of all ranks, pp, tp and the ranks of a stage, and where two are under way at once, NCCL is
    to keep their order."""
    monkeypatch.delenv("NCCL_LAUNCH_ORDER_IMPLICIT", raising=False)
    for parallel, ranks in [
        (ParallelConfig(replicate=4), [[0, 1, 2, 3], [0, 1, 2, 3]]),
        (ParallelConfig(pp=2, tp=2), [[0, 1, 2, 3], [0, 2], [0, 1], [0, 1]]),
    ]:
        with Record() as record:
            with_mesh(process, parallel)
        made = [item for item in record.items if item[3] == "allreduce_"]
        assert [[*item[2]] for item in made] == ranks
        assert os.environ.get("NCCL_LAUNCH_ORDER_IMPLICIT") == ("1" if parallel.tp > 1 else None)
        monkeypatch.delenv("NCCL_LAUNCH_ORDER_IMPLICIT", raising=False)


def test_names_that_torch_deprecates_are_not_needed(process, monkeypatch):
    for new, old in [
        ("all_gather_single", "all_gather_into_tensor"),
        ("reduce_scatter_single", "reduce_scatter_tensor"),
    ]:
        monkeypatch.setattr(dist, new, getattr(dist, new, getattr(dist, old)), raising=False)
        monkeypatch.delattr(dist, old)
    assert with_mesh(process).all_gather_scalars([1.0]).shape == (4, 1)
    assert {*collectives(dist.group.WORLD, 64, process.device)} == {*COLLECTIVES} - {"broadcast"}


@pytest.mark.parametrize("device, megabytes", [("cpu", 25), ("cuda", 100)])
def test_buckets_of_ddp_are_those_of_the_formula(monkeypatch, device, megabytes):
    made = []
    wrap = lambda model, **options: made.append(options["bucket_cap_mb"])  # noqa: E731
    monkeypatch.setattr("parallel.DistributedDataParallel", wrap)
    mesh = SimpleNamespace(get_group=lambda dim: None)
    ddp(None, SimpleNamespace(device=torch.device(device), mesh=mesh))
    model = build_on_meta(PRESETS["llama3.2-1b"])
    work = Work(model, ParallelConfig(replicate=2), 2, 1, 64, on_gpu=device == "cuda")
    nbytes = 4 * sum(parameter.numel() for parameter in model.parameters())
    calls = math.ceil(nbytes / megabytes / 2**20)
    assert made == [megabytes] and sends(work) == {("replicate", "all-reduce"): (calls, nbytes)}


QUICKLY = {
    "ddp": case(ODD, 2, replicate=2),
    "zero1 packed": case(ODD, 4, dp="zero1", replicate=2) | dict(packed=True),
    "fsdp all": case(ODD, 2, dp="fsdp", shard=2, reshard="all"),
    "tp": case(GROUPED, 4, tp=2, checkpointing="selective"),
    "async tp": case(GROUPED, 4, tp=2, async_tp=True),
    "cp": case(GROUPED, 4, dp="fsdp", shard=2, cp=2) | dict(seq=24),
    "pp": case(ODD, 2, pp=2) | dict(generate=True),
    "muon": case(ODD, 4, dp="fsdp", shard=2, optimizer="muon"),
}


def train_late(directory, cases: dict, within=()) -> None:
    """Train cases of two ranks by the late backend, and assert that they equal plain PyTorch."""
    results = train(directory, 2, cases, within=(*within, *LATE))
    for name, given in cases.items():
        assert_trained(results[name], given)


def test_every_output_is_waited_for(tmp_path):
    train_late(tmp_path, QUICKLY)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_every_output_of_drawn_cases_is_waited_for(tmp_path, ranks):
    cases = {name: given for name, (n, given) in QUICK.items() if n == ranks}
    references = train_references(tmp_path, {name: QUICK[name] for name in cases})
    results = train(tmp_path, ranks, cases, within=LATE)
    for name, given in cases.items():
        reference = reference_of(given)
        assert_trained(results[name], given, reference and references[str(reference)])


@pytest.mark.parametrize(
    "name, file, old, new, found",
    [
        ("pp", "pipeline", "wait(works)\n            result =", "result =", "modified inplace"),
        slow(
            "async tp",
            "async_tp",
            "return wait(under_way).view(",
            "return under_way.view(",
            "is not finite",
        ),
        ("zero1 packed", "zero1", "parameter.grad = None", "parameter.grad.zero_()", "was changed"),
    ],
)
def test_a_missing_wait_is_found(tmp_path, name, file, old, new, found):
    """And a gradient that is changed while it is summed."""
    within = with_fault(tmp_path / "copy", file, old, new)
    with pytest.raises((AssertionError, pytest.fail.Exception)) as error:
        train_late(tmp_path, {name: QUICKLY[name]}, within)
    assert found in str(error.value)
