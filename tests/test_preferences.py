"""preferences.py and text/pairs.py: what is read, what is packed, and runs as users start them."""

import json
import math
import operator
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import hugging_face_model, launch, metrics, refused, succeed
from exact import GROUPED, effective_weights, plain_model
from test_finetune import base, flags, last_factors  # noqa: F401
from test_train import resumes
from workers.train_cases import BETA, packed_pairs

from files.formats import hf_name, to_hf_rows
from model import IGNORE, LlamaConfig
from plumbing.processes import UserError
from preferences import Preferences
from text.chat import Packed, encode, open_samples
from text.pairs import docstring_pairs, pairs
from text.tokenizer import load_tokenizer

BYTES = load_tokenizer("bytes")


def said(role: str, content: str) -> dict:
    return {"role": role, "content": content}


HI, GOOD, BAD = said("user", "Hi"), said("assistant", "Hello"), said("assistant", "Go")
BEFORE = [said("user", "A?"), said("assistant", "B.")]
HH = "\n\nHuman: A?\n\nAssistant: B.\n\nHuman: Hi\n\nAssistant: "


def written(directory: Path, lines: list[dict]) -> str:
    path = directory / "pairs.jsonl"
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return str(path)


def record(prompt, chosen, rejected, **more) -> dict:
    return (dict(prompt=prompt) if prompt else {}) | dict(chosen=chosen, rejected=rejected) | more


@pytest.mark.parametrize(
    "line, before",
    [
        (record("Hi", "Hello", "Go"), []),
        (record([HI], [GOOD], [BAD]), []),
        (record("Hi", [HI, GOOD], [HI, BAD]), []),
        (record(None, [HI, GOOD], [HI, BAD]), []),
        (record("Hi", "Hello", "Go", system="Be kind."), [said("system", "Be kind.")]),
        (record([*BEFORE, HI], "Hello", "Go"), BEFORE),
        (record(None, HH + "Hello", HH + "Go"), BEFORE),
    ],
)
def test_layouts_of_pairs(tmp_path, line, before):
    """The targets are the last answers alone: earlier ones would count the same in both."""
    path = written(tmp_path, [line] * 3)
    train, val, prompts, _ = open_samples([path], BYTES, 128, read=pairs)
    shared = [message | {"train": False} for message in [*before, HI]]
    expected = [encode([*shared, answer], BYTES) for answer in (GOOD, BAD)]
    for packed, n in ((train, 2), (val, 1)):
        assert [(i.tolist(), j.tolist()) for i, j in packed.samples] == expected * n
    assert [answer for _, answer in prompts] == ["Hello"]
    targets = train.batch([0]).targets
    ids = targets[targets != IGNORE].tolist()
    assert BYTES.decode(ids[:5]) == "Hello" and ids[5] in BYTES.stop and ids[-1] in BYTES.stop


@pytest.mark.parametrize(
    "line, says",
    [
        (record("Hi", "Hello", "Hello"), "must first differ in an answer"),
        (record(None, [HI, GOOD], [said("user", "Ho"), BAD]), "must first differ in an answer"),
        (record(None, "Hello", "Go"), "no prompt, or no chosen answer"),
        (record("Hi", "Hello", None), "no rejected answer"),
        (record({"a": 1}, "Hello", "Go"), "no prompt"),
        (record("Hi", "Hello", " "), "rejected: message 2 is an empty answer"),
        (record("Hi", "Hello", [3]), "rejected: message 2 is 3"),
        ({"messages": [HI, GOOD]}, "no prompt, or no chosen answer"),
    ],
)
def test_what_is_no_pair_is_refused(tmp_path, line, says):
    with pytest.raises(UserError, match=says):
        open_samples([written(tmp_path, [line])], BYTES, 128, read=pairs)


@pytest.mark.parametrize("text, says", [("Hi, Go", "is not a JSON object"), ("", "holds no conv")])
def test_a_file_without_pairs_is_refused(tmp_path, text, says):
    (tmp_path / "pairs.jsonl").write_text(text)
    with pytest.raises(UserError, match=says + ".*: give .*chosen"):
        open_samples([str(tmp_path / "pairs.jsonl")], BYTES, 128, read=pairs)


def test_pairs_share_a_row_and_long_ones_are_dropped(tmp_path):
    lines = [record("Hi", "a" * (n % 13 + 1), "b" * (n % 7 + 1)) for n in range(40)]
    path = written(tmp_path, lines + [record("Hi", "a" * 80, "b" * 10)] * 3)
    train, val, _, summary = open_samples([path], BYTES, 128, read=pairs)
    assert summary.endswith("; 3 dropped") and len(train.samples) + len(val.samples) == 80
    for row in train.rows:
        assert row[1::2] == [i + 1 for i in row[::2]] and not any(i % 2 for i in row[::2])
        assert sum(len(train.samples[i][0]) - 1 for i in row) <= 128


def test_default_pairs():
    answers = [
        [m[-1]["content"].split() for m in (s.messages, s.rejected)] for s in docstring_pairs()
    ]
    assert len(answers) > 1000 and all(bad and bad != good for good, bad in answers)
    shuffled = [sorted(bad) == sorted(good) for good, bad in answers]
    halves = [bad == good[: len(good) // 2] for good, bad in answers]
    assert all(map(operator.xor, shuffled, halves)) and 0.4 < sum(halves) / len(halves) < 0.6


PAIRS = [record(f"{n} and {n}", "yes" * (n % 5 + 1), "no") for n in range(60)]


@pytest.mark.parametrize("nproc", [0, 2])
def test_a_run_begins_at_log_2_and_resumes(tmp_path, base, nproc):  # noqa: F811
    out, more = tmp_path / "out", dict(save_every=2, eval_every=2, microbatch=2)
    given = flags(base, written(tmp_path, PAIRS), out, **more)
    result, rows = succeed("preferences.py", *given, nproc=nproc), metrics(out)
    names = {"accuracy", "margin", "chosen", "rejected"}
    assert rows[0]["loss"] == pytest.approx(math.log(2), rel=1e-12) and rows[0]["accuracy"] == 0
    assert rows[0].keys() >= names and rows[1].keys() >= {f"val_{name}" for name in names}
    assert "bits_per_byte" not in rows[0] and rows[3]["loss"] < rows[0]["loss"]
    shown = f"validation loss {rows[3]['val_loss']:.4f}, {rows[3]['val_accuracy']:.4f} accur"
    assert shown in result.out
    resumes(out, 2, last_factors, "preferences.py", *given, nproc=nproc)


def test_all_weights_are_trained_beside_the_base_as_it_was(tmp_path, base):  # noqa: F811
    """A resumed run, too, has its rewards relative to --init."""
    out, more = tmp_path / "out", dict(save_every=2, all_weights=True, dp="zero1")
    given = flags(base, written(tmp_path, PAIRS), out, **more)
    succeed("preferences.py", *given, nproc=2)
    losses = [row["loss"] for row in metrics(out)]
    assert losses[0] == pytest.approx(math.log(2), rel=1e-12) and losses[3] < losses[0]
    resumes(out, 2, lambda out: {}, "preferences.py", *given, nproc=2)
    given.remove("--all-weights")
    refused(launch("preferences.py", *given, "--resume", nproc=2), "resume it with --all-weights")


def test_bench_step_knows_the_second_forward(tmp_path, base):  # noqa: F811
    """Collectives are counted as predicted."""
    path = written(tmp_path, PAIRS)
    given = flags(base, path, tmp_path / "none", microbatch=4, dtype="float32", dp="fsdp")
    given = "--lora", "preferences", *given, "--repeats", 1
    out = succeed("bench.py", "step", *given, nproc=2).out
    assert "| reference | " in out and "attention runs forward 1 time" in out
    sent = [line.split("each rank sends ")[1] for line in out.splitlines() if "rank sends " in line]
    predicted, counted = (re.findall(r"(\d+) ([a-z-]+) over", line) for line in sent)
    assert sorted(predicted) == sorted(counted) != []


def test_bench_plan_knows_the_second_forward(tmp_path):
    seconds = {}
    for script in ("finetune_lora", "preferences"):
        given = ["plan", "--lora", script, "--gpus", 8, "--json", tmp_path / script]
        out = succeed("bench.py", *given).out
        assert f"{script}.py --init BASE" in out
        seconds[script] = json.loads((tmp_path / script).read_text())[0]["seconds"]
    assert 1.3 < seconds["preferences"] / seconds["finetune_lora"] < 1.6


@pytest.mark.parametrize("flag, says", [
    ("--dropout=0.1", "leave them out"),
    ("--train-on-prompt", "leave them out"),
    ("--all-weights --dora", "are for adapters"),
])  # fmt: skip
def test_what_would_spoil_rewards_is_refused(tmp_path, flag, says):
    given = "preferences.py", "--init", tmp_path, *flag.split()
    refused(launch(*given), flag.split()[0].partition("=")[0], says)


def test_trl_computes_the_same(tmp_path, monkeypatch):
    """DPOTrainer on the merged weights, by its own tokenization; its numbers are in float32."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    trl = pytest.importorskip("trl", reason="trl's DPOTrainer is not installed here")
    from datasets import Dataset
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    lora, config = dict(rank=3, alpha=5), LlamaConfig(**GROUPED)
    model, old = plain_model(GROUPED, lora), packed_pairs()
    samples = [([*ids, 100], [*on, True]) for ids, on in old.samples]  # the end token
    for chosen, rejected in zip(samples[::2], samples[1::2]):  # one prompt
        prompt = chosen[1].index(True)
        rejected[0][:prompt] = chosen[0][:prompt]
    data = Packed(samples, 26, old.tokenizer, together=2)
    args = SimpleNamespace(microbatch=3, beta=BETA, loss="sigmoid", references=1)
    task = Preferences(args, SimpleNamespace(model=model), None, None, None)
    batch = task.prepare(data.batch([*range(len(data))]))
    parts = batch.microbatches(3)
    loss = sum(p.loss(model(*p.inputs, documents=p.documents)) for p in parts) / batch.count()

    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(101)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="w100", pad_token="w99")

    def theirs(weights: dict) -> torch.nn.Module:
        llama = hugging_face_model(config).double()
        named = {hf_name(n): to_hf_rows(n, config, w.detach()) for n, w in weights.items()}
        llama.load_state_dict(named)
        return llama

    def text(ids: list[int]) -> str:
        return " ".join(f"w{i}" for i in ids)

    rows = [
        dict(prompt=f"{text(c[:at])} ", chosen=text(c[at:-1]), rejected=text(r[at:-1]))
        for (c, on), (r, _) in zip(samples[::2], samples[1::2])
        for at in [on.index(True)]
    ]
    config_of_trainer = trl.DPOConfig(
        output_dir=str(tmp_path), use_cpu=True, report_to=[], beta=BETA, max_length=None,
        per_device_train_batch_size=len(rows), bf16=False, gradient_checkpointing=False,
    )  # fmt: skip
    policy = theirs(effective_weights(model, lora))
    base_weights = theirs(effective_weights(model, lora, with_adapters=False))
    trainer = trl.DPOTrainer(
        model=policy, ref_model=base_weights, args=config_of_trainer,
        train_dataset=Dataset.from_list(rows), processing_class=tokenizer,
    )  # fmt: skip
    trainer.model.double(), trainer.ref_model.double()
    given = trainer.data_collator([trainer.train_dataset[i] for i in range(len(rows))])
    their_loss = trainer._compute_loss(trainer.model, given, False)
    assert loss.item() == pytest.approx(their_loss.item(), rel=1e-6)
