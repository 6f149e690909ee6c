"""Compile a block with asynchronous tensor parallelism; write the order of its operators.

python tests/workers/message_order.py CHECKPOINTING FILE
"""

import json
import re
import sys
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch._inductor.utils import run_and_get_code
from torch.testing._internal.distributed.fake_pg import FakeStore

from config import ParallelConfig
from model import Llama, LlamaConfig
from parallel import parallelize, with_mesh
from perf.instruments import build_on_meta
from plumbing.processes import Process
from plumbing.shards import assign_shard

OPERATORS = {"all_to_all_single.default(": "send", "wait_tensor.default(": "wait",
             "extern_kernels.": "product"}  # fmt: skip


def order_of(code: str) -> str:
    """The messages, waits and matrix products of compiled code, in the order of its lines."""
    lines = code[code.index("def call(") :].splitlines()
    calls = [name for line in lines for text, name in OPERATORS.items()
             if text in re.sub("#.*", "", line)]  # fmt: skip
    return " ".join(calls)


def main() -> None:
    checkpointing, file = sys.argv[1:]
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=4)
    process = Process(rank=1, size=4, local_rank=1, per_node=4, device=torch.device("cpu"))
    options = dict(tp=4, async_tp=True, compile=True, checkpointing=checkpointing)
    model = build_on_meta(LlamaConfig(768, 1, 8, 4, 2304, vocab_size=64))
    initialize = partial(Llama.init_weights, assign=assign_shard)
    runner = parallelize(model, with_mesh(process, ParallelConfig(**options)), initialize)
    tokens = torch.zeros(2, 2048, dtype=torch.int64)
    _, codes = run_and_get_code(lambda: runner(tokens, targets=tokens).backward())
    Path(file).write_text(json.dumps([order_of(code) for code in codes]))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
