"""Predictions of labs: what is counted is explained, right guesses count, and are written down."""

import argparse
import io
import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest
from conftest import succeed

from labs.machinery import predict
from plumbing.processes import UserError


@pytest.fixture(autouse=True)
def record(tmp_path, monkeypatch) -> Path:
    """A record of guesses in which nothing stands yet."""
    monkeypatch.setattr(predict, "RECORD", tmp_path / ".predictions")
    return predict.RECORD


def guess(form: str | None, *answers, **given) -> str:
    """Return what the command prints, but for the prompts."""
    flags = dict(lab=form, seed=0, key=None, student=None, answer=[*map(str, answers)])
    return "\n".join(predict.predict(argparse.Namespace(**flags | given)))


def recorded(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def read_model(text: list[str]) -> tuple[int, int, int]:
    """Return, as a student reads them in the question, the blocks, and the elements of the root and
    of a block."""
    root, block = (sum(math.prod(json.loads(shape)) for shape in re.findall(r"\[.*?\]", line))
                   for line in text[1:3])  # fmt: skip
    return int(text[0].split()[3]), root, block


def right_bytes(text: list[str], count: Callable) -> list:
    """Of a step that all-gathers blocks in each pass and microbatch, and has no all-reduce."""
    blocks, root, block = read_model(text)
    m = int(re.search(r"(\d) microbatch", text[4])[1])
    assert "--dp fsdp --reshard weights " in text[3] and "bfloat16" in text[3]
    gathers, scatters = 2 * (m * 2 * blocks * block + m * root), 4 * (blocks * block + root)
    return [m * (2 * blocks + 1), gathers, blocks + 1, f"{scatters / 1e6:.4f} MB", 0]


def right_bubble(text: list[str], count: Callable) -> list:
    p, m = map(int, re.search(r"(\d) ranks, (\d+) microbatches, --schedule 1f1b", text[0]).groups())
    return [f"{p - 1}/{m + p - 1}", min(p, m)]


@pytest.mark.parametrize(
    "form, seed, right, n",
    [("bytes", 34, right_bytes, 4), ("bubble", 1, right_bubble, 2)],
)
def test_right_guesses_count(form, seed, right, n, record):
    text, asked, count = predict.FORMS[form](Random(seed))
    out = guess(form, *right(text, count), seed=seed)
    assert f"{n} of {n} are right. --seed {seed} asks this again." in out and "wrong" not in out
    first, scored = recorded(record)
    assert scored["right"] == scored["of"] == n and len(first["guess"]) == len(asked)


def test_what_is_forgotten_is_named():
    """A term, or what would be different. A 0 that was said to be 0 does not count."""
    out = guess("bytes", 9, 2_442_240, 0, 0, seed=3)
    assert "calls: 27; you said 9, wrong" in out and "right with 1 microbatch.\n" in out
    assert "bytes: 3,032,640; you said 2,442,240, wrong" in out and "right without line 1.\n" in out
    assert "0 of 4 are right" in out
    out = guess("memory", 432_576, 108_144, 0, 0, seed=2)
    assert out.count("Your answer would be right with --dp ddp.") == 1


def test_unclear_input_is_asked_again(monkeypatch, capsys, record):
    monkeypatch.setattr("sys.stdin", io.StringIO("twelve\n1/8\n\n2\n"))
    assert "you said 12.5 %, wrong" in guess("bubble", seed=3, answer=None)
    assert capsys.readouterr().out.count("is not understood: type") == 2
    assert recorded(record)[0]["guess"] == {"waiting, %": 12.5, "forwards held": 2}


def test_a_guess_is_recorded_whole_and_before_it_is_counted(record, monkeypatch):
    """Who ends the command then has guessed. A line that is no entry is passed over."""
    for answers, says in (["1/7"], "no answer"), (["1/7", 2, 3], "are left over"):
        with pytest.raises(UserError, match=f"{says}.*: nothing is recorded"):
            guess("bubble", *answers, seed=1)
    assert not record.exists()

    def end(_):
        (entry,) = recorded(record)
        assert entry["guess"] == {"waiting, %": 12.5, "forwards held": 9}
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), monkeypatch.context() as patch:
        patch.setattr(predict, "bubble", end)
        guess("bubble", "1/8", 9, seed=1)
    record.write_text(record.read_text() + "cut off\n7\n")
    assert "guess 2" in guess("bubble", "1/7", 2, seed=1)


def test_a_class_gives_each_student_other_questions(record):
    """The same on the teacher's machine, where the record is empty."""

    def seed(form: str = "bubble", **given) -> str:
        whose = dict(key="2027", student=" Ada  Lovelace", seed=None) | given
        answers = ["a"] if form == "fastest" else [1, 1]
        return re.match(rf"predict {form}, seed (\d+)\n", guess(form, *answers, **whose))[1]

    seeds = [seed(), seed(), seed(student="bob"), seed(key="2028"), seed("fastest")]
    assert len({*seeds}) == 5
    record.unlink()
    assert [seed(student="ada lovelace"), seed()] == seeds[:2]


def test_the_command(copy):
    command = copy / "labs/run.py", "predict"
    out = succeed(*command, "bubble", "--seed", 1, "--answer", "1/5", "--answer", "2").out
    assert out.index("written down") < out.index("2 of 2 are right")
    assert "bubble   Share of a pipeline's time" in succeed(*command).out
    assert len((copy / "labs/work/.predictions").read_text().splitlines()) == 2


@pytest.mark.parametrize(
    "unit, understood, not_understood",
    [
        ("bytes", {"12.5 MB": 12.5e6, "3e6": 3e6, "1,234,567 bytes": 1234567, ".5 GiB": 2**29},
         ["", "12 apples", "12,5 MB", "-3", "nan"]),
        ("calls", {"12": 12, "1,234": 1234}, ["2.5", "5 MB", "9" * 400]),
        ("%", {"12.5 %": 12.5, "12.5": 12.5, "1/8": 12.5}, ["1/0"]),
        ("letter", {"C": "c"}, ["ab", "f"]),
    ],
)  # fmt: skip
def test_what_is_understood(unit, understood, not_understood):
    assert {text: predict.parse(text, unit) for text in understood} == understood
    for text in not_understood:
        with pytest.raises(ValueError, match=rf"'{text}'.*: type a .*(such as \d|from a to e)"):
            predict.parse(text, unit)
