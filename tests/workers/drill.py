"""Train twice: once undisturbed, and once with ranks killed at drawn instants, and resumed."""

import contextlib
import json
import os
import random
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from files.directories import checkpoints


def drill(command: list[str], out: Path, kills: int) -> Iterator[tuple[int, list[int], int]]:
    """Run a training, a `command` without --out, in OUT/whole, and with kills in OUT/killed.

    A kill comes one to four steps after the last checkpoint, at an instant drawn from the time of a
    step or, two of four, in the save that begins next. It hits one rank or all ranks, in turns.
    Yields, after each, the step of the last checkpoint before it, the ranks that were killed, and
    the number of ranks."""
    whole = out / "whole"
    killed = out / "killed"
    dice = random.Random(0)
    complete([*command, "--save-every", "0", "--out", str(whole)], whole)
    rows = (whole / "metrics.jsonl").read_text().splitlines()
    seconds = [json.loads(row)["seconds"] for row in rows]
    of_a_step = sum(seconds) / len(seconds)
    command = [*command, "--out", str(killed), "--resume"]
    for i in range(kills):
        with running(command, killed) as process:
            step = newest(killed) + dice.randint(1, 4)
            while process.poll() is None and newest(killed) < step:
                time.sleep(0.005)
            time.sleep(dice.uniform(0, of_a_step))
            while i % 4 < 2 and process.poll() is None and not list(killed.glob(".step-*")):
                time.sleep(0.001)
            assert process.poll() is None, f"ended before kill {i}: {log_of(killed).read_text()}"
            ranks = ranks_of(process) or [process.pid]
            before = newest(killed)
            if i % 2:
                victims = list(range(len(ranks)))
            else:
                victims = [dice.randrange(len(ranks))]
            kill([ranks[victim] for victim in victims])
            process.wait()
        yield before, victims, len(ranks)
    complete(command, killed)


def complete(command: list[str], out: Path) -> None:
    with running(command, out) as process:
        assert process.wait() == 0, log_of(out).read_text()


@contextlib.contextmanager
def running(command: list[str], out: Path) -> Iterator[subprocess.Popen]:
    """Start a training, whose output goes to a file beside `out`; leave none of it behind."""
    with open(log_of(out), "a") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
    try:
        yield process
    finally:
        if process.poll() is None:
            kill([*ranks_of(process), process.pid])
        process.wait()


def kill(processes: list[int]) -> None:
    for process in processes:
        with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
            os.kill(process, signal.SIGKILL)


def log_of(out: Path) -> Path:
    return out.with_name(f"{out.name}.log")


def ranks_of(process: subprocess.Popen) -> list[int]:
    """Return the ids of the processes that torchrun has started, none if it has ended."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    if not children.exists():
        return []
    return [int(child) for child in children.read_text().split()]


def newest(out: Path) -> int:
    """Return the step of the last checkpoint, or 0."""
    steps = [int(path.name.removeprefix("step-")) for path in checkpoints(out)]
    return max(steps, default=0)
