"""What others ask of a technique. Its own file answers, and no other file has to know it.

A technique changes layers or the loss of a model. Dimensions of the mesh (dp, tp, cp, pp) are no
techniques: they divide sizes everywhere, and parallel.py says how. To add one, write its file with
a record TECHNIQUE, put it into the list in parallel.py, and give it a field in config.py.
"""

from collections.abc import Callable
from typing import NamedTuple


class Technique(NamedTuple):
    """The answers of one technique. An answer that it leaves out is the default: nothing."""

    flag: str  # the field of ParallelConfig that asks for it; "": it is always used
    apply: Callable = lambda model, world: None  # (Llama on meta, World): changes it before FSDP
    refuses: Callable = lambda work: ""  # (Work): the line that says why a step cannot use it
    holds: Callable = lambda work: 0.0  # (Work): elements that a block saves more, for each token
    # (a rank's Llama, Work): tuples (mesh dimension, collective, calls in a step, bytes of a call)
    sends: Callable = lambda model, work: ()
    gain: float = 1.0  # how many times as fast the blocks' products are
    about: Callable = lambda model, world: ""  # (whole Llama, World): what a run says at its start
    suggests: Callable = lambda facts: ""  # (Facts of perf/verdict.py): advice to try it, or ""

    def is_used(self, parallel) -> bool:
        """Return whether a ParallelConfig asks for it: its field is not the default."""
        return not self.flag or getattr(parallel, self.flag) != getattr(type(parallel), self.flag)
