"""What a rank does in a step that the others do not do: test_stuck.py puts it into train.py."""

import os
import signal
import sys
import time

import torch
import torch.distributed as dist

STEP, RANK = 4, 1


def astray(world, step: int) -> bool:
    """Do on RANK in STEP what the directory of the run is named after. Return whether the rest of
    the step is to be left out."""
    case = next(a for a in sys.argv if a.startswith("--out")).rpartition("/")[2]
    guilty = step == STEP and world.rank == RANK
    if case == "order" and guilty:
        dist.broadcast(torch.ones(9), 0)  # order
        dist.all_reduce(torch.ones(9))
    elif case == "order" and step == STEP:
        dist.all_reduce(torch.ones(9))
        dist.broadcast(torch.ones(9), 0)
    if guilty and case == "sleeps":
        time.sleep(999)  # sleeps
    if guilty and case == "stopped":
        [time.sleep(3), os.kill(os.getpid(), signal.SIGSTOP)]  # stopped, after a heartbeat
    if guilty and case == "more":
        dist.broadcast(torch.ones(9), 0)  # more
    if case == "ahead" and step == STEP:  # as with NCCL, whose calls return before they have ended
        works = [dist.all_reduce(torch.ones(9), async_op=True) for _ in range(2 if guilty else 5)]
        while guilty:
            time.sleep(1)  # ahead
        works[-1].wait()
    if guilty and case == "alike":
        world.all_gather_scalars([0.0] * 5)
    return guilty and case == "less"
