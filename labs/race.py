"""Which change gives the best small model within four minutes (docs/speedrun.md)?

    python labs/race.py entry.patch

The entry is a patch, flags of train.py, or what has changed since the last commit. It runs in turns
with the last commit, each in a copy of its own, with two cores and no GPU. The time has everything
in it: imports, tokenizer, tokens, training, and the evaluation at the end. In a round both have the
same seed. What counts is the bits per byte of all held-out windows.
"""

import argparse
import json
import math
import os
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from labs.machinery.launch import launch
from plumbing import endings
from plumbing.messages import UserError
from plumbing.parser import Parser, positive_int
from plumbing.processes import run

# Evaluate once, after the last step, on all that is held out; save only then.
EVALUATE_AT_THE_END = "--eval-every 1000000000 --eval-windows 1000000000 --save-every 0".split()
# The number of rounds, and how many standard errors to each side of the mean make an interval that
# has the true mean in 95 % of cases: Student's t distribution with rounds - 1 degrees of freedom.
T_95 = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78, 6: 2.57, 7: 2.45, 8: 2.36, 9: 2.31, 10: 2.26}


class Result(NamedTuple):
    bits_per_byte: float
    seconds: float  # from start to end of the process
    steps: int


def measure_race(args: argparse.Namespace) -> str:
    """Return the verdict on an entry after --rounds runs of it and of the project."""
    if args.rounds > max(T_95):
        raise UserError(f"--rounds {args.rounds} are more than it takes: at most {max(T_95)}")
    if not (args.patch or args.flags or git("status", "--porcelain", ".")):
        raise UserError("race what? Change the project, or give a patch or --flags='--lr 0.004'")
    for flag in args.flags:
        name = flag.split("=")[0]
        for given in ("--data", "--init"):  # or shortened, as --dat
            if len(name) > 2 and given.startswith(name):
                raise UserError(f"an entry has no {given} of its own: give it in --base")
    if hasattr(os, "sched_setaffinity"):  # on Linux; the runs inherit it
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])
    with endings.ctrl_c_raises(), tempfile.TemporaryDirectory() as name:
        # The entry first: if it cannot run, that is known at once.
        directories = {who: Path(name).resolve() / who for who in ("the entry", "the project")}
        entry, project = directories.values()
        copy_commit(project)
        if args.patch:
            copy_commit(entry)
            apply_patch(args.patch, entry)
        else:
            copy_working_tree(entry)
        results = {who: [] for who in directories}
        runs = [(seed, who) for seed in range(args.rounds) for who in directories]
        for number, (seed, who) in enumerate(runs, 1):
            flags = [*args.base, *(args.flags if who == "the entry" else []), "--seed", str(seed)]
            result = train(who, directories[who], flags, args.processes, args.seconds)
            results[who].append(result)
            left = (len(runs) - number) * result.seconds / 60
            says = f"{result.bits_per_byte:.4f} bits/byte after {result.steps} steps"
            says += f", {result.seconds:.0f} s; {left:.0f} min left"
            print(f"run {number} of {len(runs)}: {who}, seed {seed}: {says}", file=sys.stderr)
    return verdict(results["the project"], results["the entry"], args.seconds)


def git(*command: str) -> bytes:
    needs = "the race compares with the last commit, so it needs the project as a git repository"
    try:
        done = subprocess.run(["git", *command], cwd=ROOT, capture_output=True)
    except FileNotFoundError:
        raise UserError(f"{needs}: install git")
    if done.returncode:
        raise UserError(f"{needs}: git {command[0]} says: {done.stderr.decode().strip()}")
    return done.stdout


def copy_commit(directory: Path) -> None:
    """Copy the project as it was committed last."""
    directory.mkdir()
    archive = git("archive", "HEAD")
    subprocess.run(["tar", "-x", "-C", str(directory)], input=archive, check=True)


def copy_working_tree(directory: Path) -> None:
    """Copy the project as it is now: files that git knows, and new ones that it does not ignore."""
    listed = git("ls-files", "-z", "--cached", "--others", "--exclude-standard").decode()
    for path in filter(None, listed.split("\0")):
        if (ROOT / path).is_file():
            (directory / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / path, directory / path)


def apply_patch(patch: Path, directory: Path) -> None:
    if not patch.is_file():
        raise UserError(f"{patch} does not exist: make a patch by `git diff HEAD > {patch}`")
    command = ["git", "apply", str(patch.resolve())]
    # If the copy lay within a repository, git would skip files unknown there, and say nothing.
    environment = os.environ | {"GIT_CEILING_DIRECTORIES": str(directory.parent)}
    applied = subprocess.run(
        command, cwd=directory, env=environment, stderr=subprocess.PIPE, text=True
    )
    if applied.returncode:
        problem = applied.stderr.strip().splitlines()[0].removeprefix("error: ")
        raise UserError(f"{patch} does not fit the last commit: {problem}")


def train(who: str, directory: Path, flags: list[str], processes: int, limit: float) -> Result:
    """Train in a copy and return what came out. Raises UserError if a run fails or takes more than
    twice the time that it has."""
    for left_by_last_run in ("cache", "out"):
        shutil.rmtree(directory / left_by_last_run, ignore_errors=True)
    # The last of equal flags counts, so those of the entry cannot leave out the evaluation.
    command = ["train.py", *flags, "--out", "out", *EVALUATE_AT_THE_END]
    started = time.perf_counter()
    try:
        launch(directory, command, processes, timeout=2 * limit)
    except subprocess.TimeoutExpired:
        raise UserError(f"{who} ran for {2 * limit:.0f} s, twice its time: give fewer --steps")
    except UserError as error:
        raise UserError(f"{who} failed: {error}") from None
    seconds = time.perf_counter() - started
    last = json.loads((directory / "out/metrics.jsonl").read_text().splitlines()[-1])
    if not math.isfinite(last["val_bits_per_byte"]):
        raise UserError(f"{who} failed: its score is {last['val_bits_per_byte']}")
    return Result(last["val_bits_per_byte"], seconds, last["step"])


def verdict(project: list[Result], entry: list[Result], limit: float) -> str:
    """Return all results, and whether the entry is better by more than its noise: a 95 % interval
    for the mean of the rounds' differences."""
    lines = [f"{'round':>6}{'the project':>14}{'the entry':>12}{'gain':>10}"]
    gains = [a.bits_per_byte - b.bits_per_byte for a, b in zip(project, entry)]
    for i, (a, b, gain) in enumerate(zip(project, entry, gains)):
        lines.append(f"{i:>6}{a.bits_per_byte:>14.4f}{b.bits_per_byte:>12.4f}{gain:>10.4f}")
    took, entry_took = (max(run.seconds for run in runs) for runs in (project, entry))
    lines.append(f"longest run: the project {took:.0f} s, the entry {entry_took:.0f} s")
    mean = statistics.fmean(gains)
    if entry_took > limit:
        lines.append(f"disqualified: a run may take {limit:.0f} s: fewer --steps?")
    elif len(gains) == 1:
        lines.append(f"gain {mean:.4f} bits/byte in one round: noise unknown")
    else:
        noise = T_95[len(gains)] * statistics.stdev(gains) / math.sqrt(len(gains))
        says = "no difference beyond noise"
        if abs(mean) > noise:
            says = "better" if mean > 0 else "worse"
        lines.append(f"gain {mean:.4f} +- {noise:.4f} bits/byte: {says}")
    return "\n".join(lines)


def main() -> None:
    parser = Parser(description=__doc__.partition("\n")[0])
    # fmt: off
    parser.add_argument("patch", nargs="?", type=Path,
                        help="the entry, as a patch of the last commit (default: the files as they "
                             "are now)")
    parser.add_argument("--flags", type=shlex.split, default=[], metavar="'--FLAG ...'",
                        help="flags of train.py that the entry has")
    parser.add_argument("--base", type=shlex.split, default=[], metavar="'--FLAG ...'",
                        help="flags of train.py that both have")
    parser.add_argument("--rounds", type=positive_int, default=3,
                        help="runs of each, with different seeds (default: %(default)s)")
    parser.add_argument("--seconds", type=positive_int, default=240,
                        help="time that a run may take, all in all (default: %(default)s)")
    parser.add_argument("--processes", type=positive_int, default=1,
                        help="processes of each run, on its two cores (default: %(default)s)")
    # fmt: on
    print(measure_race(parser.parse_args()))


if __name__ == "__main__":
    run(main)
