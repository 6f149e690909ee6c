"""Which flag would make a training step faster? The rules behind the last lines of `bench.py step`.

`verdict` turns measurements (`Facts`) into sentences: which part of a step takes a large share of
the time, and its levers, the changes that would shorten it. A technique suggests itself, or that it
be left out, in its own file. A change that needs memory is suggested only where costs/page.py
predicts that the step still fits.
"""

from dataclasses import dataclass, replace

import torch

from config import STRATEGIES, ParallelConfig, Work
from costs.page import holds
from costs.search import data_ranks_in_node, with_mesh_sizes
from costs.seconds import group_shape
from parallel import ALWAYS_ASKED, TECHNIQUES, refusal

COMPUTATION = ("forward", "backward", "recompute")  # parts of a step
EXPOSED = "exposed communication over "  # a part of a step, followed by a mesh dimension


@dataclass(frozen=True)
class Facts:
    """Measurements that the verdict follows from."""

    shares: dict[str, float]  # part of a step -> its share of the time
    work: Work
    per_node: int  # processes
    usable_memory: int  # bytes, per process
    device: torch.device
    attentions: float  # forward runs of attention per layer and microbatch
    graph_breaks: int = 0
    mfu: float | None = None  # None: unknown

    @property
    def parallel(self) -> ParallelConfig:
        return self.work.parallel

    def takes(self, part: str, what: str, *levers: str, least: float = 0.10) -> str:
        """Say which share of the step a part takes, what the step does then, and what would shorten
        that; "" for a share up to `least`. share_in reads the share back."""
        share = self.shares.get(part, 0.0)
        told = f"{percent(share)} of the step {what}: {'; or '.join(levers)}"
        return told if share > least else ""

    def waits(self, dim: str, what: str, *levers: str) -> str:
        """Say the same of the time in which a rank waits for `what` over a mesh dimension."""
        where = ", which crosses nodes" if self.crosses_nodes(dim) else ""
        return self.takes(EXPOSED + dim, f"waits for {what} over {dim}{where}", *levers)

    def fit_note(self, **changes) -> str:
        """Say that the step would fit in memory with other values of the fields of ParallelConfig;
        "" if it would not, or cannot be split like that."""
        parallel = replace(self.parallel, **changes)
        if "dp" in changes:
            parallel = with_mesh_sizes(parallel, parallel.size, self.per_node)
        work = replace(self.work, parallel=parallel)
        if refusal(work):
            return ""
        peak = holds(work)["peak"]
        if peak >= self.usable_memory:
            return ""
        return f"fits: {peak / 1e9:.3g} of {self.usable_memory / 1e9:.3g} GB"

    def crosses_nodes(self, dim: str) -> bool:
        """Return whether groups along a mesh dimension have ranks on several nodes."""
        n, in_node = group_shape(dim, self.parallel, self.per_node)
        return n > in_node


# ----------------------------------------------------------------------------------- the sentences


def verdict(facts: Facts) -> list[str]:
    """Return sentences: what takes time besides forward and backward, largest part first, and
    which changes would shorten it; what techniques suggest. Else how much of the step computes."""
    seldom = "a larger --batch does this less often"
    on_disk = "tokenize it with data.py tokenize, and keep the tokens on a local disk"
    shorter = "a smaller --max-new-tokens cuts the longest answers, for which all others wait"
    reuse = "--updates takes several updates on the same answers"
    workers = "--reward-workers calls a slow function for several at a time"
    once = "--all-weights, which trains all of them, runs it once, before the first step"
    techniques = dict.fromkeys((*ALWAYS_ASKED, *TECHNIQUES))  # each once
    sentences = [
        facts.waits("replicate", "gradients", "a larger --batch sends gradients less often"),
        facts.waits("shard", "all-gathers and reduce-scatters", *shard_levers(facts)),
        facts.takes("data", "waits for data", on_disk, least=0.05),
        facts.takes("reference", "runs the base", once),
        facts.takes("sampling", "samples answers and rewards them", shorter, reuse, workers),
        facts.takes("teacher", "runs the teacher", "a smaller teacher computes less"),
        facts.takes("sampling and teacher", "samples answers and runs the teacher", shorter),
        facts.takes("optimizer", "updates weights", optimizer_lever(facts), least=0.15),
        facts.takes("other", "clips gradients, or waits for other ranks", seldom),
        *(technique.suggests(facts) for technique in techniques),
    ]
    sentences = sorted(filter(None, sentences), key=share_in, reverse=True)
    if facts.graph_breaks:
        sentences.append(
            f"{facts.graph_breaks} graph break(s) interrupt the compiled blocks: "
            f"TORCH_LOGS=graph_breaks in front of the command shows where"
        )
    if facts.work.on_gpu and not facts.parallel.compile:
        sentences.append(
            "blocks are not compiled: --compile fuses what lies between matrix products"
        )
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


def share_in(sentence: str) -> int:
    """Return the percentage with which a sentence of Facts.takes begins, 0 for other sentences."""
    share, is_of_step, _ = sentence.partition(" % of the step ")
    return int(share) if is_of_step else 0


def percent(share: float) -> str:
    return f"{100 * share:.0f} %"


# -------------------------------------------------------------------------------------- the levers


def shard_levers(facts: Facts) -> list[str]:
    parallel = facts.parallel
    work = facts.work
    levers = []

    def suggest(lever: str, **changes) -> bool:
        """Add a lever if the step fits in memory with it; return whether it does."""
        note = facts.fit_note(**changes)
        if note:
            levers.append(f"{lever} {note}")
        return bool(note)

    data_ranks = parallel.replicate * parallel.shard
    in_node = data_ranks_in_node(data_ranks, parallel.tp, facts.per_node)
    crosses = facts.crosses_nodes("shard")
    if crosses and in_node > 1:
        has_shard_flag = STRATEGIES[parallel.dp].copy_spans == "node"
        flag = f"--shard {in_node}" if has_shard_flag else "--dp hsdp"
        suggest(f"{flag} keeps them within nodes, and", dp="hsdp")
    only_replicate_crosses = facts.crosses_nodes("replicate") and not crosses
    if not parallel.offload and not only_replicate_crosses:
        lever = "--dp ddp sends only gradients, and a whole copy"
        suggest(lever, dp="ddp", reshard="weights")
    frozen = any(not parameter.requires_grad for parameter in work.model.parameters())
    if frozen and parallel.reshard != "adapters":
        lever = "--reshard adapters keeps the frozen weights on each rank, and"
        suggest(lever, reshard="adapters")
    if work.microbatches > 1 and parallel.reshard != "none":
        lever = "--reshard none all-gathers once a step, and"
        if parallel.reshard == "adapters" or not suggest(lever, reshard="none"):
            levers.append("a larger --microbatch, if memory allows, all-gathers weights less often")
    return levers or ["a larger --batch computes more for the same payload"]


def optimizer_lever(facts: Facts) -> str:
    note = facts.fit_note() if facts.parallel.offload else ""
    if note:
        return f"without --offload it runs on the GPU, and a step {note}"
    return "a larger --batch updates less often"
