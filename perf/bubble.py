"""The bubble of a pipeline, in which ranks wait, for `bench.py step`: three shares of the time.

    by the schedule alone      if all stages take equally long, and messages no time
    with measured times        if messages take no time: more than the first, as stages are uneven
    measured                   more than the second, as messages take time

--plot FILE.svg draws the measured step.
"""

import argparse
import contextlib
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator

import torch.distributed as dist

from parallel import World
from techniques.pipeline import Pipeline
from techniques.schedules import (
    Action,
    Span,
    bubble,
    check_schedule,
    draw_svg,
    make_schedule,
    simulate,
)

Seconds = dict[Action, float]


@contextlib.contextmanager
def actions_stamped(runner: Pipeline, begin: Callable, end: Callable) -> Iterator[None]:
    """Within this context call begin(action) and end(action) around each action of a pipeline,
    after what it waits for has arrived."""
    compute = runner.compute

    def stamped(action: Action, *given):
        begin(action)
        result = compute(action, *given)
        end(action)
        return result

    runner.compute = stamped
    try:
        yield
    finally:
        del runner.compute  # the attribute, which has hidden the method


def shares_of_bubble(
    world: World, microbatches: int, rounds: list[Seconds], with_messages: float, without: float
) -> str:
    """Return the three shares in words. `rounds` are the times of this rank's actions in several
    steps; `with_messages` and `without` seconds of forward and backward together. All ranks call it
    together."""
    parallel, times = world.parallel, defaultdict(list)
    for seconds in rounds:
        for (kind, _, stage), time in seconds.items():
            times[kind, stage].append(time)
    own = {key: statistics.median(values) for key, values in times.items()}
    of_ranks = [None] * parallel.pp
    dist.all_gather_object(of_ranks, own, world.mesh.get_group("pp"))
    typical = {key: time for of_rank in of_ranks for key, time in of_rank.items()}

    schedule = make_schedule(parallel.schedule, parallel.pp, microbatches, parallel.stages_per_rank)
    stages = parallel.pp * parallel.stages_per_rank
    even = check_schedule(schedule, microbatches, stages)
    timed = simulate(schedule, lambda action: typical[action.kind, action.stage])
    measured = world.all_gather_scalars([1 - without / with_messages]).mean().item()
    return (
        f"of forward and backward, ranks wait for other stages {bubble(even):.1%} by the schedule "
        f"alone, {bubble(timed):.1%} with the measured time of each stage, {measured:.1%} measured"
    )


def draw(args: argparse.Namespace, world: World, spans: list[Span]) -> None:
    """Draw a measured step to --plot on rank 0: of the ranks of its pipeline. `spans` are this
    rank's, in seconds since the step began. All ranks call it together."""
    of_ranks = [None] * world.parallel.pp
    dist.all_gather_object(of_ranks, spans, world.mesh.get_group("pp"))
    if world.rank == 0:
        seconds = max(of_rank[-1].end for of_rank in of_ranks)
        title = f"{args.schedule}, measured: {seconds:.3g} s of forward and backward"
        args.plot.write_text(draw_svg(of_ranks, title))
