"""text/pairs.py: a pair of each layout is what is written out here, and what trl makes of it.

trl does not know all layouts. What is no pair is refused; fields that are not read are named."""

import copy
import itertools
from pathlib import Path

import pytest
from test_chat import BYTES, FUNCTIONS, assistant, user, write
from test_published import ours_and_theirs
from test_published import write as write_tokenizer

from model import IGNORE
from plumbing.messages import UserError
from text.chat import open_samples
from text.pairs import docstring_pairs, pair_of, pairs
from text.targets import encode

HI = user("Hi")
GOOD = assistant("Hello")
BAD = assistant("Go")
BEFORE = [user("A?"), assistant("B.")]
HH = "\n\nHuman: A?\n\nAssistant: B.\n\nHuman: Hi\n\nAssistant: "


def written(directory: Path, lines: list[dict]) -> str:
    return str(write(directory / "pairs.jsonl", *lines))


def opened(directory: Path, lines: list[dict], seq_len: int = 128) -> tuple:
    path = written(directory, lines)
    return open_samples([path], BYTES, seq_len, read=pairs)


def record(prompt, chosen, rejected, **more) -> dict:
    line = {}
    if prompt:
        line["prompt"] = prompt
    line["chosen"] = chosen
    line["rejected"] = rejected
    return line | more


PAIRS = [record(f"{n} and {n}", "yes" * (n % 5 + 1), "no") for n in range(60)]
NAMES = "user", "assistant"


def turns(*texts: str) -> list[dict]:
    """Messages of a user and of an assistant, in turn."""
    return [{"role": NAMES[i % 2], "content": text} for i, text in enumerate(texts)]


def sharegpt(*texts: str, names=("human", "gpt")) -> list[dict]:
    return [{"from": names[i % 2], "value": text} for i, text in enumerate(texts)]


SYSTEM = {"role": "system", "content": "Be kind."}
ASK = "What colour is it?"
SKY = "What colour is the sky?"
LAYOUTS = {  # a line, and the messages that both conversations begin with
    "texts": (record("Hi", "Hello", "Go"), [HI]),
    "lists": (record([HI], [GOOD], [BAD]), [HI]),
    "UltraFeedback": (
        record(
            "Hi",
            [HI, GOOD],
            [HI, BAD],
            prompt_id="0a",
            messages=[HI, GOOD],
            score_chosen=8.5,
        ),
        [HI],
    ),
    "implicit": (record(None, [HI, GOOD], [HI, BAD]), [HI]),
    "system": (record("Hi", "Hello", "Go", system="Be kind."), [SYSTEM, HI]),
    "earlier turns": (record([*BEFORE, HI], "Hello", "Go"), [*BEFORE, HI]),
    "HH": (record(None, HH + "Hello", HH + "Go"), [*BEFORE, HI]),
    "HH with a prompt": (record(HH, " Hello", " Go"), [*BEFORE, HI]),
    "HH that repeats the prompt": (record(HH, HH + "Hello", HH + "Go"), [*BEFORE, HI]),
    "HH whose answers are named": (
        record(HH[: -len(" Assistant: ")], "\n\nAssistant: Hello", "\n\nAssistant: Go"),
        [*BEFORE, HI],
    ),
    "Orca": (
        dict(system="Be kind.", question="Hi", chosen="Hello", rejected="Go"),
        [SYSTEM, HI],
    ),
    "Orca of argilla": (dict(input="Hi", chosen="Hello", rejected="Go", rating=[9, 1]), [HI]),
    "LLaMA-Factory's Alpaca": (
        dict(
            instruction="Add.",
            input="1 2",
            history=[["A?", "B."]],
            chosen="Hello",
            rejected="Go",
        ),
        [*BEFORE, user("Add.\n\n1 2")],
    ),
    "LLaMA-Factory's ShareGPT": (
        dict(
            system="Be kind.",
            conversations=sharegpt("A?", "B.", "Hi"),
            chosen=sharegpt("", "Hello")[1],
            rejected=sharegpt("", "Go")[1],
        ),
        [SYSTEM, *BEFORE, HI],
    ),
    "input": (record("Add.", "Hello", "Go", input="1 2"), [user("Add.\n\n1 2")]),
    "ShareGPT repeats a text": (record("Hi", sharegpt("Hi", "Hello"), sharegpt("Hi", "Go")), [HI]),
    "null and spaces": (
        record([HI | {"name": None}], [user("Hi \n"), GOOD], [HI, BAD]), [HI],
    ),
    "system within": (record("Hi", [SYSTEM, HI, GOOD], [SYSTEM, HI, BAD]), [SYSTEM, HI]),
    "system once more": (
        record("Hi", [SYSTEM, HI, GOOD], [SYSTEM, HI, BAD], system="Be kind."), [SYSTEM, HI],
    ),
    "its last message": (record([*BEFORE, HI], [HI, GOOD], [HI, BAD]), [*BEFORE, HI]),
    "the last question": (record("Hi", [*BEFORE, HI, GOOD], [*BEFORE, HI, BAD]), [*BEFORE, HI]),
    "a turn after an answer": (record(BEFORE, [HI, GOOD], [HI, BAD]), [*BEFORE, HI]),
}  # fmt: skip


@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts_of_pairs(tmp_path, name):
    """The targets are the last answers alone: earlier ones would count the same in both."""
    line, before = LAYOUTS[name]
    train, val, prompts, _ = opened(tmp_path, [line] * 3, seq_len=256)
    shared = [message | {"train": False} for message in before]
    expected = [encode([*shared, answer], BYTES) for answer in (GOOD, BAD)]
    for packed, n in ((train, 2), (val, 1)):
        found = []
        for ids, is_target in packed.samples:
            found.append((ids.tolist(), is_target.tolist()))
        assert found == expected * n
    ((_, example),) = prompts
    assert example == "Hello"
    targets = train.batch([0]).targets
    ids = targets[targets != IGNORE].tolist()
    assert BYTES.decode(ids[:5]) == "Hello"
    assert ids[5] in BYTES.stop
    assert ids[-1] in BYTES.stop


TRL = {
    "explicit": dict(prompt=[*BEFORE, HI], chosen=[GOOD], rejected=[BAD]),
    "implicit": dict(chosen=[*BEFORE, HI, GOOD], rejected=[*BEFORE, HI, BAD]),
    "system": dict(chosen=[SYSTEM, HI, GOOD], rejected=[SYSTEM, HI, BAD]),
    "text beside lists": dict(prompt="Hi", chosen=[HI, GOOD], rejected=[HI, BAD]),
    "ShareGPT": dict(
        chosen=sharegpt("Hi", "Hello", names=NAMES),
        rejected=sharegpt("Hi", "Go", names=NAMES),
    ),
    "an answer of several turns": dict(
        prompt=[HI],
        chosen=[GOOD, *turns("A?", "B.")],
        rejected=[BAD, *turns("A?", "B.")],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", TRL)
def test_conversations_are_those_of_trl(name, tmp_path):
    """Prompt and answers, and their ids by a tokenizer's template."""
    trl = pytest.importorskip("trl.data_utils", reason="trl is not installed here")
    ours = pair_of(copy.deepcopy(TRL[name]), "line 1")
    chatml = trl.maybe_convert_to_chatml(copy.deepcopy(TRL[name]))
    theirs = trl.maybe_extract_prompt(chatml)
    n = len(theirs["prompt"])
    tokenizer, reference = ours_and_theirs(write_tokenizer(tmp_path, "smollm2"))
    texts = trl.apply_chat_template(theirs, reference)
    for conversation, answer in zip(ours, ("chosen", "rejected")):
        ids, is_target = encode(conversation, tokenizer)
        without = copy.deepcopy(conversation)
        for i, message in enumerate(without):
            assert message.pop("train", True) == (i >= n)
        assert without == theirs["prompt"] + theirs[answer]
        prompt = reference.encode(texts["prompt"], add_special_tokens=False)
        text = texts["prompt"] + texts[answer]
        whole = reference.encode(text, add_special_tokens=False)
        assert ids == whole[: len(ids)]
        begin = len(prompt)
        assert is_target[:begin] == [False] * begin
        assert is_target[begin]


@pytest.mark.parametrize("line", [
    dict(prompt="The sky is", chosen=" blue.", rejected=" green."),
    dict(prompt="def f():\n", chosen="    return 1", rejected="    return 2"),
])  # fmt: skip
def test_texts_are_divided_as_by_trl(line):
    """Of texts without a prompt trl takes the characters that both share: no turn ends there."""
    trl = pytest.importorskip("trl.data_utils", reason="trl is not installed here")
    theirs = trl.maybe_extract_prompt(line)
    chosen, rejected = pair_of(line, "line 1")
    whole = {}
    for conversation, answer in ((chosen, "chosen"), (rejected, "rejected")):
        contents = [message["content"] for message in conversation]
        assert contents == [theirs["prompt"], theirs[answer]]
        whole[answer] = line["prompt"] + line[answer]
    assert trl.extract_prompt(whole)["prompt"].startswith(line["prompt"])
    with pytest.raises(UserError, match="no prompt, or no chosen answer"):
        pair_of(whole, "line 1")


@pytest.mark.parametrize("line, says", [
    (record("Hi", "Hello", "Hello"), "must first differ in an answer"),
    (record("Hi", "Hello", "Hello "), "must first differ in an answer"),
    (record(None, [HI, GOOD], [user("Ho"), BAD]), "must first differ in an answer"),
    (record(None, "Hello", "Go"), "no prompt, or no chosen answer"),
    (record("Hi", "Hello", " "), "rejected: message 2 is an empty answer"),
    (record(None, "Hello", "Go", system="Be kind."), "no prompt, or no chosen answer"),
    ({"messages": [HI, GOOD]}, "no prompt, or no chosen answer"),
    ("Hi, Go", "is not a JSON object: give .*chosen"),
    (None, "holds no conversation: give .*chosen"),
    (record(ASK, [*turns(SKY, "Blue.")], [*turns(SKY, "Red.")]), "another message than the prompt"),
    (record("Hi", [HI, HI, GOOD], [HI, HI, BAD]), "the user says the same twice: 'Hi'"),
    (record([HI, HI], "Hello", "Go"), "the user says the same twice: 'Hi'"),
    (record(ASK, f"{ASK} Blue.", f"{ASK} Red."), "an answer repeats its question: 'What colour"),
    (record("Who won?", "Who won? Ada.", "Bob."), "an answer repeats its question: 'Who won"),
    (record(ASK, f"{ASK} Blue.", "Red."), "an answer repeats its question: 'What colour"),
    (record(ASK, f"User: {ASK}\nBot: Blue.", f"User: {ASK}\nBot: Red."), "repeats its question"),
    (record([HI, GOOD], "Hello", "Go"), "the prompt ends with an answer"),
    (record("A talk.\n\nHuman: Hi\n\nAssistant:", "Hello", "Go"), 'text before "Human:": give it'),
    (record("Hi", "Hello", "Go", question="Ho"), "both prompt and question: leave one of them"),
    (record("Hi", [SYSTEM, HI, GOOD], [SYSTEM, HI, BAD], system="x"), "another message than the"),
    (record(3, "Hello", "Go"), '"prompt" is 3: give it as a string'),
    (record("Hi", "Hello", "Go", images=["a.png"]), '"images" is .*only text is read'),
])  # fmt: skip
def test_what_is_no_pair_is_refused(tmp_path, line, says):
    lines = [] if line is None else [line]
    with pytest.raises(UserError, match=says):
        opened(tmp_path, lines)


def test_what_is_beside_a_pair_is_read_or_named(tmp_path, capsys):
    tools = FUNCTIONS["functions"]
    line = record("Hi", "Hello", "Go", tools=tools)
    with pytest.raises(UserError, match="the chat template writes nothing of tools"):
        opened(tmp_path, [line] * 2)
    weightless = record("Hi", "Hello", "Go", weight=0)
    opened(tmp_path, [weightless, *PAIRS[:2]])
    assert "1 dropped" in capsys.readouterr().err
    extra = record("Hi", [GOOD | {"score": 0}], [BAD], margin=0.5, ids=[1], output="x", id="")
    capsys.readouterr()
    opened(tmp_path, [extra, record([HI], "Hello", "Go", input="x")])
    assert "are not read: ids, input, margin, output, score" in capsys.readouterr().err


def test_pairs_share_a_row_and_long_ones_are_dropped(tmp_path, capsys):
    lines = []
    for n in range(40):
        chosen = "a" * (n % 13 + 1)
        rejected = "b" * (n % 7 + 1)
        lines.append(record("Hi", chosen, rejected))
    too_long = record("Hi", "a" * 80, "b" * 10)
    train, val, *_ = opened(tmp_path, lines + [too_long] * 3)
    assert "3 dropped" in capsys.readouterr().err
    assert len(train.samples) + len(val.samples) == 80
    for row in train.rows:
        chosen = row[::2]
        rejected = row[1::2]
        assert rejected == [i + 1 for i in chosen]
        assert not any(i % 2 for i in chosen)
        length = 0
        for i in row:
            ids, _ = train.samples[i]
            length += len(ids) - 1
        assert length <= 128


def test_default_pairs():
    """The rejected answer has half of the words, or all in another order."""
    halves = 0
    samples = [*itertools.islice(docstring_pairs(), 500)]
    assert len(samples) == 500
    for sample in samples:
        good = sample.messages[-1]["content"].split()
        bad = sample.rejected[-1]["content"].split()
        assert bad
        assert bad != good
        if bad == good[: len(good) // 2]:
            halves += 1
        else:
            assert sorted(bad) == sorted(good)
    assert 200 < halves < 300
