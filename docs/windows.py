"""Measure attention in windows, and beside sinks: CPU seconds, and bytes saved for backward.

    OMP_NUM_THREADS=1 python docs/windows.py

One thread, in turns; forward and backward of one layer in float32. docs/measured.md has a run.
"""

import math
import runpy
import sys
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from torch import Tensor  # noqa: E402

from model import attend  # noqa: E402
from techniques.windows import attend_within  # noqa: E402

T, W, H, KV, E = 2048, 128, 8, 2, 64
ROUNDS = 5
attend_with_sinks = runpy.run_path(str(ROOT / "tests/changes/sinks.py"))["attend_with_sinks"]
SINKS = torch.zeros(H, requires_grad=True)


def by_a_mask(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    ones = torch.ones(T, T, dtype=torch.bool)
    return attend(q, k, v, ones.tril().triu(1 - W))


def sinks_as_scores(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Write the scores out, as transformers does where a kernel knows no sinks."""
    keys = k.repeat_interleave(H // KV, 2).transpose(1, 2)
    values = v.repeat_interleave(H // KV, 2).transpose(1, 2)
    scores = q.transpose(1, 2) @ keys.mT / math.sqrt(E)
    later = torch.ones(T, T, dtype=torch.bool).triu(1)
    scores = scores.masked_fill(later, -math.inf)
    with_sink = torch.cat([scores, SINKS[:, None, None].expand(1, H, T, 1)], 3).softmax(3)
    return (with_sink[..., :-1] @ values).transpose(1, 2)


WAYS = {
    "to all earlier tokens": lambda q, k, v: attend(q, k, v, None),
    "a window by a mask of T x T": by_a_mask,
    "a window, folded": lambda q, k, v: attend_within(q, k, v, None, W),
    "sinks as scores": sinks_as_scores,
    "sinks as a key": lambda q, k, v: attend_with_sinks(q, k, v, None, SINKS),
}


def measure(way: Callable) -> tuple[float, int]:
    """Return the CPU seconds of forward and backward, and the bytes that backward needs."""
    q = torch.randn(1, T, H, E, requires_grad=True)
    k, v = (torch.randn(1, T, KV, E, requires_grad=True) for _ in range(2))
    storages = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    started = time.process_time()
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        out = way(q, k, v)
    out.sum().backward()
    return time.process_time() - started, sum(storages.values())


def main() -> None:
    torch.set_num_threads(1)
    seconds = {name: math.inf for name in WAYS}
    saved = {}
    for _ in range(ROUNDS):
        for name, way in WAYS.items():
            taken, saved[name] = measure(way)
            seconds[name] = min(seconds[name], taken)
    print(f"T {T:,}, W {W}, H {H}, KV {KV}, E {E}: the least of {ROUNDS} rounds")
    for name in WAYS:
        print(f"{name:30} {seconds[name]:6.3f} CPU s {saved[name] / 1e6:8.1f} MB saved")


if __name__ == "__main__":
    main()
