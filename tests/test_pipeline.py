"""Pipelines: schedules are proved, and wrong ones are told."""

import re
import xml.etree.ElementTree as ET

import pytest
from conftest import launch, refused

from techniques import schedules
from techniques.schedules import SCHEDULES, check_schedule, make_schedule, read_schedule

# What each schedule's docstring says: how many microbatches a rank holds.
HOLDS = {
    "gpipe": lambda rank, p, m, v: m,
    "1f1b": lambda rank, p, m, v: min(m, p - rank),
    "interleaved": lambda rank, p, m, v: min(m * v, 2 * (p - 1 - rank) + (v - 1) * p + 1),
    "zero-bubble": lambda rank, p, m, v: min(m, p),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedules_hold_and_wait_as_they_say(name):
    """For up to 8 ranks, 32 microbatches and 4 stages of a rank; check_schedule proves each."""
    for p in range(1, 9):
        for m in range(1, 33):
            if name == "interleaved" and m % p:
                continue
            for v in range(1, 5) if name == "interleaved" else (1,):
                schedule = make_schedule(name, p, m, v)
                timeline = check_schedule(schedule, m, p * v)
                for rank, order in enumerate(schedule):
                    held = schedules.held(order)
                    assert held == HOLDS[name](rank, p, m, v)
                    assert held == schedules.most_held(name, p, m, v, rank, has_w=True)
                waits = p - 1 + max(0, p - m) if name == "zero-bubble" else 3 * (p - 1)
                end = max(spans[-1].end for spans in timeline)  # ticks of a v-th of a stage each
                assert end == 3 * m * v + waits
                assert schedules.bubble(timeline) == pytest.approx(1 - 3 * m * v / end)


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_picture_in_a_docstring_is_the_schedule(name):
    m, v = (2, 2) if name == "interleaved" else (4, 1)
    lines = re.findall(r"^ +(rank .*)$", SCHEDULES[name].__doc__, re.MULTILINE)
    timeline = check_schedule(make_schedule(name, 2, m, v), m, 2 * v)
    assert lines == schedules.draw_text(timeline).splitlines()


@pytest.mark.parametrize(
    "m, lines, says",
    [
        (1, ["F0 B0", "F0 B0 F1"], "rank 1, position 3: F1@1 is not for this rank"),
        (1, ["F0 B0 B0", "F0 B0"], "rank 0, position 3: B0@0 was there before"),
        (1, ["B0 F0", "F0 B0"], "rank 0, position 1: B0@0 comes before F0@0"),
        (1, ["F0 B0 W0", "F0 W0 B0"], "rank 1, position 2: W0@1 comes before B0@1"),
        (1, ["F0 B0", "F0"], "rank 1, position 2: B0@1 is missing"),
        (1, ["F0 B0 W0", "F0 B0"], "rank 1, position 3: W0@1 is missing"),
        (1, ["F0 B0@1", "F0 B0"], "rank 0, position 2: B0@1 is not for this rank"),
        (1, ["F0 B-1", "F0 B0"], "rank 0, position 2: 'B-1' is no action such as F0 or B0@2"),
        # Rank 0 wants a gradient before it sends microbatch 1, and rank 1 this before that.
        (2, ["F0 B0 F1 B1", "F0 F1 B0 B1"], "position 2: B0@0 waits for B0@1, which rank 1"),
    ],
)
def test_wrong_schedules_are_told(m, lines, says):
    with pytest.raises(ValueError, match=re.escape(says)):
        check_schedule(read_schedule(lines), m, 2)


def test_the_command_draws(tmp_path):
    file, picture = tmp_path / "a & b.txt", tmp_path / "x.svg"
    given = ["--stages", 2, "--microbatches", 2, "--schedule", file]
    file.write_text("# Warmup\nF0 F1 B0 W0 B1 W1\nF0 B0 W0 F1 B1 W1  # the last stage\n")
    result = launch("techniques/schedules.py", *given, "--plot", picture)
    assert result.out.startswith("rank 0 F0 F1 .  B0 W0 .  B1 W1\n"), result.out
    assert "25.0% of the time is waiting" in result.out and "hold 2, 1 microbatches" in result.out
    assert len(ET.parse(picture).findall("{http://www.w3.org/2000/svg}rect")) == 12
    wrong = launch("techniques/schedules.py", "--stages", 3, "--schedule", file)
    refused(wrong, "has 2 lines, and 3 ranks")
