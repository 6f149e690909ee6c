"""Count a planned step of one rank in this process, and tell by how much costs/page.py is off.

`bench.py plan --check` prints it. A run whose --dp auto barely fits asks in a process of its own,
`python -m perf.emulated`, which reads a Work as a pickle and writes one number."""

import pickle
import sys
from dataclasses import replace

from config import Work
from costs.page import holds, sends
from perf.instruments import emulate, markdown_table, needs_real_tensors

MOST_BYTES = 4e9  # of real tensors, where an emulation needs them


def emulated(planned: Work) -> Work | None:
    """Return the step as an emulation runs it, uncompiled on a CPU; None where DDP would need real
    tensors, and too many."""
    parallel = replace(planned.parallel, compile=False)
    work = replace(planned, parallel=parallel, document=0, on_gpu=False)
    return None if needs_real_tensors(parallel) and holds(work)["peak"] > MOST_BYTES else work


def emulation_table(planned: Work) -> list[str]:
    """Return the lines of a table: what rank 0 of a plan sends and holds, predicted and counted.
    The first line says by how much the page is off at the peak."""
    if (work := emulated(planned)) is None:
        dp, most = planned.parallel.dp, MOST_BYTES / 1e9
        return [f"--check: not done: --dp {dp} needs real tensors, here of more than {most:g} GB"]
    (counted_traffic, counted), (traffic, held) = emulate(work), (sends(work, 0), holds(work, 0))
    rows = []
    for dim, collective in sorted(traffic | counted_traffic):
        costs = (source.get((dim, collective), (0, 0)) for source in (traffic, counted_traffic))
        cells = [f"{nbytes:,.0f} bytes in {calls:g} calls" for calls, nbytes in costs]
        rows.append([f"payload of {collective} over {dim}", *cells])
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
    if work and work.parallel.pp == 1:  # the second microbatch needs as much as any later one
        work = replace(work, batch=work.batch * min(2, work.microbatches) // work.microbatches)
    print(emulate(work)[1]["peak"] / holds(work, 0)["peak"] if work else 1.0)
