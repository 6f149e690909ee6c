"""Read conversations: from files of several formats, and from the default data set.

A conversation is a list of messages, as chat templates take it. Its last message is an answer. The
default data set needs no download: it is the functions of Python's standard library, for which the
model learns to write the docstring.
"""

import ast
import contextlib
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from plumbing.json_files import check_string
from plumbing.messages import UserError
from text.corpora import (
    Reading,
    document_name,
    find_files,
    read_records,
    split_of,
    standard_library,
)
from text.fields import SWITCHES, is_trained_on, note_unread, refuse_other_meanings, unread
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
BESIDE = {"system", "history", "tools", "functions", *SWITCHES}  # that a line may have, too
LINE_FORMATS = (
    f'{MESSAGES}, {{"conversations": [{{"from", "value"}}, ...]}}, {{"instruction", "input", '
    f'"output"}} or {{"prompt", "completion"}}'
)


class Sample(NamedTuple):
    """A conversation of a data set, and the tools that it may call."""

    split: str  # "train" or "val"
    where: str  # file and line, or module
    messages: Conversation
    tools: list | None = None
    rejected: Conversation | None = None  # of a pair (text/pairs.py): the one with a worse answer
    # Set by text/chat.py, for each conversation: ids [n] int32 and is_target [n] bool, as arrays.
    encoded: tuple = ()


class Form(NamedTuple):
    """What the lines of a file hold: conversations (CHATS), or pairs of them (text/pairs.py)."""

    parse: Callable[[dict, str], list[Conversation]]  # a line and where it is -> one, or two
    fields: Callable[[dict], set[str]]  # a line -> those of its fields that are read
    expected: str
    default: Callable[[], Iterator[Sample]]  # of `--data python`


def read_conversations(path: Path, reading: Reading, form: Form | None = None) -> Iterator[Sample]:
    """Yield the sample in each line of a JSONL file, or in each element of a JSON array.

    A line is a JSON object of a form, by default in one of the LINE_FORMATS; "input" may be
    missing. Messages after the last answer are left out, since they have no targets. Raise
    UserError where a line is something else. A note names the fields that nothing here reads. Lines
    are held out as in pretraining on the same file."""
    form = form or CHATS
    not_read = set()
    for number, where, record in read_records(path, form.expected, reading):
        with reading.one(where):
            record = {key: value for key, value in record.items() if value is not None}
            found = form.parse(record, where)
            not_read |= unread(record, form.fields(record))
            for messages in found:
                for message in messages:
                    not_read |= unread(message, MESSAGE_FIELDS)
            split = split_of(f"{document_name(path)}:{number}")
            yield Sample(split, where, found[0], _tools(record, where), *found[1:])
    note_unread(path, not_read)


def conversation_of(record: dict, where: str) -> Conversation:
    """Return the conversation in an object of one of the LINE_FORMATS, up to its last answer."""
    layout = layout_of(record)
    if not layout:
        fields = ", ".join(map(repr, record)) or "nothing"
        raise UserError(f"{where}: an object with {fields:.200}: give {LINE_FORMATS}")
    others = [other for other in LAYOUTS if record.keys() >= {*other} and other != layout]
    if others:
        both = f"{'/'.join(layout)} and {'/'.join(others[0])}"
        raise UserError(f"{where}: both {both}: leave one of them out")
    before = beginning(record, where)
    if len(layout) == 1:
        turns = record[layout[0]]
        if not isinstance(turns, list):
            raise UserError(f'{where}: "{layout[0]}" is not a list: give {MESSAGES}')
    else:
        name, answer = layout
        turns = one_turn(question_of(record, name, where), text_of(record, answer, where))
    messages = with_beginning(before, read_messages(turns, where, before), where)
    return up_to_last_answer(messages, record, where)


def layout_of(record: dict) -> tuple[str, ...]:
    """Return the names of the fields that hold a line's conversation; none if nothing holds one."""
    return next((layout for layout in LAYOUTS if record.keys() >= {*layout}), ())


def fields_of_chat(record: dict) -> set[str]:
    layout = layout_of(record)
    return BESIDE | {*layout} | ({"input"} if len(layout) == 2 else set())


def text_of(record: dict, name: str, where: str) -> str:
    return check_string(record.get(name, ""), f'{where}: "{name}" is')


def question_of(record: dict, name: str, where: str) -> str:
    """Return a question, with the "input" that it is about."""
    parts = text_of(record, name, where), text_of(record, "input", where)
    return "\n\n".join(part for part in parts if part)


def one_turn(prompt: str, answer: str) -> Conversation:
    return [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]


def beginning(record: dict, where: str) -> Conversation:
    """Return the messages in the fields beside a conversation: its system message, and the earlier
    turns of its "history"."""
    refuse_other_meanings(record, where)
    turns = record.get("history", [])
    messages = []
    for turn in turns if isinstance(turns, list) else [None]:
        if not isinstance(turn, list) or len(turn) != 2:
            raise UserError(f'{where}: "history" is no list of [question, answer]')
        messages += one_turn(*turn)
    messages = read_messages(messages, where)
    if system := text_of(record, "system", where):
        messages.insert(0, {"role": "system", "content": system})
    return messages


def with_beginning(before: Conversation, messages: Conversation, where: str) -> Conversation:
    """Return messages after what `beginning` returned."""
    if before and messages and messages[0]["role"] == "system":
        name = "system" if before[0]["role"] == "system" else "history"
        raise UserError(f'{where}: both a "{name}" and a system message: leave one out')
    return before + messages


def up_to_last_answer(messages: Conversation, record: dict, where: str) -> Conversation:
    """Return a line's messages without those after the last answer, which have no targets."""
    while messages and messages[-1]["role"] != "assistant":
        messages = messages[:-1]
    if not messages:
        raise UserError(f"{where}: no message has the role assistant: give an answer to train on")
    if is_trained_on(record, where) is False:
        messages = [message | {"train": False} for message in messages]
    return messages


def read_messages(turns: list, where: str, before: Conversation = ()) -> Conversation:
    """Return the messages of a file as chat templates take them; `before` are those before them."""
    first = 1 + sum(message["role"] != "system" for message in before)
    messages = []
    for i, turn in enumerate(turns, first):
        messages.append(_message(turn, f"{where}: message {i}"))
    return messages


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
    is_answer = given["role"] == "assistant"
    if is_answer and not (is_call or given["content"].strip()):
        raise UserError(f"{which} is an empty answer: write one, or leave the line out")
    refuse_other_meanings(given, which)
    is_target = is_trained_on(given, which)
    if is_target and not is_answer:
        raise UserError(f"{which} is to be trained on, and no answer: only answers are targets")
    given = {name: value for name, value in given.items() if name not in SWITCHES}
    if is_answer and is_target is False:
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
                yield Sample(split, name, one_turn(prompt, summary))


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
    return "\n".join(line.removeprefix(" " * function.col_offset) for line in source)


# ----------------------------------------------------------------------------------- both kinds


def _chat_of(record: dict, where: str) -> list[Conversation]:
    return [conversation_of(record, where)]


CHATS = Form(_chat_of, fields_of_chat, LINE_FORMATS, docstrings)


def conversations(data: list[str], reading: Reading, form: Form = CHATS) -> list[Sample]:
    """Return the samples of --data."""
    if [*data] == ["python"] and not Path("python").exists():
        return [*form.default()]
    samples = []
    for file in files_of(data, form.expected):
        samples += read_conversations(file, reading, form)
    if not samples:
        raise UserError(f"{' '.join(data)} holds no conversation: give lines like {form.expected}")
    return samples


def files_of(data: list[str], expected: str) -> list[Path]:
    """Return the JSONL files of --data, and those inside its directories. Raise UserError, which
    asks for lines like `expected`, where there is none."""
    return find_files(data, (".jsonl",), f"give one with lines like {expected}")
