"""train.py as its users run it, against a training loop written out in plain PyTorch."""

import json
import math
import re
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch
import torch.nn.functional as F
from conftest import finish, launch, metrics, refused, slow, start, succeed, with_fault
from plain import plain_adamw, plain_step
from torch.distributed.checkpoint import FileSystemReader

from data import open_windows
from files.loading import load_pretrained
from model import Llama, LlamaConfig
from report import read_run
from runs import records, setup
from runs.flags import Pretraining
from text.order import window_of
from text.tokenizer import load_tokenizer
from train import end_step, learning_rate

SIZES = "--dim 32 --n-layers 2 --n-heads 4 --n-kv-heads 2 --ffn-dim 48".split()
CONFIG = LlamaConfig(32, 2, 4, 2, 48, vocab_size=267, tie_embeddings=True)


def as_flags(given: dict) -> list[str]:
    words = []
    for name, value in given.items():
        flag = f"--{name.replace('_', '-')}"
        words.append(flag if value is True else f"{flag}={value}")
    return words


def flags(corpus, out, steps=5, sizes=SIZES, **more) -> list[str]:
    """Return the flags of a short run in float64 without evaluation, of CONFIG or other sizes."""
    given = dict(
        data=corpus,
        out=out,
        steps=steps,
        seq_len=24,
        batch=8,
        lr=1e-2,
        warmup=min(2, steps),
        eval_every=0,
        save_every=0,
        dtype="float64",
        optimizer="adamw",
    )
    return [*sizes, *as_flags(given | more)]


def weights(out: Path) -> dict[str, torch.Tensor]:
    return dict(load_pretrained(out, torch.float64).named_parameters())


def samples_in(result) -> list[str]:
    return [line for line in result.out.splitlines() if line.startswith("--- ")]


@pytest.fixture(scope="module")
def documents(tmp_path_factory) -> Path:
    """Token files of many short documents."""
    directory = tmp_path_factory.mktemp("documents")
    file = directory / "lines.jsonl"
    lines = [json.dumps({"text": f"{i} is {i}."}) for i in range(500)]
    file.write_text("\n".join(lines))
    out = directory / "tokens"
    succeed("data.py", "tokenize", file, "--tokenizer", "bytes", "--out", out)
    return out


def plain_loop(data: Path, document_mask: bool = False, skip_steps: int = 0):
    """Return metrics and weights of five steps of AdamW on the mean cross entropy of the batch. The
    last row has the loss on all that is held out. Attention stays within
    documents if there is a mask."""
    model = Llama(CONFIG).double()
    model.init_weights(seed=0)
    named = dict(model.named_parameters())
    optimizer = plain_adamw(named, 1e-2)
    tokenizer = load_tokenizer("bytes")
    windows, held_out = open_windows([str(data)], tokenizer, 24)

    def logits_and_targets(windows, chosen):
        rows = torch.tensor([windows[i].tolist() for i in chosen])
        tokens = rows[:, :-1]
        positions = None
        if document_mask:
            slots = torch.arange(24).expand_as(tokens)
            starts = torch.where(tokens == tokenizer.bos, slots, 0).cummax(1).values
            positions = slots - starts
        return model(tokens, positions=positions), rows[:, 1:]

    rates = [5e-3, 1e-2, 1e-2, 1e-2, 6e-3]  # two of warmup; the last falls to 1 / (5 / 3)
    rows = []
    for step, rate in enumerate(rates):
        if step + 1 == skip_steps:
            continue
        for group in optimizer.param_groups:
            group["lr"] = rate
        chosen = [window_of(step * 8 + i, len(windows), seed=0) for i in range(8)]
        logits, targets = logits_and_targets(windows, chosen)
        (loss, _, norm), _ = plain_step(logits, targets, named, optimizer, clip=0.5)
        rows.append({"loss": loss, "grad_norm": norm, "lr": rate})
    logits, targets = logits_and_targets(held_out, range(len(held_out)))
    loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten()).item()
    text_bytes = (targets < 256).sum().item()
    rows[-1]["val_loss"] = loss
    rows[-1]["val_bits_per_byte"] = loss / math.log(2) * targets.numel() / text_bytes
    return rows, named


@pytest.mark.parametrize("nproc, more", [(0, dict(skip_steps=2)), (2, dict(document_mask=True))])
def test_training_and_evaluation_equal_the_plain_loop(documents, tmp_path, nproc, more):
    out = tmp_path / "run"
    every_window = 10**6
    options = dict(clip=0.5, eval_every=5, eval_windows=every_window, microbatch=1) | more
    succeed("train.py", *flags(documents, out, **options), nproc=nproc)
    rows, expected = plain_loop(documents, **more)
    same_metrics(metrics(out), rows)
    same_weights(weights(out), expected)


def same_metrics(ours: list[dict], expected: list[dict]) -> None:
    keys = {"loss", "grad_norm", "lr", "tokens", "val_loss", "val_bits_per_byte"}
    for row, theirs in zip(ours, expected, strict=True):
        for key in keys & theirs.keys():
            value = theirs[key]
            assert row[key] == pytest.approx(value, rel=1e-12), key


def same_losses(ours: list[dict], expected: list[dict]) -> None:
    """Assert that losses and gradient norms of two runs agree in every bit."""
    for key in ("step", "loss", "grad_norm"):
        assert [row[key] for row in ours] == [row[key] for row in expected], key


def resumes(out: Path, step: int, weights_of: Callable, *command, nproc: int = 0) -> None:
    """Assert that a run, resumed by its command from a checkpoint, ends the same in every bit."""
    rows = metrics(out)
    last = weights_of(out)
    checkpoint = out / f"step-{step:08d}"
    for path in out.glob("step-*"):
        if path > checkpoint:
            shutil.rmtree(path)
    resumed = succeed(*command, "--resume", nproc=nproc, timeout=240)
    assert f"resumed from {checkpoint}" in resumed.out
    for ours, before in zip(metrics(out), rows, strict=True):
        for key in ("step", "loss", "grad_norm", "lr", "val_loss"):
            assert ours.get(key) == before.get(key), key
    for name, weight in weights_of(out).items():
        assert torch.equal(weight, last[name]), name


def same_weights(ours: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == expected.keys()
    for name, weight in expected.items():
        assert (ours[name] - weight).norm() < 1e-12 * weight.norm(), name


WHOLE_RUN = dict(
    steps=4,
    eval_every=2,
    eval_windows=7,
    save_every=2,
    document_mask=True,
    n_layers=4,
)


@pytest.fixture(scope="module")
def one_run(documents, tmp_path_factory):
    """A run of one process, with its samples of text."""
    out = tmp_path_factory.mktemp("one") / "run"
    return out, samples_in(succeed("train.py", *flags(documents, out, **WHOLE_RUN)))


def test_a_run_resumes_to_the_last_bit(documents, one_run, tmp_path):
    one_out, _ = one_run
    out = tmp_path / "run"
    shutil.copytree(one_out, out)
    resumes(out, 2, weights, "train.py", *flags(documents, out, **WHOLE_RUN))


MESHES = [
    (2, "--pp=2 --schedule=interleaved --microbatch=2"),
    slow(4, "--dp=hsdp --shard=2 --microbatch=1 --reshard=none --compile"),
    slow(4, "--cp=2 --tp=2 --dp=fsdp --offload --checkpointing=selective"),
]


@pytest.mark.parametrize("nproc, parallel", MESHES)
def test_a_run_on_any_mesh_is_the_same_run(documents, one_run, tmp_path, nproc, parallel):
    """Training, evaluation, samples and checkpoints agree; then it resumes to the last bit."""
    out = tmp_path / "run"
    one_out, one_samples = one_run
    command = "train.py", *flags(documents, out, **WHOLE_RUN), *parallel.split()
    result = succeed(*command, nproc=nproc, timeout=240)
    assert re.search("per step, (each rank sends|a rank sends up to) ", result.out)
    same_metrics(metrics(out), metrics(one_out))
    same_weights(weights(out), weights(one_out))
    assert len(one_samples) == 2
    assert samples_in(result) == one_samples
    resumes(out, 2, weights, *command, nproc=nproc)


@pytest.mark.parametrize("step, nproc", [(2, 0), slow(4, 2)])
def test_an_evaluation_that_a_kill_has_cut_off_is_made(corpus, tmp_path, step, nproc):
    """By --resume, which writes what the undisturbed run has written, and keeps the same best."""
    place = "        model, exam, world = self.job.model, self.job.exam, self.world\n"
    kill = (
        f"        if step == {step}:\n            import os\n            os.kill(os.getpid(), 9)\n"
    )
    within = with_fault(tmp_path / "copy", "task", place, place + kill)
    options = dict(steps=4, save_every=1, eval_every=2, eval_windows=8, keep_best=True)
    for name in ("killed", "whole"):
        out = tmp_path / name
        command = "train.py", *flags(corpus, out, **options)
        if name == "killed":
            assert launch(*within, *command, nproc=nproc).code == -9
            assert "val_loss" not in metrics(out)[-1]
            command += ("--resume",)
        succeed(*command, nproc=nproc)
    killed, whole = metrics(tmp_path / "killed"), metrics(tmp_path / "whole")
    assert [row["step"] for row in killed] == [1, 2, 3, 4]
    for ours, theirs in zip(killed, whole, strict=True):
        assert ours.get("val_loss") == theirs.get("val_loss")
    bests = [(tmp_path / name / "best").readlink().name for name in ("killed", "whole")]
    assert bests[0] == bests[1]


def test_the_best_checkpoint_is_linked_before_its_loss_is_recorded():
    """A kill between the two would leave a step evaluated that OUT/best cannot become any more."""
    calls = MagicMock()
    calls.recorder.is_new_best.return_value = True
    run = SimpleNamespace(save_every=0, eval_every=1)
    task = SimpleNamespace(run=run, evaluate_and_show=lambda step: ({"val_loss": 1.0}, 0))
    end_step(task, {"step": 1}, 0, calls.recorder, calls.saver, last=9)
    names = [name for name, *_ in calls.mock_calls]
    recorded = [i for i, name in enumerate(names) if name == "recorder.write"]
    assert recorded[0] < names.index("saver.save") < recorded[1]


def test_the_learning_rate_rises_stays_and_falls():
    run = Pretraining(warmup=4)
    rates = [learning_rate(step, 21, 1.0, run) for step in range(1, 22)]
    rising = [0.25, 0.5, 0.75]
    constant = [1.0] * 12
    falling = [pytest.approx(i / 7) for i in range(6, 0, -1)]
    assert rates == [*rising, *constant, *falling]
    assert learning_rate(1, 10, 1.0, Pretraining(warmup=0)) == 1.0
    assert learning_rate(1, 2, 1.0, Pretraining(warmup=50)) == 0.02  # longer than the run


def test_a_steps_line_fits_in_a_terminal():
    """What matters least goes first; a file has all of it."""
    columns = ["loss 7.6297", "0:01:53 left", "20,787 tokens/s", "", "0.53 GB"]
    whole = records.as_line(columns, math.inf)
    assert whole == "loss 7.6297  0:01:53 left  20,787 tokens/s  0.53 GB"
    assert records.as_line(columns, len(whole)) == whole
    assert records.as_line(columns, len(whole) - 1) == whole.removesuffix("  0.53 GB")
    assert records.as_line(columns, 1) == ""


@pytest.mark.parametrize("schedule", ["linear", "cosine", "constant"])
def test_the_learning_rate_follows_transformers_schedules(schedule):
    """They count steps from 0: our rate of step n is theirs after n steps. Ours would be 0 one step
    later, so that the last step changes something."""
    transformers = pytest.importorskip("transformers")
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.5)
    name = "constant_with_warmup" if schedule == "constant" else schedule
    theirs = transformers.get_scheduler(name, optimizer, 4, 22)
    run = Pretraining(warmup=4, lr_schedule=schedule)
    for step in range(1, 22):
        optimizer.step()
        theirs.step()
        (expected,) = theirs.get_last_lr()
        assert learning_rate(step, 21, 0.5, run) == pytest.approx(expected)


@pytest.mark.parametrize("parallel", [dict(dp="fsdp"), slow(dict(tp=2))])
def test_bfloat16_computes_in_bfloat16_and_keeps_float32_weights(
    documents, one_run, tmp_path, parallel
):
    """FSDP casts with dp, autocast with tp."""
    one_out, _ = one_run
    options = WHOLE_RUN | parallel | dict(dtype="bfloat16")
    succeed("train.py", *flags(documents, tmp_path, **options), nproc=2)
    for in_float64, in_bfloat16 in zip(metrics(one_out), metrics(tmp_path), strict=True):
        expected = in_float64["loss"]
        loss = in_bfloat16["loss"]
        assert abs(expected - loss) > 1e-5
        assert expected == pytest.approx(loss, rel=5e-3)
    checkpoint = tmp_path / "step-00000004"
    stored = FileSystemReader(checkpoint / "weights").read_metadata()
    assert stored.state_dict_metadata["norm.weight"].properties.dtype == torch.float32


def test_a_run_learns_and_reports_it(corpus, tmp_path):
    out = tmp_path / "a run"
    options = dict(
        steps=60,
        eval_every=60,
        save_every=20,
        keep=1,
        dtype="float32",
        profile=True,
    )
    command = "train.py", *flags(corpus, out, **options)
    result = finish(start(*command, nproc=1))  # as a user does
    assert result.code == 0, result.err
    rows = metrics(out)
    first = rows[0]
    last = rows[-1]
    assert [row["step"] for row in rows] == list(range(1, 61))
    assert last["loss"] < 0.6 * first["loss"]
    assert last["tokens"] == 60 * 8 * 24
    assert first["mfu"] is None
    assert {"seconds", "tokens_per_second", "memory_bytes"} < {*first}
    assert "step    60/60" in result.err
    assert "0:00 left" in result.err
    assert "bits/byte" in result.out
    assert "--- def" in result.out
    assert "note: " not in result.out
    assert [path.name for path in out.glob("step-*")] == ["step-00000060"]
    assert (out / "trace-0.json").stat().st_size > 0

    generate, curves = re.findall(r"^(?:generate|curves): +python (.*)", result.out, re.M)
    assert succeed(*shlex.split(generate), "--max-new-tokens", 1).out.startswith("def")
    more = tmp_path / "more"
    succeed("train.py", *flags(corpus, more, steps=1, init=out, lr=1e-9))
    assert metrics(more)[0]["loss"] < 0.7 * first["loss"]
    succeed(*shlex.split(curves), "--out", tmp_path / "page.html")
    drawn = read_run(out)
    assert drawn["facts"]["ranks"] == "1"
    assert "--steps=60" in drawn["facts"]["command"]
    drawn_curves = [values for name, values in drawn["curves"].items() if name in first]
    assert len(drawn_curves) == 6
    for values in drawn_curves:
        assert None not in values
    assert [row["sample"][:7] for row in drawn["evaluations"]] == ["--- def"]


def flip(path: Path) -> None:
    """Flip one bit in the middle of a file; in a token file, of the low byte of a token."""
    content = bytearray(path.read_bytes())
    content[len(content) // 4 * 2] ^= 1
    path.write_bytes(content)


def test_what_differs_from_the_run_that_is_resumed_is_said(corpus, tmp_path):
    data = tmp_path / "data"
    out = tmp_path / "run"
    shutil.copytree(corpus, data)

    def resume(steps: int, **more) -> str:
        result = succeed("train.py", *flags(data, out, steps=steps, **more), "--resume")
        return result.err

    assert f"warning: nothing to resume in {out}: starting at step 1" in resume(1)
    other_seed = resume(2, seed=1)
    assert "warning: --seed was 0, is now 1" in other_seed
    assert "sequences that" not in other_seed
    flip(data / "train_000000.bin")
    assert f"warning: --data {data} no longer gives the sequences" in resume(3, seed=1)


@pytest.mark.slow
def test_another_batch_goes_on_in_the_data_where_the_run_stopped(documents, tmp_path):
    """The learning rate is 0: what a step's loss depends on are its sequences alone."""

    def run(out: str, **given) -> tuple[list[float], list[int]]:
        arguments = flags(documents, tmp_path / out, lr=0, weight_decay=0, **given)
        if "epochs" in given:
            arguments = [word for word in arguments if "--steps" not in word]
        told = succeed("train.py", *arguments, "--resume").err
        assert ("sequences may have another order" in told) == ("seq_len" in given)
        rows = metrics(tmp_path / out)
        return [row["loss"] for row in rows], [row["tokens"] for row in rows]

    by_8 = run("by 8", batch=8, steps=6)
    by_4 = run("by 4", batch=4, steps=12)
    run("mixed", steps=3)
    run("mixed", steps=5, batch=4)
    mixed = run("mixed", steps=7)
    for found, in_8, in_4 in zip(mixed, by_8, by_4):
        expected = [*in_8[:3], *in_4[6:8], in_8[4]]
        assert found[:6] == pytest.approx(expected, rel=1e-12)
    _, tokens = run("mixed", epochs=1, batch=4)
    _, expected = run("by 8", epochs=1)
    assert 0 <= expected[-1] - tokens[-1] < 8 * 24
    _, tokens = run("by 4", steps=14, seq_len=12)
    _, before = by_4
    assert tokens[-1] == before[-1] + 2 * 8 * 12


def test_a_resumed_epoch_ends_on_a_step_that_saves(monkeypatch):
    """The last step that is not one of --skip-steps is taken: a skipped step would not save."""
    flags = dict(batch=2, seq_len=4, seed=0)  # steps were half as long
    before = {"step": 4, "flags": flags}
    monkeypatch.setattr(setup, "newest_undamaged", lambda saved: saved[-1])
    monkeypatch.setattr(setup, "read_config", lambda newest: before)
    compared = []
    monkeypatch.setattr(setup, "facts_of", lambda job, work, steps: {"last": steps.last})
    warn = setup.records, "warn_about_changed_flags"
    monkeypatch.setattr(*warn, lambda before, now, _: compared.append(now["last"]))
    job = SimpleNamespace(last_step=10)
    last_steps = {(11,): 12, (12,): 11, (11, 12): 10}
    for skipped, last in last_steps.items():
        run = Pretraining(epochs=1, batch=4, seq_len=4, skip_steps=skipped)
        steps = setup.steps_of(run, job, None, [Path("step-4")])
        assert steps.done == 4
        assert steps.last == compared[-1] == last


def test_nodes_without_a_common_disk_are_refused_before_the_first_step(corpus, tmp_path):
    for rank in (0, 1):
        shutil.copytree(corpus, tmp_path / f"{rank}" / "data")
    own_directory = "tests/workers/in_directory.py", tmp_path / "{RANK}"
    command = *own_directory, "train.py", *flags("data", "run")
    result = launch(*command, nproc=2)
    refused(result, "--out run must be on a disk that all nodes share")
    assert "step " not in result.err
    assert not list(tmp_path.glob("*/run/[!.]*"))
    flip(tmp_path / "1/data/train_000000.bin")
    differ = launch(*command, nproc=2)
    refused(differ, "the training data differ between rank 0 and rank 1")
