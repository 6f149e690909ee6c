"""Write docs/map.md: every file of the project with the first line of its docstring."""

import ast
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# From what is run to what everything needs: a folder imports only from those that come after it.
FOLDERS = ". perf runs costs files techniques text plumbing labs docs tests".split()
HEAD = """# The map

Every file with the first line of its docstring, made by `python docs/map.py`. A folder imports
only from those that come after it, up to plumbing/; at the top, model.py imports nothing but torch.
What is in labs/checks and labs/answers belongs to the lab of the same name.
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


if __name__ == "__main__":
    target = ROOT / "docs/map.md"
    target.write_text(page())
    print(f"{target} has {len(page().split())} words", file=sys.stderr)
