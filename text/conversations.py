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
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from plumbing.processes import UserError, print_rank_zero
from text.corpora import (
    Reading,
    check_string,
    document_name,
    kind_of,
    read_records,
    split_of,
    standard_library,
)

Message = dict[str, Any]  # {"role": "user", "content": "Hi"}, and what else the template reads
Conversation = list[Message]

# --------------------------------------------------------------------------- conversation files

# Roles of several formats -> those of chat templates.
ROLES = {name: name for name in ("system", "user", "assistant", "tool")}
ROLES |= dict(developer="system", human="user", gpt="assistant", ipython="tool", function="tool")
MESSAGE_KEYS = ("role", "from"), ("content", "value")
MESSAGES = '{"messages": [{"role", "content"}, ...]}'
LAYOUTS = ("messages",), ("conversations",), ("instruction", "output"), ("prompt", "completion")
LINE_FORMATS = (
    f'{MESSAGES}, {{"conversations": [{{"from", "value"}}, ...]}}, {{"instruction", "input", '
    f'"output"}} or {{"prompt", "completion"}}'
)
# What else is read in a line, and in a message.
LINE_FIELDS = {"system", "history", "tools", "functions", "weight", "train", "input"}
LINE_FIELDS.update(*LAYOUTS)
# Fields of a message of which a template may write nothing.
MEANT = ("tool_calls", "function_call", "reasoning_content")
MESSAGE_FIELDS = {"weight", "train", "tool_call_id", "name", *MEANT}
MESSAGE_FIELDS.update(*MESSAGE_KEYS)


class Line(NamedTuple):
    """A conversation of a file: where it stands, and the tools that it may call."""

    number: int
    where: str
    messages: Conversation
    tools: list | None = None


def read_conversations(path: Path, reading: Reading) -> Iterator[Line]:
    """Yield the conversation in each line of a JSONL file, or in each element of a JSON array.

    A line is a JSON object in one of the LINE_FORMATS; "input" may be missing. Messages after the
    last answer are left out, since they have no targets. Raise UserError where a line is something
    else. A note names the fields that nothing here reads and that may mean something."""
    unread = set()
    for number, where, record in read_records(path, LINE_FORMATS, reading):
        with reading.one(where):
            record = {key: value for key, value in record.items() if value is not None}
            messages, tools = conversation_of(record, where), _tools(record, where)
            for fields, known in ((record, LINE_FIELDS), *((m, MESSAGE_FIELDS) for m in messages)):
                unread |= {key for key in fields.keys() - known if _is_text(fields[key])}
            yield Line(number, where, messages, tools)
    if unread:
        names = ", ".join(sorted(unread))
        print_rank_zero(f"note: {path} has fields that are not read: {names}", file=sys.stderr)


def _is_text(value: object) -> bool:
    """Return whether a field holds text, yes or no, or a list of messages."""
    return isinstance(value, str | bool) or (
        isinstance(value, list) and isinstance([*value, 0][0], dict)
    )


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
    messages = record[name]
    if answer:
        keys = (name, "input", *answer)
        *prompts, said = (check_string(record.get(k, ""), f'{where}: "{k}" is') for k in keys)
        messages = _one_turn("\n\n".join(filter(None, prompts)), said)
    if not isinstance(messages, list):
        raise UserError(f'{where}: "{name}" is not a list: give {MESSAGES}')
    turns = record.get("history", [])
    if not isinstance(turns, list) or any(not isinstance(t, list) or len(t) != 2 for t in turns):
        raise UserError(f'{where}: "history" is no list of [question, answer]')
    earlier = itertools.chain(*(_one_turn(*turn) for turn in turns))
    numbered = enumerate([*earlier, *messages], 1)
    checked = [_message(message, f"{where}: message {i}") for i, message in numbered]
    if system := check_string(record.get("system", ""), f'{where}: "system" is'):
        if checked and checked[0]["role"] == "system":
            raise UserError(f'{where}: both a "system" and a system message: leave one out')
        checked.insert(0, {"role": "system", "content": system})
    while checked and checked[-1]["role"] != "assistant":
        checked.pop()
    if not checked:
        raise UserError(f"{where}: no message has the role assistant: give an answer to train on")
    if not _counts(record, where):
        checked = [message | {"train": False} for message in checked]
    return checked


def _one_turn(prompt: str, answer: str) -> Conversation:
    return [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]


def _counts(fields: dict, where: str) -> bool:
    """Return whether a line's answers, or a message, are targets: OpenAI's files say no by a weight
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


def _message(message: object, which: str) -> Message:
    """Return a message of a conversation file. Raise UserError if it is not valid."""
    if not isinstance(message, dict):
        raise UserError(f'{which} is {message!r:.60}: give {{"role": "...", "content": "..."}}')
    message = {key: v for key, v in message.items() if v or (v is not None and key not in MEANT)}
    if len(message.keys() & {*itertools.chain(*MESSAGE_KEYS)}) > 2:
        raise UserError(f"{which} has its role or content by two names: leave one of them out")
    role, content = (message.pop(a, message.pop(b, None)) for a, b in MESSAGE_KEYS)
    if not isinstance(role, str) or role not in ROLES:
        raise UserError(f'{which} has the "role" {role!r:.60}: give one of {", ".join(ROLES)}')
    message = {"role": ROLES[role]} | message
    try:
        for call in (calls := message.get("tool_calls", [])):
            function = call["function"]  # whose arguments templates take as they are, not as text
            if isinstance(function.get("arguments"), str):
                function["arguments"] = json.loads(function["arguments"] or "{}")
    except (AttributeError, KeyError, RecursionError, TypeError, ValueError):
        given = '[{"function": {"name": "...", "arguments": {...}}}, ...]'
        raise UserError(f'{which} has the "tool_calls" {calls!r:.60}: give {given}')
    message["content"] = content
    if content is not None or not (calls or "function_call" in message):
        message["content"] = check_string(content, f'{which} has the "content"')
        if ROLES[role] == "assistant" and not (content.strip() or calls):
            raise UserError(f"{which} is an empty answer: write one, or leave the line out")
    if ROLES[role] == "assistant":
        said = {key: message.pop(key) for key in ("weight", "train") if key in message}
        message |= {} if _counts(said, which) else {"train": False}
    return message


# ------------------------------------------------------------------------- the default data set

MAX_SOURCE_LENGTH = 1200  # characters
SUMMARY_LENGTHS = range(15, 301)  # characters: less says nothing, more is not a summary
Function = ast.FunctionDef | ast.AsyncFunctionDef


def docstrings() -> Iterator[tuple[str, str, Conversation]]:
    """Yield (split, module, conversation): the user shows a function of the standard library, and
    the assistant answers with the first paragraph of its docstring.

    Modules are held out as files are in pretraining on `python`, so validation is on functions
    that a model pretrained there has not seen. Each source occurs once. Training modules come
    first ("train" before "val"), so a function that is also in one of them is never held out."""
    names = ((document_name(path), path) for path in standard_library())
    seen = set()
    for split, name, path in sorted((split_of(name), name, path) for name, path in names):
        text = path.read_text(encoding="utf-8")
        lines = text.split("\n")  # not splitlines(): Python's line numbers ignore form feeds
        for function in ast.walk(ast.parse(text)):
            docstring = isinstance(function, Function) and ast.get_docstring(function)
            if not docstring:
                continue
            summary = " ".join(re.split(r"\n\s*\n", docstring)[0].split())  # its first paragraph
            source = _without_docstring(function, lines)
            fits = 0 < len(source) <= MAX_SOURCE_LENGTH and len(summary) in SUMMARY_LENGTHS
            if fits and source not in seen:
                seen.add(source)
                prompt = f"Write the docstring for this function.\n\n{source}"
                yield split, name, _one_turn(prompt, summary)


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


# ------------------------------------------------------------------------------ of --data


def conversations(data: list[str], reading: Reading) -> Iterator[tuple[str, Line]]:
    """Yield (split, conversation) for each conversation of --data. Lines of files are held out as
    in pretraining on the same files."""
    if data == ["python"] and not Path("python").exists():
        for split, module, messages in docstrings():
            yield split, Line(0, module, messages)
        return
    for file in files_of(data, LINE_FORMATS):
        for line in read_conversations(file, reading):
            yield split_of(f"{document_name(file)}:{line.number}"), line


def files_of(data: list[str], expected: str) -> Iterator[Path]:
    """Yield the files of --data, and those inside its directories. Raise UserError, which asks for
    the `expected`, where a directory has none."""
    for path in map(Path, data):
        inside = (file for file in path.rglob("*") if kind_of(file) == ".jsonl")
        if not (files := sorted(inside) if path.is_dir() else [path]):
            raise UserError(f"{path} holds no .jsonl file: give one with lines like {expected}")
        yield from files
