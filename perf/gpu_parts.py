"""What the parts of `bench.py gpu` measure. Each function takes a Case and returns results that are
written as JSON: seconds as quartiles, memory in bytes.

On a CPU the same code runs with a tiny model, as a test."""

import argparse
import contextlib
import gc
import itertools
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

import model as model_module
from costs.machines import peak_flops
from costs.memory import predict_memory
from costs.search import USABLE_FRACTION
from costs.traffic import flops_per_token
from lora import LoRA
from model import PRESETS, Llama, attend, cross_entropy_sum
from parallel import ParallelConfig, World, parallelize, with_mesh
from perf.instruments import build_on_meta, quartiles, random_batch, time_interleaved
from perf.limit import bare_products, flatllama_step, transformers_step
from perf.step import Training, count_step, parts_of_step, plain_step, time_variants
from plumbing.parser import Parser
from plumbing.processes import UserError, init_distributed
from plumbing.shards import assign_shard
from runs.flags import add_optimizer_flags
from techniques.float8 import RECIPES, Float8Linear, float8_product
from techniques.recompute import recompute_and_compile
from text.batch import Documents
from train import make_optimizer, train_step, zero_gradients


class Variant(NamedTuple):
    """A way to compute a training step."""

    checkpointing: str
    compile: bool = False
    float8: str = "none"

    @property
    def name(self) -> str:
        in_8_bits = f", {self.float8}" * (self.float8 != "none")
        how = "compiled" if self.compile else "eager"
        return f"{how}, checkpointing {self.checkpointing}{in_8_bits}"


NONE, FULL, SELECTIVE = Variant("none"), Variant("full"), Variant("selective")
EAGER = (NONE, FULL, SELECTIVE)
COMPILED = tuple(variant._replace(compile=True) for variant in EAGER)
IN_8_BITS = tuple(COMPILED[2]._replace(float8=recipe) for recipe in ("none", *RECIPES[:2]))


@dataclass(frozen=True)
class Case:
    """What a part trains."""

    model: str = ""
    seq_len: int = 4096
    microbatch: int = 1  # sequences
    microbatches: int = 4
    repeats: int = 5  # rounds of all contestants
    moments: str = "float32"  # of AdamW
    variants: tuple[Variant, ...] = EAGER + COMPILED
    checkpointing: str = "none"  # where there is one variant
    with_peers: bool = True  # whether there is room for other programs' models beside ours
    on_gpu: bool = True
    dora: bool = False  # of adapters
    base_bits: int = 16  # beside which they are

    @property
    def args(self) -> argparse.Namespace:
        return Parser.defaults(add_optimizer_flags, lr=1e-4, moments=self.moments)

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self.seq_len * self.microbatch * self.microbatches

    def parallel(self, variant: Variant = NONE) -> ParallelConfig:
        dtype = torch.bfloat16 if self.on_gpu else torch.float32
        return ParallelConfig(dtype=dtype, moments=self.moments, **variant._asdict())


def rehearsed(case: Case) -> Case:
    """Return the same in small, for a CPU."""
    in_8_bits = (v._replace(compile=False) for v in case.variants if v.float8 != "none")
    sizes = dict(seq_len=32, microbatches=2, repeats=1, variants=(*EAGER[:2], *in_8_bits))
    model = "small" if case.base_bits == 4 else "tiny"  # whose rows no blocks divide
    return replace(case, model=model, on_gpu=False, **sizes)


# ----------------------------------------------------------------------------------- the machine


def measure_rates(case: Case) -> dict:
    """Return seconds and rates of the operations that a training step is made of."""
    device, dtype = device_of(case), case.parallel().dtype
    n, T, document, E = (8192, 8192, 1024, 128) if case.on_gpu else (64, 64, 16, 8)
    heads, kv_heads = 32, 8
    random = partial(torch.randn, device=device, dtype=dtype)
    a, b, source = random(n, n), random(n, n), random(n * n * 8)
    target = torch.empty_like(source)
    on_cpu = torch.empty(source.shape, dtype=dtype, pin_memory=case.on_gpu)

    def attention(rows: int, length: int, **options) -> Callable[[], None]:
        q, k, v = (random(rows, h, length, E).requires_grad_() for h in (heads, kv_heads, kv_heads))
        grad = random(rows, heads, length, E)

        def step() -> None:
            keys, values = k, v
            if "attn_mask" in options:
                keys, values = (t.repeat_interleave(heads // kv_heads, 1) for t in (k, v))
            is_causal = "attn_mask" not in options
            out = F.scaled_dot_product_attention(
                q, keys, values, is_causal=is_causal, enable_gqa=is_causal, **options
            )
            torch.autograd.grad(out, (q, k, v), grad)

        return step

    def in_documents() -> Callable[[], None]:
        q, k, v = (random(1, T, h, E).requires_grad_() for h in (heads, kv_heads, kv_heads))
        starts = torch.arange(0, T + 1, document, dtype=torch.int32, device=device)
        documents = Documents(starts, starts, document, document)
        grad = random(1, T, heads, E)

        def step() -> None:
            out = attend(q, k, v, documents)
            torch.autograd.grad(out, (q, k, v), grad)

        return step

    def attention_flops(length: int) -> float:
        """Of T tokens. Forward: two products of 2 * length * E a token and head, of which causality
        leaves half. Backward: 2.5 times as many."""
        return 3.5 * 2 * length * T * heads * E

    mask = torch.block_diag(*[torch.ones(document, document).tril()] * (T // document))
    mask = mask.bool().to(device)[None, None]
    contestants = {
        "matrix product": (lambda: a @ b, 2 * n**3, "FLOP/s"),
        "copy": (lambda: target.copy_(source), 2 * source.nbytes, "bytes/s"),
        "copy to the CPU": (
            lambda: on_cpu.copy_(source, non_blocking=True),
            source.nbytes,
            "bytes/s",
        ),
        "copy from the CPU": (
            lambda: target.copy_(on_cpu, non_blocking=True),
            source.nbytes,
            "bytes/s",
        ),
        f"attention, {T} tokens": (attention(1, T), attention_flops(T), "FLOP/s"),
        f"attention, rows of {document} tokens": (
            attention(T // document, document),
            attention_flops(document),
            "FLOP/s",
        ),
        f"attention in documents of {document}, by a mask": (
            attention(1, T, attn_mask=mask),
            attention_flops(document),
            "FLOP/s",
        ),
    }
    if case.on_gpu:
        contestants[f"attention in documents of {document}, by lengths"] = (
            in_documents(),
            attention_flops(document),
            "FLOP/s",
        )
    times = 10  # at a time, so that the start of the first does not count

    def repeated(operation: Callable[[], object]) -> None:
        for _ in range(times):
            operation()

    steps = {name: partial(repeated, operation) for name, (operation, *_) in contestants.items()}
    seconds, results = time_interleaved(steps, 11), {}
    for name, (_, work, unit) in contestants.items():
        each = [total / times for total in seconds[name]]
        rate = work / statistics.median(each)
        results[name] = {"seconds": quartiles(each), "rate": rate, "unit": unit}
    return results


def measure_loss_chunks(case: Case) -> dict:
    """Return seconds and peak bytes of the loss of 8,192 tokens, with inputs and gradients: of
    PyTorch's, and of ours by LOSS_CHUNK."""
    device, dtype, config = device_of(case), case.parallel().dtype, PRESETS[case.model]
    N, D, V = 8192 if case.on_gpu else 64, config.dim, config.vocab_size
    hidden = torch.randn(N, D, device=device, dtype=dtype, requires_grad=True)
    weight = torch.randn(V, D, device=device, dtype=dtype).mul_(0.02).requires_grad_()
    targets = torch.randint(V, (N,), device=device)

    def plain() -> None:
        loss = F.cross_entropy((hidden @ weight.T).float(), targets, reduction="sum")
        torch.autograd.grad(loss, (hidden, weight))

    def chunked(tokens: int) -> None:
        model_module.LOSS_CHUNK = tokens
        torch.autograd.grad(cross_entropy_sum(hidden, weight, targets), (hidden, weight))

    steps: dict[str, Callable] = {"plain": plain}
    steps |= {str(n): partial(chunked, n) for n in (256, 512, 1024, 2048, 4096)}
    peaks = {name: peak_of(step, device) for name, step in steps.items()}
    seconds = time_interleaved(steps, 5)
    return {name: {"seconds": quartiles(seconds[name]), "peak": peaks[name]} for name in steps}


# -------------------------------------------------------------------------------------- training


def measure_training(case: Case) -> dict:
    """Return what each variant of a training step takes, and what transformers' takes."""
    recipes = [variant.float8 for variant in case.variants if variant.float8 != "none"]
    layers = replace(case.parallel(), float8=recipes[0]) if recipes else None
    training = make_training(case, layers)
    config, device = training.model.config, training.world.device
    batch = next(training.batches)
    steps, peaks, first_calls = {}, {}, {}
    for variant in case.variants:
        step = step_of(training, variant)
        started = time.perf_counter()
        with freed_if_out_of_memory(training):
            peak_of(step, device)  # compiles
            if variant.compile and not first_calls:  # later ones use some of its graphs
                first_calls[variant.name] = time.perf_counter() - started
            peaks[variant.name] = peak_of(step, device)
            steps[variant.name] = step
    if case.with_peers:
        one = random_batch(config, case.microbatch, case.seq_len).to(device)
        bare = bare_products(config, one, training.world.parallel.dtype)
        steps["bare products and attention"] = lambda: [bare() for _ in range(case.microbatches)]
        with contextlib.suppress(UserError):  # not installed
            steps["transformers"] = transformers_step(
                config, training.args, batch, training.world, microbatch=case.microbatch
            )
    seconds, whole = time_interleaved(steps, case.repeats), build_on_meta(config)
    parallel = {variant.name: case.parallel(variant) for variant in case.variants}
    results = {
        name: speeds(case, times, flops_per_token(whole, case.seq_len, parallel.get(name)), config)
        for name, times in seconds.items()
    }
    for variant in case.variants:
        entry = results.setdefault(variant.name, {"error": "out of memory"})
        entry["predicted"] = predicted_peak(case, case.parallel(variant))
        if variant.name in peaks:
            entry["peak"] = peaks[variant.name]
    for name, elapsed in first_calls.items():
        results[name]["compiling"] = elapsed
    return results


def measure_lora(case: Case) -> dict:
    """Return what steps with adapters of rank 16 take: ours, and peft's on transformers' model."""
    world, config, lora = start_world(case), PRESETS[case.model], LoRA(16, 32, dora=case.dora)
    adapters = dict(lora=lora, base_bits=case.base_bits)
    batch = random_batch(config, case.microbatch * case.microbatches, case.seq_len)
    batch = batch.to(world.device)
    makers: dict[str, Callable] = {
        variant.name: partial(flatllama_step, **variant._asdict()) for variant in case.variants
    }
    makers["peft on transformers"] = transformers_step
    steps, peaks = {}, {}
    for name, make in makers.items():
        with contextlib.suppress(UserError, torch.OutOfMemoryError):
            before = torch.cuda.memory_allocated() if case.on_gpu else 0
            step = make(config, case.args, batch, world, microbatch=case.microbatch, **adapters)
            step()  # compiles
            peaks[name] = peak_of(step, world.device) - before
            steps[name] = step
    seconds = time_interleaved(steps, case.repeats)
    flops = flops_per_token(build_on_meta(config, **adapters), case.seq_len)
    results = {name: speeds(case, times, flops, config) for name, times in seconds.items()}
    for variant in case.variants:
        entry = results.setdefault(variant.name, {"error": "out of memory"})
        entry["predicted"] = predicted_peak(case, case.parallel(variant), **adapters)
    for name, peak in peaks.items():
        results[name]["peak"] = peak
    return results


def measure_parts(case: Case) -> dict:
    """Return the parts of a compiled step and what time stamps cost, as bench.py step does."""
    parallel = case.parallel(Variant(case.checkpointing, compile=case.on_gpu))
    training = make_training(case, parallel)
    for _ in range(3):
        plain_step(training, next(training.batches))
    memory, _ = count_step(training)
    rounds = time_variants(training)
    marked, plain = (statistics.median(s["step"] for s in rounds[v]) for v in ("marked", "plain"))
    return {
        "seconds": parts_of_step(rounds, training.dims),
        "memory": memory,
        "predicted": predicted_peak(case, parallel),
        "time stamps": marked / plain - 1,
    }


def measure_largest(case: Case) -> dict:
    """Return the largest microbatch, of 1, 2, 4, ... sequences, that fits, and the predicted."""
    sizes, results = (1, 2, 4, 8, 16, 32, 64) if case.on_gpu else (1, 2), {}
    cases = {size: replace(case, microbatch=size, microbatches=1) for size in sizes}
    for variant in (NONE, FULL):
        parallel = case.parallel(variant)
        training = make_training(cases[1], parallel)
        device, found = training.world.device, 0
        room = math.inf
        if case.on_gpu:
            room = USABLE_FRACTION * torch.cuda.get_device_properties(device).total_memory
        predicted = [n for n in sizes if predicted_peak(cases[n], parallel) < room]
        for size in sizes:
            batch = random_batch(training.model.config, size, case.seq_len).to(device)
            training.args.microbatch = size
            with freed_if_out_of_memory(training):
                plain_step(training, batch)
                found = size
            if found < size:
                break
        results[variant.name] = {"fits": found, "predicted to fit": max(predicted, default=0)}
        del training, batch
        free()
    return results


# ------------------------------------------------------------------------------- shared pieces


def device_of(case: Case) -> torch.device:
    return torch.device("cuda" if case.on_gpu else "cpu")


def start_world(case: Case, parallel: ParallelConfig | None = None) -> World:
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    return with_mesh(init_distributed(), parallel or case.parallel())


def make_training(case: Case, parallel: ParallelConfig | None = None) -> Training:
    """Return a training of the case's model on random tokens."""
    world, model = start_world(case, parallel), build_on_meta(PRESETS[case.model])
    runner = parallelize(model, world, partial(Llama.init_weights, assign=assign_shard))
    args = case.args
    args.microbatch, args.clip, args.repeats = case.microbatch, 1.0, case.repeats
    args.batch, args.seq_len = case.microbatch * case.microbatches, case.seq_len
    batch = random_batch(model.config, args.batch, case.seq_len).to(world.device)
    optimizer = make_optimizer(model, args)
    return Training(args, world, model, runner, optimizer, itertools.repeat(batch))


def step_of(training: Training, variant: Variant) -> Callable[[], None]:
    """Return a step of the same training with other forwards of its blocks. Layers in 8 bits
    multiply as the variant says."""
    blocks, batch = list(training.model.layers.values()), next(training.batches)
    for block in blocks:
        vars(block).pop("forward", None)
    layers = [layer for block in blocks for layer in block.modules()]
    set_hooks = partial(replace_hooks, layers)
    set_hooks([{} for _ in layers])
    recompute_and_compile(training.model, variant.checkpointing, variant.compile)
    product = F.linear
    if variant.float8 != "none":
        product = partial(float8_product, recipe=variant.float8)
    forwards = [block.forward for block in blocks]
    hooks = [dict(layer._forward_pre_hooks) for layer in layers]  # of selective checkpointing
    args, world = training.args, training.world

    def step() -> None:
        for block, forward in zip(blocks, forwards):
            block.forward = forward
        for layer in layers:
            if isinstance(layer, Float8Linear):
                layer.product = product
        set_hooks(hooks)
        train_step(training.runner, training.optimizer, batch, args.microbatch, 1.0, world, step=0)

    return step


def replace_hooks(layers: list[nn.Module], hooks: list[dict]) -> None:
    for layer, of_layer in zip(layers, hooks):
        layer._forward_pre_hooks.clear()
        layer._forward_pre_hooks.update(of_layer)


@contextlib.contextmanager
def freed_if_out_of_memory(training: Training):
    """Within this context, run what may not fit; nothing of it stays in memory then."""
    ran_out = False
    try:
        yield
    except torch.OutOfMemoryError:
        ran_out = True
    if ran_out:  # here the error no longer refers to what was computed
        zero_gradients(training.optimizer, training.world)
        free()


def free() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def peak_of(step: Callable[[], object], device: torch.device) -> int:
    """Return the peak of the GPU's memory while a step runs; 0 on a CPU."""
    if device.type != "cuda":
        step()
        return 0
    torch.cuda.reset_peak_memory_stats(device)
    step()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device)


def predicted_peak(case: Case, parallel: ParallelConfig, **adapters) -> int:
    model, tokens = build_on_meta(PRESETS[case.model], **adapters), case.microbatch * case.seq_len
    return predict_memory(model, parallel, tokens, case.microbatches, fused=case.on_gpu)["peak"]


def speeds(case: Case, times: list[float], flops: int, config) -> dict:
    """Return seconds (quartiles), tokens/s, and MFU: as usual, and with half of attention, which
    is causal."""
    speed = case.tokens / statistics.median(times)
    peak = peak_flops(torch.cuda.get_device_name()) if case.on_gpu else None
    half = 3 * 2 * config.n_layers * config.dim * case.seq_len  # of what flops_per_token counts
    mfu = peak and flops * speed / peak
    causal = peak and (flops - half) * speed / peak
    return {"seconds": quartiles(times), "tokens/s": speed, "mfu": mfu, "causal mfu": causal}


# ------------------------------------------------------------------------------------- the parts

ONE_B = Case("llama3.2-1b", microbatch=2)
EIGHT_B = Case(
    "llama3.1-8b",
    repeats=3,
    moments="bfloat16",
    variants=(*COMPILED, FULL),
    checkpointing="selective",
    with_peers=False,
)
LORA = (NONE, *COMPILED[:2])
LORA_1B, LORA_8B = replace(ONE_B, variants=LORA), Case("llama3.1-8b", repeats=3, variants=LORA)


class Part(NamedTuple):
    measure: Callable[[Case], dict]
    case: Case
    seconds: int  # that it takes, about


def long(case: Case) -> Case:
    """Return the same with as many tokens in sequences of 8,192."""
    if case.microbatch > 1:
        return replace(case, seq_len=8192, microbatch=case.microbatch // 2)
    return replace(case, seq_len=8192, microbatches=case.microbatches // 2)


PARTS = {  # in the order in which they are measured
    "rates": Part(measure_rates, Case(), 20),
    "loss-8b": Part(measure_loss_chunks, EIGHT_B, 15),
    "train-1b-4096": Part(measure_training, ONE_B, 70),
    "train-8b-4096": Part(measure_training, EIGHT_B, 80),
    "lora-8b-4096": Part(measure_lora, LORA_8B, 70),
    "step-8b-4096": Part(measure_parts, EIGHT_B, 40),
    "train-8b-8192": Part(measure_training, long(EIGHT_B), 80),
    "train-1b-8192": Part(measure_training, long(ONE_B), 60),
    "step-1b-4096": Part(measure_parts, ONE_B, 30),
    "largest-1b-4096": Part(measure_largest, ONE_B, 30),
    "largest-8b-4096": Part(measure_largest, EIGHT_B, 40),
    # For a second run: the first ends here, after nine minutes.
    "float8-8b-8192": Part(measure_training, replace(long(EIGHT_B), variants=IN_8_BITS), 80),
    "float8-1b-8192": Part(
        measure_training, replace(long(ONE_B), variants=IN_8_BITS, with_peers=False), 60
    ),
    "lora-8b-4096-nf4": Part(measure_lora, replace(LORA_8B, base_bits=4), 80),
    "lora-8b-4096-dora": Part(measure_lora, replace(LORA_8B, dora=True), 80),
    "lora-8b-8192": Part(measure_lora, long(LORA_8B), 70),
    "lora-1b-4096": Part(measure_lora, LORA_1B, 60),
    "lora-1b-8192": Part(measure_lora, long(LORA_1B), 60),
    "step-1b-8192": Part(measure_parts, long(ONE_B), 30),
    "step-8b-8192": Part(measure_parts, long(EIGHT_B), 40),
    "largest-1b-8192": Part(measure_largest, long(ONE_B), 30),
    "largest-8b-8192": Part(measure_largest, long(EIGHT_B), 40),
    "loss-1b": Part(measure_loss_chunks, ONE_B, 15),
}
