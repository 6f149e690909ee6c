"""What d36363a wrote: its runs resume, its adapters load and its corpora open with today's code. So
does a run with experts of 86671ca, when LlamaConfig had fields for them.

All is written with these commits' own files. What is loaded equals what was stored in every bit;
of an adapter's factors, whose file has other names and another order of rows, the next losses tell.
The learning rates of later steps, which are computed from flags alone, are equal too, and so are
the tokens of pretraining; those of conversations were counted with their padding. Losses and
gradient norms may differ by rounding, because a kernel may be written anew: by 1e-5 of their size
at most, and by 1e-12 in the runs in float64.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.distributed.checkpoint as dcp
from conftest import ROOT, metrics, slow, succeed

from data import open_windows
from text.tokenizer import load_tokenizer

COMMIT, BEFORE_FAMILIES = "d36363a", "86671ca"
STEP, LAST_STEP = "step-00000003", "step-00000006"


class Run(NamedTuple):
    script: str
    flags: str  # {} stands for the directory that has all runs, tokens/ and sums.jsonl
    processes: int = 0  # 0: one, without torchrun
    split: str = ""  # flags that say how the processes share a step
    commit: str = COMMIT


EVERY_RUN = "--steps 6 --save-every 3 --keep 0 --eval-every 0 --warmup 2 --batch 8"
MODEL = "--dim 32 --n-heads 4 --n-kv-heads 2 --ffn-dim 48 --n-layers"
PRETRAINING = f"{EVERY_RUN} --data {{}}/tokens --seq-len 24 {MODEL}"
FINETUNING = f"{EVERY_RUN} --data {{}}/sums.jsonl --seq-len 96 --lr 0.01 --init {{}}/run"
BFLOAT16_MOMENTS = f"{PRETRAINING} 2 --optimizer adamw --moments bfloat16"
FLOAT64 = f"{PRETRAINING} 4 --optimizer adamw --dtype float64"
RUNS = {
    "run": Run("train.py", f"{PRETRAINING} 2"),  # by Muon
    "adapter": Run("finetune_lora.py", FINETUNING),
    "dora": Run("finetune_lora.py", f"{FINETUNING} --dora --targets wq w2"),
    "four": Run("train.py", BFLOAT16_MOMENTS, 4, "--dp fsdp --tp 2"),
    "pipeline": Run("train.py", FLOAT64, 2, "--pp 2 --microbatch 4"),
    # The norm by which that commit clipped had what stands for the gradient of the experts' bias.
    "experts": Run("train.py", f"{PRETRAINING} 2 --model tiny-experts --n-experts 4 --ep 2 "
                   "--dtype float64 --clip 1e9", 2, "--dp fsdp", BEFORE_FAMILIES),
}  # fmt: skip


def command_of(name: str, directory: Path, out: Path) -> list[str]:
    """Return the script and the flags of one of RUNS."""
    flags = f"{RUNS[name].flags} {RUNS[name].split}".replace("{}", str(directory))
    return [RUNS[name].script, *flags.split(), "--out", out]


def in_house(directory: Path, *command, processes: int = 0, commit: str = COMMIT) -> None:
    """Run a script with a commit's files, by torchrun if it has several processes."""
    house = directory / commit
    if not house.exists():
        archive = ["git", "-C", ROOT, "archive", commit]
        if (content := subprocess.run(archive, stdout=subprocess.PIPE)).returncode:
            pytest.skip(f"needs commit {commit}: git fetch --unshallow")
        house.mkdir()
        subprocess.run(["tar", "-x", "-C", house], input=content.stdout, check=True)
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", processes]
    command = [sys.executable, *torchrun * bool(processes), *command]
    environment = os.environ | dict(
        OMP_NUM_THREADS="1",
        CUDA_VISIBLE_DEVICES="",
        PYTHONPATH=str(house),
        FLATLLAMA_CACHE=str(directory / "cache"),
    )
    options = dict(cwd=house, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    ended = subprocess.run([*map(str, command)], text=True, **options)
    assert ended.returncode == 0, ended.stdout


@pytest.fixture(scope="module")
def old(text, sums, tmp_path_factory) -> Path:
    """A directory with the files of COMMIT, with notes.model and tokens/, a tokenizer and tokens of
    counting.txt, and with the smallest run."""
    directory = tmp_path_factory.mktemp("old")
    shutil.copy(text, directory)
    shutil.copy(sums, directory)
    text, notes, tokens = (directory / name for name in ("counting.txt", "notes.model", "tokens"))
    in_house(directory, "data.py", "train-tokenizer", text, "--vocab-size", 300, "--out", notes)
    in_house(directory, "data.py", "tokenize", text, "--tokenizer", notes, "--out", tokens)
    in_house(directory, *command_of("run", directory, directory / "run"))
    return directory


@pytest.mark.parametrize("name", [slow(name) if name != "run" else name for name in RUNS])
def test_a_run_resumes(name, old, tmp_path):
    """A copy of it, as it would be if it had been killed just before its last save. Each rank loads
    what was stored, and takes the same steps."""
    run, out, loaded = RUNS[name], tmp_path / "run", tmp_path / "loaded"
    if name != "run":
        command = command_of(name, old, old / name)
        in_house(old, *command, processes=run.processes, commit=run.commit)
    loaded.mkdir()
    shutil.copytree(old / name, out, ignore=shutil.ignore_patterns(LAST_STEP))
    command = "tests/workers/as_loaded.py", loaded, *command_of(name, old, out), "--resume"
    result = succeed(*command, nproc=run.processes)
    assert f"resumed from {out / STEP}" in result.out and (out / LAST_STEP).exists()
    # Neither of other data nor of another model.py, nor of flags that are gone, as --log-every.
    assert "warning" not in result.err
    ranks = [torch.load(path) for path in loaded.iterdir()]
    assert len(ranks) == max(run.processes, 1)
    is_adapter = run.script == "finetune_lora.py"
    for kind in ["optimizer"] if is_adapter else ["weights", "optimizer"]:
        stored = old / name / STEP / kind  # is read by torch alone
        entries = dcp.FileSystemReader(stored).read_metadata().state_dict_metadata
        expected = {n: torch.empty(e.size, dtype=e.properties.dtype) for n, e in entries.items()}
        dcp.load(expected, checkpoint_id=stored, no_dist=True)
        assert set().union(*(rank[kind] for rank in ranks)) == expected.keys() != set()
        for key, tensor in (item for rank in ranks for item in rank[kind].items()):
            assert tensor.dtype == expected[key].dtype and torch.equal(tensor, expected[key]), key

    tolerance = 1e-12 if "float64" in run.flags else 1e-5
    ours, theirs = metrics(out), metrics(old / name)
    for row, expected in zip(ours, theirs, strict=True):
        for key in ("step", "lr") if is_adapter else ("step", "tokens", "lr"):
            assert row[key] == expected[key], key
        losses = "loss", "bits_per_byte"
        for key in losses if name == "experts" else (*losses, "grad_norm"):
            assert row[key] == pytest.approx(expected[key], rel=tolerance, abs=0), key


def test_a_corpus_opens(old, tmp_path):
    """With the checksum that the run has stored. Today's tokens of its text are the same files."""
    tokens, again = old / "tokens", tmp_path / "again"
    tokenizer = load_tokenizer(str(tokens / "tokenizer.model"))
    train_set, _ = open_windows([str(tokens)], tokenizer, seq_len=24)
    flags = json.loads((old / "run" / STEP / "config.json").read_text())["flags"]
    assert train_set.checksum() == flags["data_checksum"]
    text, its_tokenizer = old / "counting.txt", old / "notes.model"
    succeed("data.py", "tokenize", text, "--tokenizer", its_tokenizer, "--out", again)
    for path in tokens.iterdir():
        assert (again / path.name).read_bytes() == path.read_bytes(), path.name
