"""evaluate.py: losses and exams against plain PyTorch, however the model is split."""

import json
import math
import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from conftest import metrics, succeed
from test_finetune import flags
from test_formats import our_model, saved
from test_nf4 import rounded_to_4_bits

from files.adapters import load_adapter
from files.loading import load_pretrained
from model import LlamaConfig
from plumbing.messages import UserError
from text import exams
from text.bpe import train_tokenizer
from text.chat import open_chats
from text.corpora import Reading
from text.targets import encode_prompt
from text.tokenizer import load_tokenizer

WRITTEN, ROOM = 5, 8  # questions whose answer is written, in so many tokens


def questions() -> list[dict]:
    """Questions with two to four choices of several lengths, and some to be answered."""
    rows = []
    for i in range(8):
        choices = [f"{i * k + 7}" * (3 - k % 3) for k in range(2 + i % 3)]
        space = " " * (i % 2)  # belongs to the choice's first token
        rows.append({"question": f"{i} and {i + 1} make{space}", "choices": choices})
        rows[-1]["answer"] = i % 2
    return rows + [{"question": f"{i} +", "answer": f"{i}"} for i in range(WRITTEN)]


def losses_of(model, ids: list[int]) -> torch.Tensor:
    logits = model(torch.tensor([ids[:-1]]))[0]
    return F.cross_entropy(logits, torch.tensor(ids[1:]), reduction="none")


@torch.no_grad()
def plain_details(model, tokenizer, rows, chat: bool = False, room: int = ROOM) -> list[dict]:
    """Return what a model makes of each question: a row at a time, and without a cache."""
    details = []
    for question in rows:
        text, found = question["question"], {}
        head = tokenizer.encode(text.rstrip(), bos=True)
        if chat:
            head = encode_prompt([{"role": "user", "content": text}], tokenizer)
        for choice in question.get("choices", []):
            whole = tokenizer.encode(f"{text} {choice}", bos=True)
            whole = head + tokenizer.encode(choice) if chat else whole
            score = -losses_of(model, whole)[len(head) - 1 :].sum().item()
            found.setdefault("log_likelihoods", []).append(score)
        if not found:
            tokens = list(head)
            while len(tokens) < len(head) + room and tokens[-1] not in tokenizer.stop:
                tokens.append(model(torch.tensor([tokens]))[0, -1].argmax().item())
            text = tokenizer.decode(t for t in tokens[len(head) :] if t not in tokenizer.stop)
            found["written"] = text.split("\n")[0].strip()
        details.append(question | found)
    return details


def scores(details: list[dict]) -> dict[str, float]:
    """Count the right answers, as percentages."""
    right = {"accuracy": [], "normalized": [], "exact": []}
    for row in details:
        if "written" in row:
            right["exact"].append(row["written"] == row["answer"])
            continue
        by_length = [s / len(c) for s, c in zip(row["log_likelihoods"], row["choices"])]
        for name, found in (("accuracy", row["log_likelihoods"]), ("normalized", by_length)):
            right[name].append(max(range(len(found)), key=found.__getitem__) == row["answer"])
    return {name: round(100 * sum(marks) / len(marks), 1) for name, marks in right.items()}


def printed(out: str) -> dict[str, float]:
    return {name: float(value) for name, value in re.findall(r"exam (\w+) ([\d.]+)%", out)}


def read(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def same_details(found: list[dict], expected: list[dict]) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        scores = [row.get("log_likelihoods", []) for row in (ours, theirs)]
        assert scores[0] == pytest.approx(scores[1], rel=1e-11)
        assert ours == theirs | ({"log_likelihoods": scores[0]} if scores[0] else {})


@pytest.fixture(scope="module")
def base(text, tmp_path_factory) -> Path:
    """A checkpoint in float64 with a tokenizer of its own, whose matrices 4 bits can hold."""
    directory = tmp_path_factory.mktemp("base")
    train_tokenizer([str(text)], 400, directory / "my.model")
    tokenizer = load_tokenizer(str(directory / "my.model"))
    config = LlamaConfig(128, 2, 4, 2, 256, tokenizer.vocab_size, 256, tie_embeddings=True)
    model = our_model(config, torch.float64, seed=5, factor=3, norms=(1, 1))
    (directory / "my.model").unlink()  # the checkpoint is complete in itself
    return saved(directory / "base", model, tokenizer)


@pytest.fixture(scope="module")
def files(base, tmp_path_factory) -> tuple[Path, Path]:
    """An exam, some answers of which are right, and a text."""
    directory = tmp_path_factory.mktemp("exam")
    text, exam, rows = directory / "held_out.txt", directory / "exam.jsonl", questions()
    text.write_text("".join(f"{i} and {i} make {2 * i}, é\n" for i in range(20)))
    tokenizer = load_tokenizer(str(base))
    for row in plain_details(load_pretrained(base, torch.float64), tokenizer, rows)[-2:]:
        next(r for r in rows if r["question"] == row["question"])["answer"] = row["written"]
    exam.write_text("\n".join(map(json.dumps, rows)))
    return exam, text


@pytest.fixture(scope="module")
def adapter(base, files, sums, tmp_path_factory) -> Path:
    """A run beside the base in 4 bits, which takes an exam, and validates on all that it learns."""
    out = tmp_path_factory.mktemp("lora") / "lora"
    more = dict(base_bits=4, dora=True, rank=4, steps=3, lr=0.05, eval_every=3)
    more |= dict(val_data=sums, exam=files[0])
    result = succeed("finetune_lora.py", *flags(base, sums, out, **more))
    assert "60 samples" in result.out and "60 held out" in result.out
    return out


def run_evaluate(directory: Path, files: tuple[Path, Path], out: Path, *more, **options) -> str:
    given = ["--dtype=float64", "--seq-len=24", f"--max-new-tokens={ROOM}", *more]
    given += ["--exam", files[0], "--details", out]
    return succeed("evaluate.py", directory, *given, **options).out


# ---------------------------------------------------------------------------- one model, all splits


SPLITS = "", "--dp ddp --microbatch 3", "--tp 2", "--cp 2", "--pp 2 --microbatch 1"


@pytest.mark.parametrize("split", SPLITS)
def test_scores_equal_plain_pytorch_under_every_split(base, files, tmp_path, split):
    (exam, text), model = files, load_pretrained(base, torch.float64)
    tokenizer = load_tokenizer(str(base))
    ids = tokenizer.encode(text.read_text(), bos=True)
    with torch.no_grad():  # the last window is shorter
        windows = [ids[start : start + 25] for start in range(0, len(ids) - 1, 24)]
        loss = sum(losses_of(model, window).sum().item() for window in windows)
    n, bits = len(ids) - 1, loss / math.log(2) / text.stat().st_size
    given = "--data", text, *split.split()
    out = run_evaluate(base, files, tmp_path / "new/details", *given, nproc=2 * bool(split))
    assert f"loss {loss / n:.4f}, {bits:.4f} bits/byte, {n:,} tokens" in out
    expected = plain_details(model, tokenizer, read(exam))
    same_details(read(tmp_path / "new/details"), expected)
    assert printed(out) == scores(expected)
    assert all(0 < share < 100 for share in printed(out).values())  # or a miscount would not show


def test_adapters_and_4_bits_are_scored(base, adapter, files, sums, tmp_path):
    """The base in 4 bits is scored alone, then with its adapter as a chat; on conversations it has
    the loss that the adapter's run recorded."""
    model = rounded_to_4_bits(load_pretrained(base, torch.float64))
    tokenizer, rows = load_tokenizer(str(base)), read(files[0])
    run_evaluate(base, files, tmp_path / "d", "--base-bits", 4)
    same_details(read(tmp_path / "d"), plain_details(model, tokenizer, rows))

    load_adapter(model, adapter / "step-00000003")
    packed = open_chats([str(sums)], tokenizer, 96, Reading())
    batch = packed.batch([*range(len(packed))])
    with torch.no_grad():
        loss = model(batch.tokens, batch.targets, batch.positions).item()
    given = "--adapter", adapter, "--chat", "--data", sums, "--seq-len", 96
    out = run_evaluate(base, files, tmp_path / "d", *given)
    same_details(read(tmp_path / "d"), plain_details(model, tokenizer, rows, chat=True))
    assert f"loss {loss / (batch.targets >= 0).sum():.4f}" in out
    row = metrics(adapter)[-1]
    assert f"loss {row['val_loss']:.4f}, {row['val_bits_per_byte']:.4f} bits/byte" in out


# ------------------------------------------------------------------------------- within training


def test_training_validates_on_other_data_and_takes_an_exam(base, files, tmp_path):
    """What it records is what evaluate.py says of its checkpoint; all of --data is trained on."""
    (exam, text), tokenizer = files, load_tokenizer(str(base))
    given = ["--init", base, "--seq-len", 24, "--dtype", "float64", "--exam", exam]
    record = json.dumps({"body": text.read_text()})
    (records := tmp_path / "records.jsonl").write_text(f"{record}\n7")
    given += ["--steps", 1, "--eval-every", 1, "--data", text]
    val = [records, "--text-field", "body", "--skip-bad"]
    given += ["--val-data", *val]
    result = succeed("train.py", *given, "--out", tmp_path / "run", nproc=2)
    (row,) = metrics(tmp_path / "run")
    model = load_pretrained(tmp_path / "run", torch.float64)
    expected = scores(plain_details(model, tokenizer, read(exam), room=exams.ROOM))
    assert {name: round(100 * row[f"exam_{name}"], 1) for name in expected} == expected
    assert printed(result.out.split("step 1:")[1]) == expected
    out = succeed("evaluate.py", tmp_path / "run", "--data", *val, "--dtype", "float64").out
    assert f"loss {row['val_loss']:.4f}, {row['val_bits_per_byte']:.4f} bits/byte" in out
    n = len(tokenizer.encode(text.read_text(), bos=True)) - 1
    assert f"{n // 24:,} sequences an epoch" in result.out


# ------------------------------------------------------------------------------------ wrong input

BAD_QUESTIONS = [
    ('"choices": "bc", "answer": 0', "\"choices\" is 'bc': give a list"),
    ('"choices": ["b"], "answer": 1', '"answer" is 1: give the number of a'),
    ('"choices": ["b", "c"], "answer": true', '"answer" is True: give the number of a'),
    ('"choices": ["b", "c"], "answer": 1.0', '"answer" is 1.0: give the number of a'),
    ('"answer": null', '"answer" is None: give it as a string'),
    ('"answer": "b\\nc"', '"answer" has several lines: give one'),
    (
        '"answer": "b", "question": "%s"' % ("1 " * 300),
        "and the model reads 256: leave",
    ),  # the later one counts
]


@pytest.mark.parametrize("fields, problem", BAD_QUESTIONS)
def test_a_line_that_is_no_question_is_refused(tmp_path, fields, problem):
    (path := tmp_path / "exam.jsonl").write_text(f'\n{{"question": "a", {fields}}}\n')
    with pytest.raises(UserError, match=re.escape(problem)):
        exams.Exam(path, load_tokenizer("bytes"), 256)
    path.write_text("\n")
    with pytest.raises(UserError, match="holds no question"):
        exams.Exam(path, load_tokenizer("bytes"), 256)
