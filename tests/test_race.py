"""labs/race.py: an entry and the project in turns, and a verdict with its noise.

A race of the project against itself has the gain 0; verdicts are those of sums that are given."""

import os
import signal
import subprocess
import threading
from argparse import Namespace
from random import Random

import pytest
from conftest import CHANGES, changed_copy, wait_for_lines
from test_endings import gone_in_time

from labs import race
from labs.machinery.launch import launch
from labs.race import Result, verdict

TINY = "--steps 3 --warmup 1 --batch 2 --seq-len 16 --dim 16 --ffn-dim 16 --n-layers 1 --n-heads 2"


def results(*scores: float, seconds: float = 100) -> list[Result]:
    return [Result(score, seconds, 9) for score in scores]


def test_verdicts():
    for entry, says in (
        (results(1.4, 1.41, 1.39), "gain 0.1000 +- 0.0248 bits/byte: better"),
        (results(1.6, 1.61, 1.59), "gain -0.1000 +- 0.0248 bits/byte: worse"),
        (results(1.4, 1.6, 1.49), "bits/byte: no difference beyond noise"),
        (results(1.4, 1.4, 1.4, seconds=241), "disqualified: a run may take 240 s"),
        (results(1.4), "noise unknown"),
    ):
        assert says in verdict(results(1.5, 1.5, 1.5)[: len(entry)], entry, 240).splitlines()[-1]


def test_an_entry_without_effect_seldom_wins():
    """Of 1,000 races between the same two runs, 5 % are won or lost. So the factors are right."""
    random, wins = Random(0), 0
    for _ in range(1000):
        project, entry = ([Result(random.gauss(1.5, 0.01), 100, 9) for _ in "123"] for _ in "12")
        wins += "no difference" not in verdict(project, entry, 240)
    assert 30 <= wins <= 70


@pytest.mark.slow
def test_what_has_changed_since_the_last_commit_is_raced(text, tmp_path, monkeypatch):
    """New files too, and a patch is for the last commit, whatever has changed since. An entry's
    flags change neither its seed nor how it is scored, so without a change that matters there is no
    gain."""
    project = tmp_path / "project"
    changed_copy(project)
    commit = "git init -q; git add .; git -c user.name=a -c user.email=b commit -qm 1"
    subprocess.run(commit, shell=True, cwd=project, check=True)
    monkeypatch.setattr(race, "ROOT", project)
    monkeypatch.delattr(race.os, "sched_setaffinity", raising=False)  # for this process
    base = f"{TINY} --data={text} --tokenizer=bytes".split()
    given = dict(patch=None, flags=[], base=base, rounds=1, seconds=240, processes=1)
    (project / "new.py").write_text("RATE = 0.1\n")
    change = "from new import RATE\n            lr = RATE\n"
    edits = {"lr = learning_rate(step, steps.last, job.lr, run)\n": change}
    changed_copy(project, edits=edits, file="train")
    assert "gain 0.0000" not in race.measure_race(Namespace(**given))
    given["patch"] = CHANGES / "sqrt.patch"
    given["flags"] = "--seed 5 --eval-every 0 --eval-windows 1 --out elsewhere".split()
    assert "gain 0.0000" in race.measure_race(Namespace(**given))


@pytest.mark.slow
def test_sigterm_ends_a_run_and_its_ranks(tmp_path):
    pid = tmp_path / "pid"
    (tmp_path / "hangs.py").write_text(
        "import os, time\nprint(os.getpid(), file=open('pid', 'w'), flush=True)\ntime.sleep(600)"
    )

    def end_this_process():
        wait_for_lines(pid, 1)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=end_this_process).start()
    with pytest.raises(KeyboardInterrupt):
        launch(tmp_path, ["hangs.py"], 1, timeout=120)
    assert gone_in_time(int(pid.read_text()), 60)


def test_a_patch_is_applied_within_another_repository(tmp_path):
    """git would skip it in silence."""
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    changed_copy(tmp_path / "race" / "entry")
    race.apply_patch(CHANGES / "sqrt.patch", tmp_path / "race" / "entry")
    assert '"sqrt"' in (tmp_path / "race" / "entry" / "train.py").read_text()
