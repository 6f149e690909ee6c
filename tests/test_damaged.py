"""Damaged and hostile files: each is read, or refused in one line, in bounded time and memory."""

import contextlib
import errno
import gzip
import json
import os
import random
import shutil
import signal
import tracemalloc
from collections import deque
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
from test_chat import BYTES
from test_formats import our_model, save_shards, saved, saved_hf
from test_published import QWEN, write

import report
from data import open_windows, tokenize, tokenizer_of_token_files
from files import directories, export
from files.adapters import bits_of_base, gather_adapters, save_adapter
from files.loading import load_pretrained
from finetune_lora import base_of
from lora import LoRA, add_adapters
from model import LlamaConfig
from plumbing import endings
from plumbing.messages import UserError
from plumbing.processes import ADVICE
from rewards import reward_processes
from runs.answers import read_prompts
from runs.records import best_loss
from text import corpora
from text.bpe import train_tokenizer
from text.conversations import conversations
from text.corpora import Reading, find_files, read_pieces
from text.exams import Exam
from text.pairs import pairs
from text.targets import encode
from text.templates import _limits
from text.tokenizer import load_tokenizer

SEED = os.environ.get("SEED", "0")
CONFIG = LlamaConfig(16, 2, 2, 1, 24, vocab_size=300)
DEEP = "[" * 100_000 + "]" * 100_000
VALUES = [None, True, 0, -1, 0.5, 10**12, 10**400, 1e308, float("nan"), float("inf"), "", "x"]
VALUES += [[], {}, [1], {"a": 1}, "\ud800", "\x1b[2J\nerror: ", "../../../dev/zero", [[]] * 9, DEEP]


def read_tokens(home: Path) -> None:
    tokenizer = load_tokenizer(tokenizer_of_token_files([str(home)]))
    train, _ = open_windows([str(home)], tokenizer, 8)
    train.batch([0, len(train) - 1])


def read_tokenizer(home: Path) -> None:
    tokenizer = load_tokenizer(str(home))
    tokenizer.decode(tokenizer.encode("All is well, 2 + 2 = 4.", bos=True))
    encode([dict(role="user", content="a"), dict(role="assistant", content="b")], tokenizer)


def read_chats(home: Path) -> None:
    for line in conversations([str(home / "chats.jsonl")], Reading()):
        encode(line.messages, BYTES, tools=line.tools)


def read_pairs(home: Path) -> None:
    for line in pairs([str(home / "pairs.jsonl")], Reading()):
        encode(line.rejected, BYTES, tools=line.tools)


def read_run(home: Path) -> None:
    report.page_of([report.read_run(home)])
    best_loss(home)


def read_text(name: str, home: Path) -> None:
    list(read_pieces(find_files([home / name])))


def prompts_of(home: Path) -> None:
    run = SimpleNamespace(chat=True, max_new_tokens=4, seq_len=64)
    read_prompts(run, BYTES, Reading(), [str(home / "prompts.jsonl")])


def call_reward(home: Path) -> None:
    processes = reward_processes.__wrapped__(home / "reward.py", 1)
    (reply,) = processes.replies([{"prompt": "a"}], ["b"])
    (process,) = processes.processes
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.process.pid, signal.SIGKILL)
    process.process.wait()
    if "failed" in reply:
        raise UserError(reply["failed"])


def read_template(home: Path) -> None:
    tokenizer = load_tokenizer(str(home.parent / "listed"), str(home / "template.jinja"))
    encode([dict(role="user", content="a"), dict(role="assistant", content="b")], tokenizer)


def read_adapter_run(home: Path) -> None:
    directories.read_config(home)
    directories.find_adapter(home, home.parents[1] / "own")
    bits_of_base(home)


def read_resumed_run(home: Path) -> None:
    base_of(SimpleNamespace(directory=home, init=home))


def with_adapter(home: Path) -> None:
    load_pretrained(home.parent / "hf", adapter=home)


RUN = "dpo/step-00000001/run.json"  # of preferences.py; that of rewards.py has other flags
READERS = {  # file -> what reads its directory
    "own/config.json": load_pretrained,
    "own/SHA256SUMS": load_pretrained,
    "own/weights/.metadata": lambda weights: load_pretrained(weights.parent),
    "own/weights/__0_0.distcp": lambda weights: load_pretrained(weights.parent),
    "own/tokenizer.model": load_pretrained,
    "hf/config.json": load_pretrained,
    "hf/model.safetensors.index.json": load_pretrained,
    "hf/model-00001-of-00003.safetensors": load_pretrained,
    "hf/tokenizer.json": read_tokenizer,
    "hf/tokenizer.model": lambda home: read_tokenizer(home / "tokenizer.model"),
    "hf/tokenizer_config.json": read_tokenizer,
    "meta/params.json": load_pretrained,
    "meta/consolidated.00.pth": load_pretrained,
    "adapter/adapter_config.json": with_adapter,
    "adapter/adapter_model.safetensors": with_adapter,
    "yi/tokenizer.json": read_tokenizer,
    "yi/tokenizer_config.json": read_tokenizer,
    "yi/special_tokens_map.json": read_tokenizer,
    "yi/added_tokens.json": read_tokenizer,
    "yi/generation_config.json": read_tokenizer,
    "listed/tokenizer_config.json": read_tokenizer,
    "tokens/data.json": read_tokens,
    "tokens/train_000000.bin": read_tokens,
    "texts/text.jsonl": partial(read_text, "text.jsonl"),
    "texts/text.json.gz": partial(read_text, "text.json.gz"),
    "texts/text.txt.gz": partial(read_text, "text.txt.gz"),
    "texts/chats.jsonl": read_chats,
    "texts/pairs.jsonl": read_pairs,
    "texts/prompts.jsonl": prompts_of,
    "texts/reward.py": call_reward,
    "texts/template.jinja": read_template,
    "dpo/config.json": read_resumed_run,
    RUN: read_adapter_run,
    "dpo/step-00000001/SHA256SUMS": read_adapter_run,
    "texts/exam.jsonl": lambda home: Exam(home / "exam.jsonl", BYTES, 64),
    "run/config.json": read_run,
    "run/metrics.jsonl": read_run,
}
NEVER_REFUSED = "run/metrics.jsonl"


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> Path:
    home = tmp_path_factory.mktemp("files")
    for name in ("texts", "adapter", "run"):
        (home / name).mkdir()
    text = "".join(f"{i} and {i + 1} make {2 * i + 1}\n" for i in range(300))
    (home / "text.txt").write_text(text)
    train_tokenizer([str(home / "text.txt")], 290, home / "tokenizer.model")
    tokenizer, model = load_tokenizer(str(home / "tokenizer.model")), our_model(CONFIG)
    saved(home / "own", model, tokenizer)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(export, "MAX_FILE_BYTES", 20_000)
        saved_hf(home / "hf", model, tokenizer)
    save_shards(home / "meta", CONFIG, [model.state_dict()])
    add_adapters(model, lora := LoRA(rank=2))
    save_adapter(home / "adapter", lora, CONFIG, gather_adapters(model), "hf")
    step = home / "dpo/step-00000001"
    step.mkdir(parents=True)
    save_adapter(step, lora, CONFIG, gather_adapters(model), "own")
    facts = dict(
        init=str(home / step.name), base_digest=directories.digest_of_weights(home / "own")
    )
    metadata = dict(step=1, flags=dict(base_bits=16, beta=0.1, group=8), facts=facts)
    directories.complete(step, CONFIG, metadata, tokenizer, {})
    (home / "dpo/config.json").write_text(json.dumps(metadata))
    write(home / "yi", "yi")
    (home / "yi/special_tokens_map.json").write_text('{"eos_token": "</s>", "pad_token": null}')
    (home / "yi/added_tokens.json").write_text('{"<s>": 1, "</s>": 2}')
    (home / "yi/generation_config.json").write_text('{"eos_token_id": [2, 1], "bos_token_id": 1}')
    token = dict(content="<|endoftext|>", lstrip=False, normalized=False, special=True)
    more = dict(added_tokens_decoder={"0": token}, extra_special_tokens=["<|im_start|>", token])
    templates = [dict(name="default", template=QWEN), dict(name="x", template="y")]
    write(home / "listed", "smollm2", chat_template=templates, **more)
    tokenize([home / "text.txt"], tokenizer, home / "tokens", Reading())
    texts = [{"text": f"{i} is a number", "id": i} for i in range(9)]
    (home / "texts/text.jsonl").write_text("\n".join(map(json.dumps, texts)))
    (home / "texts/text.json.gz").write_bytes(gzip.compress(json.dumps(texts).encode()))
    (home / "texts/text.txt.gz").write_bytes(gzip.compress(text.encode()))
    chat = [dict(role="user", content="a"), dict(role="assistant", content="b", weight=1)]
    chat += [dict(role="user", content="c"), dict(role="assistant", content="d")]
    lines = [dict(messages=chat[:2]), dict(prompt="a", completion="b"), dict(messages=chat)]
    (home / "texts/chats.jsonl").write_text("\n".join(map(json.dumps, lines)))
    pairs = [dict(prompt="a", chosen="b", rejected="c", system="d", history=[["e", "f"]])]
    pairs += [dict(chosen=chat, rejected=[*chat[:3], dict(role="assistant", content="e")])]
    (home / "texts/pairs.jsonl").write_text("\n".join(map(json.dumps, pairs)))
    prompts = [dict(prompt="a", truth=1), dict(prompt="b", truth={})]
    (home / "texts/prompts.jsonl").write_text("\n".join(map(json.dumps, prompts)))
    reward = (
        "import math\n\n\ndef reward(prompt, answer):\n    return math.sqrt(len(prompt + answer))\n"
    )
    (home / "texts/reward.py").write_text(reward)
    (home / "texts/template.jinja").write_text(QWEN)
    exam = [dict(question="a", choices=["b", "c"], answer=1), dict(question="a", answer="b")]
    (home / "texts/exam.jsonl").write_text("\n".join(map(json.dumps, exam)))
    rows = ({"step": i, "tokens": 8 * i, "loss": 2.0, "val_loss": 3.0} for i in range(1, 9))
    (home / "run/metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (home / "run/config.json").write_text(json.dumps({"flags": {"lr": 1}, "run": {"ranks": 2}}))
    (home / "run/best").symlink_to("step-00000003")
    return home


def places_in(whole: list, rng: random.Random) -> list[tuple]:
    """Return the 40 places nearest to the root of a JSON value, which is alone in a list: of each
    the list or the dictionary, and the index or the key."""
    found = []
    waiting = deque([(whole, 0)])
    while waiting and len(found) < 40:
        inside, key = waiting.popleft()
        found.append((inside, key))
        node = inside[key]
        keys = []
        if isinstance(node, dict):
            keys = list(node)
        elif isinstance(node, list):
            keys = range(len(node))
        for below in rng.sample(keys, min(len(keys), 20)):
            waiting.append((node, below))
    return found


def damaged_json(content: bytes, rng: random.Random) -> bytes:
    """Put another value at a random place of a JSON text, or of one of its lines; or remove or
    double a key."""
    if content[8:10] == b'{"':  # the header of safetensors
        length = int.from_bytes(content[:8], "little")
        header = damaged_json(content[8 : 8 + length], rng)
        return len(header).to_bytes(8, "little") + header + content[8 + length :]
    lines = content.splitlines() if content[-2:-1] == b"}" or b"}\n{" in content else [content]
    i = rng.randrange(len(lines))
    value = rng.choice(VALUES)
    whole = [json.loads(lines[i])]
    inside, key = rng.choice(places_in(whole, rng))
    old = inside[key]
    inside[key] = "HERE"
    new = value if value is DEEP else json.dumps(value)
    if isinstance(key, str) and rng.random() < 0.3:
        new = f"{json.dumps(old)}, {json.dumps(key)}: {new}"
    elif inside is not whole and rng.random() < 0.1:
        del inside[key]
    lines[i] = json.dumps(whole[0]).replace('"HERE"', new).encode()
    return b"\n".join(lines)


def damaged_bytes(content: bytes, rng: random.Random) -> bytes:
    """Cut the file, flip bits, zero or double a stretch, as disks and transfers do."""
    start, end = sorted(rng.choices(range(len(content) + 1), k=2))
    flipped = bytearray(content)
    for _ in range(rng.choice([1, 1, 9])):
        flipped[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    zeros = content[:start] + bytes(end - start) + content[end:]
    doubled = content[:end] + content[start:]
    return rng.choice([bytes(flipped), bytes(flipped), content[:start], zeros, doubled, b""])


def refusal(read, home: Path) -> str:
    """Return how a file is refused, or "". Other errors fail, as do 10 s of CPU and 1 GiB."""
    signal.alarm(30)  # kills this process, if it waits for a fifo
    try:
        with _limits():
            read(home)
    except (UserError, OSError, RuntimeError) as error:  # `run` makes a line of some others
        code = errno.errorcode.get(getattr(error, "errno", 0))
        gets_advice = code in ADVICE or "can't allocate memory" in str(error)
        if not (isinstance(error, UserError) or gets_advice):
            raise
        return str(UserError(error))
    finally:
        signal.alarm(0)
    return ""


@pytest.mark.parametrize("name", READERS)
def test_damaged_files_are_read_or_refused(name, files, monkeypatch):
    path, rng, said = files / name, random.Random(f"{SEED} {name}"), []
    original, is_json = path.read_bytes(), path.suffix in (".json", ".jsonl", ".safetensors")
    assert refusal(READERS[name], path.parent) == ""
    for i in range(12):
        as_json = is_json and i % 4 > 0
        content = (damaged_json if as_json else damaged_bytes)(original, rng)
        which = f"seed {SEED}, {name}, damage {i}: {content[:300]}"
        try:
            path.write_bytes(content)
            with monkeypatch.context() as patch:
                has_checksums = name in ("own/config.json", RUN)
                if has_checksums and as_json:  # by somebody who makes checksums, too
                    patch.setattr(directories, "verify", lambda *_, **__: None)
                said.append(refusal(READERS[name], path.parent))
        except Exception as error:
            raise AssertionError(which) from error
        finally:
            path.write_bytes(original)
        assert said[-1].translate(endings.ESCAPED) == said[-1] and len(said[-1]) <= 2000, which
        if name.startswith("own/") and not as_json and content != original:
            assert said[-1], f"not found: {which}"
    assert any(said) != (name == NEVER_REFUSED)
    path.unlink()
    os.mkfifo(path)
    refusal(READERS[name], path.parent)  # does not wait for a writer
    path.unlink()
    path.write_bytes(original)


def test_a_tokenizer_takes_bounded_memory_and_time(files, tmp_path):
    path = shutil.copytree(files / "yi", tmp_path / "yi") / "tokenizer.json"
    huge, slow = (json.loads(path.read_text()) for _ in range(2))
    huge["model"]["vocab"]["zz"] = 4 * 10**9
    split = dict(type="Split", pattern={"Regex": "(a+a+)+b"}, behavior="Isolated", invert=False)
    slow["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [split]}
    for content, says in ((huge, "4,000,000,000"), (slow, "cannot encode a text")):
        path.write_text(json.dumps(content))
        with pytest.raises(UserError, match=says):
            load_tokenizer(str(path.parent)).encode("a" * 40)


@pytest.mark.parametrize("name", ["a.txt.gz", "a.jsonl.gz", "a.json.gz"])
def test_a_small_file_may_hold_gigabytes(name, tmp_path, monkeypatch):
    """By gzip, and is not read whole: here, megabytes."""
    monkeypatch.setattr(corpora, "MAX_LINE", 1 << 16)
    (tmp_path / name).write_bytes(gzip.compress(b"[" * (30 << 20)))
    tracemalloc.start()
    with pytest.raises(UserError, match=name):
        list(read_pieces([tmp_path / name]))
    assert tracemalloc.get_traced_memory()[1] < 10 << 20
    tracemalloc.stop()


def test_an_error_is_one_line_whatever_it_names():
    assert str(UserError("a\x1b[2J\nb" + "c" * 9999)).startswith(r"a\x1b[2J\nbcc")
    assert len(str(UserError("c" * 9999))) == 2000
