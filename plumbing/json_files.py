"""Read JSON from files that may be damaged, or made by somebody who means harm."""

import json
from pathlib import Path
from typing import Any

from plumbing.messages import UserError

MAX_BYTES = 50_000_000  # of a file that is read whole; large tokenizers have 35 MB


def parse_json(text: str | bytes, where: object) -> Any:
    """Return the value of a text. Raise UserError, which begins with `where`, if it is no JSON."""
    try:
        return json.loads(text if isinstance(text, str) else text.decode())
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where} is damaged: {error}")


def check_string(value: object, what: str) -> str:
    """Return a string that was in a JSON file. Raise UserError for another value.

    JSON can hold half of a character, a lone surrogate, and UTF-8 cannot: it becomes U+FFFD."""
    if not isinstance(value, str):
        raise UserError(f"{what} {value!r:.60}: give it as a string")
    return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


class JsonFile(dict):
    """The JSON object in a file. Raises UserError for a damaged file and for a missing key."""

    def __init__(self, path: Path):
        if not path.is_file() or path.stat().st_size > MAX_BYTES:
            raise UserError(f"{path} is no file of at most {MAX_BYTES / 1e6:.0f} MB")
        content = parse_json(path.read_bytes(), path)
        if not isinstance(content, dict):
            raise UserError(f"{path} is damaged: it is not a JSON object")
        super().__init__(content)
        self.path = path

    def __missing__(self, key: str):
        raise UserError(f"{self.path} has no '{key}'")

    def checked(self, name: str, value: Any, kind: type, limit=2**31, above=0) -> Any:
        """Return a value from this file, converted to `kind`. Raise UserError for another type, and
        for a number that is not between `above` and `limit`."""
        fits = type(value) is kind or (type(value), kind) == (int, float)
        if not fits or (kind in (int, float) and not above < value < limit):
            raise UserError(f"{self.path} is damaged: {name} cannot be {value!r:.50}")
        return check_string(value, name) if kind is str else kind(value)
