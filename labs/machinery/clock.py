"""A virtual clock: real tensors on this machine, in the time of a cluster.

    machine = assumed_machine("h100", "25gbit", per_node=8)  # of costs/seconds.py
    with Clock(machine, ranks=64) as clock:
        model(x).backward()  # and collectives, on a few ranks of this machine or on one
    print(clock.now, clock.draw_text(), sep="\\n")

The code runs here, with all its numbers. The clock adds up what it would take on one of `ranks`
GPUs that all do the same. It has two lanes, with the prices of costs/seconds.py:

    compute    matrix products one after the other, FLOPs / rate; other operators take no time
    network    collectives one after the other, each for collective_time

An asynchronous collective starts when it is called and the network is free; its wait() moves the
compute lane to its end. A synchronous one is waited for at once. How fast this machine is, and what
runs beside, has no influence: two runs of the same code give the same times, to the last bit.

Tensors here are small. With `flops_scale` and `bytes_scale`, the FLOPs and bytes that each stands
for, a small model takes the time of a large one: if D is 1/256 of Llama 8B's, a matrix has 1/65,536
of the elements; so in float64 a byte of it stands for 65,536 x 2/8 bytes in bfloat16.

The clock sees collectives of all ranks that Python calls as torch.distributed.NAME. Others, such as
DistributedDataParallel's, raise an error: what it does not see would cost nothing.
"""

from collections.abc import Callable
from itertools import pairwise
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from config import ParallelConfig
from costs.machines import Machine
from costs.seconds import collective_time
from techniques import schedules as timeline

# Functions of torch.distributed -> the collective that collective_time knows.
COLLECTIVES = {
    "all_reduce": "all-reduce",
    "all_gather": "all-gather",
    "all_gather_into_tensor": "all-gather",
    "reduce_scatter": "reduce-scatter",
    "reduce_scatter_tensor": "reduce-scatter",
    "broadcast": "broadcast",
}
LANES = ["compute", "network"]
KINDS = {
    "forward": "F",
    "backward": "B",
}  # what is computed -> its colour in techniques/schedules.py
SYMBOLS = "123456789abcdefghijklmnopqrstuvwxyz"  # of collectives in a text, in turn


class Span(NamedTuple):
    """From when to when something ran, in seconds."""

    lane: str  # compute or network
    name: str  # forward, backward, or the collective's
    start: float
    end: float


class Clock(TorchDispatchMode):
    """A context in which products and collectives move a virtual clock; see the head of this file.

    `now` is the time of the compute lane, `spans` lists what ran, in the order of calls, and
    `under_way` the collectives that have not been waited for."""

    def __init__(
        self, machine: Machine, ranks: int, flops_scale: float = 1.0, bytes_scale: float = 1.0
    ):
        super().__init__()
        self.machine, self.parallel = machine, ParallelConfig(replicate=ranks)
        self.flops_scale, self.bytes_scale = flops_scale, bytes_scale
        self.in_call = False  # of a function of COLLECTIVES
        self.restart()

    def restart(self) -> None:
        """Set the clock to 0 and forget what ran."""
        self.now = self.network_free = 0.0
        self.spans: list[Span] = []
        self.under_way: list[TimedWork] = []

    def __enter__(self):
        self.originals = {name: getattr(dist, name) for name in COLLECTIVES}
        for name, function in self.originals.items():
            setattr(dist, name, self._timed(name, function))
        return super().__enter__()

    def __exit__(self, *exception):
        for name, function in self.originals.items():
            setattr(dist, name, function)
        return super().__exit__(*exception)

    def _timed(self, name: str, function: Callable) -> Callable:
        """Return a function of torch.distributed that moves the clock as well."""

        def call(*args, **kwargs):
            values = (*args, *kwargs.values())
            for group in values:
                if isinstance(group, dist.ProcessGroup) and group.size() < dist.get_world_size():
                    raise RuntimeError(f"the clock times {name} over all ranks only")
            self.in_call = True
            try:
                work = function(*args, **kwargs)
            finally:
                self.in_call = False
            # The payload is the larger side: an all-gather's output, a reduce-scatter's input.
            sides = (sum(getattr(t, "nbytes", 0) for t in tree_leaves(value)) for value in values)
            timed = TimedWork(work, self, self._send(COLLECTIVES[name], max(sides)))
            return timed if work else timed.wait()

        return call

    def _send(self, collective: str, nbytes: int) -> float:
        """Put a collective into the network's lane. Return when it ends."""
        nbytes *= self.bytes_scale
        seconds = collective_time(collective, nbytes, "replicate", self.parallel, self.machine)
        start = max(self.now, self.network_free)
        self.network_free = start + seconds
        self.spans.append(Span("network", collective, start, self.network_free))
        return self.network_free

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        if op.namespace in ("c10d", "_c10d_functional") and not self.in_call:
            raise RuntimeError(
                f"the clock does not time {op._opname}: call one of {', '.join(COLLECTIVES)}, as "
                f"functions of torch.distributed"
            )
        result = op(*args, **(kwargs or {}))
        if seconds := self._product_time(op, args, result):
            is_backward = torch._C._current_graph_task_id() >= 0  # autograd is at work
            start, self.now = self.now, self.now + seconds
            name = "backward" if is_backward else "forward"
            self.spans.append(Span("compute", name, start, self.now))
        return result

    def _product_time(self, op, args: tuple, result: object) -> float:
        """Return the seconds of an operator, 0 if it is no matrix product."""
        peak = self.machine.peak / self.flops_scale
        if "scaled_dot_product" in op._opname:  # attention, causal here: half of the square
            is_backward = op._opname.endswith("_backward")
            q, k = args[is_backward : is_backward + 2]  # [B, H, T, E]; before them, the gradient
            flops = (5 if is_backward else 2) * q.numel() * k.shape[2]
            return flops / (peak * self.machine.attention_fraction)
        formula = flop_registry.get(op._overloadpacket)
        flops = formula(*args, out_val=result) if formula else 0
        return flops / (peak * self.machine.matmul_fraction)

    # ------------------------------------------------------------------------------------ drawing

    @property
    def end(self) -> float:
        """When all has ended, also what was not waited for."""
        return max([self.now, *(span.end for span in self.spans)])

    def draw_text(self, columns: int = 72) -> str:
        """Return a line for each lane, with a column for each slice of time, and an axis.

        F is forward, B backward, 1 2 3 ... a b c are collectives, + is several, . is idle."""
        slices = list(pairwise(self.end * column / columns for column in range(columns + 1)))
        lines = [f"{lane}  {''.join(_symbol(boxes, *part) for part in slices)}"
                 for lane, boxes in self._boxes().items()]  # fmt: skip
        axis = ""
        for time, label in self._ticks().items():
            column = len(f"{LANES[0]}  ") + round(columns * time / self.end)
            axis = axis.ljust(column) + label
        return "\n".join([*lines, axis])

    def draw_svg(self, title: str) -> str:
        """Return a picture: forward blue, backward orange, collectives green."""
        rows = []
        for boxes in self._boxes().values():
            actions = (timeline.Action(KINDS.get(box.name, "W"), box.name, 0) for box in boxes)
            rows.append([timeline.Span(a, box.start, box.end) for a, box in zip(actions, boxes)])
        return timeline.draw_svg(rows, title, LANES, self._ticks())

    def _boxes(self) -> dict[str, list[Span]]:
        """Return what is drawn in each lane: products that follow each other as one box, and
        collectives, whose names are their numbers."""
        boxes = {lane: [] for lane in LANES}
        for span in self.spans:
            lane = boxes[span.lane]
            if span.lane == "network":
                lane.append(span._replace(name=str(len(lane) + 1)))
            elif lane and (lane[-1].name, lane[-1].end) == (span.name, span.start):
                lane[-1] = lane[-1]._replace(end=span.end)
            else:
                lane.append(span)
        return boxes

    def _ticks(self) -> dict[float, str]:
        """Return round times for an axis, with labels in milliseconds."""
        steps = (digit * 10.0**power for power in range(-6, 6) for digit in (1, 2, 5))
        step = next(step for step in steps if 8 * step >= 1e3 * self.end)
        ticks = [i * step for i in range(int(1e3 * self.end / step) + 1)]
        labels = [f"{tick:g}" for tick in ticks]
        labels[-1] += " ms"
        return {tick / 1e3: label for tick, label in zip(ticks, labels)}


def _symbol(boxes: list[Span], start: float, end: float) -> str:
    """Return the symbol of what fills most of a slice of time."""
    shares = {box: min(end, box.end) - max(start, box.start) for box in boxes}
    shares = {box: seconds for box, seconds in shares.items() if seconds > 0}
    if sum(shares.values()) < (end - start) / 2:
        return "."
    name = max(shares, key=shares.get).name
    symbol = KINDS.get(name) or SYMBOLS[(int(name) - 1) % len(SYMBOLS)]
    return symbol if len(shares) <= 2 else "+"


class TimedWork:
    """What an asynchronous collective returned, whose wait() moves the clock."""

    def __init__(self, work: dist.Work | None, clock: Clock, end: float):
        self.work, self.clock, self.end = work, clock, end
        clock.under_way.append(self)

    def wait(self, *args) -> bool | None:
        """Wait for the collective, here and on the clock."""
        if self in self.clock.under_way:
            self.clock.under_way.remove(self)
        self.clock.now = max(self.clock.now, self.end)
        return self.work.wait(*args) if self.work else None

    def __getattr__(self, name: str):
        return getattr(self.work, name)
