"""Every way to train a model on a cluster, with its predicted cost, for `bench.py plan`."""

import argparse
import itertools
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import torch

import techniques.nf4 as nf4
from costs.choose import ACTIVATIONS, USABLE_FRACTION, divisors
from costs.memory import mask_width, predict_memory
from costs.seconds import Machine, find_measured_group, group_shape, step_time
from costs.traffic import DIMS, predict_traffic, sent_bytes
from model import Llama
from parallel import STRATEGIES, ParallelConfig
from plumbing.processes import with_progress

RESHARD = ("weights", "none", "all")
# Flags that fix part of a plan.
FILTERS = (
    "pp schedule stages_per_rank shard cp tp reshard checkpointing offload_activations microbatch"
).split()
MOST_RANKS = 16  # of a pipeline, unless --pp asks for more
LEAST_TOKENS = 8192  # of a sequence on a rank that shares it, unless --cp asks for fewer
PLANNED = ("1f1b", "interleaved", "zero-bubble")  # schedules
INTERLEAVED = (2, 4)  # stages of a rank


@dataclass(frozen=True)
class Plan:
    """One way to train on the cluster, and its predicted cost on rank 0."""

    parallel: ParallelConfig
    microbatch: int  # sequences
    memory: dict[str, int]  # bytes by kind, and the `peak`: see memory.predict_memory
    sent: dict[str, int]  # bytes that a rank sends in a step, by mesh dimension
    parts: dict[str, float]  # seconds of a step by part: see roofline.step_time
    fits: bool  # whether the peak fits in a GPU's memory

    @property
    def seconds(self) -> float:
        return sum(self.parts.values())

    @property
    def mesh(self) -> str:
        """The sizes of the mesh; that of pp only in a pipeline, with its schedule."""
        parallel = self.parallel
        sizes = " x ".join(str(getattr(parallel, dim)) for dim in ("replicate", "shard", "tp"))
        sizes += f", cp {parallel.cp}" * (parallel.cp > 1)
        if parallel.pp == 1:
            return sizes
        stages = f" of {parallel.stages_per_rank}" if parallel.stages_per_rank > 1 else ""
        return f"{parallel.pp} ({parallel.schedule}{stages}) x {sizes}"


def order(plan: Plan) -> tuple:
    """Sort key: plans that fit first, from the fastest; then the others, from the smallest."""
    return not plan.fits, plan.seconds if plan.fits else plan.memory["peak"]


def every_plan(model: Llama, args: argparse.Namespace, machine: Machine) -> Iterator[Plan]:
    """Yield every plan for --gpus and --batch that the flags in FILTERS allow.

    With --measured, leave out plans with groups of ranks that were not measured."""
    config, dtype = model.config, getattr(torch, args.dtype)
    # What zero bubble does not combine with.
    whole_backward = args.compile or args.async_tp or args.float8 != "none"
    blocks = nf4.BLOCK if args.base_bits == 4 else 1  # that tp cuts between
    widths = config.dim // blocks, config.ffn_dim // blocks
    tp_sizes = divisors(math.gcd(args.gpus, config.n_kv_heads, *widths))
    pairs = list(itertools.product(tp_sizes, divisors(args.gpus)))
    for tp, pp in with_progress(pairs, "plans"):
        data_ranks, rest = divmod(args.gpus, tp * pp)
        if rest or pp > min(config.n_layers, args.pp or MOST_RANKS):
            continue
        choices = data_parallel_choices(data_ranks, tp * pp)
        for (dp, shard), (cp, microbatch) in itertools.product(
            choices, list(shares_of_batch(data_ranks, args))
        ):
            microbatches = args.batch * cp // data_ranks // microbatch
            # The values of --reshard differ in how several microbatches share all-gathers.
            reshards = RESHARD if shard > 1 and microbatches > 1 else RESHARD[:1]
            reshards += ("adapters",) * (args.lora and shard > 1)
            if pp > 1:  # gradients of a few layers: sharding those of each microbatch saves little
                reshards = tuple(name for name in reshards if name != "all")
            for (checkpointing, offload), reshard, (schedule, v) in itertools.product(
                ACTIVATIONS[: len(ACTIVATIONS) - (pp > 1)],  # the last offloads
                reshards,
                schedules(pp, microbatches, config.n_layers, whole_backward),
            ):
                parallel = ParallelConfig(
                    dp=dp,
                    replicate=data_ranks // shard,
                    shard=shard,
                    tp=tp,
                    reshard=reshard,
                    checkpointing=checkpointing,
                    offload_activations=offload,
                    compile=args.compile,
                    dtype=dtype,
                    optimizer=args.optimizer or "adamw",
                    moments=args.moments,
                    float8=args.float8,
                    async_tp=args.async_tp and tp > 1,
                    pp=pp,
                    cp=cp,
                    schedule=schedule,
                    stages_per_rank=v,
                )
                if matches_flags(parallel, microbatch, args) and is_measured(parallel, machine):
                    yield predict(model, parallel, microbatch, microbatches, args, machine)


def shares_of_batch(data_ranks: int, args: argparse.Namespace) -> Iterator[tuple[int, int]]:
    """Yield (ranks that share a sequence, sequences of a microbatch) for `data_ranks` ranks of data
    parallelism."""
    for cp in divisors(data_ranks):
        long_enough = cp in (1, args.cp) or args.seq_len // cp >= LEAST_TOKENS
        sequences, rest = divmod(args.batch * cp, data_ranks)  # of a step, on each rank
        if long_enough and not rest and (cp == 1 or args.seq_len % (2 * cp) == 0):
            for microbatch in divisors(sequences):
                yield cp, microbatch


def schedules(
    pp: int, microbatches: int, n_layers: int, whole_backward: bool
) -> Iterator[tuple[str, int]]:
    """Yield (schedule, stages of a rank) for a pipeline. Left out are GPipe, since 1F1B takes as
    long with less memory; fewer microbatches than ranks, which would wait half of the time; and
    what cannot be carried out."""
    if pp == 1:
        yield "1f1b", 1
    elif microbatches >= pp:
        yield "1f1b", 1
        if not whole_backward:
            yield "zero-bubble", 1
        for v in INTERLEAVED:
            if microbatches % pp == 0 and pp * v <= n_layers:
                yield "interleaved", v


def data_parallel_choices(data_ranks: int, of_copy: int) -> Iterator[tuple[str, int]]:
    """Yield (strategy, shard size) for `data_ranks` ranks with different sequences, where `of_copy`
    ranks along tp and pp share theirs.

    HSDP's shard size may be any divisor of the ranks, not only the ranks of a node. A strategy that
    would be another one on these ranks is left out."""
    for dp, strategy in STRATEGIES.items():
        if of_copy > 1 and not strategy.splits_layers:
            continue
        for shard in sorted({strategy.shard_size(data_ranks, n) for n in divisors(data_ranks)}):
            sizes = {"replicate": data_ranks // shard, "shard": shard}
            # Sharding over one rank is DDP; a copy per node with all ranks in one node is FSDP.
            is_ddp = any(sizes[dim] == 1 for dim in strategy.sharded.values())
            is_fsdp = strategy.copy_per == "node" and shard == data_ranks
            if not is_ddp and not is_fsdp:
                yield dp, shard


def matches_flags(parallel: ParallelConfig, microbatch: int, args: argparse.Namespace) -> bool:
    """Return whether a plan has the values that flags in FILTERS give."""
    settings = vars(parallel) | {"microbatch": microbatch}
    return all(getattr(args, name) in (None, settings[name]) for name in FILTERS)


def is_measured(parallel: ParallelConfig, machine: Machine) -> bool:
    """Return whether groups of each mesh dimension were measured, if the machine was measured."""
    if not machine.measured:
        return True
    shapes = [group_shape(dim, parallel, machine) for dim in DIMS]
    return all(n == 1 or find_measured_group(n, in_node, machine) for n, in_node in shapes)


def predict(
    model: Llama,
    parallel: ParallelConfig,
    microbatch: int,
    microbatches: int,
    args: argparse.Namespace,
    machine: Machine,
) -> Plan:
    """Return a plan with its memory, the bytes that it sends, and its time."""
    fused = parallel.compile or not machine.measured  # assumed machines are GPUs
    seq_len, document = args.seq_len, args.document_length
    masked = mask_width(
        model.config, parallel, seq_len, torch.device("cuda"), documents=document > 0
    )
    tokens = microbatch * seq_len // parallel.cp
    memory = predict_memory(model, parallel, tokens, microbatches, fused, masked)
    sent = Counter()
    traffic = predict_traffic(model, parallel, microbatches, microbatch, seq_len)
    for (dim, collective), cost in traffic.items():
        sent[dim] += sent_bytes({(dim, collective): cost}, parallel)
    parts = step_time(model, parallel, microbatch, microbatches, seq_len, machine, document)
    fits = memory["peak"] <= USABLE_FRACTION * machine.memory
    return Plan(parallel, microbatch, memory, sent, parts, fits)
