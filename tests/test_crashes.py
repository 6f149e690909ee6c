"""Whatever kills a run or fills its disk, its directory has only whole checkpoints, and the resumed
run has the bits of one that nobody disturbed. Two runs do not share a directory."""

import contextlib
import os
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from conftest import (
    ROOT,
    Forks,
    error_lines,
    launch,
    metrics,
    refused,
    slow,
    succeed,
    wait_for_lines,
    with_fault,
)
from test_train import flags, flip, same_losses
from workers.drill import drill, kill, newest, ranks_of, running

from files import directories
from files.conversion import export_weights, import_weights
from files.directories import checkpoints, lock_directory, open_weights, verify
from plumbing.joining import check_restarts
from plumbing.messages import UserError
from plumbing.processes import as_user_error

# Large enough for a save to take six times as long as a step, on a disk that is not slow.
LARGE = ["--dim", "128", "--n-layers", "4", "--ffn-dim", "256"]


def large(corpus, out, **more) -> list[str]:
    return [*flags(corpus, out, **dict(batch=4, lr=1e-3, dtype="float32") | more), *LARGE]


def hidden(out: Path) -> list[Path]:
    """Return the directories of saves that have not finished."""
    return list(out.glob(".step-*"))


def all_complete(out: Path) -> list[str]:
    """Verify every directory with the name of a checkpoint, and return the names."""
    found = sorted(out.glob("step-*"))
    for path in found:
        verify(path, "")
    return [path.name for path in found]


def processes_of(name: Path) -> list[int]:
    """Return the ids of the processes with this path in their command line."""
    pgrep = subprocess.run(["pgrep", "-f", str(name)], capture_output=True, text=True)
    return [int(line) for line in pgrep.stdout.split()]


@pytest.fixture(autouse=True)
def nothing_survives(tmp_path):
    """Kill the processes that a failed test has left running."""
    yield
    while left := processes_of(tmp_path):
        kill(left)
        time.sleep(0.1)


# -------------------------------------------------------------------- killed at any instant


def test_a_rank_that_dies_is_named_and_the_resumed_run_has_the_same_losses(corpus, tmp_path):
    out, whole = tmp_path / "run", tmp_path / "whole"
    given = dict(steps=12, dp="fsdp")
    arguments = flags(corpus, out, save_every=1, **given)
    uninterrupted = Forks("train.py", *flags(corpus, whole, **given), nproc=2)
    killed = Forks("train.py", *arguments, nproc=2)
    wait_for_lines(out / "metrics.jsonl", 3)
    os.kill(killed.ranks[1], signal.SIGKILL)
    (line,) = error_lines(killed.finish())
    assert line.startswith("error: rank 1 on ") and "--resume continues from step-0" in line
    assert "resumed from" in succeed("train.py", *arguments, "--resume", nproc=2).out
    assert uninterrupted.finish().code == 0
    same_losses(metrics(out), metrics(whole))


@pytest.mark.slow
@pytest.mark.parametrize(
    "nproc, kills, more",
    [
        (0, 4, dict(async_save=True)),
        (2, 8, {}),
        (2, 4, dict(dp="fsdp", async_save=True)),
        (4, 2, dict(dp="fsdp", tp=2)),
        (4, 2, dict(pp=2, cp=2, microbatch=1, async_save=True)),
    ],
)
def test_a_run_killed_often_ends_with_the_same_bits(corpus, tmp_path, nproc, kills, more):
    """One rank or all ranks are killed, and the run is resumed, `kills` times."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={nproc}"]
    given = large(corpus, tmp_path, steps=8 + 8 * kills, save_every=1, keep=2, **more)
    command = [sys.executable, *torchrun * bool(nproc), str(ROOT / "train.py"), *given]
    out, whole, log = (tmp_path / name for name in ("killed", "whole", "killed.log"))
    alone = half_written = 0
    for before, victims, size in drill(command, tmp_path, kills):
        print(f"kill of {victims} at step {before}: {hidden(out)}; now {all_complete(out)}")
        assert size == max(nproc, 1) and not processes_of(out)
        assert newest(out) >= before and min(2, before) <= len(all_complete(out)) <= 3
        assert len(hidden(out)) <= 1
        half_written += len(hidden(out))
        if len(victims) < size:
            alone += 1
            errors = re.findall("^error: .*", log.read_text(), re.MULTILINE)
            assert len(errors) == alone and errors[-1].startswith(f"error: rank {victims[0]} on ")
            assert "--resume continues from step-0" in errors[-1]
    same_losses(metrics(out), metrics(whole))
    found, expected = (open_weights(checkpoints(path)[-1])[1] for path in (out, whole))
    assert all(torch.equal(found[name].read(), expected[name].read()) for name in expected)
    assert not hidden(out) and len(all_complete(out)) == 2
    assert "[rank" not in log.read_text()
    assert half_written


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
    checkpoint, and all of them from one that is saved when it is started again."""
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    more = dict(dp="fsdp", save_every=4, batch=6, steps=100_000)
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

    def wait_for(ranks: int) -> None:
        """Wait until so many ranks, after the last restart, have saved."""
        deadline, last = time.monotonic() + 120, ""
        while not re.match(rf"{ranks} shard.*?^saved", last, re.DOTALL | re.MULTILINE):
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
    first, second = re.findall(r"resumed from .*step-(\d+)", log)
    assert 0 < int(first) < int(second)


@pytest.mark.parametrize(
    "command",
    [
        "checkpoint.py export {run} {new} --format hf",
        "data.py tokenize {text} --tokenizer bytes --out {new}",
    ],
)
def test_what_a_killed_process_has_left_is_removed_by_the_next(run, text, tmp_path, command):
    """What a living process or one of another host has begun stays."""
    complete = "            os.replace(hidden, target)\n"
    kill = "            os.kill(os.getpid(), 9)\n"
    within = with_fault(tmp_path / "copy", "new_files", complete, kill)
    (place := tmp_path / "place").mkdir()
    host, alive = socket.gethostname(), os.getpid()
    others = [place / f".x-by-{name}" for name in (f"{host}-{alive}", "elsewhere-1", f"{host}-x")]
    for path in others:
        path.mkdir()

    def words(name: str) -> list[str]:
        return command.format(run=run, text=text, new=place / name).split()

    killed = launch(*within, *words("first"))
    assert killed.codes == [-9] and list(place.glob(f".first-by-{host}-*"))
    succeed(*words("second"))
    assert sorted(place.iterdir()) == sorted([*others, place / "second"])


# ------------------------------------------------------------------------- disks without room


@pytest.fixture(scope="module")
def run(corpus, tmp_path_factory) -> Path:
    """Return a run of two steps with a checkpoint of each."""
    out = tmp_path_factory.mktemp("two_steps") / "run"
    succeed("train.py", *large(corpus, out, steps=2, save_every=1))
    return out


@pytest.mark.parametrize("nproc, kilobytes, option", [(0, 4000, ["--async-save"]), (2, 1000, [])])
def test_a_limited_file_size(corpus, run, tmp_path, nproc, kilobytes, option):
    """4000 kB are too few for the optimizer; 1000 kB, on two ranks, for the weights."""
    out = Path(shutil.copytree(run, tmp_path / "run"))
    arguments = large(corpus, out, steps=10**6, save_every=1, keep=2)
    process = Forks("train.py", *arguments, "--resume", *option, nproc=nproc)
    for rank in process.ranks:
        resource.prlimit(rank, resource.RLIMIT_FSIZE, (1000 * kilobytes,) * 2)
    result, last = process.finish(), newest(out)
    assert last < 9 and not hidden(out) and all_complete(out)
    next_one, last = (out / f"step-{step:08d}" for step in (last + 1, last))
    parts = f"cannot save {next_one}: ", " GB are free there: ", f"The last checkpoint is {last}:"
    refused(result, *parts)


@pytest.fixture
def small_files():
    """Let this process write no file of more than 100 kB."""
    before, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, most))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (before, most))


@pytest.mark.parametrize("write, more", [(import_weights, [None]), (export_weights, ["hf", None])])
def test_what_is_not_written_is_named(run, tmp_path, small_files, write, more):
    """Nothing is left of it, either."""
    new = tmp_path / "place/new"
    with pytest.raises((OSError, UserError)) as raised:
        write(run, new, *more)
    told = as_user_error(raised.value, None)
    assert type(told) is UserError and str(new) in str(told)
    assert not list(new.parent.iterdir())


# -------------------------------------------------------------------- two runs in one directory


def test_a_directory_belongs_to_one_run_which_goes_on_if_it_is_deleted(corpus, tmp_path):
    out = tmp_path / "run"
    arguments = flags(corpus, out, steps=10**6)
    run = Forks("train.py", *arguments)
    wait_for_lines(out / "metrics.jsonl", 5)
    message = f"{out} is in use by process {run.ranks[0]} on {socket.gethostname()}: "
    for options in ([], ["--resume"]):
        refused(launch("train.py", *arguments, *options), message, "another --out")
    shutil.rmtree(out.rename(tmp_path / "moved"))  # the run must not write in between
    wait_for_lines(out / "metrics.jsonl", 5)
    refused(launch("train.py", *arguments), message)
    os.kill(run.ranks[0], signal.SIGINT)
    result = run.finish()
    steps = [row["step"] for row in metrics(out)]
    assert result.code == 0 and steps == [*range(steps[0], steps[-1] + 1)] and steps[0] > 5
    warning = f"warning: {out} was deleted or moved: its records begin again at step {steps[0]}\n"
    assert warning in result.err
    assert (out / "config.json").exists() and all_complete(out) == [f"step-{steps[-1]:08d}"]


@pytest.mark.parametrize("held, host", [(0.5, "elsewhere"), (9, "elsewhere"), (9, "")])
def test_the_lock_of_another_node_is_waited_for(tmp_path, capsys, monkeypatch, held, host):
    monkeypatch.setattr(directories, "LOCK_SECONDS", 1)
    hold = "import fcntl, sys, time; f = open(sys.argv[1], 'w'); fcntl.lockf(f, fcntl.LOCK_EX); "
    hold += "f.write(f'process 1 on {sys.argv[2]}'); f.flush(); print(flush=True); "
    hold += "time.sleep(float(sys.argv[3]))"
    owner = host or socket.gethostname()
    command = [sys.executable, "-c", hold, tmp_path / ".lock", owner, str(held)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        refusal = pytest.raises(UserError, match=f"in use by process 1 on {owner}: wait for it")
        with refusal if held > 1 else contextlib.nullcontext():
            lock_directory(tmp_path)
        process.kill()
    told = f"{tmp_path} is in use by process 1 on elsewhere: waiting for 1 s at most\n"
    assert capsys.readouterr().err == told * bool(host)


# ------------------------------------------------------------------------------ damaged files


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


WEIGHTS, MOMENTS = "weights/__0_0.distcp", "optimizer/__0_0.distcp"


@pytest.mark.parametrize(
    "nproc, name, damage",
    [slow(0, MOMENTS, flip), (2, WEIGHTS, truncate), (0, "config.json", Path.unlink)],
)
def test_a_run_goes_back_past_a_damaged_checkpoint(corpus, run, tmp_path, nproc, name, damage):
    """It goes back to the one before, and is refused if that is damaged, too."""
    out = Path(shutil.copytree(run, tmp_path / "run"))
    older, last = out / "step-00000001", out / "step-00000002"
    damage(last / name)
    resume = ["train.py", *large(corpus, out, steps=2, save_every=1), "--resume"]
    result = succeed(*resume, nproc=nproc)
    (warning,) = (line for line in result.err.splitlines() if line.startswith("warning: "))
    assert str(last / name) in warning or f"{last} is not complete: {name}" in warning
    assert warning.endswith(f"It is now damaged-{last.name}, and the run goes back to {older}")
    assert f"resumed from {older}" in result.out
    assert all_complete(out) == [older.name, last.name]
    losses = [[row["loss"] for row in metrics(path)] for path in (out, run)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    for saved in (older, last):
        damage(saved / name)
    refused(launch(*resume, nproc=nproc), str(older), name)
