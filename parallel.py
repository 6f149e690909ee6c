r"""Split one training over many processes: mesh, data parallelism, recomputation, compilation.

    torchrun train.py                                      one process
    torchrun --nproc-per-node 8 train.py                   one node with 8 GPUs, a process for each
    torchrun --nnodes 2 --nproc-per-node 8 --node-rank 0 \
             --master-addr HOST train.py                   two nodes; on the second: --node-rank 1

Every process runs the same script from the top; `rank` is the only thing that tells them apart.
A single process takes the same path; only the wrapper of DDP or ZeRO-1 is left out.

Ranks form a mesh of four dimensions, and each technique works along some of them:

    pp           ranks with different layers, the same sequences                (pipeline.py)
    replicate    ranks with the same weights and different sequences            (DDP, ZeRO-1, HSDP)
    shard        ranks that share one copy of the weights, different sequences  (FSDP, HSDP)
    tp           ranks that share one copy of the weights, the same sequences   (tensor parallelism)

Row-major, the last dimension varies fastest: 1 x 2 x 2 x 2 ranks are ((0 1) (2 3)) ((4 5) (6 7)).
Ranks that communicate most are nearest: tp within a node, then shard; replicate and pp cross nodes.
With --cp N, each N neighbours along replicate x shard have parts of the same sequences.

What a rank holds of a parameter, under FSDP x TP: tp shards wq [D, D] by rows, [D/tp, D] on each
rank; shard then shards these rows again, [D/(tp shard), D]. FSDP all-gathers over `shard` before a
block computes, so that the block sees its tp shard. Norms are replicated over tp.

Letters: P parameters (with tensor parallelism those of one tp rank), L layers; D, F, V, KV and E as
in model.py; b sequences of a rank in a step, B x T tokens in a microbatch; g bytes of a gradient
(4, or 8 in float64), w of a weight in matrix products (g, or 2 in bfloat16).
Bytes of a collective are its *payload*: the output of an all-gather, the input of a reduce-scatter
or an all-reduce. In a ring of n ranks, a rank *sends* (n-1)/n of it, twice that for an all-reduce.
"""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor, Partial, Shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from async_tp import keep_messages_early
from float8 import use_float8
from model import Block, Llama
from offload import offload_activations
from pipeline import Pipeline, has_w
from plumbing.allocate import allocate
from plumbing.processes import Process, UserError
from plumbing.shards import check_shardable, chunk_of
from plumbing.split_backward import make_deferrable
from plumbing.stages import check_combination, cut, stages_of
from tensor_parallel import tensor_parallel


@dataclass(frozen=True)
class ParallelConfig:
    """How a model is split over ranks and computed there, as the flags ask for it."""

    dp: str = "ddp"  # a name in STRATEGIES
    replicate: int = 1  # ranks along each mesh dimension
    shard: int = 1
    tp: int = 1
    reshard: str = "weights"  # what FSDP shards again after use: none, adapters, weights or all
    checkpointing: str = "none"  # what backward recomputes: none, selective or full
    compile: bool = False
    offload: bool = False  # parameters and optimizer state to CPU memory
    offload_activations: bool = False
    dtype: torch.dtype = torch.float32  # of computation
    optimizer: str = "adamw"  # or muon
    moments: torch.dtype | None = None  # of AdamW; None: the parameters' dtype
    pp: int = 1  # ranks along this mesh dimension
    stages_per_rank: int = 1
    schedule: str = "1f1b"  # a name in pipeline.py's SCHEDULES, or a file
    cp: int = 1  # consecutive ranks of replicate x shard that share each sequence
    float8: str = "none"  # or one of float8.py's RECIPES
    async_tp: bool = False  # tensor parallelism sends while it multiplies

    def __post_init__(self):
        check_combination(self, STRATEGIES.get(self.dp), self.pp > 1 and has_w(self.schedule))

    @property
    def strategy(self) -> "Strategy":
        """The entry of STRATEGIES. DDP with tensor or pipeline parallelism runs as HSDP with shard
        = 1: DDP takes no DTensors, and no microbatches that overlap."""
        return STRATEGIES["hsdp" if self.dp == "ddp" and self.tp * self.pp > 1 else self.dp]

    @property
    def size(self) -> int:
        return self.pp * self.replicate * self.shard * self.tp

    @property
    def grad_bytes(self) -> int:
        return 8 if self.dtype == torch.float64 else 4

    @property
    def weight_bytes(self) -> int:
        return self.dtype.itemsize


@dataclass(frozen=True)
class World(Process):
    """This process and its place in the mesh of all processes."""

    parallel: ParallelConfig
    mesh: DeviceMesh
    group: dist.ProcessGroup | None = None  # a subset of the processes; None: all of them
    cp_mesh: DeviceMesh | None = None  # the ranks that share sequences with this one, if any

    @property
    def data_size(self) -> int:
        """Number of ranks with different sequences; ranks along tp, cp and pp share theirs."""
        return self.parallel.replicate * self.parallel.shard // self.parallel.cp

    @property
    def data_rank(self) -> int:
        """Index of this rank's sequences among data_size."""
        replica, shard = (self.mesh.get_local_rank(dim) for dim in ("replicate", "shard"))
        return (replica * self.parallel.shard + shard) // self.parallel.cp

    def all_gather_scalars(self, values: list[float | Tensor]) -> Tensor:
        """All-gather one row of scalars from every rank -> [size, len(values)] float64."""
        row = torch.zeros(len(values), dtype=torch.float64, device=self.device)
        for element, value in zip(row, values):
            element.add_(value)  # a Python number travels with the kernel: no blocking copy
        rows = [torch.empty_like(row) for _ in range(self.size)]
        dist.all_gather(rows, row, self.group)  # 8 bytes a scalar and rank, over all ranks
        return torch.stack(rows)


def with_mesh(process: Process, parallel: ParallelConfig | None = None) -> World:
    """Arrange the processes in a configuration's mesh; by default as replicas (labs/hsdp.py)."""
    parallel = parallel or ParallelConfig(replicate=process.size)
    dims = ("pp", "replicate", "shard", "tp")
    sizes = tuple(getattr(parallel, dim) for dim in dims)
    mesh, cp_mesh = init_device_mesh(process.device.type, sizes, mesh_dim_names=dims), None
    if parallel.cp > 1:  # a group of its own, beside one of replicate or shard with the same ranks
        ranks = mesh.mesh.movedim(-1, 1).reshape(-1, parallel.cp).tolist()
        group, _ = dist.new_subgroups_by_enumeration(ranks)
        cp_mesh = DeviceMesh.from_group(group, process.device.type, mesh_dim_names=("cp",))
    return World(**vars(process) | dict(parallel=parallel, mesh=mesh, cp_mesh=cp_mesh))


def parallelize(model: Llama, world: World, initialize: Callable[[Llama], None]) -> nn.Module:
    """Apply pipeline, 8 bits, tensor parallelism, recomputation, compilation, data parallelism.

    `model` was built on `meta`; `initialize(model)` gives its parameters their values. Returns what
    a training step calls: the model, whose modules now have hooks, or DDP, ZeRO-1 or a Pipeline
    around it. For evaluation, generation and checkpoints use `model` itself."""
    parallel = world.parallel
    if parallel.dtype == torch.float64:
        model.double()
    if parallel.dtype == torch.bfloat16:
        mixed_precision(model, parallel)
    if parallel.pp > 1:
        place = world.mesh.get_local_rank("pp"), parallel.pp, parallel.stages_per_rank
        cut(model, *place)
        if has_w(parallel.schedule):
            make_deferrable(model)
    if parallel.float8 != "none":
        use_float8(model, parallel.float8, parallel.tp)
    if parallel.tp > 1:
        tensor_parallel(model, world.mesh["tp"], parallel.async_tp)
        if parallel.async_tp and parallel.compile:
            keep_messages_early()
    recompute_and_compile(model, parallel.checkpointing, parallel.compile)
    if parallel.offload_activations:
        offload_activations(model, world.device)
    stages = stages_of(model, *place) if parallel.pp > 1 else [model]
    if parallel.strategy.uses_fsdp:  # on meta, so that no rank ever holds the whole model
        for stage in stages:
            parallel.strategy.apply(stage, world)
    allocate(model, "cpu" if parallel.offload else world.device)
    initialize(model)
    if parallel.pp > 1:
        return Pipeline(model, stages, world, partial(gradient_sync, parallel))
    if parallel.strategy.uses_fsdp or world.size == 1:
        return model
    return parallel.strategy.apply(model, world)


def mixed_precision(model: Llama, parallel: ParallelConfig) -> None:
    """Compute in bfloat16, chiefly the matrix products; keep float32 master weights.

    Trainable parameters, gradients and AdamW's moments stay float32: most updates are smaller than
    the spacing of bfloat16 numbers and would be rounded away. With plain tensors, autocast casts a
    weight where it is used, but not the embedding, whose dtype the residual stream has. FSDP casts
    its shard before the all-gather, which halves the bytes; the residual stream is then bfloat16.
    RoPE, and sums in norms and loss, are float32 in both. Frozen parameters are bfloat16 from the
    start."""
    for parameter in model.parameters():
        if not parameter.requires_grad and parameter.is_floating_point():  # not in 4 bits
            parameter.data = parameter.data.bfloat16()
    if not parallel.strategy.uses_fsdp:
        model.compute_dtype = torch.bfloat16


# ----------------------------------------------------------------------------- data parallelism


def ddp(model: Llama, world: World) -> nn.Module:
    """DDP: every rank holds the whole model and computes its own part of the batch.

        rank 0  [ weights ] [ gradients ] [ AdamW ]      sequences 0..b-1
        rank 1  [ weights ] [ gradients ] [ AdamW ]      sequences b..2b-1

    Communication over replicate, a step: all-reduce of P g bytes, the gradients, in buckets of
    25 MB (the first of 1 MB) while backward still computes. Frozen parameters send nothing: LoRA
    sends the gradients of its factors alone, 0.5 % of an 8B model's at r = 16.
    Use when weights, gradients and moments (16 P bytes in float32) fit on a device: in float32 no
    strategy sends less. Avoid when they do not fit. labs/ddp.py writes it by hooks.
    """
    return DistributedDataParallel(
        model,
        device_ids=[world.device] if world.device.type == "cuda" else None,
        process_group=world.mesh.get_group("replicate"),
        init_sync=False,  # all ranks have initialized the same weights
        gradient_as_bucket_view=True,  # store gradients once, in the buckets
    )


class ZeRO1(nn.Module):
    """ZeRO-1: DDP whose AdamW state is sharded (Rajbhandari et al. 2020, arXiv:1910.02054).

        rank 0  [ weights ] [ 1st half: gradients, AdamW ]      sequences 0..b-1
        rank 1  [ weights ] [ 2nd half: gradients, AdamW ]      sequences b..2b-1

    A rank updates its slice of every parameter (of dimension 0, as in FSDP) by that of the averaged
    gradient, and sends it to the others. Whole gradients exist until the last microbatch's backward
    has reduce-scattered them. labs/zero1.py takes such a step by hand.
    Communication over replicate, a step, one call a parameter: reduce-scatter of P g bytes while
    the last backward computes, all-gather of P g bytes after the update. Together they send what
    DDP's all-reduce sends.
    Use when DDP nearly fits: AdamW's state takes 8 P / replicate bytes instead of 8 P. Avoid when
    DDP fits: the all-gather overlaps with nothing, and many small calls are slow.
    """

    def __init__(self, model: Llama, world: World):
        super().__init__()
        self.model, self.mesh = model, world.mesh["replicate"]
        self.is_last_microbatch = True
        self.pending: list[tuple[Tensor, DTensor]] = []  # slices, and gradients under way to them
        for parameter in model.parameters():
            if parameter.requires_grad:
                rows = chunk_of(parameter.detach(), self.mesh, 0, 0)
                shape, stride = parameter.shape, parameter.stride()
                parameter.optimizer_slice = DTensor.from_local(  # a view of the parameter's memory
                    rows, self.mesh, [Shard(0)], run_check=False, shape=shape, stride=stride
                )
                parameter.optimizer_slice.whole = parameter
                parameter.register_post_accumulate_grad_hook(self.reduce_scatter)

    def forward(self, *inputs, **options):
        return self.model(*inputs, **options)

    def reduce_scatter(self, parameter: Tensor) -> None:
        """Start to sum a complete gradient over the ranks, each receiving its slice of the sum."""
        if self.is_last_microbatch:
            gradient = DTensor.from_local(parameter.grad, self.mesh, [Partial()], run_check=False)
            gradient = gradient.redistribute(placements=[Shard(0)], async_op=True)
            self.pending.append((parameter.optimizer_slice, gradient))
            parameter.grad = None

    def finish_gradients(self) -> None:
        """Wait for the sums and turn them into averages, as in DDP and FSDP."""
        for optimizer_slice, gradient in self.pending:
            optimizer_slice.grad = gradient / self.mesh.size()
        self.pending.clear()


def optimizer_parameters(model: Llama) -> dict[str, Tensor]:
    """Return what an optimizer updates, by name: trainable parameters, or ZeRO-1's slices."""
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    return {name: getattr(p, "optimizer_slice", p) for name, p in named.items()}


def all_gather_updates(optimizer: torch.optim.Optimizer, *_) -> None:
    """Complete each parameter from the updated slices of all ranks, under ZeRO-1."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if hasattr(parameter, "whole"):
                parameter.whole.data.copy_(parameter.detach().full_tensor())


def fsdp(model: Llama, world: World) -> nn.Module:
    """FSDP and HSDP: each rank along shard holds a slice of every parameter, gradient and moment.

        FSDP, 4 ranks                          HSDP, 2 replicas of 2 shards
        rank 0  [ 1st quarter ]                rank 0  [ 1st half ]     node 0
        rank 1  [ 2nd quarter ]                rank 1  [ 2nd half ]
        rank 2  [ 3rd quarter ]                rank 2  [ 1st half ]     node 1
        rank 3  [ 4th quarter ]                rank 3  [ 2nd half ]

    The weights of a block are all-gathered just before it computes and freed after it, in forward
    and again in backward. Its gradients are then summed and sharded by one reduce-scatter.
    Communication over shard, a microbatch: all-gather of P w bytes in forward, in L + 1 calls, and
    again in backward, except embedding, last norm and output, which stay unsharded. A step:
    reduce-scatter of P g bytes in L + 1 calls. So with w = g and one microbatch a rank sends up to
    1.5 times what DDP sends. HSDP also, over replicate, a step: all-reduce of P g / shard bytes.
    (Slices are padded to equal size: perf/cost.py counts the padding.)

    With several microbatches a step, `reshard` says what is sharded again after each use:
        none      nothing: one all-gather of the weights and one reduce-scatter of the gradients a
                  step, but (w + g) P bytes stay unsharded on every rank
        weights   weights; gradients accumulate unsharded, g P bytes
        all       weights and gradients: reduce-scatter in every microbatch
        adapters  for LoRA: its factors, like weights; FSDP ignores the frozen base, of which every
                  rank keeps a copy
    Without adapters or none, LoRA all-gathers the frozen base for every use, to train less than 1 %
    of it: that makes it slower than one process in many frameworks.
    Use FSDP when DDP does not fit, and HSDP when it does not fit and there are several nodes: the
    all-gathers stay within a node, and slices of gradients alone cross. Avoid both when DDP fits
    (over a slow link HSDP may win), and an HSDP mesh that all-gathers across nodes.
    labs/fsdp.py shards one matrix by hand, labs/lora.py a model with adapters.
    """
    parallel = world.parallel
    check_shardable(model, parallel.reshard)
    bf16 = parallel.dtype == torch.bfloat16
    dims = ("replicate", "shard") if parallel.replicate > 1 else ("shard",)
    on_cpu = CPUOffloadPolicy(pin_memory=torch.cuda.is_available())
    options = dict(
        mesh=world.mesh[dims],
        mp_policy=MixedPrecisionPolicy(
            param_dtype=torch.bfloat16 if bf16 else None,
            reduce_dtype=torch.float32 if bf16 else None,
            cast_forward_inputs=False,  # cos and sin stay float32
        ),
        offload_policy=on_cpu if parallel.offload else OffloadPolicy(),
    )
    if parallel.reshard == "adapters":
        options["ignored_params"] = {p for p in model.parameters() if not p.requires_grad}
    for block in model.layers.values():
        fully_shard(block, reshard_after_forward=parallel.reshard != "none", **options)
    fully_shard(model, reshard_after_forward=False, **options)  # backward needs it at once
    return model


@dataclass(frozen=True)
class Strategy:
    """One way for ranks with different sequences to share weights, gradients and AdamW's state."""

    apply: Callable[[Llama, World], nn.Module]  # returns the module that a training step calls
    copy_per: str  # one copy of the weights for each "rank", "node" or "world"
    sharded: dict[str, str] = field(default_factory=dict)  # kind of state -> mesh dimension
    uses_fsdp: bool = False  # parameters are DTensors, sharded while the model is still on meta
    grads_in_buckets: bool = False  # gradients are views of DDP's buckets
    automatic: bool = True  # --dp auto may choose it
    splits_layers: bool = True  # it can be combined with tensor and pipeline parallelism

    def shard_size(self, data_ranks: int, in_node: int) -> int:
        """Return the number of ranks along shard, of `data_ranks` ranks with different sequences,
        `in_node` of which lie in one node."""
        return {"rank": 1, "node": in_node, "world": data_ranks}[self.copy_per]


EVERYTHING = {"parameters": "shard", "gradients": "shard", "optimizer": "shard"}
UPDATES = {"gradients": "replicate", "optimizer": "replicate"}
# --dp auto takes the first that fits. perf/cost.py knows what each of them communicates.
STRATEGIES = {
    "ddp": Strategy(ddp, "rank", grads_in_buckets=True),
    "zero1": Strategy(ZeRO1, "rank", UPDATES, automatic=False, splits_layers=False),
    "hsdp": Strategy(fsdp, "node", sharded=EVERYTHING, uses_fsdp=True),
    "fsdp": Strategy(fsdp, "world", sharded=EVERYTHING, uses_fsdp=True),
}


@contextlib.contextmanager
def gradient_sync(parallel: ParallelConfig, runner: nn.Module, last: bool) -> Iterator[None]:
    """Wrap backward of a microbatch, and its forward but in a pipeline: only the `last` one of a
    step communicates gradients (labs/accumulate.py). Until then they accumulate on the rank, except
    with reshard = all."""
    if isinstance(runner, FSDPModule):
        runner.set_requires_gradient_sync(last or parallel.reshard == "all")
        runner.set_requires_all_reduce(last)
        runner.set_reshard_after_backward(last or parallel.reshard != "none")
    if isinstance(runner, ZeRO1):
        runner.is_last_microbatch = last
    no_sync = isinstance(runner, DistributedDataParallel) and not last
    with runner.no_sync() if no_sync else contextlib.nullcontext():
        yield
    if isinstance(runner, ZeRO1):
        runner.finish_gradients()


@contextlib.contextmanager
def unsharded(model: Llama, parallel: ParallelConfig) -> Iterator[None]:
    """Within this context FSDP all-gathers weights once, at their first use, and frees them at the
    end. For generation, which would all-gather the model for every token."""
    modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
    for module in modules:
        module.set_reshard_after_forward(False, recurse=False)
    yield
    for module in modules:
        module.reshard()
        reshards = parallel.reshard != "none" and module is not model
        module.set_reshard_after_forward(reshards, recurse=False)


# --------------------------------------------------------------- recomputation and compilation


def recompute_and_compile(model: Llama, checkpointing: str, compile: bool) -> None:
    """Apply activation checkpointing and torch.compile to each block, by replacing its forward.

    Parameters keep their names, and FSDP's all-gather stays outside. Full checkpointing calls the
    compiled block a second time; selective goes inside, where the compiler sees what to save. One
    graph serves all blocks, except block 0 above a frozen embedding, whose input needs no gradient.
    Each input shape has its own graph (dynamic shapes would confuse DTensor).
    Use compile for long runs: it fuses what lies between the matrix products, after a slow start.
    """
    if compile:
        torch._dynamo.config.optimize_ddp = False  # it would break graphs at DDP's buckets
        torch._dynamo.config.recompile_limit = 64  # packed documents have several shapes
    for name, block in model.layers.items():
        if not isinstance(block, Block) or "forward" in vars(block):
            raise UserError(
                f"block {name} is wrapped already: a checkpoint within a checkpoint would compute "
                f"attention three times; pass parallelize a model as it was built"
            )
        if compile and checkpointing == "full":
            block.forward = torch.compile(block.forward, dynamic=False)
        if checkpointing == "selective":
            for module in block.modules():
                for layer in getattr(module, "saved_products", ()):
                    mark_products(getattr(module, layer))
        if checkpointing != "none":
            block.forward = recompute(block.forward, selective=checkpointing == "selective")
        if compile and checkpointing != "full":
            block.forward = torch.compile(block.forward, dynamic=False)


def recompute(forward: Callable, selective: bool) -> Callable:
    """Activation checkpointing: backward recomputes what forward then need not save
    (labs/recompute.py writes it by hand).

                   elements saved per token and block                        attention forwards
        none       6 D + 2 KV E + 3 F                                        1
        selective  3 D + KV E + F: the block's input, the outputs of         1
                   attention, wk, wo and w3
        full       D: the block's input                                      2

    Full costs another forward, a third more FLOPs, and no communication under FSDP, since backward
    all-gathers the weights anyway; under tensor parallelism it repeats 2 L all-gathers and L
    reduce-scatters of forward. Selective costs three of the seven products and the 2 L all-gathers.
    Use when activations do not fit. Avoid when only a larger microbatch is gained.
    """
    context = {"context_fn": _selective_context} if selective else {}
    return partial(checkpoint, forward, use_reentrant=False, **context)


def mark_products(layer: nn.Module) -> None:
    """Let an operator that does nothing run before each matrix product of the layer: the policy
    below sees operators, in compiled blocks too, but not the layers they belong to."""
    if hasattr(layer, "saves_chunks"):  # it marks the product of each chunk itself (async_tp.py)
        layer.saves_chunks = True
    else:
        layer.register_forward_pre_hook(lambda _, inputs: (torch.ops.aten.alias(inputs[0]),))


def is_attention(operator: str) -> bool:
    """Return whether an operator is a forward of attention; its kernels differ between devices."""
    is_forward = not operator.removesuffix(".default").endswith("_backward")
    return is_forward and ("scaled_dot_product" in operator or "varlen_attn" in operator)


def _selective_context():
    """Save attention and the products of the layers that a module names in `saved_products`, with
    what LoRA adds to them. Under tensor parallelism also save what each reduce-scatter returns."""
    products = "mm", "addmm", "bmm", "_scaled_mm", "lora_linear", "all_to_all_single"
    marked = {}  # whether this is a recomputation -> whether the next product is marked

    def policy(context, op, *args, **kwargs):
        name = op.__name__
        if name == "alias.default":
            marked[context.is_recompute] = True
        save = name.removesuffix(".default") in products and marked.pop(context.is_recompute, False)
        if save or is_attention(name) or "reduce_scatter" in name:
            return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)
