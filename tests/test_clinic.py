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

    def admitted(*args) -> list[str]:
        in_copy(copy, "admit", "--again", *args, script="clinic.py")
        return json.loads((copy / "out/clinic/ward.json").read_text())["faults"]

    assert "no patients yet" in in_copy(copy, "step", script="clinic.py", code=2)
    seeds = [admitted("--seed", seed) for seed in (1, 2, 1)]
    assert seeds[0] == seeds[2] != seeds[1] and all(len(set(three)) == 3 for three in seeds)
    keys = [admitted("--class", "key", "--student", name) for name in ("ada", "bob", "ada")]
    assert keys[0] == keys[2] != keys[1]
    shown = in_copy(copy, script="clinic.py")
    assert all(clinic.FAULTS[name].complaint in shown for name in keys[2])
    assert "--again replaces it" in in_copy(copy, "admit", script="clinic.py", code=2)


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

    def answered(run: int, fault: int, cure: str, gain: float) -> int:
        clinic.answer(argparse.Namespace(run=run, fault=fault, cure=cure, gain=gain))
        return clinic.read_ward()["answers"][str(run)]["points"]

    clinic.step(argparse.Namespace(command="step", run=2, flags=["--microbatch", "4"]))
    assert capsys.readouterr().out == "counted: per step, each rank sends 2.5 MB\n"
    assert answered(1, 3, "gradient_sync", 4) == 3
    with pytest.raises(UserError, match="run 1 has been answered"):
        answered(1, 3, "gradient_sync", 4)
    with pytest.raises(UserError, match="does not say the MB"):
        answered(2, 3, "--help", 4)
    assert "2" not in clinic.read_ward()["answers"]
    assert answered(2, 3, "gradient_sync", 4) == 0  # of another fault: it does not help
    shown = capsys.readouterr().out
    assert "10, and 2.5 with yours" in shown and "you said 4, it is 4 " in shown
    assert "gain: the cure did not help" in shown


@pytest.mark.parametrize(
    "cure, says",
    [
        ("", "'' is no cure: give flags"),
        ("reshard", "'reshard' is no cure: give flags"),
        ("--batch 2", "may not change the work, which --batch does"),
        ("--dp ddp --n-layers=1", "may not change the work, which --n-layers does"),
    ],
)
def test_what_is_no_cure(cure, says):
    with pytest.raises(UserError, match=says):
        clinic.cure_of(cure)
