"""The hardware that times are predicted for: GPUs and links, as makers' data sheets have them."""

import math
import re
from dataclasses import dataclass
from typing import NamedTuple

from config import ParallelConfig
from costs.shapes import PEAK_FLOPS
from plumbing.messages import UserError
from techniques.float8 import float8_recipes

COPIES = 0.88  # of a data sheet's memory bandwidth: what copies reach on an H200
# What training reaches of the figures of data sheets: of the peak by matrix products and by
# attention (flash kernels, or cuDNN's), and of the links in a node. Fitted to published steps by
# docs/calibrate.py, whose table docs/measured.md has.
FITTED = "2026-11-29"
REACHED = {
    "products a100": 0.742,
    "products h100": 0.588,
    "products h200": 0.63,
    "products b200": 0.538,
    "attention a100": 0.343,
    "attention h100": 0.203,
    "attention b200": 0.388,
    "attention h100 cudnn": 0.516,
    "h100-500w": 0.873,  # the share of both that an H100 with 500 of its 700 W keeps
    "node link": 0.321,
}
# Steps of GPUs that are not in the fit: what is known of them, for the first line of a plan.
ONE_STEP = "only one training on it is known, and none in the fit"
NO_STEP = "no training on it is in the fit: expect it up to twice too fast"


class GPU(NamedTuple):
    """A row of a manufacturer's data sheet."""

    peak_flops: float  # dense, in bfloat16
    memory: float  # GB
    bandwidth: float  # GB/s of its memory
    node_link: float  # GB/s within a node, one way
    capability: tuple[int, int] = (9, 0)  # as CUDA numbers what GPUs can do
    keeps: float = 1.0  # of the rates in REACHED, where a single published step tells
    caveat: str = ""  # why its predictions are not as good as the others


GPUS = {
    "h100": GPU(PEAK_FLOPS["H100"], 80, 3350, 450),
    "h200": GPU(PEAK_FLOPS["H200"], 150, 4800, 450),  # sold as 141 GB; torch finds 150.1e9 bytes
    "b200": GPU(PEAK_FLOPS["B200"], 180, 8000, 900, (10, 0)),
    "a100": GPU(PEAK_FLOPS["A100"], 80, 2039, 300, (8, 0)),
    "l40s": GPU(PEAK_FLOPS["L40S"], 48, 864, 32, (8, 9), caveat=NO_STEP),
    "rtx4090": GPU(PEAK_FLOPS["RTX 4090"], 24, 1008, 32, (8, 9), caveat=NO_STEP),
    "gb200": GPU(PEAK_FLOPS["GB200"], 186, 8000, 900, (10, 0), caveat=NO_STEP),
    # 8B on 8 of them, FSDP, selective, compiled, 8,192 tokens: 5,377 and 8,308 tokens/s a GPU
    # (pytorch/ao docs/source/workflows/training.md @ 2210df8, of August 2025).
    "mi300x": GPU(PEAK_FLOPS["MI300X"], 192, 5300, 448, (0, 0), 0.538, ONE_STEP),
    "b200-capped": GPU(PEAK_FLOPS["B200"], 180, 8000, 900, (10, 0), 0.446, ONE_STEP),
    "h100-500w": GPU(PEAK_FLOPS["H100"], 96, 2400, 450),
    "a100-40": GPU(PEAK_FLOPS["A100"], 40, 1555, 300, (8, 0)),
}


@dataclass(frozen=True)
class Machine:
    """The hardware of one process, from data sheets."""

    name: str
    peak: float  # FLOP/s of dense matrix products in bfloat16
    memory: float  # bytes
    bandwidth: float  # bytes/s of its memory
    node_link: float  # bytes/s to other ranks of the node, one way
    link: float = math.inf  # bytes/s of each GPU to other nodes, one way
    per_node: int = 8
    matmul_fraction: float = 1.0  # of the peak, reached by large matrix products
    attention_fraction: float = 1.0  # of the peak, reached by attention
    flash_fraction: float = 1.0  # likewise within documents, and with cp
    overlaps: bool = True  # whether collectives run beside computation
    recipes: tuple[str, ...] = ()  # of techniques/float8.py, whose products it does twice as fast
    caveat: str = ""

    def refuses(self, parallel: ParallelConfig) -> str:
        """Return why the speed of such a configuration is not known here, or ""."""
        if parallel.float8 in ("none", *self.recipes):
            return ""
        known = " or ".join(self.recipes) or "none"
        return f"{self.name} is not known to gain by {parallel.float8}: give --float8 {known}"


NUMBER = r"(?=[\d.]*[1-9])\d+(?:\.\d+)?"  # regular expression of a decimal above 0


def assumed_machine(
    gpu: str, link: str, per_node: int, kernel: str = "", reached: dict[str, float] = REACHED
) -> Machine:
    """Return the machine that --gpu and --link describe, whose attention is computed by a `kernel`:
    "cudnn" (which H100s take), or "" for flash; that of documents by flash.

    A GPU in numbers is TFLOP/s:GB:GB/s:GB/s. Raises UserError for unknown names."""
    if gpu.lower() in GPUS:
        row = GPUS[gpu.lower()]
    elif re.fullmatch(rf"{NUMBER}(:{NUMBER}){{3}}", gpu):
        teraflops, *others = map(float, gpu.split(":"))
        row = GPU(teraflops * 1e12, *others, caveat=NO_STEP)
    else:
        raise UserError(
            f"no GPU '{gpu}': choose one of {', '.join(GPUS)}, or give its peak, memory, memory "
            f"bandwidth and link within a node as TFLOP/s:GB:GB/s:GB/s, such as 989:80:3350:450"
        )
    fitted = {8: "a100", 10: "b200"}.get(row.capability[0], "h100")  # the GPU whose rates it has
    keeps = reached.get(gpu.lower(), row.keeps)
    products = reached.get(f"products {gpu.lower()}", reached[f"products {fitted}"])
    flash = attention = reached[f"attention {fitted}"]
    if row.capability >= (9, 0):  # AMD's GPUs, and NVIDIA's earlier ones, have flash alone
        attention = reached.get(f"attention {fitted} {kernel}", flash)
    return Machine(
        gpu,
        peak=row.peak_flops,
        memory=row.memory * 1e9,
        bandwidth=row.bandwidth * 1e9 * COPIES,
        node_link=row.node_link * 1e9 * reached["node link"],
        matmul_fraction=products * keeps,
        attention_fraction=attention * keeps,
        flash_fraction=flash * keeps,
        link=link_speed(link),
        per_node=per_node,
        recipes=float8_recipes(row.capability),
        caveat=row.caveat,
    )


def link_speed(text: str) -> float:
    """Return bytes/s of a link given by its speed, such as 400gbit or 50GB, or raise UserError."""
    units = {"mbit": 1e6 / 8, "gbit": 1e9 / 8, "mb": 1e6, "gb": 1e9, "Mb": 1e6 / 8, "Gb": 1e9 / 8}
    match = re.fullmatch(rf"({NUMBER})(mbit|gbit|mb|gb)(/s)?", text, re.IGNORECASE)
    if not match:
        raise UserError(f"no link '{text}': give its speed per GPU, such as 400gbit or 50GB")
    number = float(match[1])
    unit = match[2]  # Mb and Gb are bits; MB, GB, and mb or gb all in small letters, are bytes
    return number * units.get(unit, units[unit.lower()])
