"""Which file imports which, how long files are, and what each folder may hold."""

import ast
import runpy
from pathlib import Path

import pytest
from conftest import ROOT, succeed

# A folder, or a script at the top, may import those that stand after it, and its own row.
ORDER = """
bench
perf
train finetune_lora generate
runs
checkpoint
costs
files
parallel
lora
data
techniques
text
model
plumbing
""".strip().splitlines()
# Lines of Python as ruff formats them. Whoever saves lines lowers a number; none is raised unless
# another one is lowered by as much. The aim is 13,500 for all but labs and tests.
BUDGETS = {
    "top": 3261, "techniques": 2738, "text": 978, "files": 1359, "runs": 1075,
    "costs": 1803, "perf": 3305, "plumbing": 686, "labs": 12305, "tests": 14390,
}  # fmt: skip
FOLDERS = [row for row in ORDER if (ROOT / row).is_dir()]
FILES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts): path
    for folder in (".", *FOLDERS)
    for path in sorted((ROOT / folder).glob("*.py"))
    if path.name != "__init__.py"
}


def lines_of(path: Path) -> int:
    return len(path.read_text().splitlines())


def imported_by(path: Path) -> set[str]:
    """Return the project's modules that a file imports, anywhere in it."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names & FILES.keys()


def row_of(module: str) -> int:
    place = module.partition(".")[0]
    (row,) = (i for i, names in enumerate(ORDER) if place in names.split())
    return row


def test_imports_run_downwards():
    up = [
        f"{module} imports {other}"
        for module, path in FILES.items()
        for other in imported_by(path)
        if row_of(other) < row_of(module)
    ]
    assert up == []
    assert "parallel" in imported_by(FILES["train"])  # or nothing would be found


@pytest.fixture(scope="module")
def imported_first():
    """For each module of the project, the modules that its import brings with it."""
    result = succeed("tests/workers/import_each.py", *FILES)
    rows = (line.split() for line in result.out.splitlines())
    return {name: set(imported) for name, *imported in rows}, result.err


def test_every_module_can_be_imported_first(imported_first):
    modules, errors = imported_first
    assert modules.keys() == FILES.keys(), errors


def test_the_model_is_one_file():
    assert imported_by(FILES["model"]) == set()
    assert lines_of(FILES["model"]) <= 450


def test_parallelism_does_not_know_lora(imported_first):
    modules, _ = imported_first
    assert "lora" in modules["finetune_lora"]
    for name in ("parallel", "model"):
        assert "lora" not in modules[name], name


def test_flags_stop_at_the_door():
    """Only scripts and runs/ know what was typed; all else takes values that have names."""
    doors = "bench train finetune_lora generate checkpoint data runs plumbing".split()
    inner = {name: path for name, path in FILES.items() if name.partition(".")[0] not in doors}
    assert len(inner) > 30
    assert [name for name, path in inner.items() if "argparse" in path.read_text()] == []


def test_folders_and_files_are_small():
    labs, tests = (list((ROOT / folder).rglob("*.py")) for folder in ("labs", "tests"))
    labs = [path for path in labs if path.parent.name != "work"]  # a student's
    too_long = [path for path in (*FILES.values(), *labs) if lines_of(path) > 500]
    assert too_long == []
    held = {"labs": sum(map(lines_of, labs)), "tests": sum(map(lines_of, tests))}
    for path in FILES.values():
        folder = "top" if path.parent == ROOT else path.parent.name
        held[folder] = held.get(folder, 0) + lines_of(path)
    assert held.keys() == BUDGETS.keys()
    assert {name: n for name, n in held.items() if n > BUDGETS[name]} == {}


def test_the_map_is_of_these_files():
    page = runpy.run_path(str(ROOT / "docs/map.py"))["page"]
    assert (ROOT / "docs/map.md").read_text() == page(), "python docs/map.py makes it anew"
