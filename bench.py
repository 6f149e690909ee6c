"""Measure how fast this is, and how far from what the machine can do.

    python bench.py limit       a training step beside the bare matrix products it cannot do without
    python bench.py lora        a LoRA step beside its bare products, peft's, and a full step
    python bench.py loss        memory of the chunked loss beside the plain one
    torchrun --nproc-per-node 4 bench.py compare one ddp fsdp hsdp [--lora]
                                the same step, split in different ways
    torchrun --nproc-per-node 4 bench.py comm [--out comm.json]
                                what the links between ranks give

Timings on a shared machine wander. So what is compared runs interleaved in one process, and what is
reported is the median of the ratios of neighbours, with the quartiles.
"""

import argparse
import contextlib
import itertools
import json
import math
import multiprocessing
import statistics
import sys
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from datetime import datetime
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from data import Batch
from lora import LoRA, adapt_loss, add_adapters, init_adapters
from model import PRESETS, Llama, LlamaConfig, UserError, cross_entropy_sum
from parallel import (
    Parser,
    Split,
    World,
    arrange,
    local,
    parallelize,
    positive,
    put_shard,
    run,
    set_up,
)
from plan import check_split, describe
from train import accumulate, make_optimizer, memory_bytes, show, train_step, write_whole

STRATEGIES = "one ddp fsdp fsdp-none fsdp-adapters hsdp wrong tp selective full compiled".split()


def parse_args() -> argparse.Namespace:
    parser = Parser(description="Measure.")
    # fmt: off
    commands = parser.add_subparsers(dest="command", required=True)
    limit = commands.add_parser("limit", help="a training step beside its bare matrix products")
    lora = commands.add_parser("lora", help="a LoRA step beside its bare products, and peft's")
    for command in (limit, lora):
        command.add_argument("--model", default="medium", choices=PRESETS, help="preset")
        command.add_argument("--batch", type=positive, default=4, help="sequences a step")
        command.add_argument("--seq-len", type=positive, default=512, help="tokens in a sequence")
        command.add_argument("--repeats", type=positive, default=11, help="rounds of all")
        command.add_argument("--compile", action="store_true", help="also with compiled blocks")
    lora.add_argument("--rank", type=positive, default=8)
    compare = commands.add_parser("compare", help="the same step, split in different ways")
    compare.add_argument("strategies", nargs="+", metavar="STRATEGY", choices=STRATEGIES,
                         help=f"of {', '.join(STRATEGIES)}; one: the first process alone; "
                              "fsdp-X: with --reshard X; selective, full, compiled: ddp with it")
    compare.add_argument("--model", default="tiny", choices=PRESETS, help="preset")
    compare.add_argument("--batch", type=positive, default=8, help="sequences a step, in all")
    compare.add_argument("--microbatch", type=positive, default=1)
    compare.add_argument("--seq-len", type=positive, default=128, help="tokens in a sequence")
    compare.add_argument("--repeats", type=positive, default=5, help="rounds of all contestants")
    compare.add_argument("--lora", action="store_true", help="train adapters of rank 8")
    loss = commands.add_parser("loss", help="memory of the chunked loss beside the plain one")
    loss.add_argument("--tokens", type=positive, default=4096)
    loss.add_argument("--dim", type=positive, default=512)
    loss.add_argument("--vocab-size", type=positive, default=128_256)
    comm = commands.add_parser("comm", help="what the links between ranks give")
    comm.add_argument("--sizes", nargs="+", type=positive, default=SIZES, metavar="BYTES",
                      help=f"of messages (default: {' '.join(map(str, SIZES))})")
    comm.add_argument("--repeats", type=positive, default=11, help="rounds of all collectives")
    comm.add_argument("--out", type=Path, help="JSON file to write the numbers to, too")
    # fmt: on
    return parser.parse_args()


def interleaved(contestants: dict[str, Callable], repeats: int) -> dict[str, list[float]]:
    """Seconds of every contestant in `repeats` rounds, after one round to warm up."""
    seconds = {name: [] for name in contestants}
    for turn in range(repeats + 1):
        for name, step in contestants.items():
            if dist.is_initialized():
                dist.barrier()  # nobody computes beside a step that is not theirs
            start = time.perf_counter()
            step()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            if turn:
                seconds[name].append(time.perf_counter() - start)
    return seconds


def table(seconds: dict[str, list[float]], tokens: int) -> str:
    """Markdown: each contestant's median time, and its ratio to the first's in the same round."""
    first = next(iter(seconds.values()))
    lines = [
        "| step | seconds | tokens/s | ratio to the first (quartiles) |",
        "|---|--:|--:|--:|",
    ]
    for name, times in seconds.items():
        ratios = [ours / theirs for ours, theirs in zip(times, first)]
        low, middle, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
        median = statistics.median(times)
        ratio = f"{middle:.3f} ({low:.3f}-{high:.3f})"
        lines.append(f"| {name} | {median:.3f} | {tokens / median:,.0f} | {ratio} |")
    return "\n".join(lines)


# ------------------------------------------------------------------------------------ what is sent

# What torch calls them -> what everybody does.
COLLECTIVES = {
    "allreduce_": "all-reduce",
    "all_reduce": "all-reduce",
    "allgather_": "all-gather",
    "_allgather_base_": "all-gather",
    "all_gather_into_tensor": "all-gather",
    "_reduce_scatter_base_": "reduce-scatter",
    "reduce_scatter_tensor": "reduce-scatter",
    "broadcast_": "broadcast",
}


class Counted(TorchDispatchMode):
    """Counts what a rank sends while it is entered, and how often attention runs forward.

    `sent` is as plan.predict_traffic gives it: (mesh dimension, collective) -> (calls, bytes);
    the world of all ranks, where it is no dimension of the mesh, is called so.
    """

    def __init__(self, world: World):
        super().__init__()
        self.dims = {tuple(range(world.size)): "world"}  # ranks that talk -> what they are
        for dim in world.mesh.mesh_dim_names:
            ranks = tuple(dist.get_process_group_ranks(world.mesh.get_group(dim)))
            self.dims[ranks] = dim if len(ranks) > 1 else "nobody"
        self.sent: dict[tuple[str, str], tuple[int, int]] = {}
        self.attentions = 0

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        out = op(*args, **(kwargs or {}))
        name = op._opname
        if op.namespace in ("c10d", "_c10d_functional") and name in COLLECTIVES:
            given = {slot.name: arg for slot, arg in zip(op._schema.arguments, args)}
            if "group_name" in given:
                group = dist.distributed_c10d._resolve_process_group(given["group_name"])
            else:
                group = dist.ProcessGroup.unbox(given["process_group"])
            key = self.dims[tuple(dist.get_process_group_ranks(group))], COLLECTIVES[name]
            calls, nbytes = self.sent.get(key, (0, 0))
            sides = [sum(getattr(t, "nbytes", 0) for t in tree_leaves(s)) for s in (*args, out)]
            self.sent[key] = calls + 1, nbytes + max(sides)
        self.attentions += "scaled_dot_product" in name and not name.endswith("_backward")
        return out


class Live(TorchDispatchMode):
    """Counts the bytes of tensors on this rank, `now` and at their `peak`: of those `held` from the
    start, and those that an operator has touched while it is entered, until they are freed.

    What a kernel needs for itself is not seen, nor is anything within a compiled block."""

    def __init__(self, held: Iterable[Tensor] = ()):
        super().__init__()
        self.storages: dict[int, tuple[weakref.ref, int]] = {}  # address -> storage, bytes
        self.now = self.peak = 0
        self.see(held)

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        if op.namespace in ("fsdp", "c10d"):  # FSDP lends and takes back memory by resizing it
            for address, (storage, _) in list(self.storages.items()):
                self.count(address, storage())
        out = op(*args, **(kwargs or {}))
        self.see(tree_leaves((args, kwargs, out)))
        return out

    def see(self, tensors: Iterable) -> None:
        for tensor in tensors:
            if isinstance(tensor, Tensor):
                storage = getattr(local(tensor), "elem", local(tensor)).untyped_storage()
                self.count(storage._cdata, storage)
        self.peak = max(self.peak, self.now)

    def count(self, address: int, storage: torch.UntypedStorage) -> None:
        if address not in self.storages:
            self.storages[address] = weakref.ref(storage, lambda _: self.forget(address)), 0
        known, nbytes = self.storages[address]
        self.storages[address] = known, storage.nbytes()
        self.now += storage.nbytes() - nbytes

    def forget(self, address: int) -> None:
        self.now -= self.storages.pop(address)[1]


def emulate(
    model: Llama, split: Split, share: int, microbatch: int, seq_len: int
) -> tuple[dict[tuple[str, str], tuple[int, int]], dict[str, int]]:
    """The first rank's part in a step of a whole cluster, in this process alone: what it sent, as
    plan.predict_traffic, and the bytes it held of each kind and at the peak, as plan.memory.

    The other ranks are not there: torch's fake process group sends nothing. And tensors have shapes
    but no contents, so that a laptop holds its part of a model of any size; but for DDP, whose C++
    wants contents. `model` is on `meta`; the rank's share of the step has so many sequences."""
    size = split.replicate * split.shard * split.tp
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
    meta, cpu = torch.device("meta"), torch.device("cpu")
    world = arrange(World(0, size, 0, size, cpu, split, mesh=None), replace(split, compile=False))
    if split.fully_sharded or size == 1:  # FSDP cuts what is still on meta
        runner = parallelize(model, replace(world, device=meta), fill=lambda model: None)
        mode = FakeTensorMode(allow_non_fake_inputs=True)
    else:
        runner = parallelize(model, world, fill=Llama.init_weights)
        runner.register_comm_hook(world.mesh.get_group("replicate"), all_reduce_at_once)
        mode = contextlib.nullcontext()
    with mode:
        if isinstance(mode, FakeTensorMode):
            model.to_empty(device=cpu)
            model.tie_weights()
        optimizer = make_optimizer(model, lr=1e-4, weight_decay=0.1)
        tokens = torch.zeros(share, seq_len, dtype=torch.int64)
        batch = Batch(tokens, tokens, None, text_bytes=1)
        for _ in range(3):  # the first makes AdamW's moments, and DDP settles its buckets in two
            kinds = state_tensors(model, optimizer)
            with Counted(world) as counted, Live(tree_leaves(kinds)) as live:
                accumulate(runner, batch, microbatch, world)
                held = state_bytes(model, optimizer)
                optimizer.step()
                optimizer.zero_grad(set_to_none=split.fully_sharded or size == 1)
    dist.destroy_process_group()
    return counted.sent, held | {"peak": live.peak}


def state_tensors(model: Llama, optimizer: torch.optim.Optimizer) -> dict[str, list[Tensor]]:
    """What a rank holds between steps, by kind."""
    parameters = list(model.parameters())
    moments = [t for state in optimizer.state.values() for t in state.values()]
    gradients = [p.grad for p in parameters if p.grad is not None]
    return {"parameters": parameters, "gradients": gradients, "optimizer": moments}


def state_bytes(model: Llama, optimizer: torch.optim.Optimizer) -> dict[str, int]:
    """The bytes of a rank's part of these."""
    kinds = state_tensors(model, optimizer)
    return {kind: sum(local(t).nbytes for t in tensors) for kind, tensors in kinds.items()}


def all_reduce_at_once(
    group: dist.ProcessGroup, bucket: dist.GradBucket
) -> torch.futures.Future[Tensor]:
    """What DDP does with a bucket, but for waiting: a fake group has no result to wait for."""
    dist.all_reduce(bucket.buffer(), group=group)
    done = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done


# ------------------------------------------------------------------------------------------- limit


def bare_products(
    config: LlamaConfig, batch: int, seq_len: int, device: torch.device, rank: int = 0
) -> Callable:
    """The matrix products and the attention of a training step, with nothing between them.

    Each weight [out, in] is multiplied three times: by its input, and by the gradient of its output
    for that of its input and for its own. With adapters of a `rank` beside all but the output the
    last of these falls away, and both factors, A [r, in] and B [out, r], are multiplied three times
    instead, each in the fastest order of several. What a step takes beyond this is overhead."""
    with torch.device("meta"):
        shapes = [m.weight.shape for m in Llama(config).modules() if isinstance(m, nn.Linear)]
    n = batch * seq_len
    weights = [torch.randn(shape, device=device) for shape in shapes]
    widths = {width for shape in shapes for width in shape} | {rank}
    rows = {width: torch.randn(n, width, device=device) for width in widths}
    factors = {width: torch.randn(rank, width, device=device) for width in widths}
    heads = (config.n_heads, config.n_kv_heads, config.n_kv_heads, config.n_heads)
    q, k, v, grad = (
        torch.randn(batch, seq_len, h, config.head_dim, device=device).transpose(1, 2)
        for h in heads
    )
    q, k, v = (tensor.requires_grad_() for tensor in (q, k, v))

    def step():
        for i, weight in enumerate(weights):
            x, g = rows[weight.shape[1]], rows[weight.shape[0]]
            torch.mm(x, weight.T)
            if not (rank and i < 3):  # nothing below the first wq, wk and wv learns
                torch.mm(g, weight)
            if not rank:
                torch.mm(g.T, x)
            elif i < len(weights) - 1:
                A, B, low = factors[weight.shape[1]], factors[weight.shape[0]], rows[rank]
                for left, right in ((x, A.T), (low, B), (g, B.T), (low, A), (low.T, x), (low.T, g)):
                    torch.mm(left, right)
        for _ in range(config.n_layers):
            out = F.scaled_dot_product_attention(
                q, k, v, is_causal=True, enable_gqa=config.n_heads != config.n_kv_heads
            )
            torch.autograd.grad(out, (q, k, v), grad)

    return step


def our_step(
    config: LlamaConfig,
    batch: Batch,
    world: World,
    compiled: bool = False,
    lora: LoRA | None = None,
) -> Callable:
    """train.py's own step: forward, backward, clipping, fused AdamW."""
    world = arrange(world, replace(world.split, compile=compiled))
    return step_of(config, batch, len(batch.tokens), world, lora)


def step_of(
    config: LlamaConfig, batch: Batch, microbatch: int, world: World, lora: LoRA | None
) -> Callable:
    """The step of a new model, with adapters or without, split as the world says."""
    with torch.device("meta"):
        model = Llama(config)
        if lora:
            add_adapters(model, lora)

    def fill(model: Llama) -> None:
        model.init_weights(put=put_shard)
        init_adapters(model, put=put_shard)

    runner = parallelize(model, world, fill)
    adapt_loss(model)
    optimizer = make_optimizer(model, lr=1e-4, weight_decay=0.1)
    return lambda: train_step(runner, optimizer, batch, microbatch, 1.0, world, step=0)


def transformers_step(
    config: LlamaConfig, batch: Batch, world: World, lora: LoRA | None = None
) -> Callable:
    """The same step with transformers' LlamaForCausalLM, and peft's adapters beside seven matrices
    of a block, with plain PyTorch around it."""
    try:
        import peft
        import transformers
    except ImportError:
        raise UserError("this compares with other packages: pip install -r requirements-dev.txt")
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            hidden_size=config.dim,
            num_hidden_layers=config.n_layers,
            num_attention_heads=config.n_heads,
            num_key_value_heads=config.n_kv_heads,
            intermediate_size=config.ffn_dim,
            vocab_size=config.vocab_size,
            tie_word_embeddings=config.tie_embeddings,
            attn_implementation="sdpa",
            use_cache=False,
        )
    ).to(world.device)
    if lora:
        options = peft.LoraConfig(
            r=lora.rank, lora_alpha=lora.alpha, target_modules="all-linear", task_type="CAUSAL_LM"
        )
        model = peft.get_peft_model(model, options)
    optimizer = make_optimizer(model, lr=1e-4, weight_decay=0.1)

    def step():
        # shift_labels: targets as they are, instead of labels that are shifted once more
        out = model(input_ids=batch.tokens, labels=batch.targets, shift_labels=batch.targets)
        out.loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return out.loss.item()

    return step


def any_batch(args: argparse.Namespace, world: World) -> Batch:
    """Random tokens: how long a step takes does not depend on what they say."""
    vocabulary = PRESETS[args.model].vocab_size
    tokens = torch.randint(vocabulary, (args.batch, args.seq_len + 1), device=world.device)
    return Batch(tokens[:, :-1], tokens[:, 1:].contiguous(), None, text_bytes=1)


def measure_limit(args: argparse.Namespace) -> str:
    world, config = set_up(), PRESETS[args.model]
    batch = any_batch(args, world)
    contestants = {
        "bare matrix products and attention": bare_products(
            config, args.batch, args.seq_len, world.device
        ),
        "transformers": transformers_step(config, batch, world),
        "flatllama": our_step(config, batch, world),
    }
    if args.compile:
        contestants["flatllama, compiled blocks"] = our_step(config, batch, world, compiled=True)
    return table(interleaved(contestants, args.repeats), args.batch * args.seq_len)


# -------------------------------------------------------------------------------------------- LoRA


def measure_lora(args: argparse.Namespace) -> str:
    """Time of a step, and the memory that adapters take to train, each in a process of its own."""
    memory = ["", "| adapters by | peak memory |", "|---|--:|"]
    for name, make in {"peft on transformers": transformers_step, "flatllama": our_step}.items():
        with multiprocessing.get_context("spawn").Pool(1) as pool:  # while this process is small
            peak = pool.apply(lora_peak, (make, args, torch.get_num_threads()))
        memory.append(f"| {name} | {peak / 1e9:.2f} GB |")
    world, config, lora = set_up(), PRESETS[args.model], LoRA(args.rank)
    batch = any_batch(args, world)
    contestants = {
        "bare products of LoRA and attention": bare_products(
            config, args.batch, args.seq_len, world.device, lora.rank
        ),
        "peft on transformers": transformers_step(config, batch, world, lora),
        "flatllama LoRA": our_step(config, batch, world, lora=lora),
        "flatllama, all weights": our_step(config, batch, world),
    }
    if args.compile:
        contestants["flatllama LoRA, compiled blocks"] = our_step(config, batch, world, True, lora)
    return "\n".join(
        [table(interleaved(contestants, args.repeats), args.batch * args.seq_len), *memory]
    )


def lora_peak(make: Callable, args: argparse.Namespace, threads: int) -> int:
    """Bytes that three steps need beyond a process with everything imported, weights included."""
    torch.set_num_threads(threads)
    world, config, lora = set_up(), PRESETS[args.model], LoRA(args.rank)
    batch = any_batch(args, world)
    small = argparse.Namespace(model="tiny", batch=1, seq_len=8)
    make(PRESETS["tiny"], any_batch(small, world), world, lora=lora)()
    before = memory_bytes(world.device)
    step = make(config, batch, world, lora=lora)
    for _ in range(3):
        step()
    return memory_bytes(world.device) - before


# ----------------------------------------------------------------------------------------- compare


def measure_compare(args: argparse.Namespace) -> str:
    """Seconds a step of each strategy in turn, and the payload of a rank as it is counted.

    `wrong` is HSDP in a mesh whose shards lie across nodes and whose replicas within."""
    base, config = set_up(), PRESETS[args.model]
    contestants, sent = {}, {}
    for name in args.strategies:
        world = lay_out(name, base)
        if name == "one" and base.rank > 0:
            contestants[name] = lambda: None
            continue
        check_split(world.split, None, config, world)
        if args.batch % (world.data_size * args.microbatch) or args.seq_len > config.max_seq_len:
            raise UserError(
                f"{name}: {world.data_size} parts of a batch, and --microbatch {args.microbatch}, "
                f"must divide --batch {args.batch}; --seq-len goes to {config.max_seq_len}"
            )
        step = split_step(config, args, world, LoRA() if args.lora else None)
        for _ in range(3):  # DDP settles its buckets in the first two
            # Blocks to compile are not counted: what a mode sees first is never compiled.
            counted = contextlib.nullcontext() if world.split.compile else Counted(world)
            with counted:
                step()
        contestants[name] = step
        sent[name] = "(not counted)" if world.split.compile else describe(counted.sent)
    seconds = interleaved(contestants, args.repeats)
    lines = [f"{name} sends {what}" for name, what in sent.items() if name != "one"]
    return "\n".join([table(seconds, args.batch * args.seq_len), "", *lines])


def lay_out(name: str, base: World) -> World:
    """The world of one of STRATEGIES."""
    size, node = base.size, base.per_node
    if name == "one":
        ranks = torch.zeros(1, 1, 1, dtype=torch.int)
        mesh = DeviceMesh(base.device.type, ranks, mesh_dim_names=base.mesh.mesh_dim_names)
        return replace(base, size=1, split=Split(), mesh=mesh, group=dist.new_group([0]))
    if name in ("hsdp", "wrong"):
        split = Split(dp="hsdp", replicate=size // node, shard=node)
    elif name.startswith("fsdp"):
        reshard = name.removeprefix("fsdp-") if "-" in name else "weights"
        split = Split(dp="fsdp", shard=size, reshard=reshard)
    elif name == "tp":
        split = Split(tp=size)
    else:
        checkpointing = name if name in ("selective", "full") else "none"
        split = Split(replicate=size, checkpointing=checkpointing, compile=name == "compiled")
    world = arrange(base, split)
    if name == "wrong":  # neighbours are replicas, and shards are gathered from all nodes
        ranks = torch.arange(size).view(node, size // node, 1).transpose(0, 1)
        mesh = DeviceMesh(base.device.type, ranks, mesh_dim_names=world.mesh.mesh_dim_names)
        world = replace(world, mesh=mesh)
    return world


def split_step(
    config: LlamaConfig, args: argparse.Namespace, world: World, lora: LoRA | None
) -> Callable:
    share = (args.batch // world.data_size, args.seq_len)
    same_along_tp = torch.Generator().manual_seed(world.data_rank)
    tokens = torch.randint(config.vocab_size, share, generator=same_along_tp).to(world.device)
    batch = Batch(tokens, tokens, None, text_bytes=1)
    return step_of(config, batch, args.microbatch, world, lora)


# -------------------------------------------------------------------------------------------- loss


def measure_loss(args: argparse.Namespace) -> str:
    """Each way in a process of its own, since a process's largest size never shrinks."""
    lines = ["| loss and its backward | peak memory |", "|---|--:|"]
    for name in ("plain", "chunked"):
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            peak = pool.apply(loss_peak, (name, args.tokens, args.dim, args.vocab_size))
        lines.append(f"| {name} | {peak / 1e9:.2f} GB |")
    return "\n".join(lines)


def loss_peak(name: str, tokens: int, dim: int, vocab_size: int) -> int:
    """Bytes that the loss of random hidden states and its gradients need beyond their inputs."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    hidden = torch.randn(tokens, dim, device=device, requires_grad=True)
    weight = torch.randn(vocab_size, dim, device=device, requires_grad=True)
    targets = torch.randint(vocab_size, (tokens,), device=device)
    before = memory_bytes(device)
    if name == "chunked":
        loss = cross_entropy_sum(hidden, weight, targets)
    else:
        loss = F.cross_entropy(hidden @ weight.T, targets, reduction="sum")
    loss.backward()
    return memory_bytes(device) - before


# -------------------------------------------------------------------------------------------- comm

SIZES = [1 << 10, 1 << 14, 1 << 18, 1 << 22, 1 << 25]  # where latency is all, to bandwidth
ALL_PAIRS = 32  # so many ranks are tried each with each


def measure_comm(args: argparse.Namespace) -> str:
    """What the links between ranks give, for people as text and for programs in --out."""
    world = set_up()
    if world.size < 2:
        raise UserError(
            "one process has nobody to talk to: torchrun --nproc-per-node 2 bench.py comm"
        )
    world.agree(vars(args) | {"nproc_per_node": world.per_node})
    if args.out and not world.from_first(args.out.parent.is_dir):
        raise UserError(f"--out {args.out}: there is no directory {args.out.parent}")
    groups = {}
    for name, group in groupings(world).items():
        n = group.size()
        show(f"{name}: {of_ranks(world.size, n)}", file=sys.stderr)
        times = time_collectives(group, sorted(set(args.sizes)), args.repeats, world)
        groups[name] = {"ranks": n, "times": times}
    tried = pairs_to_try(world.size, world.per_node)
    show(f"pairs: {len(tried)}, one after the other", file=sys.stderr)
    pairs = time_pairs(tried, args.repeats, world)
    on_gpu = world.device.type == "cuda"
    report = {
        "device": torch.cuda.get_device_name(world.device) if on_gpu else "cpu",
        "backend": "nccl" if on_gpu else "gloo",
        "ranks": world.size,
        "per_node": world.per_node,
        "torch": str(torch.__version__),
        "date": datetime.now().astimezone().isoformat(timespec="seconds"),
        "groups": groups,
        "pairs": pairs,
    }
    if args.out and world.rank == 0:
        write_whole(args.out, json.dumps(report) + "\n")
    return in_words(report)


def groupings(world: World) -> dict[str, dist.ProcessGroup]:
    """This rank's group of each kind, but for kinds that are the world once more or one rank.

    With 2 nodes of 2 the world is (0 1 2 3), the nodes are (0 1) (2 3), and across: (0 2) (1 3)."""
    groups = {"world": dist.group.WORLD}
    if 1 < world.per_node < world.size:
        nodes = world.size // world.per_node
        mesh = arrange(world, Split(dp="hsdp", replicate=nodes, shard=world.per_node)).mesh
        groups |= {"node": mesh.get_group("shard"), "across": mesh.get_group("replicate")}
    return groups


def time_collectives(
    group: dist.ProcessGroup, sizes: list[int], repeats: int, world: World
) -> dict[str, list[tuple[int, float]]]:
    """(bytes, seconds) of every collective and size, the median of what the slowest rank took.

    All groups of a kind work at once, as they do in training: links that they share are shared."""
    times = {}
    for size in sizes:
        evenly = 4 * group.size()  # float32 numbers, as many for each rank
        nbytes = math.ceil(size / evenly) * evenly
        for name, ours in interleaved(collectives(group, nbytes, world.device), repeats).items():
            slowest = world.gather(ours).amax(0).tolist()
            times.setdefault(name, []).append((nbytes, statistics.median(slowest)))
    return times


def collectives(group: dist.ProcessGroup, nbytes: int, device: torch.device) -> dict[str, Callable]:
    """What is measured, each with a payload of so many bytes; send/recv goes around in a ring."""
    ranks, me = dist.get_process_group_ranks(group), group.rank()
    whole, other = torch.zeros(2, nbytes // 4, device=device)
    part = torch.zeros(len(whole) // len(ranks), device=device)
    after, before = ranks[(me + 1) % len(ranks)], ranks[me - 1]
    # torch 2.13 warns of the older names
    all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
    reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
    ring = (dist.isend, whole, after, group), (dist.irecv, other, before, group)
    return {
        "all-reduce": lambda: dist.all_reduce(whole, group=group),
        "all-gather": lambda: all_gather(whole, part, group=group),
        "reduce-scatter": lambda: reduce_scatter(part, whole, group=group),
        "broadcast": lambda: dist.broadcast(whole, ranks[0], group),
        "send/recv": lambda: exchange(*ring),
    }


def exchange(*transfers: tuple) -> None:
    """Send and receive at once. In a batch NCCL does so over the connections that the group has;
    single sends would open new ones for every pair of ranks."""
    for work in dist.batch_isend_irecv([dist.P2POp(*transfer) for transfer in transfers]):
        work.wait()


def pairs_to_try(size: int, per_node: int) -> list[tuple[int, int]]:
    """All pairs of few ranks; of many, neighbours within a node and across."""
    if size <= ALL_PAIRS:
        return list(itertools.combinations(range(size), 2))
    return sorted({(i, i + step) for step in (1, per_node) for i in range(size - step)})


def time_pairs(
    pairs: list[tuple[int, int]], repeats: int, world: World
) -> list[tuple[int, int, float]]:
    """(i, j, bytes a second) of one message to and fro, pair after pair while the others wait.

    The best of the rounds: a bad link is slow in each, a processor that was busy is not."""
    # Enough that bandwidth shows beside latency; GPUs' faster links need more.
    message = torch.zeros(4 << 20 if world.device.type == "cuda" else 1 << 18, device=world.device)
    seconds = []
    for i, j in pairs:
        both = partial(there_and_back, message, world.rank, i, j)
        best = min(interleaved({"pair": both}, repeats)["pair"])
        seconds.append(best if world.rank == i else 0.0)  # who sends first sees all of it
    seconds = world.gather(seconds).amax(0).tolist()
    return [(i, j, 2 * message.nbytes / took) for (i, j), took in zip(pairs, seconds)]


def there_and_back(message: Tensor, rank: int, i: int, j: int) -> None:
    """The part of a rank in sending a message from i to j and back: of most ranks, none."""
    for source, target in ((i, j), (j, i)):
        if rank == source:
            exchange((dist.isend, message, target))
        elif rank == target:
            exchange((dist.irecv, message, source))


def bus_bandwidth(collective: str, n: int, nbytes: int, seconds: float) -> float:
    """Bytes a second that a link of each rank must carry, as nccl-tests count them.

    Of its payload a rank sends (n - 1)/n in an all-gather or a reduce-scatter, and an all-reduce is
    both; so this compares with the link's nominal speed, and between groups of any size."""
    part = (n - 1) / n
    factors = {"all-reduce": 2 * part, "all-gather": part, "reduce-scatter": part}
    return nbytes / seconds * factors.get(collective, 1.0)


def slow_pairs(
    pairs: list[tuple[int, int, float]], per_node: int
) -> list[tuple[int, int, float, float]]:
    """(i, j, speed, usual speed) of pairs below half of what is usual in a node or across, as the
    case may be; the worst first."""
    kinds = {True: [], False: []}
    for i, j, speed in pairs:
        kinds[i // per_node == j // per_node].append((i, j, speed))
    slow = []
    for kind in filter(None, kinds.values()):
        usual = statistics.median(speed for *_, speed in kind)
        slow += [(i, j, speed, usual) for i, j, speed in kind if speed < usual / 2]
    return sorted(slow, key=lambda pair: pair[2] / pair[3])


def common_rank(pairs: list[tuple]) -> int | None:
    """The one rank that is in most of these pairs, if there is one."""
    (rank, most), (_, next_most) = Counter(r for i, j, *_ in pairs for r in (i, j)).most_common(2)
    return rank if most > max(next_most, len(pairs) / 2) else None


def slow_grouping(groups: dict[str, dict]) -> tuple[str, str, float] | None:
    """(slowest, fastest, how many times slower) by the all-reduce of the largest message."""
    speeds = {
        name: bus_bandwidth("all-reduce", group["ranks"], *group["times"]["all-reduce"][-1])
        for name, group in groups.items()
    }
    slow, fast = min(speeds, key=speeds.get), max(speeds, key=speeds.get)
    return (slow, fast, speeds[fast] / speeds[slow]) if len(speeds) > 1 else None


def in_words(report: dict) -> str:
    lines = [
        f"{report['ranks']} ranks, {report['per_node']} to a node, {report['backend']} on "
        f"{report['device']}. MB/s are bus bandwidth: payload per second, times 2(n-1)/n for an "
        "all-reduce of n ranks, (n-1)/n for all-gather and reduce-scatter, 1 for the others."
    ]
    for name, group in report["groups"].items():
        lines += ["", f"{name}: {of_ranks(report['ranks'], group['ranks'])}", ""]
        lines += comm_table(group["ranks"], group["times"])
    lines += ["", *pairs_in_words(report["pairs"], report["per_node"])]
    if found := slow_grouping(report["groups"]):
        slow, fast, factor = found
        lines.append(f"the slow dimension is {slow}: all-reduce at 1/{factor:.1f} of {fast}'s MB/s")
    return "\n".join(lines)


def of_ranks(size: int, n: int) -> str:
    return f"{size // n} groups of {n} ranks at once" if n < size else f"all {n} ranks"


def comm_table(n: int, times: dict[str, list[tuple[int, float]]]) -> list[str]:
    """Markdown: a row for each size; and below it the latency, which is the smallest one's time."""
    lines = [f"| bytes | {' | '.join(times)} |", "|--:|" + "--:|" * len(times)]
    for row in zip(*times.values()):
        cells = [
            f"{1e3 * seconds:,.3f} ms, {bus_bandwidth(name, n, nbytes, seconds) / 1e6:,.1f} MB/s"
            for name, (nbytes, seconds) in zip(times, row)
        ]
        lines.append(f"| {row[0][0]:,} | {' | '.join(cells)} |")
    latency = (f"{name} {1e3 * rows[0][1]:,.3f} ms" for name, rows in times.items())
    return [*lines, "", f"latency: {', '.join(latency)}"]


def pairs_in_words(pairs: list[tuple[int, int, float]], per_node: int) -> list[str]:
    slow = slow_pairs(pairs, per_node)
    if not slow:
        return ["no pair of ranks is slower than half the median of its kind"]
    lines = [
        f"ranks {i} and {j}: {speed / 1e6:,.1f} MB/s, where {usual / 1e6:,.1f} are usual"
        for i, j, speed, usual in slow[:8]
    ]
    if len(slow) > 8:
        lines.append(f"and {len(slow) - 8} more pairs below half of what is usual")
    if (rank := common_rank(slow)) is not None:
        its = sum(rank in pair[:2] for pair in slow)
        lines.append(f"rank {rank} pairs badly: it is in {its} of these {len(slow)} pairs")
    return lines


def main() -> None:
    args = parse_args()
    measures = {
        "limit": measure_limit,
        "lora": measure_lora,
        "compare": measure_compare,
        "loss": measure_loss,
        "comm": measure_comm,
    }
    result = measures[args.command](args)
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(result)


if __name__ == "__main__":
    run(main)
