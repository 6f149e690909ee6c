"""The check of labs/memory."""

import random
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch.distributed as dist
from torch.utils._pytree import tree_leaves

from config import ParallelConfig
from labs.machinery.compare import Property
from labs.machinery.lab import first_rank
from labs.machinery.student import check_returned
from model import LlamaConfig
from parallel import zero_gradients
from perf.instruments import Live, build_on_meta, random_batch, state_tensors
from plumbing.shards import to_local
from techniques.optimizers import make_optimizer
from train import accumulate

FUNCTION = "memory"
ABOUT = "bytes by kind, and at the peak"
NEEDS = "elements a token, AdamW's state"
POINT = "sharding divides state, not activations or logits"
LEADS_TO = "costs/page.py", "holds"
SIZES = (1,)  # the other ranks of a mesh do not exist
BARRED = "costs.page.holds", "costs.page.saved", "perf.instruments.emulate"
HINTS = (
    "Look at the picture in the docstring of `fsdp`: what does a rank hold a part of? And which of "
    "the seven kinds come from a rank's own sequences, which nobody else has?",
    "Count elements first, and bytes at the end. Think of the moment when the last microbatch's "
    "loss is computed: which blocks still hold what they saved? Which gradients are there already?",
    "Elements of the whole model, and over how many ranks they are sharded. Three cases for sums. "
    "What a block saves, by checkpointing. The larger of loss and backward. Then a dict of seven "
    "products.",
)
STATE = "parameters", "gradients", "optimizer"
AT_PEAK = "sums", "gathered", "activations", "computing"
KINDS = STATE + AT_PEAK
WITHIN = 0.1  # of the peak


class Step(NamedTuple):
    """The arguments of the student's function."""

    config: LlamaConfig
    root: int
    block: int
    dp: str
    ranks: int
    reshard: str
    checkpointing: str
    microbatches: int
    tokens: int

    def __str__(self) -> str:
        c, reshard = self.config, f", reshard {self.reshard}" * (self.dp == "fsdp")
        return (
            f"{self.dp} on {self.ranks} ranks{reshard}, checkpointing {self.checkpointing}, "
            f"{self.microbatches} microbatch{'es' * (self.microbatches > 1)} of {self.tokens} "
            f"tokens; D {c.dim}, KV {c.n_kv_heads}, E {c.head_dim}, F {c.ffn_dim}, V "
            f"{c.vocab_size}; a root of {self.root:,} elements, {c.n_layers} blocks of "
            f"{self.block:,}"
        )


class Case(NamedTuple):
    """What is not drawn of a step, and the ranges of what is."""

    dp: str
    reshard: str = "weights"
    checkpointing: str = "none"
    microbatches: int = 1
    layers: int = 4
    vocab: tuple[int, int] = (96, 256)
    tokens: tuple[int, int] = (48, 96)


# In each another kind is large.
CASES = {
    "ddp": Case("ddp"),
    "ddp full": Case("ddp", checkpointing="full", microbatches=2, tokens=(160, 200)),
    "fsdp": Case("fsdp", layers=3, vocab=(1536, 2048), tokens=(96, 128)),
    "fsdp weights": Case("fsdp", microbatches=2, layers=6),
    "fsdp all": Case("fsdp", "all", microbatches=2, layers=6, tokens=(64, 96)),
    "fsdp full": Case("fsdp", checkpointing="full", microbatches=2, tokens=(192, 256)),
}


def draw(case: Case, rng: random.Random) -> Step:
    """Draw a model, and numbers of ranks, which divide the rows of all parameters, and tokens."""
    dim = 16 * rng.randint(3, 6)
    config = LlamaConfig(
        dim,
        case.layers,
        n_heads=4,
        n_kv_heads=2,
        ffn_dim=8 * rng.randint(2 * dim // 8, 3 * dim // 8),
        vocab_size=8 * rng.randint(*(n // 8 for n in case.vocab)),
    )
    model = build_on_meta(config)
    block = sum(p.numel() for p in model.layers["0"].parameters())
    root = sum(p.numel() for p in model.parameters()) - case.layers * block
    ranks, tokens = rng.choice((4, 8)), rng.randint(*case.tokens)
    rest = case.reshard, case.checkpointing, case.microbatches, tokens
    return Step(config, root, block, case.dp, ranks, *rest)


EXAMPLE = Step(LlamaConfig(16, 3, 2, 1, 32, 32), 1040, 2336, "ddp", 4, "weights", "none", 1, 32)


def count(step: Step) -> dict[str, int]:
    """Return the bytes of state, and at the `peak`, of the project's training step."""
    sizes = {"replicate" if step.dp == "ddp" else "shard": step.ranks}
    options = dict(reshard=step.reshard, checkpointing=step.checkpointing)
    with first_rank(step.config, ParallelConfig(step.dp, **sizes, **options)) as ready:
        model, runner, world = ready
        optimizer = make_optimizer(model, ParallelConfig())
        batch = random_batch(step.config, step.microbatches, step.tokens)

        def train() -> dict[str, int]:
            accumulate(runner, batch, 1, world)
            kinds = state_tensors(model, optimizer).items()
            held = {kind: sum(to_local(t).nbytes for t in tensors if t.ndim)
                    for kind, tensors in kinds}  # fmt: skip
            optimizer.step()
            zero_gradients(optimizer, world)
            return held

        for _ in range(2 if step.dp == "ddp" else 1):  # AdamW's moments, and DDP's final buckets
            train()
        with Live(tree_leaves(state_tensors(model, optimizer))) as live:
            held = train()
    return held | {"peak": live.peak}


def on_rank(load: Callable, size: int, seed: int, rank: int) -> list[tuple]:
    """Return the example and a step of each case, with what the student's function says of it, and
    what was counted."""
    rng = random.Random(seed)
    steps = {"example": EXAMPLE} | {name: draw(case, rng) for name, case in CASES.items()}
    memory = load()
    said = [checked(memory(**step._asdict())) for step in steps.values()]
    dist.destroy_process_group()  # that of this one rank
    return list(zip(steps, steps.values(), said, map(count, steps.values())))


def checked(said: object) -> dict[str, float]:
    """Return what the student's function returned. Raises an exception for another format."""
    check_returned(said, dict, f"a dict of the bytes of {', '.join(KINDS)}")
    for kind in KINDS:
        if kind not in said:
            raise KeyError(f"no {kind}: the kinds are {', '.join(KINDS)}")
        check_returned(said[kind], (int | float,), f"bytes of {kind}, a number")
    return said


def properties(results: list, size: int, seed: int) -> Iterator[Property]:
    for name, step, said, counted in results[0]:
        for kind in STATE:
            if said[kind] != counted[kind]:
                text = f"{kind}: {said[kind]:,} bytes; counted {counted[kind]:,}"
                mistake = f"{of_state(step, kind, said[kind])} Here: {step}."
                yield Property(name, text, False, mistake)
                return
        peak = said["parameters"] + said["optimizer"] + sum(said[kind] for kind in AT_PEAK)
        off = peak / counted["peak"] - 1
        text = f"state exact; peak {counted['peak']:,} bytes, predicted {off:+.1%}"
        mistake = f"{of_peak(step, said)} Here: {step}."
        yield Property(name, text, abs(off) <= WITHIN, mistake)


def of_state(step: Step, kind: str, nbytes: float) -> str:
    """Return the sentence for the mistake that gives these bytes of a kind of state."""
    whole = 4 * (step.root + step.config.n_layers * step.block)
    one_moment = whole if step.dp == "ddp" else whole // step.ranks
    if kind == "optimizer" and nbytes == one_moment:
        return "You count 2 bytes for each of AdamW's two moments, or 4 for one: each has 4."
    if step.dp == "ddp" and nbytes * step.ranks in (whole, 2 * whole):
        return "DDP shards nothing: each rank holds all of its state."
    if step.dp == "fsdp" and nbytes in (whole, 2 * whole):
        return "FSDP shards parameters, gradients and moments."
    return f"The model has {whole // 4:,} parameters, in a root and {step.config.n_layers} blocks."


def of_peak(step: Step, said: dict[str, float]) -> str:
    """Return the sentence for what is farthest off of the kinds at the peak."""
    right, mistakes = known_mistakes(step)
    kind = max(AT_PEAK, key=lambda kind: abs(said[kind] - right[kind]))
    for sentence, value in mistakes[kind].items():
        if abs(said[kind] - value) <= 0.02 * value:
            return sentence
    return f"Farthest off is {kind}: it is too {'large' if said[kind] > right[kind] else 'small'}."


def known_mistakes(step: Step) -> tuple[dict[str, float], dict[str, dict[str, float]]]:
    """Return the bytes of each kind at the peak, and those that known mistakes give: sentence ->
    bytes."""
    c, m, tokens, n = step.config, step.microbatches, step.tokens, step.ranks
    D, F, V, L = c.dim, c.ffn_dim, c.vocab_size, c.n_layers
    root, block, whole = 4 * step.root, 4 * step.block, 4 * (step.root + L * step.block)
    in_buckets, adds_up = step.dp == "ddp", m > 1 and step.reshard == "weights"
    everything = 8 * D + 2 * c.n_kv_heads * c.head_dim + 4 * F
    saved = L * tokens * 4 * (D if step.checkpointing == "full" else everything)
    recomputed = L * tokens * 4 * everything - saved
    matrix, logits = 4 * V * D, 4 * tokens * 3 * V
    loss = matrix + logits + 4 * tokens * 3 * D
    backward = recomputed / L + 4 * tokens * (D + 2 * F)
    right = {
        "sums": whole if in_buckets or adds_up else whole // n * (m > 1),
        "gathered": 0 if step.dp == "ddp" else root + 2 * block,
        "activations": saved,
        "computing": max(loss, backward),
    }
    one = "Only one microbatch is under way: what others needed is freed."
    sums = {
        "Gradients of earlier microbatches are forgotten: they wait for the last one's.": 0,
        "Under weights gradients add up unsharded.": whole // n,
        "Under all gradients are sharded after each microbatch.": whole,
    }
    if in_buckets:
        sums = {"DDP has buckets for all gradients from the start.": 0}
    elif m == 1:
        sums = {"With 1 microbatch no gradient is there when its loss is computed.": whole}
    return right, {
        "sums": sums,
        "gathered": {
            "FSDP computes with whole weights: the root's, a block's and the next one's.": 0,
            "A block's weights are freed after use: two blocks are whole at a time.": whole,
            "While a block computes, the next one is gathered already.": root + block,
            "DDP gathers nothing: its weights are whole.": root + 2 * block,
        },
        "activations": {
            "Under full a block saves its input alone.": saved + recomputed,
            "FSDP does not shard activations: each rank has sequences of its own.": saved / n,
            "When the loss is computed, all blocks hold what they saved.": saved / L,
            "An element has 4 bytes.": saved / 2,
            one: saved * m,
        },
        "computing": {
            "Logits and softmax are forgotten.": max(loss - logits, backward),
            "Each rank computes all logits of its tokens.": max(
                loss - logits + logits / n, backward
            ),
            "Under full, backward computes again what was not saved.": loss,
            "The loss is over when backward begins: the larger of both counts.": loss + backward,
            one: max(matrix + (loss - matrix) * m, backward * m),
        },
    }
