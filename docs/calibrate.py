"""Fit what training reaches of data sheets to published steps; tell how far predictions are off.

    python docs/calibrate.py            fits, and writes docs/measured/calibration.json

The fit minimizes the squares of the logarithm of predicted / published speed; each source has the
same weight. The published steps tell little about some constants: a weak prior keeps each near what
was assumed (START). A family is what one project published for one generation of GPUs. It is left
out as a whole, the constants are fitted to the others, and then predict it: what this says of a
cluster that nobody has published is the honest error of a plan.
"""

import csv
import dataclasses
import functools
import json
import sys
from pathlib import Path

import numpy as np
import torch

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))
from config import ParallelConfig, Work  # noqa: E402
from costs.machines import Machine, assumed_machine  # noqa: E402
from costs.seconds import step_time  # noqa: E402
from model import LlamaConfig  # noqa: E402
from perf.instruments import build_on_meta  # noqa: E402
from perf.plan import SPREAD, kind_of  # noqa: E402

PUBLISHED = ROOT / "docs/measured/published.csv"
RESULTS = ROOT / "docs/measured/calibration.json"
START = {
    "products a100": 0.7,
    "products h100": 0.6,
    "products h200": 0.6,
    "products b200": 0.5,
    "attention a100": 0.45,
    "attention h100": 0.3,
    "attention b200": 0.4,
    "attention h100 cudnn": 0.5,
    "h100-500w": 0.85,
    "node link": 0.6,
}
PRIOR = 0.1  # weight of a constant's distance from START, where that of a source is 1
SPLIT = "dp replicate shard tp pp cp checkpointing float8 reshard stages_per_rank schedule".split()
SHAPE = "dim layers heads kv_heads ffn vocab".split()
Rows = list["Published"]
build = functools.cache(build_on_meta)


class OfOthers(ParallelConfig):
    """Full checkpointing around compiled blocks, as others do it, repeats all."""

    @property
    def repeats_attention(self) -> bool:
        return self.checkpointing == "full"


class Published:
    """A speed that somebody has published, six of them we: each column of the file's row is an
    attribute, digits alone an integer; `assumed` has what the source does not say."""

    def __init__(self, row: dict[str, str]):
        for name, text in row.items():
            value = int(text) if text.isdecimal() else text
            setattr(self, name, value)
        self.measured = float(self.tokens_s_gpu)  # tokens a second and GPU
        given = {name: getattr(self, name) for name in SPLIT}
        given |= dict(compile=bool(self.compile), async_tp=bool(self.async_tp))
        kind = ParallelConfig if self.source.startswith("flatllama") else OfOthers
        parallel = kind(dtype=torch.bfloat16, **given)
        shape = (getattr(self, name) for name in SHAPE)
        model = build(LlamaConfig(*shape, max_seq_len=1 << 20))
        batch = self.microbatches * self.microbatch * self.replicate * self.shard // self.cp
        self.work = Work(model, parallel, batch, self.microbatch, self.seq_len, on_gpu=True)

    def machine(self, reached: dict[str, float]) -> Machine:
        """Return the machine of this row. Where products are in 8 bits, so are the messages of
        others over tp, which flatllama sends in 16: their links count as twice as fast. All of
        its attention takes one kernel."""
        kernel = self.attention.replace("flash", "")
        machine = assumed_machine(self.gpu, self.link, self.per_node, kernel, reached)
        in_8_bits = self.float8 != "none" and self.tp > 1
        return dataclasses.replace(
            machine,
            node_link=machine.node_link * (2 if in_8_bits else 1),
            overlaps=bool(self.overlap),
            flash_fraction=machine.attention_fraction,
        )


def published() -> Rows:
    with PUBLISHED.open() as file:
        return [Published(row) for row in csv.DictReader(file)]


def family(row: Published) -> str:
    return row.source.split()[0]


@functools.cache
def seconds(work, machine) -> float:
    """The project's own formula; most constants do not change most rows."""
    return sum(step_time(work, machine).values())


def log_errors(rows: Rows, reached: dict[str, float]) -> np.ndarray:
    """Return the logarithms of predicted / published speed."""
    errors = []
    for row in rows:
        tokens = row.work.batch * row.seq_len / row.work.parallel.size
        predicted = tokens / seconds(row.work, row.machine(reached))
        errors.append(np.log(predicted / row.measured))
    return np.array(errors)


def residuals(rows: Rows, reached: dict[str, float]) -> np.ndarray:
    """Return what the fit minimizes the squares of."""
    sources = [row.source for row in rows]
    weights = np.array([sources.count(source) ** -0.5 for source in sources])
    distances = [PRIOR * np.log(reached[name] / START[name]) for name in START]
    return np.concatenate([weights * log_errors(rows, reached), distances])


def fit(rows: Rows, reached: dict[str, float], steps: int) -> dict[str, float]:
    """Return better constants than `reached`, by steps of Gauss and Newton."""
    for _ in range(steps):
        now = residuals(rows, reached)
        columns = []
        for name, value in reached.items():
            moved = residuals(rows, reached | {name: value * 1.01})
            columns.append((moved - now) / np.log(1.01))
        logs, *_ = np.linalg.lstsq(np.stack(columns, 1), -now, rcond=None)
        factors = np.exp(np.clip(logs, -0.5, 0.5))
        reached = {name: reached[name] * by for name, by in zip(reached, factors)}
    return reached


def left_out_errors(rows: Rows, without: dict[str, dict[str, float]]) -> np.ndarray:
    """Return predicted / published - 1 of each row, by constants fitted `without` its family."""
    errors = [log_errors([row], without[family(row)])[0] for row in rows]
    return np.expm1(errors)


def table(rows: Rows, fitted: dict[str, float], without: dict) -> list[str]:
    """Return the lines of the table in docs/measured.md."""
    everywhere = np.expm1(log_errors(rows, fitted)), left_out_errors(rows, without)
    lines = [
        "| source | rows | mean, mean size, worst | its family left out |",
        "|---|--:|--:|--:|",
    ]
    for source in dict.fromkeys(row.source for row in rows):
        own = [row.source == source for row in rows]
        cells = [
            f"{e[own].mean():+.0%}, {abs(e[own]).mean():.0%}, {max(e[own], key=abs):+.0%}"
            for e in everywhere
        ]
        lines.append(f"| {source} | {sum(own)} | {cells[0]} | {cells[1]} |")
    return lines


def by_family(rows: Rows, errors: np.ndarray) -> dict[str, np.ndarray]:
    families = np.array([family(row) for row in rows])
    return {name: errors[families == name] for name in dict.fromkeys(families.tolist())}


def spread(rows: Rows, errors: np.ndarray) -> dict[str, float]:
    """Return within how much nine of ten errors are, by kind_of configuration."""
    kinds = np.array([kind_of(row.work.parallel) for row in rows])
    within = {}
    for kind in SPREAD:
        sizes = abs(errors[kinds == kind])
        within[kind] = round(float(np.quantile(sizes, 0.9)), 2)
    return within


def rounded(reached: dict[str, float]) -> dict[str, float]:
    return {name: round(float(value), 3) for name, value in reached.items()}


def main() -> None:
    rows = published()
    fitted = rounded(fit(rows, START, 5))
    without = {}
    for name in dict.fromkeys(map(family, rows)):
        others = [row for row in rows if family(row) != name]
        without[name] = rounded(fit(others, fitted, 3))
    RESULTS.write_text(json.dumps({"fitted": fitted, "without": without}, indent=1) + "\n")
    errors = left_out_errors(rows, without)
    print(f"REACHED = {fitted}", f"SPREAD = {spread(rows, errors)}", sep="\n")
    print(*table(rows, fitted, without), sep="\n")
    sizes = {name: abs(of_family).mean() for name, of_family in by_family(rows, errors).items()}
    print(f"mean of families {np.mean([*sizes.values()]):.1%}, the worst {max(sizes.values()):.1%}")


if __name__ == "__main__":
    main()
