"""docs/moving.md: each recipe's command is run, and what it records is what the tables say.

A table has a column for each command before it, and a row for each setting. Its cells have, like
`this`, the values of the flag that the last column names."""

import json
import re
import shutil
from typing import NamedTuple

import pytest
from conftest import ROOT, hugging_face_model, launch, parsed_by
from test_docs import Command, parse, shell_lines

from model import LlamaConfig
from plumbing.flags import values_of
from techniques.optimizers import PEAK_RATES
from text.bpe import train_tokenizer

PAGE = ROOT / "docs/moving.md"
TRAINING = ("train.py", "finetune_lora.py", "preferences.py", "rewards.py", "distill.py")
SECTIONS = re.findall(r"^## (.*)\n((?:.*\n)*?)(?=## |\Z)", PAGE.read_text(), re.MULTILINE)
WHOLE_LENGTH = 8192  # the longest row of all recipes
SMALL = "--dim 16 --n-layers 1 --n-heads 2 --n-kv-heads 1 --ffn-dim 32"  # in place of a preset's


class Setting(NamedTuple):
    name: str
    values: str
    here: str

    @property
    def flag(self) -> str:
        return re.search(r"`--([a-z-]+)", self.here)[1]


class Recipe(NamedTuple):
    name: str
    command: Command
    settings: list[Setting]  # those whose values the page gives


def rows_of(text: str) -> list[list[str]]:
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def recipes_of(section: str, text: str, folder) -> list[Recipe]:
    """Return the recipes of a section: its first table has a column for each."""
    heading, _, table = text.partition("| setting |")
    page = folder / f"{section}.md"
    page.write_text(heading)
    commands = []
    for line in shell_lines(page):
        commands += [c for c in parse(page, line) if c.script in TRAINING]
    first_table = table.split("\n\n")[0]
    (names, _, *rows) = rows_of(f"| setting |{first_table}")
    assert len(commands) == len(names) - 2
    found = []
    for column, command in enumerate(commands, 1):
        settings = [Setting(row[0], row[column], row[-1]) for row in rows if "`" in row[column]]
        found.append(Recipe(f"{section} {names[column]}", command, settings))
    return found


@pytest.fixture(scope="module")
def recipes(tmp_path_factory) -> list[Recipe]:
    folder = tmp_path_factory.mktemp("pages")
    found = []
    for section, text in SECTIONS:
        if "| setting |" in text:
            found += recipes_of(section, text, folder)
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
    record = dict(prompt="Two?", completion="2")
    pair = dict(prompt="Two?", chosen="2", rejected="3")
    for name, line in (("chats", record), ("pairs", pair), ("prompts", pair)):
        (directory / f"{name}.jsonl").write_text(f"{json.dumps(line)}\n" * 40)
    (directory / "reward.py").write_text("def reward(answer, **others):\n    return len(answer)")
    config = LlamaConfig(32, 1, 2, 1, 32, 600 + 256, WHOLE_LENGTH, tie_embeddings=False)
    for name in ("Llama-3.1-8B", "out/base"):
        hugging_face_model(config).save_pretrained(directory / name)
        shutil.copy(tokenizer, directory / name / "tokenizer.model")
    return directory


def recorded(recipe: Recipe, directory) -> dict:
    """Run a recipe's command until it has written config.json; return its flags, and the values
    that it has chosen."""
    words = [word.replace("~", str(directory)) for word in recipe.command.arguments]
    if "--model" in words:
        words += SMALL.split()
    out = directory / recipe.name.replace(" ", "-").replace("`", "")
    worker = "tests/workers/until_recorded.py"
    result = launch(worker, directory, recipe.command.script, *words, "--out", out, timeout=120)
    assert set(result.codes) == {0}, (recipe.name, result.err[-2000:])
    config = json.loads((out / "config.json").read_text())
    return config["flags"] | config["facts"]


def as_text(value) -> list[str]:
    values = value if isinstance(value, list | tuple) else [value]
    return [str(value) for value in values]


def test_each_command_trains_what_its_table_says(recipes, home):
    """ "give" stands where the command names the flag, since its default is another value; and "the
    same" where it need not."""
    assert len(recipes) == 16  # 1 of torchtitan, 4, 2, 2, 2, 2 and 3 of the others
    for recipe in recipes:
        values = recorded(recipe, home)
        defaults = values_of(parsed_by(recipe.command.script, *needed(recipe.command)))
        compared = set()
        for name, cell, here in recipe.settings:
            setting = Setting(name, cell, here)
            flag = setting.flag.replace("-", "_")
            compared.add(flag)
            where = (recipe.name, name, setting.flag)
            expected = re.findall("`([^`]+)`", cell)
            assert as_text(values[flag]) == expected, where
            default = as_text(defaults[flag])
            if here.startswith("the same"):
                assert default in (expected, ["None"]) or "give" in here, where
            if f"give `--{setting.flag}`" in here:
                assert f"--{setting.flag}" in recipe.command.arguments, where
            if here.startswith("other default") and "give" in here:
                assert default != expected, where
        assert compared >= {"seq_len", "batch", "lr", "lr_schedule"} - left_out(recipe), recipe.name


def needed(command: Command) -> list[str]:
    """Return those arguments without which a script does not begin."""
    words = command.arguments
    kept = []
    for flag in ("--init", "--reward"):
        if flag in words and command.script != "train.py":
            kept += [flag, words[words.index(flag) + 1]]
    return kept


def left_out(recipe: Recipe) -> set[str]:
    """nanochat's schedule is the one that cannot be had here."""
    return {"lr_schedule"} if recipe.name.startswith("nanochat") else set()


def test_every_row_says_what_is_here(recipes):
    begins = ("the same", "other default", "other unit", "no such thing here, because", "always")
    for section, text in SECTIONS:
        for table in text.split("| setting |")[1:]:
            for row in rows_of(table.split("\n\n")[0])[2:]:
                assert len(row) > 2, (section, row)
                here = row[-1]
                assert here.startswith(begins) or "--" in here or "](" in here, (section, row)


def test_the_page_has_the_table_of_rates():
    (text,) = (text for name, text in SECTIONS if name == "Learning rates")
    expected = []
    for job, rates in PEAK_RATES.items():
        for number, (least, rate, source) in enumerate(rates):
            size = f"{least / 1e9:g} B" if least else "0"
            expected.append([job if not number else "", size, f"{rate:g}", source])
    assert rows_of(text)[2:] == expected
