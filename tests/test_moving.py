"""docs/moving.md: each recipe's command is run, and what it records is what the tables say.

A table has a column for each command before it, and a row for each setting. Its cells have, like
`this`, the values of the flag that the last column names. Rates are those of the code's table."""

import json
import re
from typing import NamedTuple

import pytest
from conftest import ROOT, parsed_by, succeed
from test_docs import TRAINING, Command, parse, shell_lines, write_user_files

from model import LlamaConfig
from plumbing.flags import values_of
from techniques.optimizers import PEAK_RATES
from text.bpe import train_tokenizer

PAGE = ROOT / "docs/moving.md"
SECTIONS = re.findall(r"^## (.*)\n((?:.*\n)*?)(?=## |\Z)", PAGE.read_text(), re.MULTILINE)
VALUES = re.compile("`([^`]+)`")
FLAG = re.compile("`--([a-z-]+)")
WHOLE_LENGTH = 8192  # the longest row of all recipes
SMALL = "--dim 16 --n-layers 1 --n-heads 2 --n-kv-heads 1 --ffn-dim 32"  # in place of a preset's


class Setting(NamedTuple):
    name: str
    expected: list[str]  # the values that the page gives
    here: str  # the last column
    flag: str


class Recipe(NamedTuple):
    name: str
    command: Command
    settings: list[Setting]  # those whose values the page gives


def rows_of(text: str) -> list[list[str]]:
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


@pytest.fixture(scope="module")
def recipes(tmp_path_factory) -> list[Recipe]:
    """Return all recipes: the first table of their section has a column for each."""
    page = tmp_path_factory.mktemp("pages") / "section.md"
    found = []
    for section, text in SECTIONS:
        heading, is_recipe, table = text.partition("| setting |")
        if not is_recipe:
            continue
        page.write_text(heading)
        commands = []
        for line in shell_lines(page):
            commands += [c for c in parse(page, line) if c.script in TRAINING]
        first_table = table.split("\n\n")[0]
        (names, _, *rows) = rows_of(f"{is_recipe}{first_table}")
        assert len(commands) == len(names) - 2
        for column, command in enumerate(commands, 1):
            settings = []
            for row in rows:
                if expected := VALUES.findall(row[column]):
                    here = row[-1]
                    settings.append(Setting(row[0], expected, here, FLAG.search(here)[1]))
            found.append(Recipe(f"{section} {names[column]}", command, settings))
    return found


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A user's directory with what the commands name; the models are tiny, their rows long."""
    directory = tmp_path_factory.mktemp("user")
    (directory / "my_notes").mkdir()
    for number in range(20):
        text = (ROOT / "docs/measured.md").read_text()
        (directory / f"my_notes/{number}.md").write_text(f"{number}\n{text}")
    tokenizer = directory / "chat.model"
    train_tokenizer([ROOT / "docs/home.md"], 600, tokenizer)
    config = LlamaConfig(32, 1, 2, 1, 32, 600 + 256, WHOLE_LENGTH, tie_embeddings=False)
    write_user_files(directory, tokenizer, config, ("Llama-3.1-8B", "out/base"))
    return directory


def as_text(value) -> list[str]:
    values = value if isinstance(value, list | tuple) else [value]
    return [str(value) for value in values]


@pytest.mark.slow
def test_each_command_trains_what_its_table_says(recipes, home):
    """Each runs until it has written config.json, with its flags and the values that it has chosen.

    "give" stands where the command names the flag, since its default is another value; and "the
    same" where it need not."""
    assert len(recipes) == 16  # 1 of torchtitan, 4, 2, 2, 2, 2 and 3 of the others
    for recipe in recipes:
        script, typed = recipe.command.script, recipe.command.arguments
        words = [word.replace("~", str(home)) for word in typed]
        if "--model" in words:
            words += SMALL.split()
        out = home / recipe.name.replace(" ", "-").replace("`", "")
        succeed("tests/workers/until_recorded.py", home, script, *words, "--out", out)
        config = json.loads((out / "config.json").read_text())
        values = config["flags"] | config["facts"]
        needed = []  # without which a script does not begin
        for flag in ("--init", "--reward"):
            if flag in typed and script != "train.py":
                needed += [flag, typed[typed.index(flag) + 1]]
        defaults = values_of(parsed_by(script, *needed))
        compared = set()
        for name, expected, here, flag in recipe.settings:
            where = (recipe.name, name, flag)
            field = flag.replace("-", "_")
            compared.add(flag)
            assert as_text(values[field]) == expected, where
            default = as_text(defaults[field])
            if here.startswith("the same"):
                assert default in (expected, ["None"]) or "give" in here, where
            if f"give `--{flag}`" in here:
                assert f"--{flag}" in typed, where
            if here.startswith("other default") and "give" in here:
                assert default != expected, where
        all_have = {"seq-len", "batch", "lr", "lr-schedule"}
        if recipe.name.startswith("nanochat"):  # whose schedule cannot be had here
            all_have.remove("lr-schedule")
        assert compared >= all_have, recipe.name


def test_every_row_says_what_is_here():
    begins = ("the same", "other default", "other unit", "no such thing here, because", "always")
    tables = re.findall(r"^\| setting \|.*\n(?:\|.*\n)+", PAGE.read_text(), re.MULTILINE)
    assert len(tables) == 7
    for table in tables:
        names, _, *rows = rows_of(table)
        for row in rows:
            assert len(row) == len(names), row
            here = row[-1]
            assert here.startswith(begins) or "--" in here or "](" in here, row


def test_the_page_has_the_table_of_rates():
    (text,) = (text for name, text in SECTIONS if name == "Learning rates")
    expected = []
    for job, rates in PEAK_RATES.items():
        for number, (least, rate, source) in enumerate(rates):
            size = f"{least / 1e9:g} B" if least else "0"
            expected.append([job if not number else "", size, f"{rate:g}", source])
    assert rows_of(text)[2:] == expected
