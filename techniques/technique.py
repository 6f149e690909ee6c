"""What others ask of a technique. Its own file answers, and no other file has to know it.

A technique changes layers or the loss of a model. Dimensions of the mesh (dp, tp, cp, pp) are no
techniques: they divide sizes everywhere, and parallel.py says how. To add one, write its file with
a record TECHNIQUE, put it into the list in parallel.py, and give it a field in config.py.
"""

from collections.abc import Callable
from typing import NamedTuple


class Technique(NamedTuple):
    """The answers of one technique. What it leaves out is nothing, or no change."""

    flag: str  # the field of ParallelConfig that asks for it; "": it is always used
    apply: Callable  # (Llama on meta, World): change the model, before FSDP shards it
    refuses: Callable = lambda work: ""  # (Work): why a step cannot be computed so, in a line
    holds: Callable = lambda work: 0.0  # (Work): elements a token that a block saves in addition
    sends: Callable = lambda model, work: ()  # (a rank's Llama, Work): as `Sent` of costs/traffic
    gain: float = 1.0  # how many times as fast the blocks' products are
    about: Callable = lambda model, world: ""  # (whole Llama, World): what a run says at its start
    suggests: Callable = lambda facts: ""  # (Facts of perf/verdict.py): when one should try it

    def is_used(self, parallel) -> bool:
        """Return whether a ParallelConfig asks for it: its field has not the default."""
        return not self.flag or getattr(parallel, self.flag) != getattr(type(parallel), self.flag)
