"""Texts and conversations by generate.py, compared with those of generate.stream."""

import contextlib
import io
import os
import pty
import re
import select
import signal
import sys
import termios
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from conftest import ENVIRONMENT, ROOT, succeed
from test_chat import BYTES, assistant, user
from test_formats import our_model, saved

import generate as script
from checkpoint import load_pretrained
from generate import generate, stream
from model import Llama, LlamaConfig
from plumbing.processes import UserError
from text.chat import encode_prompt

NEW = 30  # --max-new-tokens
SYSTEM = {"role": "system", "content": "Be brief."}


def speaker(path: Path, max_seq_len: int, *stop: int) -> Path:
    """Write a random model that says capital letters only and, now and then, a token of `stop`."""
    config = LlamaConfig(32, 2, 4, 2, 48, vocab_size=267, max_seq_len=max_seq_len)
    model = our_model(config, seed=7, factor=6, norms=(1, 1))
    says = [*b"ABCDEFGHIJKLMNOPQRSTUVWXYZ", *stop]
    mute = [token for token in range(config.vocab_size) if token not in says]
    model.output.weight.data[mute] = 0  # with temperature 0, some other logit is higher
    return saved(path, model, BYTES)


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    return speaker(tmp_path_factory.mktemp("base") / "base", 256, BYTES.special["<|eot_id|>"])


def answer(base, *messages: dict, new: int = NEW) -> str:
    """Return the answer to a conversation, from generate.stream."""
    prompt = encode_prompt([*messages], BYTES)
    steps = stream(load_pretrained(base), [prompt], new, temperature=0, stop=BYTES.stop)
    return BYTES.decode(token for (token,) in steps if token not in BYTES.stop)


@pytest.fixture
def talk(base, monkeypatch, capsys):
    """A function that runs generate.py in this process with `text` as its standard input.

    talk.calls: the prompts and seeds of its answers"""

    def recorded(model, prompts, *args, seed=0, **options):
        talk.calls += [(prompt, seed) for prompt in prompts]
        return stream(model, prompts, *args, seed=seed, **options)

    def talk(text: str | bytes, *flags, temperature=0):
        data = text.encode() if isinstance(text, str) else text
        arguments = ["--chat", f"--max-new-tokens={NEW}", f"--temperature={temperature}", *flags]
        monkeypatch.setattr(sys, "argv", ["generate.py", *map(str, [base, *arguments])])
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
        try:
            script.main()
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
        return capsys.readouterr()

    talk.calls = []
    monkeypatch.setattr(script, "stream", recorded)
    monkeypatch.setattr(script.plumbing.endings, "ctrl_c_raises", None)  # only in a terminal
    return talk


# ------------------------------------------------------------------------------------ prompts

POEM = "El niño soñó: 漢字 y 🙂.\n"


def test_one_prompt_or_several_are_continued(tmp_path):
    """By a model that has learnt a line by heart."""
    model = Llama(LlamaConfig(64, 2, 4, 4, 128, vocab_size=267, max_seq_len=256))
    model.init_weights(seed=0)
    tokens = torch.tensor([BYTES.encode(POEM * 2, bos=True)])
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(100):
        model(tokens[:, :-1], targets=tokens[:, 1:]).backward()
        optimizer.step()
        optimizer.zero_grad()
    poet = saved(tmp_path / "poet", model, BYTES)
    flags = ["--max-new-tokens", len(POEM[6:].encode()), "--temperature", 0, "--seed", 3]
    printed = succeed("generate.py", poet, "--prompt", POEM[:6], *flags, nproc=2).out
    assert printed == f"{POEM}\n"  # characters of several tokens are whole

    prompts = ["El", "soñó: 漢"]
    encoded = [BYTES.encode(prompt, bos=True) for prompt in prompts]
    expected = generate(model.eval(), encoded, 30, temperature=0)
    flags = ["--prompt", prompts[0], "--prompt", prompts[1], "--max-new-tokens", 30]
    printed = succeed("generate.py", poet, *flags, "--temperature", 0).out
    for prompt, tokens in zip(prompts, expected):
        assert f"--- {prompt}{BYTES.decode(tokens)}" in printed


# -------------------------------------------------------------------------------- with a pipe


def test_each_answer_follows_the_whole_conversation(base, talk):
    """Empty lines are no messages, neither prompts nor stop tokens are printed, and bytes that are
    not UTF-8 are replaced."""
    hi, why = user("Hi"), user("Why?")
    first = answer(base, hi)
    second = answer(base, hi, assistant(first), why)
    third = answer(base, hi, assistant(first), why, assistant(second), hi)
    assert len({first, second, third, answer(base, why)}) == 4
    assert min(map(len, (first, second, third))) < NEW  # one has ended by itself
    printed = talk("\nHi\n  \n\nWhy?\nHi")
    assert printed.out == f"{first}\n{second}\n{third}\n" and printed.err == ""
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
    alone, other = (talk("", "--prompt", "Hi", "--seed", n, temperature=3).out for n in (5, 6))
    printed = talk("Hi\nHi\nHi\n", "--seed", 5, temperature=3).out
    assert printed.startswith(alone) and alone != other
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


def test_a_message_that_is_too_long_is_refused_and_the_conversation_goes_on(base, talk):
    first = answer(base, user("Hi"))
    second = answer(base, user("Hi"), assistant(first), user("Why?"))
    printed = talk(f"Hi\n{'x' * 300}\nWhy?\n")
    assert printed.out == f"{first}\n{second}\n"
    (line,) = printed.err.splitlines()
    assert re.match(r"a prompt of 3\d\d tokens and --max-new-tokens 30 are more than the 256", line)
    assert line.endswith(": type a shorter message")


def test_a_model_that_has_diverged_ends_the_conversation(talk, monkeypatch):
    """A shorter message would not help."""

    def without_logits(*args, **options):
        raise UserError("no finite logits")

    monkeypatch.setattr(script, "stream", without_logits)
    with pytest.raises(UserError, match="no finite logits"):
        talk("Hi\nWhy?\n")


# -------------------------------------------------------------------------------- in a terminal


CTRL_C, CTRL_D, UP = "\x03", "\x04", "\x1b[A"


@contextlib.contextmanager
def in_a_terminal(*arguments) -> Iterator[Callable]:
    """Run generate.py in a terminal of its own. Yields a function that presses keys until the
    terminal shows a pattern: once more whenever it has shown nothing for `again` seconds. What is
    shown up to the match is forgotten; a pattern that ends with $ waits for the end of the rest."""
    process, terminal = pty.fork()
    if process == 0:
        command = [sys.executable, ROOT / "generate.py", *arguments]
        os.execve(sys.executable, list(map(str, command)), ENVIRONMENT | {"TERM": "dumb"})
    settings = termios.tcgetattr(terminal)
    settings[3] |= termios.NOFLSH  # Ctrl-C discards nothing that is not yet on the screen
    termios.tcsetattr(terminal, termios.TCSANOW, settings)
    shown = ""

    def wait_for(pattern: str, press: str = "", again: int = 120) -> re.Match:
        nonlocal shown
        end = time.monotonic() + 120
        while time.monotonic() < end:
            os.write(terminal, press.encode())
            while not (found := re.search(pattern, shown)) and time.monotonic() < end:
                if not select.select([terminal], [], [], again)[0]:
                    break
                shown += os.read(terminal, 65536).decode()
                shown = shown.replace("\r\n", "\n")  # which may come one by one
            if found:
                shown = shown[found.end() :]
                return found
        pytest.fail(f"no {pattern!r} in {shown!r:.2000}")

    try:
        yield wait_for
        with pytest.raises(OSError):  # the program has ended
            wait_for("no more")
    finally:
        os.kill(process, signal.SIGKILL)
        _, status = os.waitpid(process, 0)
        os.close(terminal)
    assert status == 0


def test_ctrl_c_stops_an_answer_and_ctrl_d_the_conversation(tmp_path):
    base = speaker(tmp_path / "base", 1_000_000)  # an answer takes minutes
    with in_a_terminal(base, "--chat", "--max-new-tokens=900000", "--temperature=0") as wait_for:
        wait_for("Ctrl-C stops an answer, .*\n> $")
        wait_for("Hi\n", press="Hi\n")
        said = wait_for("[A-Z]{20}").group()
        said += "".join(wait_for(r"([A-Z]*)(?:\^C)?([A-Z]*)\n> $", press=CTRL_C).groups())
        assert said == answer(base, user("Hi"), new=len(said))

        wait_for("not sent$", press="not sent")
        wait_for("\n> $", press=CTRL_C, again=2)  # one that comes while it handles a key is lost
        wait_for("Why[?]\n", press="Why?\n")
        expected = answer(base, user("Hi"), assistant(said), user("Why?"), new=30)
        assert expected != answer(base, user("Hi"), user("Why?"), new=30)
        assert wait_for("[A-Z]{30}").group() == expected
        wait_for("\n> $", press=CTRL_C)

        wait_for("Why[?]$", press=UP)  # the history of the line editor
        wait_for("\n> $", press=CTRL_C, again=2)
        wait_for("\n$", press=CTRL_D)
