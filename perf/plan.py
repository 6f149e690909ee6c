"""`bench.py plan`: predict memory, traffic and time of every plan for a cluster, on a laptop.

    python bench.py plan --model llama3.1-8b --gpus 16

A plan is a data-parallel strategy on a mesh of pp x replicate x shard x tp ranks, the sizes of cp
and ep, a pipeline's schedule, a treatment of activations, a microbatch size and a value of
--reshard (costs/plans.py). costs/ predicts its memory, its traffic and its time. The output begins
with the best plan and the command that starts it. Then a table has the best plan of each mesh, and
why it loses.
"""

import gc
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from operator import itemgetter
from pathlib import Path

from config import DIMS, LAYOUTS, ParallelConfig, Work, flags_of
from costs.machines import FITTED, Machine
from costs.plans import Plan, every_plan, order, tp_sizes
from costs.search import USABLE_FRACTION
from costs.shapes import flops_per_token
from lora import adapter_settings
from parallel import refusal
from perf.emulated import emulation_table
from perf.instruments import build_on_meta, check_writable
from perf.reports import write_json
from plumbing.messages import UserError, with_progress
from runs.changed import prediction_note
from techniques import nf4
from techniques.optimizers import peak_rate

# Nine of ten published speeds of families that were left out of the fit are within so much of what
# was predicted, by kind_of their configuration (docs/calibrate.py).
SPREAD = {"dp": 0.13, "tp": 0.2, "cp": 0.12, "pp": 0.1}
MESHES = 12  # of which a plan is shown


def kind_of(parallel: ParallelConfig) -> str:
    """Return the kind of configuration, whose error SPREAD has."""
    for dim in ("pp", "cp", "tp"):
        if getattr(parallel, dim) > 1:
            return dim
    return "dp"


@dataclass(frozen=True)
class Question:
    """What `bench.py plan` is asked. Raises UserError where its parts contradict each other."""

    preset: str  # name of the model
    work: Work  # a step; each plan splits it in another way
    machine: Machine
    gpus: int
    wanted: dict[str, object]  # values of plans.FILTERS that plans must have, None for any

    def __post_init__(self):
        work = self.work
        per_node = self.machine.per_node
        longest = work.model.config.max_seq_len
        reason = self.machine.refuses(work.parallel)
        if reason:
            raise UserError(f"no plan: {reason}")
        if self.gpus % per_node:
            nodes = math.ceil(self.gpus / per_node)
            raise UserError(
                f"--gpus {self.gpus} is no multiple of {per_node}, which a node has: give --gpus "
                f"{nodes * per_node} for {nodes} full nodes, or NODESxGPUS"
            )
        if work.seq_len > longest:
            raise UserError(
                f"--seq-len {work.seq_len} is longer than the {longest} tokens of {self.preset}: "
                f"give at most {longest}"
            )

    @property
    def in_4_bits(self) -> bool:
        return not all(parameter.is_floating_point() for parameter in self.work.model.parameters())

    def plans(self) -> Iterator[Plan]:
        more = [nf4.TECHNIQUE] if self.in_4_bits else []
        return every_plan(self.work, self.gpus, self.machine, self.wanted, *more)


def plan_cluster(
    question: Question, tokens: float | None, json_file: Path | None, check: bool
) -> str:
    """Return the output of `bench.py plan`: the best plan, what a run on `tokens` takes, and the
    command; then the best plan of each of MESHES meshes. With `json_file`, also write all plans to
    it; with `check`, emulate the best.

    Raises UserError where no plan exists or none fits in memory."""
    check_writable("--json", json_file)
    gc.freeze()  # else each of many garbage collections walks all of torch
    plans = sorted(question.plans(), key=order)
    if not plans:
        raise UserError(explain_no_plan(question))
    if not plans[0].fits:
        raise UserError(explain_nothing_fits(plans[0]))
    if json_file:  # here alone each plan is timed, whether it fits or not
        rows = [json_row(plan) for plan in with_progress(plans, "seconds of plans")]
        write_json(json_file, sorted(rows, key=itemgetter("seconds")))
    # Of plans with the same mesh, as of DDP and ZeRO-1, only the best of all stays.
    best_of_mesh = {}
    for plan in plans:
        sizes = tuple(getattr(plan.work.parallel, dim) for dim in DIMS)
        best_of_mesh.setdefault(sizes, plan)
    best = plans[0]
    shown = list(best_of_mesh.values())[:MESHES]
    machine = question.machine
    lines = []
    if machine.caveat:
        lines.append(f"{machine.name}: {machine.caveat}")
    lines.append(describe_best(best, question))
    if tokens:
        lines.append(about_run(best, tokens))
    lines += ["", *commands(best, question), ""]
    lines.append(
        f"Of {len(plans):,} plans the best of {len(shown)} of {len(best_of_mesh)} meshes "
        f"(all by --json FILE):"
    )
    lines += [*table(shown, machine), "", machine_in_words(machine)]
    if note := prediction_note(best.work.model.config):
        lines.append(note)
    if check:
        lines += ["", *emulation_table(best.work)]
    return "\n".join(lines)


# ------------------------------------------------------------------------------ the best in words

PART_NAMES = {
    "products": "matrix products",
    "recompute": "recomputing",
    "passes": "memory traffic",
    "weights": "rounding weights and adding up gradients",
    "optimizer": "the optimizer",
    "cpu": "copies to the CPU",
} | {dim: f"waiting for {dim}" for dim in DIMS}


def describe_best(plan: Plan, question: Question) -> str:
    """Return the best plan in sentences: what it is, its time with its error bar, and why."""
    work = plan.work
    parallel = work.parallel
    dtype = str(parallel.dtype).removeprefix("torch.")
    what = f"{question.preset}, {work.batch} x {work.seq_len} tokens a step, {dtype}"
    lora = adapter_settings(work.model)
    if lora:
        kind = "DoRA" if lora.dora else "LoRA"
        bits = 4 if question.in_4_bits else 8 * parallel.weight_bytes
        what += f", {kind} of rank {lora.rank} beside a base in {bits} bits"
    flops = flops_per_token(work.model, work.seq_len) * plan.tokens_per_second
    mfu = flops / plan.machine.peak
    largest = sorted(plan.parts.items(), key=lambda item: -item[1])[:3]
    shares = ", ".join(f"{PART_NAMES[part]} {s / plan.seconds:.0%}" for part, s in largest if s)
    sentences = [
        f"{what}, on {question.gpus} x {plan.machine.name}: {name_of(plan)}, "
        f"activations {plan.activations}, microbatches of {work.microbatch}: "
        f"{plan.seconds:,.3g} s a step, "
        f"{plan.tokens_per_second:,.0f} tokens/s per GPU, MFU {mfu:.0%}.",
        f"It is the fastest that fits, with {plan.memory['peak'] / 1e9:.3g} of "
        f"{USABLE_FRACTION * plan.machine.memory / 1e9:.3g} GB; its time is {shares}.",
    ]
    if parallel.pp > 1 and not parallel.compile:
        sentences.append(
            "Uncompiled pipelines are not predicted: Python's time is left out, with which "
            "published ones took 1.5 to 2 times as long, and longer the smaller a microbatch is."
        )
    elif work.model.config.ffn_uses > 1:
        sentences.append(
            "Predictions on an H200 were up to 2 % too slow with F = 14,336, 9 % too fast with 768."
        )
    elif not plan.machine.caveat:
        spread = SPREAD[kind_of(parallel)]
        sentences.append(
            f"Nine of ten published speeds are within {spread:.0%} of such a prediction (fitted "
            f"{FITTED}; newer software is faster)."
        )
    return "\n".join(sentences)


def name_of(plan: Plan) -> str:
    """Return a plan's strategy and mesh, such as `hsdp 4 x 8, tp 2`: copies x ranks that share one
    copy, and other dimensions with more than one rank."""
    parallel = plan.work.parallel
    copies = [str(n) for n in (parallel.replicate, parallel.shard) if n > 1] or ["1"]
    sizes = [f"{parallel.dp} {' x '.join(copies)}"]
    for dim in reversed(DIMS):
        n = getattr(parallel, dim)
        if n > 1 and dim not in ("replicate", "shard"):
            sizes.append(f"{dim} {n}")
    return ", ".join(sizes)


def about_run(plan: Plan, tokens: float) -> str:
    """Return in a sentence what training on so many tokens takes."""
    hours = tokens / (plan.work.batch * plan.work.seq_len) * plan.seconds / 3600
    gpu_hours = hours * plan.work.parallel.size
    return f"{tokens:.4g} tokens take {hours / 24:,.1f} days, {gpu_hours:,.0f} GPU-hours."


def commands(plan: Plan, question: Question) -> list[str]:
    """Return the lines that start a plan: the command of the first node, and of the others."""
    work = plan.work
    lora = adapter_settings(work.model)
    per_node = min(question.gpus, question.machine.per_node)
    nodes = question.gpus // per_node
    kind = f"pretraining with {work.parallel.optimizer}"
    if lora:
        what = "finetune_lora.py --init BASE --data CHATS.jsonl"
        kind = "fine-tuning"
        if work.references:
            what = "preferences.py --init BASE --data PAIRS.jsonl"
            kind = "preferences"
        what += f" --rank {lora.rank}"
        what += " --base-bits 4" if question.in_4_bits else ""
        what += " --dora" if lora.dora else ""
    else:
        what = f"train.py --model {question.preset} --data TOKENS --tokenizer TOKENIZER"
    what += f" --lr {peak_rate(kind, build_on_meta(work.model.config)):g}"
    train = (
        f"{what} --out out/{question.preset} --batch {work.batch} --microbatch {work.microbatch} "
        f"--seq-len {work.seq_len} {flags_of(work.parallel)}"
    )
    if nodes == 1:
        return [f"torchrun --nproc-per-node {per_node} {train}"]
    place = f"--nnodes {nodes} --nproc-per-node {per_node} --node-rank 0 --master-addr HOST"
    others = "1" if nodes == 2 else f"1 to {nodes - 1}"
    return [
        f"torchrun {place} {train}",
        f"and on the other nodes the same with --node-rank {others}",
    ]


# ------------------------------------------------------------------------------------- the table


def table(ranked: list[Plan], machine: Machine) -> list[str]:
    """Return the lines of a table, aligned: memory of a rank, and what it sends in a step; in a
    pipeline, of the rank with the most."""
    headings = "strategy and mesh, activations, microbatch, GB, sends GB, seconds, it loses by"
    rows = [headings.split(", ")]
    for plan in ranked:
        rows.append(
            [
                name_of(plan),
                plan.activations,
                f"{plan.work.microbatch}",
                f"{plan.memory['peak'] / 1e9:,.3g}",
                f"{plan.sent / 1e9:,.3g}",
                f"{plan.seconds:,.3g}",
                reason(plan, ranked[0], machine),
            ]
        )
    widths = [max(map(len, column)) for column in zip(*rows)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]


def reason(plan: Plan, best: Plan, machine: Machine) -> str:
    """Return why a plan loses against the best: the memory that it lacks, or the part of a step
    that takes the most additional time. Within the error of predictions it is a tie."""
    if not plan.fits:
        return f"it needs more than {USABLE_FRACTION * machine.memory / 1e9:,.3g} GB"
    if plan is best:
        return "the fastest"
    additional = {part: s - best.parts.get(part, 0.0) for part, s in plan.parts.items()}
    part = max(additional, key=additional.get)
    spread = SPREAD[kind_of(plan.work.parallel)]
    tie = "a tie, " if plan.seconds < best.seconds * (1 + spread) else ""
    return f"{tie}{additional[part]:+.2g} {PART_NAMES[part].removeprefix('waiting for ')}"


def machine_in_words(machine: Machine) -> str:
    return (
        f"{machine.name}, as published steps reach it: "
        f"{machine.peak * machine.matmul_fraction / 1e12:,.3g} TFLOP/s of products, "
        f"{machine.bandwidth / 1e9:,.0f} GB/s of memory, {machine.node_link / 1e9:,.3g} GB/s in a "
        f"node of {machine.per_node}, {machine.link / 1e9:,.3g} GB/s per GPU to other nodes"
    )


def json_row(plan: Plan) -> dict:
    """Return a plan as --json writes it, in bytes and seconds."""
    return {name: getattr(plan.work.parallel, name) for name in (*DIMS, *LAYOUTS)} | {
        "microbatch": plan.work.microbatch,
        "fits": plan.fits,
        "bytes": plan.memory,
        "sent": plan.sent,
        "seconds": plan.seconds,
        "parts": plan.parts,
        "tokens_per_second_per_gpu": plan.tokens_per_second,
    }


# ----------------------------------------------------------------------------- where nothing fits


def explain_no_plan(question: Question) -> str:
    """Return the error message for flags that leave no plan."""
    work = question.work
    batch = work.batch
    gpus = question.gpus
    pp = question.wanted["pp"] or (2 if question.wanted["schedule"] else 1)
    reason = refusal(replace(work, parallel=replace(work.parallel, pp=pp)))
    if reason:
        return reason
    given = {name: value for name, value in question.wanted.items() if value}
    tp = given.get("tp", max(tp_sizes(work.model.config, gpus)))
    data_ranks, rest = divmod(gpus, tp * given.get("pp", 1) * given.get("cp", 1))
    if not rest and batch % data_ranks:
        return (
            f"--batch {batch} is no multiple of the {data_ranks} ranks that share it with "
            f"--tp {tp}: use --batch {math.ceil(batch / data_ranks) * data_ranks}"
        )
    flags = []
    for name, value in given.items():
        flags.append(f"--{name.replace('_', '-')}")
        if value is not True:
            flags.append(str(value))
    fixed = " ".join(flags)
    return f"no plan for --batch {batch} on {gpus} GPUs has {fixed}: leave out some of these flags"


def explain_nothing_fits(smallest: Plan) -> str:
    """Return the error message where no plan fits in memory: what the smallest plan needs."""
    needed, usable = smallest.memory["peak"], USABLE_FRACTION * smallest.machine.memory
    return (
        f"nothing fits: a GPU of the smallest plan ({name_of(smallest)}) needs "
        f"{needed / 1e9:,.4g} GB of {usable / 1e9:,.4g}: give more --gpus, a --gpu with more "
        f"memory, a shorter --seq-len, --moments bfloat16, or adapters by --lora --base-bits 4"
    )
