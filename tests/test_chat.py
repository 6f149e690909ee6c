"""chat.py: conversation files, what is learnt of them, and rows that several samples share."""

import ast
import functools
import inspect
import json
import random
import shlex
import textwrap
import time

import pytest
import tiktoken
import torch
import transformers
from conftest import shared

import chat
import data
import formats
from chat import Packed, encode, encode_prompt, open_samples, pack, read_conversations
from data import Tokenizer, load_tokenizer
from model import IGNORE, Llama, LlamaConfig, UserError

BYTES = load_tokenizer("bytes")


def plain_tokenizer() -> Tokenizer:
    """Bytes, with one special token as in GPT-2, and none for chat."""
    ranks = {bytes([i]): i for i in range(256)}
    special = {"<|endoftext|>": 256}
    encoding = tiktoken.Encoding(
        "p", pat_str="(?s:.)", mergeable_ranks=ranks, special_tokens=special
    )
    return Tokenizer("plain", encoding)


PLAIN = plain_tokenizer()


def user(text: str) -> dict:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict:
    return {"role": "assistant", "content": text}


TALK = [
    {"role": "system", "content": " Be brief.\n"},
    user("What is 2 + 2? <|eot_id|>"),
    assistant("\n4, naïvely 🙂 "),
    user("And\n\n2 * 3?"),
    assistant("6 <|eot_id|>!"),
]


def marked(ids: list[int], tokenizer: Tokenizer) -> str:
    """Text of ids with the names of special tokens in curly brackets."""
    names = {token: f"{{{name.strip('<|>')}}}" for name, token in tokenizer.special.items()}
    runs, ordinary = [""], []
    for i in [*ids, None]:
        if i in names or i is None:
            runs += [tokenizer.decode(ordinary), names.get(i, "")]
            ordinary = []
        else:
            ordinary.append(i)
    return "".join(runs)


def learnt_text(ids, learnt, tokenizer: Tokenizer = BYTES) -> str:
    return marked([int(i) for i, is_learnt in zip(ids, learnt) if is_learnt], tokenizer)


def write(path, *records):
    path.write_text("".join(f"{json.dumps(record)}\n" for record in records))
    return path


def answering(n: int, length: int = 0) -> list[dict]:
    """Conversations 0, 1, ... n - 1, with answers of `length` digits."""
    return [{"messages": [user(f"say {i}"), assistant(f"{i:0{length}}")]} for i in range(n)]


# ------------------------------------------------------------------------------- conversation files


def test_three_kinds_of_lines(tmp_path):
    path = write(
        tmp_path / "a.jsonl",
        {"messages": [{**user("Hi"), "name": "Ann"}, assistant("Hello")], "source": "x"},
        {"instruction": "Add.", "input": "1 2", "output": "3"},
        {"instruction": "Laugh.", "input": "", "output": "Ha"},
        {"instruction": "Cry.", "output": "Oh", "text": "both"},
        {"instruction": "Sigh.", "input": None, "output": "Ah"},
        {"prompt": "1 + 1 =", "completion": " 2"},
    )
    assert list(read_conversations(path)) == [
        (1, [user("Hi"), assistant("Hello")]),
        (2, [user("Add.\n\n1 2"), assistant("3")]),
        (3, [user("Laugh."), assistant("Ha")]),
        (4, [user("Cry."), assistant("Oh")]),
        (5, [user("Sigh."), assistant("Ah")]),
        (6, [user("1 + 1 ="), assistant(" 2")]),
    ]


def test_blank_lines_marks_halves_of_characters_and_what_follows_the_last_answer(tmp_path):
    path = tmp_path / "a.jsonl"
    first = '{"prompt": "a\\ud83db", "completion": "\\ud83d\\ude42"}'
    path.write_text(f"\ufeff{first}\n\n \t\r\n{json.dumps({'messages': [*TALK, user('Bye')]})}")
    assert list(read_conversations(path)) == [
        (1, [user("a\ufffdb"), assistant("🙂")]),
        (4, TALK),
    ]


@pytest.mark.parametrize(
    "line, message",
    [
        (b'{"prompt": "caf\xe9", "completion": "x"}', "byte 0xe9 is not UTF-8: convert"),
        (b'{"prompt": "a", "completion": "b"', "is no JSON object: give one of {"),
        (b"[" * 100_000, "is no JSON object"),
        (b"[1, 2]", "is no JSON object"),
        (b'"text"', "is no JSON object"),
        ({"text": "a", "output": 3}, "an object with 'text', 'output': give one of {"),
        ({}, "an object with nothing"),
        ({"conversations": [{"from": "human", "value": "Hi"}]}, "an object with 'conversations'"),
        ({"instruction": "a", "output": 3}, '"output" is 3: give it as a string'),
        ({"instruction": "a", "input": ["b"], "output": "c"}, "\"input\" is ['b']: give it"),
        ({"prompt": [user("a")], "completion": "b"}, '"prompt" is [{'),
        ({"prompt": "a", "completion": " \n"}, "message 2 is an empty answer"),
        ({"messages": {"role": "user"}}, '"messages" is no list: give {"messages": [{"role"'),
        ({"messages": []}, "no message has role assistant: give an answer"),
        ({"messages": [user("a")]}, "no message has role assistant"),
        ({"messages": ["a"]}, "message 1 is 'a': give {\"role\""),
        ({"messages": [user("a"), {"content": "b"}]}, 'message 2 has the "role" None: only system'),
        ({"messages": [user("a"), {"role": ["user"], "content": "b"}]}, 'message 2 has the "role"'),
        ({"messages": [user(["a"]), assistant("b")]}, "message 1 has the \"content\" ['a']: give"),
        ({"messages": [user("a"), {"role": "assistant"}]}, 'message 2 has the "content" None'),
        (
            {"messages": [user("a"), assistant(""), user("b")]},
            "message 2 is an empty answer: write",
        ),
        (
            {"messages": [user("a"), assistant("b"), {"role": "tool", "content": "c"}]},
            "message 3 has the \"role\" 'tool': only system, user, assistant can be taught",
        ),
    ],
    ids=str,
)
def test_malformed_lines_are_refused(line, message, tmp_path):
    path = write(tmp_path / "a.jsonl", {"prompt": "a", "completion": "b"})
    raw = line if isinstance(line, bytes) else json.dumps(line).encode()
    path.write_bytes(path.read_bytes() + b"\n" + raw)
    with pytest.raises(UserError) as error:
        list(read_conversations(path))
    assert str(error.value).startswith(f"{path}, line 3: ")
    assert message in str(error.value)
    assert "\n" not in str(error.value) and len(str(error.value)) < 600


def test_files_without_conversations_are_refused(tmp_path):
    (tmp_path / "empty.jsonl").write_text("\n \n")
    (tmp_path / "none").mkdir()
    for path, message in [
        (tmp_path / "no.jsonl", "does not exist: give a file with one of these a line: {"),
        (tmp_path, "is a directory: give a file"),
        (tmp_path / "empty.jsonl", "holds no conversation: give one of these a line"),
    ]:
        with pytest.raises(UserError, match=message):
            list(read_conversations(path))
    with pytest.raises(UserError, match=r"none holds no \.jsonl file: give"):
        open_samples([str(tmp_path / "none")], BYTES, 64)


# ----------------------------------------------------------------------------------- what is learnt

# As in the tokenizer_config.json of Llama 3's published instruction models, but that {% generation
# %} tells transformers what the assistant says.
PUBLISHED = (
    "{% set loop_messages = messages %}{% for message in loop_messages %}"
    "{% set start = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' %}"
    "{% if loop.index0 == 0 %}{% set start = bos_token + start %}{% endif %}{{ start }}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] | trim + '<|eot_id|>' }}{% endgeneration %}"
    "{% else %}{{ message['content'] | trim + '<|eot_id|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}"
    "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)


@pytest.mark.parametrize("own", [False, True], ids=["trained", "llama3"])
def test_ids_and_mask_are_those_of_the_published_template(own, text, tmp_path):
    """Without text that looks like special tokens, which transformers would take for such."""
    path = tmp_path / "tokenizer.model"
    if own:
        path = shared("llama3.tokenizer.model")
    else:
        data.train_tokenizer([str(text), chat.__file__], 500, path)
    tokenizer = load_tokenizer(str(path))
    ranks = tokenizer.encoding._mergeable_ranks
    formats.save_tokenizer(tmp_path, ranks, tokenizer.special, data.SPLIT)
    reference = transformers.AutoTokenizer.from_pretrained(tmp_path)
    talk = [{**m, "content": m["content"].replace("<|eot_id|>", "")} for m in TALK]
    expected = reference.apply_chat_template(
        talk, chat_template=PUBLISHED, return_dict=True, return_assistant_tokens_mask=True
    )
    ids, learnt = encode(talk, tokenizer)
    assert ids == expected["input_ids"]
    assert learnt == [bool(mark) for mark in expected["assistant_masks"]]
    prompt = reference.apply_chat_template(
        talk[:-1], chat_template=PUBLISHED, add_generation_prompt=True
    )
    assert encode_prompt(talk, tokenizer) == prompt["input_ids"]


def test_what_is_learnt_in_llamas_format():
    ids, learnt = encode(TALK, BYTES)
    head, foot = "{start_header_id}", "{end_header_id}\n\n"
    assert marked(ids, BYTES) == (
        f"{{begin_of_text}}{head}system{foot}Be brief.{{eot_id}}"
        f"{head}user{foot}What is 2 + 2? <|eot_id|>{{eot_id}}"
        f"{head}assistant{foot}4, naïvely 🙂{{eot_id}}{head}user{foot}And\n\n2 * 3?{{eot_id}}"
        f"{head}assistant{foot}6 <|eot_id|>!{{eot_id}}"
    )
    assert learnt_text(ids, learnt) == "4, naïvely 🙂{eot_id}6 <|eot_id|>!{eot_id}"


def test_what_is_learnt_in_the_plain_format():
    ids, learnt = encode(TALK, PLAIN)
    assert marked(ids, PLAIN) == (
        "{endoftext}### System:\nBe brief.\n\n### User:\nWhat is 2 + 2? <|eot_id|>\n\n"
        "### Assistant:\n4, naïvely 🙂{endoftext}### User:\nAnd\n\n2 * 3?\n\n"
        "### Assistant:\n6 <|eot_id|>!{endoftext}"
    )
    assert learnt_text(ids, learnt, PLAIN) == "4, naïvely 🙂{endoftext}6 <|eot_id|>!{endoftext}"


@pytest.mark.parametrize("tokenizer", [BYTES, PLAIN], ids=["chat", "plain"])
def test_prompts_begin_what_is_encoded(tokenizer):
    for talk in (TALK, TALK[:3], TALK[1:3], [assistant("Hi"), assistant("there")]):
        prompt, (ids, learnt) = encode_prompt(talk, tokenizer), encode(talk, tokenizer)
        assert ids[: len(prompt)] == prompt
        assert all(learnt[len(prompt) :]) and not learnt[len(prompt) - 1]
        if tokenizer is BYTES:
            assert prompt == tokenizer.encode_chat(talk[:-1])
        if talk[-2]["role"] == "user":
            assert encode_prompt(talk[:-1], tokenizer) == prompt  # for an answer yet to come
        everything = encode(talk, tokenizer, train_on_prompt=True)
        assert everything == (ids, [False] + [True] * (len(ids) - 1))


# -------------------------------------------------------------------------------------- packed rows


def first_fit(lengths: list[int], seq_len: int) -> int:
    """How many rows it takes when each sample goes into the first row that has room."""
    rooms = []
    for length in lengths:
        at = next((i for i, room in enumerate(rooms) if room >= length), None)
        if at is None:
            rooms.append(seq_len - length)
        else:
            rooms[at] -= length
    return len(rooms)


def test_packing_puts_every_sample_in_one_row():
    choice = random.Random(0)
    for _ in range(300):
        seq_len = choice.randint(1, 80)
        most = choice.randint(1, seq_len)
        lengths = [choice.randint(1, most) for _ in range(choice.randint(0, 150))]
        rows = pack(lengths, seq_len)
        assert sorted(sample for row in rows for sample in row) == list(range(len(lengths)))
        assert all(0 < sum(lengths[sample] for sample in row) <= seq_len for row in rows)
        assert len(rows) <= first_fit(lengths, seq_len)
        assert rows == pack(lengths, seq_len)


def test_packing_finds_what_fits():
    assert pack([], 8) == []
    assert pack([8, 8], 8) == [[0], [1]]
    assert pack([3, 5, 4, 4, 2, 6], 8) == [[5, 4], [1, 0], [2, 3]]
    assert pack([7, 4, 4, 1], 8) == [[0, 3], [1, 2]]
    assert pack([7, 6, 3, 2, 2], 10) == [[0, 2], [1, 3, 4]]  # the 3 beside the 7, not the 6
    with pytest.raises(UserError, match="a sample of 9 tokens fits no row"):
        pack([3, 9], 8)


def test_a_hundred_thousand_samples_are_packed_in_moments():
    choice = random.Random(0)
    lengths = [min(int(choice.lognormvariate(5.5, 0.9)) + 1, 2048) for _ in range(100_000)]
    started = time.process_time()
    rows = pack(lengths, 2048)
    assert time.process_time() - started < 2
    assert len(rows) < 1.005 * sum(lengths) / 2048


def test_batch_holds_samples_padding_and_bytes():
    pad = BYTES.special["<|finetune_right_pad_id|>"]
    long = [65, 66, 67, 68], [False, False, True, True]
    short = [70, 71, BYTES.special["<|eot_id|>"]], [False, True, True]
    packed = Packed([short, long, long], 7, BYTES)
    assert packed.rows == [[1, 2], [0]] and len(packed) == 2
    batch = packed.batch([0, None, 1])
    assert batch.tokens.tolist() == [[65, 66, 67, 65, 66, 67, pad], [pad] * 7, [70, 71] + [pad] * 5]
    x, eot = IGNORE, BYTES.special["<|eot_id|>"]
    assert batch.targets.tolist() == [[x, 67, 68, x, 67, 68, x], [x] * 7, [71, eot] + [x] * 5]
    assert batch.positions.tolist() == [[0, 1, 2, 0, 1, 2, 0], [*range(7)], [0, 1, 0, 1, 2, 3, 4]]
    assert batch.text_bytes == 5  # the end token stands for no text
    assert all(t.dtype == torch.int64 for t in batch.tensors())
    assert Packed([long], 5, PLAIN).batch([0]).tokens.tolist() == [[65, 66, 67, 0, 0]]


def test_bytes_are_those_of_the_answers():
    answers = [f"naïve {i} 🙂" for i in range(20)]
    samples = [encode([user("?"), assistant(answer)], BYTES) for answer in answers]
    packed = Packed(samples, 100, BYTES)
    assert 1 < len(packed) < 20
    batch = packed.batch([*range(len(packed)), None])
    assert batch.text_bytes == sum(len(answer.encode()) for answer in answers)
    assert (batch.targets != IGNORE).sum() == batch.text_bytes + 20


def summed_gradients(batches) -> tuple[float, list[torch.Tensor]]:
    """Loss and gradients of a small Llama in float64, over (tokens, targets, positions) of each."""
    model = Llama(LlamaConfig(32, 2, 4, 2, 48, vocab_size=267)).double()
    model.init_weights(seed=1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(5 if parameter.ndim == 2 else 1)  # attention depends on positions
    losses = [model(*batch) for batch in batches]
    sum(losses).backward()
    return sum(losses).item(), [parameter.grad for parameter in model.parameters()]


@pytest.mark.parametrize("train_on_prompt", [False, True])
def test_packed_rows_have_the_gradients_of_each_sample_alone(train_on_prompt):
    choice = random.Random(0)
    talks = [TALK]
    for i in range(11):
        turns = [user("q" * choice.randint(1, 40)), assistant(f"{i}" * choice.randint(1, 20))]
        talks.append(turns * choice.choice([1, 1, 2]))
    samples = [encode(talk, BYTES, train_on_prompt) for talk in talks]
    alone = []
    for ids, learnt in samples:
        targets = [i if is_learnt else IGNORE for i, is_learnt in zip(ids, learnt)]
        alone.append((torch.tensor([ids[:-1]]), torch.tensor([targets[1:]])))
    packed = Packed(samples, 250, BYTES)
    assert len(packed) < 8 and any(len(row) > 2 for row in packed.rows)
    together = packed.batch([*range(len(packed)), None])
    assert (together.tokens[:-1] == packed.pad).any()

    loss, expected = summed_gradients(alone)
    packed_loss, gradients = summed_gradients([together.tensors()])
    assert packed_loss == pytest.approx(loss, rel=1e-12)
    for a, b in zip(gradients, expected, strict=True):
        assert b.abs().max() > 0
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12 * b.abs().max().item())


# ---------------------------------------------------------------------------------- the default set


@pytest.fixture(scope="module")
def functions():
    return list(chat.docstrings())


def test_functions_come_without_their_docstrings(functions):
    sources = []
    for _, module, (asked, answer) in functions:
        assert (asked["role"], answer["role"]) == ("user", "assistant")
        task, source = asked["content"].split("\n\n", 1)
        assert task == "Write the docstring for this function."
        (function,) = ast.parse(source).body
        assert isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
        assert ast.get_docstring(function) is None, (module, source)
        assert len(source) <= 1200 and 15 <= len(answer["content"]) <= 300
        assert answer["content"] == " ".join(answer["content"].split())
        sources.append(source)
    assert len(set(sources)) == len(sources)
    for function in (shlex.join, textwrap.shorten, functools.wraps):
        first = f"def {function.__name__}("
        answers = [
            answer["content"] for _, _, (asked, answer) in functions if first in asked["content"]
        ]
        summary = inspect.getdoc(function).split("\n\n")[0]
        assert " ".join(summary.split()) in answers


def test_the_same_functions_come_again_in_the_same_order(functions, monkeypatch):
    """Whatever the order of files. Without most of them, no more functions come."""
    some = chat.standard_library()[::20]
    monkeypatch.setattr(chat, "standard_library", lambda: some)
    found = list(chat.docstrings())
    assert len(found) > 100
    some.reverse()
    assert list(chat.docstrings()) == found
    modules = {"/".join(path.parts[-2:]) for path in some}
    whole = [f for f in functions if f[1] in modules]
    assert [f for f in found if f in whole] == whole


def test_modules_held_out_are_those_that_pretraining_holds_out(functions):
    files = [path for path in data.find_files(["python"]) if path.stat().st_size]
    pieces = [piece for piece in data.read_pieces(files) if piece.starts_document]
    split_of = {"/".join(path.parts[-2:]): p.split for path, p in zip(files, pieces, strict=True)}
    assert {module: split for split, module, _ in functions}.items() <= split_of.items()
    splits = [split for split, _, _ in functions]
    assert splits.count("train") > 1000 and splits.count("val") > 20
    assert len({(split, module) for split, module, _ in functions}) == len(
        {module for _, module, _ in functions}
    )


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
    """In a held-out module; one of its functions also stands in a module to train on."""
    names = [f"m{i}.py" for i in range(100)]
    held_out = next(n for n in names if data.chance(f"{tmp_path.name}/{n}") < 0.05)
    other = next(n for n in reversed(names) if data.chance(f"{tmp_path.name}/{n}") >= 0.05)
    (tmp_path / held_out).write_text(SOURCE)
    (tmp_path / other).write_text(SOURCE[: SOURCE.index("class A")])
    monkeypatch.setattr(chat, "standard_library", lambda: sorted(tmp_path.glob("*.py")))
    found = list(chat.docstrings())
    shown = [(asked["content"].split("\n\n", 1)[1], a["content"]) for _, _, (asked, a) in found]
    assert [split for split, _, _ in found] == ["train"] + ["val"] * 3
    assert [module for _, module, _ in found][:2] == [
        f"{tmp_path.name}/{name}" for name in (other, held_out)
    ]
    inner = 'def inner():\n    """Said of what is within."""\n    return """\n  text\n'
    assert dict(shown) == {  # what stands in a string is only moved where it is indented enough
        "def plain(a):\n    return a": "What it does, at some length.",
        "@property\n@other(\n    1)\nasync def decorated(self):  # a comment\n\n\n    "
        + inner.replace("\n    ", "\n        ")
        + '"""\n    return inner': "Written in one string of quotes.",
        'def inner():\n    return """\n  text\n    """': "Said of what is within.",
        "def plain_again(b):\n    return b": "A form feed and others before it do not matter.",
    }


# -------------------------------------------------------------------------------- from data to rows


def answers_of(packed: Packed) -> list[str]:
    return sorted(learnt_text(*sample, packed.tokenizer) for sample in packed.samples)


def test_the_default_set_as_rows(functions, monkeypatch):
    monkeypatch.setattr(chat, "docstrings", lambda: iter(functions))  # which take seconds to find
    train, val, prompts, about = open_samples(["python"], BYTES, 2048)
    for packed, split in ((train, "train"), (val, "val")):
        expected = [encode(talk, BYTES) for name, _, talk in functions if name == split]
        assert [(i.tolist(), j.tolist()) for i, j in packed.samples] == expected
    assert about.startswith(f"{len(train.samples):,} samples in {len(train):,} rows of 2,048 tok")
    assert about.endswith(f" % filled; {len(val.samples):,} held out, in {len(val):,} rows")
    held_out = {str(encode_prompt(t, BYTES)): t[-1] for name, _, t in functions if name == "val"}
    assert len(prompts) == 3
    for ids, answer in prompts:
        assert held_out[str(ids)]["content"] == answer and len(ids) <= 2048 - 64


def test_lines_held_out_are_those_that_pretraining_holds_out(tmp_path):
    (tmp_path / "sub").mkdir()
    first = [record | {"text": record["messages"][1]["content"]} for record in answering(300)]
    second = [{"prompt": "a", "completion": f"x{i}", "text": f"x{i}"} for i in range(100)]
    paths = [write(tmp_path / "a.jsonl", *first), write(tmp_path / "sub" / "b.jsonl", *second)]
    (tmp_path / "notes.txt").write_text("not a conversation")
    train, val, _, _ = open_samples([str(tmp_path)], BYTES, 128)
    pieces = list(data.read_pieces(paths))
    for packed, split in ((train, "train"), (val, "val")):
        texts = [piece.text + "{eot_id}" for piece in pieces if piece.split == split]
        assert answers_of(packed) == sorted(texts) and texts
    by_file = open_samples([str(path) for path in paths], BYTES, 128)
    assert answers_of(by_file[0]) == answers_of(train) and by_file[3].startswith("3")


def test_of_a_few_lines_the_last_is_held_out(tmp_path):
    path = write(tmp_path / "few.jsonl", *answering(3))
    train, val, prompts, about = open_samples([str(path)], BYTES, 128)
    assert answers_of(train) == ["0{eot_id}", "1{eot_id}"] and answers_of(val) == ["2{eot_id}"]
    assert prompts == [(BYTES.encode_chat([user("say 2")]), "2")]
    filled = round(100 * sum(len(ids) - 1 for ids, _ in train.samples) / 128)
    assert about == f"2 samples in 1 rows of 128 tokens, {filled} % filled; 1 held out, in 1 rows"
    write(path, *answering(1))
    with pytest.raises(UserError, match="holds one sample: give two or more"):
        open_samples([str(path)], BYTES, 128)


def test_nothing_but_held_out_lines(tmp_path, monkeypatch):
    monkeypatch.setattr(chat, "chance", lambda name: 0.01)
    path = write(tmp_path / "few.jsonl", *answering(3))
    train, val, _, _ = open_samples([str(path)], BYTES, 128)
    assert (len(train.samples), len(val.samples)) == (2, 1)


def test_long_samples_are_cut_or_dropped_and_counted(tmp_path):
    prompt = len(encode_prompt([user("say 0")], BYTES))
    seq_len = prompt + 30  # an answer of 31 bytes is cut by one, and by its end token
    path = write(
        tmp_path / "a.jsonl",
        *answering(8, length=30),
        {"prompt": "say 8", "completion": "8" * 31},
        {"prompt": "say 9", "completion": "9" * 400},
        {"prompt": "z" * 200, "completion": "never seen"},
    )
    train, val, _, about = open_samples([str(path)], BYTES, seq_len)
    assert about.endswith("; 2 truncated; 1 dropped")
    texts = answers_of(train) + answers_of(val)
    whole = [f"{i:030}{{eot_id}}" for i in range(8)]
    assert sorted(texts) == sorted([*whole, "8" * 31, "9" * 31])
    assert max(len(ids) - 1 for ids, _ in train.samples + val.samples) == seq_len
    train, val, _, about = open_samples([str(path)], BYTES, seq_len, long="drop")
    assert sorted(answers_of(train) + answers_of(val)) == whole and about.endswith("; 3 dropped")
    *_, about = open_samples([str(path)], BYTES, seq_len, train_on_prompt=True)
    assert about.endswith("; 3 truncated")  # of the last, the prompt is learnt
    longest = len(encode([user("say 9"), assistant("9" * 400)], BYTES)[0]) - 1
    with pytest.raises(UserError, match=f"11 of 11 .* longest takes {longest} .*longer --seq-len"):
        open_samples([str(path)], BYTES, prompt - 1)


def test_prompts_leave_room_for_an_answer(tmp_path):
    path = write(tmp_path / "a.jsonl", *answering(400))
    prompt = len(encode_prompt([user("say 0")], BYTES))
    _, val, prompts, _ = open_samples([str(path)], BYTES, prompt + 64 + 2)
    assert len(prompts) == 3 and len({answer for _, answer in prompts}) == 3
    assert {f"{answer}{{eot_id}}" for _, answer in prompts} <= set(answers_of(val))
    assert open_samples([str(path)], BYTES, prompt + 63)[2] == []


def test_progress_is_shown_only_when_it_takes_long(tmp_path, capsys, monkeypatch):
    path = write(tmp_path / "a.jsonl", *answering(1500))
    open_samples([str(path)], BYTES, 128)
    assert capsys.readouterr().err == ""
    ticks = iter(range(10**6))
    monkeypatch.setattr(chat.time, "monotonic", lambda: next(ticks))
    open_samples([str(path)], BYTES, 128, quiet=True)
    assert capsys.readouterr().err == ""
    open_samples([str(path)], BYTES, 128)
    shown = capsys.readouterr().err
    assert "1,000" in shown and "1,500 in " in shown and shown.endswith(" s\n")
