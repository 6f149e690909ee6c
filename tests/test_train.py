"""train.py as its users run it, against a training loop written out in plain PyTorch."""

import json
import math
import os
import shutil
import signal
import socket
import time
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from conftest import finish, launch, refused, start, succeed

from checkpoint import load_pretrained
from data import load_tokenizer, open_windows, window_of
from model import Llama, LlamaConfig
from train import learning_rate, make_optimizer

SIZES = ["--dim", "32", "--n-layers", "2", "--n-heads", "4", "--n-kv-heads", "2", "--ffn-dim", "48"]
CONFIG = LlamaConfig(32, 2, 4, 2, 48, vocab_size=267, tie_embeddings=True)


def slow(*case):
    """A case of a test that only -m slow runs."""
    return pytest.param(*case, marks=pytest.mark.slow)


def flags(shards, out, steps=5, **more) -> list[str]:
    given = dict(data=shards, out=out, steps=steps, seq_len=24, batch=8, lr=1e-2, warmup=2,
                 eval_every=0, save_every=0, dtype="float64") | more  # fmt: skip
    flags = (f"--{name.replace('_', '-')}={value}" for name, value in given.items())
    return [*SIZES, *(flag.removesuffix("=True") for flag in flags)]


def metrics(out: Path) -> list[dict]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def weights(out: Path) -> dict[str, torch.Tensor]:
    return dict(load_pretrained(out, torch.float64).named_parameters())


# --------------------------------------------------------------------- one process, written out


@pytest.fixture(scope="module")
def reference(shards):
    """Five steps of AdamW on the mean cross entropy of the whole batch: rows and weights."""
    model = Llama(CONFIG).double()
    model.init_weights(seed=0)
    decayed = [p for p in model.parameters() if p.ndim == 2]
    free = [p for p in model.parameters() if p.ndim == 1]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": free, "weight_decay": 0.0}],
        betas=(0.9, 0.95),
        fused=False,
    )
    windows, _ = open_windows([str(shards)], load_tokenizer("bytes"), 24)
    rows = []
    for step in range(5):
        picked = [window_of(step * 8 + i, len(windows), seed=0) for i in range(8)]
        tokens = torch.tensor([windows[i].tolist() for i in picked])
        logits = model(tokens[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        lr = [5e-3, 1e-2, *(5e-3 * (1 + math.cos(math.pi * i / 4)) for i in (1, 2, 3))][step]
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.step()
        optimizer.zero_grad()
        rows.append({"loss": loss.item(), "grad_norm": norm.item(), "lr": lr})
    assert all(row["grad_norm"] > 0.5 for row in rows)  # so that clipping is seen to work
    return rows, dict(model.named_parameters())


@pytest.mark.parametrize(
    "nproc, microbatch", [(0, 8), (1, 2), (2, 4), (2, 1)], ids=lambda value: str(value)
)
def test_training_equals_the_plain_loop(shards, reference, tmp_path, nproc, microbatch):
    out = tmp_path / "run"
    arguments = flags(shards, out, clip=0.5, microbatch=microbatch)
    succeed("train.py", *arguments, nproc=nproc)
    rows, expected = reference
    for ours, theirs in zip(metrics(out), rows, strict=True):
        for key, value in theirs.items():
            assert ours[key] == pytest.approx(value, rel=1e-12), key
    ours = weights(out)
    assert ours.keys() == expected.keys()
    for name, weight in expected.items():
        error = (ours[name] - weight).norm() / weight.norm()
        assert error < 1e-12, name


@pytest.mark.parametrize(
    "nproc, split",
    [
        slow(4, ["--dp", "fsdp", "--tp", "2", "--microbatch", "2"]),
        slow(4, ["--dp", "hsdp", "--shard", "2", "--microbatch", "1", "--reshard", "none"]),
        slow(2, ["--tp", "2", "--checkpointing", "full"]),
        (2, ["--dp", "fsdp", "--offload", "--checkpointing", "selective"]),
    ],
    ids=lambda value: str(value) if isinstance(value, int) else "".join(value),
)
def test_a_run_split_in_any_way_is_the_same_run(shards, one_run, tmp_path, nproc, split):
    """Training, evaluation, samples, checkpoints; then it is resumed, and generates elsewhere."""
    out = tmp_path / "run"
    arguments = [*flags(shards, out, **WHOLE_RUN), *split]
    result = succeed("train.py", *arguments, nproc=nproc)
    assert "a step sends " in result.out
    same_run(out, one_run[0])
    samples = [line for line in result.out.splitlines() if line.startswith("--- ")]
    assert samples == one_run[1] and len(samples) == 2
    shutil.rmtree(out / "step-00000004")
    resumed = succeed("train.py", *arguments, "--resume", nproc=nproc)
    assert f"resumed from {out / 'step-00000002'}" in resumed.out
    same_run(out, one_run[0])


WHOLE_RUN = dict(steps=4, eval_every=2, eval_windows=7, save_every=2, document_mask=True)


@pytest.fixture(scope="module")
def one_run(shards, tmp_path_factory):
    out = tmp_path_factory.mktemp("one") / "run"
    result = succeed("train.py", *flags(shards, out, **WHOLE_RUN))
    return out, [line for line in result.out.splitlines() if line.startswith("--- ")]


def same_run(out: Path, expected: Path) -> None:
    for ours, theirs in zip(metrics(out), metrics(expected), strict=True):
        for key in {"loss", "grad_norm", "tokens", "val_loss", "val_bits_per_byte"} & theirs.keys():
            assert ours[key] == pytest.approx(theirs[key], rel=1e-12), key
    ours = weights(out)
    for name, weight in weights(expected).items():
        assert (ours[name] - weight).norm() < 1e-12 * weight.norm(), name


@pytest.mark.slow
def test_document_mask_and_evaluation_do_not_depend_on_processes(tmp_path):
    source = tmp_path / "lines.jsonl"
    lines = [json.dumps({"text": f"{i} is {i}."}) + "\n" for i in range(500)]
    source.write_text("".join(lines))
    succeed("data.py", "tokenize", source, "--tokenizer", "bytes", "--out", tmp_path / "tokens")
    results = []
    for nproc, options in [(0, {}), (2, {"document_mask": True}), (0, {"document_mask": True})]:
        out = tmp_path / f"run{len(results)}"
        arguments = flags(tmp_path / "tokens", out, eval_every=5, eval_windows=7, **options)
        succeed("train.py", *arguments, nproc=nproc)
        results.append([metrics(out)[-1][key] for key in ("loss", "val_loss", "grad_norm")])
    unmasked, two, one = results
    assert two == pytest.approx(one, rel=1e-12)
    assert unmasked[0] != pytest.approx(one[0], rel=1e-4)


def test_validation_loss_is_that_of_every_window(shards, tmp_path):
    out = tmp_path / "run"
    succeed("train.py", *flags(shards, out, steps=2, eval_every=2, eval_windows=10**6))
    tokenizer = load_tokenizer("bytes")
    _, windows = open_windows([str(shards)], tokenizer, 24)
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
    rates = [learning_rate(step, 1.0, 4, 20) for step in range(1, 21)]
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0]
    assert rates[3:] == sorted(rates[3:], reverse=True) and 0 < rates[-1] < 0.02
    assert learning_rate(1, 1.0, 0, 10) <= 1.0
    decayed, free = make_optimizer(Llama(CONFIG), 1e-3, 0.1).param_groups
    assert decayed["weight_decay"] == 0.1 and all(p.ndim == 2 for p in decayed["params"])
    assert free["weight_decay"] == 0 and all(p.ndim == 1 for p in free["params"])


# ---------------------------------------------------------------------------- stop and go on


@pytest.mark.parametrize("nproc", [0, 2])
def test_resuming_is_bit_exact(shards, tmp_path, nproc):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    options = dict(steps=6, save_every=3, dtype="float32")
    succeed("train.py", *flags(shards, whole, **options), nproc=nproc)
    shutil.copytree(whole, parts)
    shutil.rmtree(parts / "step-00000006")
    resumed = succeed("train.py", *flags(shards, parts, **options), "--resume", nproc=nproc)
    assert f"resumed from {parts / 'step-00000003'}" in resumed.out
    for a, b in zip(metrics(whole), metrics(parts), strict=True):
        assert [a[key] for key in ("step", "loss", "grad_norm", "lr")] == [
            b[key] for key in ("step", "loss", "grad_norm", "lr")
        ]
    for name, weight in weights(whole).items():
        assert torch.equal(weight, weights(parts)[name]), name


def test_resume_starts_where_there_is_nothing_and_ends_where_all_is_done(shards, tmp_path):
    out = tmp_path / "run"
    succeed("train.py", *flags(shards, out, steps=2), "--resume")
    again = succeed("train.py", *flags(shards, out, steps=2), "--resume")
    assert "has done its 2 steps" in again.out
    assert len(metrics(out)) == 2


@pytest.mark.parametrize("nproc", [0, 2])
def test_ctrl_c_saves_and_another_run_goes_on(shards, tmp_path, nproc):
    out = tmp_path / "run"
    process = start("train.py", *flags(shards, out, steps=10**6), nproc=nproc)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and not _has_lines(out / "metrics.jsonl", 5):
        time.sleep(0.05)
    if nproc:  # as a terminal does: to torchrun and to all it started
        os.killpg(process.pid, signal.SIGINT)
    else:
        process.send_signal(signal.SIGINT)
    result = finish(process)
    assert "with --resume goes on" in result.out
    if not nproc:  # torchrun itself reports the signal with a code of its own
        assert result.code == 0 and "Traceback" not in result.err
    (saved,) = sorted(out.glob("step-*"))
    stopped = metrics(out)[-1]["step"]
    assert saved.name == f"step-{stopped:08d}" and stopped >= 5
    arguments = flags(shards, out, steps=stopped + 2)
    assert f"resumed from {saved}" in succeed("train.py", *arguments, "--resume", nproc=nproc).out


def _has_lines(path: Path, n: int) -> bool:
    return path.exists() and path.read_text().count("\n") >= n


# ------------------------------------------------------------------------------------- a whole run


def test_a_run_learns_and_says_so(shards, tmp_path):
    out = tmp_path / "run"
    options = dict(steps=60, eval_every=60, dtype="float32", profile=True, keep=1, save_every=20)
    result = succeed("train.py", *flags(shards, out, **options), nproc=1)
    rows = metrics(out)
    assert [row["step"] for row in rows] == list(range(1, 61))
    assert rows[-1]["loss"] < 0.6 * rows[0]["loss"]
    assert {"loss", "bits_per_byte", "grad_norm", "lr", "tokens", "seconds", "tokens_per_second",
            "mfu", "memory_bytes"} <= rows[0].keys()  # fmt: skip
    assert rows[0]["mfu"] is None and "mfu unknown" in result.err
    assert rows[-1]["tokens"] == 60 * 8 * 24
    assert "step    60/60" in result.err and "0:00 left" in result.err
    assert "bits/byte" in result.out and "--- def" in result.out
    assert [path.name for path in out.glob("step-*")] == ["step-00000060"]
    assert (out / "trace-0.json").stat().st_size > 0
    about = json.loads((out / "config.json").read_text())
    assert about["model"]["dim"] == 32 and about["seed"] == 0 and about["flags"]["steps"] == 60

    command = result.out.strip().splitlines()[-1].split("python generate.py ")[1]
    assert command == f"{out} --prompt def"
    more = succeed("train.py", *flags(shards, tmp_path / "more", steps=1, init=out, lr=1e-9))
    assert "checkpoint" in more.out
    assert metrics(tmp_path / "more")[0]["loss"] < 0.7 * rows[0]["loss"]


@pytest.mark.slow
def test_compiled_blocks_train_alike(shards, tmp_path):
    for name, option, nproc in [("eager", "--no-compile", 0), ("compiled", "--compile", 2)]:
        arguments = flags(shards, tmp_path / name, steps=3, eval_every=3, document_mask=True)
        succeed("train.py", *arguments, option, nproc=nproc, timeout=240)
    for a, b in zip(metrics(tmp_path / "eager"), metrics(tmp_path / "compiled"), strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-12)
        assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=1e-12)
    assert weights(tmp_path / "eager").keys() == weights(tmp_path / "compiled").keys()


@pytest.mark.parametrize(
    "nproc, split",
    [(0, []), (2, ["--dp", "fsdp"]), slow(2, ["--tp", "2"])],
    ids=["one", "fsdp", "tp"],
)
def test_bfloat16_computes_in_bfloat16_and_keeps_float32_weights(shards, tmp_path, nproc, split):
    succeed("train.py", *flags(shards, tmp_path / "float32", steps=3, dtype="float32"))
    arguments = [*flags(shards, tmp_path / "bfloat16", steps=3, dtype="bfloat16"), *split]
    succeed("train.py", *arguments, nproc=nproc)
    for a, b in zip(metrics(tmp_path / "float32"), metrics(tmp_path / "bfloat16"), strict=True):
        assert a["loss"] != b["loss"] and a["loss"] == pytest.approx(b["loss"], rel=5e-3)
    from torch.distributed.checkpoint import FileSystemReader

    stored = FileSystemReader(tmp_path / "bfloat16" / "step-00000003" / "weights").read_metadata()
    entry = stored.state_dict_metadata["norm.weight"]
    assert entry.properties.dtype == torch.float32


# ---------------------------------------------------------------------------------- wrong input


@pytest.mark.parametrize(
    "options, parts",
    [
        (dict(model="gpt5"), ["no model 'gpt5'", "llama3.1-8b"]),
        (dict(tokenizer="nonsense"), ["no tokenizer 'nonsense'", "bytes"]),
        (dict(data="/no/such/place"), ["no data at '/no/such/place'"]),
        (dict(batch=8, microbatch=3), ["--batch 8", "--microbatch 3"]),
        (dict(lr=-1), ["--lr", "at least 0"]),
        (dict(keep=-1), ["--keep", "above 0"]),
        (dict(clip="nan"), ["--clip", "at least 0"]),
        (dict(n_heads=3), ["dim 32 over 3 heads"]),
        (dict(n_heads=8, n_kv_heads=3), ["8 heads cannot share 3"]),
        (dict(seq_len=2500, model="tiny"), ["--seq-len 2500", "beyond the model's 2048"]),
        (dict(steps=0), ["--steps", "above 0"]),
        (dict(batch="many"), ["--batch", "'many'"]),
        (dict(init="/no/checkpoint"), ["no checkpoint in '/no/checkpoint'"]),
    ],
)
def test_wrong_flags_are_refused(shards, tmp_path, options, parts):
    refused(launch("train.py", *flags(shards, tmp_path / "run", **options)), *parts)
    assert not (tmp_path / "run").exists()


def test_wrong_flags_are_refused_once_by_many(shards, tmp_path):
    for options in (dict(dtype="int3"), dict(dp="hsdp", shard=3)):  # before they meet, and after
        result = launch("train.py", *flags(shards, tmp_path / "run", **options), nproc=2)
        lines = [line for line in result.err.splitlines() if line.startswith("error: ")]
        assert len(lines) == 1, result.err
        assert "exitcode  : 2" in result.err and result.code != 0


def test_output_directories_and_checkpoints_of_others(shards, tmp_path):
    out = tmp_path / "run"
    succeed("train.py", *flags(shards, out, steps=1))
    refused(launch("train.py", *flags(shards, out, steps=1)), f"{out} holds a run", "--resume")
    other = flags(shards, out, steps=2, ffn_dim=64)
    refused(launch("train.py", *other, "--resume"), "another model", "ffn_dim 48, not 64")
    other = flags(shards, tmp_path / "other", init=out, dim=64)
    refused(launch("train.py", *other), f"{out} has dim 32, not 64")
    changed = succeed("train.py", *flags(shards, out, steps=2, seed=1), "--resume")
    assert "warning: --seed was 0, is 1" in changed.err


def test_tokens_beyond_the_vocabulary_and_damaged_shards(shards, tmp_path):
    from data import ShardWriter

    bad = tmp_path / "bad"
    bad.mkdir()
    writer = ShardWriter(bad, "train", 1000, 10**6)
    writer.write(torch.full((5000,), 999).numpy())
    writer.close()
    result = launch("train.py", *flags(bad, tmp_path / "a", tokenizer="bytes"))
    refused(result, "token 999", "tokenizer bytes has only 267")
    path = bad / "train_000000.bin"
    path.write_bytes(path.read_bytes()[:-100])
    result = launch("train.py", *flags(bad, tmp_path / "b", tokenizer="bytes"))
    refused(result, "is damaged", "says 5000 tokens, it holds 4950")


def test_nothing_is_updated_when_a_rank_is_not_finite():
    out = succeed("tests/workers/not_finite.py", nproc=2).out
    for rank in (0, 1):
        assert f"rank {rank} kept True: step 2: the loss on rank [1] is not finite" in out


def test_a_mistake_that_one_rank_meets_is_told_once(tmp_path):
    from data import ShardWriter

    tokens = torch.full((5000,), 65)
    tokens[3000] = 999
    writer = ShardWriter(tmp_path, "train", 1000, 10**6)
    writer.write(tokens.numpy())
    writer.close()
    result = launch(
        "train.py", *flags(tmp_path, tmp_path / "run", tokenizer="bytes", steps=500), nproc=2
    )
    assert result.err.count("error: the data holds token 999") == 1
    assert "[rank" not in result.err  # how torch begins a traceback of a rank


@pytest.mark.parametrize("nproc", [slow(0), 2])
def test_a_loss_that_is_not_finite_stops_before_the_update(shards, tmp_path, nproc):
    out = tmp_path / "run"
    succeed("train.py", *flags(shards, out, steps=2), nproc=nproc)
    before = weights(out)
    arguments = flags(shards, out, steps=50, lr=1e300, warmup=0)
    result = launch("train.py", *arguments, "--resume", nproc=nproc)
    (line,) = [line for line in result.err.splitlines() if line.startswith("error: ")]
    assert "error: step 4: the " in line and "Nothing was updated" in line
    assert all(torch.equal(weight, before[name]) for name, weight in weights(out).items())


# ------------------------------------------------------------------------- ranks that die or differ


def test_ranks_started_with_different_flags_are_told(shards, tmp_path):
    """Two nodes, as two launches that meet at a port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    nodes = []
    for rank in (0, 1):
        options = flags(shards, tmp_path / "run", lr=(1e-2, 2e-2)[rank])
        node = ["--nnodes=2", f"--node-rank={rank}", "--master-addr=127.0.0.1"]
        nodes.append(
            start("train.py", *options, nproc=1, torchrun=[*node, f"--master-port={port}"])
        )
    told = "".join(finish(node).err for node in nodes)
    lines = [line for line in told.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1, told
    assert "rank 1 was started with --lr 0.02, rank 0 with --lr 0.01" in lines[0]
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("split", [slow([]), ["--dp", "fsdp"], slow(["--tp", "2"])], ids=str)
def test_a_rank_that_dies_is_named_and_ends_all(shards, tmp_path, split):
    out = tmp_path / "run"
    process = start("train.py", *flags(shards, out, steps=10**6), *split, nproc=2)
    killed = _kill_rank_1_after(out / "metrics.jsonl", 5)
    result = finish(process)
    assert time.monotonic() - killed < 30, result.err
    lines = [line for line in result.err.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1 and lines[0].startswith("error: rank 1 on "), result.err
    assert result.code != 0


@pytest.mark.slow
def test_torchrun_restarts_a_run_whose_rank_died(shards, tmp_path):
    out = tmp_path / "run"
    options = dict(steps=300, dtype="float32")
    arguments = [*flags(shards, out, save_every=20, **options), "--resume"]
    process = start("train.py", *arguments, nproc=2, torchrun=["--standalone", "--max-restarts=1"])
    _kill_rank_1_after(out / "metrics.jsonl", 50)
    result = finish(process)
    assert result.code == 0, result.err
    assert f"resumed from {out / 'step-0'}" in result.out
    assert "--dp auto takes ddp: a copy's weights, gradients and AdamW take 0.000" in result.out
    whole = tmp_path / "whole"
    succeed("train.py", *flags(shards, whole, **options), nproc=2)
    for ours, theirs in zip(metrics(out), metrics(whole), strict=True):
        assert [ours[k] for k in ("step", "loss")] == [theirs[k] for k in ("step", "loss")]


def _kill_rank_1_after(file: Path, lines: int) -> float:
    """Wait until a run has written so much; the moment when its second rank was killed."""
    deadline = time.monotonic() + 60
    while not _has_lines(file, lines):
        assert time.monotonic() < deadline, f"nothing in {file}"
        time.sleep(0.05)
    for process in Path("/proc").glob("[0-9]*"):
        try:
            command = (process / "cmdline").read_text()
            variables = (process / "environ").read_text()
        except OSError:  # it has ended meanwhile, or is another user's
            continue
        if str(file.parent) in command and "\0RANK=1\0" in variables:
            os.kill(int(process.name), signal.SIGKILL)
    return time.monotonic()
