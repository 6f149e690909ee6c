"""The clinic: every sick run is sick, its cure helps, and answers are graded by measuring.

And predictions: right guesses count, are written down, and what is counted is explained."""

import argparse
import io
import json
import math
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from random import Random

import pytest
from conftest import ROOT, lab_in_copy, succeed

from labs import clinic
from labs.machinery import predict
from plumbing.messages import UserError

# What the cure divides the measured quantity by, at least.
CURES = {
    "a checkpoint in a checkpoint": ("recompute_and_compile", 1.5),
    "a transposed mesh": ("with_mesh", 2),
    "gradients are sent in every microbatch": ("gradient_sync", 4),
    "a frozen base is gathered": ("--reshard adapters", 5),
    "microbatches are too small": ("--microbatch 8", 5),
    "float32 over a slow link": ("--dtype bfloat16", 1.3),
    "weights are sharded over nodes": ("--dp hsdp", 2),
    "a pipeline with too few microbatches": ("--microbatch 1", 3),
    "activations are recomputed although they fit": ("--checkpointing none", 2),
}


@pytest.mark.parametrize("name", clinic.FAULTS)
def test_changes_fit_the_code(name, tmp_path):
    fault = clinic.FAULTS[name]
    clinic.copy_project(copy := tmp_path / "1", fault)
    files = [path.relative_to(copy) for path in copy.glob("**/*.py")]
    changed = [str(f) for f in files if (ROOT / f).read_text() != (copy / f).read_text()]
    assert sorted(changed) == sorted(file for file, *_ in fault.changes)
    assert bool(fault.places) == bool(fault.changes)
    assert all(clinic.cure_of(f"parallel.{place}()") == place for place in fault.places)


@pytest.mark.slow
@pytest.mark.parametrize("name", clinic.FAULTS)
def test_sick_runs_are_sick_and_cures_help(name, tmp_path, monkeypatch):
    monkeypatch.setattr(clinic, "WARD", tmp_path)
    fault, (cure, factor) = clinic.FAULTS[name], CURES[name]
    clinic.copy_project(tmp_path / "1", fault)
    sick, cured = (clinic.read(fault.quantity, clinic.measured(tmp_path / "1", fault, given))
                   for given in ("", cure))  # fmt: skip
    assert sick / cured >= 0.999 * factor


def test_admitting(copy):
    """Three different faults, the same for the same seed; nothing says which."""
    ward = partial(lab_in_copy, copy, script="clinic.py")  # what the command prints

    def admitted(*args) -> list[str]:
        ward("admit", "--again", *args)
        return json.loads((copy / "out/clinic/ward.json").read_text())["faults"]

    assert "no patients yet" in ward("step", code=2)
    seeds = [admitted("--seed", seed) for seed in (1, 2, 1)]
    assert seeds[0] == seeds[2] != seeds[1] and all(len(set(three)) == 3 for three in seeds)
    keys = [admitted("--class", "key", "--student", name) for name in ("ada", "bob", "ada")]
    assert keys[0] == keys[2] != keys[1]
    shown = ward()
    assert all(clinic.FAULTS[name].complaint in shown for name in keys[2])
    assert "--again replaces it" in ward("admit", code=2)


def test_steps_and_answers(tmp_path, monkeypatch, capsys):
    """A step shows what is measured, with other flags, and not what it means. An answer is written
    down once, and only if the cure can be tried."""
    monkeypatch.setattr(clinic, "WARD", tmp_path)
    clinic.write_ward(dict(faults=list(clinic.FAULTS)[2::2], answers={}))

    def launched(directory: Path, command: list[str], *_, **__) -> str:
        if "--help" in command:
            return "a report without that line"
        cured = directory == ROOT or command[-2:] == ["--microbatch", "4"]
        return f"counted: per step, each rank sends {2.5 if cured else 10} MB\n\n- 21 % waits"

    monkeypatch.setattr(clinic, "launch", launched)

    def points(run: int, cure: str) -> int:
        clinic.answer(argparse.Namespace(run=run, fault=3, cure=cure, gain=4))
        return clinic.read_ward()["answers"][str(run)]["points"]

    clinic.step(argparse.Namespace(command="step", run=2, flags=["--microbatch", "4"]))
    assert capsys.readouterr().out == "counted: per step, each rank sends 2.5 MB\n"
    assert points(1, "gradient_sync") == 3
    for run, cure, says in (
        (1, "gradient_sync", "run 1 has been"),
        (2, "--help", "does not say"),
    ):
        with pytest.raises(UserError, match=says):
            points(run, cure)
    assert "2" not in clinic.read_ward()["answers"]
    assert points(2, "gradient_sync") == 0  # of another fault: it does not help


def test_what_is_no_cure():
    for cure in ("", "reshard"):
        with pytest.raises(UserError, match=f"'{cure}' is no cure: give flags"):
            clinic.cure_of(cure)
    for cure, flag in {"--batch 2": "--batch", "--dp ddp --n-layers=1": "--n-layers"}.items():
        with pytest.raises(UserError, match=f"may not change the work, which {flag} does"):
            clinic.cure_of(cure)


# --------------------------------------------------------------------------------- predictions


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


def elements(line: str) -> int:
    """Return how many elements the tensors have whose shapes stand in a line."""
    return sum(math.prod(json.loads(shape)) for shape in re.findall(r"\[.*?\]", line))


def right_bytes(text: list[str], count: Callable) -> list:
    """Of a step that all-gathers blocks in each pass and microbatch, and has no all-reduce."""
    blocks = int(text[0].split()[3])
    root = elements(text[1])
    block = elements(text[2])
    m = int(re.search(r"(\d) microbatch", text[4])[1])
    assert "--dp fsdp --reshard weights " in text[3] and "bfloat16" in text[3]
    gathers, scatters = 2 * (m * 2 * blocks * block + m * root), 4 * (blocks * block + root)
    return [m * (2 * blocks + 1), gathers, blocks + 1, f"{scatters / 1e6:.4f} MB", 0]


def right_bubble(text: list[str], count: Callable) -> list:
    p, m = map(int, re.search(r"(\d) ranks, (\d+) microbatches, --schedule 1f1b", text[0]).groups())
    return [f"{p - 1}/{m + p - 1}", min(p, m)]


@pytest.mark.parametrize(
    "form, seed, right, n",
    [("bytes", 34, right_bytes, 4), ("bubble", 7, right_bubble, 2)],
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
    out = succeed(*command, "bubble", "--seed", 1, "--answer", "1/5", "--answer", "4").out
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
