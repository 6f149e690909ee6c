"""The argument parser of all commands, types of its arguments, and records of flags."""

import argparse
import difflib
import math
import sys
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any

from plumbing.flags import SAME_AS_DEFAULT, Flag, flags_in, records_in
from plumbing.messages import UserError
from plumbing.retired import check_words


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that raises UserError: one line once, not a usage page from every rank. A
    path may not be empty, as where a shell's variable is not set: that would mean this directory.
    """

    def __init__(self, **options):
        super().__init__(allow_abbrev=False, **options)
        self.register("type", Path, nonempty_path)

    def error(self, message: str) -> None:
        raise UserError(f"{message}; see --help")

    def format_help(self) -> str:
        """End the help of every flag with its default, if it has one and the help does not."""
        for action in self._actions:
            is_off = action.default in (None, [], argparse.SUPPRESS) or action.default is False
            if action.help and not is_off and "(default" not in action.help:
                action.help += " (default: %(default)s)"
        return super().format_help()

    def parse_known_args(self, args=None, namespace=None):
        """Raise UserError for what is retired, and for unknown flags; the message suggests what to
        type instead."""
        args = sys.argv[1:] if args is None else args
        check_words(self.prog, args)
        namespace, unknown = super().parse_known_args(args, namespace)
        if unknown:
            flag = unknown[0].split("=")[0]
            similar = difflib.get_close_matches(flag, self._option_string_actions, 1, 0.8)
            hint = f": did you mean {similar[0]}?" if similar else ""
            self.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
        return namespace, unknown


def nonempty_path(text: str) -> Path:
    """Argument type: a path."""
    if not text:
        raise argparse.ArgumentTypeError("expected a path, got ''")
    return Path(text)


def nonnegative_int(text: str, least: int = 0) -> int:
    """Argument type: an integer from 0, or from `least`, to 10^15."""
    if not text.isdecimal() or not least <= int(text) <= 1e15:
        raise argparse.ArgumentTypeError(f"expected an integer from {least} to 1e15, got '{text}'")
    return int(text)


positive_int = partial(nonnegative_int, least=1)


def duration(text: str) -> int:
    """Argument type: HOURS:MINUTES, more than none, in seconds."""
    hours, _, minutes = text.partition(":")
    if not (hours.isdecimal() and minutes.isdecimal() and int(hours) + int(minutes)):
        raise argparse.ArgumentTypeError(f"expected hours:minutes, as 23:50, got '{text}'")
    return 3600 * int(hours) + 60 * int(minutes)


def nonnegative_float(text: str) -> float:
    """Argument type: a number from 0 to 1e38, which float32 can hold."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 <= number <= 1e38:
        raise argparse.ArgumentTypeError(f"expected a number from 0 to 1e38, got '{text}'")
    return number


def positive_float(text: str) -> float:
    """Argument type: a number above 0, up to 1e38."""
    number = nonnegative_float(text)
    if not number:
        raise argparse.ArgumentTypeError(f"expected a number above 0, got '{text}'")
    return number


# ---------------------------------------------------------------------------- records of flags

USED_MOST = "used most"
TYPES = {int: positive_int, float: nonnegative_float}  # of a flag, by the type of its default


def parse(kind: type, words: list[str] | None = None):
    """Return the record of a command line, by default this process's. The first line of the class's
    docstring is the first of --help."""
    short = "torchrun %(prog)s [flags]" if hasattr(kind, "used_most") else None
    parser = Parser(usage=short, description=kind.__doc__.partition("\n")[0])
    add_flags(parser, kind)
    return record_of(kind, vars(parser.parse_args(words)))


def add_flags(parser: argparse.ArgumentParser, kind: type) -> None:
    """Add the flags of a record to a parser, under the headings of their groups; first come those
    that the record says are `used_most`, if it does."""
    headings = {}
    used_most = getattr(kind, "used_most", "").split()
    if used_most:
        headings[USED_MOST] = parser.add_argument_group(USED_MOST)

    def add(name: str, spec: Flag, default) -> None:
        if name in used_most:
            spec = spec._replace(group=USED_MOST)
        if spec.group not in headings:
            new = parser.add_argument_group(spec.group) if spec.group else parser
            headings[spec.group] = new
        add_flag(headings[spec.group], name, spec, default)

    for f in fields(kind):
        if "flag" in f.metadata:
            add(f.name, f.metadata["flag"], f.default)
        for name in f.metadata.get("names", ()):
            spec = flags_in(type(f.default))[name]
            if name in f.metadata["shown"]:
                without_default = spec.help.partition(" (default")[0]
                shown = f.metadata["shown"][name]
                spec = spec._replace(help=f"{without_default} (default: {shown})")
            group = spec.group or f.metadata["group"]
            add(name, spec._replace(group=group), getattr(type(f.default), name))


def add_flag(group: argparse._ActionsContainer, name: str, spec: Flag, default) -> None:
    """Add one flag. The parsed namespace has those alone that were typed; so the help, and not
    argparse, tells the default."""
    unset = default if spec.unset is SAME_AS_DEFAULT else spec.unset
    help = spec.help
    if unset not in (None, False, (), "") and "(default" not in help:
        shown = " ".join(map(str, unset)) if isinstance(unset, tuple) else unset
        help += f" (default: {shown})"
    options = dict(help=help, default=argparse.SUPPRESS) | spec.options
    if spec.choices:
        options["choices"] = spec.choices
        if spec.type:
            options["type"] = spec.type
    elif isinstance(default, bool):
        run_chooses = unset is None  # so that --no-NAME means something, too
        options["action"] = argparse.BooleanOptionalAction if run_chooses else "store_true"
    else:
        options["type"] = spec.type or TYPES.get(type(default), str)
    option = f"--{name.replace('_', '-')}"
    if option in group._option_string_actions:
        raise UserError(f"{option} is a flag already: give the model's field another name")
    group.add_argument(name if spec.is_positional else option, **options)


def record_of(kind: type, typed: dict[str, Any]):
    """Return a record with the values that were `typed`, by name, and defaults for all others."""
    own = {name: typed[name] for name in flags_in(kind) if name in typed}
    own = {name: tuple(v) if isinstance(v, list) else v for name, v in own.items()}
    for f in records_in(kind):
        inner = {name: typed[name] for name in f.metadata["names"] if name in typed}
        own[f.name] = replace(f.default, **inner)
    if "typed" in {f.name for f in fields(kind)}:
        own["typed"] = frozenset(typed)
    return kind(**own)
