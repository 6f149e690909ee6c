"""Frozen records whose fields are the flags of a command.

    @dataclass(frozen=True)
    class Measurement:
        repeats: int = flag(5, "rounds of all contestants")
        parallel: ParallelConfig = within(ParallelConfig)

`repeats` is --repeats, and the fields of ParallelConfig are flags beside it. A subclass inherits
its base's flags; `other_default` changes a default. `parse` of plumbing/parser.py reads a record
from a command line, once. A record never changes: what a run finds out later, about its device or
its data, is kept elsewhere."""

import dataclasses
from collections.abc import Callable, Iterable
from dataclasses import fields
from typing import Any, NamedTuple

SAME_AS_DEFAULT = object()


class Flag(NamedTuple):
    """What argparse and a resumed run have to know of a field."""

    help: str
    group: str  # the heading under which --help shows it
    type: Callable | None  # makes a value of the text; None: as the default's type is read
    choices: list[str] | None
    may_change: bool  # True: no warning where a resumed run has another value than before
    is_positional: bool  # an argument without a name
    options: dict  # for add_argument: nargs, metavar, const, required
    unset: Any = SAME_AS_DEFAULT  # what a parsed record holds where the flag is missing


def flag(
    default,
    help: str,
    group: str = "",
    type: Callable | None = None,
    choices: Iterable[str] = (),
    may_change: bool = False,
    is_positional: bool = False,
    unset=SAME_AS_DEFAULT,
    **options,
):
    """Return a field that is its own flag; its arguments are those of Flag."""
    spec = Flag(help, group, type, [*choices] or None, may_change, is_positional, options, unset)
    return dataclasses.field(default=default, metadata={"flag": spec})


def other_default(base: type, name: str, default):
    """Return a field of a base class once more, with another default."""
    spec = flags_in(base)[name]
    without_default = spec.help.partition(" (default")[0]
    return dataclasses.field(
        default=default, metadata={"flag": spec._replace(help=without_default)}
    )


def within(kind: type, names: Iterable[str] | None = None, group: str = "", shown=(), **defaults):
    """Return a field that holds another record. Its fields, or those in `names`, are flags of this
    command. Where a flag is missing, the field holds what `defaults` has for it, or else what it
    holds in any command. `shown` has what the help calls a default, by name."""
    specs = flags_in(kind)
    names = [*(specs if names is None else names)]
    values = {name: spec.unset for name, spec in specs.items() if spec.unset is not SAME_AS_DEFAULT}
    return dataclasses.field(
        default=kind(**values | defaults),
        metadata={"names": names, "group": group, "shown": dict(shown)},
    )


def flags_in(kind: type) -> dict[str, Flag]:
    """Return the flags of a record's own fields, by name."""
    return {f.name: f.metadata["flag"] for f in fields(kind) if "flag" in f.metadata}


def all_flags(kind: type) -> dict[str, Flag]:
    """Return the flags of a record and of the records within it, by name."""
    found = flags_in(kind)
    for f in records_in(kind):
        inner = flags_in(type(f.default))
        found |= {name: inner[name] for name in f.metadata["names"]}
    return found


def records_in(kind: type) -> list[dataclasses.Field]:
    """Return the fields that hold other records, declared by `within`."""
    return [f for f in fields(kind) if "names" in f.metadata]


def values_of(record) -> dict[str, Any]:
    """Return the values of all flags by name, as JSON has them, also of the records within."""
    values = {name: getattr(record, name) for name in flags_in(type(record))}
    for f in records_in(type(record)):
        inner = values_of(getattr(record, f.name))
        values |= {name: inner[name] for name in f.metadata["names"]}
    return {name: as_json(value) for name, value in values.items()}


def as_json(value):
    if isinstance(value, tuple):
        return [*value]
    is_plain = isinstance(value, int | float | str | None)
    return value if is_plain else str(value).removeprefix("torch.")
