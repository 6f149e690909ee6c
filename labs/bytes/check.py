"""The check of labs/bytes."""

import itertools
import random
from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import NamedTuple

import torch
import torch.distributed as dist

from config import ParallelConfig
from costs.page import Traffic
from labs.machinery.compare import Property
from labs.machinery.lab import first_rank
from labs.machinery.student import check_returned
from model import LlamaConfig
from perf.instruments import Counted, build_on_meta, random_batch
from train import accumulate

FUNCTION = "traffic"
ABOUT = "the calls and bytes of a step"
NEEDS = "ceiling division, the payload of a collective"
POINT = "what is kept need not be sent again"
LEADS_TO = "costs/page.py", "sends"
SIZES = (1,)  # the other ranks of a mesh do not exist
BARRED = "costs.page.sends", "costs.page._of_gradients", "perf.instruments.emulate"
HINTS = (
    "Look at the docstring of `fsdp`: what does each value of `reshard` free after use? What is "
    "freed has to be gathered again, or sent at once.",
    "Count how often a step uses the weights of a block: forward and backward, in each microbatch. "
    "Before which of these uses are they there already? Then do the same for the root, which "
    "backward needs first.",
    "A helper for the elements of a list of parameters, with rows rounded up. An early return for "
    "ddp. Then three numbers that depend on reshard: all-gathers of the root, of a block, and "
    "reduce-scatters of each. hsdp adds an all-reduce of slices.",
)
GATHER, SCATTER = ("shard", "all-gather"), ("shard", "reduce-scatter")
REDUCE = "replicate", "all-reduce"
KEYS = GATHER, SCATTER, REDUCE
MODES = "ddp none, fsdp none, fsdp weights, fsdp all, hsdp weights, hsdp all".split(", ")
Unit = list[tuple[int, int]]  # rows and columns of each parameter


def elements(unit: Unit, shard: int, rounded: str = "rows") -> int:
    """Return the elements of parameters whose "rows" are rounded up to a multiple of `shard`; or by
    mistake their "product" with the columns, or "nothing"."""

    def up(n: int) -> int:
        return -(-n // shard) * shard

    if rounded == "rows":
        return sum(up(rows) * columns for rows, columns in unit)
    sizes = [rows * columns for rows, columns in unit]
    return sum(map(up, sizes)) if rounded == "product" else sum(sizes)


class Step(NamedTuple):
    """The arguments of the student's function."""

    dp: str
    root: Unit
    block: Unit
    layers: int
    replicate: int
    shard: int
    reshard: str
    microbatches: int
    weight_bytes: int
    grad_bytes: int

    def __str__(self) -> str:
        mesh = f"{self.replicate} replicas" * (self.replicate > 1)
        mesh += " of " * (self.dp == "hsdp") + f"{self.shard} shards" * (self.shard > 1)
        mesh += f", reshard {self.reshard}" * (self.shard > 1)
        root, block = (elements(unit, self.shard) for unit in (self.root, self.block))
        return (
            f"{self.dp}, {mesh}, {self.microbatches} microbatch{'es' * (self.microbatches > 1)}, a "
            f"root of {root:,} elements, {self.layers} blocks of {block:,}, {self.weight_bytes} "
            f"bytes a weight, {self.grad_bytes} a gradient"
        )


EXAMPLE = Step("fsdp", [(12, 4), (4, 1)], [(8, 4), (4, 8)], 2, 1, 4, "weights", 1, 4, 4)
IN_EXAMPLE = {GATHER: (5, 1232), SCATTER: (3, 720)}


def draw(mode: str, rng: random.Random) -> tuple[Step, LlamaConfig, ParallelConfig]:
    """Draw a model and a mesh. The shards divide neither rows nor columns of the embedding."""
    dp, reshard = mode.split()
    shard = rng.choice({"ddp": (1,), "fsdp": (3, 5, 7), "hsdp": (2, 3)}[dp])
    replicate = 1 if dp == "fsdp" else rng.choice((2, 3, 4))
    dim, ffn_dim = rng.choice((16, 32, 44, 52)), rng.randrange(30, 60)
    vocab = rng.randrange(90 // shard, 150 // shard) * shard + 1
    config = LlamaConfig(dim, rng.choice((2, 3)), 2, 1, ffn_dim, vocab, tie_embeddings=dp == "hsdp")
    dtype = torch.float32 if reshard == "weights" else torch.bfloat16
    parallel = ParallelConfig(dp, replicate, shard, reshard=reshard, dtype=dtype)
    model = build_on_meta(config)
    block = [(*p.shape, 1)[:2] for p in model.layers["0"].parameters()]
    root = [(*p.shape, 1)[:2] for n, p in model.named_parameters() if not n.startswith("layers.")]
    mesh = config.n_layers, replicate, shard, reshard, rng.choice((3, 4))
    step = Step(dp, root, block, *mesh, parallel.weight_bytes, parallel.grad_bytes)
    return step, config, parallel


def count(step: Step, config: LlamaConfig, parallel: ParallelConfig) -> Traffic:
    """Return what the project's DDP or FSDP sends in a training step."""
    with first_rank(config, parallel) as (_, runner, world):
        batch = random_batch(config, step.microbatches, seq_len=2)
        for _ in range(3 if step.dp == "ddp" else 1):  # in its second step DDP arranges its buckets
            with Counted(world) as counted:
                accumulate(runner, batch, 1, world)
    return counted.sent


def on_rank(load: Callable, size: int, seed: int, rank: int) -> list[tuple[Step, Traffic, Traffic]]:
    """Return the example and a step of each mode, with what the student's function says of it, and
    what was counted."""
    rng = random.Random(seed)
    drawn = [draw(mode, rng) for mode in MODES]
    steps = [EXAMPLE, *(step for step, _, _ in drawn)]
    traffic = load()
    said = [checked(traffic(**step._asdict())) for step in steps]
    dist.destroy_process_group()  # that of this one rank
    return list(zip(steps, said, [IN_EXAMPLE, *itertools.starmap(count, drawn)]))


def checked(said: object) -> Traffic:
    """Return the collectives that are called at all. Raises an exception for another format."""
    check_returned(said, dict, "a dict: (dimension, collective) -> (calls, bytes)")
    for key, value in said.items():
        if key not in KEYS:
            raise ValueError(f"{key} is none of {', '.join(map(str, KEYS))}")
        check_returned(value, (int | float,) * 2, f"(calls, bytes) for {key}")
    return {key: value for key, value in said.items() if value != (0, 0)}


def properties(results: list, size: int, seed: int) -> Iterator[Property]:
    for step, said, counted in results[0]:
        name = "ddp" if step.dp == "ddp" else f"{step.dp} {step.reshard}"
        calls, nbytes = map(sum, zip(*counted.values()))
        text, mistake = f"{calls} call{'s' * (calls > 1)} with {nbytes:,} bytes", ""
        wrong = [key for key in KEYS if said.get(key) != counted.get(key)]
        for key in wrong[:1]:
            found, right = (traffic.get(key, (0, 0)) for traffic in (said, counted))
            text = f"{key[1]}: {found[0]} with {found[1]:,.10g} bytes"
            text += f"; counted {right[0]} with {right[1]:,}"
            mistake = f"{explain(step, key, found)} Here: {step}."
        yield Property("example" if step == EXAMPLE else name, text, not wrong, mistake)


class Terms(NamedTuple):
    """What the calls and bytes of a collective are made of."""

    root: int  # calls for the root
    block: int  # calls for each block
    each: int  # bytes of an element
    share: Fraction = Fraction(1)  # of the elements
    rounded: str = "rows"

    def total(self, step: Step) -> tuple[int, Fraction]:
        """Return calls and bytes."""
        root, block = (elements(unit, step.shard, self.rounded) for unit in (step.root, step.block))
        calls = self.root + step.layers * self.block * (step.dp != "ddp")
        return calls, (self.root * root + step.layers * self.block * block) * self.each * self.share


def explain(step: Step, key: tuple[str, str], found: tuple[int, float]) -> str:
    """Return the sentences of one or two mistakes that give what was found; "" if none do."""
    if step.dp == "ddp" and key != REDUCE:
        return "DDP shards nothing."
    if step.dp == "fsdp" and key == REDUCE:
        return "FSDP has no replicas."
    if found == (0, 0):
        return f"There is also an {key[1]} over {key[0]}."
    right, mistakes = known_mistakes(step, key)
    for several in (*itertools.combinations(mistakes, 1), *itertools.combinations(mistakes, 2)):
        changes = {name: value for _, change in several for name, value in change.items()}
        calls, nbytes = right._replace(**changes).total(step)
        if calls == found[0] and abs(nbytes - found[1]) < 1:
            return " ".join(sentence for sentence, _ in several)
    calls, nbytes = right.total(step)
    if found[1] == nbytes:
        return "The bytes are right: a call has the root or one block, and in DDP all gradients."
    return "The calls are right: add up what each of them has." * (found[0] == calls)


def known_mistakes(step: Step, key: tuple[str, str]) -> tuple[Terms, list[tuple[str, dict]]]:
    """Return the right terms of a collective, and mistakes: a sentence, and which terms the mistake
    changes. (Where it changes nothing, it is never found.)"""
    m, n, w, g = step.microbatches, step.shard, step.weight_bytes, step.grad_bytes
    in_each = dict(root=m, block=m)
    if key == GATHER and step.reshard == "none":
        right = Terms(1, 1, w)
        sentence = (
            "Under none the weights stay until the step ends: one all-gather serves forward and "
            "backward of all microbatches."
        )
        often = itertools.product((1, 2, m, 2 * m), repeat=2)
        mistakes = [(sentence, dict(root=root, block=block)) for root, block in often]
    elif key == GATHER:
        right = Terms(m, 2 * m, w)
        again = "You gather the root again in backward. That begins with the root, so it is kept."
        freed = "A block's weights are freed after forward: backward gathers them again."
        one = f"These are the all-gathers of 1 microbatch. There are {m}, and each frees all."
        kept = "The root is kept until its backward, and gathered again in each microbatch."
        mistakes = [
            (again, dict(root=2 * m)), (freed, dict(block=m)), (one, dict(root=1, block=2)),
            (kept, dict(root=1)),
        ]  # fmt: skip
    elif key == SCATTER:
        times = m if step.reshard == "all" else 1
        right = Terms(times, times, g)
        add_up = (
            f"You reduce-scatter in each of {m} microbatches. Under {step.reshard} gradients add "
            f"up on the rank, and the last microbatch sends the sum."
        )
        sent = f"Under all no whole gradients are kept: each of {m} microbatches sends its own."
        mistakes = [(add_up, in_each), (sent, dict(root=1, block=1))]
    else:
        right = Terms(1, 1, g, Fraction(1, n))
        whole = "You all-reduce whole gradients. After the reduce-scatter a rank has a slice."
        once = "Replicas exchange their gradients once a step, in its last microbatch."
        mistakes = [(whole, dict(share=Fraction(1))), (once, in_each)]
    rows = step.root[0][0]
    of_each = f"of {rows} rows each of {n} shards has {-(-rows // n)}, padded"
    ranks = step.replicate if key == REDUCE else n
    in_ring = right.share * Fraction(ranks - 1, ranks) * (1 + (key == REDUCE))
    return right, [
        *mistakes,
        (f"Rows are not rounded up in your formula: {of_each}.", dict(rounded="nothing")),
        (
            f"You round up the number of elements. Rows are dealt out: {of_each}.",
            dict(rounded="product"),
        ),
        (f"A gradient travels in {g} bytes, a weight in {w}.", dict(each=w + g - right.each)),
        ("This is what a rank sends in a ring. The payload is asked for.", dict(share=in_ring)),
        (
            "You count one rank's slice. The payload is the larger side: what an all-gather "
            "returns, and what a reduce-scatter is given.",
            dict(share=Fraction(1, n)),
        ),
    ]
