"""Command lines of the training scripts are read as they were before runs were records.

frozen_flags.jsonl has command lines that were drawn at random, and what the parsers of commit
86671ca made of them: the values of all flags for the first line of a script, those that differ from
it for the others, or the text of the refusal."""

import json

import pytest
from conftest import ROOT, parsed_by

from plumbing.flags import values_of
from plumbing.messages import UserError

FROZEN = ROOT / "tests/frozen_flags.jsonl"
LINES = [json.loads(line) for line in FROZEN.read_text().splitlines()]
WHOLE = [line for line in LINES if len(line.get("values", ())) > 40]
DEFAULTS = {line["script"]: line["values"] for line in WHOLE}


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
            assert found == DEFAULTS[script] | line["values"], line
