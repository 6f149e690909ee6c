"""What command lines no longer take says what replaces it, and is in the list of deletions."""

import pytest
from conftest import ROOT, line_of_refusal

from plumbing.messages import UserError
from plumbing.parser import Parser
from plumbing.retired import ENDED, LAST_COMMIT, RETIRED
from runs.records import warn_about_changed_flags


@pytest.mark.parametrize("typed", RETIRED, ids=" ".join)
def test_what_is_retired_says_what_replaces_it(typed):
    script, *words = typed if typed[0].endswith(".py") else ("train.py", *typed)
    for line in (words, ["=".join(words)]):
        told = line_of_refusal(Parser(prog=script).parse_args, line)
        assert told == f"{' '.join(typed)} is retired: {RETIRED[typed]}"
    assert f"`{' '.join(typed)}" in (ROOT / "docs/deleted.md").read_text()


def test_a_word_that_is_retired_elsewhere_is_taken():
    parser = Parser(prog="bench.py")
    parser.add_argument("command")
    parser.add_argument("--out")
    assert parser.parse_args(["step", "--out", "comm"]).out == "comm"


@pytest.mark.parametrize("flag, value", ENDED)
def test_a_run_that_cannot_go_on_says_which_commit_resumes_it(flag, value):
    with pytest.raises(UserError, match=f"began with {flag} {value}.* only commit {LAST_COMMIT}"):
        warn_about_changed_flags({flag.removeprefix("--"): value}, {}, may_change=set())
