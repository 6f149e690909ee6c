"""Train twice, once undisturbed, once with ranks killed at drawn instants and resumed.

python tests/workers/drill.py 3 DIR [flags of train.py]      three kills of two processes
"""

import contextlib
import json
import math
import os
import random
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
from files.directories import checkpoints, open_weights  # noqa: E402


def drill(command: list[str], out: Path, kills: int) -> None:
    """Print what happens to the training that a `command` without --out starts.

    The seconds from the first step after a start to the next kill are drawn from an exponential
    distribution, so that `kills` are expected in the time of all steps. One rank and all ranks
    die in turns."""
    whole, killed, dice = out / "whole", out / "killed", random.Random(0)
    out.mkdir(parents=True)
    with running([*command, "--out", str(whole)], whole) as process:
        process.wait()
    check_ended(process, whole)
    rows = [json.loads(line) for line in (whole / "metrics.jsonl").read_text().splitlines()]
    seconds = statistics.median(row["seconds"] for row in rows)
    died = 0
    while True:
        done, kill_at = newest(killed), math.inf
        (killed / "metrics.jsonl").unlink(missing_ok=True)  # its lines are then those of new steps
        with running([*command, "--out", str(killed), "--resume"], killed) as process:
            while process.poll() is None and time.monotonic() < kill_at:
                if died < kills and kill_at == math.inf and last_step(killed):
                    kill_at = time.monotonic() + dice.expovariate(kills / len(rows) / seconds)
                time.sleep(0.01)
            if not (ranks := ranks_of(process)):  # it has ended
                break
            victims = ranks if died % 2 else [dice.choice(ranks)]
            kill(victims)
            died, reached = died + 1, max(done, last_step(killed))
            process.wait()
        lost = max(0, reached - newest(killed))  # a save may come before its line
        print(f"step {reached}: {len(victims)} of {len(ranks)} ranks killed, {lost} steps lost")
    check_ended(process, killed)
    print(f"{died} failures")
    print(difference(whole, killed))


@contextlib.contextmanager
def running(command: list[str], out: Path) -> Iterator[subprocess.Popen]:
    """Start a training, whose output goes to a file beside `out`; leave none of it behind."""
    with open(log_of(out), "a") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
    try:
        yield process
    finally:
        kill([*ranks_of(process), process.pid] if process.poll() is None else [])
        process.wait()


def kill(processes: list[int]) -> None:
    for process in processes:
        with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
            os.kill(process, signal.SIGKILL)


def check_ended(process: subprocess.Popen, out: Path) -> None:
    assert process.returncode == 0, log_of(out).read_text()


def log_of(out: Path) -> Path:
    return out.with_name(f"{out.name}.log")


def ranks_of(process: subprocess.Popen) -> list[int]:
    """Return the ids of the processes that torchrun has started, none if it has ended."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    return [int(child) for child in children.read_text().split()] if children.exists() else []


def newest(out: Path) -> int:
    """Return the step of the last checkpoint, or 0."""
    return max((int(path.name.removeprefix("step-")) for path in checkpoints(out)), default=0)


def last_step(out: Path) -> int:
    """Return the last step in metrics.jsonl, or 0."""
    path = out / "metrics.jsonl"
    lines = path.read_text().rpartition("\n")[0].splitlines() if path.exists() else []
    return json.loads(lines[-1])["step"] if lines else 0


def difference(whole: Path, killed: Path) -> str:
    """Return in words by how much the final weights of two runs differ."""
    (_, expected), (_, found) = (open_weights(checkpoints(out)[-1]) for out in (whole, killed))
    pairs = [(expected[name].read(), found[name].read()) for name in expected]
    if all(torch.equal(ours, theirs) for ours, theirs in pairs):
        return "final weights are equal, bit for bit"
    largest = max((ours.double() - theirs.double()).abs().max().item() for ours, theirs in pairs)
    return f"final weights differ by up to {largest:.3g}"


if __name__ == "__main__":
    kills, directory, *flags = sys.argv[1:]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    drill([*torchrun, str(ROOT / "train.py"), *flags], Path(directory), int(kills))
