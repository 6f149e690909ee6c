"""DiLoCo: equal to replicas in plain PyTorch; counted, saved and resumed."""

import contextlib
import re
import shutil
import socket
import sys
import time

import pytest
import torch
from conftest import ROOT, launch, metrics, refused, slow, succeed
from exact import FOUR_HEADS, assert_same, case, plain_adamw, plain_model, plain_step, train
from test_train import flags, resumes, weights
from workers.drill import kill, ranks_of, running
from workers.train_cases import BATCH, batch_of

from config import ParallelConfig
from plumbing.joining import check_restarts
from plumbing.messages import UserError

ALONE = dict(dp="diloco", every=3, outer_lr=0.7, outer_momentum=0.9, replicate=2)
MEAN = ALONE | dict(every=1, outer_lr=1.0, outer_momentum=0.0)
SMALL = FOUR_HEADS | dict(tie_embeddings=True)
CASES = {  # of two ranks, of four
    2: {"alone": case(SMALL, 2, **ALONE), "mean": case(SMALL, 2, **MEAN)},
    4: {"shards": case(SMALL, 2, **ALONE, shard=2), "tp": case(FOUR_HEADS, 2, **ALONE, tp=2)},
}
STEPS, OUTER = 6, ("replicate", "all-reduce")


def plain_diloco(given: dict) -> dict:
    """Train two replicas one after another in plain PyTorch; return what assert_same compares."""
    replicas, rows, first_gradients = [], [], {}
    for _ in range(2):
        model = plain_model(given["config"])
        named = dict(model.named_parameters())
        replicas.append((model, named, plain_adamw(named, 1e-2)))
    first = {name: p.detach().clone() for name, p in named.items()}
    outer = {name: p.detach().clone().requires_grad_() for name, p in named.items()}
    parallel = ParallelConfig(**given["parallel"])
    lr, momentum = parallel.outer_lr, parallel.outer_momentum
    outer_step = torch.optim.SGD(outer.values(), lr, momentum, nesterov=momentum > 0).step
    for step in range(1, STEPS + 1):
        own_rows, halves = [], batch_of(packed=False).microbatches(BATCH // 2)
        for (model, named, adamw), half in zip(replicas, halves, strict=True):
            row, gradients = plain_step(model(half.tokens), half.targets, named, adamw)
            own_rows.append(row)
        first_gradients = first_gradients or gradients  # of the last replica, as the worker's
        (loss, n, norm), (other_loss, other_n, _) = own_rows
        rows.append(((n * loss + other_n * other_loss) / (n + other_n), n + other_n, norm))
        if step % parallel.every == 0:
            for name, p in outer.items():
                p.grad = sum(p.detach() - own[name].detach() for _, own, _ in replicas) / 2
            outer_step()
            for _, own, _ in replicas:
                for name, p in own.items():
                    p.data.copy_(outer[name])
    return dict(rows=rows, gradients=first_gradients, first=first, last=outer)


@pytest.mark.parametrize("nproc", [2, slow(4)])
def test_replicas_train_as_in_plain_pytorch_and_send_what_is_predicted(nproc, tmp_path):
    """The last step, whose traffic is counted, has one outer step of every H."""
    cases = {name: given | dict(steps=STEPS) for name, given in CASES[nproc].items()}
    for name, result in train(tmp_path, nproc, cases).items():
        assert_same(result, plain_diloco(cases[name]))
        (_, nbytes), every = result["predicted"][OUTER], cases[name]["parallel"]["every"]
        assert result["sent"][OUTER][1] == pytest.approx(every * nbytes, rel=0.01)


def test_it_resumes_bit_for_bit_between_outer_steps(corpus, tmp_path):
    more = dict(dp="diloco", every=4, shard=1, steps=8, save_every=2, eval_every=4, keep=0)
    command = "train.py", *flags(corpus, tmp_path, **more)
    told = succeed(*command, nproc=2).out
    assert "by 0.25 all-reduce over replicate" in told
    both = (weights(tmp_path / f"step-0000000{step}").values() for step in (4, 6))
    assert all(map(torch.equal, *both))  # both save the outer copy
    resumes(tmp_path, 6, weights, *command, nproc=2)


def test_new_replicas_begin_as_copies(corpus, tmp_path):
    """Between outer steps. Copies of the only replica have its loss in the first step."""
    more, out = dict(dp="diloco", every=4, shard=1, batch=6), tmp_path / "out"
    succeed("train.py", *flags(corpus, out, **more, steps=4, save_every=2), nproc=1)
    alone = metrics(out)
    shutil.rmtree(out / "step-00000004")
    told = succeed("train.py", *flags(corpus, out, **more, steps=8), "--resume", nproc=2).out
    assert "note: 1 replicas were saved, and 2 go on" in told
    rows = metrics(out)
    assert [row["step"] for row in rows] == [*range(1, 9)]
    assert rows[2]["loss"] == pytest.approx(alone[2]["loss"], rel=1e-12)
    assert rows[3]["loss"] != alone[3]["loss"]  # by then they have trained apart
    together = flags(corpus, out, batch=6, steps=12, dp="fsdp")
    refused(launch("train.py", *together, "--resume", nproc=2), "cannot load", "it lacks")


def test_restarts_on_several_nodes_need_a_store_for_each(monkeypatch):
    monkeypatch.setenv("GROUP_WORLD_SIZE", "2")
    check_restarts()
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "1")
    with pytest.raises(UserError, match="first export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"):
        check_restarts()
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    check_restarts()


@pytest.mark.slow
def test_a_node_leaves_and_comes_back(corpus, tmp_path, monkeypatch):
    """Each node has a torchrun. One is killed with its rank: the others restart from the last
    checkpoint as two replicas, and from one that they save as three when it is started again."""
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    more = dict(dp="diloco", every=4, save_every=4, batch=6, steps=100_000)
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]

    def node(number: int):
        options = "--nnodes=2:3 --nproc-per-node=1 --max-restarts=9 --rdzv-backend=c10d".split()
        options += [f"--rdzv-id={port}", f"--rdzv-endpoint=localhost:{port}"]
        options += [f"--rdzv-conf=last_call_timeout=3,is_host={number == 0:d}"]
        script = [ROOT / "train.py", *flags(corpus, tmp_path / "out", **more), "--resume"]
        command = [sys.executable, "-m", "torch.distributed.run", *options, *script]
        return nodes.enter_context(running([*map(str, command)], tmp_path / str(number)))

    def wait_for(replicas: int) -> None:
        """Wait until so many replicas, after the last restart, have saved."""
        deadline, last = time.monotonic() + 120, ""
        while not re.match(rf"{replicas} .*?^saved", last, re.DOTALL | re.MULTILINE):
            assert time.monotonic() < deadline, (tmp_path / "0.log").read_text()
            time.sleep(0.2)
            last = (tmp_path / "0.log").read_text().split("mesh: ")[-1]

    with contextlib.ExitStack() as nodes:
        _, _, third = map(node, range(3))
        wait_for(3)
        kill([*ranks_of(third), third.pid])
        wait_for(2)
        node(3)
        wait_for(3)
    log = (tmp_path / "0.log").read_text()
    told = re.findall(r"note: (\d) replicas were saved, and (\d) go on", log)
    assert told == [("3", "2"), ("2", "3")]
