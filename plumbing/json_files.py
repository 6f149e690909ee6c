"""Read JSON files that may be damaged."""

import json
from pathlib import Path

from plumbing.processes import UserError


def read_json(path: Path) -> dict:
    """Return the object in a JSON file. Raise UserError if the file holds no object."""
    try:
        content = json.loads(path.read_text("utf-8"))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is damaged: {error}")
    if not isinstance(content, dict):
        raise UserError(f"{path} is damaged: it is not a JSON object")
    return content
