"""parallel.py: what is sent, and how a world of processes begins and ends."""

import json

from conftest import succeed


def test_ddp_sends_each_gradient_once_a_step_and_nothing_else():
    """4 bytes a parameter, with 1 microbatch as with 4, and the 32 bytes of a step's sums."""
    result = succeed("tests/workers/count_collectives.py", nproc=2)
    whole, accumulated = (json.loads(line) for line in result.out.splitlines())
    for step in (whole, accumulated):
        gradients = [sum(sizes) for name, sizes in step["seen"] if name == "allreduce_"]
        assert sum(gradients) == 4 * step["parameters"]
        others = [(name, sizes[-1]) for name, sizes in step["seen"] if name != "allreduce_"]
        assert others == [("allgather_", 32)]


def test_one_process_sends_nothing():
    result = succeed("tests/workers/count_collectives.py", nproc=0)
    steps = [json.loads(line) for line in result.out.splitlines()]
    for step in steps:
        assert [name for name, _ in step["seen"]] == ["allgather_"]  # to itself
    assert len(steps) == 2
