r"""Train a Llama from scratch, or continue from existing weights.

    torchrun train.py                                            the default: minutes on a laptop
    torchrun --nproc-per-node 2 train.py                         the same, on two processes
    torchrun train.py --data my_text/ --model small --out out/mine
    torchrun --nproc-per-node 8 train.py --model llama3.2-1b --tokenizer tokenizer.model \
             --data tokens/ --batch 256 --microbatch 4 --seq-len 8192 --lr 3e-4 --steps 20000

This file is the life of a run, from top to bottom:

    main             flags, data and model, and how the model is split (runs/setup.py)
    train            the loop over steps; evaluations, records and checkpoints between them
    train_step       one step on --batch sequences, divided over the ranks:
      accumulate       forward and backward of each microbatch; gradients add up
      update           divide gradients by all target tokens, clip them, call the optimizer

Metrics go to OUT/metrics.jsonl, one line a step; results to stdout, progress to stderr.
"""

import plumbing.endings  # first, for Ctrl-C during the imports
import argparse
import math
import shlex
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import checkpoint
import evaluate
from parallel import World, gradient_sync, zero_gradients
from plumbing.devices import widest_float
from plumbing.messages import UserError, print_rank_zero
from plumbing.processes import run
from runs import flags, records, setup
from techniques.optimizers import make_optimizer, own_gradients, scale_gradients
from text.batch import Batch


def main() -> None:
    args = flags.parse_pretraining()
    process = setup.setup(args)  # joins the processes that torchrun has started
    job = setup.prepare_pretraining(args, process)  # the data, and a model without memory
    newest = process.broadcast_from_rank_zero(partial(checkpoint.lock_run, args.out, args.resume))
    # build first checks `accumulate`, below, on a small model, then gives each rank its part.
    world, runner, work = setup.build(args, job, process, accumulate)
    sample_text = partial(evaluate.sample_text, job, args.prompt)
    task = evaluate.Prediction(args, job, world, work, sample_text)
    train(task, runner, newest)
    out = shlex.quote(str(args.out))
    print_rank_zero(f"generate:   python generate.py {out} --prompt {shlex.quote(args.prompt)}")
    print_rank_zero(f"curves:     python report.py {out}")


def train(task: evaluate.Prediction, runner: nn.Module, newest: Path | None) -> bool:
    """Train from the `newest` checkpoint, or from step 1 if that is None, to the last step.

    The `task` says what a step trains on, how, and what is measured; `runner` is what a step calls:
    the model, or what parallelize has put around it. Returns False if a signal stopped the run."""
    args, job, world = task.args, task.job, task.world
    optimizer = make_optimizer(job.model, world, args.lr, args.weight_decay)
    task.begin()  # before a checkpoint is loaded
    steps_done = setup.resume(args, newest, job, optimizer)
    if steps_done >= args.steps:
        return True
    print_rank_zero(records.describe_run(args, job.whole, world, job.train_set.sources))
    saver = checkpoint.Saver(args.out, job.model, optimizer, job.tokenizer, vars(args))
    if args.init and args.eval_every and not steps_done:
        task.evaluate_and_show(0)
    steps = [step for step in range(steps_done + 1, args.steps + 1) if step not in args.skip_steps]
    recorder = records.Recorder(args, world, task.work, job.tokenizer, steps_done)
    # A signal ends the run after the step whose `update` exchanges it, or cuts an evaluation short.
    # The saver then waits for a save under way.
    with plumbing.endings.signals_collected(args.time_limit) as stop, saver, recorder:
        for step, batch in zip(steps, task.batches(steps)):
            lr = learning_rate(step, args)
            for group in optimizer.param_groups:
                group["lr"] = lr
            # Dropout is a function of the seed, the step, the rank and the number of ranks.
            torch.manual_seed((args.seed + step * world.size + world.rank) % 2**63)
            totals = train_step(
                runner, optimizer, batch, args.microbatch, args.clip, world, step, stop
            )
            metrics = recorder.measure(step, totals, lr, task.measures(totals))
            recorder.write(metrics)  # a run that resumes from its checkpoint needs it
            is_best, stopped = False, totals.stop
            if step == args.steps or is_due(step, args.save_every, args.steps):
                saver.save(step)  # before the evaluation, which may be long
            if not stopped and is_due(step, args.eval_every, args.steps):
                results, stopped = task.evaluate_and_show(step)
                is_best = recorder.write(metrics | results)
            if is_best or stopped:
                saver.save(step, is_best)
            if stopped:
                break
            recorder.start_step()

    print_rank_zero(f"checkpoint: {saver.newest}")
    if stopped:
        print_rank_zero(f"stopped at step {step}; the same command with --resume goes on")
    plumbing.endings.end_if_restarted(stopped)
    return not stopped


def is_due(step: int, every: int, steps: int) -> bool:
    """Return whether a step is the last or a multiple of `every`; never if that is 0."""
    return every > 0 and (step % every == 0 or step == steps)


def train_step(
    runner: nn.Module,
    optimizer: Optimizer,
    batch: Batch,
    microbatch: int,
    clip: float,
    world: World,
    step: int,
    stop: Sequence[int] = (),
) -> records.Totals:
    """Run one optimizer step on `batch`, this rank's share. Raises UserError as `update` does."""
    loss = accumulate(runner, batch, microbatch, world)
    return update(optimizer, loss, batch, clip, world, step, stop)


def accumulate(runner: nn.Module, batch: Batch, microbatch: int, world: World) -> Tensor:
    """Run forward and backward on each microbatch of this rank; gradients accumulate.

    `runner` is what `parallelize` returned: the model, or DDP, ZeRO-1 or a Pipeline around it. Its
    hooks do all the communication of forward and backward. Returns the sum of the losses, a scalar
    that is still on the device. In a pipeline all stages but the last return 0."""
    microbatches = batch.microbatches(microbatch)
    if world.parallel.pp > 1:
        return runner.accumulate(microbatches)
    loss = torch.zeros((), dtype=widest_float(world.device), device=world.device)
    for i, part in enumerate(microbatches):
        # Ranks sum gradients in the last microbatch alone (with --reshard all: in every one).
        with gradient_sync(world.parallel, runner, last=i == len(microbatches) - 1):
            microbatch_loss = part.loss(runner(*part.inputs, documents=part.documents))
            microbatch_loss.backward()
        loss += microbatch_loss.detach()
    return loss


def update(
    optimizer: Optimizer, loss: Tensor, batch: Batch, clip: float, world: World, step: int, stop=()
) -> records.Totals:
    """Normalize the accumulated gradients by the global number of target tokens, clip them, and
    take an optimizer step.

    Microbatches and ranks may have different numbers of targets. So we add up sums, and divide once
    by the number of targets of the whole batch: a mean of means would weight tokens unequally.
    labs/mean shows the difference.
    `stop` holds the signals that this rank has received; the all-gather tells all ranks. Raises
    UserError on all ranks, before the update, if a loss or the gradient is not finite."""
    gradients, squared_norm = own_gradients(optimizer, world.size)
    tokens = batch.count()
    rows = world.all_gather_scalars(
        [loss, tokens, batch.text_bytes, squared_norm, max(stop, default=0)]
    )
    losses, targets, _, squared_norms, signals = rows.unbind(1)  # [ranks] each
    loss, tokens, text_bytes, *_ = rows.sum(0)
    # Each rank along tp repeats the loss and the targets. Each rank along pp repeats the targets,
    # but only the last one has a loss.
    tp, pp = world.parallel.tp, world.parallel.pp
    loss = loss / tp
    tokens, text_bytes = tokens / (tp * pp), text_bytes / (tp * pp)

    # Backward leaves the mean of n ranks' gradients; ranks along cp count, too. We want their sum
    # divided by all targets: multiply by n / targets. Ranks along tp and pp repeat the targets of
    # another rank: counting them multiplies n and targets alike.
    scale = len(targets) / targets.sum().clamp(min=1)
    norm = squared_norms.sum().sqrt() * scale
    if clip:
        scale = scale * (clip / (norm + 1e-6)).clamp(max=1.0)  # as clip_grad_norm_ does
    scale_gradients(optimizer, gradients, scale)

    # The host waits for the device here and nowhere else, to see before the optimizer's step that
    # all is finite. `health` is finite unless a loss or a gradient is not, or no token is a target.
    health = (losses + squared_norms).sum() / tokens
    results = torch.stack([loss, tokens, text_bytes, norm, signals.max(), health])
    loss, tokens, text_bytes, norm, signals, health = results.tolist()
    if not math.isfinite(health):
        raise UserError(records.describe_not_finite(step, losses))
    optimizer.step()
    zero_gradients(optimizer, world)
    return records.Totals(loss, round(tokens), round(text_bytes), norm, round(signals))


def learning_rate(step: int, args: argparse.Namespace) -> float:
    """Return the learning rate of step 1..args.steps (warmup-stable-decay): linear warmup to
    args.lr, then constant, and linear decay over the last third, to 0 at step args.steps + 1."""
    rise = step / max(args.warmup, 1)
    fall = (args.steps + 1 - step) / (args.steps / 3)
    return args.lr * min(rise, 1, fall)


if __name__ == "__main__":
    run(main)
