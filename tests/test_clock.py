"""labs/machinery/clock.py: times against some worked out by hand, and against costs/seconds.py."""

import xml.etree.ElementTree as ET
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from config import ParallelConfig, Work
from costs.machines import assumed_machine
from costs.seconds import collective_time, compute_time
from labs.machinery.clock import COLLECTIVES, Clock
from model import Llama, LlamaConfig

RANKS = 16
MACHINE = replace(assumed_machine("h100", "25gbit", 8), peak=1e12, matmul_fraction=0.5)
MESH = ParallelConfig(replicate=RANKS)
MATRIX = torch.ones(10, 10)  # a product of two: 2,000 FLOPs
VALUES = torch.ones(1000)  # 4,000 bytes
# With these scales a product takes 2 ms, and an all-reduce of VALUES 10 us, and twice (14 x 1 us in
# nodes, 2 x 5 us across, and 15/16 of 40 MB at 8 x 3.125 GB/s, which is 1.5 ms).
SCALES = dict(flops_scale=5e5, bytes_scale=1e4)
PRODUCT, ALL_REDUCE = 2e-3, 3.058e-3


@pytest.fixture(scope="module", autouse=True)
def four_ranks():
    """torch's fake process group: rank 0 of 4, whose collectives return at once."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    yield
    dist.destroy_process_group()


@pytest.fixture
def clock():
    with Clock(MACHINE, RANKS, **SCALES) as clock:
        yield clock


def multiply(times: int = 1) -> None:
    for _ in range(times):
        MATRIX @ MATRIX


def test_a_collective_beside_products(clock):
    multiply()
    work = dist.all_reduce(VALUES.clone(), async_op=True)
    multiply()
    assert clock.now == pytest.approx(2 * PRODUCT) and len(clock.under_way) == 1
    work.wait()
    assert clock.now == pytest.approx(PRODUCT + ALL_REDUCE) and not clock.under_way
    starts = [(s.lane, s.name, *(round(1e6 * t) for t in (s.start, s.end))) for s in clock.spans]
    assert starts == [
        ("compute", "forward", 0, 2000),
        ("network", "all-reduce", 2000, 5058),
        ("compute", "forward", 2000, 4000),
    ]


def test_a_collective_that_products_hide(clock):
    work = dist.all_reduce(VALUES.clone(), async_op=True)
    multiply(2)
    for _ in range(2):
        work.wait()
        assert clock.now == pytest.approx(2 * PRODUCT)


def test_the_network_has_one_collective_at_a_time(clock):
    first, second = (dist.all_reduce(VALUES.clone(), async_op=True) for _ in range(2))
    first.wait()
    assert clock.now == pytest.approx(ALL_REDUCE)
    assert clock.end == pytest.approx(2 * ALL_REDUCE)
    second.wait()
    assert clock.now == pytest.approx(2 * ALL_REDUCE)


WHOLE, PART = torch.ones(4, 250), torch.ones(250)
CALLS = [
    ("all_reduce", "all-reduce", [WHOLE]),
    ("all_gather", "all-gather", [list(WHOLE), PART]),
    ("all_gather_into_tensor", "all-gather", [WHOLE.view(-1), PART]),
    ("reduce_scatter", "reduce-scatter", [PART, list(WHOLE)]),
    ("reduce_scatter_tensor", "reduce-scatter", [PART, WHOLE.view(-1)]),
    ("broadcast", "broadcast", [WHOLE, 0]),
]


@pytest.mark.filterwarnings("ignore:.* is deprecated:FutureWarning")
@pytest.mark.parametrize("async_op", [False, True])
@pytest.mark.parametrize("name, collective, arguments", CALLS, ids=[name for name, *_ in CALLS])
def test_each_collective_takes_what_the_roofline_says(name, collective, arguments, async_op, clock):
    work = getattr(dist, name)(*arguments, async_op=async_op)
    if async_op:
        assert clock.now == 0
        work.wait()
    assert clock.now == collective_time(collective, 4e7, "replicate", MESH, MACHINE)
    assert {name for name, *_ in CALLS} == COLLECTIVES.keys()


def test_a_model_takes_as_long_as_its_products():
    config = LlamaConfig(16, 3, 4, 2, 24, vocab_size=101)
    model, tokens = Llama(config), torch.zeros(2, 13, dtype=torch.int64)
    model.init_weights(0)
    with Clock(MACHINE, RANKS) as clock:
        model(tokens, tokens).backward()
    parts = compute_time(Work(model, ParallelConfig(), 2, 2, 13), MACHINE)
    assert clock.now == pytest.approx(parts["products"], rel=1e-12)
    assert {span.name for span in clock.spans} == {"forward", "backward"}
    assert [s.start for s in clock.spans[1:]] == [s.end for s in clock.spans[:-1]]


def test_what_the_clock_does_not_see_is_refused(clock):
    pair = dist.new_group([0, 1])
    for call, says in (
        (dist.barrier, "does not time barrier"),
        (lambda: dist.group.WORLD.allreduce([VALUES.clone()]), "does not time allreduce_"),
        (lambda: dist.send(VALUES, 1), "does not time send"),
        (lambda: dist.all_reduce(VALUES, group=pair), "times all_reduce over all ranks only"),
    ):
        with pytest.raises(RuntimeError, match=says):
            call()
    assert not clock.spans and clock.now == 0


def test_functions_are_put_back():
    original = dist.all_reduce
    with pytest.raises(ZeroDivisionError), Clock(MACHINE, RANKS):
        assert dist.all_reduce is not original
        1 / 0  # noqa: B018
    assert dist.all_reduce is original


def draw(clock) -> None:
    """Forward and backward of a product, two collectives in backward, and one beside nothing."""
    weight = torch.ones(10, 10, requires_grad=True)
    (MATRIX @ weight).sum().backward()
    works = [dist.all_reduce(VALUES.clone(), async_op=True) for _ in range(2)]
    multiply(2)
    for work in works:
        work.wait()


def test_a_timeline_as_text(clock):
    draw(clock)
    assert round(1e6 * clock.now) == 10116
    compute, network, axis = clock.draw_text(40).splitlines()
    assert compute == "compute  " + "F" * 8 + "B" * 8 + "F" * 16 + "." * 8
    assert network == "network  " + "." * 16 + "1" * 12 + "2" * 12
    assert axis.split() == ["0", "2", "4", "6", "8", "10", "ms"]
    assert axis.index("10") == len("compute  ") + 40
    clock.restart()
    for _ in range(200):
        dist.all_reduce(VALUES.clone())
    assert clock.draw_text(40).splitlines()[1] == "network  " + "+" * 40


def test_a_timeline_as_a_picture(clock):
    draw(clock)
    root = ET.fromstring(clock.draw_svg("a & b"))
    width, height = map(int, root.get("viewBox").split()[2:])
    name = "{http://www.w3.org/2000/svg}"
    boxes = [{k: float(r.get(k)) for k in ("x", "y", "width", "height")}
             for r in root.findall(f"{name}rect")]  # fmt: skip
    assert len(boxes) == 5
    assert all(b["x"] >= 0 and b["x"] + b["width"] <= width for b in boxes)
    assert all(b["y"] >= 0 and b["y"] + b["height"] <= height for b in boxes)
    assert all(28 <= float(tick.get("x")) <= width - 28
               for tick in root.findall(f"{name}text[@text-anchor]"))  # fmt: skip
    texts = [text.text for text in root.findall(f"{name}text")]
    assert texts[:2] == ["a & b", "compute"] and {"forward", "backward", "1", "2"} <= {*texts}
    assert texts[-1] == "10 ms"
