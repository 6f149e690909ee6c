"""Start many collectives of one group before waiting for any, for the seconds of argument 1."""

import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

from plumbing.joining import init_distributed
from plumbing.processes import run


def main():
    init_distributed()
    group = torch.distributed.group.WORLD.group_name
    collectives = torch.ops._c10d_functional
    end = time.monotonic() + float(sys.argv[1])
    while time.monotonic() < end:
        started = []
        for _ in range(8):
            started.append(collectives.all_gather_into_tensor(torch.ones(8), 1, group))
            started.append(collectives.all_reduce(torch.ones(8), "sum", group))
        for tensor in started:
            assert collectives.wait_tensor(tensor).sum() == 8


if __name__ == "__main__":
    run(main)
