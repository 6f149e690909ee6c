"""preferences.py: a run begins at log 2, resumes to the last bit, and is the same on every split.

Its loss and margins are those of trl's DPOTrainer; test_exact.py has gradients on every split."""

import math
import re
from types import SimpleNamespace

import pytest
import torch
from conftest import hugging_face_model, launch, metrics, refused, slow, succeed
from exact import GROUPED
from plain import effective_weights, plain_model
from test_finetune import CONFIG, base, flags, last_factors, same_run  # noqa: F401
from test_model import to_hugging_face
from test_pairs import PAIRS, written
from test_train import resumes
from workers.train_cases import BETA, JobOfTask, packed_pairs

from model import Llama, LlamaConfig
from preferences import Preferences, Preferring
from runs.scores import evenly_spaced
from text.order import Order, Steps, window_of
from text.packing import Packed


def test_a_run_begins_at_log_2_and_resumes(tmp_path, base):  # noqa: F811
    out = tmp_path / "out"
    more = dict(save_every=2, eval_every=2, microbatch=2)
    given = flags(base, written(tmp_path, PAIRS), out, **more)
    result = succeed("preferences.py", *given, nproc=2)
    rows = metrics(out)
    first, last = rows[0], rows[3]
    assert first["loss"] == pytest.approx(math.log(2), rel=1e-12)
    assert first["accuracy"] == 0
    for name in ("accuracy", "margin", "chosen", "rejected"):
        assert name in first
        assert f"val_{name}" in rows[1]
    assert "bits_per_byte" not in first
    assert last["loss"] < first["loss"]
    shown = f"validation loss {last['val_loss']:.4f}, {last['val_accuracy']:.4f} accur"
    assert shown in result.out
    resumes(out, 2, last_factors, "preferences.py", *given, nproc=2)


@pytest.fixture(scope="module")
def unsplit(tmp_path_factory, base):  # noqa: F811
    """The flags of a run of all weights, and the losses of one process."""
    path = tmp_path_factory.mktemp("unsplit")
    data = written(path, PAIRS)
    out = path / "out"
    given = flags(base, data, out, save_every=2, all_weights=True)
    succeed("preferences.py", *given)
    return given, [row["loss"] for row in metrics(out)]


@pytest.mark.parametrize("split", [
    "--dp fsdp --eval-every 2",
    slow("--pp 2 --eval-every 2"),
    slow("--dp ddp"),
    slow("--dp zero1"),
    slow("--dp fsdp --reshard none"),
    slow("--dp fsdp --reshard all --microbatch 1"),
    slow("--dp hsdp --shard 2"),
    slow("--dp hsdp --shard 1"),
    slow("--dp fsdp --offload"),
    slow("--dp fsdp --cp 2"),
    slow("--tp 2"),
    slow("--dp fsdp --async-save --keep-best --eval-every 2"),
])  # fmt: skip
def test_all_weights_are_trained_beside_the_base_as_it_was(tmp_path, unsplit, split):
    """Under every strategy, with the Saver; a resumed run, too, has its rewards relative to --init.
    The base's forward passes leave FSDP's weights unsharded before step 1."""
    out = tmp_path / "out"
    given, losses = unsplit
    given = [*given, *split.split(), "--out", out]
    printed = succeed("preferences.py", *given, nproc=2).out
    assert ("would send" in printed) == ("dp" in split)  # along others ranks share rows
    assert losses[0] == pytest.approx(math.log(2), rel=1e-12)
    assert losses[3] < losses[0]
    assert [row["loss"] for row in metrics(out)] == pytest.approx(losses, rel=1e-12)
    resumes(out, 2, last_factors, "preferences.py", *given, nproc=2)


def test_the_base_has_no_dropout():
    """A student's model may: --dropout of adapters is refused."""
    model = Llama(CONFIG).train()
    model.layers["0"].feed_forward = torch.nn.Dropout(0.5)
    pairs = packed_pairs()
    batch = pairs.batch([0, 1])
    work = SimpleNamespace(microbatch=2)
    task = Preferences(Preferring(), JobOfTask(model, pairs, pairs), None, work, None)
    assert torch.equal(task.log_p(batch), task.log_p(batch))
    assert model.training


def test_the_base_is_computed_for_the_rows_that_are_read(monkeypatch):
    """And for the held-out rows of evaluations; all other rows have none."""
    computed = []

    def log_p_of(task, dataset, rows):
        computed.append((dataset, [*rows]))
        return torch.zeros(len(dataset), dataset.seq_len)

    monkeypatch.setattr(Preferences, "base_log_p", log_p_of)
    train_set = packed_pairs()
    val_set = packed_pairs()
    run = Preferring(all_weights=True, eval_windows=3)
    job = JobOfTask(Llama(CONFIG), train_set, val_set)
    task = Preferences(run, job, None, None, None)
    order = Order(batch=2, seq_len=24, seed=0)
    task.begin(Steps(done=0, last=2, skipped=(), order=order))
    n = len(train_set)
    read = {window_of(i, n, seed=0) for i in range(4)}
    assert n > len(read)
    assert computed == [(train_set, sorted(read)), (val_set, evenly_spaced(val_set, 3))]


def test_adapters_do_not_continue_all_weights(tmp_path, unsplit):
    given = [*unsplit[0], "--out", tmp_path / "out"]
    succeed("preferences.py", *given)
    given.remove("--all-weights")
    refused(launch("preferences.py", *given, "--resume"), "resume it with --all-weights")


def test_bench_step_knows_the_second_forward(tmp_path, base):  # noqa: F811
    """Collectives are counted as predicted."""
    path = written(tmp_path, PAIRS)
    more = dict(microbatch=4, dtype="float32", dp="fsdp")
    given = flags(base, path, tmp_path / "none", **more)
    given = "--lora", "preferences", *given, "--repeats", 1
    out = succeed("bench.py", "step", *given, nproc=2).out
    assert "| reference | " in out
    assert "attention runs forward 1 time" in out
    lines = re.findall("rank sends (.*)", out)
    predicted, counted = (sorted(re.findall(r"(\d+) ([a-z-]+) over", line)) for line in lines)
    assert predicted == counted != []


@pytest.mark.parametrize("flag", ["--dropout=0.1", "--train-on-prompt"])
def test_what_would_spoil_rewards_is_refused(tmp_path, flag):
    refused(launch("preferences.py", "--init", tmp_path, flag), "leave them out")


def test_trl_computes_the_same(tmp_path, monkeypatch):
    """DPOTrainer on the merged weights, by its own tokenization; its numbers are in float32. In
    bfloat16, margins of pairs are no further from these than trl's own."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    trl = pytest.importorskip("trl", reason="trl's DPOTrainer is not installed here")
    from datasets import Dataset
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    lora = dict(rank=3, alpha=5)
    config = LlamaConfig(**GROUPED)
    model = plain_model(GROUPED, lora)
    old = packed_pairs()
    samples = [([*ids, 100], [*on, True]) for ids, on in old.samples]  # the end token
    for chosen, rejected in zip(samples[::2], samples[1::2]):  # one prompt
        prompt = chosen[1].index(True)
        rejected[0][:prompt] = chosen[0][:prompt]
    data = Packed(samples, 26, old.tokenizer, together=2)
    job = SimpleNamespace(model=model)
    work = SimpleNamespace(microbatch=3)
    task = Preferences(Preferring(beta=BETA), job, None, work, None)
    batch = task.with_base(data.batch(range(len(data))))
    losses = []
    for part in batch.microbatches(3):
        output = model(*part.inputs, documents=part.documents)
        losses.append(task.loss(output, part))
    loss = sum(losses) / task.count(batch)

    ids = {f"w{i}": i for i in range(101)}
    words = Tokenizer(models.WordLevel(ids, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="w100", pad_token="w99")

    def theirs(with_adapters: bool) -> torch.nn.Module:
        weights = effective_weights(model, lora, with_adapters)
        llama = hugging_face_model(config).double()
        llama.load_state_dict(to_hugging_face(config, weights))
        return llama

    def text(ids: list[int]) -> str:
        return " ".join(f"w{i}" for i in ids)

    rows = []
    for (chosen, on), (rejected, _) in zip(samples[::2], samples[1::2]):
        at = on.index(True)
        answers = dict(chosen=text(chosen[at:-1]), rejected=text(rejected[at:-1]))
        rows.append(answers | dict(prompt=f"{text(chosen[:at])} "))
    config_of_trainer = trl.DPOConfig(
        output_dir=str(tmp_path),
        use_cpu=True,
        report_to=[],
        beta=BETA,
        max_length=None,
        per_device_train_batch_size=len(rows),
        bf16=False,
        gradient_checkpointing=False,
    )
    trainer = trl.DPOTrainer(
        model=theirs(True),
        ref_model=theirs(False),
        args=config_of_trainer,
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
    )
    trainer.model.double()
    trainer.ref_model.double()
    given = trainer.data_collator([trainer.train_dataset[i] for i in range(len(rows))])
    their_loss = trainer._compute_loss(trainer.model, given, False)
    assert loss.item() == pytest.approx(their_loss.item(), rel=1e-6)

    def our_margins() -> torch.Tensor:
        margins = []
        for first in range(0, len(samples), 2):
            pair = Packed(samples[first : first + 2], 26, old.tokenizer, together=2)
            batch = task.with_base(pair.batch([0]))
            task.sums.clear()
            task.loss(model(*batch.inputs, documents=batch.documents), batch)
            margins.append(task.sums["margin"].item())
        return torch.tensor(margins)

    def their_margins() -> torch.Tensor:
        for sample in trainer.train_dataset:
            given = trainer.data_collator([sample])
            trainer._compute_loss(trainer.model, given, False)
        return torch.tensor(trainer._metrics["train"]["rewards/margins"][-len(rows) :])

    expected = their_margins()
    assert our_margins().tolist() == pytest.approx(expected.tolist(), rel=1e-5, abs=1e-5)
    for each in (model, trainer.model, trainer.ref_model):
        each.float()
    model.compute_dtype = torch.bfloat16
    with torch.autocast("cpu", torch.bfloat16):  # as its Trainer does
        theirs_off = (their_margins() - expected).square().mean().sqrt()
    assert 1e-4 < (our_margins() - expected).square().mean().sqrt() < 1.5 * theirs_off
