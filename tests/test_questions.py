"""perf/questions.py: what a run takes, against failures that are drawn, and against brute force."""

import random
import re

import pytest
from conftest import succeed

from perf.questions import best_interval, goodput

SAVE, RESTART, MTBF = 60.0, 600.0, 20_000.0


def drawn_goodput(interval: float, hours: float = 20_000) -> float:
    """Train `interval` seconds, save, and so on, while failures come at random."""
    draw, now, trained = random.Random(0), 0.0, 0.0
    failure = draw.expovariate(1 / MTBF)
    while now < hours * 3600:
        end = now + interval + SAVE
        if failure > end:
            now, trained = end, trained + interval
            continue
        now = failure
        while (failure := now + draw.expovariate(1 / MTBF)) < now + RESTART:
            now = failure
        now += RESTART
    return trained / now


@pytest.mark.parametrize("interval", [300, 1500, 6000])
def test_goodput_is_that_of_failures_at_random(interval):
    expected = goodput(interval, SAVE, RESTART, MTBF)
    assert drawn_goodput(interval) == pytest.approx(expected, rel=0.01)


def test_no_other_interval_trains_more():
    for save in (1.0, 60.0, 600.0):
        best = max(range(20, 20_000, 10), key=lambda t: goodput(t, save, RESTART, MTBF))
        assert best_interval(save, MTBF) == pytest.approx(best, rel=0.01, abs=10)


def test_answers_about_a_run(tmp_path):
    """8B on 16 GPUs: days times GPUs are hours, hours times dollars the cost; a picture has a point
    for every number of GPUs."""
    picture = tmp_path / "gpus.svg"
    out = succeed("bench.py", "plan", "--gpus", 16, "--shard", 16, "--tp", 1, "--pp", 1,
                  "--batch", "32:128", "--tokens", "1e12", "--dollars", 2, "--mtbf", 1000,
                  "--evidence").out  # fmt: skip
    assert re.match(r"Tokens/s per GPU by --batch: 32: [\d,]+, 64: [\d,]+, 128: [\d,]+\.", out)
    (told,) = re.findall(r"1e\+12 tokens take (.*) days ±\d+%, (.*) GPU-hours, \$(.*)\.\n", out)
    days, hours, dollars = (float(text.replace(",", "")) for text in told)
    assert hours == pytest.approx(days * 24 * 16, rel=0.01)
    assert dollars == pytest.approx(2 * hours, rel=0.01)
    (share,) = re.findall(r"(\S+)% of the time trains", out)
    (speed,) = re.findall(r"([\d,]+) tokens/s per GPU", out)
    seconds = 1e12 / (16 * float(speed.replace(",", ""))) / (float(share) / 100)
    assert days == pytest.approx(seconds / 86400, rel=0.01)
    assert "one of 2 fails every 500.0 h" in out
    assert re.search(r"with links half as fast \+\d+%, with attention at 0.5 of the peak -\d", out)
    rows = [line for line in out.splitlines() if "llama3_h100_202412" in line]
    assert rows and all(re.search(r"[+-]\d+% \|$", row) for row in rows)
    succeed("bench.py", "plan", "--model", "llama3.2-1b", "--gpus", 4, "--plot", picture)
    assert picture.read_text().count("<circle") == 2 * picture.read_text().count(" GPUs<") > 4
