"""Write docs/map.md, every file with the first line of its docstring, and labs/README.md's tables.

A row of these tables is what a lab's check.py says of it, in the order of labs/run.py.
"""

import ast
import contextlib
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# From what is run to what everything needs: a folder imports from those that come after it, and
# from the top.
FOLDERS = (
    ". perf runs costs files models techniques text plumbing labs labs/machinery docs tests".split()
)
HEAD = """# The map

Every file with the first line of its docstring, made by `python docs/map.py`. Folders
up to plumbing/ import only from those that come after them, and from the top. At the top, model.py
imports nothing of ours. labs/, docs/ and tests/ import from all.
Each lab has a folder in labs/.
"""


def phrase(path: Path) -> str:
    """Return the first line of a file's docstring."""
    docstring = ast.get_docstring(ast.parse(path.read_text()))
    if not docstring:
        raise SystemExit(f"{path} has no docstring: begin it with a line that says what it is")
    return docstring.splitlines()[0]


def page() -> str:
    """Return the text of docs/map.md."""
    parts = [HEAD]
    for folder in FOLDERS:
        files = sorted((ROOT / folder).glob("*.py"))
        about = [path for path in files if path.name == "__init__.py"]
        title = "The top" if folder == "." else f"{folder}/"
        parts.append(f"\n## {title}\n\n{phrase(about[0])}\n" if about else f"\n## {title}\n")
        for path in files:
            if path not in about:
                place = path.relative_to(ROOT)
                parts.append(f"* [{place.name}](../{place}): {phrase(path)}")
    return "\n".join(parts) + "\n"


def constants(path: Path) -> dict[str, object]:
    """Return what a file says in NAME = "text" or another literal."""
    found = {}
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            with contextlib.suppress(ValueError):
                found[node.targets[0].id] = ast.literal_eval(node.value)
    return found


def tables(text: str) -> str:
    """Return labs/README.md's text with the rows that the labs have now."""
    labs = ROOT / "labs"
    order = re.search('ORDER = """(.*?)"""', (labs / "run.py").read_text(), re.DOTALL)[1].split()
    asked, taught = [], []
    for lab in order:
        says, answer = constants(labs / lab / "check.py"), (labs / lab / "answer.py").read_text()
        file, function = says["LEADS_TO"]
        lines = answer[answer.index("# >>>") : answer.index("# <<<")].count("\n") - 1
        question = answer.removeprefix('"""').split("\n")[0]
        cells = f"[{lab}]({lab}/README.md)", question, says["ABOUT"], f"`{function}` in {file}"
        asked.append(f"| {' | '.join(cells)} |")
        taught.append(f"| {lab} | {lines} | {says['NEEDS']} | {says['POINT']} |")
    for head, rows in (("| lab | question |", asked), ("| lab | lines |", taught)):
        old = re.search(rf"{re.escape(head)}.*\n\|[-:|]+\|\n((?:\|.*\n)*)", text)
        text = text[: old.start(1)] + "\n".join(rows) + "\n" + text[old.end(1) :]
    return text


if __name__ == "__main__":
    (ROOT / "docs/map.md").write_text(page())
    target = ROOT / "labs/README.md"
    target.write_text(tables(target.read_text()))
