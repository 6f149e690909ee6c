"""What `python labs/run.py predict` asks, and how it is counted: bytes, memory and counts.

A form draws a configuration and returns a Question. Its `count` runs a step of rank 0 in an
emulated cluster and returns, for each quantity that was asked for, what was Found: the counted
value, and what explains it. Terms are those of costs/page.py, and must add up to what was counted.
Forms about time are in forms_of_time.py.

Letters as in parallel.py; m microbatches of a rank in a step.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from random import Random
from typing import NamedTuple

import torch

from config import ParallelConfig, Work
from costs.page import holds, sends
from labs.machinery.lab import first_rank, plural
from model import Llama, LlamaConfig
from perf.instruments import Counted, build_on_meta, emulate, random_batch
from train import accumulate

COLLECTIVES = ("all-gather", "reduce-scatter", "all-reduce")
STATE = {"parameters": 4, "gradients": 4, "optimizer": 8}  # bytes a parameter
EXACT = "Type bytes exactly, or rounded: the rounding may put them off by 0.5%, and not more."


class Term(NamedTuple):
    """A summand of a counted value, and in words what it is made of."""

    value: float
    text: str
    calls: int = 0  # of a collective


class Asked(NamedTuple):
    """A quantity that a student predicts."""

    name: str
    unit: str  # bytes, calls, %, factor, Gbit/s or order
    # How a guess is scored: "exact", "logarithm", "pairs", or the share that it may be off.
    rule: str | float = "exact"
    unless: str = ""  # 0, and not asked, where the answer to this quantity was 0


class Found(NamedTuple):
    """What was counted for a quantity, and why it is so much."""

    value: float | str
    terms: tuple[Term, ...] = ()
    notes: tuple[str, ...] = ()
    seconds: dict[str, float] | None = None  # of each letter, where an order is asked for
    head: str = ""  # what the numbers left of the terms are, if it needs saying


@dataclass(frozen=True)
class Question:
    """A question with numbers of its own."""

    text: list[str]
    read: str  # where the project explains it
    asked: list[Asked]
    count: Callable[[], list[Found]]  # one for each quantity, in this order
    runs: tuple[Work, ...] = ()  # steps that are counted


def explained(value: float, terms: list[Term], *notes: str) -> Found:
    """Return a counted value with its terms. Raises ArithmeticError if they give another sum."""
    total = sum(term.value for term in terms)
    if not math.isclose(total, value, rel_tol=1e-9):
        raise ArithmeticError(f"the terms give {total:,}, and {value:,} was counted: {terms}")
    return Found(value, tuple(terms), notes)


# ------------------------------------------------------------------------------- configurations


def step_of(
    config: LlamaConfig, parallel: ParallelConfig, microbatches: int, microbatch: int, seq_len: int
) -> Work:
    """Return the step in which each rank has so many microbatches of so many sequences."""
    batch = microbatches * microbatch * parallel.replicate * parallel.shard
    return Work(model_of(config), parallel, batch, microbatch, seq_len)


def describe(work: Work) -> list[str]:
    """Return a step in words."""
    config, parallel = work.model.config, work.parallel
    layers = shapes_of(config)
    root, block = (", ".join(f"{name} {list(shape)}" for name, shape in layers[unit].items())
                   for unit in ("root", "block"))  # fmt: skip
    tied = "; the output is the embedding's matrix" * config.tie_embeddings
    dtype = str(parallel.dtype).removeprefix("torch.")
    dtype += ", parameters and gradients in float32" * (dtype == "bfloat16")
    return [
        f"A model of {config.n_layers} blocks, computed in {dtype}:",
        f"  {root}{tied}",
        f"  each block: {block}",
        f"{parallel.size} ranks: {flags_of(parallel)}.",
        f"A step, on each rank: {plural(work.microbatches, 'microbatch')} of "
        f"{work.microbatch} x {work.seq_len} tokens.",
    ]


def flags_of(parallel: ParallelConfig) -> str:
    """Return train.py's flags for a configuration, and what they mean on these ranks."""
    flags = [f"--dp {parallel.dp}"]
    if parallel.tp > 1:
        flags.append(f"--tp {parallel.tp}")
    if parallel.strategy.uses_fsdp and parallel.shard > 1:
        flags.append(f"--reshard {parallel.reshard}")
    if parallel.checkpointing != "none":
        flags.append(f"--checkpointing {parallel.checkpointing}")
    sizes = f", {parallel.replicate} replicas of {parallel.shard} shards"
    return " ".join(flags) + sizes * (parallel.dp == "hsdp")


@functools.cache
def model_of(config: LlamaConfig) -> Llama:
    """Return a model without memory, of which nothing may be changed."""
    return build_on_meta(config)


@functools.cache
def shapes_of(config: LlamaConfig) -> dict[str, dict[str, torch.Size]]:
    """Return the shapes of the root's parameters, and of those of one block."""
    shapes, names = {"root": {}, "block": {}}, {"tok_embeddings.weight": "embedding"}
    for name, parameter in model_of(config).named_parameters():
        if name.startswith("layers.0."):
            shapes["block"][name.split(".")[-2]] = parameter.shape
        elif not name.startswith("layers."):
            shapes["root"][names.get(name, name.split(".")[0])] = parameter.shape
    return shapes


def draw_config(random: Random) -> LlamaConfig:
    """Draw a small model, whose vocabulary alone may be odd, and whose gradients fill no bucket of
    DDP: its first, of 1 MiB, has room for all of them."""
    dim, ffn_dim = random.choice((48, 64)), random.choice((128, 160))
    layers, vocab_size = random.choice((2, 3, 4)), random.choice((500, 504, 509, 600))
    tied = random.random() < 0.4
    return LlamaConfig(dim, layers, 4, 2, ffn_dim, vocab_size=vocab_size, tie_embeddings=tied)


def draw_parallel(random: Random, strategies: str, **more) -> ParallelConfig:
    """Draw one of some strategies on 2 to 8 ranks."""
    dp, size = random.choice(strategies.split()), random.choice((2, 4, 8))
    sizes = dict(replicate=size)
    if dp == "fsdp":
        sizes = dict(shard=size)
    elif dp == "hsdp":
        sizes = dict(replicate=random.choice((2, 4)), shard=random.choice((2, 4)))
    if "shard" in sizes:
        more["reshard"] = random.choice(("weights", "none", "all"))
    return ParallelConfig(dp, **sizes, **more)


# ---------------------------------------------------------------------------------------- bytes


def draw_bytes(random: Random) -> Question:
    """Calls and bytes of each collective of a step."""
    parallel = draw_parallel(random, "ddp zero1 fsdp fsdp hsdp hsdp")
    if parallel.strategy.uses_fsdp and random.random() < 0.3:
        parallel = replace(parallel, dtype=torch.bfloat16)
    m, microbatch, seq_len = (random.choice(sizes) for sizes in ((1, 2, 3), (1, 2), (64, 128)))
    run = step_of(draw_config(random), parallel, m, microbatch, seq_len)
    keys = [(dim, collective) for dim in ("shard", "replicate") if getattr(parallel, dim) > 1
            for collective in COLLECTIVES]  # fmt: skip
    asked = []
    for dim, collective in keys:
        calls = f"{collective} over {dim}, calls"
        asked.append(Asked(calls, "calls"))
        asked.append(Asked(f"{collective} over {dim}, bytes", "bytes", unless=calls))

    def count() -> list[Found]:
        traffic, _ = emulate(run)
        found = []
        for key in keys:
            calls, nbytes = traffic.get(key, (0, 0))
            why = (reason(key[1], parallel),) if calls else ()
            found.append(Found(calls, notes=why))
            found.append(explained(nbytes, terms_of(run, key)))
        return found

    text = [*describe(run), "In which collectives does a rank take part, in one step?",
            "Bytes are payload: the output of an all-gather, the input of the others.",
            EXACT]  # fmt: skip
    return Question(text, "docstrings of ddp, ZeRO1 and fsdp in parallel.py", asked, count, (run,))


def reason(collective: str, parallel: ParallelConfig) -> str:
    """Return why a step has as many calls of a collective as it has."""
    if parallel.dp == "ddp":
        return "once: one bucket has room for all gradients"
    if parallel.dp == "zero1":
        return "once for each tensor"
    if collective == "all-reduce":
        return "once: slices of gradients add up until the last microbatch"
    if collective == "all-gather" and parallel.reshard == "none":
        return "once: weights stay whole until the step's last backward"
    if collective == "all-gather":
        return (
            "in each microbatch: a block for forward and again for backward, as it is sharded in "
            "between; the root once, as it is kept"
        )
    if parallel.reshard == "all":
        return "in each microbatch: no whole gradients are kept"
    return "once: gradients add up on the rank until the last microbatch"


def terms_of(run: Work, key: tuple[str, str]) -> list[Term]:
    """Return the root's part and the blocks' part of a collective's payload, by costs/page.py: a
    block's is what the last one adds."""
    config = run.model.config
    fewer = replace(run, model=model_of(replace(config, n_layers=config.n_layers - 1)))
    (calls, nbytes), (less_calls, less_bytes) = (sends(r).get(key, (0, 0)) for r in (run, fewer))
    L, block_calls, block_bytes = config.n_layers, calls - less_calls, nbytes - less_bytes
    blocks = Term(L * block_bytes, f"{L} blocks, {block_bytes:,.0f} bytes each", L * block_calls)
    root = "root: embedding, last norm" + ", output" * (not config.tie_embeddings)
    return [Term(nbytes - blocks.value, root, calls - blocks.calls), blocks] if calls else []


# --------------------------------------------------------------------------------------- memory


PARTS = {  # kinds of costs/page.py that are there at the peak
    "parameters": "parameters",
    "optimizer": "AdamW's two moments",
    "gathered": "whole weights: those of the root and of blocks",
    "activations": "what blocks save for backward, with the loss or with the last block's backward",
}


def draw_memory(random: Random) -> Question:
    """Bytes of parameters, gradients, AdamW's state and the peak."""
    checkpointing = random.choice(("none", "selective", "full"))
    parallel = draw_parallel(random, "ddp zero1 fsdp hsdp", checkpointing=checkpointing)
    microbatch, seq_len = random.choice(((1, 256), (2, 128), (2, 256), (4, 64), (4, 128)))
    m, config = random.choice((1, 2)), draw_config(random)
    if checkpointing == "full":  # else it is always the loss that takes most
        config = replace(config, vocab_size=random.choice((96, config.vocab_size)))
    run = step_of(config, parallel, m, microbatch, seq_len)
    P = sum(parameter.numel() for parameter in run.model.parameters())

    def count() -> list[Found]:
        _, held = emulate(run)
        found = []
        for kind, each in STATE.items():
            ranks = parallel.shards(kind)
            note = f"{P:,} parameters x {each} bytes" + f" / {ranks} ranks" * (ranks > 1)
            found.append(Found(held[kind], notes=(note,)))
        predicted, peak = holds(run), held["peak"]
        terms = [Term(predicted[kind], text) for kind, text in PARTS.items() if predicted[kind]]
        gradients = predicted["peak"] - sum(term.value for term in terms)
        text = "gradients that are there at the peak, less what backward has freed by then"
        terms.append(Term(gradients, text))
        terms.append(Term(peak - predicted["peak"], "what costs/page.py leaves out"))
        return [*found, explained(peak, terms)]

    text = [
        *describe(run),
        "How many bytes does a rank hold? Count gradients as the optimizer sees them: of its own "
        "slice, where they are sharded. The peak is that of all tensors together, at the fullest "
        "moment of a step.",
    ]
    asked = [Asked(kind, "bytes", 0.01) for kind in STATE] + [Asked("peak", "bytes", 0.1)]
    return Question(text, "saved and holds in costs/page.py", asked, count, (run,))


# --------------------------------------------------------------------------------------- counts


ATTENTION = {  # by --checkpointing
    "none": "in forward of each microbatch",
    "selective": "in forward of each microbatch; in backward not again, as its output is saved",
    "full": "in forward of each microbatch, and again in backward",
}


def draw_counts(random: Random) -> Question:
    """How often attention runs in a layer, and collectives of a block."""
    checkpointing = random.choice(("none", "selective", "full", "full"))
    parallel = draw_parallel(random, "fsdp hsdp", checkpointing=checkpointing)
    run = step_of(
        LlamaConfig(48, 1, 4, 2, 128, vocab_size=101), parallel, random.choice((2, 3, 4)), 1, 32
    )
    collectives = [("shard", "all-gather"), ("shard", "reduce-scatter")]
    collectives += [("replicate", "all-reduce")] * (parallel.replicate > 1)
    asked = [Asked("forward runs of attention, in a layer", "calls")]
    asked += [
        Asked(f"{collective}s over {dim}, of a block", "calls") for dim, collective in collectives
    ]

    def count() -> list[Found]:
        """Count what one block more adds to a step."""
        few, more = (count_step(replace(run, model=model_of(replace(run.model.config, n_layers=n))))
                     for n in (1, 2))  # fmt: skip
        found = [Found(more.attentions - few.attentions, notes=(ATTENTION[checkpointing],))]
        for key in collectives:
            why = reason(key[1], parallel)
            found.append(Found(more.sent[key][0] - few.sent[key][0], notes=(why,)))
        return found

    text = [
        "A model of many equal blocks.",
        f"{run.parallel.size} ranks: {flags_of(parallel)}.",
        f"A step, on each rank: {run.microbatches} microbatches. How often, in one step?",
    ]
    return Question(text, "docstrings of fsdp and recompute in parallel.py", asked, count, (run,))


def count_step(run: Work) -> Counted:
    """Run forward and backward of a step with real tensors."""
    with first_rank(run.model.config, run.parallel) as (_, runner, world):
        batch = random_batch(run.model.config, run.sequences, run.seq_len)
        with Counted(world) as counted:
            accumulate(runner, batch, run.microbatch, world)
    return counted
