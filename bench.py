"""Measure how fast this is, and how far from what the machine can do.

    python bench.py limit       a training step beside the bare matrix products it cannot do without
    python bench.py lora        a LoRA step beside its bare products, peft's, and a full step
    python bench.py loss        memory of the chunked loss beside the plain one
    torchrun --nproc-per-node 4 bench.py compare one ddp fsdp hsdp [--lora]
                                the same step, split in different ways

Timings on a shared machine wander. So what is compared runs interleaved in one process, and what is
reported is the median of the ratios of neighbours, with the quartiles.
"""

import argparse
import contextlib
import multiprocessing
import statistics
import time
import weakref
from collections.abc import Callable
from dataclasses import replace

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
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
    check_split,
    describe,
    local,
    parallelize,
    positive,
    put_shard,
    run,
    set_up,
)
from train import make_optimizer, memory_bytes, train_step

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

    `sent` is as parallel.predict_traffic gives it: (mesh dimension, collective) -> (calls, bytes);
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
    """Counts the bytes of tensors on this rank, `now` and at their `peak`: of those that an
    operator has touched while it is entered, until they are freed.

    What a kernel needs for itself is not seen, nor is anything within a compiled block."""

    def __init__(self):
        super().__init__()
        self.storages: dict[int, tuple[weakref.ref, int]] = {}  # address -> storage, bytes
        self.now = self.peak = 0

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        if op.namespace in ("fsdp", "c10d"):  # FSDP lends and takes back memory by resizing it
            for address, (storage, _) in list(self.storages.items()):
                self.count(address, storage())
        out = op(*args, **(kwargs or {}))
        for tensor in tree_leaves((args, kwargs, out)):
            if isinstance(tensor, torch.Tensor):
                storage = getattr(local(tensor), "elem", local(tensor)).untyped_storage()
                self.count(storage._cdata, storage)
        self.peak = max(self.peak, self.now)
        return out

    def count(self, address: int, storage: torch.UntypedStorage) -> None:
        if address not in self.storages:
            self.storages[address] = weakref.ref(storage, lambda _: self.forget(address)), 0
        known, nbytes = self.storages[address]
        self.storages[address] = known, storage.nbytes()
        self.now += storage.nbytes() - nbytes

    def forget(self, address: int) -> None:
        self.now -= self.storages.pop(address)[1]


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


def main() -> None:
    args = parse_args()
    measures = {
        "limit": measure_limit,
        "lora": measure_lora,
        "compare": measure_compare,
        "loss": measure_loss,
    }
    result = measures[args.command](args)
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(result)


if __name__ == "__main__":
    run(main)
