"""Read conversations: from files of several formats, and from the default data set.

A conversation is a list of messages, as chat templates take it. Its last message is an answer. The
default data set needs no download: it is the functions of Python's standard library, for which the
model learns to write the docstring.
"""

import ast
import contextlib
import itertools
import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from plumbing.json_files import check_string
from plumbing.messages import UserError, print_rank_zero
from text.corpora import (
    Reading,
    document_name,
    kind_of,
    read_records,
    split_of,
    standard_library,
)
from text.templates import OPTIONAL_FIELDS, Conversation

# --------------------------------------------------------------------------- conversation files

# Roles of several formats -> those of chat templates.
ROLES = {name: name for name in ("system", "user", "assistant", "tool")}
ROLES |= dict(developer="system", human="user", gpt="assistant", ipython="tool", function="tool")
ALIASES = {"from": "role", "value": "content"}  # ShareGPT's names of a message's fields
MESSAGE_FIELDS = {"role", "content", "name", "tool_call_id", "train", *OPTIONAL_FIELDS}
MESSAGES = '{"messages": [{"role", "content"}, ...]}'
# Fields that make a line: a list of messages, or a question and its answer.
LAYOUTS = ("messages",), ("conversations",), ("instruction", "output"), ("prompt", "completion")
PAIR = ("prompt", "chosen", "rejected")  # of text/pairs.py
LINE_FORMATS = (
    f'{MESSAGES}, {{"conversations": [{{"from", "value"}}, ...]}}, {{"instruction", "input", '
    f'"output"}} or {{"prompt", "completion"}}'
)
LINE_FIELDS = {"input", "system", "history", "tools", "functions", "weight", "train"}
LINE_FIELDS.update(*LAYOUTS, PAIR)


class Sample(NamedTuple):
    """A conversation of a data set, and the tools that it may call."""

    split: str  # "train" or "val"
    where: str  # file and line, or module
    messages: Conversation
    tools: list | None = None
    rejected: Conversation | None = None  # of a pair (text/pairs.py): the one with a worse answer
    # By chat.encode, of each conversation, as arrays: ids [n] int32, is_target [n] bool.
    encoded: tuple = ()


def read_conversations(
    path: Path, reading: Reading, parse: Callable | None = None, expected: str = LINE_FORMATS
) -> Iterator[Sample]:
    """Yield the sample in each line of a JSONL file, or in each element of a JSON array.

    A line is a JSON object in one of the LINE_FORMATS; "input" may be missing. Or `parse` returns
    the two conversations of a pair, from what is `expected` (text/pairs.py). Messages after the
    last answer are left out, since they have no targets. Raise UserError where a line is something
    else. A note names the fields that nothing here reads and that may mean something. Lines are
    held out as in pretraining on the same file."""
    unread = set()
    for number, where, record in read_records(path, expected, reading):
        with reading.one(where):
            record = {key: value for key, value in record.items() if value is not None}
            found = parse(record, where) if parse else [conversation_of(record, where)]
            tools = _tools(record, where)
            unread |= _unread(record, LINE_FIELDS)
            for message in itertools.chain(*found):
                unread |= _unread(message, MESSAGE_FIELDS)
            split = split_of(f"{document_name(path)}:{number}")
            yield Sample(split, where, found[0], tools, *found[1:])
    if unread:
        names = ", ".join(sorted(unread))
        print_rank_zero(f"note: {path} has fields that are not read: {names}", file=sys.stderr)


def _unread(record: dict, known: set[str]) -> set[str]:
    """Return the fields that are not known and may mean something: texts, yes or no, messages."""

    def may_mean(value: object) -> bool:
        has_messages = isinstance(value, list) and value and isinstance(value[0], dict)
        return isinstance(value, str | bool) or has_messages

    return {key for key in record.keys() - known if may_mean(record[key])}


def conversation_of(record: dict, where: str) -> Conversation:
    """Return the conversation in an object of one of the LINE_FORMATS, up to its last answer."""
    found = [layout for layout in LAYOUTS if record.keys() >= set(layout)]
    if not found:
        fields = ", ".join(map(repr, record)) or "nothing"
        raise UserError(f"{where}: an object with {fields:.200}: give {LINE_FORMATS}")
    if len(found) > 1:
        both = " and ".join("/".join(layout) for layout in found)
        raise UserError(f"{where}: both {both}: leave one of them out")
    name, *answer = found[0]
    if answer:
        question = _text_of(record, name, where)
        if more := _text_of(record, "input", where):
            question = f"{question}\n\n{more}" if question else more
        turns = _one_turn(question, _text_of(record, answer[0], where))
    else:
        turns = record[name]
        if not isinstance(turns, list):
            raise UserError(f'{where}: "{name}" is not a list: give {MESSAGES}')
    messages = []
    for i, turn in enumerate([*_history(record, where), *turns], 1):
        messages.append(_message(turn, f"{where}: message {i}"))
    if system := _text_of(record, "system", where):
        if messages and messages[0]["role"] == "system":
            raise UserError(f'{where}: both a "system" and a system message: leave one out')
        messages.insert(0, {"role": "system", "content": system})
    while messages and messages[-1]["role"] != "assistant":
        messages.pop()
    if not messages:
        raise UserError(f"{where}: no message has the role assistant: give an answer to train on")
    if not _is_trained_on(record, where):
        messages = [message | {"train": False} for message in messages]
    return messages


def _text_of(record: dict, name: str, where: str) -> str:
    return check_string(record.get(name, ""), f'{where}: "{name}" is')


def _one_turn(prompt: str, answer: str) -> Conversation:
    return [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]


def _history(record: dict, where: str) -> Conversation:
    """Return the messages of earlier turns."""
    turns = record.get("history", [])
    messages = []
    for turn in turns if isinstance(turns, list) else [None]:
        if not isinstance(turn, list) or len(turn) != 2:
            raise UserError(f'{where}: "history" is no list of [question, answer]')
        messages += _one_turn(*turn)
    return messages


def _is_trained_on(fields: dict, where: str) -> bool:
    """Return whether an answer, or those of a line, are targets. OpenAI's files say no by a weight
    of 0, axolotl's by train: false."""
    for name in ("weight", "train"):
        if fields.get(name, 1) not in (0, 1):
            raise UserError(f'{where}: "{name}" is {fields[name]!r:.60}: give 0 or 1')
    return bool(fields.get("weight", 1) and fields.get("train", 1))


def _tools(record: dict, where: str) -> list | None:
    """Return the tools of a line, which may be a list or JSON of one; None if it has none."""
    tools = record.get("tools") or record.get("functions") or None
    if record.get("tools") and record.get("functions"):
        raise UserError(f"{where}: both tools and functions: leave one of them out")
    with contextlib.suppress(ValueError, RecursionError):
        tools = json.loads(tools) if isinstance(tools, str) else tools
    if not isinstance(tools, list | None):
        raise UserError(f'{where}: "tools" is {tools!r:.60}: give a list')
    return tools


def _message(message: object, which: str) -> dict[str, Any]:
    """Return a message of a conversation file. Raise UserError if it is not valid."""
    if not isinstance(message, dict):
        raise UserError(f'{which} is {message!r:.60}: give {{"role": "...", "content": "..."}}')
    given = {}
    for name, value in message.items():
        # A null is a missing field, and so are an empty list of calls and empty reasoning.
        if value is None or (not value and name in OPTIONAL_FIELDS):
            continue
        name = ALIASES.get(name, name)
        if name in given:
            raise UserError(f"{which} has its role or content by two names: leave one of them out")
        given[name] = value
    role = given.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise UserError(f'{which} has the "role" {role!r:.60}: give one of {", ".join(ROLES)}')
    given["role"] = ROLES[role]
    _read_arguments(given.get("tool_calls", []), which)
    is_call = "tool_calls" in given or "function_call" in given
    if "content" in given or not is_call:
        given["content"] = check_string(given.get("content"), f'{which} has the "content"')
    if given["role"] == "assistant":
        if not (is_call or given["content"].strip()):
            raise UserError(f"{which} is an empty answer: write one, or leave the line out")
        is_trained_on = _is_trained_on(given, which)
        given.pop("weight", None)
        given.pop("train", None)
        if not is_trained_on:
            given["train"] = False
    return given


def _read_arguments(calls: list, which: str) -> None:
    """Read the arguments of calls, which may be JSON in a text: templates take an object."""
    try:
        for call in calls:
            function = call["function"]
            if isinstance(function.get("arguments"), str):
                function["arguments"] = json.loads(function["arguments"] or "{}")
    except (AttributeError, KeyError, RecursionError, TypeError, ValueError):
        expected = '[{"function": {"name": "...", "arguments": {...}}}, ...]'
        raise UserError(f'{which} has the "tool_calls" {calls!r:.60}: give {expected}')


# ------------------------------------------------------------------------- the default data set

MAX_SOURCE_LENGTH = 1200  # characters
SUMMARY_LENGTHS = range(15, 301)  # characters: less says nothing, more is not a summary
Function = ast.FunctionDef | ast.AsyncFunctionDef


def docstrings() -> Iterator[Sample]:
    """Yield a conversation for each function of the standard library: the user shows the function,
    and the assistant answers with the first paragraph of its docstring.

    Modules are held out as files are in pretraining on `python`, so validation is on functions
    that a model pretrained there has not seen. Each source occurs once. Training modules come
    first ("train" before "val"), so a function that is also in one of them is never held out."""
    modules = []
    for path in standard_library():
        name = document_name(path)
        modules.append((split_of(name), name, path))
    seen = set()
    for split, name, path in sorted(modules):
        text = path.read_text(encoding="utf-8")
        lines = text.split("\n")  # not splitlines(): Python's line numbers ignore form feeds
        for function in ast.walk(ast.parse(text)):
            docstring = isinstance(function, Function) and ast.get_docstring(function)
            if not docstring:
                continue
            first_paragraph = re.split(r"\n\s*\n", docstring)[0]
            summary = " ".join(first_paragraph.split())
            source = _without_docstring(function, lines)
            fits = 0 < len(source) <= MAX_SOURCE_LENGTH and len(summary) in SUMMARY_LENGTHS
            if fits and source not in seen:
                seen.add(source)
                prompt = f"Write the docstring for this function.\n\n{source}"
                yield Sample(split, name, _one_turn(prompt, summary))


def _without_docstring(function: Function, lines: list[str]) -> str:
    """Return the source of a function without its docstring and without indentation; an empty
    string if nothing else is in the function, or if other code shares a line with the docstring.

    lines: the lines of the module's source."""
    docstring, *rest = function.body
    before = lines[docstring.lineno - 1][: docstring.col_offset]
    if not rest or rest[0].lineno == docstring.end_lineno or before.strip():
        return ""
    start = min(node.lineno for node in [function, *function.decorator_list])
    source = lines[start - 1 : docstring.lineno - 1]
    source += lines[docstring.end_lineno : function.end_lineno]
    indentation = " " * function.col_offset
    return "\n".join(line.removeprefix(indentation) for line in source)


# ----------------------------------------------------------------------------------- both kinds


def conversations(
    data: list[str],
    reading: Reading,
    parse: Callable | None = None,
    default: Callable[[], Iterator[Sample]] | None = None,
    expected: str = LINE_FORMATS,
) -> list[Sample]:
    """Return the samples of --data. Pairs (text/pairs.py) have three other arguments."""
    if data == ["python"] and not Path("python").exists():
        return [*(default or docstrings)()]
    samples = []
    for file in files_of(data, expected):
        samples += read_conversations(file, reading, parse, expected)
    if not samples:
        raise UserError(f"{' '.join(data)} holds no conversation: give lines like {expected}")
    return samples


def files_of(data: list[str], expected: str) -> Iterator[Path]:
    """Yield the files of --data, and those inside its directories. Raise UserError, which asks for
    lines like `expected`, where a directory has none."""
    for path in map(Path, data):
        if not path.is_dir():
            yield path
            continue
        files = sorted(file for file in path.rglob("*") if kind_of(file) == ".jsonl")
        if not files:
            raise UserError(f"{path} holds no .jsonl file: give one with lines like {expected}")
        yield from files
