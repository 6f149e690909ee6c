"""Predict the memory that a step takes on each rank.

Letters as in parallel.py. Sizes are those of rank 0, which has the largest shard where shards are
uneven; in a pipeline, those of the rank that needs most.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

import lora as lora_py
from config import EVERYTHING, ParallelConfig, Work
from costs.traffic import first_block, modules_of, parts_of, sizes_of
from lora import LoRA, adapter_settings
from model import Llama, LlamaConfig
from parallel import used_techniques
from techniques.chunked_loss import tokens_at_a_time
from techniques.optimizers import batches_of_matrices
from techniques.pipeline import layers_of
from techniques.schedules import SCHEDULES, STEADY, Action, has_w, make_schedule, splits_backward


def predict_memory(work: Work, pp_rank: int | None = None) -> dict[str, int]:
    """Return the bytes of tensors on a rank during a step: of each kind, and the `peak` of all.

    `parameters`, `gradients` and `optimizer` are exact. `gathered` are unsharded weights, and
    gradients that are not sharded yet; `activations` what forward saves and what is being computed,
    logits included. They do not all peak together: `peak` is the largest of five moments of a step,
    within a few percent. In a pipeline all are those of rank `pp_rank` along pp, by default of the
    one with the largest peak. With --offload, parameters and optimizer are in CPU memory, but count
    here. labs/memory asks for a formula of DDP and FSDP."""
    ranks = _ranks_with_most(work.parallel) if pp_rank is None else [pp_rank]
    return max((_memory_of_rank(work, r) for r in ranks), key=lambda memory: memory["peak"])


def fits_in(work: Work, room: float) -> bool:
    """Return whether every rank's peak is at most `room` bytes. The first that is not ends it."""
    return all(_memory_of_rank(work, r)["peak"] <= room for r in _ranks_with_most(work.parallel))


def _ranks_with_most(parallel: ParallelConfig) -> set[int]:
    """Return the ranks of a pipeline of which one has the largest peak."""
    ranks = {*range(parallel.pp)}
    if parallel.schedule in SCHEDULES and not has_w(parallel.schedule):
        ranks &= {0, 1, parallel.pp - 1}  # those between hold no more than rank 1
    return ranks


def state_bytes(work: Work) -> int:
    """Return the bytes of weights, gradients and optimizer on rank 0, at most its peak."""
    return sum(_state(parts_of(work.model, work.parallel)[0], work.parallel).values())


def _memory_of_rank(work: Work, pp_rank: int) -> dict[str, int]:
    """Return what predict_memory does for one rank of a pipeline."""
    model = parts_of(work.model, work.parallel)[pp_rank]
    parallel, tokens, microbatches = work.parallel, work.tokens, work.microbatches
    config, g, w = model.config, parallel.grad_bytes, parallel.weight_bytes
    L, D, F, tp = len(model.layers), config.dim, config.ffn_dim, parallel.tp
    units = partial(sizes_of, model, parallel)  # shards -> sizes
    state = _state(model, parallel)
    weights, root_weights, sums, root_gradients, block_gradients = _unsharded(
        parallel, units, L, microbatches
    )

    # Activations. Backward of a block holds what it recomputes, and the gradients of the residual
    # stream, of gate and of up. The last norm's inputs and output are saved; its output has a
    # gradient.
    matrix = math.ceil(config.vocab_size / tp) * D  # elements of the embedding, and of the output
    output, embedding = (
        matrix if module is not None and module.weight.requires_grad else 0
        for module in (model.output, model.tok_embeddings)
    )
    embedding = 0 if config.tie_embeddings and output else embedding  # tied, `output` is both
    lora, frozen, _ = _trained_parts(model)
    stream = tokens * D * w
    # With offloaded activations, those of one block stay, and backward has those of two.
    blocks, blocks_in_backward = (1, min(2, L)) if parallel.offload_activations else (L, L)
    elements = saved_elements(config, parallel, work.mask_width, frozen, work.on_gpu)
    saved, recomputed = (n * tokens * w for n in elements)
    matrix_in_4_bits = largest_in_4_bits(first_block(model), tp) * w
    used = [*used_techniques(parallel), lora_py.TECHNIQUE]
    more = sum(technique.holds(work) for technique in used) * tokens * w
    if parallel.async_tp and work.microbatch > 1:  # wo multiplies chunks, copies of its input
        more += tokens * config.q_dim * w / tp
    if parallel.checkpointing == "none":
        saved += more
    else:  # what need not be saved exists in the recomputation all the same
        recomputed += max(0.0, more)
    gate = tokens * F * w / tp  # its gradient exists with that of up, or w2's input's with w2
    # What a block has offloaded is freed all at once, and more of backward adds to it.
    freed_at_once = parallel.offload_activations and parallel.checkpointing == "none"
    in_feed_forward = gate + max(gate, matrix_in_4_bits) + freed_at_once * gate
    if lora and lora.dora and not parallel.compile:  # products in float32, of output or gradient
        in_feed_forward += ((w < 4) + freed_at_once) * tokens * F * 4 / tp
    # The norm of q casts two tensors and makes two, after feed-forward and attention freed theirs.
    q = config.qk_norm * (not work.fused) * tokens * config.q_dim * w / tp
    in_norm = q * (8 if w < 4 else 2) - (3 * gate + q) * (not freed_at_once)
    block_backward = recomputed + stream / tp + max(in_feed_forward, in_norm)
    last_block_backward = blocks_in_backward * saved + block_backward
    last_norm = (stream_width(parallel, frozen) + 2) * stream
    if not work.fused and not frozen:
        last_norm += tokens * D * max(4, w)
    logits = loss_bytes(work, output > 0)
    loss = blocks * saved + last_norm + logits
    if parallel.pp > 1:  # several microbatches, each with the blocks of a stage and what it returns
        p, v = parallel.pp, parallel.stages_per_rank
        few = min(microbatches, 2 * p) if parallel.schedule in STEADY else microbatches
        order, stages = make_schedule(parallel.schedule, p, few, v)[pp_rank], p * v
        ends = last_norm - stream + output * max(4, w)  # the loss keeps gradients, not its input
        splits = splits_backward([order]) and lora is None  # adapters leave nothing for W
        deferred, wait_for_w = (splits * n * tokens * w for n in deferred_elements(config, tp))
        kept, later = {}, {}
        for stage in range(pp_rank, stages, p):
            blocks = len(layers_of(stage, stages, config.n_layers))
            kept[stage] = blocks * saved + (ends if stage == stages - 1 else stream / tp)
            later[stage] = [deferred] * blocks + [stream / tp * (deferred > 0)]
        given = order, kept, later, {stages - 1: ends}, sums
        loss, last_block_backward = _held_in_pipeline(*given)
        loss += (last_norm + logits - ends) * (pp_rank == p - 1)
        last_block_backward += block_backward + wait_for_w

    # Gradients, from the output to the embedding. FSDP shards those of a block when it has gone
    # through the block, and those of output, last norm and embedding together at the very end.
    gradients = state["gradients"]
    shards = _shards(parallel, "gradients")
    root, block_0 = (trainable for _, trainable in units(shards).values())
    last = block_0 + (root if parallel.strategy.uses_fsdp else embedding)
    all_but_last = gradients - last * g // shards
    norm_and_output = max(0, root_gradients - embedding * w)  # not sharded yet

    # The memory beside parameters and optimizer, at five moments. With several microbatches or in
    # DDP's buckets, `sums` has room for all gradients; else count those computed so far.
    # 1. The loss: sums, weights to compute with, what all blocks have saved, logits.
    in_loss = sums + weights + loss
    # 2. The last block's backward: the same without logits, with the output matrix's gradient.
    of_output = output * (w if parallel.strategy.uses_fsdp else g)
    in_last_block = max(sums, of_output) + weights + last_block_backward
    # 3. Block 0's backward: gradients of later blocks; those of last norm and output, and its own,
    #    not sharded yet; activations of this block alone.
    in_sums = norm_and_output * (parallel.reshard != "all")  # sums that are sharded have them not
    in_block_0 = max(sums - in_sums, all_but_last) + norm_and_output + weights + block_gradients
    in_block_0 += saved + block_backward
    # Offloaded, block 1's backward may need more: block 0's activations, but not yet its gradient;
    # and what it frees all at once waits beside block 2's gradients, which are being reduced.
    if parallel.offload_activations and L > 1:
        in_block_0 += max(0, saved - block_0 * g // shards)
        being_reduced = block_gradients // w * g * parallel.strategy.uses_fsdp
        in_block_0 += being_reduced * freed_at_once
    # 4. The embedding's backward: all gradients, and those that are sharded last once more, not
    #    sharded, and as copied to the buffer of the reduce-scatter. No activations.
    in_embedding = max(sums, gradients) + root_weights + root_gradients
    in_embedding += root_gradients * (g // w if parallel.strategy.uses_fsdp else 1)
    # 5. Muon orthogonalizes a matrix.
    in_muon = gradients + (_muon_bytes(model, parallel) if parallel.optimizer == "muon" else 0)
    peak = max(in_loss, in_last_block, in_block_0, in_embedding, in_muon)
    peak += tokens * work.mask_width * (w if parallel.cp > 1 else 1)  # numbers or truth values
    return state | {
        "gathered": int(weights + max(0, sums - gradients)),
        "activations": int(max(loss, last_block_backward)),
        "peak": int(state["parameters"] + state["optimizer"] + peak),
    }


def _held_in_pipeline(
    order: list[Action],
    kept: dict[int, float],
    later: dict[int, list[float]],
    ends: dict[int, float],
    sums: int,
) -> tuple[float, float]:
    """Return the most bytes of activations that a rank holds after a forward of the last stage, and
    at a moment of a backward. A stage's forward keeps `kept` bytes until its backward, and B keeps
    `later` bytes of each block until W. Of what the last stage keeps, its B frees the loss's `ends`
    first. The first backward makes the `sums` of gradients, so that until then they are subtracted.
    """
    now, forward, backward = -sums, 0.0, 0.0
    all_later = {stage: sum(nbytes) for stage, nbytes in later.items()}
    without_first = {stage: sum(nbytes[1:]) for stage, nbytes in later.items()}
    for kind, _, stage in order:
        if kind == "F":
            now += kept[stage]
            if stage in ends:
                forward = max(forward, now)
        elif kind == "B":
            of_block = now - ends.get(stage, 0.0)
            backward = max(backward, of_block, now - kept[stage] + without_first[stage])
            now += all_later[stage] - kept[stage] + sums
            sums = 0
        else:
            now -= all_later[stage]
    return forward, backward


def _shards(parallel: ParallelConfig, kind: str) -> int:
    """Return over how many ranks "parameters", "gradients" or "optimizer" are sharded."""
    dim = parallel.strategy.sharded.get(kind)
    return getattr(parallel, dim) if dim else 1


def trainable_elements(model: Llama, parallel: ParallelConfig, kind: str) -> int:
    """Return of how many trained parameters a rank holds a `kind`: "parameters", "gradients" or the
    state of the "optimizer". `model` is the rank's part of a pipeline."""
    return _of_model(model, parallel, _shards(parallel, kind))[1]


def _of_model(model: Llama, parallel: ParallelConfig, shards: int) -> list[int]:
    """Return the bytes of frozen parameters, and the elements of trainable ones."""
    root, block = sizes_of(model, parallel, shards).values()
    return [(r + len(model.layers) * b) // shards for r, b in zip(root, block)]


@functools.lru_cache(64)
def _trained_parts(model: Llama) -> tuple[LoRA | None, bool, int]:
    """Return the adapters of a model, whether its norms are frozen, and the number of its trainable
    tensors."""
    norms = (p for n, p in model.named_parameters() if p.ndim == 1 and ".lora_" not in n)
    of_root, of_block = (
        sum(parameter.requires_grad for parameter in module.parameters())
        for module in modules_of(model).values()
    )
    tensors = of_root + len(model.layers) * of_block
    return adapter_settings(first_block(model)), not next(norms).requires_grad, tensors


@functools.lru_cache(64)  # plans come one after another that differ in their microbatches
def _state(model: Llama, parallel: ParallelConfig) -> dict[str, int]:
    """Return the bytes that a rank holds between steps, and of its gradients in AdamW's step."""
    g, moment = parallel.grad_bytes, parallel.moment_bytes
    sharded = parallel.reshard != "adapters"  # else the frozen base is unsharded
    shards = _shards(parallel, "parameters") if sharded else 1
    frozen_bytes, _ = _of_model(model, parallel, shards)
    elements = {kind: trainable_elements(model, parallel, kind) for kind in EVERYTHING}
    _, _, tensors = _trained_parts(model)
    optimizer = elements["optimizer"] * 2 * moment + tensors * 4  # and step counts
    optimizer += elements["optimizer"] * 2 * g * parallel.strategy.own_steps  # DiLoCo's outer state
    if parallel.optimizer == "muon":  # one momentum for each of these, and no count
        for batch in batches_of_matrices(model, parallel):
            optimizer -= sum(own * moment + 4 for _, own in batch)
    return {
        "parameters": elements["parameters"] * g + frozen_bytes,
        "gradients": elements["gradients"] * g,
        "optimizer": optimizer,
    }


def _muon_bytes(model: Llama, parallel: ParallelConfig) -> int:
    """Return what a step of Muon holds beside gradients: the updates of a batch of matrices, those
    of the batch before it, and more while a rank orthogonalizes a matrix [m, n], two powers of it
    and two products [min(m, n)]², or while it sends the parts. On a GPU, where parts are bfloat16,
    it is less."""
    most, alone = 0, parallel.size == parallel.pp
    for batch in batches_of_matrices(model, parallel):
        (m, n), own = batch[0]
        own_parts = sum(own for _, own in batch)
        replicas = parallel.size // parallel.pp * own // (m * n)  # nearly, where parts are uneven
        whole = m * n * (not alone)
        orthogonalizing = whole + 2 * m * n + 2 * min(m, n) ** 2
        sending = (whole + replicas * m * n + own_parts) * (not alone)
        most = max(most, 2 * own_parts + max(orthogonalizing, sending))
    return most * parallel.grad_bytes


def _unsharded(
    parallel: ParallelConfig, units: Callable, L: int, microbatches: int
) -> tuple[int, ...]:
    """Return the bytes that a rank holds unsharded for a while: weights to compute with, and those
    of the root among them (see modules_of); sums of gradients over microbatches; gradients of the
    root, and of one block, until they are sharded."""
    g, w = parallel.grad_bytes, parallel.weight_bytes
    shards = max(_shards(parallel, "parameters"), _shards(parallel, "gradients"))
    (frozen_root, trainable_root), (frozen_block, trainable_block) = units(shards).values()
    trainable = trainable_root + L * trainable_block
    if not parallel.strategy.uses_fsdp:
        replicated, in_buckets = parallel.replicate > 1, parallel.strategy.wrapper == "ddp"
        copies = trainable * w if w < g else 0  # that autocast makes
        # In a compiled block that recomputes, each product makes its own.
        makes_again = parallel.compile and parallel.checkpointing != "none"
        if copies and makes_again:
            copies = (trainable_root + trainable_block) * w
        sums = trainable * g if microbatches > 1 or (replicated and in_buckets) else 0
        sharded = replicated and not in_buckets  # ZeRO-1
        return copies, 0, sums, trainable_root * g * sharded, trainable_block * g * sharded
    if parallel.reshard == "adapters":
        frozen_root = frozen_block = 0
    root, block = frozen_root + trainable_root * w, frozen_block + trainable_block * w
    weights = root + min(2, L) * block  # of the block that computes, and of the next
    if parallel.reshard == "none" or parallel.shard == 1:
        weights = root + L * block
    sums = trainable * g // (parallel.shard if parallel.reshard == "all" else 1)
    sums = sums if microbatches > 1 else 0
    return weights, root, sums, trainable_root * w, trainable_block * w


def stream_width(parallel: ParallelConfig, frozen: bool) -> int:
    """Return the size of the residual stream in units of D elements of the compute dtype. Autocast
    leaves it in float32, the embedding's dtype; a frozen embedding is in the compute dtype."""
    is_autocast = parallel.weight_bytes < 4 and not parallel.strategy.uses_fsdp
    return 2 if is_autocast and not frozen else 1


def saved_elements(
    config: LlamaConfig,
    parallel: ParallelConfig,
    masked: int = 0,
    frozen: bool = False,
    on_gpu: bool = False,
) -> tuple[float, float]:
    """Return the elements a token that a block saves for backward, and that backward recomputes.
    `frozen`: embedding and norms are not trained, as with adapters.

    Without checkpointing a block saves, D wide: for each of two norms its input and its output
    (under tensor parallelism after the all-gather); H E wide: q and attention's output; KV E wide:
    k and v; F wide: gate, up and their product; and a logsumexp for each head. Not compiled, also
    silu(gate), and on a CPU what a norm reads and makes before its weight, in float32, and a scale.
    With a mask also its row, which attention turns into numbers in each block, and k and v for each
    query head. With norms of q and k also what these read, and a scale for each head."""
    D, F, q_dim, kv_dim = config.dim, config.ffn_dim, config.q_dim, config.kv_dim
    lse = config.n_heads * 4 / parallel.weight_bytes  # float32, in elements of the compute dtype
    stream = stream_width(parallel, frozen) * D
    # A stream in float32 makes such norm outputs. Uncompiled, each of five products casts one.
    norm_outputs = (5 if stream > D and not parallel.compile else 2) * D
    everything = norm_outputs + (2 * stream + 2 * q_dim + 2 * kv_dim + 3 * F + lse) / parallel.tp
    wide = max(4, parallel.weight_bytes) / parallel.weight_bytes  # a float32 in such elements
    slow_norms = not (on_gpu or parallel.compile)
    if not parallel.compile:
        everything += F / parallel.tp
    if slow_norms:
        everything += 2 * (max(wide * D - stream, 0) + (not frozen) * wide * D + wide) / parallel.tp
    if config.qk_norm:
        scales = (config.n_heads + config.n_kv_heads) * wide
        everything += (q_dim + kv_dim + scales) / parallel.tp
        if slow_norms:
            everything += (wide - 1 + (not frozen) * wide) * (q_dim + kv_dim) / parallel.tp
    if parallel.cp > 1:
        # Keys and values of the whole sequence; with a mask, copies of those up to the end of each
        # of two chunks. And attention's output of each chunk beside that of both.
        keys = (parallel.cp + 1 / 2) * q_dim if masked else parallel.cp * kv_dim
        everything += (2 * (keys - kv_dim) + q_dim) / parallel.tp
    elif masked:
        everything += masked + 2 * (q_dim - kv_dim) / parallel.tp
    reduced = 2 * D if parallel.tp > 1 else 0  # outputs of the two reduce-scatters
    if parallel.async_tp:  # or messages of wo
        reduced = (parallel.tp - 1) * D
    saved = {
        "none": everything,
        # The output of wo, a partial sum for all tokens; then the block's input, attention's
        # output, and the outputs of wk and w3.
        "selective": D + (stream + q_dim + kv_dim + F + lse + reduced) / parallel.tp,
        "full": stream / parallel.tp,  # the block's input
    }[parallel.checkpointing]
    return saved, everything - saved


@functools.lru_cache(1024)
def largest_in_4_bits(block: nn.Module, tp: int) -> int:
    """Return the elements of the largest matrix of a block that backward makes of 4 bits."""
    sizes = [
        layer.in_features * layer.out_features // tp
        for layer in block.modules()
        if getattr(layer, "row_scale", None) is not None
    ]
    return max(sizes, default=0)


def loss_bytes(work: Work, trainable: bool) -> int:
    """Return the most that the loss holds. Of a chunk: the log softmax, its gradient, and that of
    the logits; one more where ranks share the vocabulary. If the output matrix is trainable, also
    its gradient and the sum over chunks."""
    config, w, size = work.model.config, work.parallel.weight_bytes, tokens_at_a_time(work.on_gpu)
    vocab = math.ceil(config.vocab_size / work.parallel.tp)
    n, matrix, wide = min(size, work.tokens) * vocab, vocab * config.dim, max(4, w)
    in_chunk = n * wide * (3 if work.parallel.tp == 1 else 4)
    if not trainable:
        return in_chunk
    return matrix * wide + max(in_chunk, n * w + matrix * w)


def deferred_elements(config: LlamaConfig, tp: int) -> tuple[float, float]:
    """Return the elements a token that a block keeps from B to W: inputs of its seven matrices, and
    gradients of their outputs; and how many of them a backward that is not split would free at
    once, gradients of q, k and v, and at wo and w2. Under tensor parallelism those of the whole
    stream are not sharded: inputs of wq, wk, wv and of w1, w3, and gradients at wo and w2."""
    D, F, q_dim, kv_dim = config.dim, config.ffn_dim, config.q_dim, config.kv_dim
    narrow = 2 * D + (q_dim + 2 * kv_dim) / tp
    return narrow + 2 * D + (q_dim + 3 * F) / tp, narrow


# ------------------------------------------------------------------------------ a changed model


def prediction_caveat(model: Llama) -> str:
    """Return a one-line warning if the formulas above do not describe this model, else "".

    They read the parameters off the model, but take for granted that a block saves for backward,
    and sends under tensor parallelism, what a Llama's does. What it saves is counted here."""
    shapes = [[p.shape for p in block.parameters()] for block in model.layers.values()]
    if any(other != shapes[0] for other in shapes):
        return "note: predictions assume equal blocks, and here they differ: bench.py step counts"
    sizes = dict(dim=64, n_heads=4, n_kv_heads=2, head_dim=16, ffn_dim=160, vocab_size=256)
    config = replace(model.config, **sizes)  # which a CPU computes at once
    known, _ = saved_elements(config, ParallelConfig())
    counted = _counted_saved_elements(config, T=1024)  # a bias for each pair would depend on T
    if abs(counted / known - 1) <= 0.01:
        return ""
    return (
        f"note: a block of this model, {config.dim} wide, saves {counted:,.0f} elements a token "
        f"for backward, one of a Llama {known:,.0f}. Predictions of memory and communication are "
        f"those of a Llama; bench.py step counts"
    )


def _counted_saved_elements(config: LlamaConfig, T: int) -> float:
    """Return the float32 elements a token that one more block saves for backward."""

    def saved_bytes(n_layers: int) -> int:
        storages = {}

        def count(saved: Tensor) -> Tensor:
            storages[saved.untyped_storage()._cdata] = saved.untyped_storage().nbytes()
            return saved

        with torch.random.fork_rng(devices=[]):
            model = Llama(replace(config, n_layers=n_layers))
        tokens = torch.zeros(1, T, dtype=torch.int64)
        with torch.autograd.graph.saved_tensors_hooks(count, lambda saved: saved):
            loss = model(tokens, targets=tokens)
        for parameter in model.parameters():
            storages.pop(parameter.untyped_storage()._cdata, None)
        del loss  # until here it has kept what was saved, so that no address was used twice
        return sum(storages.values())

    return (saved_bytes(2) - saved_bytes(1)) / 4 / T
