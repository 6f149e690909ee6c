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
    raise NotImplementedError("about 34 lines")
