"""What does a rank do while it waits?

The layers are cut into stages, one for each rank. Forward passes a microbatch from the first rank
to the last, backward from the last to the first. In which order a rank computes its microbatches
decides how long it waits for others, and how many microbatches it holds in memory meanwhile. You
write that order as text. It is drawn, timed, and then really run.

Read: the head of techniques/schedules.py, and its `check_schedule` and `held`. Lines in a file
are drawn by: python -m techniques.schedules --stages 4 --microbatches 6 --schedule FILE
"""


def schedule(ranks: int, microbatches: int, split: bool) -> list[str]:
    """Return what each rank computes, in order: a string for each rank, such as "F0 B0 F1 B1".

    split=False: F3 is the forward of microbatch 3, one tick, and B3 its backward, two ticks. A rank
        holds a microbatch from its F to the end of its B: at a time rank r holds at most ranks - r.
        Each rank waits for at most 3 (ranks - 1) ticks.
    split=True: B3 computes the gradient of the stage's input, and W3 those of its weights, in a
        tick each. A rank holds a microbatch until its W is done: at a time at most `ranks`. Each
        rank waits for at most ranks - 1 ticks, if there are at least as many microbatches as ranks.
    There may be fewer microbatches than ranks.
    """
    raise NotImplementedError("about 14 lines")
