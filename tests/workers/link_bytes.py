"""Count what a rank puts on its network interface in each collective: link_bytes.py INTERFACE.

Rank 0 prints a JSON object: collective -> bytes sent per byte of payload."""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

from plumbing.processes import init_distributed, run

sent = Path("/sys/class/net", sys.argv[1], "statistics/tx_bytes")


def main() -> None:
    init_distributed()
    full = torch.ones(8 << 20)
    shard = torch.ones(len(full) // dist.get_world_size())
    collectives = {
        "all-reduce": lambda: dist.all_reduce(full),
        "all-gather": lambda: dist.all_gather_into_tensor(full, shard),
        "reduce-scatter": lambda: dist.reduce_scatter_tensor(shard, full),
    }
    ratios = {}
    for name, collective in collectives.items():
        collective()  # opens the connections
        dist.barrier()
        before = int(sent.read_text())
        collective()
        ratios[name] = (int(sent.read_text()) - before) / full.nbytes
        dist.barrier()
    if dist.get_rank() == 0:
        print(json.dumps(ratios))


run(main)
