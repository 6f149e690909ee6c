"""Every way to split a training over a cluster, and what each costs: `bench.py plan`."""

import functools
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from config import LAYOUTS, Work
from costs.machines import Machine
from costs.page import holds, sends, sent_bytes
from costs.search import ACTIVATIONS, USABLE_FRACTION, divisors
from costs.seconds import step_time
from model import LlamaConfig
from parallel import refusal
from plumbing.messages import with_progress
from techniques.technique import Technique

FILTERS = [*LAYOUTS, "microbatch"]  # flags that fix part of a plan
MOST_RANKS = 16  # of a pipeline, unless --pp asks for more
LEAST_TOKENS = 8192  # of a sequence on a rank that shares it, unless --cp asks for fewer
# Schedule and stages of a rank. GPipe is left out: 1F1B takes as long, with less memory.
PIPELINES = [("1f1b", 1), ("interleaved", 2), ("interleaved", 4)]


@dataclass(frozen=True)
class Plan:
    """One way to train on the cluster, and its predicted cost on the rank with the most."""

    work: Work
    machine: Machine

    # Each when it is asked for: of plans that do not fit nobody asks for the time.
    @functools.cached_property
    def memory(self) -> dict[str, float]:
        """Bytes by kind, and the `peak`: see costs/page.py."""
        return holds(self.work)

    @property
    def fits(self) -> bool:
        return self.memory["peak"] <= USABLE_FRACTION * self.machine.memory

    @property
    def activations(self) -> str:
        """How activations are kept, as in ACTIVATIONS."""
        settings = vars(self.work.parallel).items()
        (name,) = (name for name, way in ACTIVATIONS.items() if way.items() <= settings)
        return name

    @property
    def sent(self) -> int:
        """Bytes that a rank sends in a step."""
        return sent_bytes(sends(self.work), self.work.parallel)

    @functools.cached_property
    def parts(self) -> dict[str, float]:
        """Seconds of a step by part: see costs/seconds.py."""
        return step_time(self.work, self.machine)

    @functools.cached_property
    def seconds(self) -> float:
        return sum(self.parts.values())

    @property
    def tokens_per_second(self) -> float:
        """Tokens that a GPU trains on in a second."""
        work = self.work
        return work.batch * work.seq_len / self.seconds / work.parallel.size


def order(plan: Plan) -> tuple:
    """Sort key: plans that fit first, from the fastest; then the others, from the smallest."""
    return not plan.fits, plan.seconds if plan.fits else plan.memory["peak"]


def tp_sizes(config: LlamaConfig, gpus: int) -> list[int]:
    """Return the sizes of tensor parallelism that a model and so many GPUs allow."""
    return divisors(math.gcd(gpus, config.n_kv_heads, config.ffn_dim, config.dense_dim))


def every_plan(
    work: Work, gpus: int, machine: Machine, wanted: dict[str, object], *techniques: Technique
) -> Iterator[Plan]:
    """Yield every plan for the batch of `work` on a cluster, with the dtypes, the optimizer and the
    products that `work.parallel` asks for. `wanted` has values of FILTERS, None for any.
    `techniques` are those that parallelism does not know."""
    config = work.model.config
    ep_sizes = divisors(math.gcd(gpus, config.n_experts)) if config.n_experts else [1]
    frozen = any(not parameter.requires_grad for parameter in work.model.parameters())
    most_stages = min(config.n_layers, wanted["pp"] or MOST_RANKS)
    sizes = list(itertools.product(tp_sizes(config, gpus), divisors(gpus)))
    for tp, pp in with_progress(sizes, "plans"):
        ranks, rest = divmod(gpus, tp * pp)  # with different sequences
        if rest or pp > most_stages:
            continue
        for (dp, shard), (cp, microbatch), ep in itertools.product(
            data_parallel_choices(ranks),
            shares_of_batch(ranks, work, wanted["cp"]),
            ep_sizes,
        ):
            mesh = dict(pp=pp, replicate=ranks // shard, shard=shard, tp=tp, cp=cp, ep=ep)
            parallel = replace(work.parallel, dp=dp, **mesh)
            split = replace(work, parallel=parallel, microbatch=microbatch)
            if split.microbatches < pp:  # ranks of the pipeline would wait half of the time or more
                continue
            for planned in ways_to_compute(split, frozen):
                settings = vars(planned.parallel) | {"microbatch": microbatch}
                matches = all(wanted[name] in (None, "auto", settings[name]) for name in FILTERS)
                if matches and not refusal(planned, *techniques):
                    yield Plan(planned, machine)


def ways_to_compute(split: Work, frozen: bool) -> Iterator[Work]:
    """Yield a step on a mesh with each way to keep activations, each --reshard that may be worth
    it, and each order of a pipeline's microbatches. `frozen`: some of the weights are."""
    parallel = split.parallel
    reshards = ["weights"]
    if parallel.shard > 1 and split.microbatches > 1:  # which may share all-gathers
        reshards.append("none")
        if parallel.pp == 1:  # else gradients are those of a stage: to shard them saves little
            reshards.append("all")
    if parallel.shard > 1 and frozen:
        reshards.append("adapters")
    pipelines = PIPELINES if parallel.pp > 1 else PIPELINES[:1]
    for activations, reshard, (schedule, v) in itertools.product(
        ACTIVATIONS.values(), reshards, pipelines
    ):
        order = dict(reshard=reshard, schedule=schedule, stages_per_rank=v)
        yield replace(split, parallel=replace(parallel, **activations, **order))


def shares_of_batch(ranks: int, work: Work, wanted_cp: int | None) -> Iterator[tuple[int, int]]:
    """Yield (ranks that share a sequence, sequences of a microbatch) for so many ranks of data
    parallelism."""
    for cp in divisors(ranks):
        sequences, rest = divmod(work.batch * cp, ranks)  # of a step, on each rank
        long_enough = cp in (1, wanted_cp) or work.seq_len // cp >= LEAST_TOKENS
        if long_enough and not rest:
            for microbatch in divisors(sequences):
                yield cp, microbatch


def data_parallel_choices(ranks: int) -> list[tuple[str, int]]:
    """Return (strategy, shard size) for so many ranks with different sequences. HSDP's shard size
    may be any divisor of the ranks, not only the ranks of a node, but 1, which is DDP, and all,
    which is FSDP."""
    choices = [("ddp", 1)]
    if ranks > 1:
        choices.append(("zero1", 1))
        choices += [("hsdp", shard) for shard in divisors(ranks)[1:-1]]
        choices.append(("fsdp", ranks))
    return choices
