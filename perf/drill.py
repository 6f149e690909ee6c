"""Train twice, once undisturbed, once with ranks killed at drawn instants and resumed.

python bench.py drill --kills 20 --nproc-per-node 2 [flags of train.py]
"""

import contextlib
import json
import math
import os
import random
import re
import signal
import statistics
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from files.directories import checkpoints, open_weights
from perf.questions import goodput
from plumbing.processes import UserError


def measure_drill(command: list[str], out: Path, kills: int, save_every: int, seed: int) -> str:
    """Run the drill of the training that a `command` without --out starts, and return its report.

    The seconds from the first step after a start to the next kill are drawn from an exponential
    distribution, so that `kills` are expected in the time of all steps. One rank and all ranks
    die in turns. Needs Linux's /proc."""
    if out.exists():
        raise UserError(f"{out} exists: give another --out")
    whole, killed, dice = out / "whole", out / "killed", random.Random(seed)
    out.mkdir(parents=True)
    with running([*command, "--out", str(whole)], whole) as process:
        process.wait()
    check_ended(process, whole)
    rows = [json.loads(line) for line in (whole / "metrics.jsonl").read_text().splitlines()]
    step = statistics.median(row["seconds"] for row in rows)
    lines, starts, died = [], [], time.monotonic()
    began = died
    while True:
        done, kill_at = newest(killed), math.inf
        (killed / "metrics.jsonl").unlink(missing_ok=True)  # its lines are then those of new steps
        with running([*command, "--out", str(killed), "--resume"], killed) as process:
            while process.poll() is None and time.monotonic() < kill_at:
                if len(starts) == len(lines) and last_step(killed):
                    starts.append(time.monotonic() - died)
                    if len(lines) < kills:
                        kill_at = time.monotonic() + dice.expovariate(kills / len(rows) / step)
                time.sleep(0.01)
            if not (ranks := ranks_of(process)):  # it has ended
                break
            victims = ranks if len(lines) % 2 else [dice.choice(ranks)]
            kill(victims)
            died, reached = time.monotonic(), max(done, last_step(killed))
            process.wait()
        lost = max(0, reached - newest(killed))  # a save may come before its line
        lines.append(
            f"step {reached}: {len(victims)} of {len(ranks)} ranks killed, {lost} steps or "
            f"{lost * step:.1f} s lost"
        )
    check_ended(process, killed)
    for i, seconds in enumerate(starts[1:]):
        lines[i] += f", {seconds:.1f} s to the next step"
    wall, n = time.monotonic() - began - starts[0], len(lines)  # from the first step on
    lines.append(
        f"{n} failures: {len(rows)} steps of {step:.3f} s took {wall:.1f} s, "
        f"goodput {len(rows) * step / wall:.1%}"
    )
    if starts[1:]:  # here no failure hits a start, as it may in the formula
        saves = map(float, re.findall(r" GB in ([\d.]+) s", log_of(whole).read_text()))
        save, start = statistics.mean(saves), statistics.mean(starts[1:])
        up = (wall - sum(starts[1:])) / n
        share = goodput(save_every * step, save, 0, up) * up / (up + start)
        lines.append(
            f"predicted {share:.1%}, with saves of {save:.2f} s and starts of {start:.1f} s"
        )
    return "\n".join([*lines, difference(whole, killed)])


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
    """Raise UserError with the error of a training that has failed by itself."""
    if process.returncode:
        log = log_of(out).read_text()
        found = re.findall(r"^.*error: (.*)", log, re.MULTILINE) or ["the training failed"]
        raise UserError(f"{found[-1]} (all it said is in {log_of(out)})")


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
