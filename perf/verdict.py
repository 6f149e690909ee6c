"""Which flag would make a training step faster? The rules behind the last lines of `bench.py step`.

`verdict` turns measurements (`Facts`) into sentences. A part of a step has a `Rule`: the share of
the time above which it is worth a sentence, and a function that returns its levers, the changes
that would shorten it. A change that needs memory is suggested only where costs/memory.py predicts
that the step would still fit.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from config import STRATEGIES, ParallelConfig, Work
from costs.search import data_ranks_in_node, with_mesh_sizes
from parallel import TECHNIQUES

COMPUTATION = ("forward", "backward", "recompute")  # parts of a step
EXPOSED = "exposed communication over "  # a part of a step, followed by a mesh dimension


@dataclass(frozen=True)
class Facts:
    """Measurements and predictions that the verdict follows from."""

    shares: dict[str, float]  # part of a step -> its share of the time
    work: Work
    per_node: int  # processes
    usable_memory: int  # bytes, per process
    peaks: dict[str, int]  # name in `alternatives` -> predicted peak of a step in bytes
    device: torch.device
    attentions: float  # forward runs of attention per layer and microbatch
    graph_breaks: int = 0
    mfu: float | None = None  # None: unknown

    @property
    def parallel(self) -> ParallelConfig:
        return self.work.parallel

    def fit_note(self, name: str) -> str:
        """Say that an alternative fits in memory; empty if it does not."""
        peak = self.peaks[name]
        note = f"fits: {peak / 1e9:.3g} of {self.usable_memory / 1e9:.3g} GB"
        return note if peak < self.usable_memory else ""

    def crosses_nodes(self, dim: str) -> bool:
        """Return whether groups along a mesh dimension have ranks on several nodes."""
        # A group lies within a block of consecutive ranks, of this size.
        dims = ("tp", "cp") if dim == "cp" else ("tp", "shard", "replicate", "pp")
        block = math.prod(getattr(self.parallel, name) for name in dims[: dims.index(dim) + 1])
        return self.per_node % block != 0


def alternatives(parallel: ParallelConfig, per_node: int) -> dict[str, ParallelConfig]:
    """Return the configurations that a lever may suggest, by name, and the present one as `this`.

    `Facts.peaks` has the memory that each of them would take."""
    size = parallel.size
    return {
        "this": parallel,
        "ddp": with_mesh_sizes(replace(parallel, dp="ddp", reshard="weights"), size, per_node),
        "hsdp": with_mesh_sizes(replace(parallel, dp="hsdp"), size, per_node),
        "reshard none": replace(parallel, reshard="none"),
        "reshard adapters": replace(parallel, reshard="adapters"),
        "selective": replace(parallel, checkpointing="selective", offload_activations=False),
        "none": replace(parallel, checkpointing="none", offload_activations=False),
    }


# ----------------------------------------------------------------------------------- the sentences


def verdict(facts: Facts) -> list[str]:
    """Return sentences: what takes time besides forward and backward, largest part first, and
    which changes would shorten it. If nothing does, how much of the step computes."""
    sentences = []
    for part, share in sorted(facts.shares.items(), key=lambda item: -item[1]):
        rule = RULES.get(part)
        if rule and share > rule.threshold and (levers := rule.levers(facts)):
            crosses = part.startswith(EXPOSED) and facts.crosses_nodes(part.removeprefix(EXPOSED))
            where = ", which crosses nodes" if crosses else ""
            sentences.append(
                f"{percent(share)} of the step {rule.what}{where}: {'; or '.join(levers)}"
            )
    needed = 2 if facts.parallel.checkpointing == "full" else 1
    if facts.attentions > needed:
        sentences.append(
            f"attention runs forward {facts.attentions:g} times a layer and microbatch, and "
            f"--checkpointing {facts.parallel.checkpointing} needs {needed}: the model has one "
            f"more checkpoint"
        )
    if facts.graph_breaks:
        sentences.append(
            f"{facts.graph_breaks} graph break(s) interrupt the compiled blocks: "
            f"TORCH_LOGS=graph_breaks in front of the command shows where"
        )
    if facts.work.on_gpu and not facts.parallel.compile:
        sentences.append(
            "blocks are not compiled: --compile fuses what lies between matrix products"
        )
    sentences += filter(None, (technique.suggests(facts) for technique in TECHNIQUES))
    if not sentences:
        computing = {part: facts.shares[part] for part in COMPUTATION if part in facts.shares}
        parts = ", ".join(f"{part} {percent(share)}" for part, share in computing.items())
        mfu = "" if facts.mfu is None else f", at {percent(facts.mfu)} of the device's peak"
        largest = max(share for part, share in facts.shares.items() if part not in COMPUTATION)
        sentences.append(
            f"{percent(sum(computing.values()))} of the step computes ({parts}){mfu}: nothing else "
            f"takes more than {percent(largest)}"
        )
    return sentences


def percent(share: float) -> str:
    return f"{100 * share:.0f} %"


# -------------------------------------------------------------------------------------- the levers


def shard_levers(facts: Facts) -> list[str]:
    parallel, work, levers = facts.parallel, facts.work, []
    data_ranks = parallel.replicate * parallel.shard
    in_node = data_ranks_in_node(data_ranks, parallel.tp, facts.per_node)
    crosses = facts.crosses_nodes("shard")
    if crosses and in_node > 1 and (note := facts.fit_note("hsdp")):
        has_shard_flag = STRATEGIES[parallel.dp].copy_per == "node"
        flag = f"--shard {in_node}" if has_shard_flag else "--dp hsdp"
        levers.append(f"{flag} keeps them within nodes, and {note}")
    only_replicate_crosses = facts.crosses_nodes("replicate") and not crosses
    may_copy = not parallel.offload and not only_replicate_crosses
    if may_copy and (note := facts.fit_note("ddp")):
        levers.append(f"--dp ddp sends only gradients, and a whole copy {note}")
    frozen = any(not parameter.requires_grad for parameter in work.model.parameters())
    note = facts.fit_note("reshard adapters")
    if frozen and parallel.reshard != "adapters" and note:
        levers.append(f"--reshard adapters keeps the frozen weights on each rank, and {note}")
    if work.microbatches > 1:
        if parallel.reshard in ("weights", "all") and (note := facts.fit_note("reshard none")):
            levers.append(f"--reshard none all-gathers once a step, and {note}")
        elif parallel.reshard != "none":
            levers.append("a larger --microbatch, if memory allows, all-gathers weights less often")
    return levers or ["a larger --batch computes more for the same payload"]


def tp_levers(facts: Facts) -> list[str]:
    levers = ["--async-tp sends while it multiplies"] * (not facts.parallel.async_tp)
    if facts.crosses_nodes("tp"):
        return [f"--tp {facts.per_node} or less stays within a node", *levers]
    # With fewer ranks along tp, more ranks need sequences of their own.
    larger = "" if facts.work.sequences > 1 else " with a larger --batch"
    return [*levers, f"a smaller --tp{larger}, if memory allows, waits less"]


def cp_levers(facts: Facts) -> list[str]:
    if facts.crosses_nodes("cp"):
        return [f"--cp {facts.per_node // facts.parallel.tp} or less stays within a node"]
    return ["a smaller --cp, if memory allows, waits less, and needs a larger --batch"]


def pp_levers(facts: Facts) -> list[str]:
    levers = []
    if facts.work.sequences > facts.work.microbatches:
        levers.append("a smaller --microbatch makes more microbatches")
    if facts.parallel.schedule in ("gpipe", "1f1b"):
        levers.append("--schedule interleaved, with several stages on each rank, waits less")
    return levers or ["a larger --batch makes more microbatches"]


def recompute_levers(facts: Facts) -> list[str]:
    weaker = ["none"] if facts.parallel.checkpointing == "selective" else ["none", "selective"]
    notes = {name: facts.fit_note(name) for name in weaker}
    offload = " without --offload-activations" * facts.parallel.offload_activations
    return [f"--checkpointing {name}{offload} {note}" for name, note in notes.items() if note][:1]


def optimizer_levers(facts: Facts) -> list[str]:
    if facts.parallel.offload and (note := facts.fit_note("this")):
        return [f"without --offload it runs on the GPU, and a step {note}"]
    levers = ["a larger --batch updates less often"]
    shards_over_replicate = "replicate" in facts.parallel.strategy.sharded.values()  # as ZeRO-1
    if shards_over_replicate and (note := facts.fit_note("ddp")):
        levers.append(f"--dp ddp has no all-gather of updated weights, and a whole copy {note}")
    return levers


class Rule(NamedTuple):
    what: str  # verb phrase: what the step does in this part
    levers: Callable[[Facts], list[str]]
    threshold: float = 0.10  # share of the step's time


RULES = {
    EXPOSED + "replicate": Rule(
        "waits for gradients over replicate",
        lambda facts: ["a larger --batch sends gradients less often"],
    ),
    EXPOSED + "shard": Rule("waits for all-gathers and reduce-scatters over shard", shard_levers),
    EXPOSED + "tp": Rule("waits for all-gathers and reduce-scatters over tp", tp_levers),
    EXPOSED + "cp": Rule("waits for keys and values over cp", cp_levers),
    EXPOSED + "pp": Rule("waits for other stages", pp_levers),
    "recompute": Rule("recomputes activations", recompute_levers),
    "data": Rule(
        "waits for data",
        lambda facts: ["tokenize it with data.py tokenize, and keep the tokens on a local disk"],
        threshold=0.05,
    ),
    "optimizer": Rule("updates weights", optimizer_levers, threshold=0.15),
    "other": Rule(
        "clips gradients, or waits for other ranks",
        lambda facts: ["a larger --batch does this less often"],
    ),
}
