"""What d36363a wrote: its runs resume, its adapters load and its corpora open with today's code.

tests/workers/written_by.py writes them with that commit's own files. What is loaded equals what was
stored in every bit, on as many processes and on one. The learning rates of later steps, which are
computed from flags alone, are equal too. Losses and gradient norms may differ by rounding, because
a kernel may be written anew: by 1e-5 of their size at most, and by 1e-12 in the run in float64.
"""

import json
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from conftest import metrics, slow, succeed
from torch import Tensor
from workers import written_by
from workers.written_by import RUNS, SAVED, STEPS

from data import open_windows
from text.tokenizer import load_tokenizer

STEP, LAST_STEP = f"step-{SAVED:08d}", f"step-{STEPS:08d}"
OTHERS = [name for name in RUNS if name != "run"]
RESUMED = [("run", False), *(slow(name, False) for name in OTHERS)]
RESUMED += [slow("four", True), slow("pipeline", True)]


@pytest.fixture(scope="module")
def old(text, sums, tmp_path_factory) -> Path:
    """The corpus and the smallest run."""
    directory = tmp_path_factory.mktemp("old")
    shutil.copy(text, directory)
    shutil.copy(sums, directory)
    try:
        written_by.write_corpus(directory)
    except subprocess.CalledProcessError:  # of git archive
        pytest.skip(f"needs commit {written_by.COMMIT}: git fetch --unshallow")
    written_by.write_runs(directory, "run")
    return directory


@pytest.fixture(scope="module")
def everything(old) -> Path:
    """All that tests/workers/written_by.py writes."""
    written_by.write_runs(old, *OTHERS)
    written_by.in_house(old, written_by.__file__, old)
    return old


def stored(directory: Path) -> dict[str, Tensor]:
    """Return the tensors of weights/ or optimizer/, read by torch alone."""
    entries = dcp.FileSystemReader(directory).read_metadata().state_dict_metadata
    tensors = {n: torch.empty(e.size, dtype=e.properties.dtype) for n, e in entries.items()}
    dcp.load(tensors, checkpoint_id=directory, no_dist=True)
    return tensors


def same_tensors(ranks: list[dict[str, Tensor]], expected: dict[str, Tensor]) -> None:
    """Assert that the ranks together have loaded every tensor, and each as it was stored."""
    assert set().union(*ranks) == expected.keys()
    for name, tensor in (item for rank in ranks for item in rank.items()):
        assert tensor.dtype == expected[name].dtype and torch.equal(tensor, expected[name]), name


@pytest.mark.parametrize("name, alone", RESUMED)
def test_a_run_resumes(name, alone, request, tmp_path):
    """A copy of it, as it would be if it had been killed just before its last save; on as many
    processes or on one. Each rank loads what was stored, and takes the same steps."""
    old = request.getfixturevalue("old" if name == "run" else "everything")
    out, loaded = tmp_path / "run", tmp_path / "loaded"
    loaded.mkdir()
    shutil.copytree(old / name, out, ignore=shutil.ignore_patterns(LAST_STEP))
    run = RUNS[name]
    if alone:
        run = run._replace(processes=0, split="")
    command = [*written_by.command_of(name, old, out), *run.split.split(), "--resume"]
    result = succeed("tests/workers/as_loaded.py", loaded, *command, nproc=run.processes)
    assert f"resumed from {out / STEP}" in result.out and (out / LAST_STEP).exists()
    # Neither of other data nor of another model.py, nor of flags that are gone, as --log-every.
    assert "warning" not in result.err
    ranks = [torch.load(path) for path in loaded.iterdir()]
    assert len(ranks) == max(run.processes, 1)

    saved = old / name / STEP
    if (saved / "weights").exists():
        weights = stored(saved / "weights")
    else:  # an adapter's files have Hugging Face's names and order of rows
        weights = torch.load(old / f"{name}.pt")
        weights = {key: tensor.float() for key, tensor in weights.items() if key != "logits"}
    same_tensors([rank["weights"] for rank in ranks], weights)
    same_tensors([rank["optimizer"] for rank in ranks], stored(saved / "optimizer"))

    tolerance = 1e-12 if "float64" in run.flags else 1e-5
    rows = metrics(out)
    assert len(rows) == STEPS
    for row, theirs in zip(rows, metrics(old / name), strict=True):
        for key in ("step", "tokens", "lr"):
            assert row[key] == theirs[key], key
        for key in ("loss", "bits_per_byte", "grad_norm"):
            assert row[key] == pytest.approx(theirs[key], rel=tolerance, abs=0), key


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_weights_load_compute_the_same_and_generate(everything, name):
    """A run's by load_pretrained, an adapter's by load_adapter; logits in float64."""
    ours, theirs = written_by.read(everything, name), torch.load(everything / f"{name}.pt")
    logits = [tensors.pop("logits") for tensors in (ours, theirs)]
    same_tensors([ours], theirs)
    torch.testing.assert_close(*logits, rtol=0, atol=1e-6)  # some angles are in float32
    model = [everything / name / STEP]
    if RUNS[name].script == "finetune_lora.py":
        model = [everything / "run", "--adapter", *model]
    text = succeed("generate.py", *model, "--prompt", "7 and", "--max-new-tokens", 5).out
    assert text.startswith("7 and") and len(text) > len("7 and\n")


def test_a_corpus_opens(old, tmp_path):
    """Its tokens are those of its files, and those that its tokenizer has for its text now."""
    tokens, again = old / "tokens", tmp_path / "again"
    tokenizer = load_tokenizer(str(tokens / "tokenizer.model"))
    train_set, val_set = open_windows([str(tokens)], tokenizer, seq_len=24)
    flags = json.loads((old / "run" / STEP / "config.json").read_text())["flags"]
    assert train_set.checksum() == flags["data_checksum"]
    for windows, split in ((train_set, "train"), (val_set, "val")):
        # 1,024 bytes of header, and two for each token; neighbouring windows share a token.
        in_file = np.fromfile(tokens / f"{split}_000000.bin", "<u2", offset=1024)
        opened = np.concatenate([windows[0][:1], *(windows[i][1:] for i in range(len(windows)))])
        assert len(opened) > len(in_file) - 24
        assert np.array_equal(opened, in_file[: len(opened)])
    text, its_tokenizer = old / "counting.txt", old / "notes.model"
    succeed("data.py", "tokenize", text, "--tokenizer", its_tokenizer, "--out", again)
    for path in tokens.iterdir():
        assert (again / path.name).read_bytes() == path.read_bytes(), path.name
