"""What `python labs/run.py predict` asks, and how it is counted: bytes, memory and counts.

A form draws a configuration and returns a Question. Its `count` runs a step of rank 0 in an
emulated cluster and returns, for each quantity that was asked for, what was Found: the counted
value, and the terms that explain it. Terms are derived here from the shapes, not from the count,
and must add up to it. Forms about time are in forms_of_time.py.

Letters as in parallel.py; m microbatches of a rank in a step.
"""

import functools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from random import Random
from typing import NamedTuple

import torch

from config import ParallelConfig, Work
from costs.page import holds
from labs.machinery.lab import first_rank, plural
from model import Llama, LlamaConfig
from perf.instruments import Counted, build_on_meta, emulate, random_batch
from train import accumulate

COLLECTIVES = ("all-gather", "reduce-scatter", "all-reduce")
EXACT = "Type bytes exactly, or rounded: the rounding may put them off by 0.5%, and not more."
# What a block saves for backward, in elements a token: so many times D, KV E, F and the heads.
SAVED = {"none": (8, 2, 4, 1), "selective": (3, 1, 1, 1), "full": (1, 0, 0, 0)}


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


def elements_of(config: LlamaConfig, shards: int = 1) -> dict[str, tuple[int, int]]:
    """Return how many elements the root and one block have, and how many more there are where
    `shards` must divide each tensor's rows."""
    return {
        unit: (
            sum(shape.numel() for shape in shapes.values()),
            sum(-shape[0] % shards * math.prod(shape[1:]) for shape in shapes.values()),
        )
        for unit, shapes in shapes_of(config).items()
    }


def draw_config(random: Random) -> LlamaConfig:
    """Draw a small model, whose vocabulary alone may be odd."""
    dim, ffn_dim = random.choice((48, 64, 96)), random.choice((128, 160, 192))
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
        terms = terms_of_traffic(run)
        if terms.keys() != traffic.keys():
            raise ArithmeticError(f"explained {[*terms]}, and counted {[*traffic]}")
        found = []
        for key in keys:
            calls, nbytes = traffic.get(key, (0, 0))
            of_key = terms.get(key, [])
            if sum(term.calls for term in of_key) != calls:
                raise ArithmeticError(f"{calls} calls of {key} were counted, not {of_key}")
            found += [Found(calls), explained(nbytes, of_key)]
        return found

    text = [*describe(run), "In which collectives does a rank take part, in one step?",
            "Bytes are payload: the output of an all-gather, the input of the others.",
            EXACT]  # fmt: skip
    return Question(text, "docstrings of ddp, ZeRO1 and fsdp in parallel.py", asked, count, (run,))


def terms_of_traffic(run: Work) -> dict[tuple[str, str], list[Term]]:
    """Return the terms of the payload of each collective, (mesh dimension, collective)."""
    parallel, m, reshard = run.parallel, run.microbatches, run.parallel.reshard
    g, w = parallel.grad_bytes, parallel.weight_bytes
    if parallel.dp == "ddp":
        return {("replicate", "all-reduce"): terms_of_buckets(run.model.config, g)}
    shards = parallel.replicate if parallel.dp == "zero1" else parallel.shard
    layers, elements = run.model.config.n_layers, elements_of(run.model.config, shards)
    if parallel.dp == "zero1":
        shapes = shapes_of(run.model.config)
        tensors = len(shapes["root"]) + layers * len(shapes["block"])
        parameters = elements["root"][0] + layers * elements["block"][0]
        text = f"{tensors} tensors, one call each: {parameters:,} parameters x {g} bytes"
        pad = elements["root"][1]
        terms = [Term(parameters * g, text, tensors), *padding(1, pad, shards, g)]
        return {("replicate", name): terms for name in ("reduce-scatter", "all-gather")}
    traffic = {}

    def add(dim: str, collective: str, unit: str, uses: int, factors: str, each: int) -> None:
        """Add a unit's collectives: so many `uses` a step of each such unit. `factors` says it in
        words; an element takes `each` bytes."""
        n, pad = elements[unit]
        times, units = uses, f"{', '.join(names[unit])}: "
        if unit == "block":
            times, units = uses * layers, f"{layers} blocks x "
        if dim == "shard":
            text = f"{units}{factors}{n:,} parameters x {each} bytes"
            terms = [Term(times * n * each, text, times), *padding(times, pad, shards, each)]
        else:
            text = f"{units}{factors}{n + pad:,} parameters / {shards} shards x {each} bytes"
            terms = [Term(times * (n + pad) // shards * each, text, times)]
        traffic.setdefault((dim, collective), []).extend(terms)

    names = shapes_of(run.model.config)
    each_microbatch, last = f"{plural(m, 'microbatch')} x ", "1 (the last microbatch) x " * (m > 1)
    for unit in ("block", "root"):
        if reshard == "none":
            add("shard", "all-gather", unit, 1, "1 (then kept) x " * (m > 1), w)
        elif unit == "block":
            add("shard", "all-gather", unit, 2 * m, f"{each_microbatch}2 (forward, backward) x ", w)
        else:
            add("shard", "all-gather", unit, m, f"{each_microbatch}1 (kept for backward) x ", w)
        if reshard == "all":
            add("shard", "reduce-scatter", unit, m, each_microbatch, g)
        else:
            add("shard", "reduce-scatter", unit, 1, last, g)
        if parallel.replicate > 1:
            add("replicate", "all-reduce", unit, 1, last, g)
    return traffic


def padding(times: int, elements: int, shards: int, each: int) -> list[Term]:
    """Return the term for padding in so many collectives, if there is any."""
    if not elements:
        return []
    text = f"padding to a multiple of {shards} rows: {times} x {elements} x {each} bytes"
    return [Term(times * elements * each, text)]


def terms_of_buckets(config: LlamaConfig, g: int) -> list[Term]:
    """Return DDP's buckets. They fill from the end of the model; the first is full at 1 MiB."""
    terms, tensors, elements, full = [], 0, 0, 1 << 20

    def end(which: str) -> None:
        text = f"{which}: {tensors} tensors, {elements:,} parameters x {g} bytes"
        terms.append(Term(elements * g, text, 1))

    for parameter in reversed(list(model_of(config).parameters())):
        tensors, elements = tensors + 1, elements + parameter.numel()
        if elements * g >= full:
            end(f"a bucket, full at {full >> 20} MiB")
            tensors, elements, full = 0, 0, 25 << 20
    if tensors:
        end("the last bucket")
    return terms


# --------------------------------------------------------------------------------------- memory


def draw_memory(random: Random) -> Question:
    """Bytes of parameters, gradients, AdamW's state and the peak."""
    for _ in range(100):
        checkpointing = random.choice(("none", "selective", "full"))
        parallel = draw_parallel(random, "ddp zero1 fsdp hsdp", checkpointing=checkpointing)
        microbatch, seq_len = random.choice(((1, 256), (2, 128), (2, 256), (4, 64), (4, 128)))
        m, config = random.choice((1, 2)), draw_config(random)
        if checkpointing == "full":  # else it is always the loss that takes most
            config = replace(config, vocab_size=random.choice((96, config.vocab_size)))
        run = step_of(config, parallel, m, microbatch, seq_len)
        moments = terms_of_peak(run)
        totals = {moment: sum(t.value for t in terms) for moment, terms in moments.items()}
        predicted = holds(run)["peak"]
        if math.isclose(predicted, max(totals.values()), rel_tol=1e-3):
            break  # else the peak is in another moment than the two that are explained
    else:
        raise ArithmeticError(f"costs/memory.py and the terms here differ: {predicted}, {moments}")

    def count() -> list[Found]:
        _, held = emulate(run)
        found = [explained(held[kind], terms) for kind, terms in terms_of_state(run).items()]
        moment, other = sorted(totals, key=totals.get, reverse=True)
        left_out = held["peak"] - totals[moment]
        rest = Term(left_out, "not in these terms: tensors that live for a moment")
        notes = (
            f"The peak is {moment}.",
            f"At the other candidate, {other.removeprefix('in ')}, the terms add up to "
            f"{totals[other]:,}.",
        )
        return [*found, explained(held["peak"], [*moments[moment], rest], *notes)]

    text = [
        *describe(run),
        "How many bytes does a rank hold? Count gradients as the optimizer sees them: of its own "
        "slice, where they are sharded. The peak is that of all tensors together, at the fullest "
        "moment of a step, and may be off by 10%.",
        EXACT,
    ]
    asked = [Asked(kind, "bytes") for kind in ("parameters", "gradients", "optimizer")]
    asked.append(Asked("peak", "bytes", 0.1))
    read = "docstrings of saved_elements and loss_bytes in costs/memory.py"
    return Question(text, read, asked, count, (run,))


def terms_of_state(run: Work) -> dict[str, list[Term]]:
    """Return the terms of parameters, gradients and optimizer."""
    parallel, shapes = run.parallel, shapes_of(run.model.config)
    tensors = len(shapes["root"]) + run.model.config.n_layers * len(shapes["block"])
    terms = {}
    for kind, each in (("parameters", 4), ("gradients", 4), ("optimizer", 8)):
        n = getattr(parallel, parallel.strategy.sharded.get(kind, ""), 1)
        whole, pad = whole_model(run.model.config, n)
        cut = f" / {n} ranks" * (n > 1)
        padded = f"({whole:,} + {pad} of padding)" if pad else f"{whole:,}"
        size = "2 moments of 4 bytes" if kind == "optimizer" else "4 bytes"
        terms[kind] = [Term((whole + pad) // n * each, f"{padded} parameters{cut} x {size}")]
    terms["optimizer"].append(Term(tensors * 4, f"step counts of {tensors} tensors x 4 bytes"))
    return terms


def whole_model(config: LlamaConfig, shards: int = 1) -> tuple[int, int]:
    """Return the elements of a model's parameters, and those of padding for so many shards."""
    (root, padded_root), (block, padded_block) = elements_of(config, shards).values()
    return root + config.n_layers * block, padded_root + config.n_layers * padded_block


def terms_of_peak(run: Work) -> dict[str, list[Term]]:
    """Return the terms of the bytes that are held at two moments, in float32."""
    config, parallel, tokens, m = run.model.config, run.parallel, run.tokens, run.microbatches
    D, F, V, L = config.dim, config.ffn_dim, config.vocab_size, config.n_layers
    state = terms_of_state(run)
    terms, sums = [*state["parameters"], *state["optimizer"]], 0  # those of both moments
    if m > 1 or parallel.dp == "ddp":
        sums = sum(whole_model(config, parallel.shard))
        why = "sums over microbatches" if m > 1 else "DDP's buckets"
        if parallel.reshard == "all":
            sums, why = sums // parallel.shard, f"{why}, sharded"
        terms.append(Term(sums * 4, f"gradients, {why}: {sums:,} x 4 bytes"))
    if parallel.strategy.uses_fsdp:
        n = L if parallel.reshard == "none" else min(2, L)
        which = f"those of {plural(n, 'block')}" + ", this one and the next" * (n < L)
        (root, root_pad), (block, block_pad) = elements_of(config, parallel.shard).values()
        weights = root + root_pad + n * (block + block_pad)
        text = f"gathered weights, the root's and {which}: {weights:,} x 4 bytes"
        terms.append(Term(weights * 4, text))
    times = SAVED[parallel.checkpointing]
    saved, words = saved_in_block(config, times)
    text = f"saved for backward: {plural(L, 'block')} x {tokens} tokens x {words} x 4 bytes"
    terms.append(Term(L * tokens * saved * 4, text))

    norm = f"last norm and its gradient: {tokens} tokens x 4 x {D} x 4 bytes"
    # The larger: log softmax, its gradient and the logits'; or gradients of logits and matrix.
    n, of_matrix = (3, 1) if 2 * tokens >= D else (1, 2)
    logits = f"logits{', log softmax, gradients' * (n > 1)}: {tokens} tokens x {V} x {n} x 4 bytes"
    matrix = f"gradient of the output matrix: {V} x {D} x {of_matrix} x 4 bytes"
    in_loss = [Term(tokens * D * 16, norm), Term(tokens * V * n * 4, logits)]
    in_loss.append(Term(V * D * of_matrix * 4, matrix))
    again, sum_again = saved_in_block(config, [a - b for a, b in zip(SAVED["none"], times)])
    text = f"gradients of stream, gate and up: {tokens} tokens x ({D} + 2 x {F}) x 4 bytes"
    in_block = [Term(tokens * (D + 2 * F) * 4, text)]
    if again:
        text = f"the last block, computed again: {tokens} tokens x {sum_again} x 4 bytes"
        in_block.append(Term(tokens * again * 4, text))
    if not sums:
        in_block.append(Term(V * D * 4, f"gradient of the output matrix: {V} x {D} x 4 bytes"))
    return {"in the loss": terms + in_loss, "in backward of the last block": terms + in_block}


def saved_in_block(config: LlamaConfig, times: Iterable[int]) -> tuple[int, str]:
    """Return the elements a token that a block saves for backward, as a number and as a sum: so
    many times D, KV E, F, and a logsumexp for each head."""
    widths = config.dim, config.n_kv_heads * config.head_dim, config.ffn_dim, config.n_heads
    pairs = [(n, width) for n, width in zip(times, widths) if n]
    words = " + ".join(f"{n} x {width}" for n, width in pairs)
    return sum(n * width for n, width in pairs), f"({words})"


# --------------------------------------------------------------------------------------- counts


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
        terms = terms_of_counts(run)
        found = [explained(more.attentions - few.attentions, terms["attention"])]
        for key in collectives:
            found.append(explained(more.sent[key][0] - few.sent[key][0], terms[key[1]]))
        return found

    text = [
        "A model of many equal blocks.",
        f"{run.parallel.size} ranks: {flags_of(parallel)}.",
        f"A step, on each rank: {run.microbatches} microbatches. How often, in one step?",
    ]
    return Question(text, "docstrings of fsdp and recompute in parallel.py", asked, count, (run,))


def terms_of_counts(run: Work) -> dict[str, list[Term]]:
    """Return the terms of the runs of attention, and of each collective's calls for a block."""
    m, parallel = run.microbatches, run.parallel
    forward = Term(m, f"forward: {m} microbatches")
    attention = [forward]
    if parallel.checkpointing == "full":
        attention.append(Term(m, f"computed again in backward: {m} microbatches"))
    elif parallel.checkpointing == "selective":
        attention.append(Term(0, "in backward not again: its output is saved"))
    backward = Term(m, f"again in backward, as sharded after forward: {m} microbatches")
    gathers = [forward, backward]
    if parallel.reshard == "none":
        gathers = [Term(1, "once: weights stay whole until the step's last backward")]
    scatters = [Term(1, "once: gradients add up on the rank until the last microbatch")]
    if parallel.reshard == "all":
        scatters = [Term(m, f"gradients of each of {m} microbatches")]
    reduces = [Term(1, "once: slices of gradients add up until the last microbatch")]
    return {"attention": attention, "all-gather": gathers, "reduce-scatter": scatters,
            "all-reduce": reduces}  # fmt: skip


def count_step(run: Work) -> Counted:
    """Run forward and backward of a step with real tensors."""
    with first_rank(run.model.config, run.parallel) as (_, runner, world):
        batch = random_batch(run.model.config, run.sequences, run.seq_len)
        with Counted(world) as counted:
            accumulate(runner, batch, run.microbatch, world)
    return counted
