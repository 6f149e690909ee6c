"""What the commands of bench.py print and write of their measurements."""

import json
import statistics
from collections.abc import Iterable
from datetime import datetime
from pathlib import Path

import torch

from config import ParallelConfig
from costs.page import Traffic
from plumbing.messages import is_rank_zero
from plumbing.new_files import write_atomically
from plumbing.processes import Process
from runs.records import describe_traffic


def quartiles(values: Iterable[float]) -> list[float]:
    """Return the lower quartile, the median and the upper quartile."""
    values = list(values)
    return statistics.quantiles(values, n=4) if len(values) > 1 else values * 3


def markdown_table(headings: list[str], rows: list[list]) -> list[str]:
    """Return the lines of a table in Markdown, aligned right but for the first column."""
    first, *others = [f"| {' | '.join(map(str, row))} |" for row in [headings, *rows]]
    return [first, "|---|" + "--:|" * (len(headings) - 1), *others]


def megabytes(nbytes: float | None) -> str:
    return "-" if nbytes is None else f"{nbytes / 1e6:,.2f} MB"


def traffic_in_words(traffic: Traffic | None, parallel: ParallelConfig) -> str:
    unknown = "an unknown amount: blocks are compiled"
    return unknown if traffic is None else describe_traffic(traffic, parallel)


def describe_machine(process: Process) -> dict:
    """Return the part of a JSON report that says where and when something was measured."""
    on_gpu = process.device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(process.device) if on_gpu else "cpu",
        "ranks": process.size,
        "per_node": process.per_node,
        "torch": str(torch.__version__),
        "date": datetime.now().astimezone().isoformat(timespec="seconds"),
    }


def write_json(file: Path | None, results: object) -> None:
    """Write results on rank 0, if a flag names a file for them."""
    if file and is_rank_zero():
        write_atomically(file, json.dumps(results, indent=1, default=str) + "\n")
