"""Run on two ranks, as if on a node each: one reads files longer than a collective would wait."""

import sys
import time
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

import torch.distributed as dist

from plumbing import processes


def main():
    processes.COLLECTIVE_TIMEOUT = timedelta(seconds=2)
    process = replace(processes.init_distributed(), local_rank=0)
    assert process.local_rank_zero_first(lambda: time.sleep(5 * process.rank) or "made") == "made"
    dist.barrier()


if __name__ == "__main__":
    processes.run(main)
