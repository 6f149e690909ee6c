"""What d36363a wrote: its runs resume, its adapters load and its corpora open with today's code.

tests/workers/written_by.py writes them with that commit's own files. What is loaded equals what was
stored in every bit, on as many processes and on one. The learning rates of later steps, which are
computed from flags alone, are equal too. Losses and gradient norms may differ by rounding, because
a kernel may be written anew: by 1e-5 of their size at most, and by 1e-12 in the run in float64.
"""

import json
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from conftest import metrics, succeed
from torch import Tensor
from workers import written_by
from workers.written_by import RUNS, SAVED, STEPS, command_of, interrupted, read

from data import open_windows
from text.tokenizer import load_tokenizer

STEP = f"step-{SAVED:08d}"
LAST_STEP = f"step-{STEPS:08d}"


@pytest.fixture(scope="module")
def old(tmp_path_factory) -> Path:
    """The corpus and the smallest run."""
    directory = tmp_path_factory.mktemp("old")
    try:
        written_by.write(directory, quick=True)
    except subprocess.CalledProcessError:  # of git archive
        pytest.skip(f"needs commit {written_by.COMMIT}: git fetch --unshallow")
    return directory


@pytest.fixture(scope="module")
def everything(old) -> Path:
    """All that tests/workers/written_by.py writes."""
    written_by.write(old)
    return old


def stored(directory: Path) -> dict[str, Tensor]:
    """Return the tensors of weights/ or optimizer/, read by torch alone."""
    entries = dcp.FileSystemReader(directory).read_metadata().state_dict_metadata
    tensors = {n: torch.empty(e.size, dtype=e.properties.dtype) for n, e in entries.items()}
    dcp.load(tensors, checkpoint_id=directory, no_dist=True)
    return tensors


def resume(old: Path, name: str, out: Path, alone: bool = False) -> list[dict[str, dict]]:
    """Resume OUT, a copy of one of RUNS, with today's code; return what each rank has loaded."""
    loaded = out.with_name("loaded")
    loaded.mkdir()
    split = [] if alone else RUNS[name].split.split()
    processes = 0 if alone else RUNS[name].processes
    command = [*command_of(name, old, out), *split, "--resume"]
    result = succeed("tests/workers/as_loaded.py", loaded, *command, nproc=processes)
    assert f"resumed from {out / STEP}" in result.out and (out / LAST_STEP).exists()
    # Neither of other data nor of another model.py, nor of flags that are gone, as --log-every.
    assert "warning" not in result.err
    of_ranks = [torch.load(path) for path in sorted(loaded.iterdir())]
    assert len(of_ranks) == max(processes, 1)
    return of_ranks


def same_tensors(ranks: list[dict[str, Tensor]], expected: dict[str, Tensor]) -> None:
    """Assert that the ranks together have loaded every tensor, and each as it was stored."""
    assert set().union(*ranks) == expected.keys()
    for name, tensor in (item for rank in ranks for item in rank.items()):
        assert tensor.dtype == expected[name].dtype and torch.equal(tensor, expected[name]), name


def same_steps(ours: list[dict], expected: list[dict], tolerance: float) -> None:
    """Assert that two runs took the same steps, up to a relative difference of what is computed."""
    assert len(ours) == STEPS
    for row, theirs in zip(ours, expected, strict=True):
        for key in ("step", "tokens", "lr"):
            assert row[key] == theirs[key], key
        for key in ("loss", "bits_per_byte", "grad_norm"):
            assert row[key] == pytest.approx(theirs[key], rel=tolerance, abs=0), key


def resumes(old: Path, name: str, out: Path, alone: bool = False) -> None:
    """Resume a copy of a run; compare what it loads, and the steps that it takes."""
    ranks = resume(old, name, interrupted(old / name, out), alone)
    saved = old / name / STEP
    if (saved / "weights").exists():
        weights = stored(saved / "weights")
    else:  # an adapter's files have Hugging Face's names and order of rows
        weights = torch.load(old / f"{name}.pt")
        weights = {key: tensor.float() for key, tensor in weights.items() if key != "logits"}
    same_tensors([rank["weights"] for rank in ranks], weights)
    same_tensors([rank["optimizer"] for rank in ranks], stored(saved / "optimizer"))
    tolerance = 1e-12 if "float64" in RUNS[name].flags else 1e-5
    same_steps(metrics(out), metrics(old / name), tolerance)


# ------------------------------------------------------------------------------------------- runs


def test_a_run_resumes(old, tmp_path):
    resumes(old, "run", tmp_path / "run")


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in RUNS if name != "run"])
def test_every_run_resumes(everything, tmp_path, name):
    resumes(everything, name, tmp_path / "run")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["four", "pipeline"])
def test_a_run_of_several_processes_resumes_on_one(everything, tmp_path, name):
    resumes(everything, name, tmp_path / "run", alone=True)


# ----------------------------------------------------------------------------- weights and tokens


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_weights_load_and_compute_the_same(everything, name):
    """A run's by load_pretrained, an adapter's by load_adapter; logits in float64."""
    ours, theirs = read(everything, name), torch.load(everything / f"{name}.pt")
    logits = [tensors.pop("logits") for tensors in (ours, theirs)]
    same_tensors([ours], theirs)
    torch.testing.assert_close(*logits, rtol=0, atol=1e-6)  # some angles are in float32


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_text_is_generated(everything, name):
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
