"""What a rank holds and sends in a step: the formulas of README's table, on one page.

For a plain Llama the bytes sent are exact, and the peak of memory is within a tenth. With several
techniques at once it is further off (docs/measured.md). To count every byte, run `bench.py step`, a
real step, or `bench.py plan --check`, an emulated one. Letters are those of parallel.py, and Q, KV:
width of all queries, all keys; N: tokens of a microbatch on a rank; m: microbatches. Sizes are of
rank 0, which has the largest shards. A technique adds its part in its own file (`holds`, `sends`).
"""

import functools
import math
from collections import Counter
from collections.abc import Iterator

import lora
from config import EVERYTHING, OWN_GROUPS, ParallelConfig, Work
from costs.shapes import elements, shapes_on_rank, units
from model import Llama
from parallel import ddp_bucket_mb, used_techniques
from techniques.chunked_loss import tokens_at_a_time
from techniques.pipeline import part_of
from techniques.schedules import most_held

Traffic = dict[tuple[str, str], tuple[float, float]]  # (dimension, collective) -> calls, payload

# ------------------------------------------------------------------------------------------ memory


def saved(work: Work, more: float = 0.0) -> tuple[float, float]:
    """Return two numbers of elements, of w bytes, for a token and block: those saved for backward,
    and those that activation checkpointing recomputes there. `more` are saved by techniques."""
    c, p, tp = work.model.config, work.parallel, work.parallel.tp
    D, F, Q, KV, w = c.dim, c.ffn_dim * c.ffn_uses, c.q_dim, c.kv_dim, p.weight_bytes
    trains_all = work.model.tok_embeddings.weight.requires_grad
    autocasts = w < p.grad_bytes and not p.strategy.uses_fsdp and trains_all
    stream = 2 * D if autocasts else D  # the residual stream is in float32 then
    qk = Q + KV if c.qk_norm else 0  # inputs of the norms of q and k
    keys = 2 * p.cp * KV  # k and v; with a mask they are repeated for each query head
    if work.mask_width:
        keys = (2 * p.cp + 1) * Q if p.cp > 1 else 2 * Q  # --cp: up to the end of each chunk
    # Outputs and inputs of two norms; q and attention's output; k, v; gate, up and their product.
    everything = more + 2 * D + (2 * stream + 2 * Q + keys + 3 * F + qk) / tp
    if p.cp == 1:  # each block converts the mask of documents
        everything += work.mask_width
    several = c.ffn_uses > 1  # feed-forwards: then also their inputs and outputs are saved
    everything += 2 * D * c.ffn_uses * several / tp
    if not p.compile or several:  # silu(gate); autocast rounds x for each of 5 products, not for 2
        everything += F / tp + (3 * D if autocasts else 0)
    if not work.fused:  # inputs of norms, and x before their weights, in float32
        in_float32 = max(4, w) / w
        everything += ((2 if trains_all else 1) * in_float32 - 1) * (2 * D + qk) / tp
    of_one = 0 if several else F  # several feed-forwards are computed again
    n_saved = {
        "none": everything,
        "products": D + (stream + 2 * (Q + KV + of_one) + 2 * D * (tp > 1)) / tp,
        "selective": D + (stream + Q + KV + of_one + 2 * D * (tp > 1)) / tp,  # see recompute.py
        "full": (stream + (Q + 2 * D * (tp > 1)) * p.compile) / tp,
    }[p.checkpointing]
    return n_saved, everything - n_saved


def holds(work: Work, pp_rank: int | None = None) -> dict[str, float]:
    """Return the bytes of a rank's tensors in a step by kind, as if without --offload, for rank
    `pp_rank` along pp (by default the one that holds most). `gathered` are unsharded weights, and
    `kept` is what else stays between steps. `peak` is not the sum of all kinds, since they are not
    all there at the same time (see `labs/run.py predict memory`)."""
    c, p, m, N = work.model.config, work.parallel, work.microbatches, work.tokens
    if pp_rank is None:  # ranks between the second and the last hold no more than the second
        return max((holds(work, r) for r in {0, 1 % p.pp, p.pp - 1}), key=lambda h: h["peak"])
    part, wide = part_of(work.model, pp_rank, p.pp, p.stages_per_rank), max(4, p.weight_bytes)
    D, F, V = c.dim, c.ffn_dim * c.ffn_uses, c.vocab_size / p.tp
    g, w = p.grad_bytes, p.weight_bytes
    root, *of_blocks = all_units = units(part, p, max(map(p.shards, EVERYTHING)))
    L, trained = len(part.layers), 0
    state = dict.fromkeys(("parameters", "gradients", "optimizer"), 0.0)
    for unit in all_units:
        trained += unit.copies * unit.trained
        frozen_shards = 1 if p.reshard == "adapters" else p.shards("parameters", unit.kind)
        state["parameters"] += unit.copies * unit.frozen / frozen_shards
        for kind, width in zip(state, (g, g, 2 * p.moment_bytes)):
            state[kind] += unit.copies * unit.trained * width / p.shards(kind, unit.kind)
    more = Counter()
    for technique in (*used_techniques(p), lora.TECHNIQUE):
        more.update(technique.holds(part, work))
    state |= {"optimizer": state["optimizer"] + more["optimizer"], "kept": more["kept"]}

    # Unsharded for a while: sums of gradients (of microbatches, or in DDP's buckets), and weights.
    sums = trained * g if m > 1 or (p.strategy.wrapper == "ddp" and p.replicate > 1) else 0
    if p.strategy.uses_fsdp:
        sums = sums / p.shard if p.reshard == "all" else sums
        keeps_all = p.reshard == "none" or p.shard == 1  # else two blocks at a time
        in_block = sum(unit.gathered for unit in of_blocks)
        gathered = root.gathered + in_block * (L if keeps_all else min(2, L))
    else:  # autocast's copies: a compiled block that recomputes makes them for each product anew
        recasts = p.compile or c.ffn_uses > 1  # several feed-forwards cast theirs themselves
        blocks = 1 if recasts and p.checkpointing != "none" else L
        gathered = (root.trained + blocks * of_blocks[0].trained) * w if w < g else 0

    # Activations of the blocks (of all microbatches under way in a pipeline) and of the loss.
    block_saved, recomputed = (N * w * n for n in saved(work, more["saved"]))
    mask = N * w * work.mask_width if p.cp > 1 else 0  # one for all blocks
    two_blocks = mask + min(2, L) * block_saved
    all_saved = mask + (block_saved if p.offload_activations else L * block_saved)
    if p.pp > 1:
        most = most_held(p.schedule, p.pp, m, p.stages_per_rank, pp_rank)
        all_saved *= most / p.stages_per_rank
    loss = 3 * N * D * w
    if part.output is not None:
        compiled = p.compiles_loss(work.on_gpu)  # then logits and their gradient are not in float32
        of_logit = 2 * w if compiled else (3 if p.tp == 1 else 4) * wide
        loss += min(N, tokens_at_a_time(work.on_gpu, compiled)) * V * of_logit
        loss += V * D * wide * part.output.weight.requires_grad
    gradients = D + 2 * F  # of x, gate and up
    if mask:  # or of whole sequences' keys and values, repeated for each query head and as they are
        gradients = max(gradients, 2 * p.cp * (c.q_dim + c.kv_dim))
    backward = recomputed + N * w * gradients / p.tp

    held_always = state["parameters"] + state["optimizer"] + state["kept"]
    peak = held_always + max(  # the largest of five moments
        sums + gathered + all_saved + loss,  # in the loss
        sums + gathered + max(all_saved, two_blocks) + backward,  # in the last block
        max(sums, state["gradients"]) + gathered + mask + block_saved + backward,  # in block 0
        max(sums, state["gradients"]) + 3 * root.trained * w,  # in the embedding
        state["gradients"] + more["update"],  # in the update
    )
    activations = all_saved + max(loss, backward)
    return state | {"gathered": gathered, "activations": activations, "peak": peak}


# ------------------------------------------------------------------------------------------ traffic


@functools.lru_cache(1024)
def sends(work: Work, pp_rank: int | None = None) -> Traffic:
    """Return the calls and the payload bytes of each collective in a step, for rank `pp_rank` along
    pp, by default the one that sends most (see `labs/run.py predict bytes`)."""
    p = work.parallel
    if pp_rank is None:
        of_ranks = (sends(work, rank) for rank in range(p.pp))
        return max(of_ranks, key=lambda traffic: sum(payload for _, payload in traffic.values()))
    part, traffic = part_of(work.model, pp_rank, p.pp, p.stages_per_rank), {}
    entries = [*_of_gradients(part, work), *_of_activations(part, work, pp_rank)]
    for technique in used_techniques(p):
        entries += technique.sends(part, work)
    for dim, collective, calls, nbytes in entries:
        if calls and nbytes and p.group_size(dim) > 1:
            earlier_calls, payload = traffic.get((dim, collective), (0, 0))
            traffic[dim, collective] = earlier_calls + calls, payload + calls * nbytes
    return {key: (calls, payload) for key, (calls, payload) in traffic.items() if calls}


def _of_gradients(part: Llama, work: Work) -> Iterator[tuple]:
    """Yield (dimension, collective, calls, bytes of a call) for weights and their gradients."""
    p, m, g = work.parallel, work.microbatches, work.parallel.grad_bytes
    trained = [entry for entry in shapes_on_rank(part, "", p.tp) if entry[0].requires_grad]
    times = m if p.reshard == "all" else 1  # how often gradients are summed over ranks
    if p.strategy.uses_fsdp:
        # The root is gathered once a microbatch (in a pipeline once a step), a block twice, and for
        # a reference before the step once more.
        root, *of_blocks = units(part, p, p.shard)
        for unit in (root, *of_blocks):
            uses = (m if p.pp == 1 else 1) if unit is root else (2 + work.references) * m
            uses, kind = 1 if p.reshard == "none" else uses, unit.kind
            yield f"{kind}shard", "all-gather", unit.copies * uses, unit.gathered
            yield f"{kind}shard", "reduce-scatter", unit.copies * times, unit.trained * g
            if p.replicate > 1:
                own = unit.trained * g // p.group_size(f"{kind}shard")
                yield f"{kind}replicate", "all-reduce", unit.copies, own
    else:  # DDP sends buckets; ZeRO-1 sends each parameter, padded to divide
        is_zero1 = bool(p.strategy.sharded)
        root_and_block = units(part, p, p.replicate if is_zero1 else 1)
        nbytes = g * sum(unit.copies * unit.trained for unit in root_and_block)
        buckets = max(1, math.ceil(nbytes / (ddp_bucket_mb(work.on_gpu) << 20)))
        calls = len(trained) if is_zero1 else buckets
        for collective in ("reduce-scatter", "all-gather") if is_zero1 else ("all-reduce",):
            yield "replicate", collective, calls, nbytes / calls
    # Gradients of parameters that tp replicates: summed over microbatches, or in the compute dtype.
    width = g if m > 1 and p.reshard != "all" else p.weight_bytes
    for parameter in (parameter for parameter, _, is_whole in trained if is_whole):
        yield "tp", "all-reduce", times, parameter.numel() * width


def _of_activations(part: Llama, work: Work, pp_rank: int) -> Iterator[tuple]:
    """Yield the same for the residual stream, over tp and pp, and for k and v, over cp."""
    c, p, m, L = work.model.config, work.parallel, work.microbatches, len(part.layers)
    w, again, more = p.weight_bytes, p.recomputes, work.references
    kv = 2 * work.microbatch * work.seq_len * c.kv_dim * w // p.tp
    yield "cp", "all-gather", m * L * (1 + again + more), kv
    yield "cp", "reduce-scatter", m * L, kv
    share = work.microbatch * math.ceil(work.length / p.tp) * c.dim * w  # of one rank along tp
    ends = int(pp_rank == 0) + int(part.output is not None)  # the embedding, and the output
    gathers = 4 * L + 2 * L * again + ends + more * (2 * L + (part.output is not None))
    scatters = 4 * L + L * p.repeats_attention + ends + more * (2 * L + (pp_rank == 0))
    yield "tp", "all-gather", m * gathers, p.tp * share
    yield "tp", "reduce-scatter", m * scatters, p.tp * share
    if part.output is not None:  # the loss gathers each token's logsumexp and target logit
        chunks = math.ceil(work.tokens / tokens_at_a_time(work.on_gpu, False))
        payload = work.tokens * 2 * p.tp * p.grad_bytes / chunks
        # With a reference also for that, and in backward, which computes logits again.
        yield "tp", "all-gather", m * chunks * (1 + 2 * more), payload
    neighbours = 2 * p.stages_per_rank - (pp_rank == 0) - (pp_rank == p.pp - 1)  # of all its stages
    neighbours += more * (p.stages_per_rank - (pp_rank == p.pp - 1))
    yield "pp", "send", m * neighbours, share
    if c.tie_embeddings and part.tok_embeddings is not None:  # to the stage with the output
        rows = elements(part.tok_embeddings, "tok_embeddings", p.tp, w, p.shard)[0] // p.shard
        yield "pp", "send", int(rows > 0), rows * p.grad_bytes


def sent_bytes(traffic: Traffic, parallel: ParallelConfig) -> int:
    """Return what a rank puts on its links where collectives run in rings of n ranks, as NCCL's do:
    of a payload (n-1)/n, for an all-reduce twice; of a message or Muon's all-to-all, all. gloo's
    reduce-scatter sends as much as an all-reduce, twice what is counted here."""
    sent = 0.0
    for (dim, collective), (_, payload) in traffic.items():
        n = parallel.group_size(dim)
        is_muons = collective == "all-to-all" and dim not in OWN_GROUPS
        share = 1 if collective == "send" or is_muons else (n - 1) / n
        sent += share * payload * (2 if collective == "all-reduce" else 1)
    return round(sent)
