"""However a run ends, by a signal, a death or a failure of one rank, it says once why. It leaves no
process and no half-written file, and it saves if it was asked to end."""

import errno
import itertools
import math
import os
import pty
import re
import resource
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from conftest import (
    ENVIRONMENT,
    ROOT,
    Forks,
    alone,
    error_lines,
    finish,
    launch,
    metrics,
    refused,
    slow,
    start,
    succeed,
    wait_for_lines,
    with_fault,
)
from test_crashes import nothing_survives, processes_of  # noqa: F401 (a fixture)
from test_docs import slurm_script
from test_train import CONFIG, flags
from workers.drill import ranks_of

from config import ParallelConfig
from model import Llama
from perf.instruments import random_batch
from plumbing import endings, joining, processes
from plumbing.messages import UserError
from runs import records
from runs.flags import Pretraining
from techniques.optimizers import make_optimizer
from train import accumulate, update


def wait_until(happened, process: subprocess.Popen) -> None:
    """Wait until happened() is true. Fails if the run ends first, or after 60 s."""
    deadline = time.monotonic() + 60
    while not happened():
        if process.poll() is not None or time.monotonic() > deadline:
            pytest.fail(f"the run ended first, or took too long: {finish(process, 1).err}")
        time.sleep(0.005)


def ranks(*launches: subprocess.Popen) -> list[int]:
    """Return the ids of the two ranks of one torchrun, or of two, once they run."""

    def begun() -> list[int]:
        """Return those in which Python is not alone: the thread of plumbing/endings.py runs."""
        found = [rank for launch in launches for rank in ranks_of(launch)]
        return [rank for rank in found if len(os.listdir(f"/proc/{rank}/task")) > 1]

    wait_until(lambda: len(begun()) == 2, launches[0])
    return begun()


def gone_in_time(process: int, seconds: float = 10) -> bool:
    """Return whether a process ends soon. One that has ended, waited for or not, has no exe."""
    deadline = time.monotonic() + seconds
    while (runs := os.path.exists(f"/proc/{process}/exe")) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not runs


# ----------------------------------------------------------------------------------------- Ctrl-C


def test_ctrl_c_leaves_no_half_written_data(tmp_path):
    out = tmp_path / "data/tokens"
    (text := tmp_path / "text.txt").write_text("one two three\n" * 5_000_000)
    run = start("data.py", "tokenize", text, "--tokenizer", "bytes", "--out", out)
    wait_until(lambda: list(out.parent.glob(".tokens-by-*")), run)
    run.send_signal(signal.SIGINT)
    result = finish(run)
    assert result.err.splitlines()[-1:] == error_lines(result) == ["error: interrupted"]
    assert "Traceback" not in result.err and result.code == 128 + signal.SIGINT
    assert not list(out.parent.iterdir())


@pytest.mark.parametrize("nproc", [0, 2])
def test_ctrl_c_saves_and_another_run_continues(corpus, tmp_path, nproc):
    out = tmp_path / "run"
    run = Forks("train.py", *flags(corpus, out, steps=10**6), nproc=nproc)
    wait_for_lines(out / "metrics.jsonl", 5)
    for rank in run.ranks:
        os.kill(rank, signal.SIGINT)
    result = run.finish()
    assert result.code == 0 and "Traceback" not in result.err
    assert "with --resume goes on" in result.out
    (saved,) = sorted(out.glob("step-*"))
    stopped = metrics(out)[-1]["step"]
    assert saved.name == f"step-{stopped:08d}" and stopped >= 5
    arguments = flags(corpus, out, steps=stopped + 2)
    assert f"resumed from {saved}" in succeed("train.py", *arguments, "--resume", nproc=nproc).out


@pytest.mark.parametrize("save_every", [5, slow(0)])
def test_a_signal_ends_an_evaluation(corpus, tmp_path, save_every):
    """One rank gets the signal, and all end. A save that is due comes first."""
    (long := tmp_path / "long.txt").write_text("one two three\n" * 100_000)
    out = tmp_path / "run"
    often = dict(
        eval_every=5,
        save_every=save_every,
        eval_windows=10**6,
        microbatch=1,
        val_data=long,
    )
    arguments = flags(corpus, out, steps=9, **often)
    run = Forks("train.py", *arguments, nproc=2, timeout=60)
    wait_for_lines(out / "metrics.jsonl", 5)  # although step 5 is being evaluated
    saved = out / "step-00000005"
    deadline = time.monotonic() + (60 if save_every else 0.5)
    while not saved.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert saved.exists() == bool(save_every)
    os.kill(run.ranks[1], signal.SIGTERM)
    result = run.finish()
    assert "step 5: the evaluation is given up" in result.err and result.code == 0
    assert "stopped at step 5; the same command with --resume goes on" in result.out
    assert saved.exists() and "val_loss" not in metrics(out)[-1]


# ------------------------------------------------------------------------- signals that save


@pytest.mark.slow
def test_runs_save_although_that_takes_longer_than_torchrun_waits(corpus, tmp_path, monkeypatch):
    """torchrun gets the flags and the variable of the Slurm script in docs/cluster.md. It, or one
    rank, gets a signal."""
    script = slurm_script()
    (seconds,) = re.findall(r"export (TORCH_ELASTIC_SHUTDOWN_TIMEOUT)=(\d+)", script)
    monkeypatch.setitem(ENVIRONMENT, *seconds)
    torchrun = ["--standalone", *re.search(r"--signals-to-handle \S+", script)[0].split()]
    finishing = "            on_rank_zero(lambda: self._finish("
    fault = f"            time.sleep(45 * (dist.get_rank() == 0))\n{finishing}"
    _, copy = with_fault(tmp_path / "copy", "checkpoint", finishing, fault)
    runs, to_torchrun = [], ["SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1"]
    for name in (*to_torchrun, "rank 1", "--time-limit"):
        out = tmp_path / name
        limit = dict(time_limit="0:01") if name == "--time-limit" else {}
        arguments = flags(corpus, out, steps=10**6, **limit)
        run = start(copy / "train.py", *arguments, nproc=2, torchrun=torchrun)
        runs.append((name, out, run))
        wait_for_lines(out / "metrics.jsonl", 5)
        if name in to_torchrun:
            run.send_signal(getattr(signal, name))
        elif name == "rank 1":
            os.kill(ranks(run)[1], signal.SIGTERM)
    for name, out, run in runs:
        result = finish(run, timeout=180)
        (saved,) = out.glob("*step-*")
        assert saved.name == f"step-{metrics(out)[-1]['step']:08d}", result.err
        assert "with --resume goes on" in result.out and not error_lines(result)
        assert name in to_torchrun or result.code == 0
        assert name == "rank 1" or f"{name}: this step ends, then" in result.err


def test_a_closed_terminal(corpus, tmp_path):
    """It takes no more output, and sends SIGHUP."""
    out = tmp_path / "run"
    command = [sys.executable, ROOT / "train.py", *flags(corpus, out, steps=10**6)]
    process, terminal = pty.fork()
    if process == 0:
        os.execve(command[0], list(map(str, command)), ENVIRONMENT)
    wait_for_lines(out / "metrics.jsonl", 5)
    os.close(terminal)
    assert gone_in_time(process, 60)
    assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 0
    assert len(list(out.glob("step-*"))) == 1 and not processes_of(out)


def test_the_time_limit_counts_from_the_start_of_the_process():
    """And needs no timer, which a user's function may set and switch off."""
    with endings.signals_collected(time.monotonic() - endings._started + 0.2):
        signal.alarm(5)
        signal.alarm(0)
        time.sleep(0.1)
        assert endings.asked_to_end() == 0
        time.sleep(0.3)
        assert endings.asked_to_end() == signal.SIGALRM
    assert endings.asked_to_end() == 0


def test_a_second_ctrl_c_does_not_wait_for_the_step(monkeypatch):
    monkeypatch.setattr(endings, "end_interrupted", partial(pytest.fail, "ended"))
    with endings.signals_collected():
        signal.raise_signal(signal.SIGINT)
        assert endings.asked_to_end() == signal.SIGINT
        with pytest.raises(pytest.fail.Exception, match="ended"):
            signal.raise_signal(signal.SIGINT)


# ----------------------------------------------------------------- the death of torchrun or a rank


@pytest.mark.parametrize(
    "nodes, lines, killed, told",
    [
        (1, 0, 0, ""),  # before the ranks have met
        slow(2, 0, 0, "cannot join the other ranks"),
        slow(2, 5, 0, "the connection to the first node is lost"),
        slow(2, 5, 1, "rank 1 on "),
    ],
)
def test_ranks_do_not_outlive_a_torchrun(corpus, tmp_path, nodes, lines, killed, told):
    """Two ranks run on one node, or one on each of two."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    meet = [f"--nnodes={nodes}", "--master-addr=127.0.0.1", f"--master-port={port}"]
    given = flags(corpus, out := tmp_path / "run", steps=10**6)
    launches = [
        start("train.py", *given, nproc=2 // nodes, torchrun=[*meet, f"--node-rank={node}"])
        for node in range(nodes)
    ]
    both = ranks(*launches)
    if lines:
        wait_for_lines(out / "metrics.jsonl", lines)
    launches[killed].kill()
    assert all(map(gone_in_time, both))
    for i, result in enumerate(map(finish, launches)):
        (line,) = error_lines(result)
        if i == killed:
            assert line == "error: torchrun, which started this run, has died"
        else:  # which torchrun repeats at the end of its report
            assert told in line and f"traceback : {line}" in result.err.splitlines()[-2]


# -------------------------------------------------------------------- failures that a rank meets


@pytest.mark.parametrize(
    "nproc, raised, told, shown",
    [
        (2, 'ValueError("a reason\\nin two lines")', "ValueError: a reason", "in two lines"),
        slow(2, "SystemExit(3)", "SystemExit: 3", ""),
        (2, "KeyboardInterrupt", "KeyboardInterrupt", ""),
        # A process alone does not end as if it were done.
        (0, "SystemExit(0)", "SystemExit: 0", ""),
    ],
)
def test_a_failure_is_printed_once_and_ends_all(corpus, tmp_path, nproc, raised, told, shown):
    """It is the last rank's. Meanwhile the other one waits for it in a collective."""
    place = "    gradients, squared_norm_share = own_gradients(optimizer, world.size)"
    fault = f"    if world.rank == world.size - 1:\n        raise {raised}\n"
    within = with_fault(tmp_path / "copy", "train", place, fault + place)
    result = launch(*within, "train.py", *flags(corpus, tmp_path / "out"), nproc=nproc)
    rank = max(nproc - 1, 0)
    assert error_lines(result) == [f"error: rank {rank} failed: {told}"] and shown in result.err
    assert result.err.count("Traceback") == 1 and result.codes == [1] * (rank + 1)


def test_a_reader_that_leaves_ends_a_script_quietly(corpus, tmp_path):
    """As `| head` does, when ranks have joined, and there is one."""
    place = "    gradients, squared_norm_share = own_gradients(optimizer, world.size)"
    fault = f"    raise BrokenPipeError\n{place}"
    within = with_fault(tmp_path / "copy", "train", place, fault)
    result = launch(*within, "train.py", *flags(corpus, tmp_path / "out"))
    assert result.codes == [141] and error_lines(result) == []


def test_a_message_that_cannot_be_left_for_torchrun_leaves_no_file(tmp_path, monkeypatch):
    """torchrun would not survive an empty one."""
    path = tmp_path / "error.json"
    path.symlink_to("/dev/full")
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(path))
    endings.report("a problem")
    assert not path.is_symlink()


def test_compiling_on_a_full_disk_is_told_in_a_line():
    full = OSError(errno.ENOSPC, "No space left on device")
    raised = torch._inductor.exc.InductorError(full, None)
    told = processes.as_user_error(raised, None)
    assert type(told) is UserError and "free some space" in str(told) and "TMPDIR" in str(told)


def test_a_record_that_cannot_be_written_does_not_end_a_run(corpus, tmp_path):
    out = tmp_path / "run"
    within = with_fault(tmp_path / "copy", "records", 'open(path, "r+b"', 'open("/dev/full", "r+b"')
    result = launch(*within, "train.py", *flags(corpus, out, steps=3))
    assert result.code == 0 and (out / "step-00000003").exists()
    assert result.err.count("is not written: No space left on device: the run goes on") == 1


def test_the_line_of_an_evaluated_step_is_replaced(tmp_path, capsys):
    """And so is the beginning of one for which the disk has no room."""
    recorder = records.Recorder.__new__(records.Recorder)
    recorder.run, recorder.config = Pretraining(out=tmp_path), {}
    recorder.world = SimpleNamespace(rank=0)
    recorder._open(0)
    rows = [{"step": 1}, {"step": 2, "loss": 2.5}, {"step": 2, "loss": 2}, {"step": 3}]
    for row in rows:
        recorder.write(row)
    assert metrics(tmp_path) == [rows[0], *rows[2:]]
    recorder.has_warned = False
    room, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (recorder.file.tell() + 20, most))
    recorder.write({"step": 4, "text": "long" * 9})
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, most))
    recorder.write({"step": 5})
    assert recorder.has_warned and metrics(tmp_path) == [rows[0], *rows[2:], {"step": 5}]


@pytest.mark.parametrize("name", ["SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE"])
def test_processes_of_another_launcher_are_refused(name, monkeypatch):
    monkeypatch.setenv(name, "4")
    with pytest.raises(UserError, match=f"{name} is 4, .* would run alone: start torchrun"):
        joining.init_distributed()


def test_a_missing_network_interface_is_told_in_a_line(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "none")
    with pytest.raises(UserError, match="Unable to find address for: none: ip link set lo up"):
        joining.init_distributed()


def test_a_node_that_reads_for_long_is_waited_for(monkeypatch):
    """Ranks wait at the store: a collective would give up after a while, and here there is none."""
    store, ended = dist.HashStore(), []
    monkeypatch.setattr(processes, "shared_store", lambda: store)
    monkeypatch.setattr(processes, "_meetings", itertools.repeat(0))
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)

    def read(rank: int) -> str:
        node = processes.Process(rank, 2, local_rank=0, per_node=1, device=torch.device("cpu"))

        def make() -> str:
            time.sleep(rank)
            ended.append(rank)
            return "made"

        return f"{node.local_rank_zero_first(make)}, {sorted(ended)}"

    with ThreadPoolExecutor(2) as nodes:
        assert [*nodes.map(read, (0, 1))] == ["made, [0, 1]"] * 2


def test_nothing_is_updated_when_another_rank_is_not_finite(monkeypatch):
    model = Llama(CONFIG)
    model.init_weights()
    optimizer = make_optimizer(model, alone(), lr=1e-2)
    world = SimpleNamespace(parallel=ParallelConfig(), size=2, device=torch.device("cpu"))

    def step(number: int, loss: float, squared_norm: float) -> None:
        """Take a step beside another rank, which has this loss and norm."""
        world.all_gather_scalars = lambda row: torch.tensor([row, [loss, squared_norm, *row[2:]]])
        batch = random_batch(CONFIG, 2, 16)
        computed = accumulate(model, batch, 1, world)
        update(optimizer, computed, batch.count(), [0, 0, 0], 1.0, world, number)

    step(1, 9.0, 1.0)
    state = [t for p in model.parameters() for t in (p, optimizer.state[p]["exp_avg"])]
    before = [tensor.clone() for tensor in state]
    with pytest.raises(UserError, match="step 2: the loss on rank 1 is not finite"):
        step(2, math.nan, 1.0)
    monkeypatch.setattr(records, "newest_checkpoint", lambda: "step-00000002")
    told = "step 3: the gradient norm is not finite.* after step-00000002, remove it and --resume"
    with pytest.raises(UserError, match=told):
        step(3, 9.0, math.inf)
    assert all(map(torch.equal, before, state))


@pytest.mark.parametrize(
    "script, file, before, fault, told",
    [
        ("train.py", "setup", "    process.check_same_flags(values_of(run))\n",
         "    run = replace(run, lr=0.01 * process.rank)\n",
         "rank 1 was started with --lr 0.01, rank 0 with"),
        ("train.py", "setup", "    if source:\n        check_tokenizer(",
         "    val_set.samples = val_set.samples[process.rank :]\n", "the validation data differ"),
        ("evaluate.py", "evaluate", '        process.check_same("the data", dataset.checksum())\n',
         "        dataset.samples = dataset.samples[process.rank :]\n", "the data differ between"),
    ],
    ids=["flags", "validation data", "data"],
)  # fmt: skip
def test_ranks_with_other_flags_or_data_are_refused(
    corpus, tmp_path, script, file, before, fault, told
):
    """Two nodes may have other flags, or other files of one name: one would wait for the other's
    batches."""
    out, names = tmp_path / "run", [corpus, corpus]
    arguments = [*flags(corpus, out, eval_every=1), "--val-data", *names]
    if script == "evaluate.py":
        succeed("train.py", *arguments)
        arguments = [out, "--data", *names]
    within = with_fault(tmp_path / "copy", file, before, fault + before)
    refused(launch(*within, script, *arguments, nproc=2), told)
    assert script == "evaluate.py" or not list(out.glob("metrics*"))
