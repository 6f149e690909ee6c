"""Which module imports which, and how long the files are."""

import ast
import graphlib
from pathlib import Path

import pytest
from conftest import ROOT, succeed

FOLDERS = (ROOT, ROOT / "plumbing", ROOT / "perf")
LABS = (ROOT / "labs").rglob("*.py")
FILES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts): path
    for folder in FOLDERS
    for path in sorted(folder.glob("*.py"))
    if path.name != "__init__.py"
}
CORE = "model train parallel lora finetune_lora".split()


def imported_by(path: Path) -> set[str]:
    """Return the project's modules that a file imports, anywhere in it."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names & FILES.keys()


def test_imports_run_one_way():
    graph = {name: imported_by(path) for name, path in FILES.items()}
    assert "model" in graph["train"] and "plumbing.processes" in graph["parallel"]
    tuple(graphlib.TopologicalSorter(graph).static_order())  # raises CycleError


@pytest.fixture(scope="module")
def imported_first():
    """For each module of the project, the modules that its import brings with it."""
    result = succeed("tests/workers/import_each.py", *FILES)
    rows = (line.split() for line in result.out.splitlines())
    return {name: set(imported) for name, *imported in rows}, result.err


def test_every_module_can_be_imported_first(imported_first):
    modules, errors = imported_first
    assert modules.keys() == FILES.keys(), errors


def test_parallelism_does_not_know_lora(imported_first):
    modules, _ = imported_first
    assert "lora" in modules["finetune_lora"]
    for name in ("parallel", "tensor_parallel", "model"):
        assert "lora" not in modules[name], name


def test_files_are_short():
    lines = {name: len(path.read_text().splitlines()) for name, path in FILES.items()}
    assert {name: n for name, n in lines.items() if n > 500} == {}
    assert all(len(path.read_text().splitlines()) <= 500 for path in LABS)
    assert sum(lines[name] for name in CORE) <= 1900
