"""What fits?

Before a run starts you want to know whether it fits, and which flag helps if it does not. Weights,
gradients and AdamW's moments are easily counted. But the peak comes later, and consists of what
forward saves, of whole copies that live for a moment, and of logits. Write the formula. The check
runs six steps that you have not seen, and counts each tensor that is alive.

Read: the docstrings of `recompute` and `fsdp` in parallel.py, and the first lines of
techniques/chunked_loss.py.
"""

from model import LlamaConfig


def memory(
    config: LlamaConfig,
    root: int,
    block: int,
    dp: str,
    ranks: int,
    reshard: str,
    checkpointing: str,
    microbatches: int,
    tokens: int,
) -> dict[str, int]:
    """Return the bytes of seven kinds of tensors on a rank. Each element has 4 bytes.

    root: parameters of embedding, last norm and output together
    block: parameters of a block; there are config.n_layers blocks
    dp: "ddp" or "fsdp"
    ranks: number of ranks, which divides the rows of all parameters
    reshard: what fsdp shards again after each use, "weights" or "all"
    checkpointing: "none" or "full"
    microbatches: of the step; each has `tokens` tokens of this rank

    Three kinds, to the byte, as they are between backward and the optimizer's step:
        parameters, gradients, optimizer (two moments)
    Four kinds at the peak, which is in the last microbatch. These and parameters and optimizer
    together may be 10 % off:
        sums         gradients that are there already; for ddp all, since its buckets always exist
        gathered     whole weights: of the root, of the block that computes, and of the next one
        activations  what blocks have saved for backward
        computing    what the loss needs, or the last block's backward if that needs more

    Elements a token, with D, F and V as in model.py and K = n_kv_heads head_dim:
        a block saves             8 D + 2 K + 4 F; under full checkpointing its input alone, D
        backward of a block needs D + 2 F, and what it has to compute again
        the loss needs            3 D + 3 V, for the last norm, logits and their gradient;
                                  and once V D, for the gradient of the output matrix

    Example: LlamaConfig(16, 3, 2, 1, 32, 32), root=1040, block=2336, dp="ddp", ranks=4, no
    checkpointing and 1 microbatch of 32 tokens give parameters 32192, gradients 32192, optimizer
    64384, sums 32192, gathered 0, activations 104448, computing 20480. The peak is 259092.
    """
    # >>>
    D, F, V = config.dim, config.ffn_dim, config.vocab_size
    P = root + config.n_layers * block
    shards = ranks if dp == "fsdp" else 1
    sums = 0
    if dp == "ddp" or (microbatches > 1 and reshard == "weights"):
        sums = P
    elif microbatches > 1:
        sums = P // shards
    saved = everything = 8 * D + 2 * config.n_kv_heads * config.head_dim + 4 * F
    if checkpointing == "full":
        saved = D
    loss = 3 * tokens * (D + V) + V * D
    backward = tokens * (everything - saved + D + 2 * F)
    return {
        "parameters": 4 * P // shards,
        "gradients": 4 * P // shards,
        "optimizer": 4 * 2 * P // shards,
        "sums": 4 * sums,
        "gathered": 4 * (root + 2 * block) if dp == "fsdp" else 0,
        "activations": 4 * config.n_layers * tokens * saved,
        "computing": 4 * max(loss, backward),
    }
    # <<<


# Why: FSDP divides a rank's state by the ranks, and nothing else. Activations, logits and the whole
# weights of two blocks stay as large on however many GPUs, so that people find the same memory with
# FSDP as with DDP (fairscale #1050), or on 4 GPUs as on 2 (DeepSpeed #4093, where the estimate had
# the state alone). Gradients that add up are easily overlooked: a memory tracker left them out as
# well (tt-metal PR #50909). So are logits: a loss that chose its chunks by memory counted 4 bytes
# for each where 18 were needed (unsloth-zoo #946). The terms say what helps: full checkpointing or
# fewer tokens where activations are largest, --reshard all for sums, smaller chunks of tokens for
# the loss, and more ranks for the state alone.
