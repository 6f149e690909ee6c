"""Count what ranks send over a loopback that nobody else uses, in each collective.

Rank 0 prints a JSON object: collective -> bytes sent per rank and byte of payload."""

import json
import re
from pathlib import Path

import torch
import torch.distributed as dist

from plumbing.processes import init_distributed, run


def bytes_sent() -> int:
    return int(re.search(r"lo:(\s+\d+){8}\s+(\d+)", Path("/proc/self/net/dev").read_text())[2])


def main() -> None:
    ranks = init_distributed().size
    full = torch.ones(8 << 20)
    shard = torch.ones(len(full) // ranks)
    collectives = {
        "all-reduce": lambda: dist.all_reduce(full),
        "all-gather": lambda: dist.all_gather_into_tensor(full, shard),
        "reduce-scatter": lambda: dist.reduce_scatter_tensor(shard, full),
    }
    ratios = {}
    for name, collective in collectives.items():
        collective()  # opens the connections
        dist.barrier()
        before = bytes_sent()
        dist.barrier()  # all have read before any sends
        collective()
        dist.barrier()
        ratios[name] = (bytes_sent() - before) / ranks / full.nbytes
    if dist.get_rank() == 0:
        print(json.dumps(ratios))


run(main)
