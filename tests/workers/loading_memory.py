"""Run on several ranks: load each directory of the arguments into a model sharded by FSDP.

Prints by how many bytes the memory of rank 0 grew beyond its shard, and the bytes of the weights.
Pages of mapped files are not counted, since the operating system can take them back at any time.
"""

import re
import sys
from pathlib import Path

import torch
from torch.utils._python_dispatch import TorchDispatchMode

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

from checkpoint import read_config
from config import ParallelConfig
from files.loading import load_weights
from parallel import parallelize, with_mesh
from plumbing.joining import init_distributed
from plumbing.processes import run


def anonymous_bytes() -> int:
    return 1024 * int(re.search(r"RssAnon:\s+(\d+)", Path("/proc/self/status").read_text())[1])


class Peak(TorchDispatchMode):
    """Records the most memory in use after any of torch's operators."""

    bytes = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        self.bytes = max(self.bytes, anonymous_bytes())
        return result


def main() -> None:
    process = init_distributed()
    world = with_mesh(process, ParallelConfig("fsdp", shard=process.size))
    for directory in map(Path, sys.argv[1:]):
        with torch.device("meta"):
            model = read_config(directory)["model"].build()
        # The shard is written to beforehand: memory counts as used only from its first write on.
        parallelize(model, world, lambda model: [p.data.zero_() for p in model.parameters()])
        before = anonymous_bytes()
        with Peak() as peak:
            load_weights(directory, model)
        total = sum(p.numel() * p.element_size() for p in model.parameters())
        if world.rank == 0:
            print(directory.name, peak.bytes - before, total)


if __name__ == "__main__":
    run(main)
