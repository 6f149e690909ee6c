"""The clinic: every sick run is sick, its cure helps, and answers are graded by measuring."""

import argparse
import json
from pathlib import Path

import pytest
from conftest import ROOT, in_copy

from labs import clinic
from plumbing.processes import UserError

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


def test_every_fault_has_a_cure_here():
    assert set(CURES) == set(clinic.FAULTS)


@pytest.mark.parametrize("name", CURES)
def test_changes_fit_the_code(name, tmp_path):
    fault = clinic.FAULTS[name]
    clinic.copy_project(tmp_path / "copy", fault)
    files = [path.relative_to(tmp_path / "copy") for path in tmp_path.glob("copy/**/*.py")]
    changed = [
        str(f) for f in files if (ROOT / f).read_text() != (tmp_path / "copy" / f).read_text()
    ]
    assert sorted(changed) == sorted(file for file, *_ in fault.changes)
    assert bool(fault.places) == bool(fault.changes)
    assert all(clinic.cure_of(f"parallel.{place}()") == place for place in fault.places)


@pytest.mark.slow
@pytest.mark.parametrize("name", CURES)
def test_sick_runs_are_sick_and_cures_help(name, tmp_path, monkeypatch):
    monkeypatch.setattr(clinic, "WARD", tmp_path)
    fault, (cure, factor) = clinic.FAULTS[name], CURES[name]
    clinic.copy_project(tmp_path / "1", fault)
    sick = fault.measure(clinic.measured(tmp_path / "1", fault, []))
    cured = fault.measure(clinic.cured_report(tmp_path / "1", fault, cure))
    assert sick / cured >= 0.999 * factor


def test_admitting(copy):
    """Three different faults, the same for the same seed; nothing says which."""

    def admitted(*args) -> list[str]:
        in_copy(copy, "admit", "--again", *args, script="clinic.py")
        return json.loads((copy / "out/clinic/ward.json").read_text())["faults"]

    for command in (["step"], ["answer", "1", "--fault", "1"]):
        assert "no patients yet" in in_copy(copy, *command, script="clinic.py", code=2)
    seeds = [admitted("--seed", seed) for seed in (1, 2, 1)]
    assert seeds[0] == seeds[2] != seeds[1] and all(len(set(three)) == 3 for three in seeds)
    keys = [admitted("--class", "key", "--student", name) for name in ("ada", "bob", "ada")]
    assert keys[0] == keys[2] != keys[1]
    shown = in_copy(copy, script="clinic.py")
    assert all(clinic.FAULTS[name].complaint in shown for name in keys[2])
    assert all(f"  {number}  {name}" in shown for number, name in enumerate(clinic.FAULTS, 1))
    assert "--again replaces it" in in_copy(copy, "admit", script="clinic.py", code=2)


def test_a_step(copy, monkeypatch, capsys):
    """Flags replace those of the run. It shows what is measured and not what it means."""
    monkeypatch.setattr(clinic, "WARD", copy / "out/clinic")
    in_copy(copy, "admit", "--seed", 1, script="clinic.py")
    out = in_copy(copy, "step", 1, "--dp", "x", code=2, script="clinic.py")
    assert "--dp: invalid choice: 'x'" in out and out.count("error: ") == 2
    report = "counted: 8 all-reduce\n\n- 21 % of the step waits for gradients\n  a larger --batch\n"
    monkeypatch.setattr(clinic, "measured", lambda *_, **__: report)
    clinic.step(argparse.Namespace(command="step", run=1, flags=[]))
    assert capsys.readouterr().out == "counted: 8 all-reduce\n"


def test_answers_are_graded(tmp_path, monkeypatch, capsys):
    """All three right, all three wrong; written down once, and before anything is shown."""
    monkeypatch.setattr(clinic, "WARD", tmp_path)
    names = list(clinic.FAULTS)
    clinic.write_ward(dict(seed=1, faults=[names[2], names[4], names[0]], answers={}))

    def measured(directory: Path, fault: clinic.Fault, flags: list[str]) -> str:
        assert clinic.read_ward()["answers"]
        if "--no-flag" in flags:
            raise UserError("it was refused")
        if "--ctrl-c" in flags:
            raise KeyboardInterrupt
        if "--pp" in flags:
            return "a report without that line"
        cured = directory == ROOT or flags == ["--microbatch", "4"]
        return f"counted: per step, each rank sends {2.5 if cured else 10} MB; payload 1 MB by"

    monkeypatch.setattr(clinic, "measured", measured)

    def answered(run: int, fault: int, cure: str, gain: str) -> dict:
        given = dict(command="answer", run=run, fault=str(fault), cure=cure, gain=gain)
        clinic.answer(argparse.Namespace(**given))
        return clinic.read_ward()["answers"][str(run)]

    assert answered(1, 3, "gradient_sync", "8/2")["points"] == 3
    with pytest.raises(UserError, match="run 1 has been answered"):
        answered(1, 3, "gradient_sync", "4")
    for wrong in ("no number", "", "0", "0.0", "5 MB"):
        with pytest.raises(UserError, match=r"is (no factor|not understood)"):
            answered(2, 5, "--microbatch 4", wrong)
    with pytest.raises(UserError, match="is no fault"):
        answered(2, 10, "--microbatch 4", "4")
    for error, flag, says in (
        (UserError, "--no-flag", "it was refused"),
        (UserError, "--pp 1", "does not say the bytes"),
        (KeyboardInterrupt, "--ctrl-c", None),
    ):
        with pytest.raises(error, match=says):
            answered(2, 3, flag, "4")
        assert "2" not in clinic.read_ward()["answers"]
    assert answered(2, 3, "--dtype float32", "4") == {
        "fault": names[2], "cure": "--dtype float32", "gain": 4, "points": 0
    }  # fmt: skip
    shown = capsys.readouterr().out
    assert "10 MB, and 2.5 MB with yours" in shown and "you said 4, it is 4 " in shown
    assert "gain: nothing to compare, since the cure did not help" in shown


@pytest.mark.parametrize(
    "cure, says",
    [
        ("", "is no cure"),
        ("reshard", "'reshard' is no cure: give flags"),
        ("--help", "is no cure"),
        ("--dp ddp -h", "is no cure"),
        ("--dp 'ddp", "a quote without its other half"),
        ("--batch 2", "may not change the work, which --batch does"),
        ("--dp ddp --seq=2", "may not change the work, which --seq-len does"),
        ("--n-layers 1", "may not change the work, which --n-layers does"),
        ("--model=tiny", "may not change the work, which --model does"),
    ],
)
def test_what_is_no_cure(cure, says):
    with pytest.raises(UserError, match=says):
        clinic.cure_of(cure)


def test_a_malformed_answer_is_asked_for_again_at_a_terminal(monkeypatch, capsys):
    typed = iter(["ten", "-1", " 2x "])
    monkeypatch.setattr("builtins.input", lambda question: next(typed))
    monkeypatch.setattr("sys.stdin", argparse.Namespace(isatty=lambda: True))
    assert clinic.ask("which factor", None, clinic.gain_of) == 2
    assert capsys.readouterr().out.count("is not understood") == 2
    with pytest.raises(UserError, match="is not understood"):
        clinic.ask("which factor", "ten", clinic.gain_of)
