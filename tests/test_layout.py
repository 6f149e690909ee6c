"""Which file imports which, how long files are, and what each folder may hold."""

import argparse
import ast
import contextlib
import functools
import runpy
from pathlib import Path

from conftest import ROOT, parsed_by

from plumbing.messages import UserError

# A folder, or a script at the top, may import those that stand after it, and its own row.
ORDER = """
bench report
perf
train finetune_lora preferences rewards task evaluate generate
runs
checkpoint
costs
files
parallel
lora
data
techniques
config
text
model
techniques.experts
plumbing
""".strip().splitlines()
# Lines of Python as ruff formats them. Whoever saves lines lowers a number; none is raised unless
# another one is lowered by as much, or a feature came. The aim is 13,500 without labs and tests.
BUDGETS = {
    "top": 4530, "techniques": 3469, "text": 1905, "files": 1684, "runs": 1377,
    "costs": 1009, "perf": 1872, "plumbing": 1135, "labs": 7425, "tests": 12725, "docs": 870,
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


@functools.cache
def imported_by(path: Path, anywhere: bool = True) -> set[str]:
    """Return the project's modules that a file imports, anywhere in it or outside of functions."""
    names, tree = set(), ast.parse(path.read_text())
    for node in ast.walk(tree) if anywhere else tree.body:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names & FILES.keys()


def row_of(module: str) -> int:
    names = {module, module.partition(".")[0]}  # a file may have a row of its own
    return max(i for i, row in enumerate(ORDER) if names & {*row.split()})


def test_imports_run_downwards():
    up = [
        f"{module} imports {other}"
        for module, path in FILES.items()
        for other in imported_by(path)
        if row_of(other) < row_of(module)
    ]
    assert up == []
    assert "parallel" in imported_by(FILES["train"])  # or nothing would be found


def imported_at_once(module: str) -> set[str]:
    """Return the project's modules that Python imports before the code of a module has run."""
    found, left = set(), [module]
    while left:
        new = imported_by(FILES[left.pop()], anywhere=False) - found
        found |= new
        left += new
    return found


def test_every_module_can_be_imported_first():
    assert [name for name in FILES if name in imported_at_once(name)] == []  # no circle


def test_the_model_is_one_file_and_experts():
    assert imported_by(FILES["model"]) == {"techniques.experts"}
    assert imported_by(FILES["techniques.experts"]) == set()
    assert lines_of(FILES["techniques.experts"]) <= 150
    assert lines_of(FILES["model"]) <= 450


def test_parallelism_does_not_know_lora():
    assert "lora" in imported_at_once("finetune_lora")
    for name in ("parallel", "model"):
        assert "lora" not in imported_at_once(name), name


def test_flags_stop_at_the_door():
    """Only scripts and runs/ know what was typed; all else takes values that have names."""
    scripts = "bench report train finetune_lora preferences rewards evaluate generate checkpoint"
    doors = [*scripts.split(), "data", "config", "runs", "plumbing"]
    inner = {name: path for name, path in FILES.items() if name.partition(".")[0] not in doors}
    assert len(inner) > 30
    assert [name for name, path in inner.items() if "argparse" in path.read_text()] == []


def test_folders_and_files_are_small():
    labs, tests = (list((ROOT / folder).rglob("*.py")) for folder in ("labs", "tests"))
    labs = [path for path in labs if path.parent.name != "work"]  # a student's
    too_long = [path for path in (*FILES.values(), *labs, *tests) if lines_of(path) > 500]
    assert too_long == []
    held = {"labs": sum(map(lines_of, labs)), "tests": sum(map(lines_of, tests))}
    held["docs"] = sum(map(lines_of, (ROOT / "docs").glob("*.py")))
    for path in FILES.values():
        folder = "top" if path.parent == ROOT else path.parent.name
        held[folder] = held.get(folder, 0) + lines_of(path)
    assert held.keys() == BUDGETS.keys()
    assert {name: n for name, n in held.items() if n > BUDGETS[name]} == {}


def test_flags_are_at_most_100(monkeypatch):
    """Distinct names, over all scripts but those of labs/; --x and --no-x are one."""
    flags, add_argument = set(), argparse._ActionsContainer.add_argument

    def collect(parser, *names, **options):
        flags.update(name for name in names[:1] if name.startswith("--"))
        return add_argument(parser, *names, **options)

    monkeypatch.setattr(argparse._ActionsContainer, "add_argument", collect)
    scripts = "train finetune_lora preferences rewards generate evaluate report bench data"
    for name in [*scripts.split(), "checkpoint"]:
        with contextlib.suppress(UserError):  # some ask for more
            parsed_by(f"{name}.py")
    assert {"--compile", "--rank", "--gpus", "--system", "--val-fraction", "--format"} <= flags
    assert len(flags) <= 100, sorted(flags)


def test_the_map_is_of_these_files():
    page = runpy.run_path(str(ROOT / "docs/map.py"))["page"]
    assert (ROOT / "docs/map.md").read_text() == page(), "python docs/map.py makes it anew"
