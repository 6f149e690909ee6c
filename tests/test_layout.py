"""Which file imports which, and how much code a reader has to hold at once.

Three measures can only be met by clarity: tokens a line (one thought a line), reach (the tokens of
code that importing a file runs), and the tokens of each folder. Lines are not counted: code that is
easier to read may have more of them. Numbers may only fall; a feature says what it adds."""

import argparse
import ast
import contextlib
import functools
import io
import runpy
import tokenize
from collections import Counter
from pathlib import Path

import pytest
from conftest import ROOT, parsed_by

from plumbing.messages import UserError

# A folder, or a script at the top, may import those that stand after it, and its own row.
ORDER = """
bench report
perf
train finetune_lora preferences rewards distill evaluate
runs
generate
checkpoint
costs
files
parallel
lora
data
models
techniques
config
text
model
plumbing
""".strip().splitlines()
# Tokens a line of code, at most; "" is all run-time code.
DENSITY = {"": 9.5, "techniques": 9.9, "costs": 9.6, "labs": 9.7, "tests": 11.0}
REACH = {  # tokens of code that `import` runs, at most
    "lora": 10_600, "generate": 37_100, "parallel": 35_000, "data": 24_300, "checkpoint": 33_500,
    "train": 88_348, "bench": 94_843,
}  # fmt: skip
TOKENS = {  # of a folder's code, at most
    "top": 31_587, "techniques": 26_536, "costs": 9_607, "perf": 12_437, "runs": 19_452,
    "files": 15_009, "models": 8_350, "text": 18_191, "plumbing": 9_542, "labs": 68_320,
    "tests": 166_407, "docs": 11_162,
}  # fmt: skip
FOLDERS = [row for row in ORDER if (ROOT / row).is_dir()]
FILES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts): path
    for folder in (".", *FOLDERS)
    for path in sorted((ROOT / folder).glob("*.py"))
    if path.name != "__init__.py"
}


SKIPPED = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}
DOCUMENTED = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


@functools.cache
def tokens_of(path: Path) -> Counter:
    """Return how many tokens each line of code has; docstrings and comments are none."""
    source = path.read_text()
    documentation = set()  # lines
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, DOCUMENTED) and ast.get_docstring(node) is not None:
            docstring = node.body[0]
            documentation.update(range(docstring.lineno, docstring.end_lineno + 1))
    found = Counter()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        line = token.start[0]
        if token.type not in SKIPPED and token.string and line not in documentation:
            found[line] += 1
    return found


def files_in(folder: str) -> list[Path]:
    """Return the Python files of a folder, without those that a student has written."""
    paths = (ROOT / folder).rglob("*.py")
    return [path for path in sorted(paths) if path.parent.name != "work"]


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


def test_the_model_is_one_file():
    assert imported_by(FILES["model"]) == set()
    assert tokens_of(FILES["model"]).total() <= 3_100
    assert len(FILES["model"].read_text().splitlines()) <= 470


def test_parallelism_does_not_know_lora():
    assert "lora" in imported_at_once("finetune_lora")
    for name in ("parallel", "model"):
        assert "lora" not in imported_at_once(name), name


def test_flags_stop_at_the_door():
    """Only scripts and runs/ know what was typed; all else takes values that have names."""
    scripts = "bench report train finetune_lora preferences rewards distill evaluate generate"
    doors = [*scripts.split(), "checkpoint", "data", "config", "runs", "plumbing"]
    inner = {name: path for name, path in FILES.items() if name.partition(".")[0] not in doors}
    assert len(inner) > 30
    assert [name for name, path in inner.items() if "argparse" in path.read_text()] == []


def test_the_top_shows_at_most_15_files():
    assert len([*ROOT.glob("*.py")]) <= 15


def test_no_file_is_long():
    for path in (*FILES.values(), *files_in("labs"), *files_in("tests")):
        assert len(path.read_text().splitlines()) <= 500, path


@pytest.mark.parametrize("folder", DENSITY)
def test_a_line_holds_one_thought(folder):
    paths = files_in(folder) if folder else FILES.values()
    counted = [tokens_of(path) for path in paths]
    tokens = sum(lines.total() for lines in counted)
    density = tokens / sum(map(len, counted))
    assert density <= DENSITY[folder]
    assert density > DENSITY[folder] - 0.5, "lower the number: it may only fall"


@pytest.mark.parametrize("module", REACH)
def test_a_file_can_be_taken_home(module):
    reached = {module, *imported_at_once(module)}
    assert sum(tokens_of(FILES[name]).total() for name in reached) <= REACH[module]


def test_folders_hold_no_more():
    held = {}
    for folder in TOKENS:
        paths = ROOT.glob("*.py") if folder == "top" else files_in(folder)
        held[folder] = sum(tokens_of(path).total() for path in paths)
    assert {name: n for name, n in held.items() if n > TOKENS[name]} == {}


def test_flags_are_at_most_100(monkeypatch):
    """Distinct names, over all scripts but those of labs/; --x and --no-x are one."""
    flags, add_argument = set(), argparse._ActionsContainer.add_argument

    def collect(parser, *names, **options):
        flags.update(name for name in names[:1] if name.startswith("--"))
        return add_argument(parser, *names, **options)

    monkeypatch.setattr(argparse._ActionsContainer, "add_argument", collect)
    scripts = "train finetune_lora preferences rewards distill generate evaluate report bench data"
    for name in [*scripts.split(), "checkpoint"]:
        with contextlib.suppress(UserError):  # some ask for more
            parsed_by(f"{name}.py")
    assert {"--compile", "--rank", "--gpus", "--system", "--val-fraction", "--format"} <= flags
    assert len(flags) <= 100, sorted(flags)


def test_the_map_is_of_these_files():
    page = runpy.run_path(str(ROOT / "docs/map.py"))["page"]
    assert (ROOT / "docs/map.md").read_text() == page(), "python docs/map.py makes it anew"
