"""Predict, then count: `python labs/run.py predict FORM`.

A form draws a configuration and asks for some quantities. What a student types is written to
labs/work/.predictions before anything is counted. Then a step of rank 0 runs in an emulated
cluster. Each counted value is shown with its terms, which costs/page.py gives and which must add up
to it, and with what it would be if one thing were different. So a wrong guess that is the sum
without a term, or one of these other values, is told so.

With --class KEY --student NAME the seed is a hash of these, of the form, and of how many of its
questions the student has answered: every student has other numbers, the same on any machine.

Letters as in parallel.py; m microbatches of a rank in a step.
"""

import argparse
import inspect
import itertools
import json
import math
import re
import secrets
import textwrap
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import NamedTuple

import torch

from config import ParallelConfig, Work, flags_of
from costs.machines import assumed_machine
from costs.page import holds, sends
from costs.plans import FILTERS, every_plan
from labs.machinery.grading import seed_of
from labs.machinery.lab import plural
from model import PRESETS, LlamaConfig
from perf.instruments import build_on_meta, emulate
from perf.plan import table
from plumbing.messages import UserError
from techniques.schedules import SCHEDULES, bubble, check_schedule, held, make_schedule
from techniques.timelines import draw_text

RECORD = Path(__file__).resolve().parent.parent / "work/.predictions"
WIDTH = 98
UNITS = {  # what may follow a number, and examples
    "bytes": ({"": 1, "b": 1, "bytes": 1, "kb": 1e3, "mb": 1e6, "gb": 1e9, "kib": 2**10,
               "mib": 2**20, "gib": 2**30}, "12.5 MB, 3e6 or 1,234"),
    "calls": ({"": 1}, "12"),
    "%": ({"": 1, "%": 1}, "12.5 % or 1/8"),
}  # fmt: skip
LETTERS = "abcde"


class Asked(NamedTuple):
    """A quantity that a student predicts."""

    name: str
    unit: str  # one of UNITS, or "letter"
    within: float = 0.0  # the share of the counted value by which a guess may be off
    unless: str = ""  # 0, and not asked, where the guess at this quantity was 0


class Found(NamedTuple):
    """What was counted for a quantity, and why it is so much."""

    value: float | str  # all letters that are right
    terms: dict[str, float]  # what it is made of -> how much
    notes: list[str]
    otherwise: dict[str, float]  # what could be different -> the value that it gives


# What is asked in words, the quantities, and a function that yields what was found for each.
Question = tuple[list[str], list[Asked], Callable[[], Iterator[Found]]]


# ---------------------------------------------------------------------------------- a drawn step


def draw_work(random: Random, strategies: str, **more) -> Work:
    """Draw a step of a small model on 2 to 16 ranks. Its vocabulary alone may be odd, and one
    bucket of DDP has room for all of its gradients."""
    dim, layers, ffn_dim = (random.choice(sizes) for sizes in ((48, 64), (2, 3, 4), (128, 160)))
    vocab_size = random.choice((96, 500, 509, 600))
    tied = random.random() < 0.4
    config = LlamaConfig(dim, layers, 4, 2, ffn_dim, vocab_size, tie_embeddings=tied)
    dp = random.choice(strategies.split())
    ranks = random.choice((2, 4, 8))
    replicate, shard = {"fsdp": (1, ranks), "hsdp": (ranks, 2)}.get(dp, (ranks, 1))
    if shard > 1:
        more["reshard"] = random.choice(("weights", "none", "all"))
        more["dtype"] = random.choice((torch.float32, torch.bfloat16))
    m = random.choice((1, 2, 3))
    microbatch = random.choice((1, 2))
    batch = m * microbatch * replicate * shard
    parallel = ParallelConfig(dp, replicate, shard, **more)
    return Work(build_on_meta(config), parallel, batch, microbatch, random.choice((128, 256)))


def describe(work: Work) -> list[str]:
    """Return a step in words."""
    p, config = work.parallel, work.model.config
    shapes = {name.removesuffix(".weight"): list(parameter.shape)
              for name, parameter in work.model.named_parameters()}  # fmt: skip
    root = [f"{name} {shape}" for name, shape in shapes.items() if "layers" not in name]
    block = [f"{name.removeprefix('layers.0.')} {shape}"
             for name, shape in shapes.items() if "layers.0." in name]  # fmt: skip
    tied = "; the output is the embedding's matrix" * config.tie_embeddings
    return [
        f"A model of {config.n_layers} blocks, with parameters and gradients in float32:",
        f"  {', '.join(root)}{tied}",
        f"  each block: {', '.join(block)}",
        f"{p.size} ranks: {flags_of(p)}",
        f"A step, on each rank: {plural(work.microbatches, 'microbatch')} of "
        f"{work.microbatch} x {work.seq_len} tokens.",
    ]


def otherwise(work: Work, page: Callable[[Work], dict], key: str | tuple[str, str]) -> dict:
    """Return what costs/page.py's `sends` or `holds` have for a key in steps that differ from this
    one in one thing: what that is -> the value, where it is another."""
    p, m = work.parallel, work.microbatches
    dim = "shard" if p.dp == "fsdp" else "replicate"
    wider = replace(p, **{dim: 2 * p.group_size(dim)})
    changes = [dict(checkpointing=kept) for kept in ("none", "selective", "full")]
    if p.shard > 1:
        changes += [dict(reshard=freed) for freed in ("none", "weights", "all")]
        changes += [dict(dp="ddp", replicate=p.size, shard=1)]
    parallels = [replace(p, **change) for change in changes]
    steps = {
        "1 microbatch": replace(work, batch=work.batch // m),
        f"{2 * m} microbatches": replace(work, batch=2 * work.batch),
        f"{2 * work.seq_len} tokens in a sequence": replace(work, seq_len=2 * work.seq_len),
        f"{2 * p.size} ranks": replace(work, parallel=wider, batch=2 * work.batch),
        **{flags_of(other, p): replace(work, parallel=other) for other in parallels},
    }
    values = {name: page(step).get(key, (0, 0)) for name, step in steps.items()}
    return {name: value for name, value in values.items() if value != page(work).get(key, (0, 0))}


# ----------------------------------------------------------------------------------------- bytes


def draw_bytes(random: Random) -> Question:
    """Calls and bytes of each collective of a step: which copies are worth keeping?

    What is kept need not be sent again. FSDP lends a block its whole weights: it frees them after
    forward and again after backward of each microbatch, or under --reshard none at the end of the
    step. The root alone stays from forward to backward, which begins with its output matrix.
    Gradients are sent in each microbatch under all; else they add up, and the last one sends the
    sum. So with m microbatches, P parameters of 4 bytes and a small root, all has a payload of
    12 m P bytes, weights of (8 m + 4) P, none of 8 P, and DDP's all-reduce of 4 P counts twice in a
    ring. Between replicas slices suffice, once a step. Weights travel in --dtype."""
    work = draw_work(random, "ddp zero1 fsdp fsdp hsdp hsdp")
    p = work.parallel
    keys = [(dim, collective) for dim in ("shard", "replicate") if p.group_size(dim) > 1
            for collective in ("all-gather", "reduce-scatter", "all-reduce")]  # fmt: skip
    asked = []
    for dim, collective in keys:
        calls, nbytes = (f"{collective} over {dim}, {what}" for what in ("calls", "bytes"))
        asked += Asked(calls, "calls"), Asked(nbytes, "bytes", 0.005, unless=calls)

    def count() -> Iterator[Found]:
        traffic, _ = emulate(work)
        for key, i in itertools.product(keys, (0, 1)):  # calls, bytes
            counted = traffic.get(key, (0, 0))[i]
            terms = terms_of(work, key, i)
            if not math.isclose(sum(terms.values()), counted):
                raise ArithmeticError(f"{counted:,} was counted, but costs/page.py has {terms}")
            others = {name: pair[i] for name, pair in otherwise(work, sends, key).items()}
            yield Found(counted, terms, [], others)

    text = [
        *describe(work),
        "In which collectives does a rank take part, in one step? Bytes are payload: the output of "
        "an all-gather, the input of the others. They may be 0.5% off.",
        "Read: docstrings of ddp and fsdp in parallel.py, and techniques/zero1.py.",
    ]
    return text, asked, count


def terms_of(work: Work, key: tuple[str, str], i: int) -> dict[str, float]:
    """Return the root's part and the blocks' part of a collective's calls (0) or bytes (1), by
    costs/page.py: a block's is what the last one adds."""
    config, shards = work.model.config, work.parallel.shard
    L, V = config.n_layers, config.vocab_size
    fewer = replace(work, model=build_on_meta(replace(config, n_layers=L - 1)))
    every, without = (sends(step).get(key, (0, 0))[i] for step in (work, fewer))
    block = every - without
    if not block:
        return {"root and blocks together": every} if every else {}
    root = "root: embedding, last norm" + ", output" * (not config.tie_embeddings)
    root += f"; {V} rows are padded to {shards} x {math.ceil(V / shards)}" * (V % shards > 0)
    return {root: every - L * block, f"{L} blocks, {block:,.0f} each": L * block}


# ---------------------------------------------------------------------------------------- memory


def draw_memory(random: Random) -> Question:
    """Bytes of parameters, gradients, AdamW's state, and at the peak: what fits?

    FSDP divides a rank's state by the ranks, and nothing else: activations, logits and the whole
    weights of two blocks stay as large on however many GPUs. In forward each block leaves what its
    backward will need; then come the logits, V elements for each token. So the peak is in the loss,
    or in the last block's backward if that computes much again. The terms say what helps: full
    checkpointing or fewer tokens where activations are largest, --reshard all for gradients that
    add up, and more ranks for the state alone."""
    checkpointing = random.choice(("none", "selective", "full"))
    work = draw_work(random, "ddp zero1 fsdp hsdp", checkpointing=checkpointing)
    p = work.parallel
    P = sum(parameter.numel() for parameter in work.model.parameters())
    state = {"parameters": p.grad_bytes, "gradients": p.grad_bytes, "optimizer": 2 * p.moment_bytes}

    def count() -> Iterator[Found]:
        _, counted = emulate(work)
        page = holds(work)
        for kind, each in state.items():
            note = f"{P:,} parameters x {each} bytes / {plural(p.shards(kind), 'rank')}"
            yield Found(counted[kind], {}, [note], otherwise(work, holds, kind))
        terms = {
            "parameters": page["parameters"],
            "AdamW's two moments": page["optimizer"],
            "whole weights, of the root and of blocks": page["gathered"],
            "what blocks save for backward, and the loss or the last backward": page["activations"],
        }
        text = "gradients that are there at the peak, less what backward has freed by then"
        terms[text] = page["peak"] - sum(terms.values())
        terms["what costs/page.py leaves out"] = counted["peak"] - page["peak"]
        yield Found(counted["peak"], terms, [], otherwise(work, holds, "peak"))

    text = [
        *describe(work),
        "How many bytes does a rank hold? Count gradients as the optimizer sees them: of its own "
        "slice, where they are sharded. The peak is that of all tensors together, at the fullest "
        "moment of a step; it may be 10% off, the others 1%.",
        "Read: saved and holds in costs/page.py.",
    ]
    asked = [Asked(f"{kind}, bytes", "bytes", 0.01) for kind in state]
    return text, [*asked, Asked("peak, bytes", "bytes", 0.1)], count


# --------------------------------------------------------------------------------------- fastest


def draw_fastest(random: Random) -> Question:
    """Which of five ways to train a model of 1B is the fastest on a cluster?

    What crosses the slowest link decides, less what passes beside computing. Ways that keep whole
    weights in each node send gradients alone to other nodes. Tensor parallelism sends more, and
    hides nothing, but within a node. With more sequences there is more computing to hide behind."""
    nodes = random.choice((2, 4))
    per_node = random.choice((4, 8))
    sequences = random.choice((1, 2, 4))
    link = random.choice((5, 10, 25, 50, 100, 200))
    gpus = nodes * per_node
    machine = assumed_machine("h100", f"{link}gbit", per_node)
    plain = ParallelConfig("auto", dtype=torch.bfloat16, compile=True)
    model = build_on_meta(PRESETS["llama3.2-1b"])
    work = Work(model, plain, gpus * sequences, 1, 4096, on_gpu=True)
    wanted = dict.fromkeys(FILTERS) | dict(pp=1, cp=1, microbatch=1, offload_activations=False)
    every = [*every_plan(work, gpus, machine, wanted)]
    right = LETTERS
    while len(right) > 2:
        plans = dict(zip(LETTERS, random.sample(every, len(LETTERS))))
        most = 1.1 * min(plan.seconds for plan in plans.values())
        right = "".join(letter for letter, plan in plans.items() if plan.seconds <= most)

    def count() -> Iterator[Found]:
        ranked = sorted(LETTERS, key=lambda letter: plans[letter].seconds)
        rows = table([plans[letter] for letter in ranked], machine)
        yield Found(right, {}, [f"{way}  {row}" for way, row in zip([" ", *ranked], rows)], {})

    text = [
        f"llama3.2-1b in bfloat16, compiled, on {nodes} nodes of {per_node} H100.",
        f"A step: {plural(sequences, 'sequence')} of 4,096 tokens for each GPU, 1 in a microbatch.",
        f"From each GPU to other nodes: {link} Gbit/s.",
        *(f"  {letter}  {flags_of(plan.work.parallel, plain)}" for letter, plan in plans.items()),
        "Which is the fastest, by bench.py plan (costs/seconds.py)? One that is at most 10% slower "
        "is right, too.",
    ]
    return text, [Asked("the fastest, a letter", "letter")], count


# ---------------------------------------------------------------------------------------- bubble


def draw_bubble(random: Random) -> Question:
    """Share of a pipeline's time in which ranks wait, and what rank 0 holds.

    Ranks wait while a pipeline fills and empties: p - 1 times for a forward and a backward of a
    stage, however many microbatches there are. So the share falls with more of them, and with
    shorter stages. How much a rank holds depends on how soon its backwards come."""
    name = random.choice(("gpipe", "1f1b", "interleaved"))
    p = random.choice((2, 3, 4, 8))
    v = random.choice((2, 4)) if name == "interleaved" else 1
    m = p * random.choice((1, 2, 3))

    def timed(name: str, m: int, v: int) -> tuple[list, float, int]:
        schedule = make_schedule(name, p, m, v)
        timeline = check_schedule(schedule, m, p * v)
        return timeline, 100 * bubble(timeline), held(schedule[0])

    def count() -> Iterator[Found]:
        timeline, waiting, most = timed(name, m, v)
        others = {f"--schedule {n}": timed(n, m, 1) for n in ("gpipe", "1f1b")}
        others[f"{2 * m} microbatches"] = timed(name, 2 * m, v)
        end = max(spans[-1].end for spans in timeline)
        drawn = draw_text(timeline).splitlines()
        idle = waiting / 100 * end
        notes = [f"{idle:.0f} of {end:.0f} ticks; some papers divide by the other {end - idle:.0f}"]
        notes += drawn * (max(map(len, drawn)) < WIDTH)
        yield Found(waiting, {}, notes, {other: share for other, (_, share, _) in others.items()})
        says = " ".join(inspect.getdoc(SCHEDULES[name]).partition("\n\n")[0].split())
        yield Found(most, {}, [says], {other: held for other, (*_, held) in others.items()})

    stages = f" with {v} stages each" * (v > 1)
    text = [
        f"A pipeline of {p} ranks{stages}, {m} microbatches, --schedule {name}.",
        "Stages are equal. F takes a tick, and B two.",
        "Which share of the time do ranks wait (it may be off by 2% of itself)? And for how many "
        "forwards, each of a microbatch at a stage, does rank 0 hold activations, at most?",
        "Read: techniques/schedules.py; python -m techniques.schedules draws a schedule.",
    ]
    return text, [Asked("waiting, %", "%", 0.02), Asked("forwards held", "calls")], count


# ---------------------------------------------------------------------------------------- answers


def parse(text: str, unit: str) -> float | str:
    """Return the number or the letter that a line says. Raises ValueError with what to type."""
    if unit == "letter":
        if len(text) == 1 and text.lower() in LETTERS:
            return text.lower()
        raise ValueError(f"'{text}': type a letter from {LETTERS[0]} to {LETTERS[-1]}")
    suffixes, examples = UNITS[unit]
    plain = re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", text.lower())  # no commas between thousands
    match = re.fullmatch(r"(\d+\.?\d*|\.\d+)(e-?\d\d?)?(/[1-9]\d*)?\s*([a-z%]*)", plain)
    if not match or match[4] not in suffixes or len(text) > 30:
        raise ValueError(f"'{text}' is not understood: type a number, such as {examples}")
    value = float(match[1] + (match[2] or "")) / int((match[3] or "/1")[1:]) * suffixes[match[4]]
    if unit == "calls" and value % 1:
        raise ValueError(f"'{text}': type a whole number, such as {examples}")
    return 100 * value if unit == "%" and match[3] else value


def ask(quantities: list[Asked], lines: list[str] | None) -> dict[str, float | str]:
    """Return the guess at each quantity: typed, or one of `lines`. What is not understood is asked
    again. Raises UserError where lines are missing, or left over."""
    guesses = {}
    for asked in quantities:
        if asked.unless and not guesses[asked.unless]:
            guesses[asked.name] = 0
        while asked.name not in guesses:
            try:
                line = (input(f"{asked.name}: ") if lines is None else lines.pop(0)).strip()
                guesses[asked.name] = parse(line, asked.unit)
            except (EOFError, IndexError):
                raise UserError(f"no answer to '{asked.name}': nothing is recorded") from None
            except ValueError as error:
                print(error)
    if lines:
        raise UserError(f"{len(lines)} of --answer are left over: nothing is recorded")
    return guesses


def is_near(guess: float | str, value: float | str, within: float) -> bool:
    """Return whether a guess is right: one of the letters, or a number off by so much at most."""
    return guess in value if isinstance(value, str) else abs(guess - value) <= within * value


def explanation(asked: Asked, guess: float | str, found: Found) -> Iterator[str]:
    """Yield what a counted value is made of, and what a wrong guess has forgotten."""

    def show(value: float | str) -> str:
        if isinstance(value, str):
            return " or ".join(value)
        return f"{value:.3g} %" if asked.unit == "%" else f"{value:,.0f}"

    verdict = "right" if is_near(guess, found.value, asked.within) else "wrong"
    yield f"\n{asked.name}: {show(found.value)}; you said {show(guess)}, {verdict}"
    for number, (text, value) in enumerate(found.terms.items(), 1):
        yield wrapped(f"  {number}. {show(value):>10}  {text}")
    yield from (wrapped(f"  {note}") for note in found.notes)
    others = {f"with {name}": v for name, v in found.otherwise.items() if v != found.value}
    if others:
        yield wrapped(f"  It would be {', '.join(f'{show(v)} {n}' for n, v in others.items())}.")
    for number, value in enumerate(found.terms.values(), 1):
        others[f"without line {number}"] = found.value - value
    like = [name for name, value in others.items() if value and is_near(guess, value, 0.005)]
    if like and verdict == "wrong":
        yield wrapped(f"  Your answer would be right {' or '.join(like)}.")


def wrapped(line: str) -> str:
    indent = " " * (len(line) - len(line.lstrip()))
    return textwrap.fill(line, WIDTH, subsequent_indent=2 * indent)


# ------------------------------------------------------------------------------------ the command

FORMS = {"bytes": draw_bytes, "memory": draw_memory, "fastest": draw_fastest, "bubble": draw_bubble}


def predict(args: argparse.Namespace) -> Iterator[str]:
    """Ask the question of a form, write the guess down, and show what is counted. Without a form,
    list them."""
    form, about = args.lab, {form: inspect.getdoc(draw) for form, draw in FORMS.items()}
    if not form:
        yield from (f"{name:<8} {text.splitlines()[0]}" for name, text in about.items())
        return
    if form not in FORMS:
        raise UserError(f"no form '{form}': choose from {', '.join(FORMS)}")
    seeds = (seed_of_student(args, form, str(number)) for number in itertools.count(1))
    seed = next(seed for seed in seeds if not (args.key and times_guessed(form, seed)))
    text, quantities, count = FORMS[form](Random(seed))
    number = 1 + times_guessed(form, seed)
    head = f"predict {form}, seed {seed}" + f", guess {number}" * (number > 1)
    yield "\n".join([head, "", *map(wrapped, text), ""])
    guesses = ask(quantities, args.answer)
    write_entry(form, seed, guess=guesses, student=args.student)
    yield "\nwritten down; now it is counted"
    rows = list(zip(quantities, guesses.values(), count()))
    rows = [row for row in rows if row[1] or row[2].value]  # no 0 that is a 0
    right = sum(is_near(guess, found.value, asked.within) for asked, guess, found in rows)
    write_entry(form, seed, right=right, of=len(rows))
    for row in rows:
        yield from explanation(*row)
    yield "\n" + wrapped(about[form].partition("\n\n")[2].replace("\n", " "))
    yield f"\n{right} of {len(rows)} are right. --seed {seed} asks this again."


def seed_of_student(args: argparse.Namespace, *parts: str) -> int:
    """Return --seed, or a drawn one; or with --class KEY that of --student NAME, in small letters,
    for what these words name."""
    if not args.key:
        if args.student:
            raise UserError("--student is for --class KEY: give it, too")
        return secrets.randbelow(1_000_000) if args.seed is None else args.seed
    if args.seed is not None or not args.student:
        raise UserError("--class KEY needs --student NAME, and no --seed")
    return seed_of(args.key, " ".join(args.student.casefold().split()), *parts)


def times_guessed(form: str, seed: int) -> int:
    """Return how many guesses at a question are in the record."""
    lines = RECORD.read_text(errors="replace").splitlines() if RECORD.exists() else []
    start = json.dumps({"form": form, "seed": seed, "guess": {}})[:-2]
    return sum(line.startswith(start) for line in lines)


def write_entry(form: str, seed: int, **more) -> None:
    RECORD.parent.mkdir(exist_ok=True)
    entry = {"form": form, "seed": seed, **more, "time": time.strftime("%Y-%m-%d %H:%M:%S")}
    with open(RECORD, "a") as file:
        print(json.dumps(entry), file=file)
