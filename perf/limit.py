"""`bench.py limit`, `lora` and `loss`: how far training is from what the machine can do.

limit    a training step beside transformers' step and the bare matrix products of a step
lora     a LoRA step beside peft's step and the bare matrix products of a LoRA step
loss     peak memory of the chunked cross-entropy beside PyTorch's

With --operators, limit and lora also say where the time of a step goes.
bare_step and transformers_step take what make_step takes: so bench.py compare runs them, too.
Letters: N tokens of a microbatch; in, out widths of a weight; r rank of an adapter.
"""

import multiprocessing
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd import DeviceType

from lora import adapter_settings
from model import PRESETS, Vocabulary, attend
from parallel import World, with_mesh
from perf.instruments import (
    Task,
    build_on_meta,
    check_writable,
    make_step,
    markdown_table,
    quartiles,
    random_batch,
    time_interleaved,
    timing_table,
    write_json,
)
from plumbing.processes import UserError
from runs.records import peak_memory
from techniques import chunked_loss
from text.batch import Batch

# ------------------------------------------------------------------------------ the commands


def measure_limit(task: Task, repeats: int, compile: bool, operators: bool) -> str:
    """Return a table of the times of a full training step. Of a task with adapters it has each kind
    of them, and another table their peak memory. `compile` adds our steps with compiled blocks, and
    `operators` a table of the operators of our first step."""
    config, lora = task.model.config, adapter_settings(task.model)
    bare, theirs, models = "bare matrix products and attention", "transformers", {"": task.model}
    if lora:
        bare, theirs = "bare products of LoRA and attention", "peft"
        models = {
            " LoRA": task.model,
            " DoRA": build_on_meta(config, replace(lora, dora=True)),
            " LoRA, base in 4 bits": build_on_meta(config, lora, base_bits=4),
        }
    steps, peaks = {bare: (bare_step, task)}, {}
    for kind, model in models.items():
        for whose, make in ((theirs, transformers_step), ("flatllama", make_step)):
            name, step = f"{whose}{kind}", (make, replace(task, model=model))
            steps[name] = step
            if lora:
                peaks[name] = in_new_process(lora_peak, *step, torch.get_num_threads())
    if lora:
        steps["flatllama, all weights"] = make_step, replace(task, model=build_on_meta(config))
    world = task.start_world()
    contestants = {name: build(*step, world) for name, step in steps.items()}
    ours = [name for name, (make, _) in steps.items() if make is make_step]
    if compile:
        compiled = with_mesh(world, replace(world.parallel, compile=True))
        contestants |= {f"{name}, compiled blocks": build(*steps[name], compiled) for name in ours}
    lines = timing_table(time_interleaved(contestants, repeats), task.batch * task.seq_len)
    if lora:
        lines += ["", *peak_table("adapters by", peaks)]
    if operators:
        lines += ["", *operator_table(contestants[ours[0]], repeats)]
    return "\n".join(lines)


def measure_loss(
    sizes: tuple[int, int, int], dtype: str, chunks: list[int], repeats: int, out: Path | None
) -> str:
    """Return a table of the peak memory of the loss and its backward, PyTorch's and ours for each
    of `chunks`; write it to --json, which is `out`, with the time of `repeats` rounds.

    sizes: number of target tokens, width, entries of the vocabulary."""
    check_writable({"--json": out})
    default = {"chunked": chunked_loss.tokens_at_a_time(torch.cuda.is_available())}
    losses = {"plain": None} | ({f"chunks of {n}": n for n in chunks} or default)
    given = *sizes, getattr(torch, dtype), repeats
    costs = {name: in_new_process(loss_cost, chunk, *given) for name, chunk in losses.items()}
    write_json(out, costs)
    peaks = {name: cost["peak_bytes"] for name, cost in costs.items()}
    return "\n".join(peak_table("loss and its backward", peaks))


def build(make: Callable, task: Task, world: World) -> Callable[[], object]:
    """Return a task's step on random tokens, as make_step or a function like it makes it."""
    batch = random_batch(task.model.config, task.batch, task.seq_len)
    return make(task, world, batch.to(world.device))


def peak_table(heading: str, peaks: dict[str, int]) -> list[str]:
    rows = [[name, f"{peak / 1e9:.2f} GB"] for name, peak in peaks.items()]
    return markdown_table([heading, "peak memory"], rows)


# ------------------------------------------------------------------------------- operators


def operator_table(step: Callable[[], object], repeats: int) -> list[str]:
    """Return the lines of a table with the operators of a step that take most time, each with all
    its calls in a step. An operator's time is without that of the operators that it calls."""
    step()
    with torch.profiler.profile() as profile:
        for _ in range(repeats):
            step()
    rows = []
    for event in profile.key_averages():
        namespace, _, name = event.key.partition("::")
        if event.device_type == DeviceType.CPU and namespace in ("aten", "flatllama"):
            times = event.self_cpu_time_total, event.self_device_time_total
            microseconds = times[torch.cuda.is_available()]
            rows.append((microseconds / repeats / 1e3, event.count // repeats, name))
    total, calls = (sum(column) for column in list(zip(*rows))[:2])
    table = [
        [name, n, f"{ms:.1f}", f"{100 * ms / total:.1f} %"]
        for ms, n, name in sorted(rows, reverse=True)[:20]
    ]
    table.append(["all", calls, f"{total:.1f}", "100 %"])
    return markdown_table(["flatllama's operators", "calls", "milliseconds", "share"], table)


# ------------------------------------------------------------------------------- contestants


def bare_step(task: Task, world: World, batch: Batch) -> Callable[[], object]:
    """Return a function that runs only the matrix products and the attention of a training step.

    The time that a training step takes beyond this is overhead. Each weight [out, in] is in three
    products: output = x Wᵀ, gradient of x = gradient of output W, and gradient of W. With LoRA W is
    frozen and has no gradient; instead, its factors A [r, in] and B [out, r] are in three products
    each. As in training, the output matrix has no adapter."""
    config, lora = task.model.config, adapter_settings(task.model)
    B, T, rank = task.microbatch, task.seq_len, lora.rank if lora else 0
    linears = [m for m in task.model.modules() if isinstance(m, nn.Linear)]
    random = partial(torch.randn, device=world.device, dtype=world.parallel.dtype)
    weights = [random(linear.out_features, linear.in_features) for linear in linears]
    widths = {width for weight in weights for width in weight.shape} | {rank}
    # Random operands by width: activations or gradients [N, width], factors [r, width].
    rows = {width: random(B * T, width) for width in widths}
    factors = {width: random(rank, width) for width in widths}
    q, k, v, attention_grad = (
        random(B, T, n, config.head_dim).requires_grad_()
        for n in (config.n_heads, config.n_kv_heads, config.n_kv_heads, config.n_heads)
    )

    def compute_microbatch() -> None:
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
            torch.autograd.grad(attend(q, k, v, None), (q, k, v), attention_grad)

    return lambda: [compute_microbatch() for _ in range(len(batch.tokens) // B)]


def transformers_step(task: Task, world: World, batch: Batch) -> Callable[[], float]:
    """Return the same step on transformers' LlamaForCausalLM, with peft's adapters beside the
    seven matrices of each block where the task has them, and these in bitsandbytes' 4 bits. In
    bfloat16 it computes under autocast, with float32 weights, but for a frozen base."""
    try:
        import peft
        import transformers
    except ImportError:
        raise UserError(
            "this command compares with transformers and peft: pip install -r requirements-dev.txt"
        )
    config, lora = task.model.config, adapter_settings(task.model)
    described = transformers.LlamaConfig(
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
    with torch.device(world.device):
        model = transformers.LlamaForCausalLM(described)
    low, device = world.parallel.dtype == torch.bfloat16, world.device
    dtype = torch.bfloat16 if lora and low else torch.float32
    model.to(device, dtype)
    if any(p.dtype == torch.uint8 for p in task.model.parameters()):
        into_4_bits(model, dtype)
    if lora:
        options = dict(r=lora.rank, lora_alpha=lora.alpha, use_dora=lora.dora)
        options |= dict(target_modules="all-linear", task_type="CAUSAL_LM")
        model = peft.get_peft_model(model, peft.LoraConfig(**options))
    optimizer, parts = task.optimizer_of(model), batch.microbatches(task.microbatch)

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


def in_new_process(function: Callable, *args):
    """Return function(*args), run in a new process: the peak memory of a process never falls.

    Raises its UserError, one if a GPU's memory does not suffice, and EOFError if the process fails
    otherwise. The semaphores of an executor would make Python warn after Ctrl-C."""
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    context.Process(target=_send_result, args=(sender, function, *args), daemon=True).start()
    sender.close()  # the new process has the only one then, which closes when it ends
    result = receiver.recv()
    if isinstance(result, UserError):
        raise result
    return result


def _send_result(sender: Connection, function: Callable, *args) -> None:
    try:
        sender.send(function(*args))
    except (UserError, torch.OutOfMemoryError) as error:
        sender.send(UserError(error))


def lora_peak(make: Callable, task: Task, threads: int) -> int:
    """Return the bytes that three LoRA steps of the model that `make` builds add to the process.

    A step of a tiny model comes first, so that imports and libraries are loaded already."""
    torch.set_num_threads(threads)
    world = task.start_world()
    # Multiples of 64, for 4 bits.
    config = replace(PRESETS["tiny"], dim=128, ffn_dim=256, head_dim=0)
    tiny = build_on_meta(config, adapter_settings(task.model), base_bits=4)
    build(make, replace(task, model=tiny, batch=1, microbatch=1, seq_len=8), world)()
    before = peak_memory(world.device)
    step = build(make, task, world)
    for _ in range(3):
        step()
    return peak_memory(world.device) - before


def loss_cost(
    chunk: int | None, tokens: int, dim: int, vocab_size: int, dtype: torch.dtype, repeats: int
) -> dict:
    """Return the peak bytes that the loss of random hidden states and its gradients add to its
    inputs, and with `repeats` the quartiles of its seconds: of chunked_loss with `chunk`
    tokens at a time, or of PyTorch's cross-entropy."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    random = partial(torch.randn, device=device, dtype=dtype, requires_grad=True)
    hidden, weight = random(tokens, dim), random(vocab_size, dim)
    targets = torch.randint(vocab_size, (tokens,), device=device)
    chunked_loss.LOSS_CHUNK = chunked_loss.LOSS_CHUNK_ON_GPU = chunk
    vocabulary = Vocabulary(vocab_size)

    def step() -> None:
        if chunk:
            loss = chunked_loss.chunked_loss(hidden, weight, targets, vocabulary)
        else:
            loss = F.cross_entropy((hidden @ weight.T).float(), targets, reduction="sum")
        torch.autograd.grad(loss, (hidden, weight))

    before = peak_memory(device)
    step()
    cost = {"peak_bytes": peak_memory(device) - before}
    if repeats:
        cost["seconds"] = quartiles(time_interleaved({"loss": step}, repeats)["loss"])
    return cost
