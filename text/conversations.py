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

from plumbing.messages import UserError, print_rank_zero
from text.corpora import (
    Reading,
    check_string,
    document_name,
    kind_of,
    read_records,
    split_of,
    standard_library,
)

# Messages: {"role": "user", "content": "Hi"}, and what else the template reads.
Conversation = list[dict[str, Any]]

# --------------------------------------------------------------------------- conversation files

# Roles of several formats -> those of chat templates.
ROLES = {name: name for name in ("system", "user", "assistant", "tool")}
ROLES |= dict(developer="system", human="user", gpt="assistant", ipython="tool", function="tool")
ALIASES = {"from": "role", "value": "content"}  # ShareGPT's names of a message's fields
# Fields of a message that a chat template may write, or may not know.
OPTIONAL_FIELDS = ("tool_calls", "function_call", "reasoning_content")
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
        names = (name, "input", *answer)
        texts = [check_string(record.get(n, ""), f'{where}: "{n}" is') for n in names]
        messages = _one_turn("\n\n".join(filter(None, texts[:2])), texts[2])
    elif not isinstance(messages := record[name], list):
        raise UserError(f'{where}: "{name}" is not a list: give {MESSAGES}')
    turns = record.get("history", [])
    if not isinstance(turns, list) or any(not isinstance(t, list) or len(t) != 2 for t in turns):
        raise UserError(f'{where}: "history" is no list of [question, answer]')
    messages = [*itertools.chain(*(_one_turn(*turn) for turn in turns)), *messages]
    messages = [_message(m, f"{where}: message {i}") for i, m in enumerate(messages, 1)]
    if system := check_string(record.get("system", ""), f'{where}: "system" is'):
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


def _one_turn(prompt: str, answer: str) -> Conversation:
    return [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]


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
    # A null is a missing field, and so are an empty list of calls and empty reasoning.
    given = {k: v for k, v in message.items() if v or (v is not None and k not in OPTIONAL_FIELDS)}
    message = {ALIASES.get(key, key): value for key, value in given.items()}
    if len(message) < len(given):
        raise UserError(f"{which} has its role or content by two names: leave one of them out")
    role, calls = message.get("role"), message.get("tool_calls", [])
    if not isinstance(role, str) or role not in ROLES:
        raise UserError(f'{which} has the "role" {role!r:.60}: give one of {", ".join(ROLES)}')
    message["role"] = ROLES[role]
    try:
        for function in (call["function"] for call in calls):
            if isinstance(function.get("arguments"), str):  # templates take an object
                function["arguments"] = json.loads(function["arguments"] or "{}")
    except (AttributeError, KeyError, RecursionError, TypeError, ValueError):
        expected = '[{"function": {"name": "...", "arguments": {...}}}, ...]'
        raise UserError(f'{which} has the "tool_calls" {calls!r:.60}: give {expected}')
    is_call = calls or "function_call" in message
    if "content" in message or not is_call:
        message["content"] = check_string(message.get("content"), f'{which} has the "content"')
    if message["role"] == "assistant":
        if not (is_call or message["content"].strip()):
            raise UserError(f"{which} is an empty answer: write one, or leave the line out")
        train = {} if _is_trained_on(message, which) else {"train": False}
        message = {k: v for k, v in message.items() if k not in ("weight", "train")} | train
    return message


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
    return "\n".join(line.removeprefix(" " * function.col_offset) for line in source)


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
    files = files_of(data, expected)
    samples = [s for file in files for s in read_conversations(file, reading, parse, expected)]
    if not samples:
        raise UserError(f"{' '.join(data)} holds no conversation: give lines like {expected}")
    return samples


def files_of(data: list[str], expected: str) -> Iterator[Path]:
    """Yield the files of --data, and those inside its directories. Raise UserError, which asks for
    lines like `expected`, where a directory has none."""
    for path in map(Path, data):
        inside = (file for file in path.rglob("*") if kind_of(file) == ".jsonl")
        if not (files := sorted(inside) if path.is_dir() else [path]):
            raise UserError(f"{path} holds no .jsonl file: give one with lines like {expected}")
        yield from files
