r"""Split one training over many processes: mesh, DDP, FSDP, HSDP, tensor parallelism.

    torchrun train.py                                      one process
    torchrun --nproc-per-node 8 train.py                   one node with 8 GPUs, a process for each
    torchrun --nnodes 2 --nproc-per-node 8 --node-rank 0 \
             --master-addr HOST train.py                   two nodes; on the second: --node-rank 1

Every process runs the same script from the top; `rank` is the only thing that tells them apart.
A single process takes the same path; only the wrapper of DDP or ZeRO-1 is left out.

Ranks form a mesh of four dimensions, and each kind of parallelism works along some of them:

    pp           ranks with different layers, the same sequences    (techniques/pipeline.py)
    replicate    ranks with the same weights, different sequences   (DDP, ZeRO-1, HSDP)
    shard        each rank has a part of one copy, different sequences   (FSDP, HSDP)
    tp           each rank has a part of one copy, the same sequences   (tensor parallelism)

The last dimension varies fastest. With 1 x 2 x 2 x 2 ranks, tp joins ranks 0 and 1, shard joins 0
and 2, and the replicas are 0-3 and 4-7. Ranks that communicate most are nearest: tp within a node,
then shard; replicate and pp cross nodes. --cp N adds no dimension: N neighbours along
replicate x shard share the same sequences (techniques/context_parallel.py). Nor does --ep N: N
neighbours along replicate x shard x tp share a copy of the experts (techniques/expert_parallel.py).

FSDP and tensor parallelism shard a parameter together: of wq [D, D], tp gives each rank the rows
[D / tp, D], and shard divides these again, [D / (tp * shard), D]. FSDP all-gathers over `shard`
before a block computes, so that the block sees its tp shard. Norms are replicated over tp. With
--tp, --ep or --pp, --dp ddp runs as HSDP with shard = 1 (config.py), so FSDP sums all gradients.

Letters: P parameters (with tensor parallelism those of one tp rank), L layers; D, F, V, KV and E as
in model.py; b sequences of a rank in a step, B x T tokens in a microbatch. An element of a gradient
has g bytes (4, or 8 in float64); an element of a weight in products has w (g, or 2 in bfloat16).
Bytes of a collective are its *payload*: the output of an all-gather, the input of a reduce-scatter
or an all-reduce. In a ring of n ranks, a rank *sends* (n-1)/n of it, twice that for an all-reduce.
"""

import contextlib
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from config import ParallelConfig, Work
from model import Llama, LlamaConfig, Vocabulary, sum_of_losses
from models.family import family_of
from plumbing.devices import connect, widest_float
from plumbing.messages import UserError
from plumbing.processes import Process
from plumbing.shards import allocate
from techniques import (
    async_tp,
    chunked_loss,
    context_parallel,
    expert_parallel,
    float8,
    muon,
    offload,
    parallel_layers,
    pipeline,
    recompute,
    zero1,
)
from techniques.experts import experts_of
from techniques.parallel_layers import (
    COLUMNS,
    NORM,
    REPLICATED,
    ROWS,
    SEQUENCE_SHARDED,
    ColumnParallel,
    GatherTokens,
    VocabularyParallel,
    planned_dims,
)
from techniques.technique import Technique


@dataclass(frozen=True)
class World(Process):
    """This process and its place in the mesh of all processes."""

    parallel: ParallelConfig
    mesh: DeviceMesh
    cp_mesh: DeviceMesh | None = None  # the ranks that share its sequences; None without --cp
    stage_group: dist.ProcessGroup | None = None  # the ranks with its layers; None without --pp
    expert_mesh: DeviceMesh | None = None  # all ranks, with a dimension ep; None without --ep
    own_groups: dict[str, dist.ProcessGroup] = field(default_factory=dict)  # not of the mesh

    @property
    def data_rank(self) -> int:
        """Index of this rank's share of a batch; there are replicate x shard / cp shares."""
        replica = self.mesh.get_local_rank("replicate")
        shard = self.mesh.get_local_rank("shard")
        return (replica * self.parallel.shard + shard) // self.parallel.cp

    def all_gather_scalars(self, values: list[float | Tensor]) -> Tensor:
        """All-gather one row of scalars from every rank -> [size, len(values)]."""
        row = torch.zeros(len(values), dtype=widest_float(self.device), device=self.device)
        for element, value in zip(row, values):
            element.add_(value)  # in place: a Python number is not copied from host to device
        if self.size == 1:  # an Apple GPU has no collectives
            return row[None]
        rows = row.new_empty(self.size * len(row))
        all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # torch 2.11
        all_gather(rows, row)  # payload: 8 bytes for each scalar of each rank
        return rows.view(self.size, -1)


def with_mesh(process: Process, parallel: ParallelConfig) -> World:
    """Arrange the processes in a mesh. In labs/hsdp you write it."""
    dims = "pp", "replicate", "shard", "tp"
    sizes = parallel.pp, parallel.replicate, parallel.shard, parallel.tp
    kind = "cuda" if process.device.type == "cuda" else "cpu"  # an Apple GPU has no collectives
    mesh = init_device_mesh(kind, sizes, mesh_dim_names=dims)
    cp_mesh = stage_group = expert_mesh = None
    own_groups = {}
    if parallel.cp > 1:
        cp_mesh = context_parallel.make_mesh(mesh, parallel.cp, kind, own_groups)
    if parallel.pp > 1:
        stage_group, _ = dist.new_subgroups_by_enumeration(mesh.mesh.flatten(1).tolist())
    if parallel.ep > 1:
        expert_mesh = expert_parallel.make_mesh(parallel, kind, own_groups)
    groups = [stage_group, *own_groups.values()]
    if mesh.get_coordinate():  # None where the mesh leaves out this rank, as in bench.py compare
        groups = [*map(mesh.get_group, dims), *groups]
    # Ordered: a GPU then runs calls of different groups in the order in which they were started.
    connect(groups, process.device, ordered=parallel.cp * parallel.tp > 1)
    place = process.rank, process.size, process.local_rank, process.per_node, process.device
    return World(*place, parallel, mesh, cp_mesh, stage_group, expert_mesh, own_groups)


# The techniques in the order in which they change a model: first those that replace layers, before
# tensor parallelism shards them, then those that wrap blocks or change the loss.
BEFORE_TP = [float8.TECHNIQUE]  # matrix products in 8 bits
AFTER_TP = [
    expert_parallel.TECHNIQUE,  # shards experts over ranks with different tokens
    async_tp.TECHNIQUE,  # stops the compiler from delaying messages; see tensor_parallel
    chunked_loss.TECHNIQUE,  # computes the loss for some tokens at a time
    recompute.TECHNIQUE,  # activation checkpointing, and torch.compile
    offload.TECHNIQUE,  # activations in CPU memory
]
TECHNIQUES = [*BEFORE_TP, *AFTER_TP, muon.TECHNIQUE]
# Asked even where their flag is at its default: experts refuse some --tp without --ep. (--cp is in
# no list above, since it changes no layers: data.py cuts batches.)
ALWAYS_ASKED = [
    file.TECHNIQUE for file in (parallel_layers, context_parallel, expert_parallel, pipeline, zero1)
]


def used_techniques(parallel: ParallelConfig, among: list = TECHNIQUES) -> list[Technique]:
    return [technique for technique in among if technique.is_used(parallel)]


def refusal(work: Work, *more: Technique) -> str:
    """Return why a step cannot be split as the flags ask; "" if it can. `more` are techniques
    that a script adds to the lists above, such as LoRA."""
    used = used_techniques(work.parallel)
    for technique in used:
        if technique.only_linear and work.model.config.n_experts:
            flag = f"--{technique.flag.replace('_', '-')}"
            return f"{flag} is not for the products of experts: leave it out"
    for technique in (*ALWAYS_ASKED, *used, *more):
        if reason := technique.refuses(work):
            return reason
    return ""


def parallelize(model: Llama, world: World, initialize: Callable[[Llama], None]) -> nn.Module:
    """Split a model, apply the techniques that are asked for, and initialize it.

    `model` was built on `meta`; `initialize(model)` gives its parameters their values. Returns what
    a training step calls: the model, whose modules now have hooks, or DDP, ZeRO-1 or a Pipeline
    around it. For evaluation, generation and checkpoints use `model` itself."""
    parallel = world.parallel
    stage_place = world.mesh.get_local_rank("pp"), parallel.pp, parallel.stages_per_rank
    wrap = WRAPPERS[parallel.strategy.wrapper]  # around each stage, or around the whole model
    set_dtype(model, parallel)
    if parallel.pp > 1:
        pipeline.keep_own_stages(model, *stage_place)
    for technique in used_techniques(parallel, BEFORE_TP):
        technique.apply(model, world)
    if parallel.tp > 1:
        tensor_parallel(model, world.mesh["tp"], in_chunks=parallel.async_tp)
    for technique in used_techniques(parallel, AFTER_TP):
        technique.apply(model, world)
    stages = pipeline.stages_of(model, *stage_place)  # [model] without a pipeline
    if parallel.strategy.uses_fsdp:  # on meta, so that no rank ever holds the whole model
        for stage in stages:
            wrap(stage, world)
    allocate(model, "cpu" if parallel.offload else world.device)
    initialize(model)
    if parallel.pp > 1:
        return pipeline.Pipeline(model, stages, world, gradient_sync)
    is_trained = any(parameter.requires_grad for parameter in model.parameters())
    if parallel.strategy.uses_fsdp or world.size == 1 or not is_trained:
        return model
    return wrap(model, world)  # by DDP or ZeRO-1, which need the weights


def set_dtype(model: Llama, parallel: ParallelConfig) -> None:
    """Compute in `parallel.dtype`, on a GPU by default bfloat16.

    Trainable parameters and gradients stay float32 (master weights), and without --moments bfloat16
    AdamW's moments, too: most updates are smaller than the spacing of bfloat16 numbers and would be
    rounded away. Without FSDP, autocast casts a weight where it is used, but not the embedding: so
    while that is trained the residual stream is float32. FSDP casts its shard before the
    all-gather, which halves the bytes, and its residual stream is bfloat16. RoPE and the sums in
    norms and loss are float32. Frozen parameters are bfloat16 from the start."""
    if parallel.dtype == torch.float64:
        model.double()
    if parallel.dtype == torch.bfloat16:
        for parameter in model.parameters():
            if not parameter.requires_grad and parameter.is_floating_point():  # not in 4 bits
                parameter.data = parameter.data.bfloat16()
        if not parallel.strategy.uses_fsdp:
            model.compute_dtype = torch.bfloat16


# ----------------------------------------------------------------------------- data parallelism


def ddp_bucket_mb(on_gpu: bool) -> int:
    """Return the MiB of gradients that DDP sends at once: torch's 25, or more on a GPU, whose links
    need larger messages to reach their speed."""
    return 100 if on_gpu else 25


def ddp(model: Llama, world: World) -> nn.Module:
    """DDP: every rank holds the whole model and computes its own part of the batch.

        rank 0  [ weights ] [ gradients ] [ AdamW ]      sequences 0..b-1
        rank 1  [ weights ] [ gradients ] [ AdamW ]      sequences b..2b-1

    This is all that it does:

        loss(model, sequences).backward()  # those of this rank
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)  # the sum of all ranks' gradients
            parameter.grad /= n  # their mean, over n ranks

    But DDP sends buckets of `ddp_bucket_mb` while backward still computes.
    Communication over replicate, a step: all-reduce of P g bytes, the gradients. Frozen parameters
    send nothing: LoRA sends the gradients of its thin matrices alone, 0.5 % of all at r = 16 (8B).
    Use when weights, gradients and moments (16 P bytes in float32) fit on a device. Avoid when they
    do not fit. In labs/ddp you write it with hooks."""
    return DistributedDataParallel(
        model,
        device_ids=[world.device] if world.device.type == "cuda" else None,
        process_group=world.mesh.get_group("replicate"),
        init_sync=False,  # all ranks have initialized the same weights
        bucket_cap_mb=ddp_bucket_mb(world.device.type == "cuda"),
        gradient_as_bucket_view=True,  # store gradients once, in the buckets
    )


def fsdp(model: Llama, world: World) -> nn.Module:
    """FSDP and HSDP: each rank along shard holds a slice of every parameter, gradient and moment.

        FSDP, 4 ranks                          HSDP, 2 replicas of 2 shards
        rank 0  [ 1st quarter ]                rank 0  [ 1st half ]     node 0
        rank 1  [ 2nd quarter ]                rank 1  [ 2nd half ]
        rank 2  [ 3rd quarter ]                rank 2  [ 1st half ]     node 1
        rank 3  [ 4th quarter ]                rank 3  [ 2nd half ]

    This is all that it does to a matrix [D, D], of which a rank holds `rows`:

        whole = torch.empty(D, D)
        dist.all_gather_into_tensor(whole, rows)  # just before its block computes
        loss(whole.requires_grad_(), sequences).backward()  # those of this rank
        gradient = torch.empty_like(rows)
        dist.reduce_scatter_tensor(gradient, whole.grad)  # each rank gets the sum of its rows
        rows -= lr * gradient / n  # the optimizer knows these rows alone

    It gathers the weights of one block at a time, frees them after forward, and does so again in
    backward. Communication, in L + 1 calls each:
        over shard, a microbatch    all-gather of P w bytes in forward, and again in backward
                                    (embedding, last norm and output stay gathered)
        over shard, a step          reduce-scatter of P g bytes
        over replicate, a step      (HSDP) all-reduce of P g / shard bytes
    So with w = g and one microbatch a rank sends up to 1.5 times what DDP sends.

    With several microbatches a step, `reshard` says what is sharded again after each use:
        none      nothing: one all-gather of the weights and one reduce-scatter of the gradients a
                  step, but (w + g) P bytes stay unsharded on every rank
        weights   (the default) weights; gradients accumulate unsharded, g P bytes
        all       weights and gradients: reduce-scatter in every microbatch
        adapters  for LoRA: adapters, as `weights` does; FSDP ignores the frozen base, and each rank
                  keeps all of it
    With `weights` or `all`, LoRA all-gathers the frozen base for every use, to train less than 1 %
    of it. That is why LoRA on several GPUs is slower than on one in many frameworks.
    Use FSDP when DDP does not fit. On several nodes use HSDP: all-gathers stay within a node, and
    only slices of gradients cross. When DDP fits, avoid both; but over a slow link take HSDP.
    labs/fsdp shards one matrix by hand, labs/lora a model with adapters."""
    parallel = world.parallel
    dims = ("replicate", "shard") if parallel.replicate > 1 else ("shard",)
    options = dict(
        mesh=world.mesh[dims],
        mp_policy=MixedPrecisionPolicy(
            param_dtype=parallel.dtype,
            reduce_dtype=torch.promote_types(parallel.dtype, torch.float32),
            cast_forward_inputs=False,  # rotation stays float32
        ),
    )
    if parallel.offload:
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=torch.cuda.is_available())
    if parallel.reshard == "adapters":
        options["ignored_params"] = {p for p in model.parameters() if not p.requires_grad}
    reshards = dict(reshard_after_forward=parallel.reshard != "none")
    for block in model.layers.values():
        if parallel.ep > 1:  # units of their own, over the ranks that hold the same experts
            own_mesh = world.expert_mesh[tuple(f"expert_{dim}" for dim in dims)]
            for experts in experts_of(block).values():
                fully_shard(experts, **options | reshards | {"mesh": own_mesh})
        fully_shard(block, **options, **reshards)
    # Embedding, last norm and output are one group; backward begins in it, so it stays gathered.
    fully_shard(model, reshard_after_forward=False, **options)
    return model


WRAPPERS = {"ddp": ddp, "zero1": zero1.ZeRO1, "fsdp": fsdp}  # by Strategy.wrapper (config.py)


@contextlib.contextmanager
def gradient_sync(parallel: ParallelConfig, runner: nn.Module, last: bool) -> Iterator[None]:
    """Communicate gradients only in the `last` microbatch of a step (labs/accumulate); until
    then they accumulate on the rank, except with reshard = all. Forward and backward of each
    microbatch run in this context; a pipeline runs only backward in it."""
    if isinstance(runner, FSDPModule):
        runner.set_requires_gradient_sync(last or parallel.reshard == "all")  # reduce-scatter
        runner.set_requires_all_reduce(last)  # HSDP's, over replicate
        runner.set_reshard_after_backward(last or parallel.reshard != "none")  # free the weights
    sends_later = isinstance(runner, DistributedDataParallel | zero1.ZeRO1) and not last
    with runner.no_sync() if sends_later else contextlib.nullcontext():
        yield
    if isinstance(runner, zero1.ZeRO1):
        runner.finish_gradients()


def zero_gradients(optimizer: torch.optim.Optimizer, world: World) -> None:
    """Free the gradients; but set DDP's to zero in place, since they are views of its buckets: if
    they were freed, the next backward would allocate a second copy beside the buckets."""
    in_buckets = world.size > 1 and world.parallel.strategy.wrapper == "ddp"
    optimizer.zero_grad(set_to_none=not in_buckets)


@contextlib.contextmanager
def weights_gathered(model: Llama, parallel: ParallelConfig) -> Iterator[None]:
    """Within this context weights are all-gathered by FSDP, and cast by autocast, once, at their
    first use, and freed at the end. Generation needs it: else each token would do both again."""
    modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
    for module in modules:
        module.set_reshard_after_forward(False, recurse=False)
    dtype = model.compute_dtype
    device_type = next(model.parameters()).device.type
    try:
        # Autocast keeps what it has cast until the outermost of its contexts ends.
        with torch.autocast(device_type, dtype, enabled=dtype is not None):
            yield
    finally:  # a signal may have ended the evaluation
        for module in modules:
            module.reshard()
            reshards = parallel.reshard != "none" and module is not model
            module.set_reshard_after_forward(reshards, recurse=False)


# --------------------------------------------------------------------------- tensor parallelism

# The style of every layer of a Llama that has parameters: COLUMNS and ROWS say what a rank has of a
# weight, GatherTokens all-gathers x, and ROWS reduce-scatters what it adds to the stream. * is any
# number. The file of another model adds those of its layers. Unused entries are ignored.
PLAN = {
    "tok_embeddings": VocabularyParallel(
        input_layouts=REPLICATED, output_layouts=SEQUENCE_SHARDED, use_local_output=False
    ),
    "layers.*.attention_norm": NORM,
    "layers.*.attention": GatherTokens(),
    "layers.*.attention.wq": COLUMNS,
    "layers.*.attention.wk": COLUMNS,
    "layers.*.attention.wv": COLUMNS,
    "layers.*.attention.wo": ROWS,
    "layers.*.ffn_norm": NORM,
    "layers.*.feed_forward": GatherTokens(),
    "layers.*.feed_forward.w1": COLUMNS,
    "layers.*.feed_forward.w3": COLUMNS,
    "layers.*.feed_forward.w2": ROWS,
    "norm": NORM,
    "output": ColumnParallel(input_layouts=SEQUENCE_SHARDED, output_layouts=REPLICATED),
}


def style_of(path: str, config: LlamaConfig) -> ParallelStyle | None:
    """Return the style of the layer at `path`: layers.3.ffn_norm is layers.*.ffn_norm in PLAN."""
    plan = PLAN | family_of(config).plan()
    return plan.get(re.sub(r"\.\d+\b", ".*", path))


def tensor_parallel(model: Llama, mesh: DeviceMesh, in_chunks: bool = False) -> None:
    """Tensor, sequence and loss parallelism: ranks along tp share every matrix product.

    Ranks along tp see the same tokens. This is all that they do in a feed-forward block:

        hidden = silu(x @ w1.T) * (x @ w3.T)  # w1, w3 [F/tp, D]: F/tp features of each token
        y = hidden @ w2.T  # w2 [D, F/tp]: the part of the sum that comes from these features
        dist.all_reduce(y)  # backward does the same to the gradient of x

    Here the all-reduce is taken apart: a reduce-scatter, and an all-gather before the next pair of
    products. In between each rank has a shard of the sequence:

                           x: T/tp tokens, D features
            norm                 |                      each rank its tokens
            all-gather           v                      x: T tokens
            wq wk wv, w1 w3   [ columns ]               each rank its heads, or F/tp features
            attention, SwiGLU    |                      each rank its heads, or F/tp features
            wo, w2            [ rows ]                  each rank a partial sum for T tokens
            reduce-scatter       v                      x: T/tp tokens, summed over ranks
            residual             |

    torch stores W [out, in] and computes x Wᵀ. Column-parallel shards the output features,
    dimension 0 of W; row-parallel shards the input features, dimension 1. The vocabulary is sharded
    too. The embedding yields partial sums, since each rank finds only the tokens of its shard. In
    the loss, logits never leave the rank that computes them. Between layers x is a DTensor, but
    column-parallel layers return plain tensors with this rank's heads or features.

    Communication over tp, with a = B T D w bytes: forward and backward each run 2 L + 1 all-gathers
    and 2 L + 1 reduce-scatters of payload a. The loss all-gathers 2 tp float32 scalars a token. A
    norm is replicated but sees only the tokens of its rank, so its gradient is a partial sum, as
    its DTensor says. FSDP all-reduces it over tp just before its reduce-scatter: D elements per
    norm, once a step (with reshard = all, once a microbatch).

    Use within a node, where links are fast, when activations do not fit or there are more ranks
    than sequences. Avoid elsewhere: in each block computation waits for 4 collectives in
    forward and for 4 in backward, and smaller matrix products use a GPU less well. With --async-tp
    most messages are sent in chunks, while other chunks compute (techniques/async_tp.py).

    Shards in place: parameters become DTensors. Raises UserError for a parameter or a loss that it
    does not know how to shard. labs/tp shards a feed-forward block by hand."""
    if model.loss is not sum_of_losses:
        raise UserError(
            "--tp shards model.py's loss and not another model.loss: change loss_of there"
        )
    styles = {}
    for path, layer in model.named_modules():
        style = style_of(path, model.config)
        planned_dims(style, path, layer)  # raises for what PLAN does not cover
        if style and any(True for _ in layer.parameters()):  # nn.Identity has none
            styles[path] = async_tp.in_chunks(style) if in_chunks else style
    frozen = [name for name, p in model.named_parameters() if not p.requires_grad]
    parallelize_module(model, mesh, styles)
    for name in frozen:  # SequenceParallel makes every norm trainable
        model.get_parameter(name).requires_grad_(False)
    model.tie_weights()  # embedding and output each got a DTensor of its own
    model.vocabulary = ShardedVocabulary(model.vocabulary.size, mesh)
    # The embedding's output is still on its way, an AsyncCollectiveTensor. Cloning waits for it, so
    # that block 0 gets the type that other blocks get: one compiled graph serves all.
    if model.tok_embeddings:  # None on later stages of a pipeline
        model.tok_embeddings.register_forward_hook(lambda module, inputs, x: x.clone())


class ShardedVocabulary(Vocabulary):
    """Loss parallelism: each rank computes the logits of a shard of the vocabulary, and no rank
    holds [N, V]. For each token, ranks exchange two scalars: the logsumexp of their logits, and the
    target's logit or 0. So all have the same loss, and each has the gradients of its logits. hidden
    [B, T, D] is sharded by tokens, weight [V, D] by rows. labs/logits writes it by hand."""

    def __init__(self, size: int, mesh: DeviceMesh):
        super().__init__(size)
        self.mesh = mesh
        self.vocab_start = math.ceil(size / mesh.size()) * mesh.get_local_rank()  # of the shard

    def local_operands(self, hidden: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        # An all-gather of the tokens; in backward a reduce-scatter.
        hidden = hidden.redistribute(placements=[Replicate()])
        return hidden.to_local(grad_placements=[Partial()]), weight.to_local()

    def sum(self, logits: Tensor) -> Tensor:
        return self.all_gather(logits.sum(-1)).sum(0)

    def logsumexp(self, logits: Tensor) -> Tensor:
        return self.all_gather(logits.logsumexp(-1)).logsumexp(0)

    def cross_entropy(self, logits: Tensor, targets: Tensor) -> Tensor:
        index = targets[:, None] - self.vocab_start  # [n, 1], of the target in this rank's logits
        is_local = (index >= 0) & (index < logits.shape[-1])
        target_logit = logits.gather(-1, torch.where(is_local, index, 0))
        scalars = [logits.logsumexp(-1, keepdim=True), torch.where(is_local, target_logit, 0)]
        lse, target_logit = self.all_gather(torch.cat(scalars, 1)).unbind(-1)  # each [tp, n]
        return lse.logsumexp(0) - target_logit.sum(0)

    def all_gather(self, x: Tensor) -> Tensor:
        """All-gather x [...] -> [tp, ...]; backward keeps this rank's part of the gradient."""
        return DTensor.from_local(x[None], self.mesh, [Shard(0)]).full_tensor()
