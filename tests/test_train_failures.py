"""Runs of train.py that are resumed, stopped, refused, or lose a rank."""

import os
import shutil
import signal
import socket
import time
from pathlib import Path

import pytest
import torch
from conftest import (
    Forks,
    by_torchrun,
    changed_copy,
    error_lines,
    finish,
    launch,
    metrics,
    refused,
    slow,
    start,
    succeed,
    wait_for_lines,
)
from test_train import flags, weights

from data import TokenFileWriter

# -------------------------------------------------------------------------------- stop and go on


@pytest.mark.parametrize(
    "nproc, parallel",
    [(0, {}), (2, {}), (2, dict(dp="zero1")), (2, dict(cp=2)), (2, dict(pp=2, microbatch=2))],
)
def test_resuming_is_bit_exact(corpus, tmp_path, nproc, parallel):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    options = dict(steps=6, save_every=3, dtype="float32") | parallel
    succeed("train.py", *flags(corpus, whole, **options), nproc=nproc)
    shutil.copytree(whole, parts)
    shutil.rmtree(parts / "step-00000006")
    resumed = succeed("train.py", *flags(corpus, parts, **options), "--resume", nproc=nproc)
    assert f"resumed from {parts / 'step-00000003'}" in resumed.out
    for a, b in zip(metrics(whole), metrics(parts), strict=True):
        assert [a[key] for key in ("step", "loss", "grad_norm", "lr")] == [
            b[key] for key in ("step", "loss", "grad_norm", "lr")
        ]
    for name, weight in weights(whole).items():
        assert torch.equal(weight, weights(parts)[name]), name


def test_resume_starts_a_new_run_and_ends_where_all_steps_are_done(corpus, tmp_path):
    out = tmp_path / "run"
    first = succeed("train.py", *flags(corpus, out, steps=2), "--resume")
    assert f"warning: nothing to resume in {out}: starting at step 1" in first.err
    again = succeed("train.py", *flags(corpus, out, steps=2), "--resume")
    assert "has done its 2 steps" in again.out and "warning" not in again.err
    assert len(metrics(out)) == 2


@pytest.mark.parametrize("nproc, parallel", [(0, {}), (2, {}), slow(2, dict(pp=2, microbatch=1))])
def test_ctrl_c_saves_and_another_run_continues(corpus, tmp_path, nproc, parallel):
    out = tmp_path / "run"
    arguments = flags(corpus, out, steps=10**6, **parallel)
    run = (start if nproc else Forks)("train.py", *arguments, nproc=nproc)
    wait_for_lines(out / "metrics.jsonl", 5)
    if nproc:  # a terminal sends the signal to torchrun and to every process that it started
        os.killpg(run.pid, signal.SIGINT)
        result = finish(run)  # torchrun reports the signal with a code of its own
    else:
        os.kill(run.ranks[0], signal.SIGINT)
        result = run.finish()
        assert result.code == 0 and "Traceback" not in result.err
    assert "with --resume goes on" in result.out
    (saved,) = sorted(out.glob("step-*"))
    stopped = metrics(out)[-1]["step"]
    assert saved.name == f"step-{stopped:08d}" and stopped >= 5
    arguments = flags(corpus, out, steps=stopped + 2, **parallel)
    assert f"resumed from {saved}" in succeed("train.py", *arguments, "--resume", nproc=nproc).out


def test_a_run_whose_directory_is_deleted_says_so_and_goes_on(corpus, tmp_path):
    out = tmp_path / "run"
    arguments = flags(corpus, out, steps=10**6)
    run = Forks("train.py", *arguments)
    wait_for_lines(out / "metrics.jsonl", 5)
    shutil.rmtree(out.rename(tmp_path / "moved"))  # the run must not write in between
    wait_for_lines(out / "metrics.jsonl", 5)
    refused(launch("train.py", *arguments), f"{out} is in use by process {run.ranks[0]}")
    os.kill(run.ranks[0], signal.SIGINT)
    result = run.finish()
    assert result.code == 0 and "Traceback" not in result.err
    steps = [row["step"] for row in metrics(out)]
    assert steps == list(range(steps[0], steps[-1] + 1)) and steps[0] > 5
    warning = f"warning: {out} was deleted or moved during the run: its config.json and "
    assert f"{warning}metrics.jsonl begin again at step {steps[0]}\n" in result.err
    assert result.err.count("warning") == 1
    assert (out / "config.json").exists()
    assert [path.name for path in out.glob("step-*")] == [f"step-{steps[-1]:08d}"]


# ------------------------------------------------------------------------------------- wrong input


def test_torchrun_reports_wrong_flags_once(corpus, tmp_path):
    options = flags(corpus, tmp_path / "run", dtype="int3")
    result = by_torchrun("train.py", *options, nproc=2)
    (line,) = error_lines(result)
    assert f"traceback : {line}" in result.err.splitlines()[-2]  # above torchrun's last border
    assert "exitcode  : 2" in result.err and result.code != 0


def test_output_directories_and_checkpoints_of_others(corpus, tmp_path):
    out = tmp_path / "run"
    succeed("train.py", *flags(corpus, out, steps=1))
    refused(
        launch("train.py", *flags(corpus, out, steps=1)), f"{out} already holds a run", "--resume"
    )
    other = flags(corpus, out, steps=2, ffn_dim=64)
    refused(launch("train.py", *other, "--resume"), "another model", "ffn_dim 48, not 64")
    other = flags(corpus, tmp_path / "other", init=out, dim=64)
    refused(launch("train.py", *other), f"{out} has dim 32, not 64")
    changed = succeed("train.py", *flags(corpus, out, steps=2, seed=1), "--resume")
    assert "warning: --seed was 0, is now 1" in changed.err and "sequences that" not in changed.err


def test_resuming_with_other_data_is_said(corpus, tmp_path):
    """One token in the middle of a token file is another one."""
    data, out = tmp_path / "data", tmp_path / "run"
    shutil.copytree(corpus, data)
    succeed("train.py", *flags(data, out, steps=1))
    content = bytearray((data / "train_000000.bin").read_bytes())
    content[len(content) // 4 * 2] ^= 1
    (data / "train_000000.bin").write_bytes(content)
    resumed = succeed("train.py", *flags(data, out, steps=2), "--resume")
    assert f"warning: --data {data} no longer gives the sequences" in resumed.err


def test_a_file_is_no_output_directory(corpus, tmp_path):
    (out := tmp_path / "file").write_text("")
    refused(launch("train.py", *flags(corpus, out)), f"cannot write to --out {out}: it is a file")


def test_nodes_without_a_common_disk_are_refused_before_the_first_step(corpus, tmp_path):
    for rank in (0, 1):
        shutil.copytree(corpus, tmp_path / f"{rank}" / "data")
    launched = ["tests/workers/own_directory.py", tmp_path, *flags("data", "run")]
    result = launch(*launched, nproc=2)
    refused(result, "--out run must be on a disk that all nodes share")
    assert "step " not in result.err and not list(tmp_path.glob("*/run/[!.]*"))
    shard = tmp_path / "1/data/train_000000.bin"
    content = bytearray(shard.read_bytes())
    content[-2] ^= 1
    shard.write_bytes(content)
    refused(launch(*launched, nproc=2), "the training data differ between rank 0 and rank 1")


def write_tokens(directory: Path, tokens: torch.Tensor) -> Path:
    """Write a token file that does not say which tokenizer made it."""
    directory.mkdir(exist_ok=True)
    writer = TokenFileWriter(directory, "train", 1000, 10**6)
    writer.write(tokens.numpy())
    writer.close()
    return directory / "train_000000.bin"


@pytest.mark.parametrize("nproc", [0, 2])
def test_out_of_memory_is_told_in_one_line(corpus, tmp_path, nproc):
    """With the flags that would fit. The error of a GPU is raised by the model here."""
    edits = {
        "        cos, sin = rope_angles(self.config, positions)\n\n": """
        cos, sin = rope_angles(self.config, positions)
        if len(tokens) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
""",
    }
    script = changed_copy(tmp_path / "copy", edits=edits)
    result = launch(*script, "train.py", *flags(corpus, tmp_path / "out", dp="ddp"), nproc=nproc)
    refused(result, "out of memory: a step is predicted to need", "with --microbatch ")
    batch = 4 if nproc else 8
    assert int(result.err.split("--microbatch ")[1].split()[0]) < batch


def test_tokens_beyond_the_vocabulary_and_damaged_token_files(corpus, tmp_path):
    path = write_tokens(tmp_path / "bad", torch.full((5000,), 999))
    result = launch("train.py", *flags(path.parent, tmp_path / "a", tokenizer="bytes"))
    refused(result, "token 999", "tokenizer bytes has only 267")
    path.write_bytes(path.read_bytes()[:-100])
    result = launch("train.py", *flags(path.parent, tmp_path / "b", tokenizer="bytes"))
    refused(result, "is damaged", "says 5000 tokens, it holds 4950")


def test_an_error_that_one_rank_meets_is_printed_once(tmp_path):
    tokens = torch.full((5000,), 65)
    tokens[3000] = 999
    write_tokens(tmp_path, tokens)
    arguments = flags(tmp_path, tmp_path / "run", tokenizer="bytes", steps=500)
    refused(launch("train.py", *arguments, nproc=2), "the data holds token 999")


# ---------------------------------------------------------------------- losses that are not finite


def test_nothing_is_updated_when_a_rank_is_not_finite():
    out = succeed("tests/workers/not_finite.py", nproc=2).out
    for rank in (0, 1):
        assert f"rank {rank} kept True: step 2: the loss on rank 1 is not finite" in out


@pytest.mark.parametrize("nproc", [slow(0), 2])
def test_a_loss_that_is_not_finite_stops_before_the_update(corpus, tmp_path, nproc):
    out = tmp_path / "run"
    succeed("train.py", *flags(corpus, out, steps=2), nproc=nproc)
    before = weights(out)
    arguments = flags(corpus, out, steps=50, lr=1e300, warmup=0)
    result = launch("train.py", *arguments, "--resume", nproc=nproc)
    refused(result, "error: step 4: the ", "Nothing was updated")
    assert all(torch.equal(weight, before[name]) for name, weight in weights(out).items())


# ------------------------------------------------------------------------ ranks that die or differ


def test_ranks_started_with_different_flags_are_refused(corpus, tmp_path):
    """Two nodes, as two launches that meet at a port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    nodes = []
    for rank in (0, 1):
        options = flags(corpus, tmp_path / "run", lr=(1e-2, 2e-2)[rank])
        node = ["--nnodes=2", f"--node-rank={rank}", "--master-addr=127.0.0.1"]
        nodes.append(
            start("train.py", *options, nproc=1, torchrun=[*node, f"--master-port={port}"])
        )
    results = [finish(node) for node in nodes]
    for result in results:  # on each node, one line
        (line,) = error_lines(result)
        assert "rank 1 was started with --lr 0.02, rank 0 with --lr 0.01" in line
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("parallel", [slow([]), ["--dp", "fsdp"], slow(["--tp", "2"])], ids=str)
def test_a_rank_that_dies_is_named_and_ends_all(corpus, tmp_path, parallel):
    out = tmp_path / "run"
    process = start("train.py", *flags(corpus, out, steps=10**6), *parallel, nproc=2)
    killed = _kill_rank_1_after(out / "metrics.jsonl", 5)
    result = finish(process)
    assert time.monotonic() - killed < 30, result.err
    lines = error_lines(result)
    assert len(lines) == 1 and lines[0].startswith("error: rank 1 on "), result.err
    assert "--resume" not in lines[0]  # nothing was saved
    assert result.code != 0


@pytest.mark.slow
def test_torchrun_restarts_a_run_whose_rank_died(corpus, tmp_path):
    out = tmp_path / "run"
    options = dict(steps=300, dtype="float32")
    arguments = [*flags(corpus, out, save_every=20, **options), "--resume"]
    process = start("train.py", *arguments, nproc=2, torchrun=["--standalone", "--max-restarts=1"])
    _kill_rank_1_after(out / "metrics.jsonl", 50)
    result = finish(process)
    assert result.code == 0, result.err
    assert f"resumed from {out / 'step-0'}" in result.out
    expected = "--dp auto takes ddp: weights, gradients and AdamW state of a copy take 0.000"
    assert expected in result.out
    whole = tmp_path / "whole"
    succeed("train.py", *flags(corpus, whole, **options), nproc=2)
    for ours, theirs in zip(metrics(out), metrics(whole), strict=True):
        assert [ours[key] for key in ("step", "loss")] == [theirs[key] for key in ("step", "loss")]


def _kill_rank_1_after(file: Path, lines: int) -> float:
    """Kill rank 1 once a file has so many lines; return the moment."""
    wait_for_lines(file, lines)
    for process in Path("/proc").glob("[0-9]*"):
        try:
            command = (process / "cmdline").read_text()
            variables = (process / "environ").read_text()
        except OSError:  # the process has ended meanwhile, or is another user's
            continue
        if str(file.parent) in command and "\0RANK=1\0" in variables:
            os.kill(int(process.name), signal.SIGKILL)
    return time.monotonic()
