"""Count a planned step of one rank in this process, and tell by how much costs/page.py is off.

`bench.py plan --check` prints it. A run whose --dp auto barely fits asks in a process of its own,
`python -m perf.emulated`, which reads a Work as a pickle and writes one number."""

import pickle
import sys
from dataclasses import replace

from config import Work
from costs.page import holds, sends
from perf.instruments import emulate, needs_real_tensors
from perf.reports import markdown_table

MOST_BYTES = 4e9  # of real tensors, where an emulation needs them


def emulated(planned: Work) -> Work | None:
    """Return the step as an emulation runs it, uncompiled on a CPU; None where DDP would need real
    tensors, and too many."""
    parallel = replace(planned.parallel, compile=False)
    work = replace(planned, parallel=parallel, document=0, on_gpu=False)
    if needs_real_tensors(parallel) and holds(work)["peak"] > MOST_BYTES:
        return None
    return work


def emulation_table(planned: Work) -> list[str]:
    """Return the lines of a table: what rank 0 of a plan sends and holds, predicted and counted.
    The first line says by how much the page is off at the peak."""
    work = emulated(planned)
    if work is None:
        return [
            f"--check: not done: --dp {planned.parallel.dp} needs real tensors, here of more than "
            f"{MOST_BYTES / 1e9:g} GB"
        ]
    counted_traffic, counted = emulate(work)
    traffic = sends(work, 0)
    held = holds(work, 0)
    rows = []
    for key in sorted(traffic | counted_traffic):
        dim, collective = key
        row = [f"payload of {collective} over {dim}"]
        for source in (traffic, counted_traffic):
            calls, nbytes = source.get(key, (0, 0))
            row.append(f"{nbytes:,.0f} bytes in {calls:g} calls")
        rows.append(row)
    for kind, nbytes in counted.items():
        rows.append([kind, f"{held[kind]:,.0f} bytes", f"{nbytes:,} bytes"])
    off = f"{held['peak'] / counted['peak'] - 1:+.1%}"
    return [
        f"The predicted peak is {off} off that of an emulated step, uncompiled on a CPU:",
        "",
        *markdown_table(["emulated, in one process", "predicted", "counted"], rows),
    ]


if __name__ == "__main__":
    work = emulated(pickle.load(sys.stdin.buffer))
    ratio = 1.0
    if work:
        if work.parallel.pp == 1:  # the second microbatch needs as much as any later one
            few = min(2, work.microbatches)
            work = replace(work, batch=work.batch * few // work.microbatches)
        _, counted = emulate(work)
        ratio = counted["peak"] / holds(work, 0)["peak"]
    print(ratio)
