"""Texts and conversations by generate.py, compared with those of generate.stream."""

import fcntl
import io
import os
import re
import select
import signal
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from conftest import ENVIRONMENT, ROOT, succeed
from test_chat import BYTES, assistant, user
from test_formats import our_model, stored

import generate as script
from checkpoint import load_pretrained, write_checkpoint
from generate import generate, stream
from model import Llama, LlamaConfig
from text.chat import encode_prompt

EOT = BYTES.special["<|eot_id|>"]
NEW = 30  # --max-new-tokens
SYSTEM = {"role": "system", "content": "Be brief."}


@pytest.fixture(scope="module", params=[256], ids="max_seq_len={}".format)
def base(request, tmp_path_factory):
    """A random model that says capital letters only and, now and then, ends its answer."""
    config = LlamaConfig(32, 2, 4, 2, 48, vocab_size=267, max_seq_len=request.param)
    model = our_model(config, seed=7, factor=6, norms=(1, 1))
    says = [*b"ABCDEFGHIJKLMNOPQRSTUVWXYZ"] + [EOT] * (request.param == 256)
    mute = [token for token in range(config.vocab_size) if token not in says]
    model.output.weight.data[mute] = 0  # with temperature 0, some other logit is higher
    return saved(model, tmp_path_factory.mktemp("base") / "base")


def saved(model: Llama, path: Path) -> Path:
    write_checkpoint(path, model.config, stored(model), BYTES)
    return path


endless = pytest.mark.parametrize("base", [1_000_000], indirect=True)  # an answer takes minutes


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
    return talk


# ------------------------------------------------------------------------------------ prompts

POEM = "El niño soñó: 漢字 y 🙂.\n"


@pytest.fixture(scope="module")
def poet(tmp_path_factory):
    """A model that has learnt a line by heart."""
    model = Llama(LlamaConfig(64, 2, 4, 4, 128, vocab_size=267, max_seq_len=256))
    model.init_weights(seed=0)
    tokens = torch.tensor([BYTES.encode(POEM * 2, bos=True)])
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(100):
        model(tokens[:, :-1], targets=tokens[:, 1:]).backward()
        optimizer.step()
        optimizer.zero_grad()
    return saved(model, tmp_path_factory.mktemp("poet") / "poet")


def test_a_learnt_text_is_printed_once(poet):
    flags = ["--max-new-tokens", len(POEM[6:].encode()), "--temperature", 0, "--seed", 3]
    result = succeed("generate.py", poet, "--prompt", POEM[:6], *flags, nproc=2)
    assert result.out == f"{POEM}\n"  # characters of several tokens are whole


def test_several_prompts(poet):
    prompts = ["El", "soñó: 漢"]
    encoded = [BYTES.encode(prompt, bos=True) for prompt in prompts]
    expected = generate(load_pretrained(poet), encoded, 30, temperature=0)
    flags = [text for prompt in prompts for text in ("--prompt", prompt)]
    result = succeed("generate.py", poet, *flags, "--max-new-tokens", 30, "--temperature", 0)
    for prompt, tokens in zip(prompts, expected):
        assert f"--- {prompt}{BYTES.decode(tokens)}" in result.out


# -------------------------------------------------------------------------------- with a pipe


def test_each_answer_follows_the_whole_conversation(base, talk):
    """Empty lines are no messages, and neither prompts nor stop tokens are printed."""
    hi, why = user("Hi"), user("Why?")
    first = answer(base, hi)
    second = answer(base, hi, assistant(first), why)
    third = answer(base, hi, assistant(first), why, assistant(second), hi)
    assert len({first, second, third, answer(base, why)}) == 4
    assert min(map(len, (first, second, third))) < NEW  # one has ended by itself
    printed = talk("\nHi\n  \n\nWhy?\nHi")
    assert printed.out == f"{first}\n{second}\n{third}\n" and printed.err == ""
    assert talk("").out == ""


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


def test_bytes_that_are_not_utf_8(base, talk):
    assert talk(b"caf\xe9\n").out == answer(base, user("caf\ufffd")) + "\n"


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


# -------------------------------------------------------------------------------- in a terminal


class Terminal:
    """generate.py in a terminal of its own."""

    def __init__(self, *arguments):
        self.master, slave = os.openpty()
        settings = termios.tcgetattr(slave)
        settings[3] |= termios.NOFLSH  # Ctrl-C discards nothing that is not yet on the screen
        termios.tcsetattr(slave, termios.TCSANOW, settings)
        self.shown = ""
        options = dict.fromkeys(("stdin", "stdout", "stderr"), slave) | dict(start_new_session=True)
        options |= dict(env=ENVIRONMENT | {"TERM": "dumb"})
        options |= dict(preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0))  # sends Ctrl-C
        command = [sys.executable, ROOT / "generate.py", *map(str, arguments)]
        self.process = subprocess.Popen(command, **options)
        os.close(slave)

    def __enter__(self) -> "Terminal":
        return self

    def __exit__(self, *_) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.master)

    def shows(self, pattern: str, seconds: float) -> re.Match | None:
        """Wait until the terminal shows a pattern; return it. The next one is looked for after it.
        A pattern that ends with $ is waited for at the end of what is shown."""
        deadline = time.monotonic() + seconds
        while not (found := re.search(pattern, self.shown)):
            left = deadline - time.monotonic()
            if left < 0 or not select.select([self.master], [], [], left)[0]:
                return None
            try:
                self.shown += os.read(self.master, 65536).decode()
            except OSError:  # the program has ended
                pytest.fail(f"ended without {pattern!r} in {self.shown!r:.2000}")
            self.shown = self.shown.replace("\r\n", "\n")  # which may come one by one
        self.shown = self.shown[found.end() :]
        return found

    def wait_for(self, pattern: str, press: str = "") -> re.Match:
        """Press keys, and wait until the terminal shows a pattern."""
        os.write(self.master, press.encode())
        found = self.shows(pattern, 120)
        return found or pytest.fail(f"no {pattern!r} in {self.shown!r:.2000}")

    def clear_line(self) -> None:
        """Press Ctrl-C at the prompt until there is another: one that comes while readline handles
        a key is not noticed before the line ends."""
        for _ in range(30):
            os.write(self.master, CTRL_C.encode())
            if self.shows("\n> $", 2):
                return
        pytest.fail(f"no other prompt in {self.shown!r:.2000}")


CTRL_C, CTRL_D, UP = "\x03", "\x04", "\x1b[A"


@endless
def test_ctrl_c_stops_an_answer_and_ctrl_d_the_conversation(base):
    with Terminal(base, "--chat", "--max-new-tokens=900000", "--temperature=0") as terminal:
        terminal.wait_for("Ctrl-C stops an answer, .*\n> $")
        terminal.wait_for("Hi.*\n", press="Hix\x7f\n")  # the line editor removes the x
        said = terminal.wait_for("[A-Z]{20}").group()
        said += "".join(terminal.wait_for(r"([A-Z]*)(?:\^C)?([A-Z]*)\n> $", press=CTRL_C).groups())
        assert said == answer(base, user("Hi"), new=len(said))

        terminal.wait_for("not sent$", press="not sent")
        terminal.clear_line()
        terminal.wait_for("Why[?]\n", press="Why?\n")
        expected = answer(base, user("Hi"), assistant(said), user("Why?"), new=30)
        assert expected != answer(base, user("Hi"), user("Why?"), new=30)
        assert terminal.wait_for("[A-Z]{30}").group() == expected
        terminal.wait_for("\n> $", press=CTRL_C)

        terminal.wait_for("Why[?]$", press=UP)  # the history of the line editor
        terminal.clear_line()
        terminal.wait_for("\n$", press=CTRL_D)
        assert terminal.process.wait(60) == 0


@endless
def test_without_a_terminal_ctrl_c_ends_the_program(base):
    command = [sys.executable, ROOT / "generate.py", base, "--chat", "--max-new-tokens=900000"]
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    process = subprocess.Popen([*command, "--temperature=0"], env=ENVIRONMENT, **pipes)
    try:
        process.stdin.write(b"Hi\nHi\n")
        process.stdin.flush()
        assert select.select([process.stdout], [], [], 60)[0]
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=30)
    finally:
        process.kill()
        process.wait()
    assert re.fullmatch(rb"[A-Z]+", out) and err == b"error: interrupted\n"
    assert process.returncode == 128 + signal.SIGINT
