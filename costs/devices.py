"""What the makers' data sheets say of GPUs, and of links between nodes."""

import re
from typing import NamedTuple

# Dense peaks in bfloat16, FLOP/s. The first name that matches counts. Those of them that multiply
# in 8 bits reach twice as much there, by the same data sheets.
PEAK_FLOPS = {
    "GB200": 2.5e15,
    "B200": 2.25e15,
    "GH200": 989.4e12,
    "H200 NVL": 835e12,
    "H200": 989.4e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989.4e12,
    "H20": 148e12,
    "A100": 312e12,
    "A10G": 70e12,
    "A10": 125e12,
    "L40S": 362e12,
    "L40": 181e12,
    "L4": 121e12,
    "RTX 4090": 165.2e12,
    "RTX 3090": 71e12,
    "MI325X": 1307.4e12,
    "MI300X": 1307.4e12,
    "MI250X": 191.5e12,  # of one of its two dies: torch counts each as a device
}


def peak_flops(device_name: str) -> float | None:
    """Return the peak of a device by its name, None if it is not known: MFU is never guessed."""
    for name, peak in PEAK_FLOPS.items():
        # "RTX 4090 Laptop" and "RTX 4090 D" are slower than what the table means.
        if re.search(rf"\b{name}\b(?! (Laptop|D\b))", device_name):
            return peak
    return None


class GPU(NamedTuple):
    """A row of a manufacturer's data sheet."""

    peak_flops: float  # dense, in bfloat16
    memory: float  # GB
    bandwidth: float  # GB/s of its memory
    node_link: float  # GB/s within a node, one way
    capability: tuple[int, int] = (9, 0)  # as CUDA numbers what GPUs can do


GPUS = {
    "h100": GPU(PEAK_FLOPS["H100"], 80, 3350, 450),
    "h200": GPU(PEAK_FLOPS["H200"], 141, 4800, 450),
    "b200": GPU(PEAK_FLOPS["B200"], 180, 8000, 900, (10, 0)),
    "a100": GPU(PEAK_FLOPS["A100"], 80, 2039, 300, (8, 0)),
    "l40s": GPU(PEAK_FLOPS["L40S"], 48, 864, 32, (8, 9)),
    "rtx4090": GPU(PEAK_FLOPS["RTX 4090"], 24, 1008, 32, (8, 9)),
    "mi300x": GPU(PEAK_FLOPS["MI300X"], 192, 5300, 448, (0, 0)),
}
LINKS = {"ndr": 400e9 / 8, "hdr": 200e9 / 8, "edr": 100e9 / 8, "efa-p5": 400e9 / 8}  # bytes/s
