"""More questions of `python labs/run.py predict`: ranking, crossing, bubble and twice.

Seconds are not measured here, as no laptop has a cluster, but those of `bench.py plan`: products at
a rate, bytes over a link, and what of them overlaps (costs/seconds.py).
"""

import math
import textwrap
from dataclasses import replace
from random import Random
from typing import NamedTuple

import torch

from config import DIMS, ParallelConfig, Work
from costs.machines import Machine, assumed_machine
from costs.page import sends
from costs.search import Plan
from costs.seconds import collective_time, group_shape, sent_bytes
from labs.machinery.forms import (
    Asked,
    Found,
    Question,
    Term,
    describe,
    explained,
    flags_of,
    step_of,
)
from labs.machinery.lab import plural
from model import PRESETS, LlamaConfig
from perf.instruments import emulate
from techniques.schedules import bubble, check_schedule, draw_text, held, make_schedule

GPU = "h100"
READ = "costs/seconds.py"
CLOSE = 1.2  # pairs of times that are closer do not count in a ranking
AS_FAST = 1.1  # "as fast as" means at most so much slower


def cluster(link: float, per_node: int) -> Machine:
    """Return nodes whose GPUs have a link of so many Gbit/s each to other nodes."""
    return assumed_machine(GPU, f"{link:.9f}gbit", per_node)


def plan_of(run: Work, machine: Machine) -> Plan:
    """Return the plan that bench.py makes of a run."""
    return Plan(replace(run, on_gpu=True), machine)


class Part(NamedTuple):
    """A part of a step's time: computing, or the collectives over a dimension of the mesh."""

    name: str
    seconds: float  # without what passes beside computing
    whole: float = 0.0  # with it
    sent: int = 0  # bytes
    speed: str = ""  # of the links that carry them, in words


def parts_of(run: Work, machine: Machine) -> list[Part]:
    """Return the parts of a step's time, which add up to it."""
    plan = plan_of(run, machine)
    computing = sum(seconds for part, seconds in plan.parts.items() if part not in DIMS)
    parts = [Part("computing", computing)]
    traffic = sends(run)
    for name in dict.fromkeys(dim for dim, _ in traffic):
        over = {key: cost for key, cost in traffic.items() if key[0] == name}
        sent = sent_bytes(over, run.parallel)
        whole = sum(
            calls * collective_time(collective, nbytes / calls, dim, run.parallel, machine)
            for (dim, collective), (calls, nbytes) in over.items()
        )
        speed = speed_in_words(name, run.parallel, machine)
        parts.append(Part(name, plan.parts[name], whole, sent, speed))
    if not math.isclose(sum(part.seconds for part in parts), plan.seconds):
        raise ArithmeticError(f"{plan.seconds} s are more than {parts}")
    return parts


def speed_in_words(dim: str, parallel: ParallelConfig, machine: Machine) -> str:
    """Return the speed at which a group along a mesh dimension sends, as collective_time has it."""
    n, in_node = group_shape(dim, parallel, machine.per_node)
    in_a_node = n == in_node or (in_node > 1 and in_node * machine.link > machine.node_link)
    speed = f"{(machine.node_link if in_a_node else machine.link) / 1e9:.4g} GB/s"
    return speed if in_a_node or in_node == 1 else f"({in_node} x {speed})"


SECONDS = (
    "In seconds. 0.1 of 0.3 shard: sending over shard takes 0.3, of which 0.1 is not hidden.",
    "6 GB / (4 x 5 GB/s): a rank sends 6 GB; 4 GPUs of a node share their links for a group.",
)


def in_words(letter: str, parts: list[Part]) -> list[str]:
    """Return the seconds of a step and their parts, as SECONDS says."""
    computing, *others = parts
    waits = (f" + {part.seconds:.3f} of {part.whole:.3f} {part.name} "
             f"({part.sent / 1e9:,.2f} GB / {part.speed})" for part in others)  # fmt: skip
    total = sum(part.seconds for part in parts)
    text = f"{letter}  {total:.3f} = {computing.seconds:.3f} computing{''.join(waits)}"
    return textwrap.wrap(text, 96, subsequent_indent=" " * 11)


# ---------------------------------------------------------------------------- ranking and crossing


def candidates(nodes: int, per_node: int, sequences: int) -> dict[str, Work]:
    """Return ways to train a model of 1B on a cluster, by their flags, with as many sequences of a
    step for each GPU."""
    n = nodes * per_node
    sizes = [
        (dict(replicate=n), 1),
        (dict(dp="zero1", replicate=n), 1),
        (dict(dp="hsdp", replicate=nodes, shard=per_node), 1),
        (dict(dp="fsdp", shard=n), 1),
        (dict(dp="fsdp", shard=n, reshard="none"), 1),
        (dict(dp="fsdp", shard=n, reshard="all"), 1),
        (dict(dp="fsdp", shard=n, checkpointing="full"), 1),
        (dict(replicate=nodes, tp=per_node), per_node),
        (dict(dp="fsdp", shard=nodes, tp=per_node), per_node),
    ]
    runs = {}
    for options, share in sizes:  # ranks along tp share sequences, so that each has more of them
        parallel = ParallelConfig(**options, dtype=torch.bfloat16, compile=True)
        config = PRESETS["llama3.2-1b"]
        runs[flags_of(parallel)] = step_of(config, parallel, sequences * share, 1, 4096)
    return runs


def describe_cluster(nodes: int, per_node: int, sequences: int) -> list[str]:
    """Return the model, the GPUs and the batch in words."""
    return [
        f"llama3.2-1b in bfloat16, compiled, on {nodes} nodes of {per_node} {GPU.upper()}.",
        f"A step: {plural(sequences, 'sequence')} of 4,096 tokens for each GPU, 1 in a microbatch.",
    ]


def draw_ranking(random: Random) -> Question:
    """Order five ways to train by their time, on a link of some speed."""
    letters = "abcde"
    while True:
        nodes, per_node = random.choice(((2, 4), (2, 8), (4, 4), (4, 8)))
        sequences, link = random.choice((1, 2, 4)), random.choice((5, 10, 25, 50, 100, 200))
        runs, machine = candidates(nodes, per_node, sequences), cluster(link, per_node)
        flags = dict(zip(letters, random.sample([*runs], len(letters))))
        parts = {letter: parts_of(runs[flags[letter]], machine) for letter in letters}
        seconds = {letter: sum(p.seconds for p in parts[letter]) for letter in letters}
        if len(pairs_that_count(seconds)) >= 6:
            break

    def count() -> list[Found]:
        order = sorted(letters, key=seconds.get)
        notes = (*SECONDS, *(line for letter in order for line in in_words(letter, parts[letter])))
        return [Found(" ".join(order), notes=notes, seconds=seconds)]

    text = [
        *describe_cluster(nodes, per_node, sequences),
        f"From each GPU to other nodes: {link} Gbit/s.",
        *(f"  {letter}  {name}" for letter, name in flags.items()),
        f"Which is fastest, by bench.py plan? Pairs closer than {CLOSE - 1:.0%} do not count.",
    ]
    return Question(text, READ, [Asked("order, the fastest first", "order", "pairs")], count)


def pairs_that_count(seconds: dict[str, float]) -> list[str]:
    """Return the pairs of letters whose times are not close, the faster first."""
    return [a + b for a in seconds for b in seconds if seconds[a] * CLOSE <= seconds[b]]


def draw_crossing(random: Random) -> Question:
    """From which link speed on one way to train is as fast as another."""
    while True:
        nodes, per_node = random.choice(((2, 4), (2, 8), (4, 4), (4, 8)))
        sequences = random.choice((1, 2, 4))
        runs = candidates(nodes, per_node, sequences)
        ddp, zero1, hsdp, fsdp, kept, each, *_ = runs
        pairs = ((ddp, hsdp), (ddp, hsdp), (zero1, hsdp), (fsdp, hsdp), (ddp, kept), (each, hsdp))
        flags = dict(zip("ab", random.choice(pairs)))
        a, b = (runs[name] for name in flags.values())
        if speed := crossing(a, b, per_node):
            break

    def count() -> list[Found]:
        notes = [*SECONDS]
        for gbit in (speed, speed / 2):
            machine = cluster(gbit, per_node)
            notes.append(f"at {gbit:.3g} Gbit/s:")
            for letter, run in zip("ab", (a, b)):
                notes += in_words(letter, parts_of(run, machine))
        return [Found(speed, notes=tuple(notes))]

    text = [
        *describe_cluster(nodes, per_node, sequences),
        *(f"  {letter}  {name}" for letter, name in flags.items()),
        f"From which speed on, of each GPU's link to other nodes, is a at most {AS_FAST - 1:.0%} "
        "slower than b, by bench.py plan?",
        "All points up to a factor of 1.25 from it, none from a factor of 4 on.",
    ]
    return Question(text, READ, [Asked("link speed", "Gbit/s", "logarithm")], count)


def crossing(a: Work, b: Work, per_node: int) -> float | None:
    """Return the link speed from which on a run `a` is as fast as `b`, None if there is none
    between 2 and 1,000 Gbit/s."""

    def is_as_fast(speed: float) -> bool:
        machine = cluster(speed, per_node)
        return plan_of(a, machine).seconds <= AS_FAST * plan_of(b, machine).seconds

    speeds = [2 * 500 ** (i / 24) for i in range(25)]
    slower = len(speeds) - 1  # index of the largest speed at which `a` is slower
    while slower >= 0 and is_as_fast(speeds[slower]):
        slower -= 1
    if slower in (-1, len(speeds) - 1):
        return None
    low, high = speeds[slower], speeds[slower + 1]
    for _ in range(12):
        middle = (low * high) ** 0.5
        low, high = (low, middle) if is_as_fast(middle) else (middle, high)
    return high


# --------------------------------------------------------------------------------------- bubble


def draw_bubble(random: Random) -> Question:
    """Share of a pipeline's time in which ranks wait, and what rank 0 holds."""
    name = random.choice(("gpipe", "1f1b", "interleaved", "interleaved", "zero-bubble"))
    p, v = random.choice((2, 3, 4, 8)), random.choice((2, 4)) if name == "interleaved" else 1
    m = p * random.choice((1, 2, 3)) if name == "interleaved" else p + random.randrange(9)
    splits = name == "zero-bubble"

    def count() -> list[Found]:
        schedule = make_schedule(name, p, m, v)
        timeline = check_schedule(schedule, m, p * v)
        work, text = m * v, f"(p - 1) / (m v + p - 1) = {p - 1} / ({m} x {v} + {p - 1})"
        if splits:  # of 3 (p - 1) W fills two thirds
            work, text = 3 * m, f"(p - 1) / (3 m + p - 1) = {p - 1} / (3 x {m} + {p - 1})"
        elif v == 1:
            text = f"(p - 1) / (m + p - 1) = {p - 1} / ({m} + {p - 1})"
        drawn = draw_text(timeline).splitlines()
        waiting = Term(100 * (p - 1) / (work + p - 1), text)
        most = Term(m, "m: all forwards come before the first backward")
        if name in ("1f1b", "zero-bubble"):
            most = Term(min(m, p), f"p, at most m: {p} ranks, {m} microbatches")
        elif name == "interleaved":
            text = f"2 (p - 1) + (v - 1) p + 1 = 2 x {p - 1} + {v - 1} x {p} + 1, at most m v"
            most = Term(min(m * v, 2 * (p - 1) + (v - 1) * p + 1), f"{text} = {m * v}")
        return [
            explained(100 * bubble(timeline), [waiting], *drawn * (len(drawn[0]) <= 96)),
            explained(held(schedule[0]), [most]),
        ]

    stages = f" with {v} stages each" * (v > 1)
    takes = "a backward takes twice a forward"
    if splits:
        takes = (
            "forward, B (gradient of the input) and W (gradient of the weights) take equally long"
        )
    text = [
        f"A pipeline of {p} ranks{stages}, {m} microbatches, --schedule {name}.",
        f"Stages are equal, {takes}, messages take no time.",
        "Which share of the time do ranks wait? And for how many forwards, each of a microbatch at "
        "a stage, does rank 0 hold activations, at most?",
    ]
    asked = [Asked("waiting", "%", 0.02), Asked("forwards held", "calls")]
    return Question(
        text,
        "techniques/pipeline.py; python -m techniques.schedules draws a schedule",
        asked,
        count,
    )


# ---------------------------------------------------------------------------------------- twice


def draw_twice(random: Random) -> Question:
    """By which factor bytes, memory and time grow, if something doubles."""
    ffn_dim, microbatches = random.choice((2816, 4096)), random.choice((1, 2))
    config = LlamaConfig(1024, 2, 16, 4, ffn_dim, vocab_size=8192, max_seq_len=16_384)
    dp, reshard = random.choice(("zero1", "fsdp", "hsdp")), random.choice(("none", "weights"))
    sizes = {"zero1": dict(replicate=8), "fsdp": dict(shard=8), "hsdp": dict(replicate=2, shard=4)}
    parallel = ParallelConfig(dp, **sizes[dp], dtype=torch.bfloat16, reshard=reshard)
    run = step_of(
        config, parallel, microbatches, random.choice((1, 2)), random.choice((2048, 4096))
    )
    link, what = random.choice((50, 200, 400)), random.choice(("microbatches", "ranks", "tokens"))
    dim = "shard" if dp == "fsdp" else "replicate"
    larger = replace(parallel, **{dim: 2 * getattr(parallel, dim)})
    twice, doubled = {
        "microbatches": (replace(run, batch=2 * run.batch), "the microbatches of a step"),
        "ranks": (
            replace(run, parallel=larger, batch=2 * run.batch),
            f"the ranks along {dim}; each has as many sequences as before",
        ),
        "tokens": (replace(run, seq_len=2 * run.seq_len), "the tokens of each sequence"),
    }[what]
    machine = cluster(link, 4)

    def count() -> list[Found]:
        sent, memory, time = [], [], []
        for one in (run, twice):
            traffic, held = emulate(one)
            sent.append({f"{key[1]} over {key[0]}": sent_bytes({key: cost}, one.parallel)
                         for key, cost in traffic.items()})  # fmt: skip
            state = {kind: held[kind] for kind in ("parameters", "optimizer")}
            rest = held["peak"] - sum(state.values())
            memory.append(state | {"gradients, gathered weights, activations": rest})
            compiled = replace(one, parallel=replace(one.parallel, compile=True))
            time.append({part.name: part.seconds for part in parts_of(compiled, machine)})
        ms = "ms that are not hidden"
        return [factor(*sent, 1e6, "MB"), factor(*memory, 1e6, "MB"), factor(*time, 1e-3, ms)]

    text = [
        *describe(run),
        f"The cluster: {GPU.upper()}s, 4 in a node, {link} Gbit/s from each GPU to other nodes.",
        f"Double {doubled}.",
        "By which factor do these grow, on a rank? Bytes are what it sends in rings of n ranks: "
        "(n-1)/n of a payload, twice that for an all-reduce. Time is by bench.py plan.",
    ]
    asked = [Asked("bytes sent", "factor", 0.1), Asked("peak of memory", "factor", 0.1),
             Asked("time of a step", "factor", 0.25)]  # fmt: skip
    return Question(
        text, "docstrings of parallel.py and costs/seconds.py", asked, count, (run, twice)
    )


def factor(before: dict[str, float], after: dict[str, float], unit: float, name: str) -> Found:
    """Return by which factor a sum grows, and what each part contributes to it."""
    total = sum(before.values())
    terms = [Term(after[part] / total, f"{part}: {before.get(part, 0) / unit:,.2f} "
                  f"-> {after[part] / unit:,.2f}") for part in after]  # fmt: skip
    note = f"together: {total / unit:,.2f} -> {sum(after.values()) / unit:,.2f}"
    found = explained(sum(after.values()) / total, terms, note)
    return found._replace(head=f"the part's share of the factor; then {name}, before -> after")
