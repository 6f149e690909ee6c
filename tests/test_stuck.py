"""A rank that is stuck is named, with its line, and not those that wait for it."""

import os
import re
import signal
from datetime import timedelta

import pytest
from conftest import Forks, with_fault
from test_crashes import nothing_survives  # noqa: F401 (a fixture)
from test_endings import gone_in_time
from test_train import flags

from plumbing.heartbeats import GRACE
from plumbing.joining import COLLECTIVE_TIMEOUT
from plumbing.stuck import STUCK_AFTER, describe


def report(line: str, waits: bool, size: int = 5, **calls) -> dict:
    """Return a rank's report. Each group is named after its ranks and given as (calls that have
    ended, calls that have not); the latter have this size. So r02=(4, 1) is a group of ranks 0 and
    2, whose calls 1 to 4 have ended, and call 5 has not."""
    groups = {name: [int(rank) for rank in name[1:]] for name in calls}
    listed = [[name, number, "all_reduce", [[5 if number <= ended else size]], number <= ended]
              for name, (ended, more) in calls.items() for number in range(1, ended + more + 1)
             ]  # fmt: skip
    return dict(line=line, waits=waits, groups=groups, calls=listed)


@pytest.mark.parametrize(
    "reports, expected",
    [
        (  # with NCCL the host is ahead, and waits where it needs a result
            [report("train.py:9", True, r012=(20, 9)), report("data.py:4", False, r012=(20, 0)),
             report("train.py:9", True, r012=(20, 9))],
            "ranks 0 2 wait in all_reduce 21 (train.py:9); rank 1 never called it: data.py:4",
        ),
        (  # rank 3 keeps rank 1 waiting, and both keep the others: tp groups (0 1) and (2 3)
            [report("a.py:1", True, r01=(5, 1), r02=(4, 0)),
             report("b.py:2", True, r01=(5, 0), r13=(4, 1)),
             report("a.py:1", True, r02=(4, 0), r23=(5, 1)),
             report("data.py:4", False, r13=(4, 0), r23=(5, 0))],
            "rank 1 waits in all_reduce 5 (b.py:2); rank 3 never called it: data.py:4",
        ),
        (  # the second call of rank 1 is of another size
            [report("train.py:9", True, r012=(1, 1)), report("a.py:4", True, r012=(1, 1), size=3),
             report("train.py:9", True, r012=(1, 1))],
            "ranks 0 2 called all_reduce 2 (train.py:9); rank 1 called all_reduce instead: a.py:4",
        ),
        (  # messages of a pipeline have no number
            [report("pipeline.py:7", True), report("data.py:4", False)],
            "rank 0 waiting at pipeline.py:7; rank 1 computing at data.py:4",
        ),
    ],
    ids=["nccl", "groups", "sizes", "messages"],
)  # fmt: skip
def test_the_rank_that_does_not_wait_itself_is_named(reports, expected):
    assert describe(dict(enumerate(reports))) == expected


def test_a_rank_is_named_before_nccl_ends_all():
    patience = timedelta(seconds=STUCK_AFTER + GRACE)
    assert patience < COLLECTIVE_TIMEOUT / 2  # of NCCL's watchdog


SLEEPS = "time.sleep(999)", "wait in all_gather", "never called it: "
BROADCASTS = (
    "torch.distributed.broadcast(torch.ones(9), 0)",
    "called all_gather",
    "called broadcast instead: ",
)
STOPS = "[time.sleep(3), os.kill(os.getpid(), 19)]", "", ""  # SIGSTOP, after a heartbeat


@pytest.mark.slow
@pytest.mark.parametrize(
    "nodes, more, rank_1",
    [
        ([3], {}, SLEEPS),
        ([3], {}, STOPS),
        ([2, 2], dict(tp=2), BROADCASTS),
        ([2, 2], dict(pp=2, microbatch=1), SLEEPS),
    ],
    ids=["sleeps", "stops", "broadcasts", "sleeps beside a pipeline"],
)
def test_a_rank_that_goes_astray_is_named_with_its_line(corpus, tmp_path, nodes, more, rank_1):
    """In a copy in which a minute is some seconds."""
    does, others, is_said = rank_1
    place = "    gradients, squared_norm_share = own_gradients(optimizer, world.size)"
    fault = f"    if world.rank == 1 and step == 4:\n        import os, time\n        {does}\n"
    worker, copy = with_fault(tmp_path / "copy", "train", place, fault + place)
    short = dict(
        heartbeats=("GRACE", 3),
        joining=("COLLECTIVE_TIMEOUT", "timedelta(seconds=16)"),
        stuck=("STUCK_AFTER", 4),
    )
    for file, (name, value) in short.items():
        path = copy / f"plumbing/{file}.py"
        text, n = re.subn(rf"\n{name} = [^#\n]+", f"\n{name} = {value}  ", path.read_text())
        assert path.write_text(text) and n == 1
    arguments = flags(corpus, tmp_path / "run", steps=9, batch=12, save_every=2, **more)
    run = Forks(worker, copy, "train.py", *arguments, nodes=nodes, timeout=400)
    if rank_1 is STOPS:
        assert gone_in_time(run.ranks[0], 100)
        os.kill(run.ranks[1], signal.SIGKILL)
    err = run.finish().err
    # Each node has said the same.
    (error,) = {*re.findall("^error: (.*); --resume continues from step-00000002$", err, re.M)}
    line = r"([\w/]+\.py):(\d+)"
    if rank_1 is STOPS:
        expected = rf"rank 1 on \S+ \(last at step 3, {line}\) has died or is frozen$"
    else:
        waiting = " ".join(str(rank) for rank in range(sum(nodes)) if rank != 1)
        expected = rf"ranks {waiting} {others} \d+ \([a-z./]+:\d+\); rank 1 {is_said}{line}"
        (told,) = re.findall(r"^no step for \d+ s: (.*)", err, re.M)
        assert re.fullmatch(expected, told), told
    found = re.match(expected, error)
    assert found, error
    assert does in (copy / found[1]).read_text().splitlines()[int(found[2]) - 1], error
