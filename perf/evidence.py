"""Published training speeds, three of them our own, and what the formulas predict for them.

docs/measured/published.csv has a row for each: facts from the source that it names, and in the
column `assumed` what the source does not say. docs/calibrate.py fits costs/machines.py to them.
"""

import csv
import dataclasses
import functools
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from config import ParallelConfig, Work
from costs.machines import GPUS, REACHED, Machine, assumed_machine
from costs.search import Plan
from model import Llama, LlamaConfig

FILE = Path(__file__).parent.parent / "docs/measured/published.csv"
INTEGERS = (
    "dim layers heads kv_heads ffn vocab gpus per_node replicate shard tp pp stages_per_rank cp "
    "microbatch microbatches seq_len compile async_tp overlap"
).split()


# Nine of ten published speeds of families that were left out of the fit are within so much of what
# was predicted, by kind_of their configuration (docs/calibrate.py).
SPREAD = {"dp": 0.15, "tp": 0.21, "cp": 0.23, "pp": 0.23}


@functools.cache
def model_of(shape: tuple[int, ...]) -> Llama:
    with torch.device("meta"):
        return Llama(LlamaConfig(*shape, max_seq_len=1 << 20))


@dataclass(frozen=True)
class Published:
    """A row of the file, as text."""

    row: dict[str, str]

    def __getattr__(self, name: str) -> str | int:
        """Return a column."""
        return int(self.row[name]) if name in INTEGERS else self.row[name]

    @functools.cached_property
    def work(self) -> Work:
        names = "dp replicate shard tp pp cp checkpointing float8 reshard stages_per_rank schedule"
        given = {name: getattr(self, name) for name in names.split()}
        given |= dict(compile=bool(self.compile), async_tp=bool(self.async_tp))
        parallel = ParallelConfig(dtype=torch.bfloat16, **given)
        shape = "dim layers heads kv_heads ffn vocab".split()
        model = model_of(tuple(getattr(self, name) for name in shape))
        batch = self.microbatches * self.microbatch * self.replicate * self.shard // self.cp
        return Work(model, parallel, batch, self.microbatch, self.seq_len, on_gpu=True)

    def machine(self, reached: dict[str, float] = REACHED) -> Machine:
        """Return the machine of this row. Where products are in 8 bits, so are the messages of
        others over tp, which flatllama sends in 16: their links count as twice as fast. All of
        its attention takes one kernel."""
        kernel = self.attention.replace("flash", "")
        machine = assumed_machine(self.gpu, self.link, self.per_node, kernel, reached)
        in_8_bits = self.float8 != "none" and self.tp > 1
        changes = dict(node_link=machine.node_link * (1 + in_8_bits), overlaps=bool(self.overlap))
        return dataclasses.replace(machine, flash_fraction=0.0, **changes)

    @property
    def measured(self) -> float:
        """Tokens a second and GPU."""
        return float(self.tokens_s_gpu)

    def predicted(self, reached: dict[str, float] = REACHED) -> float:
        return Plan(self.work, self.machine(reached)).tokens_per_second


def published() -> list[Published]:
    with FILE.open() as file:
        return [Published(row) for row in csv.DictReader(file)]


def kind_of(parallel: ParallelConfig) -> str:
    """Return the kind of configuration, whose error SPREAD has."""
    return next((dim for dim in ("pp", "cp", "tp") if getattr(parallel, dim) > 1), "dp")


def spread_of(plan: Plan) -> float:
    return SPREAD[kind_of(plan.work.parallel)]


def nearest(plan: Plan, n: int = 5) -> list[Published]:
    """Return the published runs that are most like a plan: as many doublings away in GPUs, weights,
    tokens of a sequence and ranks that share, with two for another kind of GPU or of product."""
    config, parallel, gpu = plan.work.model.config, plan.work.parallel, GPUS.get(plan.machine.name)

    def numbers(sizes) -> list[float]:
        dim, ffn, layers, *others = sizes
        return [math.log2(layers * dim * (2 * dim + 3 * ffn)), *map(math.log2, others)]

    own = config.dim, config.ffn_dim, config.n_layers, parallel.size, plan.work.seq_len
    own = numbers([*own, parallel.tp, parallel.pp, parallel.cp])

    def distance(row: Published) -> float:
        names = "dim ffn layers gpus seq_len tp pp cp".split()
        apart = sum(map(abs, np.subtract(own, numbers(getattr(row, name) for name in names))))
        other_gpu = gpu is None or GPUS[row.gpu].like != gpu.like
        return apart + 2 * (other_gpu + (row.float8 != parallel.float8))

    return sorted(published(), key=distance)[:n]


def evidence_table(plan: Plan) -> list[list[str]]:
    """Return the rows of a table: for each of the nearest runs its source, its configuration, and
    published and predicted tokens a second and GPU."""
    rows = []
    for row in nearest(plan):
        near = Plan(row.work, row.machine())
        what = f"{row.model}, {row.gpus} x {row.gpu}, {near.mesh}, {row.seq_len} tokens"
        what += f", {row.float8} float8" * (row.float8 != "none")
        off = near.tokens_per_second / row.measured - 1
        speeds = f"{row.measured:,.0f}", f"{near.tokens_per_second:,.0f}", f"{off:+.0%}"
        rows.append([f"{row.where} ({row.date})", what, *speeds])
    return rows
