"""Predict what a step computes and sends: its FLOPs, its collectives and their bytes.

Everything here follows from shapes. So a laptop can plan a cluster (`python bench.py plan`),
train.py announces what a step communicates, and `--dp auto` chooses. bench.py measures the same.

Letters as in parallel.py. Sizes are those of rank 0, which has the largest shard where shards are
uneven.
"""

import functools
import math
from collections import Counter
from collections.abc import Iterator

import torch
from torch import nn

from config import ParallelConfig, Work
from model import Llama
from parallel import style_of, used_techniques
from techniques.chunked_loss import tokens_at_a_time
from techniques.parallel_layers import planned_dims
from techniques.pipeline import part_of

# --------------------------------------------------------------------------------------- FLOPs


def flops_per_token(model: Llama, seq_len: int) -> int:
    """Return the floating-point operations to train on one token.

    Per weight of a matrix: 2 in forward, 2 in backward for the gradient of the input and, if it is
    trainable, 2 for its own gradient. Attention takes 4 H E per layer and token attended to, for
    scores and weighted sums, and three times as much with backward. As usual (Chowdhery et al.
    2022, arXiv:2204.02311, appendix B), causal attention is counted as if each token attended to
    seq_len tokens, and recomputation is not counted, so that published figures compare.
    In 8 bits products are faster, so that the share of the bfloat16 peak may exceed 100 %."""
    config, weights = model.config, 0
    for layer in model.modules():
        if isinstance(layer, nn.Linear):
            weights += (
                (6 if layer.weight.requires_grad else 4) * layer.in_features * layer.out_features
            )
            others = [p for p in layer.parameters() if p is not layer.weight and p.requires_grad]
            weights += 6 * sum(p.numel() for p in others)  # of adapters
    return weights + 3 * 4 * config.n_layers * config.q_dim * seq_len


# ------------------------------------------------------------------------------- communication

DIMS = ("pp", "replicate", "shard", "cp", "tp")  # ranks along the first are farthest apart
Traffic = dict[tuple[str, str], tuple[int, int]]  # (mesh dimension, collective) -> calls, payload


@functools.lru_cache(1024)
def predict_traffic(work: Work, pp_rank: int | None = None) -> Traffic:
    """Return the collectives of one training step with their calls and payload bytes; in a
    pipeline, those of rank `pp_rank` along pp, by default of the rank that sends most.

    The formulas are those of parallel.py's docstrings, with padding. labs/bytes asks for those
    of DDP, FSDP and HSDP."""
    parallel, batch, seq_len = work.parallel, work.microbatch, work.seq_len
    if pp_rank is None:
        of_ranks = [predict_traffic(work, rank) for rank in range(parallel.pp)]
        return max(of_ranks, key=lambda traffic: sent_bytes(traffic, parallel))
    part, microbatches = parts_of(work.model, parallel)[pp_rank], work.microbatches
    calls, payload = Counter(), Counter()
    collectives = [*TRAFFIC[parallel.strategy.wrapper](part, parallel, microbatches)]
    own = seq_len // parallel.cp  # tokens of a sequence on this rank
    if parallel.tp > 1:
        collectives += _tensor_parallel(part, work, own)
    if parallel.cp > 1:
        collectives += _context_parallel(part, parallel, microbatches, batch, seq_len)
    if parallel.pp > 1:
        collectives += _pipeline(part, parallel, microbatches, batch, own, pp_rank)
    for technique in used_techniques(parallel):
        collectives += technique.sends(part, work)
    for dim, collective, n, nbytes in collectives:
        always = collective == "all-to-all"  # this rank may have nothing for others
        if n and (nbytes or always) and group_size(dim, parallel) > 1:
            calls[dim, collective] += n
            payload[dim, collective] += n * nbytes
    return {key: (calls[key], payload[key]) for key in calls}


def predict_outer_traffic(work: Work) -> Traffic:
    """Return the collectives of DiLoCo's outer step; {} for other strategies."""
    parallel = work.parallel
    if not parallel.strategy.own_steps or parallel.replicate == 1:
        return {}
    (_, root), (_, block) = sizes_of(work.model, parallel, parallel.shard).values()
    elements = (root + len(work.model.layers) * block) // parallel.shard
    calls = len(list(work.model.parameters()))
    return {("replicate", "all-reduce"): (calls, elements * parallel.grad_bytes)}


# What follows yields (mesh dimension, collective, calls, payload bytes of a call).


def _ddp(model: Llama, parallel: ParallelConfig, microbatches: int) -> Iterator[tuple]:
    """Buckets are filled in the order in which gradients become ready (labs/buckets)."""
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
    root_uses = m if parallel.pp == 1 else 1  # it stays unsharded until backward, or the last one
    for unit, (frozen_bytes, trainable) in sizes_of(model, parallel, parallel.shard).items():
        n, uses = (1, root_uses) if unit == "root" else (len(model.layers), 2 * m)
        gathered = trainable * w + (0 if reshard == "adapters" else frozen_bytes)
        yield "shard", "all-gather", n * (1 if reshard == "none" else uses), gathered
        yield "shard", "reduce-scatter", n * (m if reshard == "all" else 1), trainable * g
        if not parallel.strategy.own_steps:
            yield "replicate", "all-reduce", n, trainable // parallel.shard * g


TRAFFIC = {"ddp": _ddp, "zero1": _zero1, "fsdp": _fsdp}  # by Strategy.wrapper


def _tensor_parallel(model: Llama, work: Work, seq_len: int) -> Iterator[tuple]:
    parallel, batch, m = work.parallel, work.microbatch, work.microbatches
    g, w, tp = parallel.grad_bytes, parallel.weight_bytes, parallel.tp
    L, tokens = len(model.layers), batch * seq_len
    has_embedding, has_loss = "0" in model.layers, model.output is not None
    skipped = _skipped_by_backward(model) if has_embedding else 0
    activation = batch * _round_up(seq_len, tp) * model.config.dim * w
    # Those of the blocks, and of embedding and loss, of which backward skips the first ones.
    gathers, scatters = 4 * L - max(0, skipped - 1), 4 * L - skipped
    if parallel.checkpointing != "none":
        gathers += 2 * L
    if parallel.checkpointing == "full":
        scatters += L
    others = has_embedding + has_loss
    yield "tp", "all-gather", m * (others - (skipped > 0)), activation
    yield "tp", "reduce-scatter", m * others, activation
    if parallel.async_tp:
        repeated = L * (parallel.checkpointing != "none")  # for w2
        messages = m * (gathers + scatters + repeated) * (tp - 1)
        yield "tp", "send", messages, activation // tp
    else:
        yield "tp", "all-gather", m * gathers, activation
        yield "tp", "reduce-scatter", m * scatters, activation
    size = tokens_at_a_time(work.on_gpu)
    for start in range(0, tokens, size):  # of each token, logsumexp and the target's logit
        yield "tp", "all-gather", m * has_loss, min(size, tokens - start) * 2 * tp * g
    # Gradients of replicated parameters: in the compute dtype, or as float32 sums of microbatches.
    summed = m > 1 and parallel.reshard != "all"
    times = m if parallel.reshard == "all" else 1
    for unit, module in modules_of(model).items():
        dims = _sharded_dims(unit, module)
        for name, parameter in module.named_parameters():
            if parameter.requires_grad and dims[name] is None:
                n = times * (L if unit == "block" else 1)
                yield "tp", "all-reduce", n, parameter.numel() * (g if summed else w)
                if name.endswith("lora_magnitude"):  # the squares of its rows' norms, in forward
                    forwards = m * (1 if parallel.checkpointing == "none" else 2)
                    yield "tp", "all-reduce", forwards * L, parameter.numel() * g


def _context_parallel(
    model: Llama, parallel: ParallelConfig, m: int, batch: int, seq_len: int
) -> Iterator[tuple]:
    """Keys and values of whole sequences, and their gradients; but none in block 0 if nothing that
    they depend on is trained."""
    config, L = model.config, len(model.layers)
    kv = 2 * batch * seq_len * config.kv_dim * parallel.weight_bytes
    skipped = False
    if "0" in model.layers:
        attention = first_block(model).attention
        before_keys = model.tok_embeddings, first_block(model).attention_norm
        modules = *before_keys, attention.wk, attention.wv
        skipped = not any(p.requires_grad for module in modules for p in module.parameters())
    recomputed = L if parallel.checkpointing != "none" else 0
    yield "cp", "all-gather", m * (L + recomputed), kv // parallel.tp
    yield "cp", "reduce-scatter", m * (L - skipped), kv // parallel.tp


def _pipeline(
    model: Llama, parallel: ParallelConfig, m: int, batch: int, seq_len: int, rank: int
) -> Iterator[tuple]:
    """Outputs to the next stage, gradients to the one before; and the gradient of a tied matrix."""
    stages = parallel.pp * parallel.stages_per_rank
    own = range(rank, stages, parallel.pp)
    sends = sum((stage < stages - 1) + (stage > 0) for stage in own)
    tokens = batch * math.ceil(seq_len / parallel.tp)
    yield "pp", "send", m * sends, tokens * model.config.dim * parallel.weight_bytes
    if model.config.tie_embeddings and model.tok_embeddings is not None:
        tied = model.tok_embeddings.weight
        rows = math.ceil(math.ceil(len(tied) / parallel.tp) / parallel.shard)
        yield "pp", "send", int(tied.requires_grad), rows * tied.shape[1] * parallel.grad_bytes


def group_size(dim: str, parallel: ParallelConfig) -> int:
    """Return the number of ranks in a group along a dimension of the mesh, in the "world", or in a
    "stage": all with the same layers."""
    sizes = {"world": parallel.size, "stage": parallel.size // parallel.pp}
    return sizes.get(dim) or getattr(parallel, dim)


def parts_of(model: Llama, parallel: ParallelConfig) -> list[Llama]:
    """Return what each rank along pp holds of a model."""
    return _parts_of(model, parallel.pp, parallel.stages_per_rank)


@functools.lru_cache(64)
def _parts_of(model: Llama, pp: int, v: int) -> list[Llama]:
    return [part_of(model, rank, pp, v) for rank in range(pp)] if pp > 1 else [model]


def _skipped_by_backward(model: Llama) -> int:
    """Return how many of backward's pairs of all-gather and reduce-scatter under tensor parallelism
    do not happen, since backward ends at the first trainable parameter: none if the embedding is
    trainable; with adapters, those below the first adapter."""
    block = first_block(model)
    for skipped, module in enumerate((model.tok_embeddings, block.attention)):
        if any(p.requires_grad for p in module.parameters()):
            return skipped
    return 2


def first_block(model: Llama) -> nn.Module:
    return next(iter(model.layers.values()))


@functools.lru_cache(64)
def modules_of(model: Llama) -> dict[str, nn.Module]:
    """Return what FSDP all-gathers at once: the root, and a block (the first, as all are alike)."""
    root = nn.Module()  # all but the blocks
    root._parameters = model._parameters
    root._modules = {name: module for name, module in model.named_children() if name != "layers"}
    return {"root": root, "block": first_block(model)}


@functools.lru_cache(64)
def _sharded_dims(unit: str, module: nn.Module) -> dict[str, int | None]:
    """Return the dimension of each parameter of a unit that tensor parallelism shards, None for a
    replicated one. Raises UserError for a parameter that it does not know."""
    dims = {}
    for path, layer in module.named_modules():
        place = f"layers.0.{path}".rstrip(".") if unit == "block" else path
        for name, dim in planned_dims(style_of(place), place, layer).items():
            dims[f"{path}.{name}".lstrip(".")] = dim
    return dims


def sizes_of(model: Llama, parallel: ParallelConfig, shards: int) -> dict[str, tuple[int, int]]:
    """Return (bytes of frozen parameters, elements of trainable ones) of the root and of a block,
    on rank 0 of tp, each parameter padded so that `shards` divides its dimension 0."""
    return _sizes_of(model, parallel.tp, parallel.weight_bytes, shards)


@functools.lru_cache(4096)
def _sizes_of(model: Llama, tp: int, weight_bytes: int, shards: int) -> dict[str, tuple[int, int]]:
    sizes = {}
    for unit, module in modules_of(model).items():
        frozen_bytes = trainable = 0
        dims = _sharded_dims(unit, module) if tp > 1 else {}
        for name, parameter in module.named_parameters():
            shape = list(parameter.shape)
            if (dim := dims.get(name)) is not None:
                shape[dim] = math.ceil(shape[dim] / tp)
            n = _padded(shape, shards)
            if parameter.requires_grad:
                trainable += n
            else:
                frozen_bytes += n * bytes_each(parameter, weight_bytes)
        sizes[unit] = frozen_bytes, trainable
    return sizes


def bytes_each(parameter: torch.Tensor, weight_bytes: int) -> int:
    """Return the bytes of an element of a parameter when it is computed with."""
    return weight_bytes if parameter.is_floating_point() else 1


def _padded(shape: list[int] | torch.Size, shards: int) -> int:
    """Return the elements of a tensor whose dimension 0 is padded to a multiple of `shards`."""
    return _round_up(shape[0], shards) * math.prod(shape[1:])


def _round_up(n: int, multiple: int) -> int:
    return math.ceil(n / multiple) * multiple


def sent_bytes(traffic: Traffic, parallel: ParallelConfig) -> int:
    """Return the bytes that a rank sends if every collective runs in a ring of its n ranks: of its
    payload (n-1)/n, and twice that for an all-reduce. A message of a pipeline is sent whole, and of
    an all-to-all only what goes to others is counted.

    NCCL's rings send as much. gloo's all-reduce and all-gather do, too, but its reduce-scatter
    sends as much as an all-reduce, twice what is counted here."""
    sent = 0.0
    for (dim, collective), (_, payload) in traffic.items():
        n = group_size(dim, parallel)
        share = 1 if collective in ("send", "all-to-all") else (n - 1) / n
        sent += share * payload * (2 if collective == "all-reduce" else 1)
    return round(sent)


def describe_traffic(traffic: Traffic, parallel: ParallelConfig) -> str:
    """Return in words what a rank sends, and the payload of its collectives, the largest first."""
    largest_first = sorted(traffic.items(), key=lambda item: -item[1][1])
    payload = ", ".join(
        f"{nbytes / 1e6:,.2f} MB by {calls} {collective} over {dim}"
        for (dim, collective), (calls, nbytes) in largest_first
    )
    sent = f"{sent_bytes(traffic, parallel) / 1e6:,.2f} MB; payload {payload}"
    return sent if payload else "nothing"
