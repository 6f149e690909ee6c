"""Run on two ranks: rank 1 raises an exception while rank 0 waits for it in a collective."""

import sys
from pathlib import Path

import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

from plumbing.processes import init_distributed, run


def main():
    if init_distributed().rank == 1:
        raise ValueError("a reason\nin two lines")
    dist.barrier()


if __name__ == "__main__":
    run(main)
