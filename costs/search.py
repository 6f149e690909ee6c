"""Which ways to split a model fit, and what each costs: `--dp auto` and `bench.py plan`."""

import functools
import itertools
import math
import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from config import LAYOUTS, STRATEGIES, ParallelConfig, Work
from costs.machines import Machine
from costs.memory import fits_in, predict_memory, state_bytes
from costs.seconds import find_measured_group, group_shape, step_time
from costs.traffic import (
    DIMS,
    bytes_each,
    parts_of,
    predict_outer_traffic,
    predict_traffic,
    sent_bytes,
)
from parallel import World, refusal
from plumbing.processes import Process, memory_of_others, print_rank_zero, with_progress
from techniques.schedules import has_w
from techniques.technique import Technique

USABLE_FRACTION = 0.9  # of a device's memory, for tensors
# --checkpointing, --offload-activations: the later, the less memory and the more time.
ACTIVATIONS = (("none", False), ("selective", False), ("full", False), ("full", True))


def usable_memory(device: torch.device, processes: int) -> int:
    """Return the bytes that a process may fill: of its GPU, or of its share of CPU memory."""
    if device.type == "cuda":
        return int(USABLE_FRACTION * torch.cuda.get_device_properties(device).total_memory)
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return int(USABLE_FRACTION * total / processes)


def with_mesh_sizes(
    parallel: ParallelConfig, size: int, per_node: int, shard: int | None = None
) -> ParallelConfig:
    """Return a configuration with the sizes of replicate and shard that its strategy and its tp
    give on `size` processes. `shard`: the value of --shard, if given."""
    data_ranks = size // (parallel.tp * parallel.pp)
    in_node = shard or data_ranks_in_node(data_ranks, parallel.tp, per_node)
    shard = STRATEGIES[parallel.dp].shard_size(data_ranks, in_node)
    return replace(parallel, replicate=data_ranks // shard, shard=shard)


def data_ranks_in_node(data_ranks: int, tp: int, per_node: int) -> int:
    """Return how many of the ranks with different sequences share a node; in every node as many."""
    return math.gcd(data_ranks, max(1, per_node // tp))


def divisors(n: int) -> list[int]:
    return [i for i in range(1, n + 1) if n % i == 0]


# ---------------------------------------------------------------------------- a run chooses its own


def choose_parallel(
    work: Work, shard: int | None, process: Process, room: int
) -> tuple[ParallelConfig, str]:
    """Return the configuration of a step with its mesh sizes, and the reason in words.

    `work.parallel` is what the flags ask for: `dp` and `reshard` may be "auto". `shard` is the
    value of --shard, if given; `room` the memory in bytes that every rank may fill.
    --dp auto takes the first strategy whose step fits in memory: DDP where a whole copy fits on a
    device; on several nodes HSDP where a copy fits in a node; FSDP over all ranks otherwise.
    Gradients of several microbatches accumulate unsharded if there is room."""
    requested = work.parallel

    def split(dp: str, reshard: str) -> Work:
        parallel = replace(requested, dp=dp, reshard=reshard)
        parallel = with_mesh_sizes(parallel, process.size, process.per_node, shard)
        return replace(work, parallel=parallel)

    strategies, reshards = [requested.dp], [requested.reshard]
    if requested.dp == "auto":
        data_ranks = process.size // (requested.tp * requested.pp)
        in_node = data_ranks_in_node(data_ranks, requested.tp, process.per_node)
        strategies = [
            name
            for name, strategy in STRATEGIES.items()
            if strategy.automatic and (strategy.copy_per != "node" or 1 < in_node < data_ranks)
        ]
    if requested.reshard == "auto":
        splits_backward = requested.pp > 1 and has_w(requested.schedule)
        reshards = ["weights"] if splits_backward else ["weights", "all"]
    candidates = []
    for choice in (split(dp, reshard) for dp in strategies for reshard in reshards):
        parts = choice.microbatches if choice.parallel.strategy.uses_fsdp else 1
        if parts > 1 or choice.parallel.reshard == reshards[0]:  # reshard differs for several
            candidates.append(choice)
    chosen = next((choice for choice in candidates if fits_in(choice, room)), None)

    copy = predict_memory(split("ddp", "weights"))
    state = copy["parameters"] + copy["gradients"] + copy["optimizer"]
    reason = (
        f"weights, gradients and AdamW state of a copy take {state / 1e9:.3g} GB, with activations "
        f"{copy['peak'] / 1e9:.3g} GB; a process may use {room / 1e9:.3g} GB, and a node has "
        f"{process.per_node} of {process.size} processes"
    )
    if chosen is None:
        reason += (
            "; nothing is predicted to fit: try --checkpointing full or a smaller --microbatch"
        )
    return (chosen or candidates[-1]).parallel, reason


def sent_by_strategy(work: Work, shard: int | None, process: Process) -> str:
    """Return in words the megabytes that a rank would send in a step under each strategy.
    `work.parallel` is what the flags ask for, `shard` the value of --shard, if given."""
    requested = work.parallel
    room = process.minimum(usable_memory(process.device, process.per_node))
    choices = {
        f"--dp {dp}": dict(dp=dp, reshard="auto") for dp, s in STRATEGIES.items() if not s.own_steps
    }
    for reshard in ("none", "adapters"):
        choices[f"--dp fsdp --reshard {reshard}"] = dict(dp="fsdp", reshard=reshard)
    parts = []
    for flags, choice in choices.items():
        is_fsdp = STRATEGIES[choice["dp"]].copy_per == "node" and process.per_node == process.size
        wanted = replace(work, parallel=replace(requested, **choice))
        if not is_fsdp and not refusal(wanted):
            own_shard = shard if requested.dp == choice["dp"] else None
            parallel, _ = choose_parallel(wanted, own_shard, process, room)
            traffic = predict_traffic(replace(work, parallel=parallel))
            parts.append(f"{flags} {sent_bytes(traffic, parallel) / 1e6:,.2f} MB")
    return "; ".join(parts)


def what_would_fit(work: Work, process: Process) -> str:
    """Return a sentence that names flags with which a step that ran out of memory is predicted to
    fit. What costs less time is tried first: a smaller microbatch, recomputation, offloaded
    activations, AdamW's moments in bfloat16, FSDP, context parallelism."""
    parallel, data_ranks = work.parallel, work.parallel.replicate * work.parallel.shard
    room = usable_memory(process.device, process.per_node) - memory_of_others(process.device)
    needed = predict_memory(work)["peak"]
    limit = min(room, 0.9 * needed)  # a tenth less at least than what did not fit
    sizes = [n for n in reversed(divisors(work.sequences)) if n <= work.microbatch]
    present = parallel.checkpointing, parallel.offload_activations
    next_ones = ACTIVATIONS.index(present) + 1 if present in ACTIVATIONS else -1
    sharded = with_mesh_sizes(replace(parallel, dp="fsdp"), process.size, process.per_node)
    possible = (n for n in divisors(data_ranks) if work.seq_len % (2 * n) == 0 or n == 1)
    shared = replace(sharded, cp=max(n for n in possible if n % parallel.cp == 0))
    choices = itertools.product(
        (parallel, sharded, shared),
        dict.fromkeys((parallel.moments, "bfloat16")),
        (present, *ACTIVATIONS[next_ones:]),
        sizes,
    )

    def candidates() -> Iterator[Work]:
        for base, moments, (checkpointing, offload), size in choices:
            given = dict(moments=moments, checkpointing=checkpointing, offload_activations=offload)
            choice = replace(work, parallel=replace(base, **given), microbatch=size)
            if not refusal(choice) and fits_in(choice, limit):
                yield choice

    found = next(candidates(), None)
    if found is None:
        gigabytes = f"{room / 1e9:.3g} GB"
        return f"no flags make a step fit in {gigabytes}: use more GPUs, or a shorter --seq-len"
    new, flags = found.parallel, []
    for name in ("dp", "cp", "moments", "checkpointing"):
        if getattr(new, name) != getattr(parallel, name):
            flags.append(f"--{name} {getattr(new, name)}")
    flags += ["--offload-activations"] * (new.offload_activations > parallel.offload_activations)
    flags += [f"--microbatch {found.microbatch}"] * (found.microbatch != work.microbatch)
    told = f"a step is predicted to need {needed / 1e9:.3g} GB, and with {' '.join(flags)}"
    return f"{told} {predict_memory(found)['peak'] / 1e9:.3g}"


def fits_unsharded(work: Work, world: World) -> bool:
    """Return whether every rank has room for all weights beside what it holds between steps; where
    FSDP has to gather them for each token of a sample, print what that sends."""
    parallel = world.parallel
    w, parts = parallel.weight_bytes, parts_of(work.model, parallel)
    of_parts = (sum(p.numel() * bytes_each(p, w) for p in part.parameters()) for part in parts)
    nbytes = max(of_parts) // parallel.tp
    held = predict_memory(work)
    room = world.minimum(usable_memory(world.device, world.per_node))
    there_is_room = nbytes + held["parameters"] + held["optimizer"] < room
    if parallel.shard > 1 and not there_is_room:
        sent = nbytes * (parallel.shard - 1) / parallel.shard
        print_rank_zero(
            f"note: the weights do not fit on a rank at once, so that samples at evaluations "
            f"all-gather them for each token: a rank sends {sent / 1e9:.3g} GB"
        )
    return there_is_room


# ------------------------------------------------------------------------------- plans of a cluster

RESHARD = ("weights", "none", "all")
# Flags that fix part of a plan.
FILTERS = [*LAYOUTS, "microbatch"]
MOST_RANKS = 16  # of a pipeline, unless --pp asks for more
LEAST_TOKENS = 8192  # of a sequence on a rank that shares it, unless --cp asks for fewer
INTERLEAVED = (2, 4)  # stages of a rank


@dataclass(frozen=True)
class Plan:
    """One way to train on the cluster, and its predicted cost on the rank with the most."""

    work: Work
    machine: Machine

    # Each when it is asked for: most plans do not fit, and of those nobody asks for the time.
    @functools.cached_property
    def memory(self) -> dict[str, int]:
        """Bytes by kind, and the `peak`: see predict_memory."""
        return predict_memory(self.work)

    @functools.cached_property
    def least(self) -> int:
        """Bytes without which no moment of a step is: weights, gradients and optimizer."""
        return state_bytes(self.work)

    @functools.cached_property
    def fits(self) -> bool:
        """Whether the peak fits in a GPU's memory."""
        usable = USABLE_FRACTION * self.machine.memory
        return self.least <= usable and fits_in(self.work, usable)

    @functools.cached_property
    def sent(self) -> dict[str, int]:
        """Bytes that a rank sends in a step, by mesh dimension."""
        sent = Counter()
        for (dim, collective), cost in predict_traffic(self.work).items():
            sent[dim] += sent_bytes({(dim, collective): cost}, self.work.parallel)
        outer = sent_bytes(predict_outer_traffic(self.work), self.work.parallel)
        sent["replicate"] += outer // self.work.parallel.every
        return sent

    @functools.cached_property
    def parts(self) -> dict[str, float]:
        """Seconds of a step by part: see step_time."""
        return step_time(self.work, self.machine)

    @functools.cached_property
    def seconds(self) -> float:
        return sum(self.parts.values())

    @property
    def tokens_per_second(self) -> float:
        """Tokens that a GPU trains on in a second."""
        work = self.work
        return work.batch * work.seq_len / self.seconds / work.parallel.size

    @property
    def mesh(self) -> str:
        """The sizes of the mesh; that of pp only in a pipeline, with its schedule."""
        parallel = self.work.parallel
        sizes = " x ".join(str(getattr(parallel, dim)) for dim in ("replicate", "shard", "tp"))
        sizes += f", cp {parallel.cp}" * (parallel.cp > 1)
        if parallel.pp == 1:
            return sizes
        stages = f" of {parallel.stages_per_rank}" if parallel.stages_per_rank > 1 else ""
        return f"{parallel.pp} ({parallel.schedule}{stages}) x {sizes}"


def order(plan: Plan) -> tuple:
    """Sort key: plans that fit first, from the fastest; then the others, from those that hold least
    between steps."""
    return not plan.fits, plan.seconds if plan.fits else plan.least


def every_plan(
    work: Work, gpus: int, machine: Machine, wanted: dict[str, object], *techniques: Technique
) -> Iterator[Plan]:
    """Yield every plan for the batch of `work` on a cluster, with the dtypes, the optimizer and
    the products that `work.parallel` asks for. `wanted` has values of FILTERS, None for any.

    On a machine that was measured, leave out plans with groups of ranks that were not."""
    config, requested = work.model.config, work.parallel
    frozen = any(not parameter.requires_grad for parameter in work.model.parameters())
    tp_sizes = divisors(math.gcd(gpus, config.n_kv_heads, config.dim, config.ffn_dim))
    for tp, pp in with_progress(list(itertools.product(tp_sizes, divisors(gpus))), "plans"):
        data_ranks, rest = divmod(gpus, tp * pp)
        if rest or pp > min(config.n_layers, wanted["pp"] or MOST_RANKS):
            continue
        choices = data_parallel_choices(data_ranks, tp * pp, wanted["dp"])
        for (dp, shard), (cp, microbatch) in itertools.product(
            choices, list(shares_of_batch(data_ranks, work, wanted["cp"]))
        ):
            microbatches = work.batch * cp // data_ranks // microbatch
            # The values of --reshard differ in how several microbatches share all-gathers.
            reshards = RESHARD if shard > 1 and microbatches > 1 else RESHARD[:1]
            reshards += ("adapters",) * (frozen and shard > 1)
            if pp > 1:  # gradients of a few layers: sharding those of each microbatch saves little
                reshards = tuple(name for name in reshards if name != "all")
            for (checkpointing, offload), reshard, (schedule, v) in itertools.product(
                ACTIVATIONS, reshards, schedules(pp, microbatches, config.n_layers)
            ):
                sizes = dict(pp=pp, replicate=data_ranks // shard, shard=shard, tp=tp, cp=cp)
                choice = dict(dp=dp, reshard=reshard, schedule=schedule, stages_per_rank=v)
                choice |= dict(checkpointing=checkpointing, offload_activations=offload)
                choice["async_tp"] = requested.async_tp and tp > 1
                parallel = replace(requested, **sizes, **choice)
                settings = vars(parallel) | {"microbatch": microbatch}
                matches = all(wanted[name] in (None, "auto", settings[name]) for name in FILTERS)
                planned = replace(work, parallel=parallel, microbatch=microbatch)
                if matches and is_measured(parallel, machine) and not refusal(planned, *techniques):
                    yield Plan(planned, machine)


def shares_of_batch(
    data_ranks: int, work: Work, wanted_cp: int | None
) -> Iterator[tuple[int, int]]:
    """Yield (ranks that share a sequence, sequences of a microbatch) for `data_ranks` ranks of data
    parallelism."""
    for cp in divisors(data_ranks):
        long_enough = cp in (1, wanted_cp) or work.seq_len // cp >= LEAST_TOKENS
        sequences, rest = divmod(work.batch * cp, data_ranks)  # of a step, on each rank
        if long_enough and not rest and (cp == 1 or work.seq_len % (2 * cp) == 0):
            for microbatch in divisors(sequences):
                yield cp, microbatch


def schedules(pp: int, microbatches: int, n_layers: int) -> Iterator[tuple[str, int]]:
    """Yield (schedule, stages of a rank) for a pipeline. Left out are GPipe, since 1F1B takes as
    long with less memory; fewer microbatches than ranks, which would wait half of the time; and
    what cannot be carried out."""
    if pp == 1:
        yield "1f1b", 1
    elif microbatches >= pp:
        yield "1f1b", 1
        yield "zero-bubble", 1
        for v in INTERLEAVED:
            if microbatches % pp == 0 and pp * v <= n_layers:
                yield "interleaved", v


def data_parallel_choices(
    data_ranks: int, of_copy: int, wanted: str | None = None
) -> Iterator[tuple[str, int]]:
    """Yield (strategy, shard size) for `data_ranks` ranks with different sequences, where `of_copy`
    ranks along tp and pp share theirs.

    HSDP's shard size may be any divisor of the ranks, not only the ranks of a node. A strategy that
    would be another one on these ranks is left out, and so is one that trains otherwise, unless it
    is `wanted`."""
    for dp, strategy in STRATEGIES.items():
        is_other_training = strategy.own_steps and dp != wanted
        if is_other_training or (of_copy > 1 and not strategy.splits_layers):
            continue
        for shard in sorted({strategy.shard_size(data_ranks, n) for n in divisors(data_ranks)}):
            sizes = {"replicate": data_ranks // shard, "shard": shard}
            # Sharding over one rank is DDP; a copy per node with all ranks in one node is FSDP.
            is_ddp = any(sizes[dim] == 1 for dim in strategy.sharded.values())
            is_fsdp = strategy.copy_per == "node" and shard == data_ranks
            if not is_ddp and not is_fsdp:
                yield dp, shard


def is_measured(parallel: ParallelConfig, machine: Machine) -> bool:
    """Return whether groups of each mesh dimension were measured, if the machine was measured."""
    if not machine.measured:
        return True
    shapes = [group_shape(dim, parallel, machine) for dim in DIMS]
    return all(n == 1 or find_measured_group(n, in_node, machine) for n, in_node in shapes)
