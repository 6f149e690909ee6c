"""bench.py step: its parts add up, its counts are as predicted, and silenced passes leave no trace
in the weights. How long anything takes is not tested."""

import re

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from conftest import slow, step_of, succeed
from test_train import CONFIG, SIZES
from torch.optim import AdamW
from torch.testing._internal.distributed.fake_pg import FakeStore

from config import ParallelConfig, flags_of
from costs.page import holds
from model import IGNORE, PRESETS, Llama
from parallel import with_mesh
from perf.instruments import Counted, build_on_meta, make_step, megabytes, random_batch
from perf.step import parts_of_step
from perf.verdict import EXPOSED
from plumbing.processes import Process, UserError, init_distributed
from techniques.optimizers import BFloat16AdamW, Muon, make_optimizer
from train import train_step


def step(corpus, *more, nproc: int) -> tuple[str, dict[str, float], dict[str, str]]:
    """Return what bench.py step prints, the seconds of each part, and the bytes of each kind."""
    given = *SIZES, "--data", corpus, "--seq-len=24", "--batch=4", "--repeats=2"
    out = succeed("bench.py", "step", *given, *more, nproc=nproc).out
    rows = [line.strip("| ").split(" | ") for line in out.splitlines() if line.startswith("| ")]
    parts = {row[0]: float(row[1]) for row in rows if len(row) == 3 and row[0] != "part"}
    memory = {row[0]: row[1] for row in rows if len(row) == 2}
    whole = parts.pop("the step")
    assert sum(parts.values()) == pytest.approx(whole, abs=1e-4 * len(parts))
    speed = float(out.split(" tokens/s")[0].splitlines()[-1].replace(",", ""))
    assert 4 * 24 / speed == pytest.approx(whole, rel=0.02)
    assert out.splitlines()[-1].startswith("- ") and "MFU unknown" in out
    return out, parts, memory


def check_memory(memory: dict[str, str], parallel: ParallelConfig, *microbatches: int) -> None:
    """Compare the counted bytes of each kind with the predicted ones, given a microbatch's rows of
    24 tokens, and the number of microbatches."""
    predicted = holds(step_of(build_on_meta(CONFIG), parallel, *microbatches, 24))
    for kind in ("parameters", "gradients", "optimizer"):
        assert memory[kind] == megabytes(predicted[kind]), kind
    assert memory["predicted peak"] == megabytes(predicted["peak"])
    assert float(memory["peak"].split()[0]) == pytest.approx(predicted["peak"] / 1e6, rel=0.1)


@pytest.mark.parametrize(
    "parallel",
    [
        ParallelConfig(checkpointing="selective"),
        ParallelConfig(dp="fsdp", shard=2, checkpointing="full"),
        slow(ParallelConfig(dp="fsdp", shard=2, cp=2)),
        # Recomputation within a compiled block.
        slow(ParallelConfig(replicate=2, cp=2, checkpointing="full", compile=True)),
        slow(ParallelConfig(checkpointing="selective", compile=True)),
    ],
    ids=flags_of,
)
def test_a_step(corpus, tmp_path, parallel):
    """An OUT with a run in it is accepted and left as it is."""
    left = tmp_path / "run" / "step-00000001"
    left.mkdir(parents=True)
    flags, microbatch = flags_of(parallel).split(), 1 if parallel.size > parallel.cp else 2
    flags += [f"--microbatch={microbatch}", "--out", left.parent]
    out, parts, memory = step(corpus, *flags, nproc=parallel.size * (parallel.size > 1))
    assert list(left.parent.rglob("*")) == [left]
    within = parallel.compile and parallel.checkpointing != "none"
    recompute = ["recompute"] * (parallel.checkpointing != "none" and not within)
    exposed = [EXPOSED + d for d in ("replicate", "shard", "cp") if getattr(parallel, d) > 1]
    others = "optimizer", "data", "other"
    assert list(parts) == ["forward", "backward", *recompute, *exposed, *others]
    times = 2 if parallel.repeats_attention else 1
    assert f"attention runs forward {times} time(s)" in out
    assert ("recompute is compiled into backward" in out) == within
    if parallel.compile:
        assert "1 graph(s) compiled, 0 graph break(s)" in out and memory["peak"] == "-"
        return
    check_memory(memory, parallel, microbatch, 2)
    sends = r"per step, each rank sends .*"  # as train.py announces, if anything
    predicted = re.findall(f"^{sends}", out, re.M) or ["per step, each rank sends nothing"]
    assert re.findall(f"counted: ({sends})", out) == predicted


def test_a_pipeline(corpus):
    """Waiting for the other stage is a part."""
    out, parts, memory = step(corpus, "--pp=2", "--microbatch=1", nproc=2)
    assert list(parts)[:3] == ["forward", "backward", EXPOSED + "pp"]
    check_memory(memory, ParallelConfig(pp=2, optimizer="muon"), 1, 4)
    predicted, counted = re.findall(r"(?:a rank sends up to|rank 0 sends) (.*)", out)
    assert predicted == counted and " send over pp" in counted
    assert "backward, ranks wait for other stages 20.0% by the schedule alone" in out


@pytest.mark.parametrize("names", [["ddp", "fsdp"], slow(["zero1", "reshard none", "tp"])])
def test_silenced_passes_leave_no_trace(names):
    out = succeed("tests/workers/silence.py", *names, nproc=2).out
    assert [line.split(":")[0] for line in out.splitlines()] == names
    for line in out.splitlines():
        assert line.endswith("silenced True, sum after it 2, same weights True"), line


def test_parts():
    """Medians of three rounds: what silencing a dimension saves is its exposed communication."""

    def rounds(**seconds) -> dict[str, list[float]]:
        return {part: [s + noise for noise in (9.0, 0.0, -9.0)] for part, s in seconds.items()}

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
    yield with_mesh(init_distributed())
    dist.destroy_process_group()


def test_a_parameter_without_a_gradient_is_named(world):
    model = Llama(CONFIG)
    model.init_weights()
    model.layers["1"].attention.unused = torch.nn.Linear(4, 4, bias=False)
    optimizer = make_optimizer(model, ParallelConfig())
    with pytest.raises(UserError, match=r"layers\.1\.attention\.unused\.weight got no gradient"):
        train_step(model, optimizer, random_batch(CONFIG, 1, 8), 1, 1.0, world, step=1)


def test_the_gradient_of_a_single_target_is_not_scaled(world):
    model, batch = Llama(CONFIG), random_batch(CONFIG, 2, 8)
    model.init_weights()
    batch.targets.view(-1)[1:] = IGNORE
    gradients = torch.autograd.grad(model(*batch.inputs), [*model.parameters()])
    optimizer = make_optimizer(model, ParallelConfig())
    norm = train_step(model, optimizer, batch, 1, 1.0, world, step=1).grad_norm
    assert norm == pytest.approx(torch.nn.utils.get_total_norm(gradients).item(), rel=1e-5)


def test_a_measured_step_has_the_optimizer_of_its_configuration(world):
    model = build_on_meta(PRESETS["tiny"])
    batch = random_batch(model.config, 1, 8)
    for settings, kind in (({}, AdamW), ({"moments": "bfloat16"}, BFloat16AdamW),
                           ({"optimizer": "muon"}, Muon)):  # fmt: skip
        step = make_step(step_of(model, ParallelConfig(**settings), 1, 1, 8), world, batch)
        assert type(step.optimizer) is kind
        assert step().loss > step().loss  # it trains


def test_a_collective_without_a_name_here_is_counted_too():
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    process = Process(rank=0, size=2, local_rank=0, per_node=2, device=torch.device("cpu"))
    x = torch.zeros(6)
    world = with_mesh(process)
    with Counted(world) as counted:
        funcol.wait_tensor(funcol.all_to_all_single(x, None, None, world.mesh["replicate"]))
        dist.all_reduce(x)
    dist.destroy_process_group()
    names = "all_to_all_single", "all-reduce"
    assert counted.sent == {("replicate", name): (1, 24) for name in names}
