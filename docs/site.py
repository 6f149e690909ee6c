"""Hooks of MkDocs (mkdocs.yml) that make a site of the pages and the annotated sources.

    pip install -r requirements-docs.txt && mkdocs build     writes site/, which needs no network

Pages and what they link to are taken as they are. A source is a page, too: beside its code stand
its docstrings and comments, and a name is a link to where the project defines it.
"""

import ast
import html
import io
import os
import re
import tokenize
from pathlib import Path

from pygments.lexers import PythonLexer
from pygments.token import STANDARD_TYPES, Token

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ". techniques models costs runs files text plumbing perf docs".split()
SOURCES = {path for folder in FOLDERS for path in (ROOT / folder).glob("*.py")}
PAGES = {ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "labs").glob("*/README.md")}
LINK = re.compile(r"(?<=\]\()([^)#:]+)(#[\w-]+)?(?=\))")


def parts_of(source: str) -> list[tuple[str, list[str], str]]:
    """Return the parts of a source: what is said of it, its lines of code, and the name that it
    defines. A part begins with a definition, or with lines that hold nothing but a comment."""
    lines = source.splitlines()
    begins = {1: ("", "")}  # line -> prose and name of the part that begins there
    prose_lines = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        number = token.start[0]
        if token.type == tokenize.COMMENT and lines[number - 1].lstrip().startswith("#"):
            first = max(begins) if number - 1 in prose_lines else number
            said = [begins[first][0]] if first < number else []
            begins[first] = "\n".join([*said, token.string.lstrip("# -")]), ""
            prose_lines.add(number)
    tree = ast.parse(source)
    begins[1] = ast.get_docstring(tree) or begins[1][0], ""
    documented = [tree]
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            documented.append(node)
            prose = ast.get_docstring(node) or ""
            if prose or not node.col_offset:
                first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
                begins[first] = prose, node.name
    for node in documented:
        if ast.get_docstring(node):
            prose_lines.update(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    found = []
    starts = sorted(begins)
    for start, end in zip(starts, [*starts[1:], len(lines) + 1]):
        code = [lines[n - 1] for n in range(start, end) if n not in prose_lines]
        found.append((begins[start][0], code, begins[start][1]))
    return found


def definitions(path: Path) -> dict[str, str]:
    """Return where the names that a source uses are defined, as addresses from its page."""
    up = os.path.relpath(ROOT, path.parent)
    found = {}
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            found[node.name] = f"#{node.name}"
        if isinstance(node, ast.ImportFrom):
            file = node.module.replace(".", "/")
            for alias in node.names:
                if (ROOT / f"{file}.py").exists():
                    found[alias.name] = f"{up}/{file}.py.html#{alias.name}"
                elif (ROOT / f"{file}/{alias.name}.py").exists():
                    found[alias.name] = f"{up}/{file}/{alias.name}.py.html"
    return found


def annotated(path: Path) -> str:
    """Return the page of a source: its prose beside its code, whose names are links."""
    links = definitions(path)
    page = ["---\nhide: [toc]\n---\n", f"# {path.relative_to(ROOT)}\n"]
    for prose, code, name in parts_of(path.read_text()):
        spans = []
        for kind, text in PythonLexer(stripnl=False).get_tokens("\n".join(code).strip("\n")):
            span = f'<span class="{STANDARD_TYPES.get(kind, "")}">{html.escape(text)}</span>'
            is_link = kind in Token.Name and text in links
            spans.append(f'<a href="{links[text]}">{span}</a>' if is_link else span)
        page.append(f'<div class="part" id="{name}" markdown>\n<div markdown>\n\n{prose}\n\n</div>')
        shown = f'<pre class="highlight"><code>{"".join(spans)}</code></pre>' if any(code) else ""
        page.append(f"{shown}\n</div>\n")
    return "\n".join(page)


def on_files(files, config):
    """Give MkDocs the pages, what they link to, and the sources, by their paths."""
    from mkdocs.structure.files import File

    wanted, left = SOURCES | PAGES, [*PAGES]
    while left:
        page = left.pop()
        targets = {(page.parent / path).resolve() for path, _ in LINK.findall(page.read_text())}
        new = {target for target in targets if target.is_file()} - wanted
        wanted |= new
        left += [path for path in new if path.suffix == ".md"]
    for path in sorted(wanted):
        uri = path.relative_to(ROOT).as_posix()
        is_source = path.suffix == ".py"
        given = dict(content=annotated(path)) if is_source else dict(abs_src_path=str(path))
        files.append(File.generated(config, f"{uri}.md" if is_source else uri, **given))


def on_page_markdown(markdown: str, page, **_) -> str:
    """Let links to sources lead to their pages, and those to folders to the map of all files."""
    here = ROOT / Path(page.file.src_uri).parent
    of_map = os.path.relpath(ROOT / "docs/map.md", here)
    markdown = LINK.sub(lambda m: of_map if (here / m[1]).is_dir() else m[0], markdown)
    return re.sub(r"(?<=\]\()([^)#:]+\.py)(?=[)#])", r"\1.md", markdown)
