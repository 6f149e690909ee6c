"""Predict what a parallel configuration costs: FLOPs, memory, communication.

Everything here follows from shapes. So a laptop can plan a cluster (`python bench.py plan`),
train.py announces what a step communicates, and `--dp auto` chooses. bench.py measures the same.

Letters as in parallel.py. Sizes are those of rank 0, which has the largest shard where shards are
uneven.
"""

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from model import DOCUMENT_KERNELS, LOSS_CHUNK, Llama, LlamaConfig
from parallel import ParallelConfig, ZeRO1, ddp, fsdp
from tensor_parallel import planned_dims

# --------------------------------------------------------------------------------------- FLOPs


def flops_per_token(model: Llama, seq_len: int) -> int:
    """Return the floating-point operations to train on one token.

    Per element of a matrix: 2 in forward, 2 in backward for the gradient of the input and, if it is
    trainable, 2 for its own gradient. Attention takes 4 D per layer and token attended to, for
    scores and weighted sums, and three times as much with backward. As usual (Chowdhery et al.
    2022, arXiv:2204.02311, appendix B), causal attention is counted as if each token attended to
    seq_len tokens, and recomputation is not counted, so that published figures compare."""
    config, weights = model.config, 0
    for layer in model.modules():
        if isinstance(layer, nn.Linear):
            for matrix in layer.parameters():
                weights += (6 if matrix.requires_grad else 4) * matrix.numel()
    return weights + 3 * 4 * config.n_layers * config.dim * seq_len


# ------------------------------------------------------------------------------ a changed model


def prediction_caveat(model: Llama) -> str:
    """Return a one-line warning if the formulas below do not describe this model, else "".

    They read the parameters off the model, but take for granted that a block saves for backward,
    and sends under tensor parallelism, what a Llama's does. What it saves is counted here."""
    shapes = [[p.shape for p in block.parameters()] for block in model.layers.values()]
    if any(other != shapes[0] for other in shapes):
        return "note: predictions assume equal blocks, and here they differ: bench.py step counts"
    counted = _counted_saved_elements(model.config)
    known, _ = saved_elements(model.config, ParallelConfig(), fused=False)
    if abs(counted / known - 1) < 0.01:
        return ""
    return (
        f"note: a block of this model saves {counted:,.0f} elements a token for backward, one of a "
        f"Llama {known:,.0f}. Predictions of memory and communication are those of a Llama; "
        f"bench.py step counts"
    )


def _counted_saved_elements(config: LlamaConfig) -> float:
    """Return the float32 elements a token that one more block saves for backward."""
    T = 8

    def saved_bytes(n_layers: int) -> int:
        storages = {}

        def count(saved: Tensor) -> Tensor:
            storages[saved.untyped_storage()._cdata] = saved.untyped_storage().nbytes()
            return saved

        hooks = torch.autograd.graph.saved_tensors_hooks(count, lambda saved: saved)
        with torch.device("cpu"), FakeTensorMode(), hooks:  # shapes without memory
            model = Llama(replace(config, n_layers=n_layers))
            tokens = torch.zeros(1, T, dtype=torch.int64)
            loss = model(tokens, targets=tokens)
        for parameter in model.parameters():
            storages.pop(parameter.untyped_storage()._cdata, None)
        del loss  # until here it has kept what was saved, so that no address was used twice
        return sum(storages.values())

    return (saved_bytes(2) - saved_bytes(1)) / 4 / T


# -------------------------------------------------------------------------------------- memory


def predict_memory(
    model: Llama,
    parallel: ParallelConfig,
    tokens: int,
    microbatches: int,
    fused: bool = False,
    masked: int = 0,
) -> dict[str, int]:
    """Return the bytes of tensors on a rank during a step: of each kind, and the `peak` of all.

    `model` counts with the full shapes of its parameters, parallelized or not; each microbatch has
    `tokens` tokens a rank. `parameters`, `gradients` and `optimizer` are exact. `gathered` are
    unsharded weights, and gradients that are not sharded yet; `activations` what forward saves and
    what is being computed, logits included. They do not all peak together: `peak` is the largest of
    four moments of a step, within a few percent. LoRA's dropout is not counted. With --offload,
    parameters and optimizer are in CPU memory, but count here. `fused`: norms run as one kernel, on
    a GPU or compiled. `masked` is what mask_width returns."""
    config, g, w = model.config, parallel.grad_bytes, parallel.weight_bytes
    L, D, F, tp = config.n_layers, config.dim, config.ffn_dim, parallel.tp
    state = _state(model, parallel)
    weights, root_weights, sums, root_gradients, block_gradients = _unsharded(
        model, parallel, microbatches
    )

    # Activations. Backward of a block holds what it recomputes, and the gradients of the residual
    # stream, of gate and of up. The last norm's inputs and output are saved; its output has a
    # gradient.
    output = math.ceil(config.vocab_size / tp) * D if model.output.weight.requires_grad else 0
    frozen = not model.tok_embeddings.weight.requires_grad
    stream = tokens * D * w
    # With offloaded activations, those of one block stay, and backward has those of two.
    blocks, blocks_in_backward = (1, min(2, L)) if parallel.offload_activations else (L, L)
    elements = saved_elements(config, parallel, fused, masked, frozen)
    saved, recomputed = (n * tokens * w for n in elements)
    block_backward = recomputed + (stream + 2 * tokens * F * w) / tp
    last_block_backward = blocks_in_backward * saved + block_backward
    last_norm = (norm_saves(parallel, fused, frozen) + 2) * stream
    loss = blocks * saved + last_norm + loss_bytes(config, parallel, tokens, fused, output > 0)

    # Gradients, from the output to the embedding. FSDP shards those of a block when it has gone
    # through the block, and those of output, last norm and embedding together at the very end.
    gradients = state["gradients"]
    embedding = 0 if config.tie_embeddings else output  # elements; tied, `output` is both
    shards = _shards(parallel, "gradients")
    block_0 = _units(model, tp, shards)["0"][1]
    all_but_last = gradients - (block_0 + embedding) * g // shards  # these two come last
    norm_and_output = max(0, root_gradients - embedding * w)  # not sharded yet

    # The memory beside parameters and optimizer, at four moments. With several microbatches or in
    # DDP's buckets, `sums` has room for all gradients; else count those computed so far.
    # 1. The loss: sums, weights to compute with, what all blocks have saved, logits.
    in_loss = sums + weights + loss
    # 2. The last block's backward: the same without logits, with the output matrix's gradient.
    in_last_block = max(sums, output * w) + weights + last_block_backward
    # 3. Block 0's backward: gradients of later blocks, last norm and output; its own, not sharded
    #    yet; activations of this block alone.
    in_block_0 = max(sums, all_but_last + norm_and_output) + weights + block_gradients
    in_block_0 += saved + block_backward
    # Offloaded, block 1's backward may need more: block 0's activations, but not yet its gradient.
    if parallel.offload_activations and L > 1:
        in_block_0 += max(0, saved - block_0 * g // shards)
    # 4. The embedding's backward: all gradients, and those that are sharded last once more, not
    #    sharded, and as copied to the buffer of the reduce-scatter. No activations.
    in_embedding = max(sums, gradients) + root_weights + root_gradients + root_gradients * g // w
    peak = max(in_loss, in_last_block, in_block_0, in_embedding)
    peak += tokens * masked  # the mask, one byte for each pair
    return state | {
        "gathered": int(weights + max(0, sums - gradients)),
        "activations": int(max(loss, last_block_backward)),
        "peak": int(state["parameters"] + state["optimizer"] + peak),
    }


def _shards(parallel: ParallelConfig, kind: str) -> int:
    """Return over how many ranks "parameters", "gradients" or "optimizer" are sharded."""
    dim = parallel.strategy.sharded.get(kind)
    return getattr(parallel, dim) if dim else 1


def _state(model: Llama, parallel: ParallelConfig) -> dict[str, int]:
    """Return the bytes that a rank holds between steps, and of its gradients in AdamW's step."""
    g, w = parallel.grad_bytes, parallel.weight_bytes
    moment = parallel.moments.itemsize if parallel.moments else g

    def elements(kind: str, trainable: bool) -> int:
        shards = _shards(parallel, kind)
        if not trainable and parallel.reshard == "adapters":  # the frozen base is unsharded
            shards = 1
        units = _units(model, parallel.tp, shards).values()
        return sum(t if trainable else n - t for n, t in units) // shards

    tensors = sum(
        parameter.requires_grad * (model.config.n_layers if part == "block" else 1)
        for part, module in _parts(model).items()
        for parameter in module.parameters()
    )
    return {
        "parameters": elements("parameters", True) * g + elements("parameters", False) * w,
        "gradients": elements("gradients", True) * g,
        "optimizer": elements("optimizer", True) * 2 * moment + tensors * 4,  # and step counts
    }


def _unsharded(model: Llama, parallel: ParallelConfig, microbatches: int) -> tuple[int, ...]:
    """Return the bytes that a rank holds unsharded for a while: weights to compute with, and those
    of the root among them (see _parts); sums of gradients over microbatches; gradients of the root,
    and of one block, until they are sharded."""
    g, w = parallel.grad_bytes, parallel.weight_bytes
    shards = max(_shards(parallel, "parameters"), _shards(parallel, "gradients"))
    units = _units(model, parallel.tp, shards)
    trainable = {name: n for name, (_, n) in units.items()}
    gradients = sum(trainable.values()) * g
    if not parallel.uses_fsdp:
        replicated, in_buckets = parallel.replicate > 1, parallel.strategy.grads_in_buckets
        copies = sum(trainable.values()) * w if w < g else 0  # that autocast makes
        sums = gradients if microbatches > 1 or (replicated and in_buckets) else 0
        sharded = replicated and not in_buckets  # ZeRO-1
        return copies, 0, sums, trainable["root"] * g * sharded, trainable["0"] * g * sharded
    gathered = trainable
    if parallel.reshard != "adapters":
        gathered = {name: n for name, (n, _) in units.items()}
    weights = gathered["root"] + 2 * gathered["0"]  # of the block that computes, and of the next
    if parallel.reshard == "none" or parallel.shard == 1:
        weights = sum(gathered.values())
    sums = gradients // parallel.shard if parallel.reshard == "all" else gradients
    return (
        weights * w,
        gathered["root"] * w,
        sums if microbatches > 1 else 0,
        trainable["root"] * w,
        trainable["0"] * w,
    )


def stream_width(parallel: ParallelConfig, frozen: bool) -> int:
    """Return the size of the residual stream in units of D elements of the compute dtype. Autocast
    leaves it in float32, the embedding's dtype; a frozen embedding is in the compute dtype."""
    is_autocast = parallel.weight_bytes < 4 and not parallel.uses_fsdp
    return 2 if is_autocast and not frozen else 1


def norm_saves(parallel: ParallelConfig, fused: bool, frozen: bool) -> int:
    """Return what a norm saves beside its output, in the same units: its input. Unless it is one
    kernel, in float32 (float64 in a float64 model), and also the normalized input, which only a
    frozen weight (unless it is a DTensor) does not need."""
    if fused:
        return stream_width(parallel, frozen)
    return max(1, 4 // parallel.weight_bytes) * (1 if frozen and parallel.tp == 1 else 2)


def mask_width(
    documents: bool, seq_len: int, device: str, dtype: torch.dtype, head_dim: int
) -> int:
    """Return the number of keys in attention's mask for each query: seq_len, or 0 where there is no
    mask, since each sequence is one document or the device has a kernel that needs none."""
    has_kernel = head_dim in DOCUMENT_KERNELS.get((device, dtype), ())
    return seq_len if documents and not has_kernel else 0


def saved_elements(
    config: LlamaConfig,
    parallel: ParallelConfig,
    fused: bool,
    masked: int = 0,
    frozen: bool = False,
) -> tuple[float, float]:
    """Return the elements a token that a block saves for backward, and that backward recomputes.
    `frozen`: embedding and norms are not trained, as with adapters.

    Without checkpointing a block saves, D wide: q, attention's output, and for each of two norms
    what norm_saves says and its output (under tensor parallelism after the all-gather); KV E wide:
    k and v; F wide: gate, up and their product; and a logsumexp for each head. With a mask also its
    row, which attention turns into numbers in each block, and k and v for each query head."""
    D, F, kv_dim = config.dim, config.ffn_dim, config.n_kv_heads * config.head_dim
    lse = config.n_heads * 4 / parallel.weight_bytes  # float32, in elements of the compute dtype
    stream = stream_width(parallel, frozen) * D
    # A stream in float32 makes such norm outputs. Uncompiled, each of five products casts one.
    norm_outputs = (5 if stream > D and not parallel.compile else 2) * D
    norm_inputs = 2 * norm_saves(parallel, fused, frozen) * D
    everything = norm_outputs + (norm_inputs + 2 * D + 2 * kv_dim + 3 * F + lse) / parallel.tp
    if masked:
        everything += masked + 2 * (D - kv_dim) / parallel.tp
    reduced = 2 * D if parallel.tp > 1 else 0  # outputs of the two reduce-scatters
    saved = {
        "none": everything,
        # The output of wo, a partial sum for all tokens; then the block's input, attention's
        # output, and the outputs of wk and w3.
        "selective": D + (stream + D + kv_dim + F + lse + reduced) / parallel.tp,
        "full": stream / parallel.tp,  # the block's input
    }[parallel.checkpointing]
    return saved, everything - saved


def loss_bytes(
    config: LlamaConfig, parallel: ParallelConfig, tokens: int, fused: bool, trainable: bool
) -> int:
    """Return the most that the loss holds: logits of a chunk and their softmax, while those of the
    chunk before still exist; and the gradient of the output matrix, if that is trainable."""
    vocab, w = math.ceil(config.vocab_size / parallel.tp), parallel.weight_bytes
    # Bytes per logit, beside the w of the logit itself.
    softmax = max(4, w)
    softmax_input = softmax if w < 4 and not fused else 0  # the logits, cast
    gradient = w if w < 4 else 0  # cast for the product
    if tokens > LOSS_CHUNK:
        per_logit = w + softmax_input + softmax + softmax + gradient  # the last two: chunk before
    else:
        per_logit = w + softmax + max(softmax_input, gradient)
    n, matrix = min(LOSS_CHUNK, tokens) * vocab, vocab * config.dim
    if not trainable:
        return n * per_logit
    in_product = n * (w + softmax + gradient) + matrix * w  # a chunk's gradient of the matrix
    return matrix * softmax + max(n * per_logit, in_product)


# ------------------------------------------------------------------------------- communication

Traffic = dict[tuple[str, str], tuple[int, int]]  # (mesh dimension, collective) -> calls, payload


def predict_traffic(
    model: Llama, parallel: ParallelConfig, microbatches: int, batch: int, seq_len: int
) -> Traffic:
    """Return the collectives of one training step with their calls and payload bytes.

    `model` is the whole model, before it is parallelized; a microbatch has `batch` sequences on a
    rank. The formulas are those of parallel.py's docstrings, with padding."""
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
    """Buckets are filled in the order in which gradients become ready."""
    bucket, full = 0, 1 << 20  # bytes
    for parameter in reversed(list(model.parameters())):
        if bucket >= full:
            yield "replicate", "all-reduce", 1, bucket
            bucket, full = 0, 25 << 20
        if parameter.requires_grad:
            bucket += parameter.numel() * parallel.grad_bytes
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
        dims = _sharded_dims(part, module)
        for name, parameter in module.named_parameters():
            if parameter.requires_grad and dims[name] is None:
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


def _parts(model: Llama) -> dict[str, nn.Module]:
    """Return what FSDP all-gathers at once: the root, and a block (block 0, as all are alike)."""
    root = nn.Module()  # all but the blocks
    root._parameters = model._parameters
    root._modules = {name: module for name, module in model.named_children() if name != "layers"}
    return {"root": root, "block": model.layers["0"]}


def _sharded_dims(part: str, module: nn.Module) -> dict[str, int | None]:
    """Return the dimension of each parameter of a part that tensor parallelism shards, None for a
    replicated one. Raises UserError for a parameter that it does not know."""
    prefix = "layers.0." if part == "block" else ""
    return {
        f"{path}.{name}".lstrip("."): dim
        for path, layer in module.named_modules()
        for name, dim in planned_dims(f"{prefix}{path}".rstrip("."), layer).items()
    }


def _units(model: Llama, tp: int, shards: int) -> dict[str, tuple[int, int]]:
    """Return (elements, trainable ones of them) of the root and of each block, on rank 0 of tp,
    each parameter padded so that `shards` divides its dimension 0."""
    sizes = {}
    for part, module in _parts(model).items():
        elements = trainable = 0
        dims = _sharded_dims(part, module) if tp > 1 else {}
        for name, parameter in module.named_parameters():
            shape = list(parameter.shape)
            if (dim := dims.get(name)) is not None:
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


def sent_bytes(traffic: Traffic, parallel: ParallelConfig) -> int:
    """Return the bytes that a rank sends if every collective runs in a ring of its n ranks: of its
    payload (n-1)/n, and twice that for an all-reduce.

    NCCL's rings send as much. gloo's all-reduce and all-gather do, too, but its reduce-scatter
    sends as much as an all-reduce, twice what is counted here."""
    sent = 0.0
    for (dim, collective), (_, payload) in traffic.items():
        n = parallel.size if dim == "world" else getattr(parallel, dim)
        sent += (n - 1) / n * payload * (2 if collective == "all-reduce" else 1)
    return round(sent)


def describe_traffic(traffic: Traffic, parallel: ParallelConfig) -> str:
    """Return in words what a rank sends, and the payload of its collectives, the largest first."""
    largest_first = sorted(traffic.items(), key=lambda item: -item[1][1])
    payload = ", ".join(
        f"{nbytes / 1e6:,.2f} MB by {calls} {collective} over {dim}"
        for (dim, collective), (calls, nbytes) in largest_first
    )
    return (
        f"{sent_bytes(traffic, parallel) / 1e6:,.2f} MB; payload {payload}"
        if payload
        else "nothing"
    )
