"""The cluster that `bench.py comm` has measured, for `bench.py plan --measured`."""

import json
from dataclasses import replace
from pathlib import Path

import torch

from config import ParallelConfig, Work
from costs.machines import Machine
from costs.page import holds
from costs.seconds import compute_time, updated_bytes
from model import Llama, LlamaConfig
from plumbing.messages import UserError


def read_measurement(file: Path) -> tuple[dict, Machine]:
    """Return the report that `bench.py comm --model NAME --out FILE` wrote, and its machine.

    Raises UserError where the file is no such report."""
    try:
        report = json.loads(file.read_text("utf-8"))
        if report["compute"]:
            return report, measured_machine(report)
        problem = "it was written without --model"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        problem = repr(error)
    raise UserError(f"{file} is no result of bench.py comm --model NAME --out FILE: {problem}")


def measured_machine(report: dict) -> Machine:
    """Return the machine that `bench.py comm` measured.

    The time of an update gives the memory bandwidth, and with that the time of `passes`. What
    forward and backward take beyond it is the time of matrix products, and gives their rate. The
    smallest all-gather gives the latency, the largest the speed of links: in a node, or between all
    ranks where there is one node, or one rank a node; and from each rank to other nodes."""
    computed, groups = report["compute"], report["groups"]
    parallel = ParallelConfig(dtype=getattr(torch, computed["dtype"]))
    with torch.device("meta"):
        model = Llama(LlamaConfig(**computed["config"]))
    sequences = computed["tokens"] // computed["seq_len"]
    work = Work(model, parallel, sequences, sequences, computed["seq_len"])

    def speed(group: dict) -> float:
        nbytes, seconds = group["times"]["all-gather"][-1]
        return (group["ranks"] - 1) / group["ranks"] * nbytes / seconds

    machine = Machine(
        report["device"],
        peak=1.0,
        memory=report["memory"],
        bandwidth=updated_bytes(holds(work)) / computed["update"],
        node_link=speed(groups.get("node", groups["world"])),
        link=speed(groups.get("across", groups["world"])),
        per_node=report["per_node"],
        latency=groups["world"]["times"]["all-gather"][0][1],
        overlaps=report["backend"] == "nccl",
        fsdp_overhead=max(0.0, computed["forward_backward_in_fsdp"] - computed["forward_backward"]),
        measured=True,
    )
    parts = compute_time(work, machine)
    flops, passes = parts["products"], parts["passes"]  # at 1 FLOP/s, products take FLOPs seconds
    # In a noisy measurement the passes may leave no time for products: keep the rate positive.
    products = max(computed["forward_backward"] - passes, 0.1 * passes)
    return replace(machine, peak=flops / products)
