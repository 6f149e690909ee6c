"""Predict what a parallel configuration costs: FLOPs, memory, communication.

Everything here follows from shapes. So a laptop can plan a cluster (`python bench.py plan`),
train.py announces what a step communicates, and `--dp auto` chooses. bench.py measures the same.

Letters as in parallel.py, and F feed-forward width, KV key/value heads, E head width, N tokens of a
microbatch. Sizes are those of rank 0, which has the largest shard where shards are uneven.
"""

import math
import re
from collections import Counter
from collections.abc import Iterator

import torch
from torch import nn

from model import LOSS_CHUNK, Llama, LlamaConfig
from parallel import ParallelConfig, ZeRO1, ddp, fsdp

# --------------------------------------------------------------------------------------- FLOPs


def flops_per_token(model: Llama, seq_len: int) -> int:
    """Return the floating-point operations to train on one token.

    Each weight of a matrix multiplies and adds once a token in forward, once in backward for the
    gradient of the input and, if trainable, once for its own gradient. Attention multiplies and
    adds D numbers twice, for scores and weighted sums, with each of seq_len tokens: causal
    attention is counted as if it saw the whole row, and recomputation is not counted, as usual
    (Chowdhery et al. 2022, arXiv:2204.02311, appendix B), so that published figures compare."""
    config, weights = model.config, 0
    for layer in model.modules():
        if isinstance(layer, nn.Linear):
            for matrix in layer.parameters():
                weights += (6 if matrix.requires_grad else 4) * matrix.numel()
    return weights + 3 * 2 * 2 * config.n_layers * config.dim * seq_len


# Dense bf16 peaks in FLOP/s, from the makers' data sheets; the first name that matches counts.
PEAK_FLOPS = {
    "GB200": 2.5e15,
    "B200": 2.25e15,
    "GH200": 989.4e12,
    "H200 NVL": 835e12,
    "H200": 989.4e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989.4e12,
    "H20": 148e12,
    "A100": 312e12,
    "A10G": 70e12,
    "A10": 125e12,
    "L40S": 362e12,
    "L40": 181e12,
    "L4": 121e12,
    "RTX 4090": 165.2e12,
    "RTX 3090": 71e12,
    "MI325X": 1307.4e12,
    "MI300X": 1307.4e12,
    "MI250X": 191.5e12,  # of one of its two dies: torch counts each as a device
}


def peak_flops(device_name: str) -> float | None:
    """Return the peak of a device by its name, None if it is not known: MFU is never guessed."""
    for name, peak in PEAK_FLOPS.items():
        if re.search(rf"\b{name}\b(?! (Laptop|D\b))", device_name):
            return peak
    return None


# -------------------------------------------------------------------------------------- memory


def predict_memory(
    model: Llama, parallel: ParallelConfig, tokens: int, microbatches: int, fused: bool = False
) -> dict[str, int]:
    """Return the bytes of tensors on a rank during a step: of each kind, and the `peak` of all.

    `model` is the whole model, before it is split; each microbatch has `tokens` tokens a rank.
    `parameters`, `gradients` and `optimizer` are exact. `gathered` are unsharded weights, and
    gradients that are not sharded yet; `activations` what forward saves and what is being computed,
    logits included. They do not all peak together: the peak is that of the fullest of four moments,
    within a few percent. LoRA's dropout is not counted, and adapters in bfloat16 take less than
    predicted. With --offload, parameters and optimizer are in CPU memory, but count here. `fused`:
    norms run as one kernel, on a GPU or compiled."""
    config, g, w = model.config, parallel.grad_bytes, parallel.weight_bytes
    state, whole = _state(model, parallel), _unsharded(model, parallel, microbatches)
    weights, sums = whole["weights"], whole["sums"]
    output = math.ceil(config.vocab_size / parallel.tp) * config.dim  # elements
    output *= model.output.weight.requires_grad
    embedding = 0 if config.tie_embeddings else output

    # What forward has saved when the loss begins, and the most that one block's backward adds.
    saved, block_work = (n * tokens * w for n in saved_elements(config, parallel, fused))
    stream = config.dim * tokens * w
    loss = config.n_layers * saved + (norm_saves(parallel, fused) + 2) * stream
    loss += loss_bytes(config, parallel, tokens, fused, output > 0)
    block_work += (stream + 2 * config.ffn_dim * tokens * w) / parallel.tp
    first = config.n_layers * saved + block_work

    # Gradients that backward has computed before it reaches the last block, and before it ends.
    gradients, root, block = state["gradients"], whole["root gradients"], whole["block gradients"]
    shards = _shards(parallel, "gradients")
    below = (_units(model, parallel.tp, shards)["0"][1] + embedding) * g // shards
    above = max(0, root - embedding * w)
    moments = {
        "in the loss": sums + weights + loss,
        "in the last block's backward": max(sums, output * w) + weights + first,
        "in the first block's backward": (
            max(sums, gradients - below + above) + weights + block + saved + block_work
        ),
        "in the embedding's backward": (
            max(sums, gradients) + whole["root weights"] + root * (1 + g // w)
        ),
    }
    resting = state["parameters"] + state["optimizer"]
    return state | {
        "gathered": int(weights + max(0, sums - gradients)),
        "activations": int(max(loss, first)),
        "peak": int(resting + max(moments.values())),
    }


def _shards(parallel: ParallelConfig, kind: str) -> int:
    """Return over how many ranks "parameters", "gradients" or "optimizer" are sharded."""
    dim = parallel.strategy.sharded.get(kind)
    return getattr(parallel, dim) if dim else 1


def _state(model: Llama, parallel: ParallelConfig) -> dict[str, int]:
    """Return the bytes that a rank holds between steps, and of its gradients in AdamW's step."""
    g, w, tp = parallel.grad_bytes, parallel.weight_bytes, parallel.tp

    def elements(kind: str, trainable: bool) -> int:
        shards = _shards(parallel, kind)
        if not trainable and parallel.reshard == "adapters":  # the frozen base is unsharded
            shards = 1
        units = _units(model, tp, shards).values()
        return sum(t if trainable else n - t for n, t in units) // shards

    tensors = sum(
        parameter.requires_grad * (model.config.n_layers if part == "block" else 1)
        for part, module in _parts(model).items()
        for parameter in module.parameters()
    )
    return {
        "parameters": elements("parameters", True) * g + elements("parameters", False) * w,
        "gradients": elements("gradients", True) * g,
        "optimizer": elements("optimizer", True) * 2 * g + tensors * 4,  # moments, step counts
    }


def _unsharded(model: Llama, parallel: ParallelConfig, microbatches: int) -> dict[str, int]:
    """Return the bytes that a rank holds unsharded for a while: copies of weights to compute with;
    `sums` of gradients over microbatches; gradients of root and block before they are sharded."""
    g, w = parallel.grad_bytes, parallel.weight_bytes
    shards = max(_shards(parallel, "parameters"), _shards(parallel, "gradients"))
    units = _units(model, parallel.tp, shards)
    trainable = {name: n for name, (_, n) in units.items()}
    gradients = sum(trainable.values()) * g
    if not parallel.uses_fsdp:
        buckets = _shards(parallel, "gradients") == 1 and parallel.replicate > 1  # DDP's
        sent = parallel.replicate > 1 and not buckets  # ZeRO-1's gradients leave one by one
        return {
            "weights": sum(trainable.values()) * w if w < g else 0,  # autocast's copies
            "sums": gradients if microbatches > 1 or buckets else 0,
            "root weights": 0,
            "root gradients": trainable["root"] * g * sent,
            "block gradients": trainable["0"] * g * sent,
        }
    held = trainable if parallel.reshard == "adapters" else {u: n for u, (n, _) in units.items()}
    weights = held["root"] + 2 * held["0"]  # the block that computes, and the next one
    if parallel.reshard == "none" or parallel.shard == 1:
        weights = sum(held.values())
    sums = gradients if parallel.reshard != "all" else gradients // parallel.shard
    return {
        "weights": weights * w,
        "sums": sums if microbatches > 1 else 0,
        "root weights": held["root"] * w,
        "root gradients": trainable["root"] * w,
        "block gradients": trainable["0"] * w,
    }


def norm_saves(parallel: ParallelConfig, fused: bool) -> int:
    """Return what a norm saves beside its output, in units of D elements: its input and, unless it
    is one kernel, the normalized input; both in float32."""
    if fused:
        return 1
    return 2 * max(1, 4 // parallel.weight_bytes)


def saved_elements(
    config: LlamaConfig, parallel: ParallelConfig, fused: bool
) -> tuple[float, float]:
    """Return the elements a token that a block saves for backward, and that backward recomputes.

    Without checkpointing a block saves, D wide: q, attention's output, and for each of two norms
    its inputs (norm_saves) and its output (under tensor parallelism after the all-gather); KV E
    wide: k and v; F wide: gate, up and their product; and a logsumexp for each head. Selective
    checkpointing saves the input, attention's output and half of the products; full the input."""
    D, F, kv_dim = config.dim, config.ffn_dim, config.n_kv_heads * config.head_dim
    lse = config.n_heads * 4 / parallel.weight_bytes  # float32, in elements of the compute dtype
    autocast = parallel.weight_bytes < 4 and not parallel.uses_fsdp
    x = 2 if autocast else 1  # autocast keeps the residual stream in float32...
    norm_outputs = (5 if autocast and not fused else 2) * D  # ...and casts it for five products
    norm_inputs = 2 * norm_saves(parallel, fused) * D
    q_and_attention, k_and_v = 2 * D, 2 * kv_dim
    sharded = norm_inputs + q_and_attention + k_and_v + 3 * F + lse
    all_saved = norm_outputs + sharded / parallel.tp
    reduced = 2 * D * (parallel.tp > 1)  # outputs of the two reduce-scatters
    saved = {
        "none": all_saved,
        "selective": D + ((1 + x) * D + kv_dim + F + lse + reduced) / parallel.tp,
        "full": x * D / parallel.tp,
    }[parallel.checkpointing]
    return saved, all_saved - saved


def loss_bytes(
    config: LlamaConfig, parallel: ParallelConfig, tokens: int, fused: bool, trainable: bool
) -> int:
    """Return the most that the loss holds: logits of a chunk and their softmax, while those of the
    chunk before still exist; and the gradient of the output matrix, if that is trainable."""
    vocab, w = math.ceil(config.vocab_size / parallel.tp), parallel.weight_bytes
    softmax = max(4, w)  # bytes of an element
    cast = w if w < 4 else 0  # the softmax's gradient, cast for the product
    copy = softmax if w < 4 and not fused else 0  # logits, cast for the softmax
    most = w + softmax + max(copy, cast)
    if tokens > LOSS_CHUNK:
        most = w + softmax + cast + copy + softmax
    n, matrix = min(LOSS_CHUNK, tokens) * vocab, vocab * config.dim
    if not trainable:
        return n * most
    return matrix * softmax + max(n * most, n * (w + softmax + cast) + matrix * w)


# ------------------------------------------------------------------------------- communication

Traffic = dict[tuple[str, str], tuple[int, int]]  # (mesh dimension, collective) -> calls, payload


def predict_traffic(
    model: Llama, parallel: ParallelConfig, microbatches: int, batch: int, seq_len: int
) -> Traffic:
    """Return the collectives of one training step with their calls and payload bytes.

    `model` is the whole model, before it is split; each microbatch has `batch` sequences a rank.
    The formulas of parallel.py's docstrings, with padding; bench.py counts what really happens."""
    calls, payload = Counter(), Counter()
    collectives = [*TRAFFIC[parallel.strategy.apply](model, parallel, microbatches)]
    if parallel.tp > 1:
        collectives += _tensor_parallel(model, parallel, microbatches, batch, seq_len)
    for dim, collective, n, nbytes in collectives:
        if n and nbytes and getattr(parallel, dim) > 1:
            calls[dim, collective] += n
            payload[dim, collective] += n * nbytes
    return {key: (calls[key], payload[key]) for key in calls}


# What follows yields (mesh dimension, collective, calls, payload bytes of a call).


def _ddp(model: Llama, parallel: ParallelConfig, microbatches: int) -> Iterator[tuple]:
    for bucket in _buckets(model, parallel.grad_bytes):
        yield "replicate", "all-reduce", 1, bucket


def _zero1(model: Llama, parallel: ParallelConfig, microbatches: int) -> Iterator[tuple]:
    for parameter in model.parameters():
        if parameter.requires_grad:
            padded = _padded(parameter.shape, parallel.replicate) * parallel.grad_bytes
            yield "replicate", "reduce-scatter", 1, padded
            yield "replicate", "all-gather", 1, padded


def _fsdp(model: Llama, parallel: ParallelConfig, microbatches: int) -> Iterator[tuple]:
    g, w, m, reshard = parallel.grad_bytes, parallel.weight_bytes, microbatches, parallel.reshard
    for unit, (elements, trainable) in _units(model, parallel.tp, parallel.shard).items():
        gathered = trainable if reshard == "adapters" else elements
        uses = m if unit == "root" else 2 * m  # the root stays unsharded until backward
        yield "shard", "all-gather", 1 if reshard == "none" else uses, gathered * w
        yield "shard", "reduce-scatter", m if reshard == "all" else 1, trainable * g
        yield "replicate", "all-reduce", 1, trainable // parallel.shard * g


TRAFFIC = {ddp: _ddp, ZeRO1: _zero1, fsdp: _fsdp}  # keys are the values of Strategy.apply


def _tensor_parallel(
    model: Llama, parallel: ParallelConfig, microbatches: int, batch: int, seq_len: int
) -> Iterator[tuple]:
    g, w, tp, m = parallel.grad_bytes, parallel.weight_bytes, parallel.tp, microbatches
    L, tokens = model.config.n_layers, batch * seq_len
    skipped = _skipped_by_backward(model)
    activation = batch * _round_up(seq_len, tp) * model.config.dim * w
    yield "tp", "all-gather", m * (4 * L + 2 - skipped), activation
    yield "tp", "reduce-scatter", m * (4 * L + 2 - skipped), activation
    for start in range(0, tokens, LOSS_CHUNK):
        yield "tp", "all-gather", m, min(LOSS_CHUNK, tokens - start) * tp * g  # logsumexp
    yield "tp", "all-reduce", m, g  # the loss
    # Gradients of replicated parameters: in the compute dtype, or as float32 sums of microbatches.
    summed = m > 1 and parallel.reshard != "all"
    times = m if parallel.reshard == "all" else 1
    for part, module in _parts(model).items():
        for name, parameter in module.named_parameters():
            if parameter.requires_grad and _tp_dim(name) is None:
                n = times * (L if part == "block" else 1)
                yield "tp", "all-reduce", n, parameter.numel() * (g if summed else w)
    if parallel.checkpointing != "none":
        yield "tp", "all-gather", m * 2 * L, activation
    if parallel.checkpointing == "full":
        yield "tp", "reduce-scatter", m * L, activation


def _skipped_by_backward(model: Llama) -> int:
    """Return how many of backward's pairs of all-gather and reduce-scatter under tensor parallelism
    do not happen, since backward ends at the first trainable parameter: none if the embedding is
    trainable; with adapters, those below the first adapter."""
    block = model.layers["0"]
    for skipped, module in enumerate((model.tok_embeddings, block.attention)):
        if any(p.requires_grad for p in module.parameters()):
            return skipped
    return 2


def _tp_dim(name: str) -> int | None:
    """Return the dimension of a parameter that tensor parallelism shards, None if replicated."""
    row_parallel = ".wo." in name or ".w2." in name
    if "norm" in name or name.endswith(".lora_B" if row_parallel else ".lora_A"):
        return None
    return 1 if row_parallel else 0


def _parts(model: Llama) -> dict[str, nn.Module]:
    """Return the root, which FSDP all-gathers once, and block 0, for all blocks are alike."""
    names = ("tok_embeddings", "norm", "output")
    root = nn.ModuleDict({name: getattr(model, name) for name in names})
    return {"root": root, "block": model.layers["0"]}


def _units(model: Llama, tp: int, shards: int) -> dict[str, tuple[int, int]]:
    """Return (elements, trainable ones of them) of the root and of each block, on rank 0 of tp,
    each parameter padded so that `shards` divides its dimension 0."""
    sizes = {}
    for part, module in _parts(model).items():
        elements = trainable = 0
        for name, parameter in module.named_parameters():
            shape = list(parameter.shape)
            if (dim := _tp_dim(name)) is not None:
                shape[dim] = math.ceil(shape[dim] / tp)
            n = _padded(shape, shards)
            elements, trainable = elements + n, trainable + n * parameter.requires_grad
        sizes[part] = elements, trainable
    return {"root": sizes["root"]} | dict.fromkeys(model.layers, sizes["block"])


def _padded(shape: list[int] | torch.Size, shards: int) -> int:
    """Return the elements of a tensor whose dimension 0 is padded to a multiple of `shards`."""
    return _round_up(shape[0], shards) * math.prod(shape[1:])


def _round_up(n: int, multiple: int) -> int:
    return math.ceil(n / multiple) * multiple


def _buckets(model: Llama, grad_bytes: int) -> list[int]:
    """Return the bytes of DDP's buckets, filled in the order in which gradients become ready."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    buckets = []
    for parameter in reversed(parameters):
        if not buckets or buckets[-1] >= (1 << 20 if len(buckets) == 1 else 25 << 20):
            buckets.append(0)
        buckets[-1] += parameter.numel() * grad_bytes
    return buckets


def describe_traffic(traffic: Traffic) -> str:
    """Return traffic in words, the largest first."""
    largest_first = sorted(traffic.items(), key=lambda item: -item[1][1])
    return ", ".join(
        f"{nbytes / 1e6:,.2f} MB by {calls} {collective} over {dim}"
        for (dim, collective), (calls, nbytes) in largest_first
    )
