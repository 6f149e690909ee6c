"""`bench.py race`: which change trains the best small model within four minutes (docs/speedrun.md).

An entry is a patch of this project, flags of train.py, or both. It and the project as it is run in
turns, each in a copy of its own without a cache, so that the time has everything in it: imports,
tokenizer, tokens, training, and the evaluation at the end. They differ in nothing but the seed from
round to round. What counts is the bits per byte of all held-out text.
"""

import argparse
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from plumbing.processes import UserError

ROOT = Path(__file__).resolve().parent.parent
# Only the last step evaluates, all that is held out; and only then is the model saved.
WHOLE = "--eval-every 1000000000 --eval-windows 1000000000 --save-every 0".split()


class Result(NamedTuple):
    bits_per_byte: float
    seconds: float  # from start to end of the process
    steps: int


def measure_race(args: argparse.Namespace) -> str:
    """Return the verdict on an entry after --rounds runs of it and of the project."""
    if not args.patch and not args.flags:
        raise UserError("race what? Give a patch, or --flags such as --flags='--lr 0.004'")
    with tempfile.TemporaryDirectory() as name:
        # The entry first: if it cannot run, that is known at once.
        directories = {who: Path(name) / who for who in ("the entry", "the project")}
        for directory in directories.values():
            copy_project(directory)
        if args.patch:
            apply_patch(args.patch, directories["the entry"])
        results = {who: [] for who in directories}
        runs = [(seed, who) for seed in range(args.rounds) for who in directories]
        for number, (seed, who) in enumerate(runs, 1):
            given = [*args.base, "--seed", str(seed), *(args.flags if who == "the entry" else [])]
            result = train(directories[who], given, args.processes, args.seconds)
            results[who].append(result)
            left = (len(runs) - number) * result.seconds
            print(
                f"run {number} of {len(runs)}: {who}, seed {seed}: {describe(result)}; "
                f"{left / 60:.0f} minutes left",
                file=sys.stderr,
                flush=True,
            )
    return verdict(results["the project"], results["the entry"], args.seconds)


def copy_project(directory: Path) -> None:
    """Copy the scripts, and what they import."""
    directory.mkdir()
    for path in ROOT.glob("*.py"):
        shutil.copy(path, directory)
    for folder in ("perf", "plumbing"):
        shutil.copytree(ROOT / folder, directory / folder)


def apply_patch(patch: Path, directory: Path) -> None:
    if not patch.is_file():
        raise UserError(f"{patch} is no file: make a patch by `git diff > {patch}`")
    command = ["git", "apply", "--exclude=docs/*", "--exclude=tests/*", str(patch.resolve())]
    applied = subprocess.run(command, cwd=directory, stderr=subprocess.PIPE, text=True)
    if applied.returncode:
        problem = applied.stderr.strip().splitlines()[0].removeprefix("error: ")
        raise UserError(f"{patch} does not fit this version of the project: {problem}")


def train(directory: Path, flags: list[str], processes: int, longest: float) -> Result:
    """Train in a copy and return what came out. Raises UserError if a run fails or takes more than
    twice the time that it has."""
    for made in ("cache", "out"):
        shutil.rmtree(directory / made, ignore_errors=True)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(processes)]
    command += ["--standalone", "train.py", "--out", "out", *WHOLE, *flags]
    environment = os.environ | {"OMP_NUM_THREADS": str(max(1, 2 // processes))}
    output = dict(stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    started = time.perf_counter()
    try:
        done = subprocess.run(
            command, cwd=directory, env=environment, timeout=2 * longest, **output
        )
    except subprocess.TimeoutExpired:
        raise UserError(f"ended after {2 * longest:.0f} s, twice the time there is: fewer --steps?")
    seconds = time.perf_counter() - started
    if done.returncode:
        says = [line for line in done.stderr.splitlines() if "error: " in line]
        raise UserError(f"a run failed: {(says or done.stderr.splitlines()[-1:])[0].strip()}")
    last = json.loads((directory / "out/metrics.jsonl").read_text().splitlines()[-1])
    return Result(last["val_bits_per_byte"], seconds, last["step"])


def describe(result: Result) -> str:
    return (
        f"{result.bits_per_byte:.4f} bits/byte after {result.steps} steps, {result.seconds:.0f} s"
    )


def verdict(project: list[Result], entry: list[Result], seconds: float) -> str:
    """Return all results, and whether the entry is better by more than its noise: twice the
    standard error of the mean of the rounds' differences."""
    lines = [f"{'round':>6}{'the project':>14}{'the entry':>12}{'gain':>10}"]
    gains = [a.bits_per_byte - b.bits_per_byte for a, b in zip(project, entry)]
    for i, (a, b, gain) in enumerate(zip(project, entry, gains)):
        lines.append(f"{i:>6}{a.bits_per_byte:>14.4f}{b.bits_per_byte:>12.4f}{gain:>10.4f}")
    mean = statistics.fmean(gains)
    if slow := [result for result in entry if result.seconds > seconds]:
        late = f"took {max(result.seconds for result in slow):.0f} s"
        return "\n".join([*lines, f"out: a run {late}, and has {seconds:.0f}: fewer --steps"])
    if len(gains) == 1:
        return "\n".join([*lines, f"gain {mean:.4f} bits/byte in one round: noise unknown"])
    noise = 2 * statistics.stdev(gains) / math.sqrt(len(gains))
    says = "better" if mean > noise else "worse" if mean < -noise else "no difference beyond noise"
    return "\n".join([*lines, f"gain {mean:.4f} +- {noise:.4f} bits/byte: {says}"])
