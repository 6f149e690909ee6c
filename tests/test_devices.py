"""Defaults and refusals by device: GPUs without bfloat16 or Triton, Apple GPUs."""

import importlib.util
from argparse import Namespace
from types import SimpleNamespace

import pytest
import torch

from plumbing.parser import Parser
from plumbing.processes import Process, UserError
from runs import setup as setup_py
from runs.flags import add_pretraining_flags
from runs.setup import setup

GPUS = {"H100": (9, 0), "A100": (8, 0), "T4": (7, 5), "V100": (7, 0), "P100": (6, 0)}
LOW, FULL = "bfloat16", "float32"


@pytest.fixture
def set_up(monkeypatch):
    """A function that sets up a run where there is a GPU of GPUS, "mps", or only a "cpu"."""

    def set_up(gpu: str, packages="triton", size: int = 1, **given) -> tuple[Namespace, Process]:
        args = Parser.defaults(add_pretraining_flags, **given)
        kind = "cuda" if gpu in GPUS else "cpu"
        process = Process(0, size, 0, size, torch.device(kind))
        major, minor = GPUS.get(gpu, (0, 0))
        properties = SimpleNamespace(major=major, minor=minor, name=gpu)

        def answer(owner, name: str, value) -> None:
            monkeypatch.setattr(owner, name, lambda *_: value)

        answer(Process, "check_same_flags", None)  # other processes give the same answers
        monkeypatch.setattr(Process, "minimum", lambda _, value: value)
        answer(torch.cuda, "is_available", kind == "cuda")
        answer(torch.cuda, "current_device", 0)
        answer(torch.cuda, "get_device_properties", properties)
        answer(torch.backends.mps, "is_available", gpu == "mps")
        answer(setup_py, "init_distributed", process)
        found = dict.fromkeys(packages.split(), True)
        monkeypatch.setattr(importlib.util, "find_spec", found.get)
        return args, setup(args)

    return set_up


@pytest.mark.parametrize(
    "device, packages, dtype, compile, says",
    [
        ("H100", "triton", LOW, True, ""),
        ("A100", "", LOW, False, "no Triton for this A100: --no-compile"),
        ("V100", "triton", FULL, True, "no bfloat16 for this V100: --dtype float32"),
        ("P100", "triton", FULL, False,
         "no bfloat16 for this P100: --dtype float32\nno Triton for this P100: --no-compile"),
        ("cpu", "triton", FULL, False, ""),
    ],
)  # fmt: skip
def test_defaults_are_what_the_device_computes(
    set_up, capsys, device, packages, dtype, compile, says
):
    args, process = set_up(device, packages)
    assert (args.dtype, args.compile) == (dtype, compile)
    assert capsys.readouterr().out.strip() == says
    assert process.device.type == ("cpu" if device == "cpu" else "cuda")


def test_what_is_given_is_taken(set_up, capsys):
    args, _ = set_up("T4", dtype="float64", compile=False)
    assert (args.dtype, args.compile) == ("float64", False)
    assert capsys.readouterr().out == ""


def test_an_apple_gpu_is_used_where_it_is_asked_for(set_up):
    args, process = set_up("mps", device="mps")
    assert process.device.type == "mps" and (args.dtype, args.compile) == (FULL, False)
    assert set_up("mps")[1].device.type == "cpu"


@pytest.mark.parametrize(
    "gpu, given, says",
    [
        ("T4", dict(dtype=LOW), "--dtype bfloat16: a T4 has no bfloat16"),
        ("P100", dict(compile=True), "--compile: there is no Triton for this P100"),
        ("H100", dict(device="mps"), "--device mps: this torch finds no Apple GPU"),
        ("mps", dict(device="mps", size=2), "for one process: leave it out, for the CPU"),
        ("mps", dict(device="mps", dtype="float64"), "does not work with this --dtype: leave"),
        ("mps", dict(device="mps", compile=True), "does not work with this --compile"),
        ("mps", dict(device="mps", dp="fsdp"), "does not work with this --dp"),
        ("mps", dict(device="mps", offload_activations=True), "this --offload-activations"),
    ],
)
def test_what_a_device_cannot_compute_is_refused(set_up, gpu, given, says):
    with pytest.raises(UserError, match=says):
        set_up(gpu, **given)


@pytest.mark.parametrize(
    "gpu, packages, taken",
    [
        ("H100", "triton flash_attn_interface", ["FA3"]),
        ("H100", "triton", []),
        ("A100", "triton flash_attn_interface", []),
        ("cpu", "flash_attn_interface", []),
    ],
)
def test_flash_attention_3_is_used_where_it_is_installed(
    set_up, monkeypatch, capsys, gpu, packages, taken
):
    activated = []
    monkeypatch.setattr(torch.nn.attention, "activate_flash_attention_impl", activated.append)
    set_up(gpu, packages)
    assert activated == taken
    assert ("FlashAttention 3" in capsys.readouterr().out) == bool(taken)
