"""Train a Llama from scratch, or go on from weights that exist.

    torchrun train.py                                            the default: minutes on a laptop
    torchrun --nproc-per-node 2 train.py                         the same, on two processes
    torchrun train.py --data my_text/ --model small --out out/mine
    torchrun --nproc-per-node 8 train.py --model llama3.2-1b --tokenizer tokenizer.model \
             --data tokens/ --batch 256 --microbatch 4 --seq-len 8192 --lr 3e-4 --steps 20000

The batch belongs to the experiment: --batch sequences make one step on any number of processes,
cut into microbatches of --microbatch sequences a process. What is measured goes to
OUT/metrics.jsonl, one line a step; results to stdout, progress to stderr.
"""

import argparse
import json
import math
import os
import resource
import shlex
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

import checkpoint
from chat import Packed
from cost import check_split, choose_split, describe, predict_traffic
from data import (
    DEFAULT_TOKENIZER,
    Batch,
    Tokenizer,
    Windows,
    find_shards,
    load_tokenizer,
    open_windows,
    read_ahead,
    tokenizer_of,
    window_of,
)
from lora import LoRA
from model import (
    IGNORE,
    PRESETS,
    Llama,
    LlamaConfig,
    UserError,
    flops_per_token,
    generate,
    peak_flops,
)
from parallel import (
    Parser,
    Split,
    World,
    amount,
    arrange,
    count,
    gradient_sync,
    local,
    parallelize,
    positive,
    put_shard,
    run,
    set_up,
    squared_norm,
)

SIZES = ("dim", "n_layers", "n_heads", "n_kv_heads", "ffn_dim")  # that flags can replace
EXPERIMENT = (
    "data",
    "seq_len",
    "document_mask",
    "batch",
    "steps",
    "lr",
    "warmup",
    "weight_decay",
    "clip",
    "seed",
    "dtype",
    "init",
    "long",
    "train_on_prompt",
)  # that resuming should not change


def parse_args() -> argparse.Namespace:
    parser = Parser(description="Train a Llama.")
    add_pretraining_flags(parser)
    args = parser.parse_args()
    args.out = args.out or Path("out") / (args.model or ("tuned" if args.init else "tiny"))
    return args


def add_pretraining_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of this script: what learns from what, and all that every training needs."""
    # fmt: off
    model = parser.add_argument_group("model")
    model.add_argument("--model", help=f"preset: {', '.join(PRESETS)} (default: tiny)")
    for name in SIZES:
        flag = f"--{name.replace('_', '-')}"
        model.add_argument(flag, type=positive, help="in place of the preset's")
    model.add_argument("--init", type=Path, metavar="DIR",
                       help="start from the weights of a checkpoint, or of Meta's or Hugging "
                            "Face's directory")

    data = parser.add_argument_group("data")
    data.add_argument("--data", nargs="+", default=["python"],
                      help="text files, directories, token shards; python: the standard library")
    data.add_argument("--tokenizer", help=f"name or tokenizer.model (default: the data's own, or "
                                          f"the --init checkpoint's, or {DEFAULT_TOKENIZER})")
    data.add_argument("--seq-len", type=positive, default=256, help="tokens in a sequence")
    data.add_argument("--document-mask", action="store_true",
                      help="no attention across the documents that share a sequence")
    # fmt: on
    add_flags(parser)
    parser.add_argument("--prompt", default="def", help="start of the samples at evaluations")


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of every training script: of a step, its split, its speed, and the run's files."""
    # fmt: off
    step = parser.add_argument_group("optimizer step")
    step.add_argument("--batch", type=positive, default=8, help="sequences a step, in all")
    step.add_argument("--microbatch", type=positive,
                      help="sequences a process takes at a time (default: its whole share)")
    step.add_argument("--steps", type=positive, default=1700)
    step.add_argument("--lr", type=amount, default=5e-3,
                      help="at its peak (default: %(default)s); larger models want less")
    step.add_argument("--warmup", type=count, default=50, help="steps until it is reached")
    step.add_argument("--weight-decay", type=amount, default=0.1, help="of matrices")
    step.add_argument("--clip", type=amount, default=1.0,
                      help="largest norm of the gradient; 0 for any")
    step.add_argument("--seed", type=int, default=0, help="of weights and data order")

    split = parser.add_argument_group("split over processes")
    split.add_argument("--dp", choices=["auto", "ddp", "fsdp", "hsdp"], default="auto",
                       help="how ranks with different sequences share the model (default: by size)")
    split.add_argument("--shard", type=positive,
                       help="ranks that share one copy in hsdp (default: those of a node)")
    split.add_argument("--tp", type=positive, default=1,
                       help="ranks that share every matrix product and the same sequences")
    split.add_argument("--reshard", choices=["auto", "none", "adapters", "weights", "all"],
                       default="auto",
                       help="what fsdp and hsdp do not keep whole between uses; all: gradients "
                            "too; adapters: a frozen base stays (default: weights, or all where "
                            "memory is short)")
    split.add_argument("--offload", action="store_true",
                       help="fsdp, hsdp: keep weights and AdamW in the memory of the CPU")
    split.add_argument("--checkpointing", choices=["none", "selective", "full"], default="none",
                       help="what of the activations backward computes again")

    speed = parser.add_argument_group("speed")
    speed.add_argument("--dtype", choices=["float32", "bfloat16", "float64"],
                       help="of computation (default: bfloat16 on a GPU, float32 elsewhere)")
    speed.add_argument("--compile", action=argparse.BooleanOptionalAction,
                       help="compile the blocks (default: on a GPU)")
    speed.add_argument("--profile", action="store_true",
                       help="write OUT/trace-RANK.json of three steps, for chrome://tracing")

    files = parser.add_argument_group("run")
    files.add_argument("--out", type=Path, help="directory of the run (default: out/NAME)")
    files.add_argument("--resume", action="store_true",
                       help="continue OUT's newest checkpoint, or start where there is none")
    files.add_argument("--save-every", type=count, default=500,
                       help="steps; 0 for the end alone")
    files.add_argument("--async-save", action="store_true",
                       help="train on while a checkpoint is written, from a copy in memory")
    files.add_argument("--keep", type=count, default=2, help="checkpoints to keep, 0 for all")
    files.add_argument("--eval-every", type=count, default=500, help="steps; 0 for never")
    files.add_argument("--eval-windows", type=positive, default=512, help="sequences to evaluate")
    files.add_argument("--log-every", type=positive, default=10, help="steps")
    # fmt: on


def choose_config(args: argparse.Namespace, initial: dict | None) -> LlamaConfig:
    """The model's shape: the --init checkpoint's, or a preset's with what flags replace in it."""
    if args.model and args.model not in PRESETS:
        raise UserError(f"no model '{args.model}': choose one of {', '.join(PRESETS)}")
    sizes = {name: getattr(args, name) for name in SIZES if getattr(args, name)}
    if not initial:
        return replace(PRESETS[args.model or "tiny"], **sizes)
    found = initial["model"]
    wanted = PRESETS[args.model] if args.model else found
    wanted = replace(wanted, vocab_size=found.vocab_size, **sizes)
    if wanted != found:
        differences = checkpoint.differences(found, wanted)
        raise UserError(f"{args.init} has {differences}: leave out --model and its sizes")
    return found


def check(args: argparse.Namespace, config: LlamaConfig, world: World) -> None:
    """Refuse what cannot work, and say what would, before any work is done."""
    if args.seq_len > config.max_seq_len:
        raise UserError(f"--seq-len {args.seq_len} is beyond the model's {config.max_seq_len}")
    check_split(asked_split(args), args.shard, config, world)
    if args.seq_len % args.tp and torch.__version__ < "2.13":
        even = math.ceil(args.seq_len / args.tp) * args.tp
        raise UserError(
            f"torch {torch.__version__} cannot train with --seq-len {args.seq_len} over --tp "
            f"{args.tp}: --seq-len {even} can be cut evenly, or torch 2.13 cuts unevenly"
        )
    parts = world.size // args.tp
    share, rest = divmod(args.batch, parts)
    if rest:
        raise UserError(
            f"--batch {args.batch} cannot be shared by {parts} processes evenly: "
            f"--batch {math.ceil(args.batch / parts) * parts} can"
        )
    if args.microbatch and share % args.microbatch:
        raise UserError(
            f"--batch {args.batch} over {parts} processes is {share} sequences each: no "
            f"multiple of --microbatch {args.microbatch}"
        )
    if args.reshard == "adapters" and "rank" not in args:
        raise UserError("--reshard adapters is for finetune_lora.py: here nothing is frozen")
    if checkpoint.checkpoints(args.out) and not args.resume:
        raise UserError(f"{args.out} holds a run: --resume continues it, another --out keeps it")


def asked_split(args: argparse.Namespace) -> Split:
    """The split as flags ask for it, before its sizes are known."""
    return Split(
        dp=args.dp,
        tp=args.tp,
        reshard=args.reshard,
        checkpointing=args.checkpointing,
        compile=args.compile,
        offload=args.offload,
        dtype=getattr(torch, args.dtype),
    )


def choose_tokenizer(args: argparse.Namespace, initial: dict | None) -> str:
    """As the flag says, or else what the data or the --init weights were made with."""
    if args.tokenizer:
        return args.tokenizer
    if not initial or find_shards(args.data):
        return tokenizer_of(args.data) or DEFAULT_TOKENIZER
    if not initial["tokenizer"]:
        raise UserError(f"{initial['directory']} has no tokenizer.model: give its --tokenizer")
    return initial["tokenizer"]


# ------------------------------------------------------------------------------ one optimizer step


def make_optimizer(model: Llama, lr: float, weight_decay: float) -> torch.optim.AdamW:
    """AdamW in one fused pass; decay pulls matrices towards 0 and leaves norms alone."""
    matrices = [p for p in model.parameters() if p.requires_grad and p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.requires_grad and p.ndim < 2]
    groups = [
        {"params": matrices, "weight_decay": weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), fused=True)


def learning_rate(step: int, peak: float, warmup: int, steps: int) -> float:
    """Of step 1..steps: a straight line up to the peak, then half a cosine down to 0."""
    if step <= warmup:
        return peak * step / warmup
    return peak * (1 + math.cos(math.pi * (step - warmup) / (steps - warmup + 1))) / 2


@dataclass(frozen=True)
class Totals:
    """Sums over the global batch of a step, or over an evaluation."""

    loss: float  # nats
    tokens: int  # target tokens
    text_bytes: int  # of text they stand for
    grad_norm: float = 0.0
    stop: bool = False  # somebody was asked to stop

    @property
    def mean_loss(self) -> float:
        return self.loss / self.tokens

    @property
    def bits_per_byte(self) -> float:
        return self.loss / math.log(2) / max(self.text_bytes, 1)


def accumulate(runner: nn.Module, batch: Batch, microbatch: int, world: World) -> Tensor:
    """Forward and backward of this rank's share of a step, a microbatch at a time. Gradients add
    up, and the last microbatch's backward sends them, as parallel.py describes.

    Returns the sum of the losses, a float64 scalar that has not left the device."""
    loss = torch.zeros((), dtype=torch.float64, device=world.device)
    microbatches = batch.split(microbatch)
    for i, (tokens, targets, positions) in enumerate(microbatches):
        with gradient_sync(runner, world.split, last=i == len(microbatches) - 1):
            part = runner(tokens, targets, positions)
            part.backward()
        loss += part.detach()
    return loss


def update(
    optimizer: torch.optim.Optimizer,
    loss: Tensor,
    batch: Batch,
    clip: float,
    world: World,
    step: int,
    stop: Sequence[int] = (),
) -> Totals:
    """Make of accumulated gradients that of the mean loss over the target tokens of the global
    batch, clip it, and take a step.

    Microbatches and ranks may hold different numbers of targets: sums were accumulated, and are
    divided once, by the count over all of them. `stop` is filled by signals, and all ranks learn of
    it. Raises UserError, on all ranks and before the update, if a loss or the gradient is not
    finite."""
    targets = (batch.targets != IGNORE).sum()
    gradients = [p.grad for group in optimizer.param_groups for p in group["params"]]
    squares = squared_norm(gradients, world)
    rows = world.gather([loss, targets, batch.text_bytes, bool(stop), squares])  # 40 bytes a rank
    loss, targets, text_bytes, stops, squares = rows.sum(0)

    # Gradients hold the average over parts of the batch of summed losses; wanted is sum / targets.
    # Ranks along tp see the same sequences, and count them as often in `targets` as in world.size.
    scale = world.size / targets
    norm = squares.sqrt() * scale
    scale = scale * ((clip or math.inf) / (norm + 1e-6)).clamp(max=1.0)  # as clip_grad_norm_
    mine = [local(gradient) for gradient in gradients]
    torch._foreach_mul_(mine, scale.to(mine[0]))

    # The step's one wait for the device: nothing may be updated before these numbers are known.
    numbers = torch.stack([loss, targets, text_bytes, stops, norm]).tolist()
    loss, targets, text_bytes, stops, norm = numbers
    if not math.isfinite(loss + norm):
        ranks = [rank for rank, row in enumerate(rows.tolist()) if not math.isfinite(row[0])]
        culprit = f"loss on rank {ranks}" if ranks else "norm of the gradient"
        raise UserError(
            f"step {step}: the {culprit} is not finite. Nothing was updated; --resume goes back to "
            f"the last checkpoint, and a lower --lr may help"
        )
    optimizer.step()
    drop_gradients(optimizer, world)
    tp = world.split.tp
    return Totals(loss / tp, round(targets / tp), round(text_bytes / tp), norm, stops > 0)


def drop_gradients(optimizer: torch.optim.Optimizer, world: World) -> None:
    """Let gradients go; but DDP's lie in its buckets, and are set to zero where they are: otherwise
    those of several microbatches would be added up beside it."""
    optimizer.zero_grad(set_to_none=world.split.fully_sharded or world.size == 1)


def train_step(
    runner: nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: Batch,
    microbatch: int,
    clip: float,
    world: World,
    step: int,
    stop: Sequence[int] = (),
) -> Totals:
    """One optimizer step, of which `batch` is this rank's share; raises what `update` does."""
    loss = accumulate(runner, batch, microbatch, world)
    return update(optimizer, loss, batch, clip, world, step, stop)


# ------------------------------------------------------------------------ evaluation and the record


@torch.no_grad()
def evaluate(
    model: Llama, windows: Windows | Packed, limit: int, microbatch: int, world: World
) -> Totals:
    """Loss over at most `limit` windows spread evenly, each rank taking its part of them.

    Every rank runs equally many batches, as a split model demands: rows that are too many are
    filled up without targets."""
    n = min(limit, len(windows))
    chosen = [i * len(windows) // n for i in range(n)] + [None] * (-n % world.data_size)
    mine = chosen[world.data_rank :: world.data_size]
    loss = torch.zeros((), dtype=torch.float64, device=world.device)
    tokens = text_bytes = 0
    for start in range(0, len(mine), microbatch):
        batch = windows.batch(mine[start : start + microbatch]).to(world.device)
        loss += model(batch.tokens, batch.targets, batch.positions)
        tokens += (batch.targets != IGNORE).sum()
        text_bytes += batch.text_bytes
    total = world.gather([loss, tokens, text_bytes]).sum(0) / world.split.tp
    loss, tokens, text_bytes = total.tolist()
    return Totals(loss, round(tokens), round(text_bytes))


def memory_bytes(device: torch.device) -> int:
    """Most memory this process has held: on its GPU, or, without one, in all."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def warn_of_changes(before: dict, now: dict) -> None:
    """Say which flags of an experiment are not what they were when it began."""
    for name in EXPERIMENT:
        if name in before and str(before[name]) != str(now[name]):
            flag = name.replace("_", "-")
            show(f"warning: --{flag} was {before[name]}, is {now[name]}", file=sys.stderr)


def open_run(args: argparse.Namespace, config: LlamaConfig, tokenizer: Tokenizer, done: int):
    """Write OUT/config.json, and return OUT/metrics.jsonl to append to, one object a step.

    A run that continues from step `done` drops the lines that its last process wrote after it."""
    metrics_file = args.out / "metrics.jsonl"
    about = {"model": asdict(config), "tokenizer": tokenizer.name, "data": args.data}
    about |= {"seed": args.seed, "flags": vars(args)}
    write_whole(args.out / "config.json", json.dumps(about, indent=1, default=str))
    lines = metrics_file.read_text().splitlines(keepends=True) if metrics_file.exists() else []
    kept = [line for line in lines if line.endswith("\n") and json.loads(line)["step"] <= done]
    write_whole(metrics_file, "".join(kept))
    return open(metrics_file, "a", buffering=1)


def write_whole(path: Path, text: str) -> None:
    """Replace a file by a new one that is complete: a crash leaves the one or the other."""
    temporary = path.with_name(f".{path.name}")
    temporary.write_text(text)
    os.replace(temporary, path)


def headline(
    args: argparse.Namespace, model: Llama, world: World, learnt: int, sequences: int
) -> str:
    """What is trained on what: of the model, `learnt` numbers; of the data, so many sequences."""
    size = sum(p.numel() for p in model.parameters())
    part = f", of which {learnt / 1e6:,.3f} M learn" if learnt < size else ""
    return (
        f"{args.out}: {size / 1e6:,.2f} M parameters{part}; {args.batch} x {args.seq_len} tokens a "
        f"step, {sequences:,} sequences an epoch; {world.size} process(es) on "
        f"{world.device.type}, {args.dtype}, microbatches of {args.microbatch}"
    )


def progress(row: dict, steps: int, left: float) -> str:
    """One line of a step's numbers; `left` seconds to go."""
    mfu = "unknown" if row["mfu"] is None else f"{row['mfu']:.1%}"
    return (
        f"step {row['step']:>5}/{steps}  loss {row['loss']:.4f}  "
        f"{row['bits_per_byte']:.3f} bits/byte  norm {row['grad_norm']:.2f}  "
        f"{row['tokens_per_second']:,.0f} tokens/s  mfu {mfu}  "
        f"{row['memory_bytes'] / 1e9:.2f} GB  {int(left) // 60}:{int(left) % 60:02d} left"
    )


def start_profiler(path: Path) -> torch.profiler.profile:
    """Record three steps after two of warm-up, and write them for chrome://tracing or Perfetto."""
    profiler = torch.profiler.profile(
        schedule=torch.profiler.schedule(wait=1, warmup=1, active=3, repeat=1),
        on_trace_ready=lambda p: p.export_chrome_trace(str(path)),
    )
    profiler.start()
    return profiler


def show(text: str, **where) -> None:
    """Print on the first rank alone."""
    if dist.get_rank() == 0:
        print(text, flush=True, **where)


# --------------------------------------------------------------------------------------- the loop


def begin(args: argparse.Namespace) -> World:
    """Join the other processes, and settle what the device decides."""
    world = set_up()
    world.agree(vars(args))
    on_gpu = world.device.type == "cuda"
    args.dtype = args.dtype or ("bfloat16" if on_gpu else "float32")
    args.compile = on_gpu if args.compile is None else args.compile
    return world


def split_model(
    args: argparse.Namespace, model: Llama, world: World, fill: Callable[[Llama], None]
) -> tuple[World, nn.Module]:
    """The world in the mesh that flags or sizes ask for, and what a training step calls."""
    share = args.batch * args.tp // world.size  # sequences of a step that are this rank's
    args.microbatch = args.microbatch or share
    microbatches = share // args.microbatch
    tokens = args.microbatch * args.seq_len
    split, why = choose_split(asked_split(args), args.shard, model, world, tokens, microbatches)
    if args.dp == "auto" and world.size > 1:
        show(f"--dp auto takes {split.dp}: {why}")
    if sent := predict_traffic(model, split, microbatches, args.microbatch, args.seq_len):
        show(f"a step sends {describe(sent)}")
    world = arrange(world, split)
    return world, parallelize(model, world, fill)


def share_of_step(
    args: argparse.Namespace, world: World, train_set: Windows | Packed, step: int
) -> Batch:
    """This rank's part of a step's batch, which is a function of (seed, step)."""
    share, n = args.batch // world.data_size, len(train_set)
    first = (step - 1) * args.batch + world.data_rank * share
    return train_set.batch([window_of(first + i, n, args.seed) for i in range(share)])


def fit(
    args: argparse.Namespace,
    world: World,
    model: Llama,
    runner: nn.Module,
    train_set: Windows | Packed,
    val_set: Windows | Packed,
    tokenizer: Tokenizer,
    newest: Path | None,
    samples: Callable[[int], str],
    lora: LoRA | None = None,
) -> bool:
    """Train from the `newest` checkpoint, or the first step, to the last; evaluate, save, record.

    `samples` is called on all ranks at evaluations, and gives text to show. With `lora`, what
    `model` learns and what is saved are adapters. Whether the last step was reached."""
    optimizer = make_optimizer(model, args.lr, args.weight_decay)
    done = 0
    if newest:
        done, flags = checkpoint.resume(newest, model, optimizer, tokenizer, lora)
        show(f"resumed from {newest}")
        warn_of_changes(flags, vars(args))

    # The run's record, on the first rank; its first line on the terminal.
    metrics = open_run(args, model.config, tokenizer, done) if world.rank == 0 else None
    learnt = sum(p.numel() for p in model.parameters() if p.requires_grad)
    show(headline(args, model, world, learnt, len(train_set)))

    read = partial(share_of_step, args, world, train_set)

    def evaluated(step: int) -> dict[str, float]:
        val = evaluate(model, val_set, args.eval_windows, args.microbatch, world)
        with torch.compiler.set_stance("force_eager"):  # every token has a shape of its own
            text = samples(step)
        show(
            f"step {step}: validation loss {val.mean_loss:.4f}, "
            f"{val.bits_per_byte:.4f} bits/byte\n{text}"
        )
        return {"val_loss": val.mean_loss, "val_bits_per_byte": val.bits_per_byte}

    stop = []  # a signal leaves its number here; then the step under way is the last
    for caught in (signal.SIGINT, signal.SIGTERM):
        signal.signal(caught, lambda number, frame: stop.append(number))
    profiler = start_profiler(args.out / f"trace-{world.rank}.json") if args.profile else None
    on_gpu = world.device.type == "cuda"
    peak = peak_flops(torch.cuda.get_device_name()) if on_gpu else None
    flops = flops_per_token(model.config, args.seq_len, learnt if lora else None)
    if lora and args.eval_every and not done:
        evaluated(0)  # of the base, to compare with
    began = clock = time.perf_counter()

    steps = range(done + 1, args.steps + 1)
    saver = checkpoint.Saver(
        args.out, model, optimizer, tokenizer, vars(args), args.keep, args.async_save, lora
    )
    with saver:  # which ends a save that is under way, whatever happens
        for step, batch in zip(steps, read_ahead(read, steps, world.device)):
            lr = learning_rate(step, args.lr, args.warmup, args.steps)
            for group in optimizer.param_groups:
                group["lr"] = lr
            if lora and lora.dropout:  # what it drops is a function of the step, too
                torch.manual_seed((args.seed + step * world.size + world.rank) % 2**63)
            totals = train_step(
                runner, optimizer, batch, args.microbatch, args.clip, world, step, stop
            )
            if profiler:
                profiler.step()

            now = time.perf_counter()
            speed = args.batch * args.seq_len / (now - clock)
            row = {
                "step": step,
                "loss": totals.mean_loss,
                "bits_per_byte": totals.bits_per_byte,
                "grad_norm": totals.grad_norm,
                "lr": lr,
                "tokens": step * args.batch * args.seq_len,
                "seconds": now - clock,
                "tokens_per_second": speed,
                "mfu": peak and flops * speed / (peak * world.size),
                "memory_bytes": memory_bytes(world.device),
            }
            last = step == args.steps or totals.stop
            if last or step == steps[0] or step % args.log_every == 0:
                left = (now - began) / (step - done) * (args.steps - step)
                show(progress(row, args.steps, left), file=sys.stderr)
            due = args.eval_every and (step % args.eval_every == 0 or step == args.steps)
            if due and not totals.stop:
                row |= evaluated(step)
            if metrics:
                print(json.dumps(row), file=metrics)
            if last or (args.save_every and step % args.save_every == 0):
                saved = saver.save(step)
            if last:
                break
            clock = time.perf_counter()

    if profiler:
        profiler.stop()
    if done >= args.steps:
        show(f"{args.out} has done its {args.steps} steps; --steps N goes on")
        return True
    show(f"checkpoint: {saved}")
    if totals.stop:
        show(f"stopped at step {step} of {args.steps}; the same command with --resume goes on")
    return not totals.stop


# -------------------------------------------------------------------------------------- the script


def prepare(args: argparse.Namespace, world: World) -> tuple:
    """What flags ask for: the model, on meta, and how it is filled; the tokenizer, and what to
    learn from and to be judged by."""
    initial = None
    if args.init:
        directory = world.from_first(partial(checkpoint.find_checkpoint, args.init))
        initial = checkpoint.read_config(directory)
    config = choose_config(args, initial)
    check(args, config, world)
    tokenizer = world.one_first(
        "tokenizer", partial(load_tokenizer, choose_tokenizer(args, initial))
    )
    windows = world.one_first(
        "data", partial(open_windows, args.data, tokenizer, args.seq_len, args.document_mask)
    )
    if initial:
        checkpoint.check_tokenizer(initial, tokenizer)
        fill = partial(checkpoint.load_weights, initial["directory"])
    else:
        config = replace(config, vocab_size=tokenizer.vocab_size)
        fill = partial(Llama.init_weights, seed=args.seed, put=put_shard, device=world.device)
    with torch.device("meta"):
        model = Llama(config)
    return model, fill, tokenizer, *windows


def main() -> None:
    args = parse_args()
    world = begin(args)
    model, fill, tokenizer, train_windows, val_windows = prepare(args, world)
    newest = world.from_first(partial(checkpoint.claim, args.out))
    world, runner = split_model(args, model, world, fill)

    def samples(step: int) -> str:
        prompt = [tokenizer.encode(args.prompt, bos=True)]
        (text,) = generate(model, prompt, 64, temperature=0.8, stop=tokenizer.stop, seed=step)
        return f"--- {args.prompt}{tokenizer.decode(text)}\n---"

    fit(args, world, model, runner, train_windows, val_windows, tokenizer, newest, samples)
    show(f"generate:   python generate.py {args.out} --prompt {shlex.quote(args.prompt)}")


if __name__ == "__main__":
    run(main)
