"""Ranks killed during a save, failing disks, two runs in one directory, damaged files."""

import os
import random
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import ROOT, Result, finish, launch, refused, start, succeed
from test_train import flags, metrics

import checkpoint
from files.directories import CHECKSUMS, verify
from plumbing.processes import UserError

# Large enough for a save to take six times as long as a step, on a disk that is not slow.
LARGE = ["--dim", "128", "--n-layers", "4", "--ffn-dim", "256"]


def large(corpus, out, **more) -> list[str]:
    return [*flags(corpus, out, **dict(batch=4, lr=1e-3, dtype="float32") | more), *LARGE]


def hidden(out: Path) -> list[Path]:
    """Return the directories of saves that have not finished."""
    return list(out.glob(".step-*"))


def newest(out: Path) -> int:
    """Return the step of the last checkpoint, or 0."""
    return max((int(path.name.removeprefix("step-")) for path in out.glob("step-*")), default=0)


def all_complete(out: Path) -> list[str]:
    """Verify every directory with the name of a checkpoint, and return the names."""
    found = sorted(out.glob("step-*"))
    for path in found:
        verify(path, "")
    return [path.name for path in found]


def processes(name: Path) -> list[tuple[str, int, int]]:
    """Return command line, rank and id of the processes with this path in their command line."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            command = (process / "cmdline").read_text(errors="replace").replace("\0", " ")
            variables = (process / "environ").read_text(errors="replace")
        except OSError:  # the process has ended meanwhile, or is another user's
            continue
        if str(name) in command and int(process.name) != os.getpid():
            rank = re.search(r"\0RANK=(\d+)\0", variables)
            found.append((command, int(rank[1]) if rank else 0, int(process.name)))
    return found


@pytest.fixture(autouse=True)
def nothing_survives(tmp_path):
    """Kill the processes that a failed test has left running."""
    yield
    while left := processes(tmp_path):
        for _, _, process in left:
            _kill(process)
        time.sleep(0.1)


def _kill(process: int) -> None:
    try:
        os.kill(process, signal.SIGKILL)
    except ProcessLookupError:
        pass


def one_line(result: Result, *parts: str) -> str:
    """Assert the same as `refused` for several ranks, where torchrun sets the exit code."""
    lines = [line for line in result.err.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1, result.err
    assert all(part in lines[0] for part in parts), lines[0]
    assert "[rank" not in result.err, result.err  # how torch begins a traceback of a rank
    assert result.code != 0
    return lines[0]


# -------------------------------------------------------------------- killed at any instant


def test_a_run_killed_twice_gives_the_same_losses(corpus, tmp_path):
    kill_and_resume(corpus, tmp_path, nproc=2, kills=2)


@pytest.mark.slow
@pytest.mark.parametrize("nproc, kills, more", [(0, 14, {}), (2, 22, {}), (2, 8, dict(pp=2))])
def test_a_run_killed_often_gives_the_same_losses(corpus, tmp_path, nproc, kills, more):
    assert kill_and_resume(corpus, tmp_path, nproc, kills, **more) >= kills / 4


def kill_and_resume(corpus, tmp_path, nproc: int, kills: int, **more) -> int:
    """Kill one rank or all ranks of a run and resume it, `kills` times.

    Asserts that losses equal those of an uninterrupted run. Returns how often a kill interrupted a
    save."""
    seed = random.randrange(10**6)
    print(f"seed {seed}")
    dice = random.Random(seed)
    out, whole = tmp_path / "run", tmp_path / "whole"
    steps = 20 + 20 * kills
    uninterrupted = start("train.py", *large(corpus, whole, steps=steps, **more), nproc=nproc)
    arguments = [*large(corpus, out, steps=steps, save_every=1, keep=2, **more), "--resume"]
    interrupted = 0
    for i in range(kills):
        before, options = newest(out), ["--async-save"] if i % 2 else []
        process = start("train.py", *arguments, *options, nproc=nproc)
        wait_until(lambda old=before: newest(out) > old, process)
        time.sleep(dice.uniform(0, 0.5))

        # In turn one rank or all ranks, each both with and without --async-save.
        ranks = [
            (rank, p) for command, rank, p in processes(out) if "distributed.run" not in command
        ]
        assert len(ranks) == max(nproc, 1), ranks
        victims = [dice.choice(ranks)] if i % 4 in (0, 3) else ranks
        before = newest(out)
        for _, victim in victims:
            os.kill(victim, signal.SIGKILL)
        caught = len(hidden(out))
        interrupted += caught > 0
        result = finish(process, timeout=60)

        assert result.code != 0 and newest(out) < steps, result.out
        assert not processes(out)
        complete = all_complete(out)
        print(
            f"kill {i + 1} of {kills}: of ranks {sorted(rank for rank, _ in victims)} at step "
            f"{before}, {caught} hidden then, {len(hidden(out))} now; complete: {complete}"
        )
        assert newest(out) >= before and min(2, before) <= len(complete) <= 3
        assert len(hidden(out)) <= 1
        if len(victims) < len(ranks):
            one_line(result, "error: rank ", "--resume continues from step-0000")

    more["save_every"] = steps // 2
    arguments = [*large(corpus, out, steps=steps, keep=2, **more), "--resume"]
    assert "resumed from" in succeed("train.py", *arguments, nproc=nproc).out
    assert finish(uninterrupted).code == 0
    for key in ("step", "loss", "grad_norm"):
        assert [row[key] for row in metrics(out)] == [row[key] for row in metrics(whole)], key
    assert not hidden(out) and len(all_complete(out)) == 2
    print(f"{interrupted} of {kills} kills interrupted a save")
    return interrupted


def wait_until(happened, process: subprocess.Popen) -> None:
    """Wait until happened() is true. Fails if the run ends first, or after 60 s."""
    deadline = time.monotonic() + 60
    while not happened():
        if process.poll() is not None or time.monotonic() > deadline:
            pytest.fail(f"the run ended first, or took too long: {finish(process, 1).err}")
        time.sleep(0.005)


# ------------------------------------------------------------------------------ failing disks


@pytest.fixture(scope="module")
def run(corpus, tmp_path_factory) -> Path:
    """Return a run of two steps with a checkpoint of each."""
    out = tmp_path_factory.mktemp("two_steps") / "run"
    succeed("train.py", *large(corpus, out, steps=2, save_every=1))
    return out


def from_bash(lines: str, *args, nproc: int = 0) -> Result:
    """Run a bash script in which "$@" runs train.py. Its mounts are invisible outside."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={nproc}"]
    command = [sys.executable, *(torchrun if nproc else []), str(ROOT / "train.py"), *args]
    process = subprocess.Popen(
        ["unshare", "--mount", "bash", "-c", lines, "bash", *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env=os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
    )
    return finish(process)


@pytest.fixture
def disk(tmp_path) -> Path:
    """Return a directory to mount a disk at; skip the test where mounting is not allowed."""
    path = tmp_path / "disk"
    path.mkdir()
    mount = f"mount -t tmpfs tmpfs {shlex.quote(str(path))}"
    try:
        subprocess.run(["unshare", "--mount", "bash", "-c", mount], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"may not mount a disk: {getattr(error, 'stderr', error)}")
    return path


@pytest.mark.parametrize("kilobytes, option", [(1000, []), (4000, ["--async-save"])], ids=str)
def test_a_limited_file_size(corpus, run, tmp_path, kilobytes, option):
    """With 1000 kB writing the weights fails, with 4000 kB writing the optimizer."""
    out = Path(shutil.copytree(run, tmp_path / "run"))
    arguments = [*large(corpus, out, steps=9, save_every=1), "--resume", *option]
    limit = ["bash", "-c", f'ulimit -f {kilobytes}; exec "$@"', "bash"]
    result = from_bash(f'exec {shlex.join(limit)} "$@"', *arguments)
    last = f"The last checkpoint is {out / 'step-00000002'}:"
    refused(result, f"cannot save {out / 'step-00000003'}: ", last)
    assert all_complete(out) == ["step-00000001", "step-00000002"] and not hidden(out)


@pytest.mark.parametrize(
    "nproc, option", [(0, []), (0, ["--async-save"]), (2, []), (2, ["--async-save"])], ids=str
)
def test_a_full_disk(corpus, disk, tmp_path, nproc, option):
    """The disk has 20 MB, a checkpoint takes 7.5 MB. The third does not fit beside the first two,
    which are removed only after it has been saved."""
    copy = tmp_path / "copy"
    bash = f"""
        mount -t tmpfs -o size=20m tmpfs {shlex.quote(str(disk))}
        "$@"; code=$?
        cp -a {shlex.quote(str(disk))} {shlex.quote(str(copy))}  # the mount ends with this shell
        exit $code"""
    options = dict(steps=9, save_every=1, keep=2)
    result = from_bash(bash, *large(corpus, disk / "run", **options), *option, nproc=nproc)
    line = one_line(result, "error: cannot save ", "/run/step-00000003: ")
    assert re.search(r"; 0\.0 GB are free there\. .* is \S+/step-00000002: make room", line), line
    assert nproc or result.code == 2
    assert all_complete(copy / "run") == ["step-00000001", "step-00000002"]
    assert not hidden(copy / "run")


@pytest.mark.parametrize("nproc", [0, 2])
def test_a_read_only_disk(corpus, disk, nproc):
    path = shlex.quote(str(disk))
    bash = f'mount -t tmpfs tmpfs {path} && mount -o remount,ro {path} && exec "$@"'
    result = from_bash(bash, *large(corpus, disk / "run"), nproc=nproc)
    one_line(result, "Read-only file system", str(disk / "run"))
    assert nproc or result.code == 2
    assert "step " not in result.err and "parameters" not in result.out  # training did not start


# -------------------------------------------------------------------- two runs in one directory


def test_a_directory_belongs_to_one_run(corpus, tmp_path):
    out = tmp_path / "run"
    first = start("train.py", *large(corpus, out, steps=10**6, log_every=10**6))
    wait_until(lambda: (out / "metrics.jsonl").exists() and len(metrics_so_far(out)) > 5, first)
    arguments = large(corpus, out, steps=10)
    message = f"{out} is in use by process {first.pid} on {socket.gethostname()}: "
    for options in ([], ["--resume"]):
        refused(launch("train.py", *arguments, *options), message, "another --out")
    first.send_signal(signal.SIGINT)
    result = finish(first)
    assert result.code == 0, result.err
    rows = metrics(out)
    assert [row["step"] for row in rows] == list(range(1, len(rows) + 1))
    assert all_complete(out) == [f"step-{len(rows):08d}"]


def metrics_so_far(out: Path) -> list[str]:
    return (out / "metrics.jsonl").read_text().splitlines()


# ------------------------------------------------------------------------------ damaged files


def flip(path: Path) -> None:
    """Flip one bit in the middle of a file."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def contents(out: Path) -> dict[Path, bytes]:
    files = (path for path in out.rglob("*") if path.is_file() and path.name != ".lock")
    return {path: path.read_bytes() for path in files}


WEIGHTS, MOMENTS = "weights/__0_0.distcp", "optimizer/__0_0.distcp"


@pytest.mark.parametrize(
    "damage", [flip, truncate, Path.unlink], ids=["flip", "truncate", "unlink"]
)
@pytest.mark.parametrize("name", [WEIGHTS, "weights/.metadata", MOMENTS, "config.json", CHECKSUMS])
def test_damage_is_found_and_named(run, tmp_path, name, damage):
    out = Path(shutil.copytree(run, tmp_path / "run"))
    newest = out / "step-00000002"
    damage(newest / name)
    before = contents(out)
    with pytest.raises(UserError, match=f"{name} .*Remove {newest} to use the checkpoint before"):
        verify(newest, "")
    if name != MOMENTS:
        with pytest.raises(UserError, match=name):
            checkpoint.load_pretrained(out)
    assert contents(out) == before
    verify(out / "step-00000001", "")
    shutil.rmtree(newest)  # as the message advises
    checkpoint.load_pretrained(out)


@pytest.mark.parametrize(
    "script, nproc, name, damage",
    [
        ("train.py", 0, MOMENTS, Path.unlink),
        ("train.py", 2, WEIGHTS, truncate),
        ("generate.py", 0, WEIGHTS, flip),
    ],
    ids=["optimizer", "two_processes", "generate"],
)
def test_scripts_refuse_damaged_checkpoints(corpus, run, tmp_path, script, nproc, name, damage):
    out = Path(shutil.copytree(run, tmp_path / "run"))
    damage(out / "step-00000002" / name)
    before = contents(out)
    resume = [*large(corpus, out, steps=9, save_every=1), "--resume"]
    result = launch(script, *(resume if script == "train.py" else [out]), nproc=nproc)
    one_line(result, str(out / "step-00000002"), name)
    assert nproc or result.code == 2
    assert contents(out) == before


def test_the_checksums_are_those_of_sha256sum(run, tmp_path):
    if not shutil.which("sha256sum"):
        pytest.skip("needs sha256sum")
    saved = Path(shutil.copytree(run / "step-00000002", tmp_path / "saved"))
    listed = {line.split("  ")[1] for line in (saved / CHECKSUMS).read_text().splitlines()
              if not line.startswith("#")}  # fmt: skip
    files = {str(path.relative_to(saved)) for path in contents(saved)}
    assert listed == files - {CHECKSUMS}
    check = ["sha256sum", "--check", "--strict", CHECKSUMS]
    subprocess.run(check, cwd=saved, check=True, capture_output=True)
    flip(saved / WEIGHTS)
    result = subprocess.run(check, cwd=saved, capture_output=True, text=True)
    assert result.returncode == 1 and f"{WEIGHTS}: FAILED" in result.stdout
