"""What the fields of a line, or of a message, say beside its texts.

Some say whether an answer is a target. Those that may say so in another way are refused, and so are
images and sound. A note names all others that nothing reads, so that nothing is left out unsaid.
"""

import re
import sys
from collections.abc import Iterable
from pathlib import Path

from plumbing.messages import UserError, print_rank_zero

# Of OpenAI's files, of axolotl's, and of ms-swift's: 0 or false, and an answer is no target.
SWITCHES = ("weight", "train", "loss")
TRAINING = set("loss mask masked train trainable training weight weights".split())
MEDIA = set("audio audios image images video videos".split())


def is_trained_on(fields: dict, where: str) -> bool | None:
    """Return whether an answer, or those of a line, are targets; None if no field says so."""
    given = [name for name in SWITCHES if name in fields]
    for name in given:
        if fields[name] not in (0, 1):
            raise UserError(f'{where}: "{name}" is {fields[name]!r:.60}: give 0 or 1')
    return all(fields[name] for name in given) if given else None


def refuse_other_meanings(fields: dict, where: str) -> None:
    """Raise UserError for a field that may switch training in another way than the SWITCHES, or
    holds an image, a sound or a video."""
    for name, value in fields.items():
        if _says_nothing(value) or name in SWITCHES:
            continue
        words = {word.lower() for word in re.findall("[A-Z]?[a-z]+|[A-Z]+", name)}
        if words & MEDIA and value:
            raise UserError(f'{where}: "{name}" is {value!r:.60}: only text is read here')
        if words & TRAINING and (len(words) == 1 or not isinstance(value, str)):
            raise UserError(
                f'{where}: "{name}" is {value!r:.60}, and may say what to train on: give "weight", '
                f"0 or 1, or leave it out"
            )


def unread(fields: dict, known: Iterable[str]) -> set[str]:
    """Return the names of fields that are not known, and that say something."""
    return {name for name in fields.keys() - set(known) if not _says_nothing(fields[name])}


def note_unread(path: Path, names: set[str]) -> None:
    if names:
        listed = ", ".join(sorted(names))
        print_rank_zero(f"note: {path} has fields that are not read: {listed}", file=sys.stderr)


def _says_nothing(value: object) -> bool:
    return value in (None, "", [], {})
