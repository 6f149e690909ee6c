"""CUDA's branches without a GPU: devices and dtypes fit together, and the host waits once a step.

tests/workers/fake_cuda.py takes steps of each split and technique but --ep with fake tensors, in
processes of its own: torch itself says what does not fit. Nothing is computed there, so attention
by lengths is compared in test_documents and test_context_parallel, with numbers."""

import functools
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import ENVIRONMENT, ROOT, slow, with_fault

pytestmark = pytest.mark.skipif(
    not shutil.which("g++") or torch.version.cuda is not None,
    reason="needs g++, and a torch without CUDA of its own",
)
WORKER = "tests/workers/fake_cuda.py"
CASES = re.findall(r'^    "([^"]+)": (?:dict|[A-Z]+)\b', (ROOT / WORKER).read_text(), re.M)
QUICK = "float32 packed, fsdp muon, tp, cp packed, nf4 dora full"
QUICK = [*QUICK.split(", "), "old nf4", "old fsdp muon"]
WRITES = ["writes", "writes float32", "writes in 4 bits"]
FAST = [*WRITES, *QUICK]  # of one launch, in which steps of training leave several ranks behind
SLOWER = [name for name in CASES if name not in QUICK]


@functools.cache
def found_in(*names: str, root: Path = ROOT) -> dict:
    """Return what one launch of the worker finds in these cases."""
    options = dict(capture_output=True, text=True, env=ENVIRONMENT)
    process = subprocess.run([sys.executable, root / WORKER, *names], **options, timeout=280)
    assert process.returncode == 0, process.stderr
    return json.loads(process.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", [name for name in QUICK if name.startswith("old")])
def test_gpus_without_bfloat16_compute_none(name):
    assert "torch.bfloat16" not in found_in(*FAST)[name]["dtypes"]


@pytest.mark.parametrize("name", [*QUICK, *map(slow, SLOWER)])
def test_a_step_waits_once(name):
    """The host waits for what it prints; documents need no mask in bfloat16."""
    names = FAST if name in FAST else SLOWER
    found = found_in(*names)[name]
    assert "error" not in found, found
    assert found["passes"] == []
    assert re.fullmatch(r"tolist at train.py:\d+", " ".join(found["update"]))
    kernel = "flash" if found["dtype"] == "torch.bfloat16" else "efficient"
    assert found["attention"] == ([] if found["by lengths"] else [kernel])
    assert "torch.bfloat16" in found["dtypes"] or kernel != "flash"


@pytest.mark.parametrize("name", WRITES)
def test_generation_waits_every_eight_tokens(name):
    """For its looks alone. A step is recorded, since nothing in it waits."""
    found = found_in(*FAST)[name]
    assert "error" not in found, found
    assert found["written"] == 9 and found["recorded"] == 1
    assert len(found["waits"]) == 2 * 2  # of 8 and 1 tokens: are logits finite, and which tokens
    assert {wait.split(":")[0].split(" at ")[1] for wait in found["waits"]} == {"decoding.py"}
    assert found["attention"] == ["efficient"]
    assert ("torch.bfloat16" in found["dtypes"]) == (name != "writes float32")


FAULTS = [  # file, what is in it, what is put there; the case that finds it, and where
    ("chunked_loss", "chunk_loss.detach()", "chunk_loss.detach().item()", "float32",
     "passes", "_local_scalar_dense at chunked_loss.py"),
    ("model", "torch.arange(0, E, 2, device=device,", "torch.arange(0, E, 2,", "fsdp",
     "error", "on the same device"),
    ("model", "torch.where(targets != IGNORE, losses, 0)", "losses[targets != IGNORE]", "float32",
     "error", "nonzero"),
    ("muon", "nothing.new_empty(my_matrix.shape)", "torch.empty(my_matrix.shape)",
     "fsdp muon", "update", "a blocking copy at muon.py"),
    ("muon", "= on_gpu and parallel.dtype == torch.bfloat16", "= on_gpu",
     "old fsdp muon", "dtypes", "torch.bfloat16"),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("file, old, new, case, part, says", FAULTS)
def test_faults_are_found(tmp_path, file, old, new, case, part, says):
    _, copy = with_fault(tmp_path / "copy", file, old, new)
    found = found_in(case, root=copy)[case]
    assert says in str(found.get(part)), found
