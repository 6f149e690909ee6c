"""What does a rank do while it waits?

The layers are cut into stages, one for each rank. Forward passes a microbatch from the first rank
to the last, backward from the last to the first. In which order a rank computes its microbatches
decides how long it waits for others, and how many microbatches it holds in memory meanwhile. You
write that order as text. It is drawn and timed and, where backward is not split, really run.

Read: the head of techniques/schedules.py, and its `check_schedule` and `held`. Lines in a file
are drawn by: python -m techniques.schedules --stages 4 --microbatches 6 --schedule FILE
"""


def schedule(ranks: int, microbatches: int, split: bool) -> list[str]:
    """Return what each rank computes, in order: a string for each rank, such as "F0 B0 F1 B1".

    split=False: F3 is the forward of microbatch 3, one tick, and B3 its backward, two ticks. A rank
        holds a microbatch from its F to the end of its B: at a time rank r holds at most ranks - r.
        Each rank waits for at most 3 (ranks - 1) ticks in all.
    split=True: B3 computes the gradient of the stage's input, and W3 those of its weights, in a
        tick each. A rank holds a microbatch until its W is done: at a time at most `ranks`. Each
        rank waits for at most ranks - 1 ticks in all, if there are at least as many microbatches as
        ranks.
    There may be fewer microbatches than ranks.
    """
    # >>>
    lines = []
    for rank in range(ranks):
        ahead = min(ranks - 1 - rank, microbatches)  # forwards before the first pair of F and B
        order = [f"F{i}" for i in range(ahead)]
        for i in range(microbatches):
            if ahead + i < microbatches:
                order.append(f"F{ahead + i}")
            order.append(f"B{i}")
            if split and i >= rank:  # a rank puts off W by as many backwards as its number
                order.append(f"W{i - rank}")
        if split:
            order += [f"W{i}" for i in range(max(0, microbatches - rank), microbatches)]
        lines.append(" ".join(order))
    return lines
    # <<<


# Why: the first backward comes from the last rank, so rank r has ranks - 1 - r forwards to run
# until then. From there on each backward makes room for one forward: this is 1F1B. It waits as long
# as GPipe, but holds fewer microbatches. Other ranks wait for B, and nobody waits for W, so W fills
# the time in which a rank would wait: the first ranks wait at the start, the last ones at the end,
# and so the later a rank comes, the longer it puts off W. Nothing is shorter, for the last rank has
# no work in the first ranks - 1 ticks. Where backward was split, W was put into a queue that nobody
# emptied (Megatron-DeepSpeed #442). With fewer microbatches than ranks, PyTorch's 1F1B hung
# (torchtitan #775), and AMD's crashed (Primus #1003).
#
# Questions: 1. When all ranks have equally much memory: the first rank decides what fits, and the
# others have room that nobody uses.
# 2. All wait for the slowest stage, and both timelines stretch by what it takes longer in each
# microbatch. W cannot fill all of that; fewer layers on the last rank can.
