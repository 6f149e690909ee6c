"""docs/gpu.py: its commands are ones that bench.py takes, and what it has measured it keeps."""

import json
import runpy
import shlex
from types import SimpleNamespace

import pytest
from conftest import ROOT, parsed_by, succeed

from model import PRESETS
from text.tokenizer import load_tokenizer

gpu = SimpleNamespace(**runpy.run_path(str(ROOT / "docs/gpu.py")))
COMMANDS = [(name, line) for part in gpu.PARTS.values() for name, line, _ in part]


@pytest.mark.parametrize("line", [line for _, line in COMMANDS])
def test_a_command_parses(line):
    script, *words = shlex.split(line)
    if script == "docs/gpu.py":
        assert words[0] == "--measure" and words[1] in gpu.MEASURES
    elif script == "bench.py":
        assert parsed_by(script, *words, "--json", "x.json").model in PRESETS
    else:
        assert (script, words[0]) == ("-m", "pytest") and (ROOT / words[-1]).exists()


def test_names_are_not_used_twice_and_a_dry_run_lists_commands():
    assert len(dict(COMMANDS)) == len(COMMANDS)
    out = succeed("docs/gpu.py", "--part", "B", "--dry-run").out
    assert [f"    python {line}" for _, line, _ in gpu.PARTS["B"]] == out.splitlines()[1::2]


def test_what_was_measured_is_kept_and_errors_are_run_again(tmp_path, monkeypatch):
    """Nothing begins for which no time is left."""
    names, ran, file = [name for name, _, _ in gpu.PARTS["A"]], [], tmp_path / "gpu.json"
    results = {names[0]: {"result": {"x": 1}}, names[1]: {"result": "error: killed"}}
    file.write_text(json.dumps(results))
    run_part, of_part = gpu.run_part, gpu.run_part.__globals__
    monkeypatch.setitem(of_part, "run_command", lambda line, *_: ran.append(line) or "done")
    monkeypatch.setattr("torch.cuda.get_device_name", lambda: "a GPU")
    monkeypatch.setitem(of_part, "PART_SECONDS", 0)
    run_part("A", file)
    assert ran == []
    monkeypatch.setitem(of_part, "PART_SECONDS", 1000)
    run_part("A", file)
    assert ran == [line for _, line, _ in gpu.PARTS["A"][1:]]
    results = json.loads(file.read_text())
    assert results[names[0]] == {"result": {"x": 1}} and results[names[1]]["result"] == "done"


@pytest.mark.parametrize("what", gpu.MEASURES)
def test_what_is_measured_in_here_runs_on_a_cpu(what):
    (line,) = succeed("docs/gpu.py", "--measure", what).out.splitlines()
    assert json.loads(line)


def test_the_vocabulary_is_as_large_as_llamas(tmp_path):
    gpu.write_tokenizer(tmp_path / "tokenizer.model")
    assert load_tokenizer(str(tmp_path / "tokenizer.model")).vocab_size == 128_256
