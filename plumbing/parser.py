"""The argument parser of all commands, and types of its arguments."""

import argparse
import difflib
import math
import sys
from collections.abc import Callable
from functools import partial

from plumbing.messages import UserError
from plumbing.retired import check_words


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that raises UserError: one line once, not a usage page from every rank."""

    def error(self, message: str) -> None:
        raise UserError(f"{message}; see --help")

    @classmethod
    def defaults(cls, add_flags: Callable[["Parser"], None], **given) -> argparse.Namespace:
        """Return the defaults of the flags that a function adds, and the `given` values."""
        parser = cls()
        add_flags(parser)
        parser.set_defaults(**given)
        return parser.parse_args([])

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


def nonnegative_int(text: str, least: int = 0) -> int:
    """Argument type: an integer of at least 0, or of at least `least`."""
    if not text.isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(f"expected an integer of at least {least}, got '{text}'")
    return int(text)


positive_int = partial(nonnegative_int, least=1)


class Given(int):
    """An integer that was typed on the command line, where a default is a plain int."""


def given_int(text: str, least: int = 0) -> Given:
    """Argument type: nonnegative_int as Given."""
    return Given(nonnegative_int(text, least))


def duration(text: str) -> int:
    """Argument type: HOURS:MINUTES, more than none, in seconds."""
    hours, _, minutes = text.partition(":")
    if not (hours.isdecimal() and minutes.isdecimal() and int(hours) + int(minutes)):
        raise argparse.ArgumentTypeError(f"expected hours:minutes, as 23:50, got '{text}'")
    return 3600 * int(hours) + 60 * int(minutes)


def nonnegative_float(text: str) -> float:
    """Argument type: a finite number of at least 0."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 <= number < math.inf:
        raise argparse.ArgumentTypeError(f"expected a number of at least 0, got '{text}'")
    return number


def positive_float(text: str) -> float:
    """Argument type: a finite number above 0."""
    number = nonnegative_float(text)
    if not number:
        raise argparse.ArgumentTypeError(f"expected a number above 0, got '{text}'")
    return number
