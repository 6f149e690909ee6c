"""`bench.py limit`, `lora` and `loss`: how far training is from what the machine can do.

limit    a training step beside transformers' step and the bare matrix products of a step; with
         --operators, where its time goes
lora     a LoRA step beside peft's step and the bare matrix products of a LoRA step
loss     peak memory of the chunked cross-entropy beside PyTorch's

Letters: N tokens of a batch; in, out widths of a weight; r rank of an adapter.
"""

import argparse
import multiprocessing
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from lora import LoRA
from model import PRESETS, LlamaConfig, cross_entropy_sum
from parallel import ParallelConfig, World, with_mesh
from perf.instruments import (
    build_on_meta,
    check_adamw,
    make_step,
    markdown_table,
    random_batch,
    time_interleaved,
    timing_table,
)
from plumbing.processes import UserError, init_distributed
from runs.records import peak_memory
from text.batch import Batch
from train import make_optimizer

# ------------------------------------------------------------------------------ the commands


def measure_limit(args: argparse.Namespace) -> str:
    """Return a table of the times of a full training step; with --operators, one of its parts."""
    world, config = world_of(args), PRESETS[args.model]
    batch = random_batch(config, args.batch, args.seq_len).to(world.device)
    contestants = {
        "bare matrix products and attention": bare_products(config, batch, world.parallel.dtype),
        "transformers": transformers_step(config, args, batch, world),
        "flatllama": flatllama_step(config, args, batch, world),
    }
    if args.compile:
        compiled = flatllama_step(config, args, batch, world, compile=True)
        contestants["flatllama, compiled blocks"] = compiled
    seconds = time_interleaved(contestants, args.repeats)
    lines = timing_table(seconds, args.batch * args.seq_len)
    if args.operators:
        lines += ["", *operator_table(contestants["flatllama"], args.repeats)]
    return "\n".join(lines)


def measure_lora(args: argparse.Namespace) -> str:
    """Return a table of the times of a LoRA step, and one of its peak memory."""
    lora, dora = LoRA(args.rank), LoRA(args.rank, dora=True)
    kinds = {"LoRA": (lora, 16), "DoRA": (dora, 16), "LoRA, base in 4 bits": (lora, 4)}
    steps = {
        f"{whose} {kind}": (make, *adapters)
        for kind, adapters in kinds.items()
        for whose, make in (("peft", transformers_step), ("flatllama", flatllama_step))
    }
    peaks = []
    for name, (make, *adapters) in steps.items():
        peak = in_new_process(lora_peak, make, args, adapters, torch.get_num_threads())
        peaks.append([name, f"{peak / 1e9:.2f} GB"])
    world, config = world_of(args), PRESETS[args.model]
    batch = random_batch(config, args.batch, args.seq_len).to(world.device)
    dtype, given = world.parallel.dtype, (config, args, batch, world)
    contestants = {
        "bare products of LoRA and attention": bare_products(config, batch, dtype, lora.rank)
    }
    contestants |= {name: make(*given, *adapters) for name, (make, *adapters) in steps.items()}
    contestants["flatllama, all weights"] = flatllama_step(*given)
    if args.compile:
        for kind, adapters in kinds.items():
            compiled = flatllama_step(*given, *adapters, compile=True)
            contestants[f"flatllama {kind}, compiled blocks"] = compiled
    times = timing_table(time_interleaved(contestants, args.repeats), args.batch * args.seq_len)
    memory = markdown_table(["adapters by", "peak memory"], peaks)
    return "\n".join([*times, "", *memory])


def measure_loss(args: argparse.Namespace) -> str:
    """Return a table of the peak memory of the loss and its backward."""
    rows = []
    for name in ("plain", "chunked"):
        peak = in_new_process(loss_peak, name, args.tokens, args.dim, args.vocab_size)
        rows.append([name, f"{peak / 1e9:.2f} GB"])
    return "\n".join(markdown_table(["loss and its backward", "peak memory"], rows))


def world_of(args: argparse.Namespace) -> World:
    """Join the other processes, all of them replicas, with the dtypes of the flags."""
    check_adamw(args)
    process = init_distributed()
    options = dict(
        dtype=getattr(torch, args.dtype), optimizer=args.optimizer or "adamw", moments=args.moments
    )
    return with_mesh(process, ParallelConfig(replicate=process.size, **options))


# ------------------------------------------------------------------------------- operators


class OperatorTimes(TorchDispatchMode):
    """Adds up the calls and the seconds of each operator that runs within it."""

    def __init__(self):
        super().__init__()
        self.calls, self.seconds = Counter(), Counter()

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        start = time.perf_counter()
        result = operator(*args, **(kwargs or {}))
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        name = operator.overloadpacket.__name__
        self.calls[name] += 1
        self.seconds[name] += time.perf_counter() - start
        return result


def operator_table(step: Callable[[], object], repeats: int) -> list[str]:
    """Return the lines of a table with the operators of a step that take most time, each with all
    its calls in a step."""
    step()
    with OperatorTimes() as times:
        for _ in range(repeats):
            step()
    total = times.seconds.total()
    rows = [
        [name, times.calls[name] // repeats, f"{1e3 * s / repeats:.1f}", f"{100 * s / total:.1f} %"]
        for name, s in times.seconds.most_common(20)
    ]
    rows.append(["all", times.calls.total() // repeats, f"{1e3 * total / repeats:.1f}", "100 %"])
    return markdown_table(["flatllama's operators", "calls", "milliseconds", "share"], rows)


# ------------------------------------------------------------------------------- contestants


def bare_products(
    config: LlamaConfig, batch: Batch, dtype: torch.dtype, rank: int = 0
) -> Callable[[], None]:
    """Return a function that runs only the matrix products and the attention of a training step.

    The time that a training step takes beyond this is overhead. Each weight [out, in] is in three
    products: output = x Wᵀ, gradient of x = gradient of output W, and gradient of W. With LoRA
    (`rank` above 0) W is frozen and has no gradient; instead, its factors A [r, in] and B [out, r]
    are in three products each. As in training, the output matrix has no adapter."""
    device, (B, T) = batch.tokens.device, batch.tokens.shape
    linears = [m for m in build_on_meta(config).modules() if isinstance(m, nn.Linear)]
    random = partial(torch.randn, device=device, dtype=dtype)
    weights = [random(linear.weight.shape) for linear in linears]
    widths = {width for weight in weights for width in weight.shape} | {rank}
    # Random operands by width: activations or gradients [N, width], factors [r, width].
    rows = {width: random(B * T, width) for width in widths}
    factors = {width: random(rank, width) for width in widths}
    q, k, v, attention_grad = (
        random(B, T, n, config.head_dim).transpose(1, 2).requires_grad_()
        for n in (config.n_heads, config.n_kv_heads, config.n_kv_heads, config.n_heads)
    )

    def step() -> None:
        for i, weight in enumerate(weights):
            x, grad = rows[weight.shape[1]], rows[weight.shape[0]]  # [N, in], [N, out]
            # With LoRA the input of the first wq, wk and wv needs no gradient: what computed it,
            # the embedding, is frozen.
            x_needs_grad = not rank or i >= 3
            torch.mm(x, weight.T)
            if x_needs_grad:
                torch.mm(grad, weight)
            if not rank:
                torch.mm(grad.T, x)
            elif i < len(weights) - 1:  # the last weight is the output matrix
                A, B_transposed = factors[weight.shape[1]], factors[weight.shape[0]]
                low_rank = rows[rank]  # x Aᵀ or its gradient [N, r]
                # Forward, gradients of the inputs, gradients of the factors; each product in the
                # order of operands that is fastest.
                torch.mm(x, A.T)
                torch.mm(low_rank, B_transposed)
                torch.mm(grad, B_transposed.T)
                if x_needs_grad:
                    torch.mm(low_rank, A)
                torch.mm(low_rank.T, x)
                torch.mm(low_rank.T, grad)
        for _ in range(config.n_layers):
            out = F.scaled_dot_product_attention(
                q, k, v, is_causal=True, enable_gqa=config.n_heads != config.n_kv_heads
            )
            torch.autograd.grad(out, (q, k, v), attention_grad)

    return step


def flatllama_step(
    config: LlamaConfig,
    args: argparse.Namespace,
    batch: Batch,
    world: World,
    lora: LoRA | None = None,
    base_bits: int = 16,
    microbatch: int = 0,
    **parallel,
) -> Callable[[], object]:
    """Return train.py's own step: forward, backward, clipping, fused AdamW. `microbatch` sequences
    are computed at a time, by default all; `parallel` are fields of ParallelConfig."""
    world = with_mesh(world, replace(world.parallel, **parallel))
    microbatch = microbatch or len(batch.tokens)
    return make_step(config, args, batch, microbatch, world, lora, base_bits)


def transformers_step(
    config: LlamaConfig,
    args: argparse.Namespace,
    batch: Batch,
    world: World,
    lora: LoRA | None = None,
    base_bits: int = 16,
    microbatch: int = 0,
) -> Callable[[], object]:
    """Return the same step on transformers' LlamaForCausalLM, with peft's adapters beside the
    seven matrices of each block where `lora` is given, and these in bitsandbytes' 4 bits. In
    bfloat16 it computes under autocast, with float32 weights, but for a frozen base."""
    try:
        import peft
        import transformers
    except ImportError:
        raise UserError(
            "this command compares with transformers and peft: pip install -r requirements-dev.txt"
        )
    with torch.device(world.device):
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
        )
    low, device = world.parallel.dtype == torch.bfloat16, world.device
    dtype = torch.bfloat16 if lora and low else torch.float32
    model.to(device, dtype)
    if base_bits == 4:
        into_4_bits(model, dtype)
    if lora:
        options = dict(r=lora.rank, lora_alpha=lora.alpha, use_dora=lora.dora)
        options |= dict(target_modules="all-linear", task_type="CAUSAL_LM")
        model = peft.get_peft_model(model, peft.LoraConfig(**options))
    optimizer = make_optimizer(model, args)

    parts = batch.microbatches(microbatch or len(batch.tokens))

    def step() -> float:
        for part in parts:
            # shift_labels are taken as they are; labels alone would be shifted by one more token.
            labels = dict(labels=part.targets, shift_labels=part.targets)
            with torch.autocast(device.type, torch.bfloat16, enabled=low):
                out = model(input_ids=part.tokens, **labels)
            (out.loss / len(parts)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return out.loss.item()

    return step


def into_4_bits(model: nn.Module, dtype: torch.dtype) -> None:
    """Replace the matrices of transformers' blocks by bitsandbytes' in NF4, as peft expects."""
    try:
        from bitsandbytes.nn import Linear4bit, Params4bit
    except ImportError:
        raise UserError("a base in 4 bits is compared with bitsandbytes: pip install bitsandbytes")
    for name, layer in list(model.model.named_modules()):
        if isinstance(layer, nn.Linear):
            new = Linear4bit(*layer.weight.shape[::-1], False, dtype, quant_type="nf4")
            new.weight = Params4bit(layer.weight.data, requires_grad=False, quant_type="nf4")
            parent, _, attribute = name.rpartition(".")
            setattr(model.model.get_submodule(parent), attribute, new.to(layer.weight.device))
    model.is_loaded_in_4bit = True


# ------------------------------------------------------------------------------- peak memory


def in_new_process(function: Callable[..., int], *args) -> int:
    """Return function(*args), run in a new process: the peak memory of a process never falls.

    Raises its UserError, and EOFError if the process fails otherwise."""
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    context.Process(target=_send_result, args=(sender, function, *args), daemon=True).start()
    sender.close()  # the new process has the only one then, which closes when it ends
    result = receiver.recv()
    if isinstance(result, UserError):
        raise result
    return result


def _send_result(sender: Connection, function: Callable[..., int], *args) -> None:
    try:
        sender.send(function(*args))
    except UserError as error:
        sender.send(error)


def lora_peak(
    make: Callable, args: argparse.Namespace, adapters: tuple[LoRA, int], threads: int
) -> int:
    """Return the bytes that three LoRA steps of the model that `make` builds add to the process.

    A step of a tiny model comes first, so that imports and libraries are loaded already."""
    torch.set_num_threads(threads)
    world, config = world_of(args), PRESETS[args.model]
    tiny = replace(PRESETS["tiny"], dim=128, ffn_dim=256)  # multiples of 64, for 4 bits
    make(tiny, args, random_batch(tiny, 1, 8).to(world.device), world, *adapters)()
    batch = random_batch(config, args.batch, args.seq_len).to(world.device)
    before = peak_memory(world.device)
    step = make(config, args, batch, world, *adapters)
    for _ in range(3):
        step()
    return peak_memory(world.device) - before


def loss_peak(name: str, tokens: int, dim: int, vocab_size: int) -> int:
    """Return the bytes that the loss of random hidden states and its gradients add to its inputs.

    name: "chunked" for cross_entropy_sum, "plain" for PyTorch's cross-entropy."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    hidden = torch.randn(tokens, dim, device=device, requires_grad=True)
    weight = torch.randn(vocab_size, dim, device=device, requires_grad=True)
    targets = torch.randint(vocab_size, (tokens,), device=device)
    before = peak_memory(device)
    if name == "chunked":
        loss = cross_entropy_sum(hidden, weight, targets)
    else:
        loss = F.cross_entropy(hidden @ weight.T, targets, reduction="sum")
    loss.backward()
    return peak_memory(device) - before
