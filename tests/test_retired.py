"""What command lines no longer take says what replaces it, and is in the list of deletions."""

import pytest
from conftest import ROOT

from plumbing.messages import UserError
from plumbing.parser import Parser
from plumbing.retired import RETIRED


@pytest.mark.parametrize("typed", RETIRED, ids=" ".join)
def test_what_is_retired_says_what_replaces_it(typed):
    script, *words = typed if typed[0].endswith(".py") else ("train.py", *typed)
    for line in (words, ["=".join(words)]):
        with pytest.raises(UserError) as error:
            Parser(script).parse_args(line)
        assert str(error.value) == f"{' '.join(typed)} is retired: {RETIRED[typed]}"
    assert f"`{' '.join(typed)}" in (ROOT / "docs/deleted.md").read_text()


def test_a_word_that_is_retired_elsewhere_is_taken():
    parser = Parser("bench.py")
    parser.add_argument("command")
    parser.add_argument("--out")
    assert parser.parse_args(["step", "--out", "lora"]).out == "lora"
