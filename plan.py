"""`bench.py plan`: what every split of a model over a cluster would cost, told by a laptop.

For each mesh of replicate x shard x tp, with each kind of checkpointing, and each microbatch,
cost.py gives memory and bytes sent. The time of a step is estimated from a roofline: the sum of

    products      FLOPs / (peak x PRODUCTS); of attention, half the square, / (peak x ATTENTION)
    recompute     the same of what backward computes again
    passes        bytes that norms, RoPE, SwiGLU, sums, the loss and FSDP's copies read and write,
                  / memory's bandwidth
    handling      what FSDP's own code takes, where it was measured
    optimizer     bytes that clipping and AdamW read and write, / memory's bandwidth
    waiting       for each dimension of the mesh, what of its collectives computation does not hide

A collective takes its latency, and its bytes over each link at the link's speed. FSDP gathers the
next block's weights, and reduces the last one's gradients, while a block computes, and DDP reduces
what the last microbatch's backward has found: only what is longer waits, and what has nothing
beside it, the first and the last. Tensor parallelism waits always. gloo hides nothing.

What is assumed stands in the constants below. After `bench.py comm --model ...` has measured links
and computation, `--measured FILE` takes its word instead of theirs.

All times are seconds, all rates per second. Letters as in cost.py.
"""

import argparse
import itertools
import json
import math
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from cost import ROOM, memory, predict_traffic
from measure import emulate
from model import PEAK_FLOPS, PRESETS, Llama, LlamaConfig, UserError, flops_per_token
from parallel import Split
from train import write_whole

PRODUCTS = 0.7  # of a GPU's peak that large matrix products reach
ATTENTION = 0.5  # of it that attention reaches
EAGER = 2.0  # times the passes of compiled blocks that blocks take without
CALL = 10e-6  # seconds until a collective begins
HOP, FAR_HOP = 1e-6, 5e-6  # seconds from a rank to the next, within a node and to another one
CHECKPOINTING = ("none", "selective", "full")
SETTLED = ("shard", "tp", "reshard", "checkpointing", "microbatch")  # that flags can fix


@dataclass(frozen=True)
class Machine:
    """What a process computes with and talks over: from data sheets, or as it was measured."""

    name: str
    peak: float  # FLOP/s of dense products in bfloat16
    memory: float  # bytes
    bandwidth: float  # bytes/s of its memory
    node_link: float  # bytes/s to others of its node, one way
    link: float = math.inf  # bytes/s to other nodes, one way: of each GPU
    per_node: int = 8
    products: float = PRODUCTS
    attention: float = ATTENTION
    overlaps: bool = True
    handling: float = 0.0  # seconds a microbatch that FSDP's own work adds, where nothing hides it
    measured: dict | None = None  # of `bench.py comm`: group -> its ranks, and times by collective


# From the makers' data sheets: memory in GB, its bandwidth and the links within a node in GB/s.
GPUS = {
    "h100": ("H100", 80, 3350, 450),
    "h200": ("H200", 141, 4800, 450),
    "b200": ("B200", 180, 8000, 900),
    "a100": ("A100", 80, 2039, 300),
    "l40s": ("L40S", 48, 864, 32),
    "rtx4090": ("RTX 4090", 24, 1008, 32),
    "mi300x": ("MI300X", 192, 5300, 448),
}
NUMBER = r"(?=[\d.]*[1-9])\d+(?:\.\d+)?"  # above 0
LINKS = {"ndr": 400e9 / 8, "hdr": 200e9 / 8, "edr": 100e9 / 8, "efa-p5": 400e9 / 8}


def machine_of(gpu: str, link: str, per_node: int) -> Machine:
    """From names, or from numbers: a GPU as TFLOP/s:GB:GB/s:GB/s, a link as 400gbit or 50GB."""
    if gpu.lower() in GPUS:
        peak_name, gigabytes, bandwidth, node_link = GPUS[gpu.lower()]
        numbers = PEAK_FLOPS[peak_name] / 1e12, gigabytes, bandwidth, node_link
    elif re.fullmatch(rf"{NUMBER}(:{NUMBER}){{3}}", gpu):
        numbers = tuple(map(float, gpu.split(":")))
    else:
        raise UserError(
            f"no GPU '{gpu}': choose one of {', '.join(GPUS)}, or give its peak, memory, memory's "
            f"bandwidth and links within a node as TFLOP/s:GB:GB/s:GB/s, such as 989:80:3350:450"
        )
    peak, gigabytes, bandwidth, node_link = numbers
    return Machine(
        gpu,
        peak * 1e12,
        gigabytes * 1e9,
        bandwidth * 1e9,
        node_link * 1e9,
        link_speed(link),
        per_node,
    )


def link_speed(text: str) -> float:
    """Bytes/s of a link by its name or speed."""
    units = {"mbit": 1e6 / 8, "gbit": 1e9 / 8, "mb": 1e6, "gb": 1e9}
    found = re.fullmatch(rf"({NUMBER})(mbit|gbit|mb|gb)(/s)?", text.lower())
    if text.lower() not in LINKS and not found:
        raise UserError(
            f"no link '{text}': choose one of {', '.join(LINKS)}, or give its speed for each GPU, "
            f"such as 400gbit or 50GB"
        )
    return LINKS[text.lower()] if not found else float(found[1]) * units[found[2]]


def read_measurement(file: Path) -> dict:
    """What `bench.py comm --model NAME --out FILE` wrote."""
    try:
        report = json.loads(file.read_text())
        problem = None if report["compute"] else "it was run without --model"
        if not problem:
            measured_machine(report)  # which has all it wants
            return report
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        problem = repr(error)
    raise UserError(f"{file} is no result of bench.py comm --model NAME --out FILE: {problem}")


def measured_machine(report: dict) -> Machine:
    """The machine that was measured.

    Its training step's two rates follow from two times: AdamW's passes over memory give the
    bandwidth, and what forward and backward take beyond passes, the products."""
    computed = report["compute"]
    config = LlamaConfig(**computed["config"])
    split, tokens = Split(dtype=getattr(torch, computed["dtype"])), computed["tokens"]
    with torch.device("meta"):
        parameters = sum(p.numel() for p in Llama(config).parameters())
    bandwidth = UPDATE * parameters / computed["update"]
    machine = Machine(
        report["device"],
        peak=1.0,
        memory=report["memory"],
        bandwidth=bandwidth,
        node_link=math.inf,
        per_node=report["per_node"],
        products=1.0,
        attention=1.0,
        overlaps=report["backend"] == "nccl",
        handling=max(0.0, computed["forward_backward_in_fsdp"] - computed["forward_backward"]),
        measured=report["groups"],
    )
    unit = compute_time(config, split, tokens, computed["seq_len"], machine, compiled=False)
    passes = unit["passes"]
    rate = unit["products"] / max(computed["forward_backward"] - passes, 0.1 * passes)
    return replace(machine, peak=rate)


# ------------------------------------------------------------------------------ the time of a step

UPDATE = 40  # bytes a parameter: the norm reads 4, scaling 4 + 4, AdamW 4 x 4, and writes 3 x 4


def compute_time(
    config: LlamaConfig, split: Split, tokens: int, seq_len: int, machine: Machine, compiled: bool
) -> dict[str, float]:
    """Seconds of a microbatch's forward and backward on one rank, but for communication."""
    D, F, K = config.dim, config.ffn_dim, config.n_kv_heads * config.head_dim
    L, w = config.n_layers, split.weight_bytes
    block = 2 * (2 * D * (D + K) + 3 * D * F)  # FLOPs a token of its products
    again = {"none": 0, "selective": 2 * D * (D + K + F), "full": block}[split.checkpointing]
    head = 2 * D * config.vocab_size
    attention = 2 * seq_len * D  # of scores and sums, over half of the square
    again_attention = attention * (split.checkpointing == "full")
    rate, attention_rate = machine.peak * machine.products, machine.peak * machine.attention

    # Numbers a token that go to and from memory: norms 4 D, sums 6 D, RoPE 2 (D + K), SwiGLU 3 F.
    forward = w * (12 * D + 2 * K + 3 * F) * (1.0 if compiled else EAGER)
    loss = (2 * w + 16) * config.vocab_size  # logits, softmax, its exponential, the gradient
    passes = L * (3 * forward + forward * (split.checkpointing != "none")) + loss
    share = tokens / split.tp
    return {
        # Backward has two products for each of forward's; attention's also computes scores again.
        "products": share * (3 * (L * block + head) / rate + 3.5 * L * attention / attention_rate),
        "recompute": share * L * (again / rate + again_attention / attention_rate),
        "passes": share * passes / machine.bandwidth,
    }


def step_time(
    model: Llama,
    split: Split,
    microbatch: int,
    microbatches: int,
    seq_len: int,
    machine: Machine,
) -> dict[str, float]:
    """Seconds of a training step by what it does, waiting for each dimension included."""
    config, tokens = model.config, microbatch * seq_len
    parts = compute_time(config, split, tokens, seq_len, machine, split.compile)
    parts = {name: seconds * microbatches for name, seconds in parts.items()}
    held = memory(model, split, tokens, microbatches)
    parts["optimizer"] = UPDATE / 4 * held["gradients"] / machine.bandwidth
    parts["handling"] = machine.handling * microbatches * split.fully_sharded
    sent = predict_traffic(model, split, microbatches, microbatch, seq_len)
    if split.shard > 1:  # what is gathered and cut is also copied into place, there and back
        copied = sum(nbytes for (dim, _), (_, nbytes) in sent.items() if dim == "shard")
        parts["passes"] += 2 * copied / machine.bandwidth

    backward = 2 / 3 * parts["products"] + parts["recompute"] + 2 / 3 * parts["passes"]
    hides = {
        "replicate": backward / microbatches,  # of the last microbatch, which alone sends
        "shard": parts["products"] + parts["recompute"] + parts["passes"],
        "tp": 0.0,
    }
    for dim in ("tp", "shard", "replicate"):
        takes, edge = 0.0, 0.0  # in all, and what has nothing to hide behind
        for (along, collective), (calls, nbytes) in sent.items():
            if along == dim:
                one = collective_time(collective, nbytes / calls, dim, split, machine)
                takes += calls * one
                edge += one * (2 if dim == "shard" else 1)  # the root, and a block
        hidden = min(max(0.0, takes - edge), hides[dim]) if machine.overlaps else 0.0
        parts[dim] = takes - hidden
    return parts


def collective_time(
    collective: str, nbytes: float, dim: str, split: Split, machine: Machine
) -> float:
    """Seconds of one collective of so many bytes over a dimension of the mesh.

    In a ring each rank sends (n - 1)/n of its payload to the next, in an all-reduce twice. Where a
    group has several ranks in a node, as many of the node's links carry it to the next node."""
    n, in_node = group_of(dim, split, machine)
    if machine.measured:
        return measured_time(
            machine.measured[kind(n, in_node, machine)]["times"][collective], nbytes
        )
    nodes = n / in_node
    speed = machine.node_link if nodes == 1 else in_node * machine.link
    if in_node > 1:
        speed = min(speed, machine.node_link)
    rounds = 2 if collective == "all-reduce" else 1
    hops = (n - nodes) * HOP + (nodes if nodes > 1 else 0) * FAR_HOP
    return CALL + rounds * (hops + (n - 1) / n * nbytes / speed)


def group_of(dim: str, split: Split, machine: Machine) -> tuple[int, int]:
    """How many ranks a group along a dimension has, and how many of them share a node."""
    n = {"tp": split.tp, "shard": split.shard, "replicate": split.replicate}[dim]
    stride = {"tp": 1, "shard": split.tp, "replicate": split.tp * split.shard}[dim]
    return n, max(1, math.gcd(n * stride, machine.per_node) // stride)


def kind(n: int, in_node: int, machine: Machine) -> str | None:
    """Which of the groups that were measured is like this one, if there is one."""
    for name, group in machine.measured.items():
        near = {"node": n, "across": 1}.get(name, in_node)
        if group["ranks"] == n and near == in_node:
            return name
    return None


def measured_time(points: list[tuple[int, float]], nbytes: float) -> float:
    """Between two sizes that were measured, a straight line; beyond the largest, its speed."""
    largest, longest = points[-1]
    if nbytes >= largest:
        return longest * nbytes / largest
    before = (0, points[0][1])  # latency
    for size, seconds in points:
        if nbytes <= size:
            share = (nbytes - before[0]) / (size - before[0])
            return before[1] + share * (seconds - before[1])
        before = size, seconds


# ------------------------------------------------------------------------------------- every split


@dataclass(frozen=True)
class Plan:
    """A split, and what it would cost."""

    split: Split
    microbatch: int
    held: dict[str, int]  # as cost.memory gives it
    sent: dict[str, int]  # bytes a rank and step over each dimension
    parts: dict[str, float]  # seconds, as step_time gives them
    fits: bool

    @property
    def seconds(self) -> float:
        return sum(self.parts.values())


def plans(model: Llama, args: argparse.Namespace, machine: Machine) -> Iterator[Plan]:
    """Every split, checkpointing and microbatch that the batch can have on so many GPUs."""
    config, dtype = model.config, getattr(torch, args.dtype)
    for tp in divisors(math.gcd(args.gpus, config.n_kv_heads, config.ffn_dim)):
        data = args.gpus // tp
        share, rest = divmod(args.batch, data)
        for shard in divisors(data) if not rest else ():
            dp = "ddp" if shard == 1 else "fsdp" if shard == data else "hsdp"
            for microbatch, checkpointing in itertools.product(divisors(share), CHECKPOINTING):
                adds_up = shard > 1 and microbatch < share
                for reshard in ("weights", "none", "all") if adds_up else ("weights",):
                    split = Split(
                        dp, data // shard, shard, tp, reshard, checkpointing, args.compile,
                        dtype=dtype,
                    )  # fmt: skip
                    n = share // microbatch
                    if wanted(split, microbatch, args, machine):
                        yield price(model, split, microbatch, n, args.seq_len, machine)


def wanted(split: Split, microbatch: int, args: argparse.Namespace, machine: Machine) -> bool:
    """Whether a plan has what flags have settled beforehand, and talks in groups that are known."""
    has = vars(split) | {"microbatch": microbatch}
    groups = [group_of(dim, split, machine) for dim in ("replicate", "shard", "tp")]
    known = not machine.measured or all(n == 1 or kind(n, near, machine) for n, near in groups)
    return known and all(getattr(args, name) in (None, has[name]) for name in SETTLED)


def price(
    model: Llama, split: Split, microbatch: int, microbatches: int, seq_len: int, machine: Machine
) -> Plan:
    fused = split.compile or not machine.measured
    held = memory(model, split, microbatch * seq_len, microbatches, fused)
    sent = Counter()
    traffic = predict_traffic(model, split, microbatches, microbatch, seq_len)
    for (dim, _), (_, nbytes) in traffic.items():
        sent[dim] += nbytes
    parts = step_time(model, split, microbatch, microbatches, seq_len, machine)
    return Plan(split, microbatch, held, sent, parts, held["peak"] <= ROOM * machine.memory)


def divisors(n: int) -> list[int]:
    return [i for i in range(1, n + 1) if n % i == 0]


def best_of_each_mesh(found: list[Plan]) -> list[Plan]:
    """The best plan of each mesh, best first: what fits before what does not, then by time; of
    those that do not fit, the smallest."""

    def order(plan: Plan) -> tuple:
        return not plan.fits, plan.seconds if plan.fits else plan.held["peak"]

    best = {}
    for plan in sorted(found, key=order):
        best.setdefault((plan.split.replicate, plan.split.shard, plan.split.tp), plan)
    return list(best.values())


WORDS = {
    "products": "matrix products",
    "recompute": "recomputation",
    "passes": "passes over memory",
    "optimizer": "the optimizer",
    "handling": "FSDP's own work",
    "tp": "waiting for tp",
    "shard": "waiting for shard",
    "replicate": "waiting for replicate",
}


def why_not(plan: Plan, winner: Plan, machine: Machine) -> str:
    """What makes a plan lose."""
    if not plan.fits:
        kinds = {k: v for k, v in plan.held.items() if k != "peak"}
        largest = sorted(kinds, key=kinds.get)[:-3:-1]
        most = " and ".join(f"{kinds[kind] / 1e9:,.3g} of {kind}" for kind in largest)
        room = ROOM * machine.memory / 1e9
        return f"needs {plan.held['peak'] / 1e9:,.4g} GB of {room:,.4g}: {most}"
    if plan is winner:
        return "the fastest"
    more = {part: seconds - winner.parts[part] for part, seconds in plan.parts.items()}
    most = max(more, key=more.get)
    return f"{more[most]:+.2g} s of {WORDS[most]}"


# --------------------------------------------------------------------------------------- in words


def plan_cluster(args: argparse.Namespace) -> str:
    """The table of plans, why the losers lose, and how to start the winner."""
    if args.measured:
        report = read_measurement(args.measured)
        machine, computed = measured_machine(report), report["compute"]
        args.gpus, args.per_node = report["ranks"], report["per_node"]
        usual = computed["model"], computed["seq_len"], computed["dtype"], False
    else:
        machine = machine_of(args.gpu, args.link, args.per_node)
        usual = "llama3.1-8b", 8192, "bfloat16", True
    for name, value in zip(("model", "seq_len", "dtype", "compile"), usual):
        if getattr(args, name) is None:
            setattr(args, name, value)
    config = PRESETS[args.model]
    check_cluster(args, config)
    with torch.device("meta"):
        model = Llama(config)
    found = list(plans(model, args, machine))
    if not found:
        raise UserError(why_none(args, config))
    ranked = best_of_each_mesh(found)
    winner = ranked[0]
    if not winner.fits:
        raise UserError(what_would_fit(args, model, winner, machine))
    if args.json:
        rows = [row(plan, args) for plan in sorted(found, key=lambda plan: plan.seconds)]
        write_whole(args.json, json.dumps(rows, indent=1) + "\n")
    shown = ranked[: args.top]
    return "\n".join(
        [
            headline(args, machine, len(found)),
            "",
            *table(shown, args, machine),
            "",
            f"{len(shown)} of {len(ranked)} meshes; --top shows more, --json FILE has all plans.",
            in_words(winner, args),
            "",
            *commands(winner, args),
            *(["", *checked(winner, model, args)] if args.check else []),
        ]
    )


def checked(plan: Plan, model: Llama, args: argparse.Namespace) -> list[str]:
    """What the first rank of the plan sends and holds when its step is run without the others and
    without numbers (measure.emulate), beside what was predicted. Blocks run uncompiled, and norms
    by the kernels of a CPU: so the prediction is that for these."""
    split, tokens = replace(plan.split, compile=False), plan.microbatch * args.seq_len
    share = args.batch // (split.replicate * split.shard)
    microbatches = share // plan.microbatch
    expected = predict_traffic(model, split, microbatches, plan.microbatch, args.seq_len)
    predicted = memory(model, split, tokens, microbatches)
    if not split.fully_sharded and predicted["peak"] > 4e9:
        return ["check: DDP runs on real tensors alone, and this one's are too large for it"]
    sent, held = emulate(model, split, share, plan.microbatch, args.seq_len)
    lines = ["| emulated, in one process | predicted | counted |", "|---|--:|--:|"]
    for key in sorted(expected | sent):
        cells = (
            f"{nbytes:,} bytes in {calls:,} calls"
            for calls, nbytes in (expected.get(key, (0, 0)), sent.get(key, (0, 0)))
        )
        lines.append(f"| {key[1]} over {key[0]} | {' | '.join(cells)} |")
    for name, nbytes in held.items():
        lines.append(f"| {name} | {predicted[name]:,} bytes | {nbytes:,} bytes |")
    return lines


def check_cluster(args: argparse.Namespace, config: LlamaConfig) -> None:
    """Refuse what cannot be, before any work."""
    args.batch = args.batch or 2 * args.gpus
    if args.gpus > args.per_node and args.gpus % args.per_node:
        nodes = math.ceil(args.gpus / args.per_node)
        raise UserError(
            f"--gpus {args.gpus} do not fill nodes of --per-node {args.per_node}: "
            f"--gpus {nodes * args.per_node} fill {nodes}"
        )
    args.per_node = min(args.gpus, args.per_node)
    if args.seq_len > config.max_seq_len:
        raise UserError(f"--seq-len {args.seq_len} is beyond {args.model}'s {config.max_seq_len}")
    if args.json and (args.json.is_dir() or not args.json.parent.is_dir()):
        raise UserError(f"--json {args.json}: give a file in a directory that exists")


def why_none(args: argparse.Namespace, config: LlamaConfig) -> str:
    parts = args.gpus // (args.tp or 1)
    if args.tp and args.batch % parts:
        return f"--batch {args.batch} cannot be shared by {parts} parts: --batch {parts} can"
    if fixed := [f"--{name} {getattr(args, name)}" for name in SETTLED if getattr(args, name)]:
        return (
            f"no plan of --batch {args.batch} on {args.gpus} GPUs has {' '.join(fixed)}: leave "
            f"some of them out"
        )
    most = math.gcd(args.gpus, config.n_kv_heads, config.ffn_dim)  # of tensor parallelism
    return (
        f"--batch {args.batch} cannot be shared by {args.gpus} GPUs: at most {most} can work on "
        f"the same sequences (--tp), so --batch must be a multiple of {args.gpus // most}"
    )


def what_would_fit(args: argparse.Namespace, model: Llama, smallest: Plan, machine: Machine) -> str:
    """What is missing where nothing fits, and more GPUs or shorter sequences that would do."""
    needs = why_not(smallest, smallest, machine)
    told = f"nothing fits: at the least ({in_short(smallest)}) a GPU {needs}"
    remedies = []
    for factor in () if machine.measured else (2, 4, 8, 16, 32, 64):
        more = argparse.Namespace(**vars(args) | dict(gpus=args.gpus * factor))
        more.batch = max(args.batch, more.gpus)
        if any(plan.fits for plan in plans(model, more, machine)):
            remedies.append(f"--gpus {more.gpus} --batch {more.batch}")
            break
    seq_len = args.seq_len
    while seq_len > 512:
        seq_len //= 2
        shorter = argparse.Namespace(**vars(args) | dict(seq_len=seq_len))
        if any(plan.fits for plan in plans(model, shorter, machine)):
            remedies.append(f"--seq-len {seq_len}")
            break
    larger = (name for name, gpu in GPUS.items() if gpu[1] * 1e9 * ROOM >= smallest.held["peak"])
    remedies += [f"--gpu {name}" for name in list(larger)[:1] if not machine.measured]
    return f"{told}; what would fit: {', or '.join(remedies) or 'a smaller model'}"


def headline(args: argparse.Namespace, machine: Machine, found: int) -> str:
    rates = (
        f"{machine.peak * machine.products / 1e12:,.3g} TFLOP/s of products, "
        f"{machine.bandwidth / 1e9:,.0f} GB/s of memory"
    )
    links = "" if machine.measured else (
        f", {machine.node_link / 1e9:,.0f} GB/s within a node of {args.per_node}, "
        f"{machine.link / 1e9:,.3g} GB/s a GPU to others"
    )  # fmt: skip
    return (
        f"{args.model}, {args.batch} x {args.seq_len} tokens a step, {args.dtype}, on {args.gpus} "
        f"x {machine.name} ({'measured' if machine.measured else 'assumed'}: {rates}{links}). "
        f"Of {found:,} plans the best of each mesh:"
    )


def table(ranked: list[Plan], args: argparse.Namespace, machine: Machine) -> list[str]:
    """Markdown; memory of the first rank, and bytes that it sends in a step."""
    lines = [
        "| replicate x shard x tp | checkpointing | microbatch | reshard "
        "| weights, gradients, AdamW GB | gathered GB | activations GB | peak GB "
        "| replicate sends GB | shard GB | tp GB | step s | MFU | |",
        "|---|---|--:|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|---|",
    ]
    for plan in ranked:
        held = {kind: nbytes / 1e9 for kind, nbytes in plan.held.items()}
        state = held["parameters"] + held["gradients"] + held["optimizer"]
        sent = [f"{plan.sent.get(dim, 0) / 1e9:,.3g}" for dim in ("replicate", "shard", "tp")]
        split = plan.split
        cells = [
            f"{split.replicate} x {split.shard} x {split.tp}",
            split.checkpointing,
            plan.microbatch,
            split.reshard if split.shard > 1 else "-",
            f"{state:,.1f}",
            f"{held['gathered']:,.1f}",
            f"{held['activations']:,.1f}",
            f"{held['peak']:,.1f}",
            *sent,
            f"{plan.seconds:,.3g}",
            mfu(plan, args, machine),
            why_not(plan, ranked[0], machine),
        ]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return lines


def mfu(plan: Plan, args: argparse.Namespace, machine: Machine) -> str:
    """Of a GPU's peak; what was measured has none to compare with."""
    if machine.measured:
        return "unknown"
    flops = flops_per_token(PRESETS[args.model], args.seq_len)
    return f"{tokens_per_second(plan, args) * flops / machine.peak:.1%}"


def tokens_per_second(plan: Plan, args: argparse.Namespace) -> float:
    """Of one GPU."""
    return args.batch * args.seq_len / plan.seconds / args.gpus


def row(plan: Plan, args: argparse.Namespace) -> dict:
    """A plan for --json: bytes and seconds."""
    split = plan.split
    sizes = ("dp", "replicate", "shard", "tp", "reshard", "checkpointing")
    return {name: getattr(split, name) for name in sizes} | {
        "microbatch": plan.microbatch,
        "fits": plan.fits,
        "bytes": plan.held,
        "sent": plan.sent,
        "seconds": plan.seconds,
        "parts": plan.parts,
        "tokens_per_second_per_gpu": tokens_per_second(plan, args),
    }


def in_short(plan: Plan) -> str:
    split = plan.split
    return (
        f"{split.replicate} x {split.shard} x {split.tp}, checkpointing {split.checkpointing}, "
        f"microbatches of {plan.microbatch}"
    )


def in_words(plan: Plan, args: argparse.Namespace) -> str:
    """Where the winner's time would go."""
    shares = sorted(plan.parts.items(), key=lambda part: -part[1])
    told = ", ".join(
        f"{WORDS[part]} {seconds / plan.seconds:.0%}" for part, seconds in shares if seconds
    )
    return (
        f"Best: {in_short(plan)}: {plan.seconds:,.3g} s a step, "
        f"{tokens_per_second(plan, args):,.0f} tokens/s a GPU, of which {told}. To be started by:"
    )


def commands(plan: Plan, args: argparse.Namespace) -> list[str]:
    """What starts it, on the first node and on the others."""
    split, nodes = plan.split, args.gpus // args.per_node
    flags = {
        "model": args.model,
        "batch": args.batch,
        "microbatch": plan.microbatch,
        "seq-len": args.seq_len,
        "dp": split.dp,
        "shard": split.shard if split.dp == "hsdp" else None,
        "tp": split.tp if split.tp > 1 else None,
        "reshard": split.reshard if split.shard > 1 else None,
        "checkpointing": split.checkpointing,
        "dtype": args.dtype,
    }
    train = " ".join(f"--{flag} {value}" for flag, value in flags.items() if value is not None)
    train = f"train.py {train} --{'' if args.compile else 'no-'}compile"
    if nodes == 1:
        return [f"torchrun --nproc-per-node {args.per_node} {train}"]
    first = (
        f"torchrun --nnodes {nodes} --nproc-per-node {args.per_node} --node-rank 0 "
        f"--master-addr HOST {train}"
    )
    return [first, f"and on the other nodes the same with --node-rank 1 to {nodes - 1}"]
