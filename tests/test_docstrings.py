"""The default data of fine-tuning, docstrings of the standard library: the functions are those of
an example written out here, and the modules held out are those that pretraining holds out."""

from conftest import parsed_by

from text import conversations
from text.corpora import Reading, read_pieces, split_of


def test_modules_held_out_are_those_that_pretraining_holds_out(monkeypatch):
    """And the order of the files does not matter."""
    some = conversations.standard_library()[::6]  # all take six times as long
    monkeypatch.setattr(conversations, "standard_library", lambda: some)
    functions = list(conversations.docstrings())
    files = [path for path in some if path.stat().st_size]
    pieces = [piece for piece in read_pieces(files) if piece.starts_document]
    split_of = {"/".join(path.parts[-2:]): p.split for path, p in zip(files, pieces, strict=True)}
    assert {(module, split) for split, module, *_ in functions} <= split_of.items()
    splits = [split for split, *_ in functions]
    assert splits.count("train") > 150 and splits.count("val") > 3
    some.reverse()
    assert list(conversations.docstrings()) == functions


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


def test_a_run_that_names_no_data_learns_docstrings(tmp_path, monkeypatch):
    """As README's commands of fine-tuning do. A record holds its data as a tuple."""
    monkeypatch.chdir(tmp_path)
    asked = parsed_by("finetune_lora.py", "--init", "base")
    form = conversations.CHATS._replace(default=lambda: iter(["a sample"]))
    assert conversations.conversations(asked.data, Reading(), form) == ["a sample"]
