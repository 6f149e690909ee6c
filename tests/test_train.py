"""train.py as its users run it, against a training loop written out in plain PyTorch."""

import json
import math
import re
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from conftest import finish, launch, metrics, refused, slow, start, succeed
from exact import plain_adamw, plain_step
from torch.distributed.checkpoint import FileSystemReader

from data import open_windows
from files.loading import load_pretrained
from model import Llama, LlamaConfig
from report import read_run
from runs import setup
from runs.flags import Pretraining
from text.order import window_of
from text.tokenizer import load_tokenizer
from train import learning_rate

SIZES = ["--dim", "32", "--n-layers", "2", "--n-heads", "4", "--n-kv-heads", "2", "--ffn-dim", "48"]
CONFIG = LlamaConfig(32, 2, 4, 2, 48, vocab_size=267, tie_embeddings=True)


def as_flags(given: dict) -> list[str]:
    flags = (f"--{name.replace('_', '-')}={value}" for name, value in given.items())
    return [flag.removesuffix("=True") for flag in flags]


def flags(corpus, out, steps=5, **more) -> list[str]:
    """Return the flags of a short run of CONFIG, in float64 and without evaluation."""
    given = dict(data=corpus, out=out, steps=steps, seq_len=24, batch=8, lr=1e-2, eval_every=0,
                 warmup=min(2, steps), save_every=0, dtype="float64")  # fmt: skip
    return [*SIZES, *as_flags(given | dict(optimizer="adamw") | more)]


def weights(out: Path) -> dict[str, torch.Tensor]:
    return dict(load_pretrained(out, torch.float64).named_parameters())


def samples_in(result) -> list[str]:
    return [line for line in result.out.splitlines() if line.startswith("--- ")]


@pytest.fixture(scope="module")
def documents(tmp_path_factory) -> Path:
    """Token files of many short documents."""
    out = tmp_path_factory.mktemp("documents") / "tokens"
    file = out.with_name("lines.jsonl")
    file.write_text("\n".join(json.dumps({"text": f"{i} is {i}."}) for i in range(500)))
    succeed("data.py", "tokenize", file, "--tokenizer", "bytes", "--out", out)
    return out


def plain_loop(data: Path, document_mask: bool = False, skip_steps: int = 0):
    """Return metrics and weights of five steps of AdamW on the mean cross entropy of the batch. The
    last row has the loss on all that is held out. Attention stays within
    documents if there is a mask."""
    model = Llama(CONFIG).double()
    model.init_weights(seed=0)
    named = dict(model.named_parameters())
    optimizer, tokenizer = plain_adamw(named, 1e-2), load_tokenizer("bytes")
    windows, held_out = open_windows([str(data)], tokenizer, 24)

    def logits_and_targets(windows, chosen) -> tuple[torch.Tensor, torch.Tensor]:
        rows = torch.tensor([windows[i].tolist() for i in chosen])
        tokens, targets = rows[:, :-1], rows[:, 1:]
        slots = torch.arange(24).expand_as(tokens)
        starts = torch.where(tokens == tokenizer.bos, slots, 0).cummax(1).values
        return model(tokens, positions=slots - starts if document_mask else None), targets

    rates = [5e-3, 1e-2, 1e-2, 1e-2, 6e-3]  # two of warmup; the last falls to 1 / (5 / 3)
    rows = []
    for step in (step for step in range(5) if step + 1 != skip_steps):
        chosen = [window_of(step * 8 + i, len(windows), seed=0) for i in range(8)]
        for group in optimizer.param_groups:
            group["lr"] = rates[step]
        given = logits_and_targets(windows, chosen)
        (loss, _, norm), _ = plain_step(*given, named, optimizer, clip=0.5)
        rows.append({"loss": loss, "grad_norm": norm, "lr": rates[step]})
    logits, targets = logits_and_targets(held_out, range(len(held_out)))
    loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten()).item()
    bits = loss / math.log(2) * targets.numel() / (targets < 256).sum().item()
    rows[-1] |= {"val_loss": loss, "val_bits_per_byte": bits}
    return rows, named


@pytest.mark.parametrize("nproc, more", [(0, dict(skip_steps=2)), (2, dict(document_mask=True))])
def test_training_and_evaluation_equal_the_plain_loop(documents, tmp_path, nproc, more):
    out, options = tmp_path / "run", dict(clip=0.5, eval_every=5, eval_windows=10**6, microbatch=1)
    succeed("train.py", *flags(documents, out, **options | more), nproc=nproc)
    rows, expected = plain_loop(documents, **more)
    same_metrics(metrics(out), rows)
    same_weights(weights(out), expected)


def same_metrics(ours: list[dict], expected: list[dict]) -> None:
    keys = {"loss", "grad_norm", "lr", "tokens", "val_loss", "val_bits_per_byte"}
    for row, theirs in zip(ours, expected, strict=True):
        for key in keys & theirs.keys():
            assert row[key] == pytest.approx(theirs[key], rel=1e-12), key


def same_losses(ours: list[dict], expected: list[dict]) -> None:
    """Assert that two runs agree in every bit."""
    for key in ("step", "loss", "grad_norm"):
        assert [row[key] for row in ours] == [row[key] for row in expected], key


def resumes(out: Path, step: int, weights_of: Callable, *command, nproc: int = 0) -> None:
    """Assert that a run, resumed by its command from a checkpoint, ends the same in every bit."""
    rows, last = metrics(out), weights_of(out)
    checkpoint = out / f"step-{step:08d}"
    for path in out.glob("step-*"):
        if path > checkpoint:
            shutil.rmtree(path)
    resumed = succeed(*command, "--resume", nproc=nproc, timeout=240)
    assert f"resumed from {checkpoint}" in resumed.out
    for key in ("step", "loss", "grad_norm", "lr", "val_loss"):
        assert [row.get(key) for row in metrics(out)] == [row.get(key) for row in rows], key
    assert all(torch.equal(weight, last[name]) for name, weight in weights_of(out).items())


def same_weights(ours: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == expected.keys()
    for name, weight in expected.items():
        assert (ours[name] - weight).norm() < 1e-12 * weight.norm(), name


WHOLE_RUN = dict(steps=4, eval_every=2, eval_windows=7, save_every=2, document_mask=True)
WHOLE_RUN |= dict(n_layers=4)


@pytest.fixture(scope="module")
def one_run(documents, tmp_path_factory):
    """A run of one process, with its samples of text."""
    out = tmp_path_factory.mktemp("one") / "run"
    return out, samples_in(succeed("train.py", *flags(documents, out, **WHOLE_RUN)))


MESHES = [
    (0, ""),
    (2, "--pp=2 --schedule=interleaved --microbatch=2"),
    slow(4, "--dp=hsdp --shard=2 --microbatch=1 --reshard=none --compile"),
    slow(4, "--cp=2 --tp=2 --dp=fsdp --offload --checkpointing=selective"),
]


@pytest.mark.parametrize("nproc, parallel", MESHES)
def test_a_run_on_any_mesh_is_the_same_run(documents, one_run, tmp_path, nproc, parallel):
    """Training, evaluation, samples and checkpoints agree; then it resumes to the last bit."""
    out = tmp_path / "run"
    command = "train.py", *flags(documents, out, **WHOLE_RUN), *parallel.split()
    result = succeed(*command, nproc=nproc, timeout=240)
    assert not nproc or re.search("per step, (each rank sends|a rank sends up to) ", result.out)
    same_metrics(metrics(out), metrics(one_run[0]))
    same_weights(weights(out), weights(one_run[0]))
    assert samples_in(result) == one_run[1] and len(one_run[1]) == 2
    resumes(out, 2, weights, *command, nproc=nproc)


def test_the_learning_rate_rises_stays_and_falls():
    run = Pretraining(warmup=4)
    rates = [learning_rate(step, 21, 1.0, run) for step in range(1, 22)]
    falling = [pytest.approx(i / 7) for i in range(6, 0, -1)]
    assert rates == [0.25, 0.5, 0.75, *[1.0] * 12, *falling]
    assert learning_rate(1, 10, 1.0, Pretraining(warmup=0)) == 1.0
    assert learning_rate(1, 2, 1.0, Pretraining(warmup=50)) == 0.02


@pytest.mark.parametrize("parallel", [dict(dp="fsdp"), slow(dict(tp=2))])
def test_bfloat16_computes_in_bfloat16_and_keeps_float32_weights(
    documents, one_run, tmp_path, parallel
):
    """FSDP casts with dp, autocast with tp."""
    given = flags(documents, tmp_path, **WHOLE_RUN | parallel | dict(dtype="bfloat16"))
    succeed("train.py", *given, nproc=2)
    for a, b in zip(metrics(one_run[0]), metrics(tmp_path), strict=True):
        assert abs(a["loss"] - b["loss"]) > 1e-5 and a["loss"] == pytest.approx(b["loss"], rel=5e-3)
    stored = FileSystemReader(tmp_path / "step-00000004" / "weights").read_metadata()
    assert stored.state_dict_metadata["norm.weight"].properties.dtype == torch.float32


def test_a_run_learns_and_reports_it(corpus, tmp_path):
    out = tmp_path / "a run"
    options = dict(steps=60, eval_every=60, dtype="float32", profile=True, keep=1, save_every=20)
    result = finish(start("train.py", *flags(corpus, out, **options), nproc=1))  # as a user does
    assert result.code == 0, result.err
    rows = metrics(out)
    assert [row["step"] for row in rows] == list(range(1, 61))
    assert rows[-1]["loss"] < 0.6 * rows[0]["loss"] and rows[-1]["tokens"] == 60 * 8 * 24
    assert rows[0]["mfu"] is None and {"seconds", "tokens_per_second", "memory_bytes"} < {*rows[0]}
    assert "step    60/60" in result.err and "0:00 left" in result.err
    assert "bits/byte" in result.out and "--- def" in result.out and "note: " not in result.out
    assert [path.name for path in out.glob("step-*")] == ["step-00000060"]
    assert (out / "trace-0.json").stat().st_size > 0

    generate, curves = re.findall(r"^(?:generate|curves): +python (.*)", result.out, re.M)
    assert succeed(*shlex.split(generate), "--max-new-tokens", 1).out.startswith("def")
    succeed("train.py", *flags(corpus, tmp_path / "more", steps=1, init=out, lr=1e-9))
    assert metrics(tmp_path / "more")[0]["loss"] < 0.7 * rows[0]["loss"]
    succeed(*shlex.split(curves), "--out", tmp_path / "page.html")
    drawn = read_run(out)
    assert drawn["facts"]["ranks"] == "1" and "--steps=60" in drawn["facts"]["command"]
    drawn_curves = [values for name, values in drawn["curves"].items() if name in rows[0]]
    assert len(drawn_curves) == 6 and all(None not in values for values in drawn_curves)
    assert [row["sample"][:7] for row in drawn["evaluations"]] == ["--- def"]


def flip(path: Path) -> None:
    """Flip one bit in the middle of a file; in a token file, of the low byte of a token."""
    content = bytearray(path.read_bytes())
    content[len(content) // 4 * 2] ^= 1
    path.write_bytes(content)


def test_what_differs_from_the_run_that_is_resumed_is_said(corpus, tmp_path):
    data, out = tmp_path / "data", tmp_path / "run"
    shutil.copytree(corpus, data)

    def resume(steps: int, **more):
        return succeed("train.py", *flags(data, out, steps=steps, **more), "--resume")

    assert f"warning: nothing to resume in {out}: starting at step 1" in resume(1).err
    other_seed = resume(2, seed=1).err
    assert "warning: --seed was 0, is now 1" in other_seed and "sequences that" not in other_seed
    flip(data / "train_000000.bin")
    assert f"warning: --data {data} no longer gives the sequences" in resume(3, seed=1).err


def test_another_batch_goes_on_in_the_data_where_the_run_stopped(corpus, tmp_path):
    """The learning rate is 0: what a step's loss depends on are its sequences alone."""

    def run(out: str, **given) -> tuple[list[float], list[int]]:
        arguments = flags(corpus, tmp_path / out, lr=0, weight_decay=0, **given)
        arguments = [a for a in arguments if "epochs" not in given or "--steps" not in a]
        told = succeed("train.py", *arguments, "--resume").err
        assert ("sequences have another order" in told) == ("seq_len" in given)
        rows = metrics(tmp_path / out)
        return [row["loss"] for row in rows], [row["tokens"] for row in rows]

    by_8, by_4 = (run(f"by {batch}", batch=batch, steps=48 // batch) for batch in (8, 4))
    run("mixed", steps=3)
    run("mixed", steps=5, batch=4)
    mixed = run("mixed", steps=7)
    for each, in_8, in_4 in zip(mixed, by_8, by_4):
        assert each[:6] == pytest.approx([*in_8[:3], *in_4[6:8], in_8[4]], rel=1e-12)
    _, tokens = run("mixed", epochs=1, batch=4)
    _, expected = run("by 8", epochs=1)
    assert 0 <= expected[-1] - tokens[-1] < 8 * 24
    assert run("by 4", steps=14, seq_len=12)[1][-1] == by_4[1][-1] + 2 * 8 * 12


def test_a_resumed_epoch_ends_on_a_step_that_saves(monkeypatch):
    """The last step that is not one of --skip-steps is taken: a skipped step would not save."""
    before = {"step": 4, "flags": dict(batch=2, seq_len=4, seed=0)}
    monkeypatch.setattr(setup, "newest_undamaged", lambda newest: newest)
    monkeypatch.setattr(setup, "read_config", lambda newest: before)
    monkeypatch.setattr(setup, "facts_of", lambda *given: {})
    monkeypatch.setattr(setup.records, "warn_about_changed_flags", lambda *given: None)
    job = SimpleNamespace(last_step=10)
    for skipped, last in (((11,), 12), ((12,), 11), ((11, 12), 10)):  # steps were half as long
        run = Pretraining(epochs=1, batch=4, seq_len=4, skip_steps=skipped)
        steps = setup.steps_of(run, job, None, Path("step-4"))
        assert (steps.done, steps.last) == (4, last)


def test_nodes_without_a_common_disk_are_refused_before_the_first_step(corpus, tmp_path):
    for rank in (0, 1):
        shutil.copytree(corpus, tmp_path / f"{rank}" / "data")
    own_directory = ["tests/workers/in_directory.py", tmp_path / "{RANK}"]
    launched = [*own_directory, "train.py", *flags("data", "run")]
    result = launch(*launched, nproc=2)
    refused(result, "--out run must be on a disk that all nodes share")
    assert "step " not in result.err and not list(tmp_path.glob("*/run/[!.]*"))
    flip(tmp_path / "1/data/train_000000.bin")
    refused(launch(*launched, nproc=2), "the training data differ between rank 0 and rank 1")
