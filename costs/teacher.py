"""What a rank holds of a teacher (distill.py), in bytes."""

from config import Work
from costs.page import gathered_of, state_of
from costs.shapes import units
from techniques.pipeline import part_of


def held_of_teacher(work: Work, pp_rank: int) -> float:
    """Return the bytes of its weights, of those that FSDP has gathered at once, and of the hidden
    states that it leaves of a rank's sequences (with --top-k there are fewer)."""
    p = work.parallel
    part = part_of(work.teacher, pp_rank, p.pp, p.stages_per_rank)
    root, *of_blocks = units(part, p, p.shards("parameters"))
    held = state_of(part, p)["parameters"]
    if p.strategy.uses_fsdp:
        held += gathered_of(root, of_blocks, p)
    if part.output is not None:
        width = work.teacher.config.dim
        held += work.sequences * work.length * width * p.weight_bytes
    return held
