"""text/conversations.py, targets.py, packing.py and chat.py: each layout of a conversation gives
the messages, targets and rows that are written out here. Others are refused with their line."""

import json
import random

import pytest
import tiktoken
import torch
from conftest import line_of_refusal

from model import IGNORE
from plumbing.messages import UserError
from text import chat, conversations
from text.chat import open_chats, open_samples
from text.conversations import read_conversations
from text.corpora import Reading, read_pieces
from text.packing import Packed, pack
from text.targets import encode, encode_prompt
from text.tokenizer import load_tokenizer
from text.vocabulary import Tokenizer

BYTES = load_tokenizer("bytes")
# A tokenizer of bytes with GPT-2's only special token, and so none for chat.
VOCAB, SPECIAL = {bytes([i]): i for i in range(256)}, {"<|endoftext|>": 256}
ENCODING = dict(pat_str="(?s:.)", mergeable_ranks=VOCAB, special_tokens=SPECIAL)
PLAIN = Tokenizer("plain", tiktoken.Encoding("p", **ENCODING))


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
    """Return the text of ids, with the names of special tokens in curly brackets."""
    names = {i: f"{{{name.strip('<|>')}}}".encode() for name, i in tokenizer.special.items()}
    return b"".join(names.get(i) or tokenizer.decode_bytes([i]) for i in ids).decode()


def target_text(ids, is_target, tokenizer: Tokenizer = BYTES) -> str:
    return marked([int(i) for i, counts in zip(ids, is_target) if counts], tokenizer)


def write(path, *records):
    path.write_text("".join(f"{json.dumps(record)}\n" for record in records))
    return path


def opened(path, seq_len: int = 128, **options) -> tuple:
    return open_samples([str(path)], BYTES, seq_len, **options)


def answering(n: int, length: int = 0) -> list[dict]:
    """Return n conversations with the answers 0, 1, ..., padded with zeros to `length` digits."""
    return [{"messages": [user(f"say {i}"), assistant(f"{i:0{length}}")]} for i in range(n)]


# --------------------------------------------------------------------------- conversation files

ALPACA = {"instruction": "Add.", "output": "3"}
CALL = {"name": "f", "arguments": {}}
FUNCTIONS = {"functions": [CALL]}
UNREAD = {"id": None, "x": [1], "y": {"a": 1}, "zero": 0, "n": 0.5, "of": ["b"], "split": "train"}
UNREAD |= {"about": [{"role": "user"}], "input": "beside messages", "prompt": "too", "images": []}
SHAREGPT = [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]


@pytest.mark.parametrize("record, prompt, answer", [
    ({"messages": [user("Hi"), assistant("Ho")], "source": "x", "n": [1]}, "Hi", "Ho"),
    ({"messages": None, "conversations": SHAREGPT}, "a", "b"),
    ({"messages": [user("Hi"), assistant("Ho") | {"weight": 1, "train": True}]}, "Hi", "Ho"),
    (ALPACA | {"input": "1 2"}, "Add.\n\n1 2", "3"),
    (ALPACA | {"input": ""}, "Add.", "3"),
    (ALPACA | {"text": "both"}, "Add.", "3"),
    (ALPACA | {"input": None}, "Add.", "3"),
    ({"prompt": "1 + 1 =", "completion": " 2"}, "1 + 1 =", " 2"),
    ({"conversations": SHAREGPT}, "a", "b"),
    ({"prompt": "a\ud83db", "completion": "🙂"}, "a\ufffdb", "🙂"),
])  # fmt: skip
def test_kinds_of_lines(record, prompt, answer, tmp_path):
    assert read_one(record, tmp_path) == [user(prompt), assistant(answer)]


def read_one(record: dict, tmp_path) -> list[dict]:
    (line,) = read_conversations(write(tmp_path / "a.jsonl", record), Reading())
    return line.messages


def test_roles_have_the_names_of_templates(tmp_path):
    """A developer speaks as the system, and what a tool has put out has Llama 3's heading."""
    roles = "developer user assistant ipython assistant".split()
    messages = [{"role": role, "content": role[0]} for role in roles]
    read = read_one({"messages": messages}, tmp_path)
    assert [m["role"] for m in read] == ["system", "user", "assistant", "tool", "assistant"]
    ids, is_target = encode(read, BYTES)
    assert target_text(ids, is_target) == "a{eot_id}a{eot_id}"
    assert "{start_header_id}ipython{end_header_id}\n\ni{eot_id}" in marked(ids, BYTES)


def test_bad_conversations_are_left_out_and_listed(tmp_path):
    """Also where the template would write nothing of a field."""
    lines = ["{", '{"messages": []}', '"text"', *map(json.dumps, answering(2))]
    (path := tmp_path / "a.jsonl").write_text("\n".join([*lines, json.dumps(ALPACA | FUNCTIONS)]))
    train, val, *_ = opened(path, reading=(reading := Reading(skip_bad=True)))
    assert answers_of(train) + answers_of(val) == ["0{eot_id}", "1{eot_id}"]
    places = [line.split(": ")[0] for line in reading.left_out]
    assert places == [f"{path}, line {n}" for n in (1, 2, 3, 6)]
    with pytest.raises(UserError, match="line 1: the chat template writes nothing of tools"):
        opened(write(path, ALPACA | FUNCTIONS))


def test_blank_lines_byte_order_marks_and_messages_after_the_last_answer(tmp_path):
    path = tmp_path / "a.jsonl"
    line = json.dumps({"messages": [*TALK, user("Bye")]})
    path.write_text(f"\ufeff{line}\n\n \t\r\n{line}")
    read = [(line.where, line.messages) for line in read_conversations(path, Reading())]
    assert read == [(f"{path}, line 1", TALK), (f"{path}, line 4", TALK)]


MALFORMED = [
    (b'{"prompt": "caf\xe9", "completion": "x"}', "byte 0xe9 is not UTF-8: convert"),
    ({"text": "a", "output": 3}, "an object with 'text', 'output': give {"),
    ({"messages": []}, "no message has the role assistant: give an answer"),
    ({"messages": ["a"]}, "message 1 is 'a': give {\"role\""),
    ({"messages": [user("a"), {"role": ["user"], "content": "b"}]}, 'message 2 has the "role"'),
    ({"conversations": [{"from": "bing", "value": "b"}]}, "the \"role\" 'bing': give one of"),
    ({"messages": [user(["a"]), assistant("b")]}, "message 1 has the \"content\" ['a']: give"),
    (ALPACA | {"prompt": "a", "completion": "b"}, "both instruction/output and prompt/comple"),
    (ALPACA | {"system": ["a"]}, "\"system\" is ['a']: give it as a string"),
    ({"messages": [TALK[0], assistant("a")], "system": "b"}, 'both a "system" and a system'),
    (ALPACA | {"history": ["ab"]}, '"history" is no list of [question, answer]'),
    (ALPACA | {"history": [["a", " "]]}, "message 2 is an empty answer"),
    (ALPACA | FUNCTIONS | {"tools": [1]}, "both tools and functions: leave one of"),
    (ALPACA | {"tools": "{"}, "\"tools\" is '{': give a list"),
    ({"messages": [user("a") | {"value": "b"}, assistant("b")]}, "content by two names"),
    (ALPACA | {"weight": 0.5}, '"weight" is 0.5: give 0 or 1'),
    (ALPACA | {"loss": 0.5}, '"loss" is 0.5: give 0 or 1'),
    (ALPACA | {"loss_weight": 0.0}, '"loss_weight" is 0.0, and may say what to train on'),
    (ALPACA | {"mask": "User"}, "\"mask\" is 'User', and may say what to train on"),
    ({"messages": [user("a"), assistant("b") | {"training": False}]}, '"training" is False, and'),
    ({"messages": [user("a"), assistant("b") | {"lossMask": [0]}]}, '"lossMask" is [0], and may'),
    ({"messages": [user("a") | {"train": True}, assistant("b")]}, "message 1 is to be trained on"),
    (ALPACA | {"images": ["a.png"]}, "\"images\" is ['a.png']: only text is read"),
    (ALPACA | {"has_audio": True}, '"has_audio" is True: only text is read'),
    ({"messages": [user("a") | {"video_url": "b"}, assistant("b")]}, '"video_url" is'),
    ({"messages": [user("a"), assistant("b") | {"tool_calls": [1]}]}, '"tool_calls" [1]: give'),
]


@pytest.mark.parametrize("line, message", MALFORMED, ids=str)
def test_malformed_lines_are_refused(line, message, tmp_path):
    path, raw = tmp_path / "a.jsonl", line if isinstance(line, bytes) else json.dumps(line).encode()
    path.write_bytes(b'{"prompt": "a", "completion": "b"}\n\n' + raw)
    told = line_of_refusal(list, read_conversations(path, Reading()))
    assert told.startswith(f"{path}, line 3: ")
    assert message in told and len(told) < 600


def test_columns_beside_a_conversation(tmp_path, capsys):
    """A system column and earlier turns are messages; weights of 0 make no target; what is not read
    is named, once, and what is null or empty says nothing."""
    turns = [user("1"), assistant("2"), user("Add."), assistant("3")]
    system = {"role": "system", "content": "s"}
    assert read_one(ALPACA | {"history": [["1", "2"]], "system": "s"}, tmp_path) == [system, *turns]
    assert read_one({"conversations": SHAREGPT, "system": "s"}, tmp_path)[0] == system
    for kind in ({"weight": 0}, {"train": False}, {"loss": False}, {"loss": 0}):
        talk = [turns[0], turns[1] | kind, *turns[2:]]
        read = read_one({"messages": talk} | UNREAD, tmp_path)
        assert target_text(*encode(read, BYTES)) == "3{eot_id}"
        everything = [marked([i], BYTES) for i, on in zip(*encode(read, BYTES, True)) if not on]
        assert everything == ["{begin_of_text}", "2", "{eot_id}"]
        said = capsys.readouterr().err
        assert said.count("not read: about, input, n, of, prompt, split, x, y, zero") == 1
        train, val, *_ = opened(write(tmp_path / "a.jsonl", ALPACA | kind, *answering(2)))
        assert answers_of(train) + answers_of(val) == ["0{eot_id}", "1{eot_id}"]
        assert "1 dropped" in capsys.readouterr().err


def test_arguments_and_fields_that_say_nothing(tmp_path, capsys):
    """Arguments as text are read; empty reasoning is none; a field of a message that is not read is
    named; a text may have any characters."""
    for given, read in ((' {"a": 1}', {"a": 1}), ("", {}), ({"a": 1}, {"a": 1})):
        call = {"function": {"name": "f", "arguments": given}}
        answer = {"role": "assistant", "content": None, "tool_calls": [call]}
        found = read_one({"messages": [user("a"), answer]}, tmp_path)
        assert found[1]["tool_calls"][0]["function"]["arguments"] == read
    call["function"]["arguments"] = "[" * 100_000
    with pytest.raises(UserError, match='has the "tool_calls"'):
        read_one({"messages": [user("a"), answer]}, tmp_path)
    called = assistant("") | {"function_call": CALL}  # no empty answer
    assert read_one({"messages": [user("a"), called]}, tmp_path) == [user("a"), called]
    private = "".join(map(chr, range(0xE000, 0xF900))) + "\ue000\ue000<|eot_id|>"
    answer = assistant(private) | {"reasoning_content": "", "tool_calls": [], "score": 0}
    read = read_one({"messages": [user("a"), answer]}, tmp_path)
    assert target_text(*encode(read, BYTES)) == f"{private}{{eot_id}}"
    assert "not read: score" in capsys.readouterr().err


# -------------------------------------------------------------------------------------- targets


def test_targets_are_the_answers_and_their_ends():
    for tokenizer, end in ((BYTES, "{eot_id}"), (PLAIN, "{endoftext}")):
        answers = f"4, naïvely 🙂{end}6 <|eot_id|>!{end}"
        ids, is_target = encode(TALK, tokenizer)
        assert target_text(ids, is_target, tokenizer) == answers
        everything = encode(TALK, tokenizer, train_on_prompt=True)
        assert everything == (ids, [False] + [True] * (len(ids) - 1))
    assert marked(encode(TALK, PLAIN)[0], PLAIN) == (
        "{endoftext}### System:\nBe brief.\n\n### User:\nWhat is 2 + 2? <|eot_id|>\n\n"
        "### Assistant:\n4, naïvely 🙂{endoftext}### User:\nAnd\n\n2 * 3?\n\n"
        "### Assistant:\n6 <|eot_id|>!{endoftext}"
    )
    # What somebody types ends no message.
    assert encode(TALK, BYTES)[0].count(BYTES.special["<|eot_id|>"]) == len(TALK)


# ---------------------------------------------------------------------------------- packed rows


def test_packing_puts_every_sample_in_one_row():
    choice = random.Random(0)
    for _ in range(300):
        seq_len = choice.randint(1, 80)
        most = choice.randint(1, seq_len)
        lengths = [choice.randint(1, most) for _ in range(choice.randint(0, 150))]
        rows = pack(lengths, seq_len)
        assert sorted(sample for row in rows for sample in row) == list(range(len(lengths)))
        assert all(0 < sum(lengths[sample] for sample in row) <= seq_len for row in rows)
        assert rows == pack(lengths, seq_len)
    # Of many samples it fills rows well.
    lengths = [min(int(choice.lognormvariate(5.5, 0.9)) + 1, 2048) for _ in range(100_000)]
    assert len(pack(lengths, 2048)) < 1.005 * sum(lengths) / 2048


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
    assert all(t.dtype == torch.int64 for t in batch.inputs)
    assert Packed([long], 5, PLAIN).batch([0]).tokens.tolist() == [[65, 66, 67, 0, 0]]


# ---------------------------------------------------------------------------- from data to rows


def answers_of(packed: Packed) -> list[str]:
    return sorted(target_text(*sample, packed.tokenizer) for sample in packed.samples)


def test_lines_held_out_are_those_that_pretraining_holds_out(tmp_path):
    (tmp_path / "sub").mkdir()
    first = [record | {"text": record["messages"][1]["content"]} for record in answering(150)]
    second = [{"prompt": "a", "completion": f"x{i}", "text": f"x{i}"} for i in range(100)]
    paths = [write(tmp_path / "a.jsonl", *first), write(tmp_path / "sub" / "b.jsonl", *second)]
    (tmp_path / "notes.txt").write_text("not a conversation")
    train, val, _, _ = opened(tmp_path)
    pieces = list(read_pieces(paths))
    for packed, split in ((train, "train"), (val, "val")):
        texts = [piece.text + "{eot_id}" for piece in pieces if piece.split == split]
        assert answers_of(packed) == sorted(texts) and texts
    by_file = open_samples([str(path) for path in paths], BYTES, 128)
    assert answers_of(by_file[0]) == answers_of(train)


def test_of_a_few_lines_the_last_is_held_out(tmp_path, monkeypatch):
    path = write(tmp_path / "few.jsonl", *answering(3))
    train, val, prompts, summary = opened(path)
    assert answers_of(train) == ["0{eot_id}", "1{eot_id}"] and answers_of(val) == ["2{eot_id}"]
    assert prompts == [(encode_prompt([user("say 2")], BYTES), "2")]
    assert summary.startswith("2 samples in 1 rows of 128 tokens, ")
    # By this every line would be held out: again it is the last.
    monkeypatch.setattr(conversations, "split_of", lambda name: "val")
    train, val, _, _ = opened(path)
    assert (len(train.samples), len(val.samples)) == (2, 1)
    for samples, holds in ((0, "no conversation: give lines like {"), (1, "one sample that fits")):
        write(path, *answering(samples))
        with pytest.raises(UserError, match=f"holds {holds}"):
            opened(path)
    train, val, _, _ = opened(path, val_data=[str(path)])  # of one, where none is held out
    assert (len(train.samples), len(val.samples)) == (1, 1)


def test_long_samples_are_truncated_and_counted(tmp_path, capsys):
    prompt = len(encode_prompt([user("say 0")], BYTES))
    seq_len = prompt + 30  # an answer of 31 bytes loses the last one and its end token
    path = write(
        tmp_path / "a.jsonl",
        *answering(8, length=30),
        {"prompt": "say 8", "completion": "8" * 31},
        {"prompt": "say 9", "completion": "9" * 400},
        {"prompt": "z" * 200, "completion": "never seen"},
    )
    train, val, *_ = opened(path, seq_len)
    line = f"{path}: {{}} samples truncated to --seq-len {seq_len}, {{}} dropped\n"
    assert line.format(2, 1) in capsys.readouterr().err
    open_chats([str(path)], BYTES, seq_len, Reading())
    assert line.format(2, 1) in capsys.readouterr().err
    texts = answers_of(train) + answers_of(val)
    whole = [f"{i:030}{{eot_id}}" for i in range(8)]
    assert sorted(texts) == sorted([*whole, "8" * 31, "9" * 31])
    assert max(len(ids) - 1 for ids, _ in train.samples + val.samples) == seq_len
    opened(path, seq_len, train_on_prompt=True)  # the last one has targets in its prompt
    assert line.format(3, 0) in capsys.readouterr().err
    longest = len(encode([user("say 9"), assistant("9" * 400)], BYTES)[0]) - 1
    message = f"none of 11 samples has targets .* longest takes {longest} .*longer --seq-len"
    with pytest.raises(UserError, match=message):
        opened(path, prompt - 1)


def test_prompts_leave_room_for_an_answer(tmp_path):
    path = write(tmp_path / "a.jsonl", *answering(400))
    prompt = len(encode_prompt([user("say 0")], BYTES))
    _, val, prompts, _ = opened(path, prompt + 64 + 2)
    assert len(prompts) == chat.EXAMPLES == len({answer for _, answer in prompts})
    assert {f"{answer}{{eot_id}}" for _, answer in prompts} <= set(answers_of(val))
    assert opened(path, prompt + 63)[2] == []


def test_a_prompt_does_without_earlier_thoughts():
    """As templates of models that think ask for. A target is whole."""
    tokenizer = load_tokenizer("bytes")
    tokenizer.template = "{% for m in messages %}{{ m.content.split('</think>')[-1] }} {% endfor %}"
    talk = [user("a"), assistant("<think>b</think>c"), user("d")]
    assert tokenizer.decode(encode_prompt(talk, tokenizer)) == "a c d "
    with pytest.raises(UserError, match="leaves out message 2, of the assistant"):
        encode(talk, tokenizer)
    with pytest.raises(UserError, match="leaves out message 1, of the user"):
        encode_prompt([user("a</think>b")], tokenizer)


def test_a_call_without_a_content_is_no_example(tmp_path):
    tokenizer, call = load_tokenizer("bytes"), {"role": "assistant", "function_call": CALL}
    tokenizer.template = "{% for m in messages %}{{ m | tojson }}<|eot_id|>{% endfor %}"
    path = write(tmp_path / "a.jsonl", *[{"messages": [user("a"), call]}] * 2)
    assert open_samples([str(path)], tokenizer, 128)[2] == []
