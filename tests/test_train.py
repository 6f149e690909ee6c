"""train.py as its users run it, against a training loop written out in plain PyTorch."""

import json
import math
import re
import shutil
from argparse import Namespace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from conftest import by_torchrun, launch, metrics, slow, succeed

from checkpoint import load_pretrained
from data import open_windows, window_of
from model import Llama, LlamaConfig
from plumbing.parser import Parser
from runs.flags import add_optimizer_flags
from text.tokenizer import load_tokenizer
from train import learning_rate, make_optimizer

SIZES = ["--dim", "32", "--n-layers", "2", "--n-heads", "4", "--n-kv-heads", "2", "--ffn-dim", "48"]
CONFIG = LlamaConfig(32, 2, 4, 2, 48, vocab_size=267, tie_embeddings=True)


def flags(corpus, out, steps=5, **more) -> list[str]:
    """Return the flags of a short run of CONFIG, in float64 and without evaluation."""
    given = dict(data=corpus, out=out, steps=steps, seq_len=24, batch=8, lr=1e-2, eval_every=0,
                 warmup=min(2, steps), save_every=0, dtype="float64")  # fmt: skip
    given |= dict(optimizer="adamw") | more
    flags = (f"--{name.replace('_', '-')}={value}" for name, value in given.items())
    return [*SIZES, *(flag.removesuffix("=True") for flag in flags)]


def weights(out: Path) -> dict[str, torch.Tensor]:
    return dict(load_pretrained(out, torch.float64).named_parameters())


def name_case(value) -> str:
    return "".join(value) if isinstance(value, list) else str(value)


# --------------------------------------------------------------------- one process, written out


@pytest.fixture(scope="module")
def reference(corpus):
    """Five steps of AdamW on the mean cross entropy of the whole batch: metrics and weights."""
    model = Llama(CONFIG).double()
    model.init_weights(seed=0)
    decayed = [p for p in model.parameters() if p.ndim == 2]
    free = [p for p in model.parameters() if p.ndim == 1]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": free, "weight_decay": 0.0}],
        betas=(0.9, 0.95),
        fused=False,
    )
    windows, _ = open_windows([str(corpus)], load_tokenizer("bytes"), 24)
    rows = []
    for step in range(5):
        chosen = [window_of(step * 8 + i, len(windows), seed=0) for i in range(8)]
        tokens = torch.tensor([windows[i].tolist() for i in chosen])
        logits = model(tokens[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        lr = [5e-3, 1e-2, 1e-2, 1e-2, 6e-3][step]  # 0 after another step, 5/3 of them below 1e-2
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.step()
        optimizer.zero_grad()
        rows.append({"loss": loss.item(), "grad_norm": norm.item(), "lr": lr})
    assert all(row["grad_norm"] > 0.5 for row in rows)  # otherwise clipping would not be tested
    return rows, dict(model.named_parameters())


@pytest.mark.parametrize(
    "run, nproc, parallel",
    [
        (launch, 0, []),
        (launch, 1, ["--microbatch=2"]),
        (by_torchrun, 2, ["--microbatch=4"]),
        (launch, 2, ["--microbatch=1"]),
        (launch, 2, ["--dp=zero1"]),
        (launch, 2, ["--dp=zero1", "--microbatch=1"]),
    ],
    ids=lambda value: value.__name__ if callable(value) else name_case(value),
)
def test_training_equals_the_plain_loop(corpus, reference, tmp_path, run, nproc, parallel):
    out = tmp_path / "run"
    succeed("train.py", *flags(corpus, out, clip=0.5), *parallel, run=run, nproc=nproc)
    rows, expected = reference
    for ours, theirs in zip(metrics(out), rows, strict=True):
        for key, value in theirs.items():
            assert ours[key] == pytest.approx(value, rel=1e-12), key
    ours = weights(out)
    assert ours.keys() == expected.keys()
    for name, weight in expected.items():
        error = (ours[name] - weight).norm() / weight.norm()
        assert error < 1e-12, name


# ---------------------------------------------------------------- every parallel configuration


WHOLE_RUN = dict(steps=4, eval_every=2, eval_windows=7, save_every=2, document_mask=True)


@pytest.fixture(scope="module")
def one_run(corpus, tmp_path_factory):
    """A run of one process, with its samples of text."""
    out = tmp_path_factory.mktemp("one") / "run"
    result = succeed("train.py", *flags(corpus, out, **WHOLE_RUN))
    return out, [line for line in result.out.splitlines() if line.startswith("--- ")]


def test_interleaved_stages_start_and_train_like_one_process(corpus, tmp_path):
    given = dict(steps=3, n_layers=4)
    succeed("train.py", *flags(corpus, tmp_path / "one", **given))
    pipeline = ["--pp=2", "--schedule=interleaved", "--microbatch=2"]
    succeed("train.py", *flags(corpus, tmp_path / "two", **given), *pipeline, nproc=2)
    same_run(tmp_path / "two", tmp_path / "one")


def same_run(out: Path, expected: Path) -> None:
    for ours, theirs in zip(metrics(out), metrics(expected), strict=True):
        for key in {"loss", "grad_norm", "tokens", "val_loss", "val_bits_per_byte"} & theirs.keys():
            assert ours[key] == pytest.approx(theirs[key], rel=1e-12), key
    ours = weights(out)
    for name, weight in weights(expected).items():
        assert (ours[name] - weight).norm() < 1e-12 * weight.norm(), name


@pytest.mark.parametrize(
    "nproc, parallel",
    [
        slow(4, ["--dp", "fsdp", "--tp", "2", "--microbatch", "2"]),
        slow(4, ["--dp", "hsdp", "--shard", "2", "--microbatch", "1", "--reshard", "none"]),
        slow(2, ["--tp", "2", "--checkpointing", "full"]),
        (2, ["--dp", "fsdp", "--offload", "--checkpointing", "selective"]),
        (2, ["--dp", "zero1", "--microbatch", "1"]),
        (2, ["--cp", "2", "--dp", "fsdp", "--microbatch", "2"]),
        slow(4, ["--cp", "4", "--dp", "zero1"]),
        slow(4, ["--cp", "2", "--tp", "2", "--dp", "fsdp", "--checkpointing", "selective"]),
        slow(4, ["--cp", "2", "--pp", "2", "--microbatch", "2"]),
        (2, ["--pp", "2", "--microbatch", "2"]),
        slow(4, ["--pp", "2", "--dp", "fsdp", "--microbatch", "1", "--schedule", "zero-bubble"]),
        slow(4, ["--pp", "2", "--tp", "2", "--microbatch", "2", "--checkpointing", "full"]),
    ],
    ids=name_case,
)
def test_a_run_on_any_mesh_is_the_same_run(corpus, one_run, tmp_path, nproc, parallel):
    """Training, evaluation, samples, checkpoints; then the run is resumed."""
    out = tmp_path / "run"
    arguments = [*flags(corpus, out, **WHOLE_RUN), *parallel]
    result = succeed("train.py", *arguments, nproc=nproc)
    assert re.search("per step, (each rank sends|a rank sends up to) ", result.out)
    same_run(out, one_run[0])
    samples = [line for line in result.out.splitlines() if line.startswith("--- ")]
    assert samples == one_run[1] and len(samples) == 2
    shutil.rmtree(out / "step-00000004")
    resumed = succeed("train.py", *arguments, "--resume", nproc=nproc)
    assert f"resumed from {out / 'step-00000002'}" in resumed.out
    same_run(out, one_run[0])


@pytest.fixture(scope="module")
def zero1_run(corpus, tmp_path_factory):
    """A run under ZeRO-1 whose last checkpoint is that of its second step."""
    out = tmp_path_factory.mktemp("zero1") / "run"
    succeed("train.py", *flags(corpus, out, **WHOLE_RUN), "--dp=zero1", nproc=2)
    shutil.rmtree(out / "step-00000004")
    return out


@pytest.mark.parametrize(
    "nproc, parallel", [(0, []), (2, ["--dp=ddp"]), (2, ["--dp=fsdp"])], ids=name_case
)
def test_a_checkpoint_of_zero1_resumes_elsewhere(
    corpus, one_run, zero1_run, tmp_path, nproc, parallel
):
    out = tmp_path / "run"
    shutil.copytree(zero1_run, out)
    arguments = [*flags(corpus, out, **WHOLE_RUN), *parallel, "--resume"]
    resumed = succeed("train.py", *arguments, nproc=nproc)
    assert f"resumed from {out / 'step-00000002'}" in resumed.out
    same_run(out, one_run[0])


@pytest.mark.slow
def test_document_mask_and_evaluation_do_not_depend_on_processes(tmp_path):
    source = tmp_path / "lines.jsonl"
    lines = [json.dumps({"text": f"{i} is {i}."}) + "\n" for i in range(500)]
    source.write_text("".join(lines))
    succeed("data.py", "tokenize", source, "--tokenizer", "bytes", "--out", tmp_path / "tokens")
    results = []
    masked = dict(document_mask=True)
    for nproc, options in [(0, {}), (2, masked), (2, masked | dict(cp=2)), (0, masked)]:
        out = tmp_path / f"run{len(results)}"
        arguments = flags(tmp_path / "tokens", out, eval_every=5, eval_windows=7, **options)
        succeed("train.py", *arguments, nproc=nproc)
        results.append([metrics(out)[-1][key] for key in ("loss", "val_loss", "grad_norm")])
    unmasked, two, shared, one = results
    assert two == pytest.approx(one, rel=1e-12) and shared == pytest.approx(one, rel=1e-12)
    assert unmasked[0] != pytest.approx(one[0], rel=1e-4)


# ------------------------------------------------------------------------ parts of a training run


def test_validation_loss_is_that_of_every_window(corpus, tmp_path):
    out = tmp_path / "run"
    succeed("train.py", *flags(corpus, out, steps=2, eval_every=2, eval_windows=10**6))
    tokenizer = load_tokenizer("bytes")
    _, windows = open_windows([str(corpus)], tokenizer, 24)
    model = load_pretrained(out, torch.float64)
    rows = torch.tensor([windows[i].tolist() for i in range(len(windows))])
    with torch.no_grad():
        loss = F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
    last = metrics(out)[-1]
    assert last["val_loss"] == pytest.approx(loss.item(), rel=1e-12)
    text = (rows[:, 1:] < 256).sum().item()
    bits = loss.item() / math.log(2) * rows[:, 1:].numel() / text
    assert last["val_bits_per_byte"] == pytest.approx(bits, rel=1e-12)


def test_schedule_and_decay_groups():
    rates = [learning_rate(step, Namespace(lr=1.0, warmup=4, steps=21)) for step in range(1, 22)]
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0] and rates[4:15] == [1.0] * 11
    assert rates[15:] == [pytest.approx(i / 7) for i in range(6, 0, -1)]
    assert learning_rate(1, Namespace(lr=1.0, warmup=0, steps=10)) == 1.0
    assert learning_rate(1, Namespace(lr=1.0, warmup=50, steps=2)) == 0.02
    args = Parser.defaults(add_optimizer_flags)
    decayed, free = make_optimizer(Llama(CONFIG), args).param_groups
    assert decayed["weight_decay"] == 0.1 and all(p.ndim == 2 for p in decayed["params"])
    assert free["weight_decay"] == 0 and all(p.ndim == 1 for p in free["params"])


@pytest.mark.parametrize(
    "nproc, parallel",
    [(0, []), (2, ["--dp", "fsdp"]), slow(2, ["--tp", "2"])],
    ids=["one", "fsdp", "tp"],
)
def test_bfloat16_computes_in_bfloat16_and_keeps_float32_weights(
    corpus, float32_run, tmp_path, nproc, parallel
):
    out = tmp_path / "bfloat16"
    succeed("train.py", *flags(corpus, out, steps=3, dtype="bfloat16"), *parallel, nproc=nproc)
    for a, b in zip(metrics(float32_run), metrics(out), strict=True):
        assert a["loss"] != b["loss"] and a["loss"] == pytest.approx(b["loss"], rel=5e-3)
    from torch.distributed.checkpoint import FileSystemReader

    stored = FileSystemReader(out / "step-00000003" / "weights").read_metadata()
    entry = stored.state_dict_metadata["norm.weight"]
    assert entry.properties.dtype == torch.float32


@pytest.fixture(scope="module")
def float32_run(corpus, tmp_path_factory):
    out = tmp_path_factory.mktemp("float32") / "run"
    succeed("train.py", *flags(corpus, out, steps=3, dtype="float32"))
    return out


@pytest.mark.slow
def test_compiled_blocks_train_alike(corpus, tmp_path):
    for name, option, nproc in [("eager", "--no-compile", 0), ("compiled", "--compile", 2)]:
        arguments = flags(corpus, tmp_path / name, steps=3, eval_every=3, document_mask=True)
        succeed("train.py", *arguments, option, nproc=nproc, timeout=240)
    for a, b in zip(metrics(tmp_path / "eager"), metrics(tmp_path / "compiled"), strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-12)
        assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=1e-12)
    assert weights(tmp_path / "eager").keys() == weights(tmp_path / "compiled").keys()


# ------------------------------------------------------------------------------------- a whole run


def test_a_run_learns_and_reports_it(corpus, tmp_path):
    out = tmp_path / "run"
    options = dict(steps=60, eval_every=60, dtype="float32", profile=True, keep=1, save_every=20)
    result = succeed("train.py", *flags(corpus, out, **options), run=by_torchrun, nproc=1)
    rows = metrics(out)
    assert [row["step"] for row in rows] == list(range(1, 61))
    assert rows[-1]["loss"] < 0.6 * rows[0]["loss"]
    assert {"loss", "bits_per_byte", "grad_norm", "lr", "tokens", "seconds", "tokens_per_second",
            "mfu", "memory_bytes"} <= rows[0].keys()  # fmt: skip
    assert rows[0]["mfu"] is None and "mfu" not in result.err
    assert rows[-1]["tokens"] == 60 * 8 * 24
    assert "step    60/60" in result.err and "0:00 left" in result.err
    assert "bits/byte" in result.out and "--- def" in result.out
    assert [path.name for path in out.glob("step-*")] == ["step-00000060"]
    assert (out / "trace-0.json").stat().st_size > 0
    record = json.loads((out / "config.json").read_text())
    assert record["model"]["dim"] == 32 and record["seed"] == 0 and record["flags"]["steps"] == 60

    command = result.out.strip().splitlines()[-1].split("python generate.py ")[1]
    assert command == f"{out} --prompt def"
    more = succeed("train.py", *flags(corpus, tmp_path / "more", steps=1, init=out, lr=1e-9))
    assert "checkpoint" in more.out
    assert metrics(tmp_path / "more")[0]["loss"] < 0.7 * rows[0]["loss"]
