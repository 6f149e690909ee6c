"""labs/: starters fail as not written yet, solutions pass, each wrong answer gets its sentence."""

import ast
import json
import re
from pathlib import Path

import pytest
from conftest import ROOT, launch, refused, slow

LABS = ROOT / "labs"
NAMES = [path.stem for path in sorted((LABS / "answers").glob("*.py"))]


def lab(*args, code: int = 0) -> str:
    """Return what a command of labs/run.py prints."""
    result = launch("labs/run.py", *args)
    assert result.codes == [code], result.out + result.err
    return result.out


def functions_of(name: str) -> dict[str, ast.FunctionDef]:
    tree = ast.parse((LABS / "answers" / f"{name}.py").read_text())
    return {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}


def solution(name: str, directory: Path) -> Path:
    path = directory / "solution.py"
    path.write_text((LABS / "answers" / f"{name}.py").read_text())
    return path


WRONG = [
    (name, wrong) for name in NAMES for wrong in functions_of(name) if wrong.startswith("wrong_")
]


def wrong_file(name: str, wrong: str, directory: Path) -> tuple[Path, str, str]:
    """A file with a wrong answer in place of the right one, its sentence, and its marker."""
    source = (LABS / "answers" / f"{name}.py").read_text()
    function = functions_of(name)[wrong]
    lines = source.splitlines()[function.lineno - 1 : function.end_lineno]
    right = next(other for other in functions_of(name) if not other.startswith("wrong_"))
    imports = [line for line in source.splitlines() if re.match(r"(import|from) ", line)]
    marker = lines[0].partition("#")[2].split(";")[0].strip()
    path = directory / f"{wrong}.py"
    path.write_text("\n".join([*imports, *lines]).replace(f"def {wrong}(", f"def {right}("))
    return path, ast.get_docstring(function), marker


@pytest.mark.parametrize("name", NAMES)
def test_starters_are_the_solutions_without_the_marked_part(name):
    starter = (LABS / f"{name}.py").read_text()
    source = (LABS / "answers" / f"{name}.py").read_text()
    before, gap, _ = re.split(r"^ +# >>>\n|^ +# <<<\n", source, flags=re.MULTILINE)
    lines = len(gap.splitlines())
    assert starter == f'{before}    raise NotImplementedError("about {lines} lines")\n'
    assert 5 <= lines <= 40


@pytest.mark.parametrize("name", NAMES)
def test_starters_fail_as_not_written_yet(name):
    assert "not written yet: about" in lab("check", name, code=1)


@pytest.mark.parametrize("seed", [0, slow(7)])
@pytest.mark.parametrize("name", NAMES)
def test_solutions_pass(name, seed, tmp_path):
    """On 2, 3 and 4 ranks; and the file that is checked is the one that was given."""
    path = solution(name, tmp_path)
    out = lab("check", name, "--file", path, "--seed", seed)
    for size in (2, 3, 4):
        assert re.search(rf"^{path}  .* {size} ranks, seed {seed} ", out, re.MULTILINE)
    assert "passed. The project's own is" in out and " no\n" not in out


@pytest.mark.parametrize("name, wrong", WRONG)
def test_wrong_answers_are_named(name, wrong, tmp_path):
    path, sentence, marker = wrong_file(name, wrong, tmp_path)
    size = 3 if wrong.endswith("s") else 2
    out = lab("check", name, "--file", path, "--ranks", size, code=1)
    assert sentence.lower() in " ".join(out.split()).lower(), out
    if marker == "numbers pass":  # so it takes more than numbers to find it
        numbers = [line for line in out.splitlines() if re.match(r"  (loss|norm|gradients) ", line)]
        assert numbers and all(line.endswith("ok") for line in numbers)
    if marker == "hangs":
        assert "stopped after 5 s" in out and "rank 0  call" in out and ", line " in out


@pytest.mark.parametrize("name", NAMES)
def test_there_are_enough_wrong_answers(name, tmp_path):
    wrong_answers = [wrong for of_lab, wrong in WRONG if of_lab == name]
    markers = [wrong_file(name, wrong, tmp_path)[2] for wrong in wrong_answers]
    assert len(markers) >= 4 and "numbers pass" in markers


@pytest.mark.parametrize("body", ["pass", "return None", "return loss, loss"])
@pytest.mark.parametrize("name", NAMES)
def test_doing_nothing_fails(name, body, tmp_path):
    source = (LABS / f"{name}.py").read_text()
    path = tmp_path / "nothing.py"
    path.write_text(re.sub(r"    raise NotImplementedError.*", f"    {body}", source))
    out = lab("check", name, "--file", path, "--ranks", 2, code=1)
    assert " no\n" in out or "failed in line" in out or "failed" in out


@pytest.mark.parametrize("name", NAMES)
def test_each_lab_has_hints_and_leads_into_the_code(name, monkeypatch):
    monkeypatch.syspath_prepend(LABS)
    module = __import__(f"checks.{name}", fromlist=["HINTS"])
    assert len(module.HINTS) == 3 and not any(re.search(r"\d\d", hint) for hint in module.HINTS)
    file, function = module.LEADS_TO
    names = {node.name: node for node in ast.parse((ROOT / file).read_text()).body
             if isinstance(node, ast.FunctionDef | ast.ClassDef)}  # fmt: skip
    assert f"labs/{name}.py" in ast.get_docstring(names[function])


def test_commands(tmp_path, monkeypatch):
    """On a copy, whose state is its own."""
    assert "next: read labs/" in lab()
    refused(launch("labs/run.py", "check", "none"), "no lab 'none'")
    state = LABS / ".state"
    before = state.read_text() if state.exists() else None
    try:
        state.unlink(missing_ok=True)
        name = NAMES[0]
        hints = [lab("hint", name) for _ in range(4)]
        assert [hint[:6] for hint in hints] == ["hint 1", "hint 2", "hint 3", "hint 3"]
        assert json.loads(state.read_text())["hints"] == {name: 3}
        lab("why", name, code=2)
        assert "# >>>" in lab("why", name, "--give-up")
    finally:
        state.unlink(missing_ok=True)
        if before is not None:
            state.write_text(before)
