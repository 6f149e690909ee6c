"""The clinic: every sick run is sick, its cure helps, and answers are graded by measuring."""

import argparse
import json
from pathlib import Path

import clinic
import pytest
from conftest import ROOT, launch, refused
from test_labs import in_copy

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
    changed = [path.name for path in ROOT.glob("*.py")
               if path.read_text() != (tmp_path / "copy" / path.name).read_text()]  # fmt: skip
    assert sorted(changed) == sorted(file for file, *_ in fault.changes)
    assert bool(fault.place) == bool(fault.changes)
    if fault.place:
        assert f"def {fault.place}(" in (ROOT / "parallel.py").read_text()


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

    seeds = [admitted("--seed", seed) for seed in (1, 2, 1)]
    assert seeds[0] == seeds[2] != seeds[1] and all(len(set(three)) == 3 for three in seeds)
    keys = [admitted("--class", "key", "--student", name) for name in ("ada", "bob", "ada")]
    assert keys[0] == keys[2] != keys[1]
    shown = in_copy(copy, script="clinic.py")
    assert all(clinic.FAULTS[name].complaint in shown for name in keys[2])
    assert all(f"  {number}  {name}" in shown for number, name in enumerate(clinic.FAULTS, 1))
    refused_again = in_copy(copy, "admit", script="clinic.py", code=2)
    assert "--again replaces it" in refused_again


def test_flags_replace_those_of_the_run(copy):
    in_copy(copy, "admit", "--seed", 1, script="clinic.py")
    out = in_copy(copy, "step", 1, "--dp", "x", code=2, script="clinic.py")
    assert "--dp: invalid choice: 'x'" in out and out.count("error: ") == 2


def test_answers_are_graded(copy, monkeypatch):
    """All three right, all three wrong; written down once, and before anything is shown."""
    monkeypatch.setattr(clinic, "WARD", copy / "out/clinic")
    in_copy(copy, "admit", "--seed", 1, script="clinic.py")
    ward = copy / "out/clinic/ward.json"
    names = list(clinic.FAULTS)
    drawn = json.loads(ward.read_text()) | {"faults": [names[2], names[4], names[0]]}
    ward.write_text(json.dumps(drawn))

    def measured(directory: Path, fault: clinic.Fault, flags: list[str]) -> str:
        assert json.loads(ward.read_text())["answers"]
        if "--no-flag" in flags:
            raise UserError("it was refused")
        cured = directory == ROOT or flags == ["--microbatch", "4"]
        return f"counted: per step, each rank sends {2.5 if cured else 10} MB; payload 1 MB by"

    monkeypatch.setattr(clinic, "measured", measured)

    def answered(run: int, fault: int, cure: str, gain: str) -> dict:
        given = dict(command="answer", run=run, fault=str(fault), cure=cure, gain=gain)
        clinic.answer(argparse.Namespace(**given))
        return json.loads(ward.read_text())["answers"][str(run)]

    assert answered(1, 3, "gradient_sync", "4")["points"] == 3
    with pytest.raises(UserError, match="run 1 has been answered"):
        answered(1, 3, "gradient_sync", "4")
    for wrong in ("no number", ""):
        with pytest.raises(UserError, match="is no factor"):
            answered(2, 5, "--microbatch 4", wrong)
    with pytest.raises(UserError, match="is no fault"):
        answered(2, 10, "--microbatch 4", "4")
    with pytest.raises(UserError, match="it was refused"):
        answered(2, 3, "--no-flag", "4")
    assert answered(2, 3, "--dtype float32", "4") == {
        "fault": names[2], "cure": "--dtype float32", "gain": 4, "points": 0
    }  # fmt: skip


@pytest.mark.parametrize(
    "arguments, says",
    [
        (["step"], "nobody is here yet"),
        (["answer", "1", "--fault", "1"], "nobody is here yet"),
        (["show", "--no"], "unrecognized arguments: --no"),
    ],
)
def test_wrong_commands_are_refused(arguments, says, copy):
    refused(launch(copy / "labs/clinic.py", *arguments), says)


def test_what_is_read_from_reports():
    report = (Path(__file__).parent / "workers/step_report.txt").read_text()
    assert clinic.sent(report) == 10.24 and clinic.attentions(report) == 2
    assert clinic.crossing(report) == 5.12 and clinic.waiting(report) == 0.6
