"""bench.py gpu, rehearsed on a CPU: which parts it measures, what it keeps, what it writes."""

import json

import pytest
import torch
from conftest import launch, refused, succeed

from perf import gpu
from perf.gpu_parts import PARTS, Case
from perf.gpu_report import markdown_section, replace_section
from plumbing.parser import Parser


def rehearse(file, *more) -> str:
    return succeed("bench.py", "gpu", "--out", file, "--rehearse", *more, timeout=300).out


def test_parts_are_measured_once_and_kept(tmp_path):
    file, docs = tmp_path / "gpu.json", tmp_path / "measured.md"
    docs.write_text("# Measured\n\n## On one GPU\n\nold\n\n## Other\n\nstays\n")
    out = rehearse(file, "--parts", "loss-1b", "step-1b-4096")
    assert "**loss-1b**" in out and "| 4096 |" in out and "| optimizer | " in out
    before = json.loads(file.read_text())
    assert before["machine"]["device"] == "cpu"
    assert before["parts"].keys() == {"loss-1b", "step-1b-4096"}
    before["parts"]["loss-1b"]["results"]["256"]["seconds"] = [1, 2, 3]
    file.write_text(json.dumps(before))
    rehearse(file, "--parts", "loss-1b", "--docs", docs)
    after = json.loads(file.read_text())["parts"]
    assert after["step-1b-4096"] == before["parts"]["step-1b-4096"]  # stays
    assert after["loss-1b"]["results"]["256"]["seconds"] != [1, 2, 3]  # named, so measured anew
    text = docs.read_text()
    assert text.startswith("# Measured\n\n## On one GPU\n\ncpu, ") and "old" not in text
    assert text.endswith("\n\n## Other\n\nstays\n")


@pytest.mark.slow
def test_all_parts(tmp_path):
    out = rehearse(tmp_path / "gpu.json")
    assert [line.split("**")[1] for line in out.splitlines() if line.startswith("**")] == [*PARTS]
    assert "not measured" not in out
    in_8_bits = "eager, checkpointing selective, rowwise"
    for step in ("eager, checkpointing full", "transformers", "peft on transformers", in_8_bits):
        assert f"| {step} | " in out


def test_a_part_that_fails_costs_no_other(tmp_path, monkeypatch):
    """It is told, and measured by the next run; no part begins for which no time is left."""

    def run_part(name, rehearse, timeout):
        measured.append(name)
        broken = name == "rates" and len(measured) == 1
        return {"error": "ended with exit code 1"} if broken else {"results": {}}

    measured, file = [], tmp_path / "gpu.json"
    monkeypatch.setattr(gpu, "run_part", run_part)
    monkeypatch.setattr(gpu, "markdown_section", lambda report, command: "section")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    args = Parser.defaults(lambda parser: None, out=file, parts=None, docs=None, rehearse=False)
    monkeypatch.setattr(gpu, "BUDGET", 50)
    assert "no time was left for train-1b-4096, train-8b" in gpu.measure_gpu(args)
    assert measured[:2] == ["rates", "loss-8b"] and "train-1b-4096" not in measured
    monkeypatch.setattr(gpu, "BUDGET", 10_000)
    gpu.measure_gpu(args)
    assert sorted(measured) == sorted([*PARTS, "rates"])
    assert json.loads(file.read_text())["parts"].keys() == PARTS.keys()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu.measure_gpu(args) == "section"  # nothing is left to measure


def test_a_failing_process_is_told(monkeypatch):
    monkeypatch.setattr(gpu, "ROOT", gpu.ROOT / "tests")  # where there is no perf.gpu
    assert "exit code 1" in gpu.run_part("loss-1b", True, 60)["error"]


def test_errors_are_in_the_tables():
    part = {"eager, checkpointing none": {"error": "out of memory", "predicted": 2e11}}
    report = {
        "parts": {
            "train-8b-4096": {"results": part, "took": 9},
            "loss-1b": {"error": "e", "took": 1},
        }
    }
    section = markdown_section(report, "command")
    assert "| eager, checkpointing none | out of memory | - | - | - | - | 200.0 | - |" in section
    assert "not measured: e" in section
    assert replace_section("# A\n", section) == f"# A\n\n{section}\n"
    assert (
        replace_section(replace_section("# A\n", "## On one GPU\n\nx"), section).count("## On") == 1
    )


def test_wrong_input_and_no_gpu(tmp_path):
    file = tmp_path / "gpu.json"
    refused(launch("bench.py", "gpu", "--out", file), "needs a GPU: --rehearse")
    refused(launch("bench.py", "gpu", "--out", file, "--parts", "x"), "no part 'x': choose from")
    refused(launch("bench.py", "gpu", "--out", tmp_path / "no" / "file"), "make it first")
    refused(launch("bench.py", "gpu", "--out", file, "--docs", "no.md"), "--docs no.md: no such")


def test_the_first_run_has_the_most_important_parts():
    first_run = list(PARTS.values())[: list(PARTS).index("float8-8b-8192")]
    assert sum(part.seconds for part in first_run) <= gpu.BUDGET
    assert Case().parallel().dtype == torch.bfloat16
