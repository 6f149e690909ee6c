"""The record in which a technique's file answers all other files, so that few of them name it.

A technique changes layers, the loss or the optimizer, and has a record TECHNIQUE. The other files
of this folder split a model along a mesh dimension (dp, tp, cp, pp). That changes sizes everywhere,
as parallel.py says. To add a technique, write its file, put its record into a list of parallel.py,
and give it a field in config.py. Here `world` is not annotated, since parallel.py imports this.
"""

from collections.abc import Callable
from typing import NamedTuple

# Operators that return a matrix product (all_to_all_single: in async TP). Techniques add theirs.
PRODUCTS = {"mm", "addmm", "bmm", "_scaled_mm", "all_to_all_single"}


class Technique(NamedTuple):
    """The answers of one technique. Each has a default, which changes nothing."""

    flag: str  # the field of ParallelConfig that asks for it; "": it is always used
    apply: Callable = lambda model, world: None  # (Llama on meta, World): before FSDP
    refuses: Callable = lambda work: ""  # (Work): why a step cannot use it, or ""
    # (a rank's Llama, Work): what the rank holds beyond costs/page.py, or less if negative.
    # `saved`: elements in the compute dtype, per token and block. Others are bytes: the state that
    # the `optimizer` reads, what else is `kept` between steps, what only an `update` needs.
    holds: Callable = lambda model, work: {}
    # (a rank's Llama, Work): tuples (mesh dimension, collective, calls in a step, bytes of a call).
    # Negative calls take back what costs/page.py says.
    sends: Callable = lambda model, work: ()
    gain: float = 1.0  # speedup of the blocks' matrix products
    about: Callable = lambda model, world: ""  # (whole Llama, World): a line at a run's start
    suggests: Callable = lambda facts: ""  # (Facts of perf/verdict.py): advice to try it, or ""
    only_linear: bool = False  # it changes nn.Linear, and not the stacked matrices of experts
    value: str = ""  # of the field, if one value asks for it; "": any but the default

    def is_used(self, parallel) -> bool:
        """Return whether a ParallelConfig asks for this technique."""
        if not self.flag:
            return True
        asked, default = getattr(parallel, self.flag), getattr(type(parallel), self.flag)
        return asked == self.value if self.value else asked != default
