r"""Train a Llama from scratch, or continue from existing weights.

    torchrun train.py                                            the default: minutes on a laptop
    torchrun --nproc-per-node 2 train.py                         the same, on two processes
    torchrun train.py --data my_text/ --model small --out out/mine
    torchrun --nproc-per-node 8 train.py --model llama3.2-1b --tokenizer tokenizer.model \
             --data tokens/ --batch 256 --microbatch 4 --seq-len 8192 --lr 3e-4 --steps 20000

A step takes --batch sequences, on any number of processes. Each rank computes its share of them in
microbatches of --microbatch sequences. The life of a batch:

    local_batch      the rank's sequences of this step, a function of (seed, step)
    accumulate       forward and backward of each microbatch; gradients add up
    update           sums over ranks, normalized by the global number of target tokens; optimizer

Metrics go to OUT/metrics.jsonl, one line a step; results to stdout, progress to stderr.
"""

from plumbing.endings import end_if_restarted, signals_collected  # first: Ctrl-C during imports
import argparse
import contextlib
import math
import shlex
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import checkpoint
from config import Work
from costs.search import fits_unsharded
from data import Windows, read_ahead, row_of
from evaluate import describe_exam, evaluate, take_exam
from files.directories import new_link
from generate import generate
from model import IGNORE, Llama
from parallel import World, gradient_sync, unsharded
from plumbing.devices import widest_float
from plumbing.parser import Parser
from plumbing.processes import UserError, print_rank_zero, run
from plumbing.shards import local_squared_norm, to_local
from runs import records
from runs.flags import add_pretraining_flags
from runs.records import Totals
from runs.setup import Job, build, prepare_pretraining, resume, setup
from techniques import diloco
from techniques.context_parallel import share_sequences
from techniques.optimizers import BFloat16AdamW, Muon
from techniques.pipeline import Pipeline
from techniques.zero1 import all_gather_updates, optimizer_parameters, with_gradients
from text.batch import Batch


def parse_args() -> argparse.Namespace:
    parser = Parser(description="Train a Llama.")
    # A new flag belongs in runs/flags.py: bench.py and finetune_lora.py take the same.
    add_pretraining_flags(parser)
    args = parser.parse_args()
    args.out = args.out or Path("out") / (args.model or ("tuned" if args.init else "tiny"))
    return args


# ------------------------------------------------------------------------------ optimizer step


def make_optimizer(model: Llama, args: argparse.Namespace) -> Optimizer:
    """Return Muon or an AdamW; weight decay applies to matrices and not to norms."""
    named = optimizer_parameters(model).items()  # names identify their state in checkpoints
    matrices = [(name, p) for name, p in named if p.ndim >= 2]
    norms = [(name, p) for name, p in named if p.ndim < 2]
    groups = [
        {"params": parameters, "weight_decay": decay}
        for parameters, decay in ((matrices, args.weight_decay), (norms, 0.0))
        if parameters  # an adapter has no norms
    ]
    options = dict(lr=args.lr, betas=(0.9, 0.95))
    if args.optimizer == "muon":
        world = getattr(model, "world", None)  # set by parallelize
        optimizer = Muon(groups, **options, world=world)
    elif args.moments == "bfloat16":
        optimizer = BFloat16AdamW(groups, **options)
    else:
        optimizer = torch.optim.AdamW(groups, **options, fused=True)
    optimizer.register_step_post_hook(all_gather_updates)  # of ZeRO-1's slices; else does nothing
    return optimizer


def learning_rate(step: int, args: argparse.Namespace) -> float:
    """Return the learning rate of step 1..args.steps (warmup-stable-decay): linear warmup to
    args.lr, then constant, and linear decay over the last third, to 0 one step after the last."""
    warmup, decay = step / max(args.warmup, 1), (args.steps + 1 - step) / (args.steps / 3)
    return args.lr * min(warmup, 1, decay)


def train_step(
    runner: nn.Module,
    optimizer: Optimizer,
    batch: Batch,
    microbatch: int,
    clip: float,
    world: World,
    step: int,
    stop: Sequence[int] = (),
) -> Totals:
    """Run one optimizer step on `batch`, this rank's share (text/batch.py). Raises as `update`."""
    loss = accumulate(runner, batch, microbatch, world)
    return update(optimizer, loss, batch, clip, world, step, stop)


def accumulate(runner: nn.Module, batch: Batch, microbatch: int, world: World) -> Tensor:
    """Run forward and backward on each microbatch of this rank; gradients accumulate.

    `runner` is what `parallelize` returned: the model, or DDP or ZeRO-1 around it. Its hooks do all
    the communication of forward and backward. Returns the sum of the losses, a scalar that has not
    left the device; in a pipeline, of the last stage."""
    microbatches = batch.microbatches(microbatch)
    if isinstance(runner, Pipeline):
        return runner.accumulate(microbatches)
    loss = torch.zeros((), dtype=widest_float(world.device), device=world.device)
    for i, part in enumerate(microbatches):
        with gradient_sync(world.parallel, runner, last=i == len(microbatches) - 1):
            microbatch_loss = runner(*part.inputs, documents=part.documents)
            microbatch_loss.backward()
        loss += microbatch_loss.detach()
    return loss


def update(
    optimizer: Optimizer, loss: Tensor, batch: Batch, clip: float, world: World, step: int, stop=()
) -> Totals:
    """Normalize the accumulated gradients by the global number of target tokens, clip them, and
    take an optimizer step.

    Microbatches and ranks may have different numbers of targets, so sums are accumulated and
    divided once, by the number over all of them: a mean of means would weight tokens unequally
    (labs/mean).
    `stop` holds the signals that this rank has received; all ranks learn of them here. Raises
    UserError on all ranks, before the update, if a loss or the gradient is not finite."""
    parameters = with_gradients(optimizer)
    tokens = (batch.targets != IGNORE).sum()
    squared_norm = local_squared_norm(parameters, world.size)
    rows = world.all_gather_scalars(
        [loss, tokens, batch.text_bytes, squared_norm, max(stop, default=0)]
    )
    losses, targets, _, squared_norms, signals = rows.unbind(1)  # of each rank
    loss, tokens, text_bytes, *_ = rows.sum(0)
    tp, pp = world.parallel.tp, world.parallel.pp
    loss = loss / tp  # ranks along tp have the same loss and the same targets
    tokens, text_bytes = tokens / (tp * pp), text_bytes / (tp * pp)  # along pp, the same targets

    # DDP and FSDP have divided the gradients by the number of data ranks, those along cp included,
    # and here we want the sum. Ranks along tp and pp are in both numbers, which makes no difference
    # to their quotient.
    together = world.step_ranks  # all ranks, or DiLoCo's replica: it takes its own step
    scale = len(targets[together]) / targets[together].sum().clamp(min=1)
    norm = squared_norms[together].sum().sqrt() * scale
    if clip:
        scale = scale * (clip / (norm + 1e-6)).clamp(max=1.0)  # as clip_grad_norm_ does
    shards = [to_local(parameter.grad) for parameter in parameters]
    torch._foreach_mul_(shards, scale.to(shards[0]))

    # The host waits for the device here and nowhere else: it must see that all is finite before the
    # optimizer's step. `health` is not finite on any rank if some rank's loss or gradient is not.
    health = (losses + squared_norms).sum() / tokens
    results = torch.stack([loss, tokens, text_bytes, norm, signals.max(), health])
    loss, tokens, text_bytes, norm, signals, health = results.tolist()
    if not math.isfinite(health):
        raise UserError(records.describe_not_finite(step, losses))
    optimizer.step()
    zero_gradients(optimizer, world)
    diloco.outer_step(parameters, world, step)
    return Totals(loss, round(tokens), round(text_bytes), norm, round(signals))


def zero_gradients(optimizer: Optimizer, world: World) -> None:
    """Free the gradients; but set DDP's to zero in place, since they are views of its buckets: if
    they were freed, the next backward would allocate a second copy beside the buckets."""
    in_buckets = world.size > 1 and world.parallel.strategy.wrapper == "ddp"
    optimizer.zero_grad(set_to_none=not in_buckets)


# -------------------------------------------------------------------------------------- the run


def local_batch(args: argparse.Namespace, world: World, dataset: Windows, step: int) -> Batch:
    """Return this rank's share of a step's batch, which is a function of (seed, step)."""
    share = args.batch // world.data_size
    first = (step - 1) * args.batch + world.data_rank * share
    rows = [row_of(first + i, dataset.sources, args.seed) for i in range(share)]
    return share_sequences(dataset.batch(rows), world)


def train(
    args: argparse.Namespace,
    world: World,
    runner: nn.Module,
    work: Work,
    job: Job,
    newest: Path | None,
    sample_text: Callable[[int], str],
) -> bool:
    """Train from the `newest` checkpoint, or from step 1, to the last step; evaluate, save, record.

    `sample_text(step)` returns text to show at evaluations; all ranks call it. Returns False if a
    signal stopped the run before its last step."""
    model, tokenizer = job.model, job.tokenizer
    optimizer = make_optimizer(model, args)
    done = resume(args, newest, job, optimizer)
    if done >= args.steps:
        return True
    print_rank_zero(records.describe_run(args, job.whole, world, job.train_set.sources))
    gather_once = fits_unsharded(work, world)

    def evaluate_and_show(step: int) -> dict[str, float | str]:
        model.eval()
        totals = evaluate(model, job.val_set, args.eval_windows, args.microbatch, world)
        gathered = unsharded(model, world.parallel) if gather_once else contextlib.nullcontext()
        with gathered, torch.compiler.set_stance("force_eager"):  # each new token has its own shape
            text = sample_text(step)
            scores = take_exam(model, job.exam, args.microbatch, world)[0] if job.exam else {}
        model.train()
        print_rank_zero(
            f"step {step}: validation loss {totals.mean_loss:.4f}, "
            f"{totals.bits_per_byte:.4f} bits/byte\n{describe_exam(scores)}{text}"
        )
        losses = dict(val_loss=totals.mean_loss, val_bits_per_byte=totals.bits_per_byte)
        return losses | {"sample": text} | scores

    if args.init and args.eval_every and not done:
        evaluate_and_show(0)
    profiler = args.profile and records.start_profiler(args.out / f"trace-{world.rank}.json")
    saver = checkpoint.Saver(
        args.out, model, optimizer, tokenizer, vars(args), args.keep, args.async_save
    )
    steps = [step for step in range(done + 1, args.steps + 1) if step not in args.skip_steps]
    batches = read_ahead(partial(local_batch, args, world, job.train_set), steps, world.device)
    recorder = records.Recorder(args, world, work, tokenizer, done)
    best = world.broadcast_from_rank_zero(partial(records.best_loss, args.out))
    if args.keep_best:  # try a link: better refused now than at the first best loss
        world.broadcast_from_rank_zero(lambda: new_link(args.out, "best").unlink())
    # A signal ends the run after this step or the next; the saver waits for a save under way.
    with signals_collected(args.time_limit) as stop, saver, recorder:
        for step, batch in zip(steps, batches):
            lr = learning_rate(step, args)
            for group in optimizer.param_groups:
                group["lr"] = lr
            # Dropout is a function of the seed, the step, the rank and the number of ranks.
            torch.manual_seed((args.seed + step * world.size + world.rank) % 2**63)
            totals = train_step(
                runner, optimizer, batch, args.microbatch, args.clip, world, step, stop
            )
            if profiler:
                profiler.step()

            metrics = recorder.measure(step, totals, lr)
            last = step == args.steps or totals.stop
            due = args.eval_every and (step % args.eval_every == 0 or step == args.steps)
            if due and not totals.stop:
                metrics |= evaluate_and_show(step)
            recorder.write(metrics)
            is_best = args.keep_best and metrics.get("val_loss", best) < best
            if last or is_best or (args.save_every and step % args.save_every == 0):
                saved = saver.save(step, is_best)
                best = metrics["val_loss"] if is_best else best
            if last:
                break
            recorder.start_step()

    if profiler:
        profiler.stop()
    print_rank_zero(f"checkpoint: {saved}")
    if totals.stop:
        print_rank_zero(f"stopped at step {step}; the same command with --resume goes on")
    end_if_restarted(totals.stop)
    return not totals.stop


def sample_text(job: Job, prompt: str, step: int) -> str:
    """Return a prompt and how the model continues it."""
    options = dict(temperature=0.8, top_p=0.95, stop=job.tokenizer.stop, seed=step)
    (tokens,) = generate(job.model, [job.tokenizer.encode(prompt, bos=True)], 64, **options)
    return f"--- {prompt}{job.tokenizer.decode(tokens)}\n---"


def main() -> None:
    args = parse_args()
    process = setup(args)
    job = prepare_pretraining(args, process)
    diloco.check_meetings(args)
    newest = process.broadcast_from_rank_zero(partial(checkpoint.lock_run, args.out, args.resume))
    world, runner, work = build(args, job, process, accumulate)
    train(args, world, runner, work, job, newest, partial(sample_text, job, args.prompt))
    out = shlex.quote(str(args.out))
    print_rank_zero(f"generate:   python generate.py {out} --prompt {shlex.quote(args.prompt)}")
    print_rank_zero(f"curves:     python report.py {out}")


if __name__ == "__main__":
    run(main)
