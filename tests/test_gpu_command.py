"""bench.py gpu, rehearsed on a CPU: which parts it measures, what it keeps, what it writes."""

import json

import pytest
import torch
from conftest import succeed

import bench
from perf import gpu
from perf.gpu import PARTS, markdown_section, replace_section
from plumbing.parser import Parser
from text.tokenizer import load_tokenizer

EVERYTHING = [line for commands in PARTS.values() for line in commands.values()]


def test_parts_are_measured_once_and_kept(monkeypatch, tmp_path):
    """A part that is named is measured anew, and the others stay."""
    file, docs = tmp_path / "gpu.json", tmp_path / "measured.md"
    docs.write_text("# Measured\n\n## On one GPU\n\nold\n\n## Other\n\nstays\n")
    other = {name: {"error": "error: out of memory"} for name in PARTS["rates"]}
    old, new = ({"chunks of 256": {"seconds": [1, n, 9]}} for n in (2, 3))
    file.write_text(json.dumps({"parts": {"rates": other, "loss-1b": {"loss": old}}}))
    monkeypatch.setattr(gpu, "run_command", lambda *_, **__: new)
    out = gpu.measure_gpu(file, ["loss-1b"], docs, rehearse=True)
    assert "**loss-1b**" in out and "| chunks of 256 | 3 (1-9) |" in out
    report = json.loads(file.read_text())
    assert report["machine"]["device"] == "cpu"
    assert report["parts"] == {"rates": other, "loss-1b": {"loss": new}}
    text = docs.read_text()
    assert text.startswith("# Measured\n\n## On one GPU\n\ncpu, ") and "old" not in text
    assert text.endswith("\n\n## Other\n\nstays\n")


@pytest.mark.slow
def test_all_kinds_of_parts(tmp_path):
    """For a rehearsal, parts of one kind differ in what it replaces: model, batch and tokens. So
    those named largest are like step's."""
    file = tmp_path / "gpu.json"
    parts = ["rates", "loss-8b", "step-1b-4096", "peers-1b-4096", "lora-nf4-8b-4096"]
    parts += ["float8-8b-2x4096"]
    kinds, all_kinds = ({name.split("-")[0] for name in names} for names in (parts, PARTS))
    assert kinds | {"largest"} == all_kinds
    given = ["gpu", "--out", file, "--rehearse", "--parts", *parts]
    out = succeed("bench.py", *given, timeout=900).out
    assert [line.split("**")[1] for line in out.splitlines() if line.startswith("**")] == parts
    assert "error" not in file.read_text()
    for step in ("eager, checkpointing full", "transformers", "bare", "rowwise"):
        assert f"| {step} | " in out


def test_parts_are_commands():
    """Every part is a command line that bench.py takes, and writes its results to a file."""
    rates, *lines = EVERYTHING
    assert rates == "-m perf.gpu"
    for line in lines:
        script, command, *flags = line.split()
        assert script == "bench.py"
        bench.COMMANDS[command][0](parser := Parser())
        args = parser.parse_args([*flags, "--json", "x.json"])
        assert args.model in bench.PRESETS if hasattr(args, "model") else args.tokens


def test_the_vocabulary_is_as_large_as_llamas(tmp_path):
    gpu.write_tokenizer(tmp_path / "tokenizer.model")
    assert load_tokenizer(str(tmp_path / "tokenizer.model")).vocab_size == 128_256


@pytest.fixture
def run_with(monkeypatch, tmp_path):
    """Measure on what seems to be a GPU; `run_with(errors)` returns the lines that it ran."""
    monkeypatch.setattr(gpu, "markdown_section", lambda report, command: "section")
    monkeypatch.setattr(gpu, "write_tokenizer", lambda file: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)

    def run_with(errors: dict[str, str]) -> tuple[list[str], str]:
        def run_command(line, directory, rehearse, timeout):
            ran.append(line)
            return {"error": errors[line]} if line in errors else {}

        ran = []
        monkeypatch.setattr(gpu, "run_command", run_command)
        return ran, gpu.measure_gpu(tmp_path / "gpu.json", None, None, False)

    return run_with


def test_a_command_that_fails_costs_no_other(run_with, tmp_path, monkeypatch):
    """It is told, and run again by the next run; none begins for which no time is left."""
    monkeypatch.setattr(gpu, "BUDGET", 50)
    note = "no time was left from rates, rates on: again, without --parts"
    assert run_with({}) == ([], f"section\n\n{note}")
    monkeypatch.setattr(gpu, "BUDGET", 10_000)
    ran, _ = run_with({PARTS["rates"]["rates"]: "ended with exit code 1"})
    assert ran == EVERYTHING
    assert run_with({}) == ([PARTS["rates"]["rates"]], "section")
    assert json.loads((tmp_path / "gpu.json").read_text())["parts"].keys() == PARTS.keys()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert run_with({}) == ([], "section")  # nothing is left to measure


def test_after_too_little_memory_a_part_ends(run_with):
    """The next commands of the part would take more; the next run does not try again."""
    _, second, *others = PARTS["largest-full-8b-4096"].values()
    ran, _ = run_with({second: "error: out of memory on a GPU of 80 GB"})
    assert ran == [line for line in EVERYTHING if line not in others]
    assert run_with({})[0] == []


def test_what_a_process_writes_is_returned_or_how_it_failed(monkeypatch, tmp_path):
    """By a program in place of bench.py; test_all_kinds_of_parts runs the real one."""
    monkeypatch.setattr(gpu, "ROOT", tmp_path)

    def run_program(source: str, timeout: float = 60) -> dict:
        (tmp_path / "bench.py").write_text(f"import sys, time\n{source}")
        return gpu.run_command("bench.py loss", tmp_path, False, timeout)

    assert run_program("open(sys.argv[-1], 'w').write('[1]')") == [1]
    assert run_program("sys.exit('no error here\\nerror: a line')") == {"error": "error: a line"}
    assert run_program("sys.exit(2)") == {"error": "ended with exit code 2"}
    assert run_program("time.sleep(60)", 0.4) == {"error": "took more than 0 s"}


def test_errors_are_in_the_tables():
    error, step = {"error": "error: out of memory"}, {"seconds": [1, 2, 3], "mfu": 0.5}
    step |= {"parts": {"forward": 1}, "first_step": 9, "time_stamps": 0, "peak_bytes": 2e11}
    results = {"eager, checkpointing full": step, "eager, checkpointing none": error}
    section = markdown_section({"parts": {"step-1b-4096": results}}, "command")
    assert "| eager, checkpointing full | 2 (1-3) | 50.0% | 200,000.00 MB | 9.0 s | " in section
    assert "| eager, checkpointing none | error: out of memory | - | - | - | - | - |" in section
    for page in ("# A\n", "# A\n\n## On one GPU\n\nof another day\n"):
        assert replace_section(page, section) == f"# A\n\n{section}\n"
