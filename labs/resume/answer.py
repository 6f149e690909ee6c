"""What can a run not do without?

Runs of weeks are killed: by a full disk, a broken node, the end of a time slot. What was saved
before has to bring back everything that the next step depends on. And since a run can also be
killed while it saves, there has to be a complete checkpoint at any instant.

Read: the heads of checkpoint.py and of its class `Saver`, and the documentation of os.rename.
"""

import shutil
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn


def checkpointing(
    directory: Path, model: nn.Module, optimizer: torch.optim.Optimizer, order: torch.Generator
) -> tuple[Callable[[int], None], Callable[[], int]]:
    """Return two functions, save(step) and resume() -> step. Each rank calls this once, and then
    all ranks call save together, or resume.

    directory: on a disk that all ranks share; empty before the first run
    model, optimizer: this rank's shard of the model, which no other rank has, and its AdamW
    order: draws this rank's sequences. Dropout draws from torch's own generator:
        torch.get_rng_state, torch.set_rng_state
    save(step): a run that is killed later, also during the next save, can go on from here. When it
        has returned on all ranks, the directory holds no older checkpoint.
    resume(): puts back what the last complete save has saved, into the same model, optimizer and
        generators, so that training goes on as if nothing had happened. Returns its step, and 0
        if there is none.
    """
    # >>>
    rank, part = dist.get_rank(), directory / "part"

    def save(step: int) -> None:
        if rank == 0:
            shutil.rmtree(part, ignore_errors=True)  # left by a run that was killed
            part.mkdir()
        dist.barrier()
        state = {
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "order": order.get_state(),
            "dropout": torch.get_rng_state(),
        }
        torch.save(state, part / f"rank-{rank}")
        dist.barrier()  # all ranks have written
        if rank == 0:
            new = directory / f"step-{step:08d}"
            part.rename(new)
            for old in directory.glob("step-*"):
                if old != new:
                    shutil.rmtree(old)

    def resume() -> int:
        newest = max(directory.glob("step-*"), default=None)
        if newest is None:
            return 0
        state = torch.load(newest / f"rank-{rank}")
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        order.set_state(state["order"])
        torch.set_rng_state(state["dropout"])
        return int(newest.name.removeprefix("step-"))

    return save, resume
    # <<<


# Why: a file takes time to write, and a rename happens at once. So all is written under a name that
# resume does not look for, ranks wait for each other, and one rename makes it a checkpoint. Only
# then the old one may go. Lightning wrote in place (its #688), and removed before it saved (#1150).
# Files that are renamed one by one can be of different steps (composer PR #2146). Where the order
# of the data is not saved, they start over, and the loss looks fine (accelerate PR #4232, ms-swift
# #10050). Against a power failure, files also have to be synced to the disk before the rename: see
# `sync` in files/directories.py.
#
# Questions: 1. Nothing has a state: the order of the data is a function of the seed and the number
# of a sequence, and dropout starts anew in each step from seed, step and rank.
# 2. Of each shard, which rows of which whole tensor it has, and the whole shapes. And an order of
# the data that does not depend on the number of ranks.
# 3. fsync of the files and of their directory before the rename, and of the directory above after
# it, before the old checkpoint is removed.
