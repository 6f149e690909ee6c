"""What a rank would send in a step under each strategy."""

from dataclasses import replace

from config import STRATEGIES, Work
from costs.page import sends, sent_bytes
from costs.search import with_mesh_sizes
from parallel import refusal
from plumbing.processes import Process


def sent_by_strategy(work: Work, shard: int | None, process: Process) -> str:
    """Return in words the megabytes that a rank would send in a step under each strategy.
    `work.parallel` is what the flags ask for, `shard` the value of --shard, if given."""
    parts = []
    for flags in (*STRATEGIES, "fsdp --reshard none", "fsdp --reshard adapters"):
        dp, _, reshard = flags.partition(" --reshard ")
        asked = replace(work.parallel, dp=dp, reshard=reshard or "weights")
        own_shard = shard if work.parallel.dp == dp else None
        parallel = with_mesh_sizes(asked, process.size, process.per_node, own_shard)
        split = replace(work, parallel=parallel)
        is_as_fsdp = dp == "hsdp" and parallel.replicate == 1
        if not is_as_fsdp and not refusal(split):
            sent = sent_bytes(sends(split), parallel)
            parts.append(f"--dp {flags} {sent / 1e6:,.2f} MB")
    return "; ".join(parts)
