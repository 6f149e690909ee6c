"""Record a run: OUT/config.json, OUT/metrics.jsonl, progress lines, profiler traces."""

import contextlib
import json
import math
import os
import resource
import shlex
import socket
import subprocess
import sys
import time
from dataclasses import asdict
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from config import ParallelConfig, Totals, Work
from costs.page import Traffic, sends, sent_bytes
from costs.shapes import peak_flops
from files.directories import lock_directory
from models.family import family_of
from parallel import World, used_techniques
from plumbing.flags import values_of
from plumbing.json_files import parse_json
from plumbing.messages import UserError, print_rank_zero
from plumbing.new_files import write_atomically
from plumbing.processes import newest_checkpoint
from plumbing.retired import check_run
from plumbing.stuck import note_step
from runs.flags import Run
from text.order import Steps
from text.tokenizer import Tokenizer


class Recorder(contextlib.AbstractContextManager):
    """Measures the steps of a run and records them on rank 0: in OUT/metrics.jsonl, one JSON object
    a step, and as progress lines on stderr."""

    def __init__(
        self, run: Run, world: World, work: Work, steps: Steps, tokenizer: Tokenizer, facts: dict
    ):
        """Continue a record after the steps that are done: remove later ones, which will run again.
        OUT/config.json has what was asked as "flags", and beside it the `facts`."""
        self.run, self.world, self.steps = run, world, steps
        self.has_warned = False  # that the metrics cannot be written
        out = run.directory
        self.profiler = start_profiler(out / f"trace-{world.rank}.json") if run.profile else None
        on_gpu = world.device.type == "cuda"
        self.peak_flops = peak_flops(torch.cuda.get_device_name()) if on_gpu else None
        self.tokens = steps.order.tokens_done(steps.done)  # on rank 0, what the record says
        if world.rank == 0:
            config = work.model.config
            self.config = {
                "model": asdict(config),
                "family": family_of(config).name,
                "tokenizer": tokenizer.name,
                "data": [*run.data],
                "seed": run.seed,
                "flags": values_of(run),
                "facts": facts,
                "run": describe_process(world, work),
            }
            self._open(steps.done)
        self.best = world.broadcast_from_rank_zero(partial(best_loss, out))
        self.started = self.step_started = time.perf_counter()
        note_step(steps.done)

    def __exit__(self, error, *_) -> None:
        if self.profiler:
            self.profiler.stop()
        if not error:  # after an error, ranks still need to know which of them is behind
            note_step(None)

    def measure(self, step: int, totals: Totals, lr: float, measures: dict[str, float]) -> dict:
        """Return the metrics of a step that has just ended, with the task's `measures`. Print those
        of the first, the last and every tenth step."""
        now, steps = time.perf_counter(), self.steps
        if self.profiler:
            self.profiler.step()
        seconds = now - self.step_started
        note_step(step, seconds)
        self.tokens += totals.tokens
        tokens_per_second = totals.tokens / seconds
        mfu = None
        if self.peak_flops:
            mfu = totals.flops / seconds / self.world.size / self.peak_flops
        metrics = {
            "step": step,
            "loss": totals.mean_loss,
            **measures,
            "grad_norm": totals.grad_norm,
            "lr": lr,
            "tokens": self.tokens,
            "seconds": seconds,
            "tokens_per_second": tokens_per_second,
            "mfu": mfu,
            "memory_bytes": peak_memory(self.world.device),
        }
        if step in (steps.done + 1, steps.last) or step % 10 == 0:
            seconds_a_step = (now - self.started) / (step - steps.done)
            left = seconds_a_step * (steps.last - step)
            columns = [  # in a narrow terminal the last are left out
                f"step {step:>5}/{steps.last}",
                f"loss {totals.mean_loss:.4f}",
                f"{timedelta(seconds=round(left))} left",
                *described(measures, 3),
                f"{tokens_per_second:,.0f} tokens/s",
                f"norm {totals.grad_norm:.2f}",
                f"mfu {mfu:.1%}" if mfu else "",
                f"{metrics['memory_bytes'] / 1e9:.2f} GB",
            ]
            print_rank_zero(as_line(columns, width_of(sys.stderr)), file=sys.stderr)
        return metrics

    def is_new_best(self, results: dict) -> bool:
        """Return whether --keep-best is given and these results of an evaluation have the lowest
        validation loss so far, with which later ones are compared."""
        is_best = self.run.keep_best and results.get("val_loss", math.inf) < self.best
        if is_best:
            self.best = results["val_loss"]
        return is_best

    def write(self, metrics: dict) -> None:
        """Write the line of a step on rank 0, or replace the last if it is of this step. If OUT was
        deleted or moved, begin its files anew; raise UserError if another run uses it now."""
        if self.world.rank:
            return
        path = Path(self.file.name)
        if not (path.exists() and os.path.samefile(path, self.file.fileno())):
            lock_directory(self.run.directory)
            print(
                f"warning: {self.run.directory} was deleted or moved: its records begin again at "
                f"step {metrics['step']}",
                file=sys.stderr,
            )
            self._open(metrics["step"] - 1)
        if metrics["step"] != self.step:
            self.step, self.line_start = metrics["step"], self.file.tell()
        line = f"{json.dumps(metrics)}\n".encode()
        try:
            self.file.seek(self.line_start)
            while line:  # a disk that gets full takes a part first, and then raises
                line = line[self.file.write(line) :]
            self.file.truncate()
        except OSError as error:  # the run goes on, and may save
            self.file.seek(self.line_start)  # the next line replaces what was written of this one
            if not self.has_warned:
                self.has_warned = True
                print(
                    f"warning: {path} is not written: {error.strerror}: the run goes on without it",
                    file=sys.stderr,
                )

    def _open(self, done: int) -> None:
        """Write OUT/config.json, and open OUT/metrics.jsonl after the line of step `done`."""
        out = self.run.directory
        path = out / "metrics.jsonl"
        lines = []
        for row in read_metrics(path):
            if row["step"] > done:
                continue
            lines.append(f"{json.dumps(row)}\n")
            if type(row.get("tokens")) is int:
                self.tokens = row["tokens"]
        self.line_start = len("".join(lines[:-1]))
        write_atomically(path, "".join(lines))  # first, since it makes a directory a run's
        write_atomically(out / "config.json", json.dumps(self.config, indent=1, default=str))
        self.file, self.step = open(path, "r+b", buffering=0), done
        self.file.seek(0, os.SEEK_END)

    def start_step(self) -> None:
        """Start timing a step, so that an evaluation or a save before it does not count."""
        self.step_started = time.perf_counter()


def width_of(stream) -> float:
    """Return how many characters fit in a line of a terminal; infinity for a file."""
    width = os.get_terminal_size(stream.fileno()).columns if stream.isatty() else 0
    return width or math.inf


def as_line(columns: list[str], width: float) -> str:
    """Return the columns that are not empty, as many as fit in a line of `width` characters."""
    kept = [column for column in columns if column]
    while len("  ".join(kept)) > width:
        kept.pop()
    return "  ".join(kept)


def described(measures: dict[str, float], digits: int) -> list[str]:
    """Return each measure as a text, such as 1.234 bits/byte."""
    return [f"{value:.{digits}f} {name.replace('_per_', '/')}" for name, value in measures.items()]


def read_metrics(path: Path) -> list[dict]:
    """Return the records of a metrics.jsonl. A line that is none, as a power loss may leave one, is
    left out with a warning: it must not keep a run from being resumed."""
    rows, left_out = [], []
    lines = path.read_bytes().splitlines(keepends=True) if path.is_file() else []
    for number, line in enumerate(lines, 1):
        row = None
        with contextlib.suppress(UserError):
            row = parse_json(line, path)
        if isinstance(row, dict) and type(row.get("step")) is int:
            rows.append(row)
        elif line.endswith(b"\n"):  # else it is the last, of a run that writes it or was killed
            left_out.append(number)
    if left_out:
        what = f"left out {len(left_out)} lines that are damaged, the first is line {left_out[0]}"
        print_rank_zero(f"warning: {path}: {what}", file=sys.stderr)
    return rows


def unevaluated(out: Path, step: int) -> dict | None:
    """Return the metrics of a step if they are recorded, but no results of its evaluation."""
    for row in read_metrics(out / "metrics.jsonl"):
        if row["step"] == step and "val_loss" not in row:
            return row
    return None


def best_loss(out: Path) -> float:
    """Return the validation loss of the checkpoint that OUT/best links to; infinity without one."""
    best = out / "best"
    name = best.resolve().name if best.exists() else ""
    for row in read_metrics(out / "metrics.jsonl"):
        if name == f"step-{row['step']:08d}" and type(row.get("val_loss")) is float:
            return row["val_loss"]
    return math.inf


def describe_process(world: World, work: Work) -> dict[str, str | int]:
    """Return how this run was started and on what, for OUT/config.json and report.py."""
    git = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    commit = ""
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        commit = subprocess.run(git, capture_output=True, text=True, timeout=10).stdout.strip()
    on_gpu = world.device.type == "cuda"
    return {
        "command": shlex.join(sys.argv),
        "commit": commit or "unknown",
        "torch": torch.__version__,
        "host": socket.gethostname(),
        "device": torch.cuda.get_device_name() if on_gpu else world.device.type,
        "ranks": world.size,
        "mesh": describe_mesh(world) if world.size > 1 else "one rank",
        "a rank sends, each step": describe_traffic(sends(work), work.parallel),
    }


def describe_not_finite(step: int, losses: Tensor) -> str:
    """Return what ends a run whose `losses` [ranks], or else its gradient norm, are not finite."""
    ranks = ", ".join(str(i) for i, loss in enumerate(losses.tolist()) if not math.isfinite(loss))
    culprit = f"loss on rank {ranks}" if ranks else "gradient norm"
    advice = f"--resume with --skip-steps {step}, which leaves out this batch"
    if newest := newest_checkpoint():
        advice += f", or, if all batches fail after {newest}, remove it and --resume before it"
    return f"step {step}: the {culprit} is not finite, and was not used: lower --lr, or {advice}"


def describe_traffic(traffic: Traffic, parallel: ParallelConfig) -> str:
    """Return in words what a rank sends, and the payload of its collectives, the largest first."""
    if not traffic:
        return "nothing"
    largest_first = sorted(traffic.items(), key=lambda item: -item[1][1])
    payload = ", ".join(
        f"{nbytes / 1e6:,.2f} MB by {calls:g} {collective} over {dim}"
        for (dim, collective), (calls, nbytes) in largest_first
    )
    return f"{sent_bytes(traffic, parallel) / 1e6:,.2f} MB; payload {payload}"


def describe_run(
    run: Run, work: Work, world: World, last_step: int, sources: list[tuple[int, int]], lr: float
) -> str:
    """Return a line on the model, the batch, the `sources` (text/order.py), the processes and the
    peak learning rate."""
    model, parallel = work.model, world.parallel
    with torch.device("meta"):
        parameters = sum(p.numel() for p in model.config.build().parameters())  # without adapters
    trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
    part = f", {trainable / 1e6:,.3f} M trainable" if trainable != parameters else ""
    notes = ""
    for technique in used_techniques(parallel):
        if note := technique.about(model, world):
            notes += f"; {note}"
    dtype = str(parallel.dtype).removeprefix("torch.")
    return (
        f"{run.directory}: {parameters / 1e6:,.2f} M parameters{part}; {work.batch} x "
        f"{work.seq_len} tokens a step; {describe_epochs(last_step * work.batch, sources)}; "
        f"{world.size} process(es) on {world.device.type}, {dtype}, microbatches of "
        f"{work.microbatch}, learning rate {lr:g}{notes}"
    )


def describe_epochs(sequences: int, sources: list[tuple[int, int]]) -> str:
    """Return how many sequences each source has, and how often a run of `sequences` reads them.
    `sources`: of each its sequences, and its places in a round (text/order.py)."""
    rounds = sequences / sum(places for _, places in sources)
    return " and ".join(
        f"{rows:,} sequences an epoch, {rounds * places / rows:.3g} epochs"
        for rows, places in sources
    )


def describe_mesh(world: World) -> str:
    """Return the sizes of the mesh dimensions, and which ranks form a group along each."""
    ranks, cp = world.mesh.mesh, world.parallel.cp
    groups = {}  # dimension -> the ranks of each of its groups
    for i, dim in enumerate(world.mesh.mesh_dim_names):
        if ranks.size(i) > 1:
            groups[dim] = ranks.movedim(i, -1).flatten(0, -2).tolist()
    sizes = " x ".join(f"{len(members[0])} {dim}" for dim, members in groups.items())
    if cp > 1:  # consecutive ranks of replicate x shard
        groups["cp"] = ranks.movedim(-1, 1).reshape(-1, cp).tolist()
        sizes += f", of which each {cp} share sequences"
    parts = [f"mesh: {sizes}"]
    for dim, members in reversed(groups.items()):
        shown = [f"({' '.join(map(str, group))})" for group in members[:8]]
        shown += ["..."] if len(members) > 8 else []
        parts.append(f"{dim} groups {' '.join(shown)}")
    return "; ".join(parts)


def warn_about_changed_flags(before: dict, now: dict, may_change: set[str]) -> None:
    """Print a warning for each flag that differs from those of the checkpoint and so makes this
    another experiment, and if the training data differ; but not for those in `may_change`. Old
    checkpoints lack some flags. Raises UserError for another optimizer, whose state the checkpoint
    does not have, for another base, and for a run that nothing here can resume."""
    check_run(before)
    had = before.get("optimizer", "adamw")  # old runs had no choice
    if had != now["optimizer"]:
        raise UserError(f"the run began with another optimizer: give --optimizer {had}")
    for digest, flag in (("base_digest", "init"), ("teacher_digest", "teacher")):
        if before.get(digest, "") not in ("", now.get(digest)):
            problem = f"{now.get(flag, 'this')} has other weights than the --{flag} that the run"
            raise UserError(f"{problem} began with: give the first ones, or begin another run")
    may_differ = may_change | {"data_checksum", "reward_digest", "token_offset"}
    if now["keep_best"]:  # which compares losses of before and now
        may_differ -= {"val_data", "eval_windows"}
    both = before.keys() & now.keys()
    changed = {name for name in both if str(before[name]) != str(now[name])}
    warnings = [
        f"--{name.replace('_', '-')} was {before[name]}, is now {now[name]}"
        for name in sorted(changed - may_differ)
    ]
    if "data_checksum" in changed:
        change = "no longer gives the sequences that the run began with: further steps see others"
        warnings.append(f"--data {' '.join(now['data'])} {change}")
    elif changed & {"data", "seed", "seq_len", "group"}:
        warnings.append("sequences may have another order now: this epoch may skip or repeat some")
    if "reward_digest" in changed:
        warnings.append(f"--reward {now['reward']} has changed: answers get its new rewards")
    for warning in warnings:
        print_rank_zero(f"warning: {warning}", file=sys.stderr)


def start_profiler(path: Path) -> torch.profiler.profile:
    """Trace three steps, after two that are not recorded, for chrome://tracing or Perfetto."""
    profiler = torch.profiler.profile(
        schedule=torch.profiler.schedule(wait=1, warmup=1, active=3, repeat=1),
        on_trace_ready=lambda profile: profile.export_chrome_trace(str(path)),
    )
    profiler.start()
    return profiler


def peak_memory(device: torch.device) -> int:
    """Return the peak memory of this process in bytes: on its GPU or, without one, on the CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if device.type == "mps":  # it keeps no peak, but gives nothing back
        return torch.mps.driver_allocated_memory()
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
