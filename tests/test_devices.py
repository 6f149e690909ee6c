"""On each kind of device, emulated, a run gets the defaults, or the refusal, of a table."""

import importlib.util
from types import SimpleNamespace

import pytest
import torch

from config import ParallelConfig
from plumbing.flags import as_json
from plumbing.messages import UserError
from plumbing.parser import record_of
from plumbing.processes import Process
from runs import setup as setup_py
from runs.flags import Pretraining
from runs.setup import join

GPUS = {"H100": (9, 0), "A100": (8, 0), "T4": (7, 5), "V100": (7, 0), "P100": (6, 0)}
LOW, FULL = "bfloat16", "float32"


def set_up(
    monkeypatch, gpu: str, packages="triton", size: int = 1, **given
) -> tuple[Process, ParallelConfig]:
    """Join a run where there is a GPU of GPUS, "mps", or only a "cpu"."""

    def answer(owner, name: str, value) -> None:
        monkeypatch.setattr(owner, name, lambda *_: value)

    kind = "cuda" if gpu in GPUS else "cpu"
    process = Process(0, size, 0, size, torch.device(kind))
    major, minor = GPUS.get(gpu, (0, 0))
    properties = SimpleNamespace(major=major, minor=minor, name=gpu)
    answer(setup_py, "init_distributed", process)
    answer(Process, "check_same_flags", None)  # other processes give the same answers
    monkeypatch.setattr(Process, "minimum", lambda _, value: value)
    answer(torch.cuda, "is_available", kind == "cuda")
    answer(torch.cuda, "current_device", 0)
    answer(torch.cuda, "get_device_properties", properties)
    answer(torch.backends.mps, "is_available", gpu == "mps")
    found = dict.fromkeys(packages.split(), True)
    monkeypatch.setattr(importlib.util, "find_spec", found.get)
    typed = given | ({"dtype": getattr(torch, given["dtype"])} if "dtype" in given else {})
    return join(record_of(Pretraining, typed))


NO_TRITON = "no Triton for this {}: --no-compile\n"
NO_BFLOAT16 = "no bfloat16 for this {}: --dtype float32\n"
FLASH_3 = "attention in bfloat16 is computed by FlashAttention 3\n"


@pytest.mark.parametrize(
    "gpu, packages, given, kind, dtype, compile, says",
    [
        ("H100", "triton", {}, "cuda", LOW, True, ""),
        ("H100", "triton flash_attn_interface", {}, "cuda", LOW, True, FLASH_3),
        ("A100", "triton flash_attn_interface", {}, "cuda", LOW, True, ""),
        ("A100", "", {}, "cuda", LOW, False, NO_TRITON),
        ("V100", "triton", {}, "cuda", FULL, True, NO_BFLOAT16),
        ("P100", "triton", {}, "cuda", FULL, False, NO_BFLOAT16 + NO_TRITON),
        ("T4", "triton", dict(dtype="float64", compile=False), "cuda", "float64", False, ""),
        ("cpu", "triton flash_attn_interface", {}, "cpu", FULL, False, ""),
        ("mps", "triton", {}, "cpu", FULL, False, ""),  # only where it is asked for
        ("mps", "triton", dict(device="mps"), "mps", FULL, False, ""),
    ],
)
def test_defaults_are_what_the_device_computes(
    monkeypatch, capsys, gpu, packages, given, kind, dtype, compile, says
):
    activated = []
    monkeypatch.setattr(torch.nn.attention, "activate_flash_attention_impl", activated.append)
    process, parallel = set_up(monkeypatch, gpu, packages, **given)
    found = process.device.type, as_json(parallel.dtype), parallel.compile
    assert found == (kind, dtype, compile)
    assert capsys.readouterr().out == says.format(gpu, gpu)
    assert activated == ["FA3"] * (says == FLASH_3)


@pytest.mark.parametrize(
    "gpu, given, says",
    [
        ("T4", dict(dtype=LOW), "--dtype bfloat16: a T4 has no bfloat16"),
        ("P100", dict(compile=True), "--compile: there is no Triton for this P100"),
        ("mps", dict(device="mps", size=2), "for one process: leave it out, for the CPU"),
        ("mps", dict(device="mps", dtype="float64"), "does not work with this --dtype: leave"),
        ("mps", dict(device="mps", offload_activations=True), "this --offload-activations"),
    ],
)
def test_what_a_device_cannot_compute_is_refused(monkeypatch, gpu, given, says):
    with pytest.raises(UserError, match=says):
        set_up(monkeypatch, gpu, **given)
