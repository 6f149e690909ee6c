"""checkpoint.py: saved whole or not at all, complete in itself, resumed on any mesh.

What a resumed run trains is compared with the run that was not interrupted."""

import json
import math
import pickle
import shutil
import threading
from functools import partial
from unittest import mock

import pytest
import torch
from conftest import alone, launch, refused, slow, succeed
from test_chat import BYTES
from test_formats import Evil
from test_train import CONFIG, flags

import checkpoint
from files import directories
from files.conversion import import_weights
from files.directories import CHECKSUMS, checkpoints, checksums, complete
from model import Llama, LlamaConfig
from plumbing.joining import init_distributed
from plumbing.messages import UserError
from runs.records import best_loss
from techniques.optimizers import make_optimizer


@pytest.fixture(scope="module", autouse=True)
def world():
    yield init_distributed()
    torch.distributed.destroy_process_group()


def save(out, step, model, optimizer, keep=0):
    return checkpoint.Saver(out, model, optimizer, BYTES, {"lr": 0.1, "keep": keep}, {}).save(step)


def trained(seed=0, steps=3, weight_decay=0.1, **options):
    model = Llama(CONFIG)
    model.init_weights(seed)
    optimizer = make_optimizer(model, alone(**options), 1e-2, weight_decay)
    for step in range(steps):
        tokens = torch.arange(24).view(2, 12) + step
        model(tokens, targets=tokens + 1).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


@pytest.mark.parametrize("saved_as, resumed_as", [("float32", "bfloat16"), ("bfloat16", "float32")])
def test_weights_and_moments_come_back(tmp_path, saved_as, resumed_as):
    """Moments are converted to the dtype of this run's --moments."""
    model, optimizer = trained(moments=saved_as)
    saved = save(tmp_path, 3, model, optimizer)
    assert saved == tmp_path / "step-00000003"
    again, its_optimizer = trained(seed=1, steps=1, weight_decay=0.2, moments=resumed_as)
    assert checkpoint.resume(saved, again, its_optimizer, BYTES) == 3
    for ours, theirs in zip(again.parameters(), model.parameters(), strict=True):
        assert torch.equal(ours, theirs)
        for key, value in optimizer.state[theirs].items():
            loaded = its_optimizer.state[ours][key]
            assert loaded.dtype == (torch.float32 if key == "step" else getattr(torch, resumed_as))
            assert torch.equal(loaded, value.to(loaded.dtype)) and value.any(), key
    assert again.output.weight is again.tok_embeddings.weight
    assert [group["weight_decay"] for group in its_optimizer.param_groups] == [0.2, 0.0]


def sgd_that(does, named):
    """Return SGD whose steps end with does(the optimizer, a parameter)."""
    optimizer = torch.optim.SGD(named)
    parameter = optimizer.param_groups[0]["params"][0]
    optimizer.register_step_post_hook(lambda *_: does(optimizer, parameter))
    return optimizer


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda named: torch.optim.SGD(dict(named).values()), "SGD .*name its parameters"),
        (partial(sgd_that, lambda sgd, p: sgd.state[p].update(n=0)), r"tensors in its own state\["),
        (partial(sgd_that, lambda sgd, p: sgd.state["all"].update(n=p)), r"own state\[parameter"),
        (partial(sgd_that, lambda sgd, p: sgd.param_groups[0].update(n=1)), "counts of steps too"),
        (partial(sgd_that, lambda sgd, p: p.data.mul_(0.9)), "SGD .*by the learning rate"),
    ],
    ids=["no names", "no tensor", "no parameter", "counter", "decay"],
)
def test_an_optimizer_that_cannot_be_saved_is_refused_at_the_start(tmp_path, make, message):
    model, _ = trained(steps=0)
    with pytest.raises(UserError, match=message):
        checkpoint.Saver(tmp_path, model, make(model.named_parameters()), BYTES, {}, {})


def test_old_checkpoints_and_leftovers_are_removed(tmp_path):
    model, optimizer = trained()
    leftover = tmp_path / ".step-00000002"  # of a process that was killed during a save
    leftover.mkdir()
    checkpoint.lock_run(tmp_path)
    assert not leftover.exists()
    for step in (1, 2, 3, 4):
        save(tmp_path, step, model, optimizer, keep=2)
    left = [".lock", "step-00000003", "step-00000004"]
    assert [p.name for p in sorted(tmp_path.iterdir())] == left
    assert checkpoint.find_checkpoint(tmp_path).name == "step-00000004"
    assert checkpoint.find_checkpoint(tmp_path / "step-00000003").name == "step-00000003"
    shutil.copytree(tmp_path / "step-00000003", tmp_path / "step-00000003-best")
    save(tmp_path, 5, model, optimizer, keep=1)
    left = [".lock", "step-00000003-best", "step-00000005"]  # the user's own copy stays
    assert [p.name for p in sorted(tmp_path.iterdir())] == left


def test_the_best_checkpoint_is_kept_and_linked(tmp_path):
    losses = {1: 3.0, 2: 2.0, 3: 2.5, 4: 2.25, 5: 1.0}
    rows = [{"step": step, "val_loss": loss} for step, loss in losses.items()]
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert best_loss(tmp_path) == math.inf
    with checkpoint.Saver(
        tmp_path, *trained(), BYTES, {"keep": 1, "async_save": True}, {}
    ) as saver:
        for step, loss in losses.items():
            saver.save(step)  # a save that is due comes before the evaluation
            saver.save(step, best=loss < best_loss(tmp_path))
            saver.wait()
            kept = sorted(p.name for p in tmp_path.glob("step-*"))
            best = min(range(1, step + 1), key=losses.get)
            assert kept == [f"step-{n:08d}" for n in sorted({best, step})]
            assert best_loss(tmp_path) == losses[best]
            assert checkpoint.read_config(tmp_path / "best")["step"] == best
    (tmp_path / "best").unlink()
    (tmp_path / "best").mkdir()  # as a copy that follows links has it
    assert best_loss(tmp_path) == math.inf
    with pytest.raises(UserError, match=r"best has to be a symbolic link \(Invalid argument\)"):
        checkpoint.Saver(tmp_path, *trained(), BYTES, {"keep_best": True}, {})


def test_weights_that_are_not_finite_are_not_saved(corpus, tmp_path):
    """Neither is one weight that is NaN, nor the weights after a step that diverged."""
    model, optimizer = trained()
    save(tmp_path, 1, model, optimizer)
    model.norm.weight.data[0] = torch.nan
    with pytest.raises(UserError, match=r"step 2: the weights .*is .*step-00000001"):
        save(tmp_path, 2, model, optimizer)
    assert not list(tmp_path.glob("*2"))
    diverges = flags(corpus, tmp_path / "run", steps=1, lr=1e38, dtype="float32", warmup=0)
    refused(launch("train.py", *diverges, nproc=2), "step 1: the weights are not finite")


def test_a_background_save_writes_a_copy(tmp_path, monkeypatch):
    """At most one save is under way, and it writes the weights at the time of the call. It draws no
    random numbers, which dropout would miss: that draws from the same generator."""
    model, optimizer = trained()
    before = [p.detach().clone() for p in model.parameters()]
    may_write, write = threading.Event(), checkpoint.dcp.save

    def wait_first(*args, **kwargs):
        assert may_write.wait(10)
        write(*args, **kwargs)

    monkeypatch.setattr(checkpoint.dcp, "save", wait_first)
    with checkpoint.Saver(tmp_path, model, optimizer, BYTES, {"async_save": True}, {}) as saver:
        generator = torch.get_rng_state()
        saver.save(1)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(1)
        assert not (tmp_path / "step-00000001").exists()
        threading.Timer(0.2, may_write.set).start()
        saver.save(2)  # waits for the first
        assert (tmp_path / "step-00000001").exists()
    assert torch.equal(torch.get_rng_state(), generator)
    first, second = (checkpoint.load_pretrained(tmp_path / f"step-0000000{i}") for i in (1, 2))
    for a, b, old in zip(first.parameters(), second.parameters(), before, strict=True):
        assert torch.equal(a, old) and torch.equal(b, old + 1)


def test_saved_state_that_a_run_would_ignore_is_refused(tmp_path):
    model, optimizer = trained()
    saved = save(tmp_path, 3, model, optimizer)
    with pytest.raises(UserError, match=r"this run lacks layers\.0.*exp_avg; use"):
        checkpoint.resume(saved, model, torch.optim.SGD(model.named_parameters()), BYTES)


def test_a_checkpoint_that_cannot_be_removed_does_not_stop_a_run(tmp_path, monkeypatch, capsys):
    busy = mock.Mock(side_effect=OSError(16, "Device or resource busy"))
    monkeypatch.setattr(directories, "remove", busy)
    for step in (1, 2):
        saved = save(tmp_path, step, *trained(), keep=1)
    assert "step-00000001 is not removed" in capsys.readouterr().err
    assert checkpoints(tmp_path) == [saved]


def test_weights_alone_cannot_be_resumed(tmp_path):
    model, optimizer = trained()
    import_weights(save(tmp_path, 1, model, optimizer), tmp_path / "imported", None)
    with pytest.raises(UserError, match="weights and no optimizer: --init begins a run"):
        checkpoint.resume(tmp_path / "imported", model, optimizer, BYTES)


def test_code_in_torchs_index_is_not_run(tmp_path, capsys):
    saved = save(tmp_path, 1, *trained())
    index = saved / "weights" / ".metadata"
    metadata = pickle.loads(index.read_bytes())
    metadata.planner_data = Evil()
    index.write_bytes(pickle.dumps(metadata))
    (saved / CHECKSUMS).unlink()  # an attacker would write new checksums
    metadata = json.loads((saved / "config.json").read_text())
    complete(saved, LlamaConfig(), metadata, BYTES, checksums(saved, saved.glob("weights/__*")))
    with pytest.raises(UserError, match=r"holds more than an index of tensors: builtins\.print"):
        checkpoint.load_pretrained(saved)
    assert "code from" not in capsys.readouterr().out


# ------------------------------------------------------------------------- from any mesh to any

LAYOUTS = {1: "one", 2: "ddp2 zero2 fsdp2 tp2 pp2", 4: "fsdp4 hsdp2x2 fsdp2tp2 pp2fsdp2 pp4"}
SOURCES = " ".join(LAYOUTS.values()).split()
EVERY = [*LAYOUTS.items(), (2, "muon-fsdp2 muon-fsdp2>muon-tp2")]
for nproc, layouts in LAYOUTS.items():
    resumed = [f"{source}>{layout}" for source in SOURCES for layout in layouts.split()]
    EVERY.append((nproc, " ".join(resumed)))
EXPERTS = "shared_expert.py:ep2"
FEW = [
    (2, f"zero2 pp2 fsdp2 zero2>zero2 pp2>zero2 fsdp2>pp2 {EXPERTS}"),
    (1, f"zero2>one {EXPERTS}>one"),
]


@pytest.mark.parametrize("launches", [FEW, slow(EVERY)], ids=["few", "all"])
def test_a_checkpoint_of_one_mesh_resumes_on_another(tmp_path, launches):
    """Two steps after resuming have the losses and gradient norms of the run that was not
    interrupted: on the same mesh exactly, on another up to rounding."""
    for nproc, work in launches:
        script = "tests/workers/any_to_any.py"
        succeed(script, tmp_path, *work.split(), nproc=nproc, timeout=300)
    resumed = [path for path in tmp_path.glob("*.json") if ">" in path.name]
    for path in resumed:
        name = path.stem
        source, layout = name.split(">")
        ours = json.loads(path.read_text())
        theirs = json.loads((tmp_path / f"{source}.json").read_text())
        if source == layout:
            assert ours == theirs, name
        for row, expected in zip(ours, theirs, strict=True):
            assert row == pytest.approx(expected, rel=1e-10), name
