"""Texts and conversations by generate.py, compared with those of generate.stream."""

import io
import itertools
import sys
from pathlib import Path
from unittest.mock import MagicMock

import pytest
import torch.distributed as dist
from conftest import succeed
from test_chat import BYTES, assistant, user
from test_formats import our_model, saved

import generate as script
from files.loading import load_pretrained
from model import LlamaConfig
from techniques.decoding import generate, stream
from text.targets import encode_prompt

NEW = 30  # --max-new-tokens
SYSTEM = {"role": "system", "content": "Be brief."}


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    """A random model that says capital letters only and, now and then, the end of an answer."""
    config = LlamaConfig(32, 2, 4, 2, 48, vocab_size=267, max_seq_len=256)
    model = our_model(config, seed=7, factor=6, norms=(1, 1))
    says = [*b"ABCDEFGHIJKLMNOPQRSTUVWXYZ", BYTES.special["<|eot_id|>"]]
    mute = [token for token in range(config.vocab_size) if token not in says]
    model.output.weight.data[mute] = 0  # with temperature 0, some other logit is higher
    return saved(tmp_path_factory.mktemp("base") / "base", model, BYTES)


def answer(base, *messages: dict) -> str:
    """Return the answer to a conversation, from generate.stream."""
    prompt = encode_prompt([*messages], BYTES)
    model = load_pretrained(base)
    steps = stream(model, [prompt], NEW, temperature=0, stop=BYTES.stop)
    return BYTES.decode(token for (token,) in steps if token not in BYTES.stop)


@pytest.fixture
def talk(base, monkeypatch, capsys):
    """A function that runs generate.py in this process with `text` as its standard input, which may
    be a terminal.

    talk.calls: the prompts and seeds of its answers"""

    def recorded(model, prompts, *args, seed=0, **options):
        talk.calls += [(prompt, seed) for prompt in prompts]
        return stream(model, prompts, *args, seed=seed, **options)

    def talk(text: str | bytes, *flags, temperature=0, terminal=False):
        if isinstance(text, str):
            text = text.encode()
        arguments = [
            "generate.py",
            str(base),
            "--chat",
            f"--max-new-tokens={NEW}",
            f"--temperature={temperature}",
            *map(str, flags),
        ]
        typed = io.TextIOWrapper(io.BytesIO(text))
        monkeypatch.setattr(sys, "argv", arguments)
        monkeypatch.setattr(sys, "stdin", typed)
        for file in (sys.stdin, sys.stdout):
            monkeypatch.setattr(file, "isatty", lambda: terminal, raising=False)
        try:
            script.main()
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
        return capsys.readouterr()

    talk.calls = []
    monkeypatch.setattr(script, "stream", recorded)
    return talk


# ------------------------------------------------------------------------------------ prompts


def test_one_prompt_or_several_are_continued(base):
    prompts = ["Hi", "Why?"]
    flags = ["--max-new-tokens", NEW, "--temperature", 0]
    encoded = [BYTES.encode(prompt, bos=True) for prompt in prompts]
    model = load_pretrained(base)
    tokens = generate(model, encoded, NEW, temperature=0, stop=BYTES.stop)
    texts = []
    for prompt, row in zip(prompts, tokens):
        said = BYTES.decode(token for token in row if token not in BYTES.stop)
        texts.append(f"{prompt}{said}\n")
    printed = succeed("generate.py", base, "--prompt", "Hi", *flags, nproc=2).out
    assert printed == texts[0]
    printed = succeed("generate.py", base, "--prompt", "Hi", "--prompt", "Why?", *flags).out
    assert printed == f"--- {texts[0]}--- {texts[1]}"


def test_characters_of_several_tokens_are_whole(monkeypatch):
    poem = "El niño soñó: 漢字 y 🙂.\n"
    steps = [[token] for token in BYTES.encode(poem)]
    monkeypatch.setattr(script, "stream", lambda *_, **__: iter(steps))
    pieces = [*script.stream_text(None, [1], BYTES)]
    assert "".join(pieces) == poem
    assert "漢" in pieces
    assert "🙂" in pieces


# -------------------------------------------------------------------------------- with a pipe


def test_each_answer_follows_the_whole_conversation(base, talk):
    """Empty lines are no messages, neither prompts nor stop tokens are printed, and bytes that are
    not UTF-8 are replaced."""
    hi = user("Hi")
    why = user("Why?")
    first = answer(base, hi)
    second = answer(base, hi, assistant(first), why)
    third = answer(base, hi, assistant(first), why, assistant(second), hi)
    alone = answer(base, why)
    assert len({first, second, third, alone}) == 4
    assert min(len(first), len(second), len(third)) < NEW  # it has ended by itself
    printed = talk("\nHi\n  \n\nWhy?\nHi")
    assert printed.out == f"{first}\n{second}\n{third}\n"
    assert printed.err == ""
    assert talk("").out == ""
    assert talk(b"caf\xe9\n").out == answer(base, user("caf\ufffd")) + "\n"


@pytest.mark.parametrize("prompt", [[], ["--prompt", "Hi"]], ids=["conversation", "prompt"])
def test_the_system_prompt_comes_first(base, talk, prompt):
    first = answer(base, SYSTEM, user("Hi"))
    assert first != answer(base, user("Hi"))
    second = answer(base, SYSTEM, user("Hi"), assistant(first), user("Why?"))
    expected = f"{first}\n" if prompt else f"{first}\n{second}\n"
    assert talk("Hi\nWhy?\n", "--system", "Be brief.", *prompt).out == expected
    assert talk("Hi\n", "--system", "", *prompt).out == answer(base, user("Hi")) + "\n"


def test_every_answer_has_random_numbers_of_its_own(talk):
    alone = talk("", "--prompt", "Hi", "--seed", 5, temperature=3).out
    other = talk("", "--prompt", "Hi", "--seed", 6, temperature=3).out
    printed = talk("Hi\nHi\nHi\n", "--seed", 5, temperature=3).out
    assert printed.startswith(alone)
    assert alone != other
    assert [seed for _, seed in talk.calls] == [5, 6, 5, 6, 7]


# ------------------------------------------------------------------------- when it gets too long


def test_the_oldest_exchanges_are_dropped(base, talk):
    """Of three questions the first is dropped with its answer, the system prompt stays."""
    ask = [user(letter * 40) for letter in "abc"]
    first = answer(base, SYSTEM, ask[0])
    second = answer(base, SYSTEM, ask[0], assistant(first), ask[1])
    kept = [SYSTEM, ask[1], assistant(second), ask[2]]
    length = len(encode_prompt([SYSTEM, ask[0], assistant(first), *kept[1:]], BYTES))
    assert len(encode_prompt(kept, BYTES)) + NEW <= 256 < length + NEW
    printed = talk("".join(f"{m['content']}\n" for m in ask), "--system", "Be brief.")
    assert printed.out == f"{first}\n{second}\n{answer(base, *kept)}\n"
    assert talk.calls[-1][0] == encode_prompt(kept, BYTES)
    (line,) = printed.err.splitlines()
    assert "--max-new-tokens 30 are more than the 256 tokens of this model: its 2 oldest" in line


# ------------------------------------------------------------------------------------ interrupted


def test_ctrl_c_stops_an_answer_and_ctrl_d_the_conversation(base, talk, monkeypatch):
    """What has been said until then is the answer. Ctrl-C clears a line that is being typed."""
    hi = encode_prompt([user("Hi")], BYTES)
    whole = answer(base, user("Hi"))
    expected = answer(base, user("Hi"), assistant(whole[:5]), user("Why?"))
    assert expected != answer(base, user("Hi"), assistant(whole), user("Why?"))
    typed = iter(["Hi", KeyboardInterrupt, "Why?", EOFError])

    def pressed(prompt: str) -> str:
        text = next(typed)
        if isinstance(text, str):
            return text
        raise text

    def interrupted(model, prompts, *args, **options):
        """Answer the first prompt by five tokens; then Ctrl-C comes."""
        steps = stream(model, prompts, *args, **options)
        yield from itertools.islice(steps, 5 if prompts == [hi] else None)
        if prompts == [hi]:
            raise KeyboardInterrupt

    monkeypatch.setattr("builtins.input", pressed)
    monkeypatch.setattr(script, "stream", interrupted)
    raises = MagicMock()
    monkeypatch.setattr(script.plumbing.endings, "ctrl_c_raises", raises)
    assert talk("", terminal=True).out == f"{whole[:5]}\n\n{expected}\n\n"
    raises.return_value.__enter__.assert_called_once()
