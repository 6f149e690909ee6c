"""What a split costs, before anybody pays for it: memory and bytes sent; and which one to take.

Everything here follows from shapes. So a laptop plans a cluster (`python bench.py plan`), train.py
says at its start what a step will send, and `--dp auto` chooses. bench.py measures the same things.

Letters, besides those of parallel.py: F feed-forward width, K width of keys and of values, N tokens
of a microbatch; numbers are counted on the first rank, which has the largest part of what cannot be
cut evenly.
"""

import math
import os
from collections import Counter
from dataclasses import replace

import torch
from torch import nn

from model import LOSS_CHUNK, Llama, LlamaConfig, UserError
from parallel import Split, World

ROOM = 0.9  # of a device's memory that tensors may fill

# ------------------------------------------------------------------------------ choosing the split


def check_split(asked: Split, shard: int | None, config: LlamaConfig, world: World) -> None:
    """Refuse a split that these processes or this model cannot have."""
    dp, tp = asked.dp, asked.tp
    shared = {"key/value heads": config.n_kv_heads, "numbers in the feed-forward": config.ffn_dim}
    for what, n in shared.items():
        if n % tp:
            raise UserError(f"--tp {tp} cannot share {n} {what} evenly: it must divide {n}")
    data, rest = divmod(world.size, tp)
    if rest:
        raise UserError(f"{world.size} processes are no multiple of --tp {tp}")
    if asked.offload and dp not in ("fsdp", "hsdp"):
        raise UserError("--offload is for --dp fsdp and --dp hsdp")
    if asked.offload and asked.reshard == "adapters":
        raise UserError(
            "--offload moves the weights that --reshard adapters keeps: give one of them"
        )
    if asked.reshard in ("none", "adapters", "all") and not asked.fully_sharded:
        raise UserError(f"--reshard {asked.reshard} is for --dp fsdp and hsdp: ddp keeps all whole")
    if shard and dp != "hsdp":
        raise UserError(f"--shard {shard} is for --dp hsdp: ddp shares nothing, fsdp everything")
    if shard and data % shard:
        raise UserError(
            f"{world.size} processes with --tp {tp} hold {data} parts of the batch, no multiple of "
            f"--shard {shard}"
        )


def choose_split(
    asked: Split, shard: int | None, model: Llama, world: World, tokens: int, microbatches: int
) -> tuple[Split, str]:
    """The split with its sizes, and in words why; its `dp` and `reshard` may be asked as auto.

    What every rank must hold decides: DDP where a whole copy fits on a device; else FSDP within a
    node; over nodes HSDP, where a copy fits in one, and FSDP over all where it does not. Gradients
    of several microbatches are added up whole where there is room, and in slices where not.
    `tokens` are those of a microbatch. Each case is in tests/test_cost.py.
    """
    data = world.size // asked.tp
    node = within_a_node(data, asked.tp, world.per_node)
    wide = {"ddp": 1, "hsdp": shard or node, "fsdp": data}
    room = device_room(world.device, world.per_node)

    def of(dp: str, reshard: str) -> Split:
        return replace(asked, dp=dp, reshard=reshard, replicate=data // wide[dp], shard=wide[dp])

    fused = asked.compile or world.device.type == "cuda"

    def fits(split: Split) -> bool:
        return memory(model, split, tokens, microbatches, fused)["peak"] < room

    whole = "weights" if asked.reshard == "auto" else asked.reshard
    order = [asked.dp] if asked.dp != "auto" else ["ddp", *["hsdp"] * (1 < node < data), "fsdp"]
    least = "all" if asked.reshard == "auto" else whole  # what FSDP cannot do without
    dp = next((dp for dp in order if fits(of(dp, "weights" if dp == "ddp" else least))), order[-1])
    split = of(dp, whole)
    if asked.reshard == "auto" and microbatches > 1 and split.fully_sharded and not fits(split):
        split = of(dp, "all")
    needs = memory(model, of("ddp", "weights"), tokens, microbatches, fused)
    state = needs["parameters"] + needs["gradients"] + needs["optimizer"]
    why = (
        f"a copy's weights, gradients and AdamW take {state / 1e9:.3g} GB a process, all of a step "
        f"{needs['peak'] / 1e9:.3g}; a process has {room / 1e9:.3g} GB, a node {world.per_node} of "
        f"{world.size} processes"
    )
    return split, why


def within_a_node(data: int, tp: int, per_node: int) -> int:
    """How many of a batch's `data` parts lie within a node."""
    return math.gcd(data, max(1, per_node // tp))


def device_room(device: torch.device, processes: int) -> int:
    """What a process may fill: of its GPU, or of its part of the machine's memory."""
    if device.type == "cuda":
        return int(ROOM * torch.cuda.get_device_properties(device).total_memory)
    return int(ROOM * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / processes)


# ------------------------------------------------------------------------------------ what is held


def memory(
    model: Llama, split: Split, tokens: int, microbatches: int, fused: bool = False
) -> dict[str, int]:
    """Bytes of tensors on a rank in a step: each kind's, and the `peak` of all of them together.

    `model` is whole, as before it is split; microbatches of `tokens` a rank. Between steps a rank
    holds its part of parameters, gradients and AdamW's two moments: exactly so many bytes. In one,
    `gathered` are whole weights that FSDP has lent and gradients that it has not cut yet, and
    `activations` what forward keeps and what is being computed, the logits among it. Not all of it
    is there at the same time: the peak is that of the fullest of four moments, and good to a few
    percent; of adapters their dropout is not counted, and in bfloat16 they need less than this.
    `fused`: norms in one kernel, as on a GPU and when compiled.
    """
    config, g, w = model.config, split.grad_bytes, split.weight_bytes
    state, whole = _state(model, split), _whole(model, split, microbatches)
    weights, sums = whole["weights"], whole["sums"]
    words = math.ceil(config.vocab_size / split.tp) * config.dim * model.output.weight.requires_grad
    embedding = 0 if config.tie_embeddings else words

    # What forward has kept when the loss begins, and the most that one block's backward adds.
    kept, block_work = (n * tokens * w for n in numbers_kept(config, split, fused))
    stream = config.dim * tokens * w
    loss = config.n_layers * kept + (norm_keeps(split, fused) + 2) * stream
    loss += logits_bytes(config, split, tokens, fused, words > 0)
    block_work += (stream + 2 * config.ffn_dim * tokens * w) / split.tp
    first = config.n_layers * kept + block_work

    # Gradients that backward has found before it reaches the last block, and before it ends.
    gradients, uncut_root, uncut_block = state["gradients"], whole["root"], whole["block"]
    below = (_units(model, split.tp, split.shard)["0"][1] + embedding) * g // split.shard
    above = max(0, uncut_root - embedding * w)
    moments = {
        "in the loss": sums + weights + loss,
        "in the last block's backward": max(sums, words * w) + weights + first,
        "in the first block's backward": (
            max(sums, gradients - below + above) + weights + uncut_block + kept + block_work
        ),
        "in the root's": max(sums, gradients) + whole["root weights"] + uncut_root * (1 + g // w),
    }
    resting = state["parameters"] + state["optimizer"]
    return state | {
        "gathered": int(weights + max(0, sums - gradients)),
        "activations": int(max(loss, first)),
        "peak": int(resting + max(moments.values())),
    }


def _state(model: Llama, split: Split) -> dict[str, int]:
    """Bytes of what a rank holds between steps, and of its gradients as AdamW sees them."""
    g, w = split.grad_bytes, split.weight_bytes
    units = _units(model, split.tp, split.shard).values()
    learnt = sum(n for _, n in units) // split.shard
    frozen = sum(n for n, _ in units) // split.shard - learnt
    if split.reshard == "adapters":  # the base stays whole
        frozen = sum(n - own for n, own in _units(model, split.tp, 1).values())
    tensors = sum(
        p.requires_grad * (model.config.n_layers if part == "block" else 1)
        for part, module in _parts(model).items()
        for p in module.parameters()
    )
    return {
        "parameters": learnt * g + frozen * w,
        "gradients": learnt * g,
        "optimizer": learnt * 2 * g + tensors * 4,  # two moments, and of each tensor its steps
    }


def _whole(model: Llama, split: Split, microbatches: int) -> dict[str, int]:
    """Bytes that a rank holds whole for a while: weights to compute with, beside its own; `sums` of
    gradients of other microbatches; and gradients of the root and of a block before they are cut.
    """
    g, w, units = split.grad_bytes, split.weight_bytes, _units(model, split.tp, split.shard)
    learnt = {name: n for name, (_, n) in units.items()}
    gradients = sum(learnt.values()) * g
    if not split.fully_sharded:
        copies = sum(learnt.values()) * w if w < g else 0  # which autocast makes
        sums = gradients if microbatches > 1 or split.replicate > 1 else 0  # DDP's lie in buckets
        return {"weights": copies, "sums": sums, "root weights": 0, "root": 0, "block": 0}
    lent = learnt if split.reshard == "adapters" else {name: n for name, (n, _) in units.items()}
    weights = lent["root"] + 2 * lent["0"]  # of the block that computes, and of the next
    if split.reshard == "none" or split.shard == 1:
        weights = sum(lent.values())
    sums = gradients if split.reshard != "all" else gradients // split.shard
    return {
        "weights": weights * w,
        "sums": sums if microbatches > 1 else 0,
        "root weights": lent["root"] * w,
        "root": learnt["root"] * w,
        "block": learnt["0"] * w,
    }


def norm_keeps(split: Split, fused: bool) -> int:
    """What a norm keeps beside its result, in widths D of computed numbers: its input and, where it
    is no single kernel, that in its normalized form; both in float32."""
    if fused:
        return 1
    return 2 * max(1, 4 // split.weight_bytes)


def numbers_kept(config: LlamaConfig, split: Split, fused: bool) -> tuple[float, float]:
    """Numbers a token that a block keeps for backward, and that its backward first makes again.

    A block keeps, of width D: q, attention's output, and of each of two norms what it keeps and
    what comes out, under tensor parallelism after it is gathered; of width K: k and v; of width F:
    gate, up and their product; and for each head the sum of its weights. Selective checkpointing
    keeps the input, attention's output and half of the products, full the input."""
    D, F, K = config.dim, config.ffn_dim, config.n_kv_heads * config.head_dim
    sums = config.n_heads * 4 / split.weight_bytes
    autocast = split.weight_bytes < 4 and not split.fully_sharded
    x = 2 if autocast else 1  # the residual stream, which autocast leaves in float32...
    out = 5 if autocast and not fused else 2  # ...and casts for each of five products
    whole = out * D + ((2 * norm_keeps(split, fused) + 2) * D + 2 * K + 3 * F + sums) / split.tp
    kept = {
        "none": whole,
        "selective": D + ((1 + x) * D + K + F + sums + 2 * D * (split.tp > 1)) / split.tp,
        "full": x * D / split.tp,
    }[split.checkpointing]
    return kept, whole - kept


def logits_bytes(config: LlamaConfig, split: Split, tokens: int, fused: bool, learns: bool) -> int:
    """What the loss holds at its fullest: logits of one chunk, and their softmax, while those of
    the chunk before are still there; and the gradient of the output's matrix."""
    words, w = math.ceil(config.vocab_size / split.tp), split.weight_bytes
    wide = max(4, w)  # of the softmax
    cast = w if w < 4 else 0  # its gradient as it is multiplied with
    copy = wide if w < 4 and not fused else 0  # the logits as softmax takes them
    most = w + wide + max(copy, cast)
    if tokens > LOSS_CHUNK:
        most = w + wide + cast + copy + wide
    n, matrix = min(LOSS_CHUNK, tokens) * words, words * config.dim
    if not learns:
        return n * most
    return matrix * wide + max(n * most, n * (w + wide + cast) + matrix * w)


# ------------------------------------------------------------------------------------ what is sent


def predict_traffic(
    model: Llama, split: Split, microbatches: int, batch: int, seq_len: int
) -> dict[tuple[str, str], tuple[int, int]]:
    """Collectives of one training step: (mesh dimension, collective) -> (calls, bytes in all).

    The sums of the docstrings above, with what is cut rounded up; microbatches of `batch` rows a
    rank. `model` is whole, as it is before it is split. bench.py counts what really happens.
    """
    config, g, w = model.config, split.grad_bytes, split.weight_bytes
    L, m = config.n_layers, microbatches
    idle = _unreached(model)  # of backward's 2 L + 1 pairs of collectives under tp
    last = str(L - 1)  # the block that FSDP gathers for backward before it sees whether it is due
    calls, size = Counter(), Counter()

    def send(dim: str, collective: str, n: int, nbytes: int) -> None:
        if n and nbytes:
            calls[dim, collective] += n
            size[dim, collective] += n * nbytes

    if not split.fully_sharded:
        if split.replicate > 1:
            sizes = [p.numel() * g for p in model.parameters() if p.requires_grad]
            send("replicate", "all-reduce", 1, sum(sizes))
            calls["replicate", "all-reduce"] = _buckets(sizes[::-1])
    units = _units(model, split.tp, split.shard) if split.fully_sharded else {}
    for unit, (n, learnt) in units.items():
        uses = 1 if unit == "root" or (idle > 2 * L and unit != last) else 2
        if split.shard > 1:
            held = learnt if split.reshard == "adapters" else n
            send("shard", "all-gather", 1 if split.reshard == "none" else uses * m, held * w)
            send("shard", "reduce-scatter", m if split.reshard == "all" else 1, learnt * g)
        if split.replicate > 1:
            send("replicate", "all-reduce", 1, learnt // split.shard * g)

    if split.tp > 1:
        row = batch * _round_up(seq_len, split.tp) * w
        a, tokens = row * config.dim, batch * seq_len
        send("tp", "all-gather", m * (4 * L + 1 - idle), a)
        send("tp", "reduce-scatter", m * (4 * L + 1 - min(idle, 2 * L)), a)
        rank = getattr(model.output, "rank", 0)  # an adapter's numbers go with what the loss takes
        send("tp", "all-gather", m, a + row * rank)
        send("tp", "reduce-scatter", m, a + row * rank)
        for start in range(0, tokens, LOSS_CHUNK):
            send("tp", "all-gather", m, min(LOSS_CHUNK, tokens - start) * split.tp * g)
        send("tp", "all-reduce", m, g)
        early = m == 1 or split.reshard == "all"  # gradients sent as they are, not as sums in g
        times = m if split.reshard == "all" else 1
        for part, module in _parts(model).items():
            for name, parameter in module.named_parameters():
                if parameter.requires_grad and _tp_dim(name) is None:
                    n = times * (L if part == "block" else 1)
                    send("tp", "all-reduce", n, parameter.numel() * (w if early else g))
        if split.checkpointing != "none" and idle <= 2 * L:
            send("tp", "all-gather", m * 2 * L, a)
        if split.checkpointing == "full" and idle <= 2 * L:
            send("tp", "reduce-scatter", m * L, a)
    return {key: (calls[key], size[key]) for key in calls}


def _unreached(model: Llama) -> int:
    """Backward ends where the first thing that learns has its gradient. How many of its 2 L + 1
    pairs of all-gather and reduce-scatter under tensor parallelism lie beyond: none, where the
    embedding learns; with adapters, those below the first that has one."""
    block = model.layers["0"]
    for idle, module in enumerate((model.tok_embeddings, block.attention, block.feed_forward)):
        if any(p.requires_grad for p in module.parameters()):
            return idle
    return 2 * model.config.n_layers + 1


def _tp_dim(name: str) -> int | None:
    """The dimension of a parameter that tensor parallelism cuts; None where it stays whole."""
    rows = ".wo." in name or ".w2." in name
    if "norm" in name or name.endswith(".lora_B" if rows else ".lora_A"):
        return None
    return 0 if not rows else 1


def _parts(model: Llama) -> dict[str, nn.Module]:
    """The root, which FSDP gathers once, and a block: the others are like it."""
    names = ("tok_embeddings", "norm", "output")
    root = nn.ModuleDict({name: getattr(model, name) for name in names})
    return {"root": root, "block": model.layers["0"]}


def _units(model: Llama, tp: int, shard: int) -> dict[str, tuple[int, int]]:
    """Numbers that FSDP gathers in one call, and those of them that learn: of the root, and of
    each block.

    As they are on the first rank of tp, and with the first dimension rounded up for shard."""
    numbers = {}
    for part, module in _parts(model).items():
        gathered = learnt = 0
        for name, parameter in module.named_parameters():
            shape = list(parameter.shape)
            if (dim := _tp_dim(name)) is not None:
                shape[dim] = math.ceil(shape[dim] / tp)
            n = _round_up(shape[0], shard) * math.prod(shape[1:])
            gathered, learnt = gathered + n, learnt + n * parameter.requires_grad
        numbers[part] = gathered, learnt
    return {"root": numbers["root"]} | dict.fromkeys(model.layers, numbers["block"])


def _round_up(n: int, parts: int) -> int:
    return math.ceil(n / parts) * parts


def describe(traffic: dict[tuple[str, str], tuple[int, int]]) -> str:
    """Traffic in words, with the most bytes first."""
    parts = sorted(traffic.items(), key=lambda item: -item[1][1])
    return ", ".join(
        f"{nbytes / 1e6:,.2f} MB by {calls} {collective} over {dim}"
        for (dim, collective), (calls, nbytes) in parts
    )


def _buckets(sizes: list[int]) -> int:
    """How many buckets DDP makes of gradients of these bytes, in the order they become ready."""
    n, filled = 0, math.inf
    for nbytes in sizes:
        if filled >= (1 << 20 if n <= 1 else 25 << 20):
            n, filled = n + 1, 0
        filled += nbytes
    return n
