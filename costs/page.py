"""What a rank holds and sends in a step: the formulas of README's table, on one page.

The bytes sent are exact in all steps of tests/counted.jsonl. The peak of memory is within a tenth
for a plain Llama, and further off with several techniques (docs/measured.md). To count every byte,
run `bench.py step`, a real step, or `bench.py plan --check`, an emulated one. Letters are those of
parallel.py, and Q, KV: width of all queries, all keys; N: tokens of a microbatch on a rank; m:
microbatches; w, g: bytes of a weight in products, and of a gradient. Sizes are of rank 0, which has
the largest shards. A technique adds its part in its own file (`holds`, `sends`).
"""

import functools
import math
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

import lora
from config import OWN_GROUPS, ParallelConfig, Work
from costs.shapes import Unit, numbers_summed, shapes_on_rank, size_on_rank, units
from model import Llama
from parallel import ddp_bucket_mb, used_techniques
from techniques.chunked_loss import tokens_at_a_time
from techniques.parallel_layers import blocks_that_norm_outputs, ends_before
from techniques.pipeline import part_of
from techniques.schedules import most_held

Traffic = dict[tuple[str, str], tuple[float, float]]  # (dimension, collective) -> calls, payload

# ------------------------------------------------------------------------------------------ memory


class Saved(NamedTuple):
    """Activations of a block, for each token: numbers of elements, of w bytes."""

    kept: float  # from forward to backward
    recomputed: float  # in backward, by activation checkpointing


def saved(work: Work, more: float = 0.0) -> Saved:
    """Return what a block saves for backward, and recomputes there. `more` is of techniques."""
    c = work.model.config
    p = work.parallel
    D = c.dim
    F = c.ffn_dim * c.ffn_uses
    Q = c.q_dim
    KV = c.kv_dim
    w = p.weight_bytes
    several = c.ffn_uses > 1  # feed-forwards of a token
    trains_all = work.model.tok_embeddings.weight.requires_grad
    autocasts = w < p.grad_bytes and not p.strategy.uses_fsdp and trains_all
    stream = 2 * D if autocasts else D  # the residual stream is in float32 then
    normed = 2 * D + c.normed_dim  # what norms take: x, twice; and what else a block normalizes
    keys = 2 * p.cp * KV  # k and v; on a GPU with a mask, repeated for each query head
    if work.mask_width and work.on_gpu:
        keys = (2 * p.cp + 1) * Q if p.cp > 1 else 2 * Q  # --cp: up to the end of each chunk

    # `whole` is on each rank along tp: the outputs of two norms. Ranks divide the rest, `shared`.
    whole = more + 2 * D
    shared = 2 * stream  # inputs of two norms
    shared += 2 * Q + keys  # q and attention's output; k and v
    shared += 3 * F  # gate, up and their product
    shared += c.normed_dim
    if p.cp == 1:
        whole += work.mask_width  # each block converts the mask of documents
    if several:
        shared += 2 * D * c.ffn_uses  # inputs and outputs of feed-forwards
    if several or not p.compile:
        shared += F  # silu(gate)
        if autocasts:
            whole += 3 * D  # x is rounded for each of 5 products, not for 2
    if not work.fused:  # inputs of norms, and x before their weights, in float32
        copies = 2 if trains_all else 1
        in_float32 = max(4, w) / w
        shared += (copies * in_float32 - 1) * normed
    everything = whole + shared / p.tp

    # See recompute.py. The output of wo, D, is a sum that ranks along tp have yet to add up.
    of_ffn = 0 if several else F  # several feed-forwards are computed again
    scattered = 2 * D if p.tp > 1 else 0  # outputs of the reduce-scatters
    if p.checkpointing == "products":
        kept = D + (stream + 2 * (Q + KV + of_ffn) + scattered) / p.tp
    elif p.checkpointing == "selective":
        kept = D + (stream + Q + KV + of_ffn + scattered) / p.tp
    elif p.checkpointing == "full" and p.compile:
        kept = (stream + Q + scattered) / p.tp
    elif p.checkpointing == "full":
        kept = stream / p.tp
    else:
        kept = everything
    return Saved(kept, everything - kept)


def holds(work: Work, pp_rank: int | None = None) -> dict[str, float]:
    """Return the bytes of a rank's tensors in a step by kind, as if without --offload, for rank
    `pp_rank` along pp (by default the one that holds most). `gathered` are unsharded weights, and
    `kept` is what else stays between steps. `peak` is not the sum of all kinds, since they are not
    all there at the same time (see `labs/run.py predict memory`)."""
    p = work.parallel
    if pp_rank is None:  # ranks between the second and the last hold no more than the second
        candidates = [holds(work, rank) for rank in {0, 1 % p.pp, p.pp - 1}]
        return max(candidates, key=lambda held: held["peak"])
    part = part_of(work.model, pp_rank, p.pp, p.stages_per_rank)
    c = work.model.config
    L = len(part.layers)
    D = c.dim
    F = c.ffn_dim * c.ffn_uses
    N = work.tokens
    w = p.weight_bytes
    root, *of_blocks = all_units = units(part, p, p.shards("parameters"))
    more = Counter()
    for technique in (*used_techniques(p), lora.TECHNIQUE):
        more.update(technique.holds(part, work))

    state = state_of(part, p)
    state["optimizer"] += more["optimizer"]
    state["kept"] = more["kept"]
    if work.teacher:
        from costs.teacher import held_of_teacher  # here, since distill.py alone has one

        state["kept"] += held_of_teacher(work, pp_rank)
    sums = _gradient_sums(all_units, work, state["gradients"])
    if p.strategy.uses_fsdp:
        gathered = gathered_of(root, of_blocks, p)
    else:
        gathered = _autocast_copies(root, of_blocks, work)

    # Activations of the blocks, in a pipeline of all microbatches under way, and of the loss.
    of_block = saved(work, more["saved"])
    block_saved = N * w * of_block.kept
    recomputed = N * w * of_block.recomputed
    mask = N * w * work.mask_width if p.cp > 1 else 0  # one for all blocks
    two_blocks = mask + min(2, L) * block_saved
    all_saved = mask + (block_saved if p.offload_activations else L * block_saved)
    if p.pp > 1:
        most = most_held(p.schedule, p.pp, work.microbatches, p.stages_per_rank, pp_rank)
        all_saved *= most / p.stages_per_rank
    loss = _loss(part, work)
    of_token = D + 2 * F  # gradients of x, gate and up
    if mask:  # or of whole sequences' keys and values; on a GPU also repeated for each query head
        repeated = c.q_dim if work.on_gpu else 0
        of_token = max(of_token, 2 * p.cp * (c.kv_dim + repeated))
    backward = recomputed + N * w * of_token / p.tp

    gradients = max(sums, state["gradients"])
    phases = [  # what they hold beside the state
        sums + gathered + all_saved + loss,
        sums + gathered + max(all_saved, two_blocks) + backward,  # in the last block
        gradients + gathered + mask + block_saved + backward,  # in block 0
        gradients + 3 * root.trained * w,  # in the embedding
        state["gradients"] + more["update"],
    ]
    always = state["parameters"] + state["optimizer"] + state["kept"]
    activations = all_saved + max(loss, backward)
    return state | {
        "gathered": gathered,
        "activations": activations,
        "peak": always + max(phases),
    }


def state_of(part: Llama, p: ParallelConfig) -> dict[str, float]:
    """Return the bytes of what a rank keeps from step to step, and of its gradients. Rows of each
    kind are padded to divide among the ranks that shard it: under ZeRO-1 those of parameters are
    not."""
    g = p.grad_bytes
    state = Counter()
    for kind, width in (("parameters", g), ("gradients", g), ("optimizer", 2 * p.moment_bytes)):
        for unit in units(part, p, p.shards(kind)):
            shards = p.shards(kind, unit.kind)
            state[kind] += unit.copies * unit.trained * width / shards
            if kind == "parameters":
                frozen_shards = 1 if p.reshard == "adapters" else shards
                state[kind] += unit.copies * unit.frozen / frozen_shards
    return dict(state)


def _gradient_sums(all_units: list[Unit], work: Work, sharded: float) -> float:
    """Return the bytes of gradients while backward computes: their sums over microbatches, or DDP's
    buckets. They are not sharded, unless FSDP reduces them after each microbatch."""
    p = work.parallel
    has_buckets = p.strategy.wrapper == "ddp" and p.replicate > 1
    if work.microbatches == 1 and not has_buckets:
        return 0
    if p.strategy.uses_fsdp and p.reshard == "all":
        return sharded
    return sum(unit.copies * unit.trained for unit in all_units) * p.grad_bytes


def gathered_of(root: Unit, of_blocks: list[Unit], p: ParallelConfig) -> float:
    """Return the bytes of the weights that FSDP has gathered: the root's, and those of two of the
    largest blocks; of a single one what arrives, and the copy that computes."""
    if p.reshard == "none" or p.shard == 1:
        return root.gathered + sum(unit.copies * unit.gathered for unit in of_blocks)
    largest = Counter()  # by kind: a block's, and its experts'
    for unit in of_blocks:
        largest[unit.kind] = max(largest[unit.kind], unit.gathered)
    return root.gathered + 2 * largest.total()


def _autocast_copies(root: Unit, of_blocks: list[Unit], work: Work) -> float:
    """Return the bytes of the weights that autocast has rounded. A block that recomputes rounds its
    own anew if it is compiled, or has several feed-forwards, which round theirs themselves."""
    p = work.parallel
    if p.weight_bytes == p.grad_bytes:
        return 0
    rounds_anew = p.recomputes and (p.compile or work.model.config.ffn_uses > 1)
    if rounds_anew:
        of_rounded = max(unit.trained for unit in of_blocks)
    else:
        of_rounded = sum(unit.copies * unit.trained for unit in of_blocks)
    return (root.trained + of_rounded) * p.weight_bytes


def _loss(part: Llama, work: Work) -> float:
    """Return the bytes of the loss: x and its gradients, the logits of a chunk of tokens and their
    gradient, and the gradient of the output matrix."""
    p = work.parallel
    D = work.model.config.dim
    V = work.model.config.vocab_size / p.tp
    N = work.tokens
    wide = max(4, p.weight_bytes)
    loss = 3 * N * D * p.weight_bytes
    if part.output is None:
        return loss
    compiled = p.compiles_loss(work.on_gpu)
    if compiled:  # logits and their gradient are not in float32
        of_logit = 2 * p.weight_bytes
    elif p.tp == 1:
        of_logit = 3 * wide
    else:
        of_logit = 4 * wide
    loss += min(N, tokens_at_a_time(work.on_gpu, compiled)) * V * of_logit
    if part.output.weight.requires_grad:
        loss += V * D * wide
    return loss


# ------------------------------------------------------------------------------------------ traffic


@functools.lru_cache(1024)
def sends(work: Work, pp_rank: int | None = None) -> Traffic:
    """Return the calls and the payload bytes of each collective in a step, for rank `pp_rank` along
    pp, by default the one that sends most (see `labs/run.py predict bytes`)."""
    p = work.parallel
    if pp_rank is None:
        return max((sends(work, rank) for rank in range(p.pp)), key=total_payload)
    part = part_of(work.model, pp_rank, p.pp, p.stages_per_rank)
    entries = [*_of_gradients(part, work), *_of_activations(part, work, pp_rank)]
    for technique in (*used_techniques(p), lora.TECHNIQUE):
        entries += technique.sends(part, work)
    traffic = {}
    for dim, collective, calls, nbytes in entries:
        if calls and nbytes and p.group_size(dim) > 1:
            earlier_calls, payload = traffic.get((dim, collective), (0, 0))
            calls *= work.updates
            traffic[dim, collective] = earlier_calls + calls, payload + calls * nbytes
    return {key: (calls, payload) for key, (calls, payload) in traffic.items() if calls}


def total_payload(traffic: Traffic) -> float:
    return sum(payload for _, payload in traffic.values())


def _of_gradients(part: Llama, work: Work) -> Iterator[tuple]:
    """Yield (dimension, collective, calls, bytes of a call) for weights and their gradients."""
    p = work.parallel
    m = work.microbatches
    g = p.grad_bytes
    trained = [
        local
        for local in shapes_on_rank(part, "", part.config, p.tp)
        if local.parameter.requires_grad
    ]
    sums = m if p.reshard == "all" else 1  # how often gradients are summed over ranks
    if p.strategy.uses_fsdp:
        root, *of_blocks = units(part, p, p.shard)
        # The root is gathered once a microbatch (in a pipeline once a step), a block twice, and for
        # a reference before the step once more.
        gathers_of_root = m if p.pp == 1 else 1
        gathers_of_block = (2 + work.references) * m
        if p.reshard == "none":
            gathers_of_root = gathers_of_block = 1
        for unit in (root, *of_blocks):
            gathers = gathers_of_root if unit is root else gathers_of_block
            yield f"{unit.kind}shard", "all-gather", unit.copies * gathers, unit.gathered
            yield f"{unit.kind}shard", "reduce-scatter", unit.copies * sums, unit.trained * g
            own = unit.trained * g // p.group_size(f"{unit.kind}shard")
            yield f"{unit.kind}replicate", "all-reduce", unit.copies, own
    else:
        all_units = units(part, p, p.shards("gradients"))
        nbytes = g * sum(unit.copies * unit.trained for unit in all_units)
        if p.strategy.sharded:  # ZeRO-1 sends each parameter, padded to divide
            calls = len(trained)
            yield "replicate", "reduce-scatter", calls, nbytes / calls
            yield "replicate", "all-gather", calls, nbytes / calls
        else:  # DDP sends buckets
            bucket = ddp_bucket_mb(work.on_gpu) << 20
            calls = max(1, math.ceil(nbytes / bucket))
            yield "replicate", "all-reduce", calls, nbytes / calls
    # Gradients of parameters that tp replicates: summed over microbatches, or in the compute dtype,
    # for which FSDP of torch 2.15 takes that of sums: up to twice as many bytes as here.
    width = g if m > sums else p.weight_bytes
    for local in trained:
        if local.is_whole:
            yield "tp", "all-reduce", sums, local.parameter.numel() * width


def _of_activations(part: Llama, work: Work, pp_rank: int) -> Iterator[tuple]:
    """Yield the same for the residual stream, over tp and pp, and for k and v, over cp."""
    c = work.model.config
    p = work.parallel
    m = work.microbatches
    w = p.weight_bytes
    L = len(part.layers)
    again = p.recomputes
    references = work.references
    has_embedding = pp_rank == 0
    has_output = part.output is not None
    ends = has_embedding + has_output

    # With adapters alone, backward ends in the first block, and need not send all of its gradients.
    kv = 2 * work.microbatch * work.seq_len * c.kv_dim * w // p.tp
    yield "cp", "all-gather", m * L * (1 + again + references), kv
    of_keys = L - ends_before(part, "attention.wk", "attention.wv")
    yield "cp", "reduce-scatter", m * of_keys, kv

    # Sums of squares of a token's features, which only full checkpointing computes again.
    passes = 2 + p.repeats_attention + references
    squares = work.microbatch * work.length * max(4, w)
    numbers = numbers_summed(part)
    not_in_backward = ends_before(part, "attention.wq") + ends_before(part, "attention.wk")
    yield "tp", "all-reduce", m * (numbers * passes - min(numbers, not_in_backward)), squares

    feature = work.microbatch * math.ceil(work.length / p.tp) * p.tp * w  # of padded sequences
    sources = "attention.wq_a", "attention.wkv_a", "attention.wkv_a"  # of latents
    for width, source in zip(c.gathered_dims or (c.dim,), sources):
        yield "tp", "all-gather", m * L * (1 + again + references), feature * width
        yield "tp", "reduce-scatter", m * (L - ends_before(part, source)), feature * width
    x = feature * c.dim
    unused = ends_before(part, "attention")  # wo's gradient, and that of the feed-forward's input
    gathers = 3 * L + L * again + ends - unused + references * (L + has_output)
    gathers -= ends_before(part)  # the embedding's
    repeated = (L + blocks_that_norm_outputs(part)) * p.repeats_attention  # wo's, and these w2's
    scatters = 3 * L + repeated + ends - unused + references * (2 * L + has_embedding)
    yield "tp", "all-gather", m * gathers, x
    yield "tp", "reduce-scatter", m * scatters, x
    if has_output:  # the loss gathers each token's logsumexp and target logit
        chunks = math.ceil(work.tokens / tokens_at_a_time(work.on_gpu, False))
        payload = work.tokens * 2 * p.tp * p.grad_bytes / chunks
        # With a reference also for that, and in backward, which computes logits again.
        yield "tp", "all-gather", m * chunks * (1 + 2 * references), payload

    neighbours = 2 * p.stages_per_rank - ends  # of all its stages
    neighbours += references * (p.stages_per_rank - has_output)
    yield "pp", "send", m * neighbours, x // p.tp
    if c.tie_embeddings and part.tok_embeddings is not None:  # to the stage with the output
        embedding = size_on_rank(part.tok_embeddings, "tok_embeddings", c, p.tp, w, p.shard)
        yield "pp", "send", 1, embedding.trained // p.shard * p.grad_bytes


def is_of_muon(dim: str, collective: str) -> bool:
    """Return whether a collective is Muon's exchange of matrices. Experts have an all-to-all of
    their own, over ep."""
    return collective == "all-to-all" and dim not in OWN_GROUPS


def sent_bytes(traffic: Traffic, parallel: ParallelConfig) -> int:
    """Return what a rank puts on its links where collectives run in rings of n ranks, as NCCL's do:
    of a payload (n-1)/n, for an all-reduce twice; of a message or Muon's all-to-all, all. gloo's
    reduce-scatter sends as much as an all-reduce, twice what is counted here."""
    sent = 0.0
    for (dim, collective), (_, payload) in traffic.items():
        n = parallel.group_size(dim)
        is_ring = collective != "send" and not is_of_muon(dim, collective)
        share = (n - 1) / n if is_ring else 1
        rounds = 2 if collective == "all-reduce" else 1
        sent += share * payload * rounds
    return round(sent)
