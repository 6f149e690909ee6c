"""`bench.py plan`: predict memory, traffic and time of every plan for a cluster, on a laptop.

    python bench.py plan --model llama3.1-8b --gpus 16     a cluster known from data sheets
    python bench.py plan --measured comm.json              the cluster that bench.py comm measured

A plan is a data-parallel strategy on a mesh of pp x replicate x shard x tp ranks, a pipeline's
schedule, a treatment of activations, a microbatch size and a value of --reshard
(costs/search.py). costs/ predicts its memory, its traffic and its time. The output is a table
with the best plan of each mesh and the reason why it loses against the best of all, then the
command that starts the best.
"""

import argparse
import json
import math
from dataclasses import replace

from costs.choose import USABLE_FRACTION
from costs.devices import GPUS
from costs.memory import predict_memory, prediction_caveat
from costs.search import FILTERS, Plan, every_plan, order
from costs.seconds import (
    Machine,
    assumed_machine,
    measured_machine,
    read_measurement,
)
from costs.traffic import DIMS, flops_per_token, predict_traffic
from model import PRESETS, Llama, LlamaConfig
from parallel import STRATEGIES, ParallelConfig
from perf.instruments import (
    adapters_of,
    build_on_meta,
    emulate,
    markdown_table,
    needs_real_tensors,
    problem_with_files,
)
from plumbing.processes import UserError
from runs.records import write_atomically


def plan_cluster(args: argparse.Namespace) -> str:
    """Return the output of `bench.py plan`; with --json, also write all plans to a file.

    Raises UserError where no plan exists or none fits in memory."""
    if args.measured:
        report = read_measurement(args.measured)
        machine, computed = measured_machine(report), report["compute"]
        args.gpus, args.per_node = report["ranks"], report["per_node"]
        defaults = {name: computed[name] for name in ("model", "seq_len", "dtype")}
        defaults["compile"] = False
    else:
        machine = assumed_machine(args.gpu, args.link, args.per_node)
        defaults = dict(model="llama3.1-8b", seq_len=8192, dtype="bfloat16", compile=True)
    for name, value in defaults.items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    args.batch = args.batch or 2 * args.gpus
    check_flags(args, machine)
    args.per_node = min(args.gpus, args.per_node)
    model = build_on_meta(PRESETS[args.model], *adapters_of(args))
    plans = sorted(every_plan(model, args, machine), key=order)
    if not plans:
        raise UserError(explain_no_plan(args, model.config))
    if not plans[0].fits:
        raise UserError(explain_nothing_fits(args, model, plans[0], machine))
    if args.json:
        rows = [json_row(plan, args) for plan in sorted(plans, key=lambda plan: plan.seconds)]
        write_atomically(args.json, json.dumps(rows, indent=1) + "\n")
    # Of plans with the same mesh, as of DDP and ZeRO-1, only the best of all stays.
    best_of_mesh = {}
    for plan in plans:
        sizes = tuple(getattr(plan.parallel, dim) for dim in DIMS)
        best_of_mesh.setdefault(sizes, plan)
    best, shown = plans[0], list(best_of_mesh.values())[: args.top]
    lines = [
        headline(args, machine, len(plans)),
        "",
        *table(shown, model, args, machine),
        "",
        f"{len(shown)} of {len(best_of_mesh)} meshes; --top shows more, --json FILE has all plans.",
        *([longest_that_fits(model, args, machine)] if args.lora else []),
        describe_best(best, args),
        *filter(None, [prediction_caveat(model)]),
        "",
        *commands(best, args),
    ]
    if args.check:
        lines += ["", *emulation_table(best, model, args)]
    return "\n".join(lines)


def check_flags(args: argparse.Namespace, machine: Machine) -> None:
    """Raise UserError where flags contradict each other or the machine, or --json cannot be
    written."""
    if args.lora and args.float8 != "none":
        raise UserError("--float8 is for training all weights: leave out --lora")
    if args.float8 != "none" and args.float8 not in machine.recipes:
        known = f"of 8 bits it has {', '.join(machine.recipes) or 'nothing'}"
        reason = "bench.py comm does not measure products in 8 bits" if args.measured else known
        raise UserError(f"no plan with --float8 {args.float8} for {machine.name}: {reason}")
    if args.gpus > args.per_node and args.gpus % args.per_node:
        nodes = math.ceil(args.gpus / args.per_node)
        raise UserError(
            f"--gpus {args.gpus} is no multiple of --per-node {args.per_node}: give --gpus "
            f"{nodes * args.per_node} for {nodes} full nodes"
        )
    max_seq_len = PRESETS[args.model].max_seq_len
    if args.seq_len > max_seq_len:
        raise UserError(
            f"--seq-len {args.seq_len} is longer than the {max_seq_len} tokens of {args.model}: "
            f"give at most {max_seq_len}"
        )
    if args.document_length > args.seq_len:
        raise UserError(
            f"--document-length {args.document_length} exceeds --seq-len {args.seq_len}"
        )
    if problem := problem_with_files({"--json": args.json}):
        raise UserError(problem)


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
    that takes the most additional time."""
    if not plan.fits:
        return memory_needed(plan, machine)
    if plan is best:
        return "the fastest"
    additional = {part: s - best.parts.get(part, 0.0) for part, s in plan.parts.items()}
    part = max(additional, key=additional.get)
    return f"{additional[part]:+.2g} s of {PART_NAMES[part]}"


def memory_needed(plan: Plan, machine: Machine) -> str:
    """Describe the memory that a plan needs, the usable memory, and the two largest kinds."""
    kinds = {kind: nbytes for kind, nbytes in plan.memory.items() if kind != "peak"}
    largest = sorted(kinds, key=kinds.get, reverse=True)[:2]
    mostly = " and ".join(f"{kinds[kind] / 1e9:,.3g} for {kind}" for kind in largest)
    usable = USABLE_FRACTION * machine.memory / 1e9
    return f"needs {plan.memory['peak'] / 1e9:,.4g} GB of {usable:,.4g}: {mostly}"


def explain_no_plan(args: argparse.Namespace, config: LlamaConfig) -> str:
    """Return the error message for flags that leave no plan."""
    tp = args.tp or math.gcd(args.gpus, config.n_kv_heads, config.ffn_dim)  # the largest possible
    data_ranks, rest = divmod(args.gpus, tp * (args.pp or 1) * (args.cp or 1))
    if not rest and args.batch % data_ranks:
        return (
            f"--batch {args.batch} is no multiple of the {data_ranks} ranks that share it with "
            f"--tp {tp}: use --batch {math.ceil(args.batch / data_ranks) * data_ranks}"
        )
    given = {name: getattr(args, name) for name in FILTERS if getattr(args, name)}
    flags = {f"--{name.replace('_', '-')}": value for name, value in given.items()}
    fixed = " ".join(flag if value is True else f"{flag} {value}" for flag, value in flags.items())
    return (
        f"no plan for --batch {args.batch} on {args.gpus} GPUs has {fixed}: leave out some of "
        f"these flags"
    )


def explain_nothing_fits(
    args: argparse.Namespace, model: Llama, smallest: Plan, machine: Machine
) -> str:
    """Return the error message where no plan fits in memory: what the smallest plan needs, and
    which smaller moments or base, larger cluster, shorter sequence or larger GPU would do."""

    def fits(**changes) -> bool:
        changed = argparse.Namespace(**vars(args) | changes)
        base = build_on_meta(model.config, *adapters_of(changed)) if args.lora else model
        return any(plan.fits for plan in every_plan(base, changed, machine))

    peak = smallest.memory["peak"]
    clusters, gpus = [], []
    if not machine.measured:
        clusters = [args.gpus * factor for factor in (2, 4, 8, 16, 32, 64)]
        gpus = [name for name, gpu in GPUS.items() if gpu.memory * 1e9 * USABLE_FRACTION >= peak]
    remedies = []
    if fits(optimizer="adamw", moments="bfloat16"):
        remedies = ["--moments bfloat16"]
    elif not args.lora and fits(optimizer="muon", moments="float32"):
        remedies = ["--optimizer muon"]
    remedies += ["--base-bits 4"] if args.lora and fits(base_bits=4) else []
    for size in clusters:
        full_nodes = size <= machine.per_node or size % machine.per_node == 0
        batch = max(args.batch, size)
        if full_nodes and fits(gpus=size, batch=batch):
            remedies.append(f"--gpus {size} --batch {batch}")
            break
    seq_len = args.seq_len
    while seq_len > 512:
        seq_len //= 2
        if fits(seq_len=seq_len):
            remedies.append(f"--seq-len {seq_len}")
            break
    remedies += [f"--gpu {name}" for name in gpus[:1]]
    return (
        f"nothing fits: a GPU of the smallest plan ({short_name(smallest)}) "
        f"{memory_needed(smallest, machine)}; what would fit: "
        f"{', or '.join(remedies) or 'a smaller model'}"
    )


# ------------------------------------------------------------------------------------------ output


def headline(args: argparse.Namespace, machine: Machine, n_plans: int) -> str:
    rates = (
        f"{machine.peak * machine.matmul_fraction / 1e12:,.3g} TFLOP/s of matrix products, "
        f"{machine.bandwidth / 1e9:,.0f} GB/s of memory bandwidth"
    )
    if not machine.measured:
        rates += (
            f", {machine.node_link / 1e9:,.0f} GB/s within a node of {args.per_node}, "
            f"{machine.link / 1e9:,.3g} GB/s per GPU to other nodes"
        )
    return (
        f"{args.model}, {args.batch} x {args.seq_len} tokens a step, {args.dtype}"
        f"{f' and {args.float8} float8' if args.float8 != 'none' else ''}"
        f"{describe_adapters(args)}, on {args.gpus} "
        f"x {machine.name} ({'measured' if machine.measured else 'assumed'}: {rates}). "
        f"Of {n_plans:,} plans the best of each mesh:"
    )


def describe_adapters(args: argparse.Namespace) -> str:
    """Return what is trained, if not all weights."""
    if not args.lora:
        return ""
    kind = f"{'DoRA' if args.dora else 'LoRA'} of rank {args.rank}"
    return f", {kind} beside a frozen base" + " in 4 bits" * (args.base_bits == 4)


def longest_that_fits(model: Llama, args: argparse.Namespace, machine: Machine) -> str:
    """Return in a line how long sequences can be, with one a step and GPU, by doubling."""
    seq_len = args.seq_len
    while seq_len < model.config.max_seq_len:
        longer = argparse.Namespace(**vars(args) | dict(seq_len=2 * seq_len, batch=args.gpus))
        if not any(plan.fits for plan in every_plan(model, longer, machine)):
            break
        seq_len *= 2
    most = " (the most that the model takes)" if seq_len >= model.config.max_seq_len else ""
    return f"With --batch {args.gpus}, sequences of --seq-len {seq_len} fit{most}."


def table(
    ranked: list[Plan], model: Llama, args: argparse.Namespace, machine: Machine
) -> list[str]:
    """Return the lines of a table: memory of a rank, and what it sends in a step; in a pipeline, of
    the rank with the most."""
    headings = (
        "pp (schedule) x replicate x shard x tp | --dp | checkpointing | microbatch | reshard "
        "| weights, gradients, AdamW GB | gathered GB | activations GB | peak GB "
        "| sends over pp GB | replicate GB | shard GB | cp GB | tp GB | step s | MFU | reason"
    ).split(" | ")
    rows = []
    for plan in ranked:
        parallel = plan.parallel
        flops = flops_per_token(model, args.document_length or args.seq_len, parallel)
        gigabytes = {kind: nbytes / 1e9 for kind, nbytes in plan.memory.items()}
        state = gigabytes["parameters"] + gigabytes["gradients"] + gigabytes["optimizer"]
        mfu = "unknown"  # as is the peak of a measured machine
        if not machine.measured:
            mfu = f"{flops * tokens_per_second_per_gpu(plan, args) / machine.peak:.1%}"
        rows.append(
            [
                plan.mesh,
                parallel.dp,
                activations(parallel),
                plan.microbatch,
                parallel.reshard if parallel.shard > 1 else "-",
                f"{state:,.3g}",
                f"{gigabytes['gathered']:,.3g}",
                f"{gigabytes['activations']:,.3g}",
                f"{gigabytes['peak']:,.3g}",
                *(f"{plan.sent.get(dim, 0) / 1e9:,.3g}" for dim in DIMS),
                f"{plan.seconds:,.3g}",
                mfu,
                reason(plan, ranked[0], machine),
            ]
        )
    return markdown_table(headings, rows)


def tokens_per_second_per_gpu(plan: Plan, args: argparse.Namespace) -> float:
    return args.batch * args.seq_len / plan.seconds / args.gpus


def json_row(plan: Plan, args: argparse.Namespace) -> dict:
    """Return a plan as --json writes it, in bytes and seconds."""
    names = "dp schedule stages_per_rank reshard checkpointing offload_activations".split()
    names = (*DIMS, *names)
    return {name: getattr(plan.parallel, name) for name in names} | {
        "microbatch": plan.microbatch,
        "fits": plan.fits,
        "bytes": plan.memory,
        "sent": plan.sent,
        "seconds": plan.seconds,
        "parts": plan.parts,
        "tokens_per_second_per_gpu": tokens_per_second_per_gpu(plan, args),
    }


def short_name(plan: Plan) -> str:
    return (
        f"{plan.mesh} with --dp {plan.parallel.dp}, checkpointing {activations(plan.parallel)}, "
        f"microbatches of {plan.microbatch}"
    )


def activations(parallel: ParallelConfig) -> str:
    return parallel.checkpointing + " and offloaded" * parallel.offload_activations


def describe_best(plan: Plan, args: argparse.Namespace) -> str:
    """Return the best plan in a sentence, with the share of each part in its time."""
    parts = sorted(plan.parts.items(), key=lambda item: -item[1])
    shares = ", ".join(
        f"{PART_NAMES[part]} {seconds / plan.seconds:.0%}" for part, seconds in parts if seconds
    )
    return (
        f"Best: {short_name(plan)}: {plan.seconds:,.3g} s a step, "
        f"{tokens_per_second_per_gpu(plan, args):,.0f} tokens/s per GPU. Its time: {shares}. "
        f"Start it with:"
    )


def commands(plan: Plan, args: argparse.Namespace) -> list[str]:
    """Return the lines that start a plan: the command of the first node, and of the others."""
    parallel, nodes = plan.parallel, args.gpus // args.per_node
    shard_is_a_flag = STRATEGIES[parallel.dp].copy_per == "node"
    flags = {
        "model": None if args.lora else args.model,
        "init": "BASE" if args.lora else None,
        "data": "CHATS.jsonl" if args.lora else None,
        "rank": args.rank if args.lora else None,
        "base-bits": 4 if args.base_bits == 4 else None,
        "batch": args.batch,
        "microbatch": plan.microbatch,
        "seq-len": args.seq_len,
        "dp": parallel.dp,
        "shard": parallel.shard if shard_is_a_flag else None,
        "tp": parallel.tp if parallel.tp > 1 else None,
        "cp": parallel.cp if parallel.cp > 1 else None,
        "pp": parallel.pp if parallel.pp > 1 else None,
        "schedule": parallel.schedule if parallel.pp > 1 else None,
        "stages-per-rank": parallel.stages_per_rank if parallel.stages_per_rank > 1 else None,
        "reshard": parallel.reshard if parallel.shard > 1 else None,
        "checkpointing": parallel.checkpointing,
        "dtype": args.dtype,
        "optimizer": None if args.lora else args.optimizer,
        "moments": args.moments if args.moments != "float32" else None,
        "float8": args.float8 if args.float8 != "none" else None,
    }
    train = " ".join(f"--{flag} {value}" for flag, value in flags.items() if value is not None)
    train += " --offload-activations" * parallel.offload_activations
    train += " --async-tp" * parallel.async_tp
    train += " --dora" * args.dora
    train += " --document-mask" * (args.document_length > 0 and not args.lora)  # else always
    script = "finetune_lora.py" if args.lora else "train.py"
    train = f"{script} {train} --{'' if args.compile else 'no-'}compile"
    if nodes == 1:
        return [f"torchrun --nproc-per-node {args.per_node} {train}"]
    first_node = (
        f"torchrun --nnodes {nodes} --nproc-per-node {args.per_node} --node-rank 0 "
        f"--master-addr HOST {train}"
    )
    others = "1" if nodes == 2 else f"1 to {nodes - 1}"
    return [first_node, f"and on the other nodes the same with --node-rank {others}"]


def emulation_table(plan: Plan, model: Llama, args: argparse.Namespace) -> list[str]:
    """Return the lines of the table for --check: what rank 0 of a plan communicates and holds,
    predicted and counted in an emulated step (see measure.emulate).

    The emulation runs uncompiled blocks on a CPU, so the prediction here is for those."""
    parallel = replace(plan.parallel, compile=False)
    sequences = args.batch * parallel.cp // (parallel.replicate * parallel.shard)
    microbatches = sequences // plan.microbatch
    given = parallel, microbatches, plan.microbatch, args.seq_len
    traffic = predict_traffic(model, *given, pp_rank=0)
    tokens = plan.microbatch * args.seq_len // parallel.cp
    memory = predict_memory(model, parallel, tokens, microbatches, pp_rank=0)
    if needs_real_tensors(parallel) and memory["peak"] > 4e9:
        return [
            f"--check: not done, since --dp {parallel.dp} can be emulated only with real tensors, "
            f"and these would take {memory['peak'] / 1e9:,.3g} GB (at most 4 are allowed)"
        ]
    counted_traffic, counted_memory = emulate(
        model, parallel, sequences, plan.microbatch, args.seq_len
    )
    rows = []
    for dim, collective in sorted(traffic | counted_traffic):
        cells = []
        for source in (traffic, counted_traffic):
            calls, nbytes = source.get((dim, collective), (0, 0))
            cells.append(f"{nbytes:,} bytes in {calls:,} calls")
        rows.append([f"payload of {collective} over {dim}", *cells])
    for kind, nbytes in counted_memory.items():
        rows.append([kind, f"{memory[kind]:,} bytes", f"{nbytes:,} bytes"])
    return markdown_table(["emulated, in one process", "predicted", "counted"], rows)
