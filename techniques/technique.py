"""What the rest of the project asks of a technique. Its file answers, so that few others know it.

A technique changes layers, the loss or the optimizer, and has a record TECHNIQUE. The other files
of this folder split a model along a dimension of the mesh (dp, tp, cp, pp), which divides sizes
everywhere: parallel.py says how. To add a technique, write its file, put its record into a list of
parallel.py, and give it a field in config.py. World has no type here: parallel.py imports this.
"""

from collections.abc import Callable
from typing import NamedTuple


class Technique(NamedTuple):
    """The answers of one technique. An answer that it leaves out is the default: nothing."""

    flag: str  # the field of ParallelConfig that asks for it; "": it is always used
    apply: Callable = lambda model, world: None  # (Llama on meta, World): changes it before FSDP
    refuses: Callable = lambda work: ""  # (Work): the line that says why a step cannot use it
    # (a rank's Llama, Work): what the rank holds beyond costs/page.py (negative: less): elements of
    # the compute dtype that a block has `saved` for each token; bytes of the `optimizer` that an
    # update reads, of what else is `kept` between steps, and of the `update` itself
    holds: Callable = lambda model, work: {}
    # (a rank's Llama, Work): tuples (mesh dimension, collective, calls in a step, bytes of a call).
    # Negative calls take back what costs/page.py says.
    sends: Callable = lambda model, work: ()
    gain: float = 1.0  # how many times as fast the blocks' products are
    about: Callable = lambda model, world: ""  # (whole Llama, World): what a run says at its start
    suggests: Callable = lambda facts: ""  # (Facts of perf/verdict.py): advice to try it, or ""

    def is_used(self, parallel) -> bool:
        """Return whether a ParallelConfig asks for it: its field is not the default."""
        return not self.flag or getattr(parallel, self.flag) != getattr(type(parallel), self.flag)
