"""finetune_lora.py as its users run it, against a loop written out in plain PyTorch."""

import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import launch, metrics, refused, succeed
from plain import effective_weights, plain_step
from test_chat import BYTES
from test_formats import our_model, saved_hf, stored
from test_train import as_flags, resumes, same_metrics, same_weights, samples_in
from test_train import flags as pretraining_flags

from files.adapters import PEFT_FILES
from files.conversion import write_checkpoint
from files.directories import digest_of_weights, find_adapter, read_index
from files.loading import load_pretrained
from files.safetensors import open_safetensors
from finetune_lora import load_adapter
from lora import LoRA, adapters, add_adapters, init_adapters
from model import Llama, LlamaConfig
from techniques.decoding import generate
from text.chat import open_samples
from text.order import window_of
from text.targets import SHOWN, encode_prompt

CONFIG = LlamaConfig(32, 2, 4, 2, 48, vocab_size=267, max_seq_len=256, tie_embeddings=True)
SEQ = 96


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    """A checkpoint in float64 of a model whose weights are large enough to matter."""
    model = our_model(CONFIG, torch.float64, seed=5, factor=2, norms=(1, 1))
    path = tmp_path_factory.mktemp("base") / "base"
    write_checkpoint(path, CONFIG, stored(model), BYTES)
    return path


def write_model(
    path: Path, config, seed=5, tokenizer=BYTES, norms=(1, 1), change=lambda p: p
) -> None:
    """Write a model some of whose answers end."""
    model = our_model(config, torch.float64, seed=seed, factor=2, norms=norms)
    with torch.no_grad():
        model.output.weight[tokenizer.stop[0]] *= 4
        for name, parameter in model.named_parameters():
            if name.startswith("layers.") and parameter.ndim == 2:
                parameter.copy_(change(parameter))
    write_checkpoint(path, config, stored(model), tokenizer)


SHORT = dict(
    steps=4, batch=8, warmup=2, save_every=2, keep=0, eval_every=2, dtype="float64", seq_len=96
)


def command_of(script: str, given: dict, out: Path, **more) -> list[str]:
    """Return the command of a run with the flags that are `given`, and more."""
    return [script, *as_flags(given | dict(out=out) | more)]


def flags(base_dir, samples, out, steps=4, **more) -> list[str]:
    """Return the flags of a short run in float64, without evaluation."""
    given = dict(init=base_dir, data=samples, out=out, steps=steps)
    given |= dict(seq_len=SEQ, batch=8, lr=1e-3, warmup=min(2, steps))
    given |= dict(eval_every=0, save_every=0, dtype="float64")
    return as_flags(given | more)


def factors(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Return what a run has trained: the factors of adapters or, without any, all weights."""
    path = checkpoint / PEFT_FILES[1]
    if not path.exists():
        return dict(load_pretrained(checkpoint, torch.float64).named_parameters())
    stored = open_safetensors(path)
    return {name: tensor.read() for name, tensor in stored.items()}


def same_run(out: Path, expected: Path, step: int) -> None:
    same_metrics(metrics(out), metrics(expected))
    checkpoint = f"step-{step:08d}"
    same_weights(factors(out / checkpoint), factors(expected / checkpoint))


def last_factors(out: Path) -> dict[str, torch.Tensor]:
    return factors(out / "step-00000004")


@pytest.mark.parametrize("all_weights", [False, True])
def test_fine_tuning_equals_the_plain_loop(base, sums, tmp_path, all_weights):
    """W + scale B A in a model without adapters, AdamW on A and B, or on all weights, loss on the
    answers alone. The run has two ranks, the loop one."""
    out = tmp_path / "run"
    lora = None if all_weights else dict(rank=4, alpha=6)
    options = dict(clip=0.05, microbatch=2, checkpointing="selective")
    options |= lora or dict(all_weights=True)
    succeed("finetune_lora.py", *flags(base, sums, out, **options), nproc=2)

    bare = Llama(replace(CONFIG, tie_embeddings=False)).double()
    model = load_pretrained(base, torch.float64).requires_grad_(True)
    if lora:
        add_adapters(model, LoRA(rank=4))
        init_adapters(model, seed=0)
    trained = adapters(model) or dict(model.named_parameters())
    optimizer = torch.optim.AdamW(
        trained.values(),
        betas=(0.9, 0.95),
        weight_decay=0.0,
        fused=False,
        foreach=False,
    )
    rows, *_ = open_samples([str(sums)], BYTES, SEQ)
    assert any(len(row) > 1 for row in rows.rows)  # samples share rows
    tokens = 0
    for step, row in enumerate(metrics(out)):
        chosen = [window_of(step * 8 + i, len(rows), seed=0) for i in range(8)]
        batch = rows.batch(chosen)
        weights = effective_weights(model, lora)
        for samples in (rows.rows[i] for i in chosen):
            tokens += sum(len(rows.samples[i][0]) - 1 for i in samples)
        assert row["tokens"] == tokens < (step + 1) * 8 * SEQ
        given = batch.tokens, None, batch.positions
        logits = torch.func.functional_call(bare, weights, given)
        for group in optimizer.param_groups:
            group["lr"] = row["lr"]
        (loss, _, norm), _ = plain_step(logits, batch.targets, trained, optimizer, clip=0.05)
        assert row["loss"] == pytest.approx(loss, rel=1e-12)
        assert row["grad_norm"] == pytest.approx(norm, rel=1e-12)
    checkpoint = out / "step-00000004"
    if all_weights:
        saved = load_pretrained(checkpoint, torch.float64)
        same_weights(dict(saved.named_parameters()), trained)
        assert succeed("generate.py", out, "--chat", "--prompt", "1").out
    else:
        saved = load_pretrained(base, torch.float64)
        load_adapter(saved, checkpoint)
        same_weights(adapters(saved), trained)


@pytest.mark.slow
def test_a_run_on_two_ranks_is_the_same_run(base, sums, tmp_path):
    """Metrics, factors and samples agree."""
    samples = []
    options = dict(eval_every=2, eval_windows=7, microbatch=1)
    for name, nproc in (("one", 0), ("two", 2)):
        command = "finetune_lora.py", *flags(base, sums, tmp_path / name, **options)
        result = succeed(*command, nproc=nproc)
        assert ("each rank would send: --dp ddp" in result.out) == bool(nproc)
        samples.append(samples_in(result))
    same_run(tmp_path / "two", tmp_path / "one", step=4)
    one, two = samples
    assert one == two
    assert len(one) > 6


def test_another_base_is_noticed(base, sums, tmp_path, capsys):
    """By --resume, which refuses it, and wherever the adapter is used."""
    init = tmp_path / "base"
    out = tmp_path / "run"
    shutil.copytree(base, init)
    command = "finetune_lora.py", *flags(init, sums, out, steps=2, save_every=1)
    succeed(*command)
    shutil.rmtree(out / "step-00000002")
    assert "warning" not in succeed(*command, "--resume").err
    find_adapter(out, base)  # the same weights elsewhere
    assert capsys.readouterr().err == ""

    shutil.rmtree(init)
    shutil.rmtree(out / "step-00000002")
    other = our_model(CONFIG, torch.float64, seed=6, factor=2, norms=(1, 1))
    write_checkpoint(init, CONFIG, stored(other), BYTES)
    refused(launch(*command, "--resume", nproc=2), f"{init} has other weights than the --init")
    find_adapter(out, init)
    assert f"beside {init}, as it was then, and not {init}" in capsys.readouterr().err


def test_a_sample_of_published_weights_tells_others(tmp_path):
    model = our_model(CONFIG)
    digests = []
    for name in ("one", "same", "other"):
        path = saved_hf(tmp_path / name, model)
        digests.append(digest_of_weights(path))
        if name == "same":
            with torch.no_grad():
                model.layers["1"].feed_forward.w2.weight += 0.01
    one, same, other = digests
    assert one == same != other


def test_a_base_that_goes_on_is_what_it_was(corpus, sums, tmp_path):
    """A run is the base of another one, which is resumed from the checkpoint that it began with."""
    first = tmp_path / "first"
    out = tmp_path / "run"
    given = dict(steps=2, save_every=2, seq_len=48)
    succeed("train.py", *pretraining_flags(corpus, first, **given))
    command = "finetune_lora.py", *flags(first, sums, out, save_every=2, seq_len=48)
    succeed(*command)
    unbroken = metrics(out)
    shutil.rmtree(out / "step-00000004")
    more = given | dict(steps=4)
    succeed("train.py", *pretraining_flags(corpus, first, **more), "--resume")
    assert "warning" not in succeed(*command, "--resume", nproc=2).err
    same_metrics(metrics(out), unbroken)
    shutil.rmtree(out / "step-00000004")
    shutil.rmtree(first / "step-00000002")
    refused(launch(*command, "--resume"), "step-00000002, which is gone")


def test_resuming_is_bit_exact_with_dropout_too(base, sums, tmp_path):
    options = dict(save_every=2, async_save=True, dtype="float32", dropout=0.3)
    command = "finetune_lora.py", *flags(base, sums, tmp_path, **options)
    succeed(*command, nproc=2)
    resumes(tmp_path, 2, last_factors, *command, nproc=2)


LEARNS = dict(
    steps=30,
    eval_every=30,
    rank=8,
    lr=2e-2,
    dtype="float32",
    merge=True,
)


@pytest.fixture(scope="module")
def learnt(base, sums, tmp_path_factory):
    """A run of 30 steps, and what it prints."""
    out = tmp_path_factory.mktemp("learnt") / "run"
    result = succeed("finetune_lora.py", *flags(base, sums, out, **LEARNS))
    return out, result.out


def test_it_learns_and_other_scripts_use_the_result(base, learnt):
    """The loss falls, and answers with the adapter are those of the merged model."""
    out, told = learnt
    before, after, *more = re.findall(r"validation loss ([\d.]+)", told)
    assert float(after) < 0.9 * float(before)
    assert told.count("--- true answer: ") == SHOWN * (2 + len(more))
    (checkpoint,) = out.glob("step-*")
    files = {path.name for path in checkpoint.iterdir()}  # no weights of the base
    assert files == {*PEFT_FILES, "optimizer", "run.json", "SHA256SUMS"}
    moments = read_index(checkpoint / "optimizer").state_dict_metadata
    assert moments
    assert all(".lora_" in name for name in moments)

    question = ["--chat", "--prompt", "20 + 6?", "--temperature", "0", "--max-new-tokens", "12"]
    printed = succeed("generate.py", base, "--adapter", out, *question).out
    prompt = encode_prompt([{"role": "user", "content": "20 + 6?"}], BYTES)

    def answer_of(model: Llama) -> str:
        (tokens,) = generate(model, [prompt], 12, temperature=0, stop=BYTES.stop)
        return BYTES.decode(token for token in tokens if token < 256)

    with_adapter = load_pretrained(base)
    load_adapter(with_adapter, checkpoint)
    by_adapter = answer_of(with_adapter)
    assert printed == f"{by_adapter}\n"
    assert answer_of(load_pretrained(out / "merged")) == by_adapter
    assert answer_of(load_pretrained(base)) != by_adapter


def test_what_a_finished_run_allows(base, sums, learnt, tmp_path):
    """It may be submitted again. It is no base, and no other adapter may be merged into OUT."""
    out, _ = learnt
    command = "finetune_lora.py", *flags(base, sums, out, **LEARNS), "--resume"
    again = succeed(*command)
    assert "has done its 30 steps" in again.out and "parameters" not in again.out
    assert "merged:     python generate" in again.out
    refused(launch(*command, "--steps=31"), f"{out / 'merged'} exists: remove")
    refused(launch(*command, "--rank=3"), "another adapter", "rank 8, not 3")
    no_base = launch("finetune_lora.py", *flags(out, sums, tmp_path / "more"))
    refused(no_base, "is an adapter: generate.py takes it as --adapter, with ")


def test_the_best_checkpoint_is_merged(base, sums, tmp_path):
    """The loss of other answers rises with each step; a resumed run remembers the best."""
    out = tmp_path / "run"
    other = tmp_path / "other.jsonl"
    other.write_text(sums.read_text().replace('"completion": "is', '"completion": "@@@@'))
    options = dict(lr=0.02, warmup=0, val_data=other)
    options |= dict(eval_every=1, keep=1, keep_best=True)
    first = flags(base, sums, out, **options, merge="last", steps=2)
    succeed("finetune_lora.py", *first)
    shutil.rmtree(out / "merged")
    more = flags(base, sums, out, **options, merge="best", steps=5)
    succeed("finetune_lora.py", *more, "--resume")
    losses = {row["step"]: row["val_loss"] for row in metrics(out)}
    best_step = min(losses, key=losses.get)
    best = f"step-{best_step:08d}"
    assert (out / "best").resolve().name == best
    assert best != "step-00000005"
    assert sorted(path.name for path in out.glob("step-*")) == [best, "step-00000005"]
    expected = tmp_path / "expected"
    succeed("checkpoint.py", "merge", base, out / "best", expected)
    ours = load_pretrained(out / "merged")
    for name, weight in load_pretrained(expected).named_parameters():
        assert torch.equal(ours.get_parameter(name), weight)
