"""Which of FSDP's copies is worth keeping?

FSDP frees whole weights after each use, and gathers them again for the next. It could also keep
them, and it could keep whole gradients until the last microbatch. Each copy takes memory and saves
bytes. Write down what a step sends. The check runs steps of six models and meshes that you have not
seen, and counts.

Read: the head of parallel.py on the bytes of a collective, and the docstring of `fsdp` there.
"""


def traffic(
    dp: str,
    root: list[tuple[int, int]],
    block: list[tuple[int, int]],
    layers: int,
    replicate: int,
    shard: int,
    reshard: str,
    microbatches: int,
    weight_bytes: int,
    grad_bytes: int,
) -> dict[tuple[str, str], tuple[int, int]]:
    """Return what a rank sends in a training step: (dimension, collective) -> (calls, bytes).

    dp: "ddp", "fsdp" or "hsdp"
    root: (rows, columns) of embedding, last norm and output; a norm has 1 column, and the embedding
        may be the output, too
    block: the same of a block's parameters; there are `layers` blocks
    replicate, shard: numbers of ranks along the dimensions of the mesh
    reshard: what fsdp and hsdp shard again after each use: "none", "weights" or "all"
    microbatches: of the step
    weight_bytes: of an element in an all-gather
    grad_bytes: of an element in a reduce-scatter or all-reduce

    Dimensions are "shard" and "replicate"; collectives are "all-gather", "reduce-scatter" and
    "all-reduce". Bytes are the payload of all calls together. A call of FSDP has all parameters of
    the root, or of one block, and the rows of each are padded to a multiple of `shard`. DDP has a
    single call: all gradients fit into its first bucket.

    Example: dp="fsdp", root=[(12, 4), (4, 1)], block=[(8, 4), (4, 8)], layers=2, shard=4,
    reshard="weights", microbatches=1 and 4 bytes an element give
    {("shard", "all-gather"): (5, 1232), ("shard", "reduce-scatter"): (3, 720)}
    """
    raise NotImplementedError("about 19 lines")
