"""Find out what would make a save fail, before step 1 where possible, and say so in a line."""

import errno
import math
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import CheckpointException

from files.directories import checkpoints, failure_reason, new_link
from files.optimizer_state import optimizer_state
from model import Llama
from plumbing.messages import UserError, print_rank_zero
from plumbing.shards import to_local


def on_every_rank(work: Callable, group: dist.ProcessGroup) -> list:
    """Return work()'s results on all ranks, when all are done; raise on all what one raises."""
    results = [None] * dist.get_world_size()
    try:
        mine = work()
    except Exception as error:
        mine = error
    dist.all_gather_object(results, mine, group)
    for result in results:
        if isinstance(result, Exception):
            raise result
    return results


def on_rank_zero(work: Callable, group: dist.ProcessGroup) -> None:
    """Let rank 0 do its work(); raise on all ranks what it raises."""
    on_every_rank(lambda: work() if dist.get_rank() == 0 else None, group)


def checkpoint_bytes(
    weights: dict[str, Tensor], optimizer: torch.optim.Optimizer, group: dist.ProcessGroup
) -> int:
    """Return how many bytes a checkpoint of all ranks takes. `weights` are those of this rank that
    are to be saved. Raises UserError if the optimizer's state cannot be saved."""
    is_new = not optimizer.state
    state = optimizer_state(optimizer)
    if is_new:
        optimizer.state.clear()  # as it was: AdamW counts its steps there
    if not state:
        kind = type(optimizer).__name__
        print_rank_zero(f"warning: checkpoints hold no state of {kind}", file=sys.stderr)
    # Of a DTensor nbytes is the size of the whole tensor, not of this rank's shard.
    sizes = {name: tensor.nbytes for name, tensor in (weights | state).items()}
    all_sizes = {}  # what several ranks have is saved once
    for of_rank in on_every_rank(lambda: sizes, group):
        all_sizes |= of_rank
    return sum(all_sizes.values())


def check_disk(out: Path, nbytes: int, group: dist.ProcessGroup) -> None:
    """Raise UserError if a rank does not find OUT, or if OUT lacks space for so many bytes."""
    rank = dist.get_rank()
    probe = out / ".step-probe"
    try:
        on_rank_zero(lambda: probe.mkdir(parents=True, exist_ok=True), group)
        on_every_rank(lambda: (probe / str(rank)).touch(), group)
        disk = shutil.disk_usage(out)
    except FileNotFoundError:
        raise UserError(f"--out {out} must be on a disk that all nodes share")
    finally:
        if rank == 0:
            shutil.rmtree(probe, ignore_errors=True)
    if disk.free < nbytes and disk.total:  # some network disks report zeros
        raise UserError(
            f"a checkpoint takes {nbytes / 1e9:.3g} GB, and {disk.free / 1e9:.3g} GB are free in "
            f"--out {out}: make room, or choose another --out"
        )


def check_links(out: Path, group: dist.ProcessGroup) -> None:
    """Raise UserError if OUT/best cannot be a link, now and not at the first best loss."""
    on_rank_zero(lambda: new_link(out, "best").unlink(), group)


def check_finite(model: Llama, step: int, out: Path, group: dist.ProcessGroup) -> None:
    """Raise UserError if a weight is not finite, or so large that the norm is not: nobody could go
    on from it, and --keep would remove what is better."""
    trained = [to_local(p.detach()) for p in model.parameters() if p.requires_grad]
    norm = torch.nn.utils.get_total_norm(trained).item()
    if not math.isfinite(sum(on_every_rank(lambda: norm, group))):
        raise UserError(
            f"step {step}: the weights are not finite any more, and are not saved: give a lower "
            f"--lr. {what_is_saved(out)}"
        )


def why_not_saved(final: Path, error: OSError | CheckpointException) -> str:
    """Return in one line why the checkpoint `final` was not written, and what there is instead."""
    out = final.parent
    reason = failure_reason(error)
    if os.strerror(errno.EIO) not in reason:
        free = shutil.disk_usage(out).free
        reason = f"{reason}; {free / 1e9:,.1f} GB are free there: make room"
    return f"cannot save {final}: {reason}. {what_is_saved(out)}"


def what_is_saved(out: Path) -> str:
    """Return in a sentence where a run in OUT can go on."""
    if saved := checkpoints(out):
        return f"The last checkpoint is {saved[-1]}: --resume goes on from it"
    return "There is no checkpoint"
