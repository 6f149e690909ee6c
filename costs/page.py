"""What a rank holds and sends in a step: the formulas of README's table, on one page.

What a plain Llama sends is exact, its peak of memory within a tenth; several techniques at once are
further off (docs/measured.md). Who needs every byte counts it: `bench.py step` in a real step,
`bench.py plan --check` in an emulated one. Letters as in parallel.py; Q and KV: width of all
queries, and of all keys; N: tokens of a microbatch on a rank; m: microbatches. Sizes are those of
rank 0, which has the largest shards. A technique adds its part in its own file (`holds`, `sends`).
"""

import functools
import math
from collections import Counter
from collections.abc import Iterator

import lora
from config import EVERYTHING, Work
from costs.shapes import elements, shapes_on_rank, units
from model import Llama
from parallel import used_techniques
from techniques.chunked_loss import tokens_at_a_time
from techniques.pipeline import part_of
from techniques.schedules import most_held

Traffic = dict[tuple[str, str], tuple[float, float]]  # (dimension, collective) -> calls, payload

# ------------------------------------------------------------------------------------------ memory


def saved(work: Work, more: float = 0.0) -> tuple[float, float]:
    """Return the elements, of w bytes, that a block saves for backward for each token, and those
    that it computes again there, under activation checkpointing. Techniques save `more`."""
    c, p, tp = work.model.config, work.parallel, work.parallel.tp
    D, F, Q, KV, w = c.dim, c.ffn_dim, c.q_dim, c.kv_dim, p.weight_bytes
    trains_all = work.model.tok_embeddings.weight.requires_grad
    autocasts = w < p.grad_bytes and not p.strategy.uses_fsdp and trains_all
    stream = 2 * D if autocasts else D  # the residual stream is in float32 then
    qk = Q + KV if c.qk_norm else 0  # that norms of q and k read
    # Outputs and inputs of two norms; q and attention's output; k, v; gate, up and their product.
    everything = more + 2 * D + (2 * stream + 2 * Q + 2 * p.cp * KV + 3 * F + qk) / tp
    if work.mask_width:  # its row, and keys and values for each query head
        everything += work.mask_width + 2 * (Q - KV) / tp
    if not p.compile:  # silu(gate), and what autocast rounds for each of five products, not two
        everything += F / tp + (3 * D if autocasts else 0)
    if not work.fused:  # what norms read, and make before their weights, in float32
        in_float32 = max(4, w) / w
        everything += ((2 if trains_all else 1) * in_float32 - 1) * (2 * D + qk) / tp
    some = {
        "none": everything,
        "selective": D + (stream + Q + KV + F + 2 * D * (tp > 1)) / tp,  # see recompute.py
        "full": stream / tp,  # the block's input
    }[p.checkpointing]
    return some, everything - some


def holds(work: Work, pp_rank: int | None = None) -> dict[str, float]:
    """Return the bytes of tensors on a rank in a step, as if without --offload: `parameters`,
    `gradients`, `optimizer`, what else is `kept`, unsharded weights as `gathered`, `activations`;
    and their `peak`, to which they do not all add (labs/memory). In a pipeline: of rank `pp_rank`
    along pp, by default of the largest."""
    c, p, m, N = work.model.config, work.parallel, work.microbatches, work.tokens
    if pp_rank is None:  # those between the second and the last hold no more than the second
        return max((holds(work, r) for r in {0, 1 % p.pp, p.pp - 1}), key=lambda h: h["peak"])
    part, wide = part_of(work.model, pp_rank, p.pp, p.stages_per_rank), max(4, p.weight_bytes)
    D, F, V, g, w = c.dim, c.ffn_dim, c.vocab_size / p.tp, p.grad_bytes, p.weight_bytes
    root, block = units(part, p, max(map(p.shards, EVERYTHING)))
    L, trained = block.copies, root.trained + block.copies * block.trained
    frozen = root.frozen + L * block.frozen
    frozen_shards = 1 if p.reshard == "adapters" else p.shards("parameters")
    state = {
        "parameters": trained * g / p.shards("parameters") + frozen / frozen_shards,
        "gradients": trained * g / p.shards("gradients"),
        "optimizer": 2 * trained * p.moment_bytes / p.shards("optimizer"),
    }
    more = Counter()
    for technique in (*used_techniques(p), lora.TECHNIQUE):
        more.update(technique.holds(part, work))
    state |= {"optimizer": state["optimizer"] + more["optimizer"], "kept": more["kept"]}

    # Unsharded for a while: sums of gradients over microbatches; weights to compute with.
    sums = trained * g if m > 1 or (p.strategy.wrapper == "ddp" and p.replicate > 1) else 0
    if p.strategy.uses_fsdp:
        sums = sums / p.shard if p.reshard == "all" else sums
        keeps_all = p.reshard == "none" or p.shard == 1  # else the next block's, too
        gathered = root.gathered + block.gathered * (L if keeps_all else min(2, L))
    else:  # copies that autocast makes, in a compiled block that recomputes for each product anew
        blocks = 1 if p.compile and p.checkpointing != "none" else L
        gathered = (root.trained + blocks * block.trained) * w if w < g else 0

    # Activations: of blocks, for each microbatch under way in a pipeline; of the loss its chunks.
    kept, again = (N * w * n for n in saved(work, more["saved"]))
    all_kept = kept if p.offload_activations else L * kept
    if p.pp > 1:
        order = p.schedule, p.pp, m, p.stages_per_rank, pp_rank
        all_kept *= most_held(*order, has_w=not frozen) / p.stages_per_rank
    loss = 3 * N * D * w
    if part.output is not None:
        chunk = min(N, tokens_at_a_time(work.on_gpu)) * V * wide
        loss += (3 if p.tp == 1 else 4) * chunk + V * D * wide * part.output.weight.requires_grad
    backward = again + N * w * (D + 2 * F) / p.tp  # and gradients of the stream, of gate and up

    always = state["parameters"] + state["optimizer"] + state["kept"]
    peak = always + max(
        sums + gathered + all_kept + loss,  # of the loss
        sums + gathered + max(all_kept, min(2, L) * kept) + backward,  # of the last block
        max(sums, state["gradients"]) + gathered + kept + backward,  # of block 0
        max(sums, state["gradients"]) + 3 * root.trained * w,  # of the embedding
        state["gradients"] + more["update"],  # of the update
    )
    activations = all_kept + max(loss, backward)
    return state | {"gathered": gathered, "activations": activations, "peak": peak}


# ------------------------------------------------------------------------------------------ traffic


@functools.lru_cache(1024)
def sends(work: Work, pp_rank: int | None = None) -> Traffic:
    """Return the collectives of a step with their calls and payload bytes, of such a rank; by
    default of the one that sends most (labs/bytes)."""
    p = work.parallel
    if pp_rank is None:
        of_ranks = (sends(work, rank) for rank in range(p.pp))
        return max(of_ranks, key=lambda traffic: sum(payload for _, payload in traffic.values()))
    part, traffic = part_of(work.model, pp_rank, p.pp, p.stages_per_rank), {}
    each = [*_of_gradients(part, work), *_of_activations(part, work, pp_rank)]
    for technique in used_techniques(p):
        each += technique.sends(part, work)
    for dim, collective, calls, nbytes in each:
        if calls and nbytes and p.group_size(dim) > 1:
            before, payload = traffic.get((dim, collective), (0, 0))
            traffic[dim, collective] = before + calls, payload + calls * nbytes
    return {key: (calls, payload) for key, (calls, payload) in traffic.items() if calls}


def _of_gradients(part: Llama, work: Work) -> Iterator[tuple]:
    """Yield (dimension, collective, calls, bytes of a call) for weights and their gradients."""
    p, m, g = work.parallel, work.microbatches, work.parallel.grad_bytes
    trained = [entry for entry in shapes_on_rank(part, "", p.tp) if entry[0].requires_grad]
    times = m if p.reshard == "all" else 1  # that gradients are summed over ranks
    if p.strategy.uses_fsdp:
        # Gathered are the root once a microbatch, in a pipeline once, and a block twice.
        for unit, uses in zip(units(part, p, p.shard), (m if p.pp == 1 else 1, 2 * m)):
            uses = 1 if p.reshard == "none" else uses
            yield "shard", "all-gather", unit.copies * uses, unit.gathered
            yield "shard", "reduce-scatter", unit.copies * times, unit.trained * g
            if p.replicas > 1:
                yield "replicate", "all-reduce", unit.copies, unit.trained * g // p.shard
    else:  # DDP in buckets of 25 MiB, ZeRO-1 by parameters, padded to divide
        is_zero1 = bool(p.strategy.sharded)
        both = units(part, p, p.replicate if is_zero1 else 1)
        nbytes = g * sum(unit.copies * unit.trained for unit in both)
        calls = len(trained) if is_zero1 else max(1, math.ceil(nbytes / (25 << 20)))
        for collective in ("reduce-scatter", "all-gather") if is_zero1 else ("all-reduce",):
            yield "replicate", collective, calls, nbytes / calls
    # What ranks along tp replicate: gradients in the compute dtype, or float32 sums of several.
    width = g if m > 1 and p.reshard != "all" else p.weight_bytes
    for parameter in (parameter for parameter, _, is_whole in trained if is_whole):
        yield "tp", "all-reduce", times, parameter.numel() * width


def _of_activations(part: Llama, work: Work, pp_rank: int) -> Iterator[tuple]:
    """Yield the same for the residual stream over tp and pp, and keys and values over cp."""
    c, p, m, L = work.model.config, work.parallel, work.microbatches, len(part.layers)
    w, again = p.weight_bytes, p.checkpointing != "none"
    kv = 2 * work.microbatch * work.seq_len * c.kv_dim * w // p.tp
    yield "cp", "all-gather", m * L * (1 + again), kv
    yield "cp", "reduce-scatter", m * L, kv
    share = work.microbatch * math.ceil(work.length / p.tp) * c.dim * w  # of a rank of tp
    ends = int(pp_rank == 0) + int(part.output is not None)  # tied, the last has no embedding
    yield "tp", "all-gather", m * (4 * L + 2 * L * again + ends), p.tp * share
    yield "tp", "reduce-scatter", m * (4 * L + L * (p.checkpointing == "full") + ends), p.tp * share
    if part.output is not None:  # of each token, logsumexp and the target's logit
        chunks = math.ceil(work.tokens / tokens_at_a_time(work.on_gpu))
        yield "tp", "all-gather", m * chunks, work.tokens * 2 * p.tp * p.grad_bytes / chunks
    neighbours = 2 * p.stages_per_rank - (pp_rank == 0) - (pp_rank == p.pp - 1)  # of its stages
    yield "pp", "send", m * neighbours, share
    if c.tie_embeddings and part.tok_embeddings is not None:  # to the stage with the output
        rows = elements(part.tok_embeddings, "tok_embeddings", p.tp, w, p.shard)[0] // p.shard
        yield "pp", "send", int(rows > 0), rows * p.grad_bytes
