"""bench.py race: an entry and the project in turns, and a verdict with its noise."""

import pytest
from conftest import CHANGES, launch, refused, succeed

from perf.race import Result, verdict

TINY = "--steps 3 --warmup 1 --batch 2 --seq-len 16 --dim 16 --ffn-dim 16 --n-layers 1 --n-heads 2"


def results(*scores: float, seconds: float = 100) -> list[Result]:
    return [Result(score, seconds, 9) for score in scores]


@pytest.mark.parametrize(
    "entry, says",
    [
        (results(1.4, 1.41, 1.39), "gain 0.1000 +- 0.0115 bits/byte: better"),
        (results(1.6, 1.61, 1.59), "gain -0.1000 +- 0.0115 bits/byte: worse"),
        (results(1.4, 1.6, 1.49), "bits/byte: no difference beyond noise"),
        (results(1.4, 1.4, 1.4, seconds=241), "out: a run took 241 s, and has 240"),
    ],
)
def test_verdicts(entry, says):
    assert verdict(results(1.5, 1.5, 1.5), entry, 240).splitlines()[-1].count(says) == 1


def test_one_round_has_no_noise():
    assert "noise unknown" in verdict(results(1.5), results(1.4), 240)


def test_a_race(tmp_path):
    """The seed is the same for both, so without a change that matters there is no gain."""
    given = [f"--base={TINY} --data={text_of(tmp_path)} --tokenizer=bytes", "--rounds=1"]
    result = succeed("bench.py", "race", CHANGES / "wsd.patch", *given)
    last = result.out.splitlines()
    assert last[1].split()[1:] == [last[1].split()[1]] * 2 + ["0.0000"]
    assert "run 1 of 2: the entry, seed 0:" in result.err and "after 3 steps" in result.err
    changed = succeed("bench.py", "race", "--flags=--steps 2 --lr 0.1", *given)
    assert "after 2 steps" in changed.err and " 0.0000" not in changed.out


def text_of(tmp_path) -> str:
    path = tmp_path / "text.txt"
    path.write_text("".join(f"{i} and {i * 7}\n" for i in range(3000)))
    return str(path)


@pytest.mark.parametrize(
    "given, says",
    [
        ([], "race what? Give a patch, or --flags"),
        (["no.patch"], "no.patch is no file"),
        (["README.md"], "does not fit this version of the project"),
        (["--flags=--no-such-flag"], "a run failed: error: unrecognized arguments: --no-such-flag"),
    ],
)
def test_refused(given, says):
    refused(launch("bench.py", "race", "--base=--tokenizer=bytes", *given), says)
