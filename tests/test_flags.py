"""What a run is asked is a frozen record, and command lines are read as they were before.

frozen_flags.jsonl has command lines that were drawn at random, and what the parsers of commit
86671ca made of them: the values of all flags for the first line of a script, those that differ from
it for the others, or the text of the refusal."""

import ast
import json
import re

import pytest
from conftest import ROOT, json_lines, parsed_by, succeed
from test_layout import FILES
from test_train import flags

from bench import COMMANDS
from distill import Distilling
from evaluate import Evaluation
from finetune_lora import Finetuning
from generate import Generation
from plumbing.flags import values_of
from plumbing.messages import UserError
from plumbing.parser import parse
from preferences import Preferring
from rewards import Rewarding
from runs.flags import Pretraining

FROZEN = ROOT / "tests/frozen_flags.jsonl"
LINES = json_lines(FROZEN)
WHOLE = [line for line in LINES if len(line.get("values", ())) > 40]
DEFAULTS = {line["script"]: line["values"] for line in WHOLE}
# Since then the learning rate follows the model's size (techniques/optimizers.py).
for script in ("finetune_lora", "preferences", "rewards"):
    DEFAULTS[script]["lr"] = None


@pytest.mark.parametrize("script", DEFAULTS)
def test_command_lines_are_read_as_before(script):
    lines = [line for line in LINES if line["script"] == script]
    assert len(lines) > 90
    for line in lines:
        try:
            found = values_of(parsed_by(f"{script}.py", *line["words"]))
        except UserError as error:
            problem, _, _ = str(error).partition(" (choose from")  # which Pythons write differently
            assert problem == line["refused"], line
        else:
            expected = DEFAULTS[script] | line["values"]
            assert {name: found[name] for name in expected} == expected, line


@pytest.mark.parametrize("kind", [Pretraining, Finetuning, Preferring, Rewarding, Distilling])
def test_help_begins_with_ten_flags(kind, capsys):
    with pytest.raises(SystemExit):
        parse(kind, ["--help"])
    _, _, groups = capsys.readouterr().out.partition("used most:\n")
    used_most, *others = groups.split("\n\n")
    shown = [line.split()[0] for line in used_most.splitlines() if line.startswith("  --")]
    expected = {f"--{name.replace('_', '-')}" for name in kind.used_most.split()}
    assert set(shown) == expected and len(shown) == 10
    assert others


def test_nothing_is_changed_after_parsing():
    """Neither a record nor a namespace; and every record has the flags that are read of it."""
    kinds = [Preferring, Rewarding, Distilling, Generation, Evaluation]
    kinds += [kind for _, kind in COMMANDS.values()]
    for kind in kinds:
        assert kind.__dataclass_params__.frozen, kind
    names = {"args", "run", "asked"}
    changing = r'set_defaults|getattr\((args|run|asked), ["\w]+, '
    for module, path in FILES.items():
        assert not re.search(changing, path.read_text()), module
        for node in ast.walk(ast.parse(path.read_text())):
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", 0)]
            for target in targets:
                if isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name):
                    assert target.value.id not in names, (module, node.lineno)


def test_what_was_asked_and_what_was_found_are_kept_apart(corpus, tmp_path):
    """In OUT/config.json, and in the checkpoint, which a resumed run reads."""
    out = tmp_path / "run"
    words = flags(corpus, out, steps=2)
    for typed in ("--optimizer=adamw", "--steps=2"):
        words.remove(typed)
    succeed("train.py", *words, "--epochs=0.01", nproc=2)
    for path in (out / "config.json", *out.glob("step-*/config.json")):
        config = json.loads(path.read_text())
        asked, facts = config["flags"], config["facts"]
        assert asked == values_of(parsed_by("train.py", *map(str, words), "--epochs=0.01"))
        assert asked["optimizer"] is None and facts["optimizer"] == "muon" and facts["lr"] == 0.01
        assert (asked["dp"], facts["dp"], facts["microbatch"]) == ("auto", "ddp", 4)
        assert facts.keys() - asked.keys() == {"data_checksum", "token_offset"}
