"""One training over many processes: how they find each other, and how the model is split over them.

    torchrun train.py                                      one process
    torchrun --nproc-per-node 8 train.py                   one node, a process for each of 8 GPUs
    torchrun --nnodes 2 --nproc-per-node 8 --node-rank 0 \
             --master-addr HOST train.py                   two nodes; on the second, --node-rank 1

Every process runs the same script from the top; `rank` is the only thing that tells them apart.
One process is a world of one: it takes the same path, with collectives that have nobody to talk to.

Ranks stand in a mesh of three dimensions, and every technique below works along some of them:

    replicate    ranks that hold the same weights and see different sequences     (DDP, HSDP)
    shard        ranks that share one copy and see different sequences            (FSDP, HSDP)
    tp           ranks that share one copy and see the same sequences             (tensor parallel)

The last dimension counts fastest: 8 processes as 2 x 2 x 2 are ((0 1) (2 3)) ((4 5) (6 7)). What
talks most is nearest: tp and shard lie within a node, replicate goes across.

Letters: P parameters of the model, L its layers, D its width, V its vocabulary; B x T tokens in a
microbatch; g bytes of a gradient (4, or 8 in float64), w bytes of a weight as it is computed
with (g, or 2 in bfloat16). Bytes are a rank's payload: what an all-gather puts out, what a
reduce-scatter or an all-reduce takes in.
"""

import argparse
import atexit
import contextlib
import errno
import json
import math
import os
import signal
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
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
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
)
from torch.distributed.tensor.experimental import local_map
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from lora import LoRALinear
from model import Block, Llama, UserError, cross_entropy_sum

TIMEOUT = timedelta(minutes=10)  # a collective that waits longer ends the run
SILENCE = 20  # seconds without a sign of life after which a rank counts as dead
HASTE = 4  # the same once a connection has been lost
# What a disk may say that is for the user to mend.
DISK = "EACCES EPERM EROFS ENOSPC EDQUOT EFBIG EEXIST ENOTDIR EISDIR ENAMETOOLONG".split()


# ------------------------------------------------------------------------------------ the processes


@dataclass(frozen=True)
class Split:
    """How a model is split over processes, and how it is computed there: what flags ask for."""

    dp: str = "ddp"  # ddp, fsdp or hsdp
    replicate: int = 1  # ranks along each dimension of the mesh
    shard: int = 1
    tp: int = 1
    reshard: str = "weights"  # what FSDP does not keep whole: none, adapters, weights or all
    checkpointing: str = "none"  # what backward computes again: none, selective or full
    compile: bool = False
    offload: bool = False
    dtype: torch.dtype = torch.float32  # of computation

    @property
    def fully_sharded(self) -> bool:
        """Whether parameters are FSDP's: always but for plain DDP, whose parameters are tensors."""
        return self.dp != "ddp" or self.tp > 1

    @property
    def grad_bytes(self) -> int:
        return 8 if self.dtype == torch.float64 else 4

    @property
    def weight_bytes(self) -> int:
        return self.dtype.itemsize


@dataclass(frozen=True)
class World:
    """Who this process is among `size` processes, the device it computes on, and the mesh."""

    rank: int
    size: int
    local_rank: int
    per_node: int  # processes of a node
    device: torch.device
    split: Split
    mesh: DeviceMesh
    group: dist.ProcessGroup | None = None  # of these processes, where they are not all there are

    @property
    def data_size(self) -> int:
        """How many parts a batch has: ranks along tp share theirs."""
        return self.split.replicate * self.split.shard

    @property
    def data_rank(self) -> int:
        """Which of these parts is this rank's."""
        mesh = self.mesh
        return mesh.get_local_rank("replicate") * self.split.shard + mesh.get_local_rank("shard")

    def one_first(self, name: str, make: Callable):
        """make(), on one process of each node before the others: it fills a cache, they read it.

        They wait at the store and not in a collective, which would give up after TIMEOUT."""
        key = f"{name} made on node {os.environ.get('GROUP_RANK', 0)}"
        if self.local_rank == 0:
            made = make()
            _store().set(key, "")
            return made
        _store().wait([key], timedelta(days=7))
        return make()

    def from_first(self, make: Callable):
        """What make() gives on rank 0, on every rank: where they might see different things."""
        box = [make() if self.rank == 0 else None]
        dist.broadcast_object_list(box, device=torch.device("cpu"))
        return box[0]

    def gather(self, values: list[float | Tensor]) -> Tensor:
        """Everybody's row of a few numbers, [size, len(values)] float64 on every rank."""
        row = torch.zeros(len(values), dtype=torch.float64, device=self.device)
        for slot, value in zip(row, values):
            slot.add_(value)  # a number goes with the kernel: no copy that waits for the device
        rows = [torch.empty_like(row) for _ in range(self.size)]
        dist.all_gather(rows, row, self.group)  # 8 bytes a number and rank, over the whole world
        return torch.stack(rows)

    def agree(self, flags: dict) -> None:
        """Refuse to start where ranks were given different flags, as happens over several nodes."""
        mine = {name: str(value) for name, value in flags.items()}
        if self.rank == 0:
            _store().set("flags", json.dumps(mine))
        first = json.loads(_store().get("flags"))  # waits for rank 0
        if odd := [name for name in mine if mine[name] != first.get(name)]:
            ours, theirs = (
                " ".join(f"--{name.replace('_', '-')} {given.get(name)}" for name in odd)
                for given in (mine, first)
            )
            raise UserError(
                f"rank {self.rank} was started with {ours}, rank 0 with {theirs}: give the same "
                f"command on every node"
            )
        dist.barrier()  # nobody begins before all have agreed


def set_up() -> World:
    """Join the other processes that torchrun started; without torchrun, be a world of one.

    The world begins as replicas alone; `arrange` gives it another mesh."""
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    per_node = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    device = torch.device("cpu")
    if torch.cuda.is_available():
        gpus = torch.cuda.device_count()
        if per_node > gpus:
            raise UserError(f"--nproc-per-node {per_node} on a node of {gpus} GPUs: at most {gpus}")
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
    if "RANK" in os.environ:
        store, rank, size = next(dist.rendezvous("env://"))
        # After a restart by torchrun the store still holds the keys of those who died.
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        store = dist.PrefixStore(f"attempt {attempt}", store)
    else:
        store, rank, size = dist.HashStore(), 0, 1
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=TIMEOUT)
    if size > 1:
        watching = threading.Thread(target=_watch, args=(_store().clone(), rank, size), daemon=True)
        watching.start()
        atexit.register(_stop_watching, watching)
        signal.signal(signal.SIGTERM, _leave)
    split = Split(replicate=size)
    return World(rank, size, local_rank, per_node, device, split, _mesh(device, split))


def arrange(world: World, split: Split) -> World:
    """The same processes in the mesh of a split."""
    return replace(world, split=split, mesh=_mesh(world.device, split))


def _mesh(device: torch.device, split: Split) -> DeviceMesh:
    shape = (split.replicate, split.shard, split.tp)
    return init_device_mesh(device.type, shape, mesh_dim_names=("replicate", "shard", "tp"))


def run(main: Callable[[], None]) -> None:
    """Run a script. A user's mistake ends it with one line and exit code 2, on all ranks.

    Most mistakes are met by every rank alike, some by one: whoever comes first speaks, and ranks
    that lose it in the middle of a collective know by the store that all is said. A rank that
    fails otherwise, or dies, is named in one line and ends the others within half a minute: so the
    tests find with gloo, where a lost peer is noticed at once; otherwise after SILENCE. A disk that
    is full or may not be written is for the user to mend, too."""
    try:
        main()
    except Exception as error:
        if isinstance(error, OSError) and errno.errorcode.get(error.errno) in DISK:
            error = UserError(f"{error}: make room, or choose a place that may be used")
        if isinstance(error, UserError):
            if _count_errors(1) == 1:
                print(f"error: {error}", file=sys.stderr)
            _exit(2)
        if _count_errors(0) > 0:
            _exit(2)
        if dist.is_initialized() and dist.get_world_size() > 1:
            if isinstance(error, dist.DistError) or "gloo/transport" in str(error):
                _store().set("lost", "")  # a peer has gone: the watch finds out who, and exits
                time.sleep(3 * HASTE)
            _fail(_store(), f"rank {dist.get_rank()} failed: {type(error).__name__}: {error}")
        raise
    if dist.is_initialized():
        _store().set(f"rank {dist.get_rank()} is done", "")
        dist.destroy_process_group()


def _exit(code: int) -> None:
    """Leave at once: peers may be stuck in a collective, which the usual way out would wait for."""
    sys.stdout.flush()
    sys.stderr.flush()
    if dist.is_initialized():
        os._exit(code)
    sys.exit(code)


def _watch(store: dist.Store, rank: int, size: int) -> None:
    """A thread's work: give a sign of life every second, listen for the next rank's, and end this
    process when somebody has failed, which a process that waits in a collective would not notice.

    The store has 7 small requests a second from each rank; the training thread is not disturbed."""
    other, host = (rank + 1) % size, socket.gethostname()
    own_sign, its_sign = f"sign of rank {rank}", f"sign of rank {other}"
    heard, when = b"", time.monotonic()
    for beat in range(sys.maxsize):
        try:
            store.set(own_sign, f"on {host}, {beat}")
            failed, mistaken = store.check(["failed"]), store.add("errors", 0) > 0
            lost, done = store.check(["lost"]), store.check([f"rank {other} is done"])
            sign = store.get(its_sign) if store.check([its_sign]) else b""  # get would wait
        except dist.DistError:  # the store was torchrun's, on the first node
            if not _ended.wait(HASTE):
                print(f"error: rank {rank} has lost the first node", file=sys.stderr, flush=True)
                os._exit(1)
            return
        if failed or mistaken:
            _ended.wait(HASTE)  # for this rank to end by itself
            os._exit(2 if mistaken else 1)
        if sign != heard or done:
            heard, when = sign, time.monotonic()
        elif time.monotonic() - when > (HASTE if lost else SILENCE):
            where = sign.decode().split(",")[0]
            _fail(store, f"rank {other} {where} has died or hangs; --resume continues the run")
            os._exit(1)
        if _ended.wait(1):
            return


_ended = threading.Event()  # the script is over, and with it the watch


def _stop_watching(thread: threading.Thread) -> None:
    _ended.set()
    thread.join()  # a thread in the middle of a request would abort Python's end


def _leave(number: int, frame) -> None:
    """torchrun stops all ranks as soon as it misses one: stay until the watch has said which."""
    _store().set("lost", "")
    time.sleep(HASTE + 2)
    os._exit(128 + number)


def _fail(store: dist.Store, what: str) -> None:
    """Tell the user and all ranks that one has failed, unless that is told already."""
    if store.add("failures", 1) == 1:
        print(f"error: {what}", file=sys.stderr, flush=True)
    store.set("failed", what)


def _count_errors(new: int) -> int:
    """Errors of users that ranks have met so far, `new` ones of this rank included."""
    if dist.is_initialized():
        return _store().add("errors", new)
    # Before they join, the ranks of a node meet the same: the first of them speaks.
    return new if os.environ.get("LOCAL_RANK", "0") == "0" else 2 * new


def _store() -> dist.Store:
    """Where ranks leave each other small messages without meeting in a collective."""
    return dist.distributed_c10d._get_default_store()


# ----------------------------------------------------------------------------- splitting the model


def parallelize(model: Llama, world: World, fill: Callable[[Llama], None]) -> nn.Module:
    """Put a model that was built on `meta` to work on this world: the one place that composes.

    `fill` gives the parameters their values. Returns what a training step calls; `model` itself
    stays the Llama it was, for its parameters' names, for evaluation and for generation.
    """
    split = world.split
    if split.dtype == torch.float64:
        model.double()
    if split.dtype == torch.bfloat16:
        for parameter in model.parameters():
            if not parameter.requires_grad:  # never updated, so never wider than it is used
                parameter.data = parameter.data.bfloat16()
        if not split.fully_sharded:
            mixed_precision(model)
    if split.tp > 1:
        tensor_parallel(model, world.mesh["tp"])
    recompute_and_compile(model, split.checkpointing, split.compile)
    if split.fully_sharded:
        dims = ("replicate", "shard") if split.replicate > 1 else ("shard",)
        shard_data_parallel(model, world.mesh[dims], split)
    model.to_empty(device="cpu" if split.offload else world.device)
    model.tie_weights()  # to_empty makes two of a shared parameter
    fill(model)
    if split.fully_sharded or world.size == 1:
        return model
    return data_parallel(model, world)


def mixed_precision(model: Llama) -> None:
    """Compute in bfloat16 what gains from it, chiefly matrix products, by autocast.

    Parameters, gradients and AdamW's moments stay float32 in every split: an update is often
    smaller than the step between two neighbouring bfloat16 numbers, and would be lost. Here, with
    plain tensors, a weight is cast where it is used, and the residual stream stays float32. FSDP
    casts its slices before it gathers them, for half the bytes; all a block does is then bfloat16,
    but for the sums within norms, the angles of RoPE and the loss. A frozen base is bfloat16 from
    the start, and so is then the stream.
    """
    model.compute_dtype = torch.bfloat16


def data_parallel(model: Llama, world: World) -> nn.Module:
    """DDP: every rank holds the whole model and works on its own part of the batch.

        rank 0  [ weights ] [ gradients ] [ AdamW ]      sequences 0..b-1
        rank 1  [ weights ] [ gradients ] [ AdamW ]      sequences b..2b-1

    Sends, over replicate: an all-reduce of every gradient, P g bytes once a step, in buckets of
    25 MB (the first of 1 MB) while backward still computes. Nothing else. What is frozen has no
    gradient: LoRA sends those of its adapters, a hundredth of P.
    Pays wherever a whole copy (16 P bytes in float32: weight, gradient, two moments) fits on a
    device: no other split of the batch sends less in all. Hurts where it does not fit, and where
    P g bytes a step are too much for a slow link: then make steps longer, by a larger batch.

    DDP averages over ranks where a step needs a sum; the step multiplies by their number.
    """
    return DistributedDataParallel(
        model,
        device_ids=[world.device] if world.device.type == "cuda" else None,
        process_group=world.mesh.get_group("replicate"),
        init_sync=False,  # weights are a function of the seed or the checkpoint: alike already
        gradient_as_bucket_view=True,  # one copy of the gradients instead of two
    )


def shard_data_parallel(model: Llama, mesh: DeviceMesh, split: Split) -> None:
    """FSDP and HSDP: ranks along shard hold a slice of every parameter each, and lend it out.

        FSDP, 4 ranks                          HSDP, 2 replicas of 2 shards
        rank 0  [ 1st quarter ]                rank 0  [ 1st half ]     node 0
        rank 1  [ 2nd quarter ]                rank 1  [ 2nd half ]
        rank 2  [ 3rd quarter ]                rank 2  [ 1st half ]     node 1
        rank 3  [ 4th quarter ]                rank 3  [ 2nd half ]

    A slice is of weights, gradients and AdamW alike, so all of them take 1 / shard of DDP's memory.
    A block's weights are gathered just before it computes and dropped after: in forward, and again
    in backward. Its gradients are summed and cut in one reduce-scatter.
    Sends, over shard, a microbatch: all-gather of P w bytes in forward, in one call a block, and in
    backward again, but for embedding, last norm and output, which stay. A step: reduce-scatter of
    P g bytes, in L + 1 calls. HSDP also, over replicate, a step: all-reduce of P g / shard bytes.
    (What is cut is rounded up to a multiple of shard: cost.py counts it all.)

    With several microbatches in a step, `reshard` says what is not kept whole between uses:
        none      weights are gathered once a step, and gradients cut once: the least sent,
                  but 2 copies (w + g bytes a parameter) stay whole on every rank
        weights   gathered for every use, gradients cut once: g bytes a parameter stay whole
        all       gathered for every use, gradients cut in every microbatch: nothing stays
        adapters  of LoRA: the frozen base stays whole on every rank and is never sent; adapters are
                  gathered for every use. DDP, where the base fits, sends still less: choose this
                  where adapters are large, for their gradients and moments are cut
    LoRA in FSDP gathers the whole frozen base for every use, to send a hundredth of it back: that
    is what makes it slower than one process in many frameworks.
    Pays where a copy does not fit on a device. Hurts over a slow link, which all the gathering has
    to cross: there HSDP keeps it within nodes and sends the slices of gradients alone. A mesh that
    is laid out the wrong way round gathers across nodes, and is slower than either.

    Plain DDP with tensor parallelism is the same with shard = 1: it gathers nothing.
    """
    low = split.dtype == torch.bfloat16
    options = dict(
        mesh=mesh,
        mp_policy=MixedPrecisionPolicy(
            param_dtype=torch.bfloat16 if low else None,
            reduce_dtype=torch.float32 if low else None,
            cast_forward_inputs=False,  # cosines and sines stay float32
        ),
        offload_policy=(
            CPUOffloadPolicy(pin_memory=torch.cuda.is_available())
            if split.offload
            else OffloadPolicy()
        ),
    )
    if split.reshard == "adapters":
        options["ignored_params"] = {p for p in model.parameters() if not p.requires_grad}
    for block in model.layers.values():
        fully_shard(block, reshard_after_forward=split.reshard != "none", **options)
    fully_shard(model, reshard_after_forward=False, **options)  # backward needs it at once


def gradient_sync(runner: nn.Module, split: Split, last: bool) -> contextlib.AbstractContextManager:
    """Context of a microbatch's forward and backward: only a step's `last` sends gradients.

    Until then they add up where they are, but for FSDP's slices with reshard = all."""
    if isinstance(runner, FSDPModule):
        runner.set_requires_gradient_sync(last or split.reshard == "all")
        runner.set_requires_all_reduce(last)
        runner.set_reshard_after_backward(last or split.reshard != "none")
    elif isinstance(runner, DistributedDataParallel) and not last:
        return runner.no_sync()
    return contextlib.nullcontext()


def tensor_parallel(model: Llama, mesh: DeviceMesh) -> None:
    """Tensor, sequence and loss parallelism: ranks along tp work on the same tokens, each with a
    part of every matrix; between matrices, each has a part of the sequence.

                       x: T/tp tokens, all of D
        norm                 |                    each rank its tokens
        all-gather           v                    x: all T tokens
        wq wk wv, w1 w3   [ columns ]             results: heads, or numbers of F, of this rank
        attention, SwiGLU    |                    each rank its heads, or its numbers
        wo, w2            [ rows ]                results: a part of a sum, all T tokens
        reduce-scatter       v                    sums: T/tp tokens
        residual             |

    Columns first and rows second: so a pair of products needs one collective before and one after.
    The vocabulary is split too: the embedding gives the sum of what ranks find in their part, and
    the logits never leave the rank that computes them (`loss_parallel`).
    Sends, over tp, with a = B T D w bytes: in forward and again in backward 2 L + 1 all-gathers and
    2 L + 1 reduce-scatters of a, for each chunk of the loss an all-gather of tp numbers a token,
    and a step an all-reduce of each norm's gradient, D numbers.
    Pays within a node, where links are fast: it cuts activations too, and lets more ranks than
    sequences work. Hurts elsewhere: it waits for a collective 4 times a block and pass, whatever
    the batch, and its smaller products use a GPU less well.

    LoRA's factors are cut as their matrix is, along the dimension that they share with it, and one
    of the two stays whole: A beside columns, B beside rows. A rank's share of the low-rank product
    then is a share of, or a part of a sum for, what the matrix makes: it takes the same way at no
    cost. What remains is an all-reduce of each whole factor's gradient a step, as for norms.
    """
    frozen = [name for name, p in model.named_parameters() if not p.requires_grad]
    whole, tokens = Replicate(), Shard(1)
    rows = Rows(output_layouts=tokens, use_local_output=False)
    norm = SequenceParallel(use_local_output=False)
    columns = Columns()
    parallelize_module(
        model,
        mesh,
        {
            "tok_embeddings": RowwiseParallel(
                input_layouts=whole, output_layouts=tokens, use_local_output=False
            ),
            "norm": norm,
            "output": Columns(input_layouts=tokens, output_layouts=whole),
        },
    )
    for block in model.layers.values():
        parallelize_module(
            block,
            mesh,
            {
                "attention_norm": norm,
                "attention": PrepareModuleInput(
                    input_layouts=(tokens, None, None, None, None),  # x, cos, sin, mask, cache
                    desired_input_layouts=(whole, None, None, None, None),
                ),
                "attention.wq": columns,
                "attention.wk": columns,
                "attention.wv": columns,
                "attention.wo": rows,
                "ffn_norm": norm,
                "feed_forward": PrepareModuleInput(
                    input_layouts=(tokens,), desired_input_layouts=(whole,)
                ),
                "feed_forward.w1": columns,
                "feed_forward.w3": columns,
                "feed_forward.w2": rows,
            },
        )
        for module in (block.attention, block.feed_forward):
            module.register_forward_pre_hook(_in_order)
    for name in frozen:  # SequenceParallel makes parameters that learn
        model.get_parameter(name).requires_grad_(False)
    model.tie_weights()  # each got a DTensor of its own
    model.loss = partial(loss_parallel, mesh)
    # The embedding hands on sums that are still on their way, as a tensor of a type of its own. A
    # copy has arrived: block 0 then sees what all see, and one compiled graph serves them all.
    model.tok_embeddings.register_forward_hook(lambda module, inputs, x: x.clone())


class Columns(ColwiseParallel):
    """Columns of Wᵀ for each rank, and what is beside them."""

    def _partition_linear_fn(self, name, module, mesh):
        _cut(module, mesh, {"weight": Shard(0), "lora_A": Replicate(), "lora_B": Shard(0)})


class Rows(RowwiseParallel):
    """Rows of Wᵀ for each rank, and what is beside them."""

    def _partition_linear_fn(self, name, module, mesh):
        _cut(module, mesh, {"weight": Shard(1), "lora_A": Shard(1), "lora_B": Replicate()})


def _cut(layer: nn.Linear, mesh: DeviceMesh, places: dict[str, Placement]) -> None:
    """Place the parameters of a layer on the mesh; one with an adapter computes on local parts."""
    for name, parameter in list(layer.named_parameters()):
        cut = distribute_tensor(parameter, mesh, [places[name]])
        setattr(layer, name, nn.Parameter(cut, requires_grad=parameter.requires_grad))
    if isinstance(layer, LoRALinear):
        columns = places["weight"].is_shard(0)
        x, y = (Replicate(), Shard(2)) if columns else (Shard(2), Partial())  # of [B, T, width]
        weight, A, B = places.values()
        # What every rank has whole gets from each a part of its gradient.
        parts = [Partial() if place.is_replicate() else place for place in (x, weight, A, B)]
        layer.product = local_map(
            layer.product,
            out_placements=[y],
            in_placements=([x], [weight], [A], [B], None, None),
            in_grad_placements=(*([part] for part in parts), None, None),
            device_mesh=mesh,
        )


def _in_order(module: nn.Module, inputs: tuple) -> tuple | None:
    """Tokens [B, T, D] that could not be cut evenly, such as a sample's prompt, are gathered with
    room between rows, which torch 2.11 cannot multiply. A copy has none."""
    x, *others = inputs
    if x.shape[1] % x.device_mesh.size():
        return x.clone(memory_format=torch.contiguous_format), *others


def loss_parallel(mesh: DeviceMesh, hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """cross_entropy_sum with the vocabulary split over `mesh`: no rank holds [tokens, V].

    Each rank takes the logits of its own words. The probability that they have together follows
    from one number a token and rank, the log of the sum of their exponentials.
    hidden [B, T, D] in sequence shards, weight [V, D] in vocabulary shards, targets [B, T].
    """

    def log_share(logits: Tensor) -> Tensor:
        wide = torch.promote_types(logits.dtype, torch.float32)
        own = logits.to(wide).logsumexp(-1)  # [n]
        of_all = DTensor.from_local(own[None], mesh, [Shard(0)]).full_tensor()  # [tp, n] all-gather
        return (own - of_all.logsumexp(0))[:, None]

    hidden = hidden.redistribute(placements=[Replicate()])  # all-gather; backward: reduce-scatter
    first = math.ceil(weight.shape[0] / mesh.size()) * mesh.get_local_rank()
    part = cross_entropy_sum(
        hidden.to_local(grad_placements=[Partial()]), weight.to_local(), targets, first, log_share
    )
    loss = DTensor.from_local(part, mesh, [Partial()]).full_tensor()  # all-reduce of one number
    return loss.clone()  # FSDP wants no view


def recompute_and_compile(model: Llama, checkpointing: str, compile: bool) -> None:
    """Activation checkpointing and torch.compile, of each block, by a forward that wraps its own.

    So parameters keep their names, and FSDP's gathering stays outside. Full checkpointing calls the
    compiled block a second time; selective goes inside, where the compiler sees what to keep. One
    graph serves all blocks, but for the first above a frozen embedding, whose input needs no
    gradient; every shape of the input has its own (`dynamic` would confuse DTensor).
    Compiling joins what lies between the matrix products, and takes a while at the start.
    """
    for name, block in model.layers.items():
        if type(block) is not Block or "forward" in vars(block):
            raise UserError(
                f"block {name} is wrapped already: a second checkpoint around the first would "
                f"compute attention three times; pass parallelize a model as it was built"
            )
        wrappers = []
        if checkpointing != "none":
            wrappers.append(partial(recompute, selective=checkpointing == "selective"))
        if compile:
            torch._dynamo.config.optimize_ddp = False  # which would cut a block at DDP's buckets
            wrappers.append(partial(torch.compile, dynamic=False))
        for wrap in wrappers[::-1] if checkpointing == "full" else wrappers:
            block.forward = wrap(block.forward)


def recompute(forward: Callable, selective: bool) -> Callable:
    """Activation checkpointing: backward computes again what forward then need not keep.

        none         keeps 8 D + 2 KV + 3 F numbers a token         attention runs forward once
        selective    keeps 3 D + KV + F: the block's input, attention's output,           once
                     and every second matrix product
        full         keeps D: the block's input                                          twice

    Full costs another forward, a third more FLOPs, and with FSDP nothing more to send, as backward
    gathers the weights anyway; under tensor parallelism 2 L all-gathers and L reduce-scatters of
    forward run again. Selective costs half of the products, cheap passes, and the 2 L all-gathers.
    Pays when activations are what does not fit; a larger microbatch alone rarely repays it.
    """
    context = {"context_fn": _selection} if selective else {}
    return partial(checkpoint, forward, use_reentrant=False, **context)


def _selection():
    """What one run of a block keeps: attention, and of the matrix products wk, wo and w3, with what
    adapters add. The last, w2, is for backward to skip: nothing behind it needs its result. Under
    tensor parallelism also what a reduce-scatter took time to bring."""
    products = Counter()

    def policy(context, op, *args, **kwargs):
        if "scaled_dot_product" in op.__name__ or "reduce_scatter" in op.__name__:
            return CheckpointPolicy.MUST_SAVE
        if op.__name__ in ("mm.default", "lora_linear.default"):
            products[context.is_recompute] += 1
            if products[context.is_recompute] % 2 == 0:
                return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


# --------------------------------------------------------------------- tensors that lie in shards


def local(tensor: Tensor) -> Tensor:
    """What of a tensor is on this rank, sharing its memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def put_shard(parameter: Tensor, full: Tensor) -> None:
    """Give a parameter its value, of which every rank has the whole and keeps its part.

    tp cuts first and shard cuts what tp left: so the mesh's dimensions go from last to first."""
    if isinstance(parameter, DTensor):
        mesh = parameter.device_mesh
        for dim, placement in reversed(list(enumerate(parameter.placements))):
            if not placement.is_replicate():
                chunks = full.chunk(mesh.size(dim), placement.dim)
                own = mesh.get_local_rank(dim)
                none = full.narrow(placement.dim, 0, 0)  # small sizes may not reach the last rank
                full = chunks[own] if own < len(chunks) else none
    local(parameter).copy_(full)


def squared_norm(gradients: list[Tensor], world: World) -> Tensor:
    """This rank's part of the squared norm of a gradient, so that the sum over all ranks is it.

    Where several ranks hold the same numbers, each counts for as many times less."""
    by_copies = {}
    for gradient in gradients:
        copies = world.size
        if isinstance(gradient, DTensor):
            mesh, placements = gradient.device_mesh, gradient.placements
            sizes = [mesh.size(i) for i, p in enumerate(placements) if p.is_replicate()]
            copies = math.prod(sizes)
        by_copies.setdefault(copies, []).append(local(gradient))
    norms = ((n, torch.nn.utils.get_total_norm(some)) for n, some in by_copies.items())
    return sum(norm.double() ** 2 / n for n, norm in norms)


# ----------------------------------------------------------------------------------- command line


class Parser(argparse.ArgumentParser):
    """argparse whose complaints are a UserError: one line, once, and not a page from every rank."""

    def error(self, message: str) -> None:
        raise UserError(f"{message}; see --help")


def positive(text: str) -> int:
    """Type of a flag that counts something."""
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"expected a whole number above 0, got '{text}'")
    return int(text)


def count(text: str) -> int:
    """Type of a flag that counts something, or has a meaning at 0."""
    return 0 if text == "0" else positive(text)


def amount(text: str) -> float:
    """Type of a flag that measures something."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 <= number < math.inf:
        raise argparse.ArgumentTypeError(f"expected a number of at least 0, got '{text}'")
    return number
