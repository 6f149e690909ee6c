"""The clinic: every sick run is sick, its cure helps, and answers are graded by measuring."""

import json
import shutil
from pathlib import Path

import clinic
import pytest
from conftest import ROOT, launch, refused
from test_labs import copy, in_copy  # noqa: F401 (copy is a fixture)

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
    other = "gradient_sync" if fault.place != "gradient_sync" else "with_mesh"
    assert fault.measure(clinic.cured_report(tmp_path / "1", fault, other)) == sick


def test_admitting(copy):  # noqa: F811
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


@pytest.mark.slow
def test_answers_are_graded(copy):  # noqa: F811
    """All three right, all three wrong; written down once."""
    names = list(clinic.FAULTS)
    in_copy(copy, "admit", "--seed", 1, script="clinic.py")
    ward = copy / "out/clinic/ward.json"
    drawn = json.loads(ward.read_text())
    drawn["faults"] = [names[2], names[4], names[0]]
    ward.write_text(json.dumps(drawn))
    for number in (1, 2):
        shutil.rmtree(copy / f"out/clinic/{number}")
        clinic.copy_project(copy / f"out/clinic/{number}", clinic.FAULTS[names[2 * number]])
    right = ["--fault", 3, "--cure", "gradient_sync", "--gain", 4]
    out = in_copy(copy, "answer", 1, *right, script="clinic.py", timeout=300)
    assert "3 of 3 points" in out and "it was in the function gradient_sync" in out
    assert "has been answered" in in_copy(copy, "answer", 1, *right, script="clinic.py", code=2)
    wrong = ["--fault", 3, "--cure", "--dtype float32", "--gain", 4]
    out = in_copy(copy, "answer", 2, *wrong, script="clinic.py", timeout=300)
    assert "0 of 3 points" in out and "fault: microbatches are too small" in out
    assert json.loads(ward.read_text())["answers"]["2"]["gain"] == 4


@pytest.mark.parametrize(
    "arguments, says",
    [
        (["step"], "nobody is here yet"),
        (["answer", "1", "--fault", "1"], "nobody is here yet"),
        (["show", "--no"], "unrecognized arguments: --no"),
    ],
)
def test_wrong_commands_are_refused(arguments, says, copy):  # noqa: F811
    refused(launch(copy / "labs/clinic.py", *arguments), says)


def test_what_is_read_from_reports():
    report = (Path(__file__).parent / "workers/step_report.txt").read_text()
    assert clinic.sent(report) == 10.24 and clinic.attentions(report) == 2
    assert clinic.crossing(report) == 5.12 and clinic.waiting(report) == 0.6
