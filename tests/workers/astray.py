"""What a rank does in a step that the others do not do: test_stuck.py puts it into train.py."""

import os
import signal
import sys
import time

import torch
import torch.distributed as dist


def astray(world, step: int) -> None:
    """Do on rank 1, in step 4, what the directory of the run is named after."""
    if step != 4:
        return
    case = next(a for a in sys.argv if a.startswith("--out")).rpartition("/")[2]
    guilty, ones = world.rank == 1, torch.ones(9)
    if case == "order" and guilty:
        dist.broadcast(ones, 0)  # order
        dist.all_reduce(ones)
    elif case == "order":
        dist.all_reduce(ones)
        dist.broadcast(ones, 0)
    if guilty and case == "sleeps":
        time.sleep(999)  # sleeps
    if guilty and case == "stopped":
        [time.sleep(3), os.kill(os.getpid(), signal.SIGSTOP)]  # stopped, after a heartbeat
    if case == "ahead":  # as with NCCL, whose calls return before they have ended
        works = [dist.all_reduce(ones, async_op=True) for _ in range(2 if guilty else 5)]
        while guilty:
            time.sleep(1)  # ahead
        works[-1].wait()
