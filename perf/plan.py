"""`bench.py plan`: predict memory, traffic and time of every plan for a cluster, on a laptop.

    python bench.py plan --model llama3.1-8b --gpus 16     a cluster known from data sheets
    python bench.py plan --measured comm.json              the cluster that bench.py comm measured

A plan is a data-parallel strategy on a mesh of pp x replicate x shard x tp ranks, a pipeline's
schedule, a treatment of activations, a microbatch size and a value of --reshard
(costs/search.py). costs/ predicts its memory, its traffic and its time. The output is a table
with the best plan of each mesh and the reason why it loses against the best of all, then the
command that starts the best.
"""

import gc
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from config import DIMS, ParallelConfig, Work, flags_of
from costs.machines import GPUS, Machine
from costs.page import holds, sends
from costs.search import USABLE_FRACTION, Plan, every_plan, order
from costs.shapes import flops_per_token
from lora import LoRA
from perf.instruments import (
    build_on_meta,
    check_writable,
    emulate,
    markdown_table,
    needs_real_tensors,
    write_json,
)
from plumbing.processes import UserError
from runs.changed import prediction_note
from techniques import nf4

# Nine of ten published speeds of families that were left out of the fit are within so much of what
# was predicted, by kind_of their configuration (docs/calibrate.py).
SPREAD = {"dp": 0.15, "tp": 0.21, "cp": 0.23, "pp": 0.23}


def kind_of(parallel: ParallelConfig) -> str:
    """Return the kind of configuration, whose error SPREAD has."""
    return next((dim for dim in ("pp", "cp", "tp") if getattr(parallel, dim) > 1), "dp")


@dataclass(frozen=True)
class Question:
    """What `bench.py plan` is asked. Raises UserError where its parts contradict each other."""

    preset: str  # name of the model
    work: Work  # a step; each plan splits it in another way
    machine: Machine
    gpus: int
    wanted: dict[str, object]  # values of search.FILTERS that plans must have, None for any
    adapters: LoRA | None  # None: all weights are trained
    base_bits: int = 16

    def __post_init__(self):
        machine, work, gpus, per_node = self.machine, self.work, self.gpus, self.machine.per_node
        recipe, longest = work.parallel.float8, work.model.config.max_seq_len
        if self.adapters and recipe != "none":
            raise UserError("--float8 is for training all weights: leave out --lora")
        if recipe not in ("none", *machine.recipes):
            known = f"of 8 bits it has {', '.join(machine.recipes) or 'nothing'}"
            if machine.measured:
                known = "bench.py comm does not measure products in 8 bits"
            raise UserError(f"no plan with --float8 {recipe} for {machine.name}: {known}")
        if gpus > per_node and gpus % per_node:
            nodes = math.ceil(gpus / per_node)
            raise UserError(
                f"--gpus {gpus} is no multiple of --per-node {per_node}: give --gpus "
                f"{nodes * per_node} for {nodes} full nodes"
            )
        if work.seq_len > longest:
            raise UserError(
                f"--seq-len {work.seq_len} is longer than the {longest} tokens of {self.preset}: "
                f"give at most {longest}"
            )
        if work.document > work.seq_len:
            raise UserError(f"--document-length {work.document} exceeds --seq-len {work.seq_len}")

    @property
    def per_node(self) -> int:
        return min(self.gpus, self.machine.per_node)

    def plans(self) -> Iterator[Plan]:
        in_4_bits = any(not p.is_floating_point() for p in self.work.model.parameters())
        more = [nf4.TECHNIQUE] if in_4_bits else []
        return every_plan(self.work, self.gpus, self.machine, self.wanted, *more)

    def fits(self, **changes) -> bool:
        """Return whether some plan fits in memory, with other values of some fields."""
        return any(plan.fits for plan in replace(self, **changes).plans())


def plan_cluster(
    question: Question,
    top: int,
    tokens: float | None,
    dollars: float | None,
    json_file: Path | None,
    check: bool,
) -> str:
    """Return the output of `bench.py plan`: the best plans of `top` meshes, and what a run on
    `tokens` takes, and costs at so many `dollars` for a GPU and hour. With `json_file`, also write
    all plans to it; with `check`, emulate the best.

    Raises UserError where no plan exists or none fits in memory."""
    check_writable("--json", json_file)
    gc.freeze()  # else each of many garbage collections walks all of torch
    plans = sorted(question.plans(), key=order)
    if not plans:
        raise UserError(explain_no_plan(question))
    if not plans[0].fits:
        smallest = min(plans, key=lambda plan: plan.memory["peak"])
        raise UserError(explain_nothing_fits(question, smallest))
    if json_file:  # here alone each plan is timed, whether it fits or not
        write_json(json_file, [json_row(plan) for plan in sorted(plans, key=lambda p: p.seconds)])
    # Of plans with the same mesh, as of DDP and ZeRO-1, only the best of all stays.
    best_of_mesh = {}
    for plan in plans:
        sizes = tuple(getattr(plan.work.parallel, dim) for dim in DIMS)
        best_of_mesh.setdefault(sizes, plan)
    best, shown = plans[0], list(best_of_mesh.values())[:top]
    lines = [
        headline(question, len(plans)),
        "",
        *table(shown, question.machine),
        "",
        f"{len(shown)} of {len(best_of_mesh)} meshes; --top shows more, --json FILE has all plans.",
        *([about_run(best, tokens, dollars)] if tokens else []),
        describe_best(best),
        *filter(None, [prediction_note()]),
        "",
        *commands(best, question),
    ]
    if check:
        lines += ["", *emulation_table(best.work)]
    return "\n".join(lines)


# ------------------------------------------------------------------------------ reasons in words

PART_NAMES = {
    "products": "matrix products",
    "recompute": "recomputation",
    "passes": "memory-bound operations",
    "optimizer": "the optimizer",
    "handling": "FSDP overhead",
    "to the CPU": "waiting for the CPU's memory",
    "pp": "waiting for other stages",
    "tp": "waiting for tp",
    "cp": "waiting for keys and values",
    "shard": "waiting for shard",
    "replicate": "waiting for replicate",
}


def reason(plan: Plan, best: Plan, machine: Machine) -> str:
    """Return why a plan loses against the best: the memory that it lacks, or the part of a step
    that takes the most additional time. Within the error of predictions it is a tie."""
    if not plan.fits:
        return memory_needed(plan, machine)
    if plan is best:
        return "the fastest"
    additional = {part: s - best.parts.get(part, 0.0) for part, s in plan.parts.items()}
    part = max(additional, key=additional.get)
    if not machine.measured and plan.seconds < best.seconds * (
        1 + SPREAD[kind_of(plan.work.parallel)]
    ):
        return f"a tie, {additional[part]:+.2g} s of {PART_NAMES[part]}"
    return f"{additional[part]:+.2g} s of {PART_NAMES[part]}"


def memory_needed(plan: Plan, machine: Machine) -> str:
    """Describe the memory that a plan needs, the usable memory, and the two largest kinds."""
    kinds = {kind: nbytes for kind, nbytes in plan.memory.items() if kind != "peak"}
    largest = sorted(kinds, key=kinds.get, reverse=True)[:2]
    mostly = " and ".join(f"{kinds[kind] / 1e9:,.3g} for {kind}" for kind in largest)
    usable = USABLE_FRACTION * machine.memory / 1e9
    return f"needs {plan.memory['peak'] / 1e9:,.4g} GB of {usable:,.4g}: {mostly}"


def explain_no_plan(question: Question) -> str:
    """Return the error message for flags that leave no plan."""
    config, batch, gpus = question.work.model.config, question.work.batch, question.gpus
    given = {name: value for name, value in question.wanted.items() if value}
    largest = math.gcd(gpus, config.n_kv_heads, config.ffn_dim)
    tp = given.get("tp", largest)
    data_ranks, rest = divmod(gpus, tp * given.get("pp", 1) * given.get("cp", 1))
    if not rest and batch % data_ranks:
        return (
            f"--batch {batch} is no multiple of the {data_ranks} ranks that share it with "
            f"--tp {tp}: use --batch {math.ceil(batch / data_ranks) * data_ranks}"
        )
    flags = {f"--{name.replace('_', '-')}": value for name, value in given.items()}
    fixed = " ".join(flag if value is True else f"{flag} {value}" for flag, value in flags.items())
    return f"no plan for --batch {batch} on {gpus} GPUs has {fixed}: leave out some of these flags"


def savings(question: Question) -> Iterator[tuple[str, str, dict]]:
    """Yield changes that save memory, of each kind the smallest first: the kind, the flags, and the
    fields of the question that they change."""
    work, machine = question.work, question.machine

    def changed(**fields) -> dict:
        return dict(work=replace(work, parallel=replace(work.parallel, **fields)))

    yield "state", "--moments bfloat16", changed(optimizer="adamw", moments="bfloat16")
    if question.adapters:
        model = build_on_meta(work.model.config, question.adapters, base_bits=4)
        yield "base", "--base-bits 4", dict(work=replace(work, model=model))
    elif work.parallel.dp != "diloco":
        yield "state", "--optimizer muon", changed(optimizer="muon", moments="float32")
    for factor in () if machine.measured else (2, 4, 8, 16, 32, 64):
        gpus = question.gpus * factor
        if gpus <= machine.per_node or gpus % machine.per_node == 0:
            larger = replace(work, batch=max(work.batch, gpus))
            yield "GPUs", f"--gpus {gpus} --batch {larger.batch}", dict(gpus=gpus, work=larger)
    seq_len = work.seq_len
    while seq_len > 512 and seq_len // 2 >= work.document:
        seq_len //= 2
        yield "length", f"--seq-len {seq_len}", dict(work=replace(work, seq_len=seq_len))


def explain_nothing_fits(question: Question, smallest: Plan) -> str:
    """Return the error message where no plan fits in memory: what the smallest plan needs, and
    which smaller state or base, larger cluster, shorter sequence or larger GPU would do."""
    remedies = {}
    for kind, flags, fields in savings(question):
        if kind not in remedies and question.fits(**fields):
            remedies[kind] = flags
    needed = smallest.memory["peak"] / USABLE_FRACTION / 1e9  # GB, as in data sheets
    large = [name for name, gpu in GPUS.items() if gpu.memory >= needed]
    if large and not question.machine.measured:
        remedies["GPU"] = f"--gpu {large[0]}"
    return (
        f"nothing fits: a GPU of the smallest plan ({short_name(smallest)}) "
        f"{memory_needed(smallest, question.machine)}; what would fit: "
        f"{', or '.join(remedies.values()) or 'a smaller model'}"
    )


# ------------------------------------------------------------------------------------------ output


def headline(question: Question, n_plans: int) -> str:
    work, machine = question.work, question.machine
    rates = (
        f"{machine.peak * machine.matmul_fraction / 1e12:,.3g} TFLOP/s of matrix products, "
        f"{machine.bandwidth / 1e9:,.0f} GB/s of memory bandwidth"
    )
    if not machine.measured:
        rates += (
            f", {machine.node_link / 1e9:,.0f} GB/s within a node of {question.per_node}, "
            f"{machine.link / 1e9:,.3g} GB/s per GPU to other nodes"
        )
    else:
        rates += ", links; assumed: that attention is as fast as other products"
    dtype, float8 = str(work.parallel.dtype).removeprefix("torch."), work.parallel.float8
    if float8 != "none":
        dtype += f" and {float8} float8"
    if lora := question.adapters:
        dtype += f", {'DoRA' if lora.dora else 'LoRA'} of rank {lora.rank} beside a frozen base"
        dtype += " in 4 bits" * (question.base_bits == 4)
    return (
        f"{question.preset}, {work.batch} x {work.seq_len} tokens a step, {dtype}, "
        f"on {question.gpus} x {machine.name} "
        f"({'measured' if machine.measured else 'as published steps reach it'}: {rates}). "
        f"Of {n_plans:,} plans the best of each mesh:"
    )


def table(ranked: list[Plan], machine: Machine) -> list[str]:
    """Return the lines of a table: memory of a rank, and what it sends in a step; in a pipeline, of
    the rank with the most."""
    rows = []
    for plan in ranked:
        work, parallel = plan.work, plan.work.parallel
        flops = flops_per_token(work.model, work.document or work.seq_len)
        mfu = "unknown"  # as is the peak of a measured machine
        if not machine.measured:
            mfu = f"{flops * plan.tokens_per_second / machine.peak:.1%}"
        state = ("parameters", "gradients", "optimizer")
        gigabytes = {
            "weights, gradients, AdamW": sum(plan.memory[kind] for kind in state),
            **{kind: plan.memory[kind] for kind in ("gathered", "activations", "peak")},
            "sends over pp": plan.sent.get("pp", 0),
            **{dim: plan.sent.get(dim, 0) for dim in DIMS[1:]},
        }
        rows.append(
            {
                "pp (schedule) x replicate x shard x tp": plan.mesh,
                "--dp": parallel.dp,
                "checkpointing": activations(parallel),
                "microbatch": work.microbatch,
                "reshard": parallel.reshard if parallel.shard > 1 else "-",
                **{f"{name} GB": f"{nbytes / 1e9:,.3g}" for name, nbytes in gigabytes.items()},
                "step s": f"{plan.seconds:,.3g}{error_bar(plan)}",
                "MFU": mfu,
                "reason": reason(plan, ranked[0], machine),
            }
        )
    return markdown_table([*rows[0]], [[*row.values()] for row in rows])


def error_bar(plan: Plan) -> str:
    return "" if plan.machine.measured else f" ±{SPREAD[kind_of(plan.work.parallel)]:.0%}"


def json_row(plan: Plan) -> dict:
    """Return a plan as --json writes it, in bytes and seconds."""
    names = "dp schedule stages_per_rank reshard checkpointing offload_activations".split()
    return {name: getattr(plan.work.parallel, name) for name in (*DIMS, *names)} | {
        "microbatch": plan.work.microbatch,
        "fits": plan.fits,
        "bytes": plan.memory,
        "sent": plan.sent,
        "seconds": plan.seconds,
        "parts": plan.parts,
        "tokens_per_second_per_gpu": plan.tokens_per_second,
    }


def short_name(plan: Plan) -> str:
    parallel = plan.work.parallel
    return (
        f"{plan.mesh} with --dp {parallel.dp}, checkpointing {activations(parallel)}, "
        f"microbatches of {plan.work.microbatch}"
    )


def activations(parallel: ParallelConfig) -> str:
    return parallel.checkpointing + " and offloaded" * parallel.offload_activations


def about_run(plan: Plan, tokens: float, dollars: float | None) -> str:
    """Return in a sentence what training on so many tokens takes."""
    work = plan.work
    hours = tokens / (work.batch * work.seq_len) * plan.seconds / 3600
    gpu_hours = hours * work.parallel.size
    cost = f", ${gpu_hours * dollars:,.0f}" if dollars else ""
    return (
        f"{tokens:.4g} tokens take {hours / 24:,.1f} days{error_bar(plan)}, "
        f"{gpu_hours:,.0f} GPU-hours{cost}."
    )


def describe_best(plan: Plan) -> str:
    """Return the best plan in a sentence, with the share of each part in its time."""
    parts = sorted(plan.parts.items(), key=lambda item: -item[1])
    shares = ", ".join(
        f"{PART_NAMES[part]} {seconds / plan.seconds:.0%}" for part, seconds in parts if seconds
    )
    return (
        f"Best: {short_name(plan)}: {plan.seconds:,.3g} s{error_bar(plan)} a step, "
        f"{plan.tokens_per_second:,.0f} tokens/s per GPU. Its time: {shares}. Start it with:"
    )


def commands(plan: Plan, question: Question) -> list[str]:
    """Return the lines that start a plan: the command of the first node, and of the others."""
    work, parallel, lora = plan.work, plan.work.parallel, question.adapters
    nodes, per_node = question.gpus // question.per_node, question.per_node
    what = f"train.py --model {question.preset}"
    if lora:
        what = f"finetune_lora.py --init BASE --data CHATS.jsonl --rank {lora.rank}"
        what += " --base-bits 4" * (question.base_bits == 4) + " --dora" * lora.dora
    train = (
        f"{what} --batch {work.batch} --microbatch {work.microbatch} --seq-len {work.seq_len} "
        f"{flags_of(parallel)}"
    )
    train += " --document-mask" * (work.document > 0 and not lora)  # else always
    if nodes == 1:
        return [f"torchrun --nproc-per-node {per_node} {train}"]
    place = f"--nnodes {nodes} --nproc-per-node {per_node} --node-rank 0 --master-addr HOST"
    others = "1" if nodes == 2 else f"1 to {nodes - 1}"
    return [
        f"torchrun {place} {train}",
        f"and on the other nodes the same with --node-rank {others}",
    ]


def emulation_table(planned: Work) -> list[str]:
    """Return the lines of the table for --check: what rank 0 of a plan communicates and holds,
    predicted and counted in an emulated step (see instruments.emulate).

    The emulation runs uncompiled blocks on a CPU, so the prediction here is for those."""
    parallel = replace(planned.parallel, compile=False)
    work = replace(planned, parallel=parallel, document=0, on_gpu=False)
    traffic, memory = sends(work, 0), holds(work, 0)
    if needs_real_tensors(parallel) and memory["peak"] > 4e9:
        return [
            f"--check: not done, since --dp {parallel.dp} can be emulated only with real tensors, "
            f"and these would take {memory['peak'] / 1e9:,.3g} GB (at most 4 are allowed)"
        ]
    counted_traffic, counted_memory = emulate(work)
    rows = []
    for dim, collective in sorted(traffic | counted_traffic):
        costs = (source.get((dim, collective), (0, 0)) for source in (traffic, counted_traffic))
        cells = [f"{nbytes:,} bytes in {calls:,} calls" for calls, nbytes in costs]
        rows.append([f"payload of {collective} over {dim}", *cells])
    for kind, nbytes in counted_memory.items():
        rows.append([kind, f"{memory[kind]:,} bytes", f"{nbytes:,} bytes"])
    return markdown_table(["emulated, in one process", "predicted", "counted"], rows)
