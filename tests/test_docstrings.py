"""The default data set of fine-tuning: docstrings of functions of the standard library."""

import ast

import pytest

from text import chat, conversations
from text.chat import encode, encode_prompt, open_samples
from text.corpora import read_pieces, split_of
from text.tokenizer import load_tokenizer

BYTES = load_tokenizer("bytes")
SOME = conversations.standard_library()[::3]  # all take three times as long


@pytest.fixture(scope="module")
def functions():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(conversations, "standard_library", lambda: SOME)
        return list(conversations.docstrings())


def test_functions_come_without_their_docstrings(functions):
    sources = set()
    for _, module, (prompt, answer), *_ in functions:
        assert (prompt["role"], answer["role"]) == ("user", "assistant")
        task, source = prompt["content"].split("\n\n", 1)
        assert task == "Write the docstring for this function."
        (function,) = ast.parse(source).body
        assert isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
        assert ast.get_docstring(function) is None, (module, source)
        assert len(source) <= 1200 and 15 <= len(answer["content"]) <= 300
        assert answer["content"] == " ".join(answer["content"].split())
        sources.add(source)
    assert len(sources) == len(functions) > 300


def test_the_same_functions_come_again_in_the_same_order(functions, monkeypatch):
    """The order of files does not matter. With fewer files, each gives the functions it gave."""
    some = SOME[::8]
    monkeypatch.setattr(conversations, "standard_library", lambda: some)
    found = list(conversations.docstrings())
    some.reverse()
    assert list(conversations.docstrings()) == found and len(found) > 100
    modules = {"/".join(path.parts[-2:]) for path in some}
    whole = [f for f in functions if f[1] in modules]
    assert [f for f in found if f in whole] == whole


def test_modules_held_out_are_those_that_pretraining_holds_out(functions):
    files = [path for path in SOME if path.stat().st_size]
    pieces = [piece for piece in read_pieces(files) if piece.starts_document]
    split_of = {"/".join(path.parts[-2:]): p.split for path, p in zip(files, pieces, strict=True)}
    assert {(module, split) for split, module, *_ in functions} <= split_of.items()
    splits = [split for split, *_ in functions]
    assert splits.count("train") > 300 and splits.count("val") > 7


SOURCE = '''
def plain(a):
    """What it does, at
    some length.

    And more."""
    return a


class A:
    @property
    @other(
        1)
    async def decorated(self):  # a comment

        "Written in one string of quotes."

        def inner():
            """Said of what is within."""
            return """
  text
    """
        return inner

    def same(self): return 1
    def short(self): "One line for all of it."; return 1
    def long(self):
        """Another statement follows here."""; return 1
    def only(self):
        """Nothing else is in this function."""
    def little(self):
        """Too short."""
        return 1
    def empty(self):
        """"""
        return 1
\f
def long():
    """This one has too long a source."""
    return [%s]


def plain_again(b):
    """A form feed and others before it do not matter."""
    return b
''' % ("123456789, " * 120)  # fmt: skip


def test_which_functions_are_shown_and_how(tmp_path, monkeypatch):
    """The functions are in a held-out module, and one of them is in a training module as well."""
    names = [f"m{i}.py" for i in range(100)]
    held_out = next(n for n in names if split_of(f"{tmp_path.name}/{n}") == "val")
    other = next(n for n in reversed(names) if split_of(f"{tmp_path.name}/{n}") == "train")
    (tmp_path / held_out).write_text(SOURCE)
    (tmp_path / other).write_text(SOURCE[: SOURCE.index("class A")])
    monkeypatch.setattr(conversations, "standard_library", lambda: sorted(tmp_path.glob("*.py")))
    found = list(conversations.docstrings())
    talks = [sample.messages for sample in found]
    shown = [(prompt["content"].split("\n\n", 1)[1], a["content"]) for prompt, a in talks]
    places = [(split, module) for split, module, *_ in found]
    in_training, in_held_out = (f"{tmp_path.name}/{name}" for name in (other, held_out))
    assert places == [("train", in_training), *[("val", in_held_out)] * 3]
    inner = 'def inner():\n    """Said of what is within."""\n    return """\n  text\n'
    assert dict(shown) == {  # lines of a string lose indentation, too, if they have enough
        "def plain(a):\n    return a": "What it does, at some length.",
        "@property\n@other(\n    1)\nasync def decorated(self):  # a comment\n\n\n    "
        + inner.replace("\n    ", "\n        ")
        + '"""\n    return inner': "Written in one string of quotes.",
        'def inner():\n    return """\n  text\n    """': "Said of what is within.",
        "def plain_again(b):\n    return b": "A form feed and others before it do not matter.",
    }


def test_rows_of_the_default_data_set(functions, monkeypatch):
    # They were found in seconds, and are not looked for again.
    monkeypatch.setattr(conversations, "docstrings", lambda: iter(functions))
    train, val, prompts, summary = open_samples(["python"], BYTES, 2048)
    for packed, split in ((train, "train"), (val, "val")):
        expected = [encode(talk, BYTES) for name, _, talk, *_ in functions if name == split]
        assert [(i.tolist(), j.tolist()) for i, j in packed.samples] == expected
    assert summary.startswith(f"{len(train.samples):,} samples in {len(train):,} rows of 2,048 tok")
    assert summary.endswith(f" % filled; {len(val.samples):,} held out, in {len(val):,} rows")
    held_out = {
        str(encode_prompt(t, BYTES)): t[-1] for name, _, t, *_ in functions if name == "val"
    }
    assert len(prompts) == chat.EXAMPLES
    for ids, answer in prompts:
        assert chat.SHORTEST <= len(BYTES.encode(answer)) + 1 <= chat.ANSWER_ROOM
        assert held_out[str(ids)]["content"] == answer and len(ids) <= 2048 - 64
