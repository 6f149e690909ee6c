"""evaluate.py: losses and exams against plain PyTorch, however the model is split."""

import json
import math
import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from conftest import json_lines, metrics, succeed
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
        text = f"{i} and {i + 1} make{space}"
        rows.append({"question": text, "choices": choices, "answer": i % 2})
    for i in range(WRITTEN):
        rows.append({"question": f"{i} +", "answer": f"{i}"})
    return rows


def losses_of(model, ids: list[int]) -> torch.Tensor:
    row = torch.tensor(ids)
    logits = model(row[None, :-1])[0]
    return F.cross_entropy(logits, row[1:], reduction="none")


@torch.no_grad()
def plain_details(model, tokenizer, rows, chat: bool = False, room: int = ROOM) -> list[dict]:
    """Return what a model makes of each question: a row at a time, and without a cache."""
    details = []
    for question in rows:
        text = question["question"]
        head = tokenizer.encode(text.rstrip(), bos=True)
        if chat:
            head = encode_prompt([{"role": "user", "content": text}], tokenizer)
        if "choices" in question:
            scores = []
            for choice in question["choices"]:
                whole = tokenizer.encode(f"{text.rstrip(' ')} {choice}", bos=True)
                if chat:
                    whole = head + tokenizer.encode(choice)
                losses = losses_of(model, whole)
                of_choice = losses[len(head) - 1 :]
                scores.append(-of_choice.sum().item())
            found = {"log_likelihoods": scores}
        else:
            tokens = list(head)
            while len(tokens) < len(head) + room and tokens[-1] not in tokenizer.stop:
                logits = model(torch.tensor([tokens]))[0, -1]
                tokens.append(logits.argmax().item())
            answer = [token for token in tokens[len(head) :] if token not in tokenizer.stop]
            first_line, *_ = tokenizer.decode(answer).split("\n")
            found = {"written": first_line.strip()}
        details.append(question | found)
    return details


def scores(details: list[dict]) -> dict[str, float]:
    """Count the right answers, as percentages."""
    right = {"accuracy": [], "normalized": [], "exact": []}
    for row in details:
        if "written" in row:
            right["exact"].append(row["written"] == row["answer"])
            continue
        likelihoods = row["log_likelihoods"]
        by_length = [s / len(choice) for s, choice in zip(likelihoods, row["choices"])]
        for name, found in (("accuracy", likelihoods), ("normalized", by_length)):
            right[name].append(found.index(max(found)) == row["answer"])
    return {name: round(100 * sum(marks) / len(marks), 1) for name, marks in right.items()}


def printed(out: str) -> dict[str, float]:
    return {name: float(value) for name, value in re.findall(r"exam (\w+) ([\d.]+)%", out)}


def same_details(found: list[dict], expected: list[dict]) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.keys() == theirs.keys()
        for key, value in theirs.items():
            if key == "log_likelihoods":
                value = pytest.approx(value, rel=1e-11)
            assert ours[key] == value, key


@pytest.fixture(scope="module")
def base(text, tmp_path_factory) -> Path:
    """A checkpoint in float64 with a tokenizer of its own, whose matrices 4 bits can hold."""
    directory = tmp_path_factory.mktemp("base")
    file = directory / "my.model"
    train_tokenizer([str(text)], 400, file)
    tokenizer = load_tokenizer(str(file))
    config = LlamaConfig(128, 2, 4, 2, 256, tokenizer.vocab_size, 256, tie_embeddings=True)
    model = our_model(config, torch.float64, seed=5, factor=3, norms=(1, 1))
    file.unlink()  # the checkpoint is complete in itself
    return saved(directory / "base", model, tokenizer)


@pytest.fixture(scope="module")
def files(base, tmp_path_factory) -> tuple[Path, Path]:
    """An exam, some answers of which are right, and a text."""
    directory = tmp_path_factory.mktemp("exam")
    text = directory / "held_out.txt"
    lines = [f"{i} and {i} make {2 * i}, é\n" for i in range(20)]
    text.write_text("".join(lines))
    rows = questions()
    model = load_pretrained(base, torch.float64)
    details = plain_details(model, load_tokenizer(str(base)), rows)
    for row, answered in zip(rows[-2:], details[-2:]):
        row["answer"] = answered["written"]
    exam = directory / "exam.jsonl"
    exam.write_text("\n".join(map(json.dumps, rows)))
    return exam, text


@pytest.fixture(scope="module")
def adapter(base, files, sums, tmp_path_factory) -> Path:
    """A run beside the base in 4 bits, which takes an exam, and validates on all that it learns."""
    out = tmp_path_factory.mktemp("lora") / "lora"
    exam, _ = files
    more = dict(base_bits=4, dora=True, rank=4, steps=3, lr=0.05)
    more |= dict(eval_every=3, val_data=sums, exam=exam)
    result = succeed("finetune_lora.py", *flags(base, sums, out, **more))
    assert "60 samples" in result.out
    assert "60 held out" in result.out
    return out


def run_evaluate(directory: Path, files: tuple[Path, Path], out: Path, *more, **options) -> str:
    exam, _ = files
    given = ["--dtype=float64", "--seq-len=24", f"--max-new-tokens={ROOM}", *more]
    given += ["--exam", exam, "--json", out]
    return succeed("evaluate.py", directory, *given, **options).out


# ---------------------------------------------------------------------------- one model, all splits


SPLITS = "", "--dp ddp --microbatch 3", "--tp 2", "--cp 2", "--pp 2 --microbatch 1"


@pytest.mark.parametrize("split", SPLITS)
def test_scores_equal_plain_pytorch_under_every_split(base, files, tmp_path, split):
    exam, text = files
    model = load_pretrained(base, torch.float64)
    tokenizer = load_tokenizer(str(base))
    ids = tokenizer.encode(text.read_text(), bos=True)
    n = len(ids) - 1
    loss = 0
    with torch.no_grad():
        for start in range(0, n, 24):  # the last window is shorter
            window = ids[start : start + 25]
            loss += losses_of(model, window).sum().item()
    bits = loss / math.log(2) / text.stat().st_size
    details = tmp_path / "new/details"
    nproc = 2 if split else 0
    out = run_evaluate(base, files, details, "--data", text, *split.split(), nproc=nproc)
    assert f"loss {loss / n:.4f}, {bits:.4f} bits/byte, {n:,} tokens" in out
    expected = plain_details(model, tokenizer, json_lines(exam))
    same_details(json_lines(details), expected)
    told = printed(out)
    assert told == scores(expected)
    assert all(0 < share < 100 for share in told.values())  # or a miscount would not show


def test_adapters_and_4_bits_are_scored(base, adapter, files, sums, tmp_path):
    """The base in 4 bits is scored alone, then with its adapter as a chat; on conversations it has
    the loss that the adapter's run recorded."""
    exam, _ = files
    rows = json_lines(exam)
    details = tmp_path / "details"
    model = rounded_to_4_bits(load_pretrained(base, torch.float64))
    tokenizer = load_tokenizer(str(base))
    run_evaluate(base, files, details, "--base-bits", 4)
    same_details(json_lines(details), plain_details(model, tokenizer, rows))

    load_adapter(model, adapter / "step-00000003")
    packed = open_chats([str(sums)], tokenizer, 96, Reading())
    batch = packed.batch([*range(len(packed))])
    with torch.no_grad():
        loss = model(batch.tokens, batch.targets, batch.positions).item()
    n = (batch.targets >= 0).sum()
    given = "--adapter", adapter, "--chat", "--data", sums, "--seq-len", 96
    out = run_evaluate(base, files, details, *given)
    same_details(json_lines(details), plain_details(model, tokenizer, rows, chat=True))
    assert f"loss {loss / n:.4f}" in out
    row = metrics(adapter)[-1]
    assert f"loss {row['val_loss']:.4f}, {row['val_bits_per_byte']:.4f} bits/byte" in out


# ------------------------------------------------------------------------------- within training


def test_training_validates_on_other_data_and_takes_an_exam(base, files, tmp_path):
    """What it records is what evaluate.py says of its checkpoint; all of --data is trained on."""
    exam, text = files
    record = json.dumps({"body": text.read_text()})
    records = tmp_path / "records.jsonl"
    records.write_text(f"{record}\n7")
    val = [records, "--text-field", "body", "--skip-bad"]
    run = tmp_path / "run"
    given = ["--init", base, "--data", text, "--val-data", *val, "--exam", exam, "--out", run]
    given += ["--seq-len", 24, "--dtype", "float64", "--steps", 1, "--eval-every", 1]
    result = succeed("train.py", *given, nproc=2)
    (row,) = metrics(run)
    model = load_pretrained(run, torch.float64)
    tokenizer = load_tokenizer(str(base))
    expected = scores(plain_details(model, tokenizer, json_lines(exam), room=exams.ROOM))
    assert {name: round(100 * row[f"exam_{name}"], 1) for name in expected} == expected
    _, after_the_step = result.out.split("step 1:")
    assert printed(after_the_step) == expected
    out = succeed("evaluate.py", run, "--data", *val, "--dtype", "float64").out
    assert f"loss {row['val_loss']:.4f}, {row['val_bits_per_byte']:.4f} bits/byte" in out
    n = len(tokenizer.encode(text.read_text(), bos=True)) - 1
    assert f"{n // 24:,} sequences an epoch" in result.out


# ------------------------------------------------------------------------------------ wrong input

LONG = "1 " * 300
BAD_QUESTIONS = [
    ('"choices": "bc", "answer": 0', "\"choices\" is 'bc': give a list"),
    ('"choices": ["b"], "answer": 1', '"answer" is 1: give the number of a'),
    ('"choices": ["b", "c"], "answer": true', '"answer" is True: give the number of a'),
    ('"choices": ["b", "c"], "answer": 1.0', '"answer" is 1.0: give the number of a'),
    ('"choices": ["b", " "], "answer": 0', "a choice is empty: leave the question out"),
    ('"answer": null', '"answer" is None: give it as a string'),
    ('"answer": "b\\nc"', "\"answer\" is 'b\\nc': give one line"),
    ('"answer": " "', "\"answer\" is ' ': give one line"),
    (f'"answer": "b", "question": "{LONG}"', "and the model reads 256: leave"),  # the later counts
]


@pytest.mark.parametrize("fields, problem", BAD_QUESTIONS)
def test_a_line_that_is_no_question_is_refused(tmp_path, fields, problem):
    tokenizer = load_tokenizer("bytes")
    path = tmp_path / "exam.jsonl"
    path.write_text(f'\n{{"question": "a", {fields}}}\n')
    with pytest.raises(UserError, match=re.escape(problem)):
        exams.Exam(path, tokenizer, 256)


def test_a_choice_follows_after_one_space(tmp_path):
    path = tmp_path / "exam.jsonl"
    path.write_text('{"question": "1 + 1 = ", "choices": ["2"], "answer": 0}')
    tokenizer = load_tokenizer("bytes")
    ((ids, _),) = exams.Exam(path, tokenizer, 256).choices.samples
    assert tokenizer.decode(ids[1:]) == "1 + 1 = 2"


def test_an_exam_without_a_question_is_refused(tmp_path):
    path = tmp_path / "exam.jsonl"
    path.write_text("\n")
    with pytest.raises(UserError, match="holds no question"):
        exams.Exam(path, load_tokenizer("bytes"), 256)
