"""Train with a student's function in place of the project's: `python labs/run.py train LAB`.

train.py runs twice for 30 steps, as it is and with the function, and both losses are shown. The
functions below say, for each lab, what of train.py or parallel.py the student's function replaces.
The fsdp and hsdp labs say nothing about the norm of sharded gradients, so nothing is clipped there.
"""

import importlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from lab import load_function
from torch import Tensor, nn

import checkpoint
import finetune_lora
import parallel
import train
from data import Batch
from model import IGNORE, Llama
from parallel import World
from perf import cost
from plumbing.processes import UserError, run

LABS = Path(__file__).resolve().parent
ROOT = LABS.parent
STEPS = 30
TEXT = (
    "--model tiny --tokenizer bytes --seq-len 128 --batch 12 --microbatch 3 --dtype float64".split()
)
# Processes, and more flags. Two nodes of two ranks are emulated for hsdp.
RUNS = {
    "mean": (2, []),
    "accumulate": (2, []),
    "ddp": (2, ["--microbatch", "6"]),
    "fsdp": (2, ["--microbatch", "6", "--clip", "0"]),
    "hsdp": (4, ["--microbatch", "3", "--clip", "0"]),
    "recompute": (2, ["--checkpointing", "full"]),
    "lora": (2, ["--microbatch", "6"]),
}


def train_twice(lab: str, path: Path) -> Iterator[str]:
    """Yield lines that compare the losses of both runs. Raises UserError if one fails."""
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        losses = {}
        for who, file in (("train.py", ""), (path.name, str(path))):
            yield f"{STEPS} steps with {'the function in ' * bool(file)}{who}"
            losses[who] = _train(lab, file, directory)
        yield f"\n{'step':>6}{'train.py':>14}{path.name:>18}"
        (_, project), (_, student) = losses.items()
        for step in (1, 2, 5, *range(10, STEPS + 1, 5)):
            yield f"{step:>6}{project[step - 1]:>14.6f}{student[step - 1]:>18.6f}"
        apart = max(abs(a - b) / a for a, b in zip(project, student))
        yield f"largest difference: {apart:.1e} of the loss, in float64"
        if apart > 1e-3:
            raise UserError(f"the losses differ: see python labs/run.py check {lab}")


def _train(lab: str, file: str, directory: Path) -> list[float]:
    """Return the loss of each step of a run, with the function in `file` unless that is ''."""
    processes, more = RUNS[lab]
    out = directory / ("student" if file else "project")
    flags = [*TEXT, "--data", str(ROOT / "docs"), *more]
    if lab == "lora":
        base, chats = directory / "base", directory / "chats.jsonl"
        if not base.exists():
            lines = ({"prompt": f"{i} plus 1", "completion": f"is {i + 1}"} for i in range(400))
            chats.write_text("\n".join(map(json.dumps, lines)))
            _launch("", "", 1, [*flags, "--steps", "1", "--eval-every", "0", "--out", str(base)])
        flags = ["--init", str(base), "--data", str(chats), "--seq-len", "128", "--batch", "12"]
        flags += ["--dtype", "float64"]
        flags += more
    flags += ["--steps", str(STEPS), "--eval-every", "0", "--out", str(out)]
    _launch(lab, file, processes, flags)
    lines = (out / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["loss"] for line in lines]


def _launch(lab: str, file: str, processes: int, flags: list[str]) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={processes}", "-m", "training", lab, file, *flags]
    environment = {"OMP_NUM_THREADS": "1"} | os.environ
    environment["PYTHONPATH"] = f"{ROOT}{os.pathsep}{LABS}"  # labs/lora.py is not lora.py
    ended = subprocess.run(command, stdout=subprocess.DEVNULL, env=environment, cwd=ROOT)
    if ended.returncode:
        raise UserError(
            f"training failed with {Path(file).name if file else 'train.py'}, see above"
        )


# ------------------------------------------------------------- what a student's function replaces


def replace_ddp(apply: Callable[[Llama, World], nn.Module]) -> None:
    """Let --dp ddp, the default here, call `apply` with the model in place of wrapping it."""
    original = parallel.STRATEGIES["ddp"]
    parallel.STRATEGIES["ddp"] = replace(original, apply=apply)
    train.check_equal_replicas = lambda model, world: None  # ranks may hold different rows now
    cost.TRAFFIC[apply] = cost.TRAFFIC[original.apply]  # what the run predicts stays the same


def after_backward(finish: Callable[[], None]) -> None:
    """Let a step call `finish` after its last backward."""
    original = train.accumulate

    def accumulate(*args) -> Tensor:
        loss = original(*args)
        finish()
        return loss

    train.accumulate = accumulate


def install_mean(average: Callable) -> None:
    replace_ddp(lambda model, world: model)

    def update(optimizer, loss, batch: Batch, clip: float, world: World, step, stop=()):
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        targets = int((batch.targets != IGNORE).sum())
        mean_loss, norm = average(parameters, loss, targets, clip)
        optimizer.step()
        optimizer.zero_grad()
        sums = world.all_gather_scalars([targets, batch.text_bytes, bool(stop)]).sum(0).tolist()
        return train.Totals(
            float(mean_loss) * sums[0], int(sums[0]), int(sums[1]), float(norm), sums[2]
        )

    train.update = update


def install_accumulate(student: Callable) -> None:
    def of_batch(runner, batch: Batch, microbatch: int, world: World) -> Tensor:
        return student(runner, [part.inputs[:2] for part in batch.microbatches(microbatch)])

    train.accumulate = of_batch


def install_ddp(average_gradients: Callable) -> None:
    def apply(model: Llama, world: World) -> Llama:
        after_backward(average_gradients(model))
        return model

    replace_ddp(apply)


def install_fsdp(sharded_linear: Callable) -> None:
    """Shard the matrices of the blocks; average the gradients of the other parameters as DDP."""

    def forward(layer: nn.Linear, x: Tensor) -> Tensor:
        y = sharded_linear(x.flatten(0, 1), layer.weight, layer.out_features)
        return y.unflatten(0, x.shape[:2])

    def apply(model: Llama, world: World) -> Llama:
        sharded = [module for block in model.layers.values() for module in block.modules()
                   if isinstance(module, nn.Linear)]  # fmt: skip
        for layer in sharded:
            rows = layer.weight.detach().chunk(world.size)[world.rank].clone()
            layer.weight, layer.forward = nn.Parameter(rows), partial(forward, layer)
        summed = {layer.weight for layer in sharded}

        def finish() -> None:
            for parameter in model.parameters():
                if parameter not in summed:
                    dist.all_reduce(parameter.grad)
                parameter.grad /= world.size

        after_backward(finish)
        return model

    replace_ddp(apply)


def install_hsdp(hybrid_sharding: Callable) -> None:
    """Let the optimizer have the rows that this rank keeps; gather them after each update."""
    per_node = 2

    def matrix(tensor: Tensor) -> Tensor:
        """Return a matrix whose rows per_node divides: a norm's weights stand below each other."""
        tensor = tensor[:, None] if tensor.ndim == 1 else tensor
        return F.pad(tensor, (0, 0, 0, -len(tensor) % per_node))

    def apply(model: Llama, world: World) -> Llama:
        shard, gather, reduce = hybrid_sharding(per_node)
        for parameter in model.parameters():
            rows = shard(matrix(parameter.detach()))
            parameter.optimizer_slice = rows.view(-1, *parameter.shape[1:])
            parameter.optimizer_slice.whole = parameter

        def finish() -> None:
            for parameter in model.parameters():
                rows = parameter.optimizer_slice
                rows.grad = reduce(matrix(parameter.grad)).view_as(rows) / world.size
                parameter.grad = None

        def all_gather_updates(optimizer: torch.optim.Optimizer, *_) -> None:
            for rows in (p for group in optimizer.param_groups for p in group["params"]):
                whole = gather(rows.view(len(rows), -1))[: len(rows.whole)]
                rows.whole.data.copy_(whole.view_as(rows.whole))

        after_backward(finish)
        train.all_gather_updates = all_gather_updates
        return model

    replace_ddp(apply)


def install_recompute(student: Callable) -> None:
    parallel.recompute = lambda forward, selective: student(forward)


def install_lora(prepare: Callable) -> None:
    """The optimizer is the project's: here `prepare` says what is sharded."""

    def apply(model: Llama, world: World) -> Llama:
        prepare(model, world.mesh["replicate"], seed=0)
        return model

    replace_ddp(apply)


INSTALL = {
    "mean": install_mean,
    "accumulate": install_accumulate,
    "ddp": install_ddp,
    "fsdp": install_fsdp,
    "hsdp": install_hsdp,
    "recompute": install_recompute,
    "lora": install_lora,
}


class NothingSaved(checkpoint.Saver):
    """What is trained here is thrown away."""

    def save(self, step: int) -> Path:
        return self.out

    def _check(self) -> None:
        pass


def main() -> None:
    lab, file, *sys.argv[1:] = sys.argv[1:]
    if lab:
        checkpoint.Saver = NothingSaved
    if file:
        function = importlib.import_module(f"checks.{lab}").FUNCTION
        INSTALL[lab](load_function(Path(file), function))
    (finetune_lora if lab == "lora" else train).main()


if __name__ == "__main__":
    run(main)
