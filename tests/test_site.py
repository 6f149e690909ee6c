"""The site of mkdocs.yml: a source's page has all of its code, and its links lead somewhere."""

import ast
import re
import runpy
import shutil
import subprocess
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import ROOT

pytest.importorskip("pygments")
site = SimpleNamespace(**runpy.run_path(str(ROOT / "docs/site.py")))


@cache
def parts(path: Path) -> list:
    return site.parts_of(path.read_text())


@pytest.mark.parametrize("path", sorted(site.SOURCES), ids=lambda path: path.name)
def test_a_page_has_all_code_and_all_prose(path):
    tree = ast.parse(path.read_text())
    whole = "\n".join(line for _, code, _ in parts(path) for line in code)
    assert whole.strip() or path.name == "__init__.py"
    said = "\n".join(prose for prose, _, _ in parts(path))
    has_empty_body = False  # a class that has only a docstring is no code without it
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            prose = ast.get_docstring(node)
            if prose:
                assert prose in said
                del node.body[0]
                has_empty_body = has_empty_body or not node.body
    if not has_empty_body:
        assert ast.dump(ast.parse(whole)) == ast.dump(tree)


def test_names_lead_to_where_they_are_defined():
    """To a function or class. Of others, such as constants, to the page that has them."""
    checked = 0
    for path in site.SOURCES:
        for address in site.definitions(path).values():
            page, _, place = address.partition("#")
            target = path
            if page:
                target = (path.parent / page.removesuffix(".html")).resolve()
            assert target in site.SOURCES, (path, address)
            if place in {defined for _, _, defined in parts(target)}:
                checked += 1
            else:
                assert place in target.read_text(), (path, address)
    assert checked > 2_000


@pytest.mark.slow
def test_the_site_is_built(tmp_path):
    """Strictly: no link of a page leads nowhere."""
    mkdocs = shutil.which("mkdocs")
    if not mkdocs:
        pytest.skip("needs requirements-docs.txt")
    command = [mkdocs, "build", "--strict", "--site-dir", tmp_path]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    page = (tmp_path / "train.py.html").read_text()
    assert re.search(r'href="\./parallel\.py\.html#parallelize"', page)
