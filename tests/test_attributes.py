"""What files ask of objects of others by name, and set on them, is listed in technique.py."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from conftest import ROOT

from techniques import technique

FILES = [ROOT / "parallel.py", ROOT / "plumbing/shards.py", *(ROOT / "techniques").glob("*.py")]
ASKING = [*FILES, ROOT / "model.py", ROOT / "costs/shapes.py", ROOT / "runs/answers.py"]
ASKED, SET = technique.__doc__.split("What is set on objects of others")
MAY_SAY = set(re.findall(r"^    (\w+)  ", ASKED, re.MULTILINE))
MAY_SET = set(re.findall(r"^    \w+\.(\w+)  ", SET, re.MULTILINE))
OF_TORCH = {"grad", "data", "bias", "_modules", "_torchdynamo_disable"}
MODULES = {"torch", "config", "dist"}  # whose attributes are settings or functions


def assigned(path: Path) -> Iterator[tuple[str, str]]:
    """Yield what a file assigns to, as the object and its attribute: ("layer", "own")."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield ast.unparse(node.value), node.attr


def fields_of(path: Path) -> set[str]:
    """Return the attributes that classes of a file declare, or set on themselves or on ctx."""
    names = {attribute for place, attribute in assigned(path) if place in ("self", "ctx")}
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ClassDef):
            names |= {field.target.id for field in node.body if isinstance(field, ast.AnnAssign)}
    return names


def test_what_is_set_on_objects_of_others_is_listed():
    found = set()
    for path in FILES:
        own = fields_of(path) | (fields_of(ROOT / "model.py") - MAY_SET)
        for place, attribute in assigned(path):
            is_own = place in ("self", "ctx") or attribute in own
            if not is_own and place.split(".")[0] not in MODULES:
                found.add(attribute)
    assert found - OF_TORCH == MAY_SET


def test_what_is_asked_by_name_is_listed():
    """By getattr(x, "name", default) or hasattr(x, "name")."""
    pattern = r'(?:getattr|hasattr)\((\w+).*?, "(\w+)"'
    found = set()
    for path in ASKING:
        for place, name in re.findall(pattern, path.read_text()):
            if place not in MODULES:
                found.add(name)
    assert found - OF_TORCH - MAY_SET == MAY_SAY - MAY_SET
