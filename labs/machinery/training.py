"""Train with a student's function in place of the project's: `python labs/run.py train LAB`.

train.py runs twice, as it is and with the function, and both losses are shown. The lab's check.py
says with which flags, RUN, and its function `install` puts the student's function in the place of
what it replaces in train.py or parallel.py.
"""

import contextlib
import importlib
import json
import os
import shutil
import signal
import socket
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

import checkpoint
import finetune_lora
import parallel
import runs.setup
import train
from labs.machinery.student import read_function
from model import Llama
from parallel import World
from plumbing.processes import UserError, run

LABS = Path(__file__).resolve().parent.parent
ROOT = LABS.parent
TEXT = (
    "--model tiny --tokenizer bytes --seq-len 32 --batch 12 --microbatch 3 --dtype float64 "
    "--optimizer adamw"
).split()
FIRST = 10  # steps that have to agree


class Run(NamedTuple):
    """How train.py runs with a lab's function: on how many processes, with which flags beside
    TEXT's. Or another script, and with which flags train.py makes its base, beside TEXT's."""

    processes: int = 2
    flags: str = ""
    script: str = "train.py"
    base: str = ""


def check_module(lab: str) -> ModuleType:
    return importlib.import_module(f"labs.{lab}.check")


def train_twice(lab: str, path: Path, steps: int) -> Iterator[str]:
    """Yield lines that compare the losses of both runs. Raises UserError if one fails."""
    if not hasattr(check_module(lab), "RUN"):
        raise UserError(f"no step of training calls the function of {lab}")
    # Where nothing is clipped, the lab says nothing about the norm. Else it is compared too. AdamW
    # trains nearly alike with a gradient that is twice too large: its eps tells, in the 7th digit.
    compared, most = {"loss": "loss"}, 1e-9
    if "--clip 0" not in check_module(lab).RUN.flags:
        compared["grad_norm"], most = "gradient norm", 1e-6
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        metrics = {}
        shutil.copytree(ROOT / "docs", directory / "docs")  # the text, as it is now
        for who, file in (("train.py", ""), (path.name, str(path))):
            yield f"{steps} steps with {'the function in ' * bool(file)}{who}"
            metrics[who] = _train(lab, file, directory, steps)
        yield f"\n{'step':>6}{'train.py':>14}{path.name:>18}"
        project, student = metrics.values()
        for step in sorted({1, 2, *range(5, steps + 1, 5), steps} & {*range(steps + 1)}):
            losses = project[step - 1]["loss"], student[step - 1]["loss"]
            yield "{:>6}{:>14.6f}{:>18.6f}".format(step, *losses)
        # Of the first steps only: later, training enlarges the smallest rounding errors.
        for key, name in compared.items():
            apart = max(abs(a[key] - b[key]) / a[key] for a, b in zip(project[:FIRST], student))
            first = min(FIRST, steps)
            yield f"largest difference in the first {first} steps: {apart:.1e} of the {name}"
            if apart > most:
                raise UserError(f"the runs differ: see python labs/run.py check {lab}")


def _train(lab: str, file: str, directory: Path, steps: int) -> list[dict]:
    """Return what each step of a run measured, with the function in `file` unless that is ''."""
    how = check_module(lab).RUN
    out = directory / ("student" if file else "project")
    flags = [*TEXT, "--data", str(directory / "docs"), *how.flags.split()]
    if how.script == "finetune_lora.py":
        flags = [*to_tune(directory, how.base), "--seq-len", "32", "--batch", "12"]
        flags += ["--dtype", "float64", *how.flags.split()]
    flags += ["--steps", str(steps), "--eval-every", "0", "--out", str(out)]
    _launch(lab, file, how.processes, flags)
    lines = (out / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def to_tune(directory: Path, flags: str = "") -> list[str]:
    """Return finetune_lora.py's flags for a small model and conversations, which are made in a
    directory if they are not there; the model by train.py with `flags`."""
    base, chats = directory / "base", directory / "chats.jsonl"
    if not base.exists():
        lines = ({"prompt": f"{i} plus 1", "completion": f"is {i + 1}"} for i in range(400))
        chats.write_text("\n".join(map(json.dumps, lines)))
        ends = ["--data", str(ROOT / "docs"), "--steps", "1", "--eval-every", "0", "--out"]
        _launch("", "", 1, [*TEXT, *flags.split(), *ends, str(base)])
    return ["--init", str(base), "--data", str(chats)]


def _launch(lab: str, file: str, processes: int, flags: list[str]) -> None:
    if run_in_forks(partial(run, partial(_main, lab, file, flags)), processes) is None:
        who = Path(file).name if file else "train.py"
        raise UserError(f"training failed with {who}, see above")


def run_in_forks(main: Callable[[], None], ranks: int, nodes: int = 1) -> str | None:
    """Run `main` on ranks that are forks of this process, so that they have torch at once. Returns
    what rank 0 prints, or None if a rank fails.

    The ranks' store is here: it must outlive the first rank to fail, which leaves its reason there.
    The store has threads, so it starts after the forks."""
    listener = socket.create_server(("127.0.0.1", 0))
    address, per_node, processes = listener.getsockname(), ranks // nodes, []
    with tempfile.TemporaryFile("w+") as printed:
        for rank in range(ranks):
            if (process := os.fork()) == 0:
                listener.close()
                signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the first process
                os.environ.update(
                    RANK=str(rank),
                    WORLD_SIZE=str(ranks),
                    LOCAL_RANK=str(rank % per_node),
                    LOCAL_WORLD_SIZE=str(per_node),
                    GROUP_RANK=str(rank // per_node),
                    MASTER_ADDR=address[0],
                    MASTER_PORT=str(address[1]),
                    TORCHELASTIC_USE_AGENT_STORE="True",
                    OMP_NUM_THREADS="1",
                    CUDA_VISIBLE_DEVICES="",  # forks could not use it
                )
                os.dup2(os.open(os.devnull, os.O_WRONLY) if rank else printed.fileno(), 1)
                sys.stdout = os.fdopen(1, "w")
                _be_rank(main)
            processes.append(process)
        try:
            options = dict(wait_for_workers=False, master_listen_fd=listener.detach())
            store = dist.TCPStore(*address, is_master=True, **options)
            failed = any([os.waitpid(process, 0)[1] for process in processes])  # all end, or none
        except BaseException:  # Ctrl-C
            for process in processes:
                with contextlib.suppress(ProcessLookupError):  # it has ended
                    os.kill(process, signal.SIGKILL)
            raise
        del store  # and its threads, before there are forks again
        printed.seek(0)
        return None if failed else printed.read()


def _be_rank(main: Callable[[], None]) -> None:
    code = 1
    try:
        torch.set_num_threads(1)
        # As in ranks.py: 2.11 has these functions, and has no others.
        warnings.filterwarnings("ignore", ".*is deprecated", FutureWarning)
        main()
        code = 0
    except SystemExit as end:
        code = end.code or 0
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _main(lab: str, file: str, flags: list[str]) -> None:
    """Train on a rank, with the function in `file` unless that is ''."""
    sys.argv = ["train.py", *flags]
    checkpoint.Saver = NothingSaved if lab else checkpoint.Saver
    if file:
        module = check_module(lab)
        runs.setup.check_model = lambda *_: None  # would find what a wrong function computes
        module.install(read_function(Path(file), module.FUNCTION))
    tunes = lab and check_module(lab).RUN.script == "finetune_lora.py"
    (finetune_lora if tunes else train).main()


# ------------------------------------------------------------- what a student's function replaces


def replace_ddp(apply: Callable[[Llama, World], nn.Module]) -> None:
    """Let --dp ddp, the default here, call `apply` with the model in place of wrapping it."""
    parallel.WRAPPERS["ddp"] = apply
    runs.setup.check_equal_replicas = lambda model, world: None  # ranks may hold different rows now


def after_backward(finish: Callable[[], None]) -> None:
    """Let a step call `finish` after its last backward."""
    original = train.accumulate

    def accumulate(*args) -> Tensor:
        loss = original(*args)
        finish()
        return loss

    train.accumulate = accumulate


class NothingSaved(checkpoint.Saver):
    """What is trained here is thrown away."""

    def save(self, step: int, best: bool = False) -> Path:
        return self.out

    def _check(self) -> None:
        pass
