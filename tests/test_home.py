"""docs/home.md: what its tables name is what is read, and nothing else is."""

import json
import re
from dataclasses import replace

import pytest
from conftest import ROOT
from test_chat import assistant, user
from test_formats import (
    DEEPSEEK,
    GEMMA3,
    MIXTRAL,
    OLMO2,
    OLMO3,
    PLAIN,
    QWEN2,
    QWEN3,
    QWEN3_MOE,
    our_model,
    saved,
)
from test_published import llama_3_kind, with_a_word, write

from files.conversion import export_weights
from models.family import families, family_of
from plumbing.messages import UserError
from text.conversations import CHATS, MESSAGE_FIELDS, read_conversations
from text.corpora import Reading
from text.fields import SWITCHES
from text.pairs import PAIRS
from text.tokenizer import load_tokenizer


def table(first: str) -> list[list[str]]:
    """Return the rows of the table in docs/home.md whose first column has this name."""
    page = (ROOT / "docs/home.md").read_text()
    (rows,) = re.findall(rf"^\| {first} .*\n\|[-|]+\n((?:\|.*\n)+)", page, re.MULTILINE)
    return [[cell.strip() for cell in row.strip("|").split(" | ")] for row in rows.splitlines()]


def names(cell: str) -> list[str]:
    return re.findall("`([^`]+)`", cell)


VALUES = {  # of each field
    "messages": [user("a"), assistant("b")],
    "conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}],
    "chosen": [user("a"), assistant("b")],
    "rejected": [user("a"), assistant("c")],
    "history": [["d", "e"]],
    "tools": [{"name": "f"}],
    "functions": [{"name": "f"}],
    "tool_calls": [{"function": {"name": "f", "arguments": {}}}],
    "function_call": {"name": "f"},
    **dict.fromkeys(("weight", "train", "loss"), 0),
}


def line(fields: list[str]) -> dict:
    return {field: VALUES.get(field, "text") for field in fields}


def said_of(record: dict, tmp_path, capsys) -> str:
    """Read a line, and return the note of it."""
    (tmp_path / "a.jsonl").write_text(json.dumps(record))
    capsys.readouterr()
    form = PAIRS if "chosen" in record else CHATS
    assert len(list(read_conversations(tmp_path / "a.jsonl", Reading(), form))) == 1
    return capsys.readouterr().err


def test_fields_of_conversations(tmp_path, capsys):
    """Each field is read where the tables say so: no note names it, as it does any other."""
    forms = [names(row[0]) for row in table("fields")]
    for form in forms:
        assert said_of(line(form), tmp_path, capsys) == ""
        note = said_of(line(form) | {"topic": "x"}, tmp_path, capsys)
        assert note.endswith("has fields that are not read: topic\n")
        others = [other for other in forms if other != form and "chosen" not in (*other, *form)]
        for other in others:
            with pytest.raises(UserError, match="leave one of them out"):
                said_of(line(form) | line(other), tmp_path, capsys)
    of_lines, of_messages = set(), set()
    for fields, belongs_to, _ in table("field"):
        for field in names(fields):
            if "line" in belongs_to:
                of_lines.add(field)
                form = ["instruction", "output"] if "question" in belongs_to else ["messages"]
                assert said_of(line([*form, field]), tmp_path, capsys) == ""
            if "answer" in belongs_to or "message" in belongs_to:
                of_messages.add(field)
                said = [user("a"), assistant("b") | line([field])]
                assert said_of({"messages": said}, tmp_path, capsys) == ""
    assert CHATS.fields(line(["prompt", "completion"])) == of_lines | {"prompt", "completion"}
    assert "not read: input" in said_of(line(["messages", "input"]), tmp_path, capsys)
    assert MESSAGE_FIELDS | {*SWITCHES} == of_messages | {"role", "content"}


def tokenizer_of(kind: str, directory):
    if kind == "bytes":
        return load_tokenizer("bytes")
    if kind == "with added tokens":
        ours, _ = llama_3_kind(directory, with_a_word)
        return ours
    return load_tokenizer(str(write(directory, kind)))


PUBLISHED = {family.name for family in families().values() if family.published}
MODELS = {  # a row of the table: configurations, and tokenizers
    "Llama 3 to 3.2": ([PLAIN], ["bytes"]),
    "fine-tuned Llama 3 with added tokens": ([PLAIN], ["with added tokens"]),
    "Qwen2, Qwen2.5, Qwen3": ([QWEN2, QWEN3], ["qwen3"]),
    "Mixtral, Qwen3 with experts": ([MIXTRAL, QWEN3_MOE], ["yi"]),
    "DeepSeek V3, in bfloat16": ([DEEPSEEK], ["yi"]),
    "OLMo 2": ([OLMO2], ["qwen3"]),
    "OLMo 3": ([OLMO3], ["qwen3"]),
    "Gemma 3 (text)": ([GEMMA3], ["yi"]),
    "SmolLM2, TinyLlama, Llama 2, Yi": ([PLAIN], ["smollm2", "tinyllama", "yi"]),
}


def test_all_kinds_of_models_are_in_the_table():
    rows = table("model")
    assert [row[0] for row in rows] == [*MODELS]
    assert {name for row in rows for name in names(row[1])} == PUBLISHED


@pytest.mark.slow
@pytest.mark.parametrize("row", MODELS)
def test_models_are_exported_to_the_formats_in_the_table(row, tmp_path):
    (_, types, _, formats) = next(cells for cells in table("model") if cells[0] == row)
    configs, kinds = MODELS[row]
    assert [family_of(config).name for config in configs] == names(types)
    for kind in kinds:
        home = tmp_path / kind
        home.mkdir()
        tokenizer = tokenizer_of(kind, home)
        for j, config in enumerate(configs):
            config = replace(config, vocab_size=tokenizer.vocab_size)
            run = saved(home / f"run-{j}", our_model(config), tokenizer)
            done = []
            for name, format in (("Hugging Face", "hf"), ("GGUF", "gguf")):
                try:
                    export_weights(run, home / f"{format}-{j}", format, None)
                    done.append(name)
                except UserError:
                    pass
            assert ", ".join(done) == formats
