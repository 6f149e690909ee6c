"""Run by torchrun: loads each directory of the arguments into a model split by FSDP, and prints how
much this process's memory grew meanwhile, beside the model's own part, and what the weights take.

Memory is what is not backed by a file: pages of a mapped file cost nothing that cannot be had back.
"""

import re
import sys
from pathlib import Path

import torch
from torch.utils._python_dispatch import TorchDispatchMode

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

from checkpoint import load_weights, read_config
from model import Llama
from parallel import Split, arrange, parallelize, run, set_up


def anonymous_bytes() -> int:
    return 1024 * int(re.search(r"RssAnon:\s+(\d+)", Path("/proc/self/status").read_text())[1])


class Peak(TorchDispatchMode):
    """The most memory after any of torch's operators."""

    bytes = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        self.bytes = max(self.bytes, anonymous_bytes())
        return result


def fill_with_zeros(model: Llama) -> None:
    for parameter in model.parameters():
        parameter.data.zero_()


def main() -> None:
    world = set_up()
    world = arrange(world, Split("fsdp", shard=world.size))
    for directory in map(Path, sys.argv[1:]):
        with torch.device("meta"):
            model = Llama(read_config(directory)["model"])
        # Its part is filled beforehand: memory that nobody wrote to does not count as used.
        parallelize(model, world, fill_with_zeros)
        before = anonymous_bytes()
        with Peak() as peak:
            load_weights(directory, model)
        total = sum(p.numel() * p.element_size() for p in model.parameters())
        if world.rank == 0:
            print(directory.name, peak.bytes - before, total)


if __name__ == "__main__":
    run(main)
