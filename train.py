r"""Train a Llama from scratch, or continue from existing weights.

    torchrun train.py                                            the default: minutes on a laptop
    torchrun --nproc-per-node 2 train.py                         the same, on two processes
    torchrun train.py --data my_text/ --model small --out out/mine
    torchrun --nproc-per-node 8 train.py --model llama3.2-1b --tokenizer tokenizer.model \
             --data tokens/ --batch 256 --microbatch 4 --seq-len 8192 --steps 20000

This file is the life of a run, from top to bottom:

    main             flags, data and model (runs/setup.py)
    split            how the model is split over the ranks, and each rank's part of it
    train            the loop over steps, each on --batch sequences, divided over the ranks:
      accumulate       forward and backward of each microbatch; gradients add up
      update           divide gradients by all target tokens, clip them, call the optimizer
      end_step         record, save and evaluate

The loop works with seven objects:

    Run      what was asked: the flags                       runs/flags.py
    Job      the model and the data                          runs/setup.py
    World    this process, and its place in the mesh         parallel.py
    Work     the sizes of a step, and how it is split        config.py
    Task     what a step trains on, and its loss             runs/task.py
    Steps    those still to take, and what each reads        text/order.py
    Totals   the results of an update, over all ranks        config.py

Metrics go to OUT/metrics.jsonl, one line a step; results to stdout, progress to stderr.
"""

import plumbing.endings  # first, for Ctrl-C during the imports
import math
import shlex
import sys
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from checkpoint import Saver, lock_run
from config import ParallelConfig, Totals, Work
from files.directories import checkpoints
from parallel import World, gradient_sync, parallelize, zero_gradients
from plumbing import processes
from plumbing.devices import widest_float
from plumbing.flags import values_of
from plumbing.messages import UserError, print_rank_zero
from plumbing.parser import parse
from plumbing.processes import Process
from runs import records, setup
from runs.flags import Run, flags_of_pretraining
from runs.task import Task, sample_text
from techniques.optimizers import make_optimizer, own_gradients, scale_gradients
from text.batch import Batch
from text.order import Steps


def main() -> None:
    run = parse(flags_of_pretraining(sys.argv[1:]))
    run.check()
    process, parallel = setup.join(run)  # with the processes that torchrun has started
    job = setup.prepare_pretraining(run, parallel, process)  # the data, the model on meta
    if process.rank == 0:
        lock_run(run.directory, run.resume)
    world, runner, work = split(run, parallel, job, process)
    task = Task(run, job, world, work, partial(sample_text, job, run.prompt))
    train(task, runner)
    out = shlex.quote(str(run.directory))
    print_rank_zero(f"generate:   python generate.py {out} --prompt {shlex.quote(run.prompt)}")
    print_rank_zero(f"curves:     python report.py {out}")


def split(
    run: Run, parallel: ParallelConfig, job: setup.Job, process: Process
) -> tuple[World, nn.Module, Work]:
    """Choose how to split a step, and give each rank its part of the model. Return the World, what
    a training step calls, and the step's work. Before that a small copy of the model takes a step
    by `accumulate`, split and whole (runs/equal.py): so a change of model.py that cannot be split
    is refused."""
    world, work = setup.choose_split(run, parallel, job, process)
    setup.check_and_describe(job, work, world, accumulate)
    runner = parallelize(job.model, world, job.initialize)
    setup.check_equal_replicas(job.model, world)
    return world, runner, work


def train(task: Task, runner: nn.Module) -> bool:
    """Train to the last step, from the newest checkpoint that is not damaged, or from step 1.

    The `task` says what a step trains on, how, and what is measured; `runner` is what a step calls:
    the model, or what parallelize has put around it. A plain Task has one update a step, the
    model's own loss, and divides it by the number of targets. Returns False if a signal stopped the
    run."""
    run, job, world, work = task.run, task.job, task.world, task.work
    optimizer = make_optimizer(job.model, world, job.lr, run.weight_decay, run.betas)
    saved = world.broadcast_from_rank_zero(partial(checkpoints, run.directory))
    steps = setup.steps_of(run, job, work, saved)
    unevaluated = unevaluated_step(run, steps, world)
    is_over = steps.done >= steps.last and not unevaluated
    if not is_over:  # the model has the base's weights until `resume`
        task.begin(steps)
    setup.resume(steps, run, job, optimizer)
    if is_over:
        return True
    sources = job.train_set.sources
    print_rank_zero(records.describe_run(run, work, world, steps.last, sources, job.lr))
    facts = setup.facts_of(job, work, steps)
    saver = Saver(
        run.directory,
        job.model,
        optimizer,
        job.tokenizer,
        values_of(run),
        facts,
        steps.checkpoint,
    )
    if run.init and run.eval_every and not steps.done:
        task.evaluate_and_show(0)  # only shown: the model before its first step
    recorder = records.Recorder(run, world, work, steps, job.tokenizer, facts)
    # Ranks tell each other of signals in `update`: the run ends after that step, an evaluation ends
    # at once. The saver then waits for a save under way.
    with plumbing.endings.signals_collected(run.time_limit), saver, recorder:
        step, signal = steps.done, 0
        if unevaluated:
            # It saves nothing new: the step has been saved.
            signal = end_step(task, unevaluated, 0, recorder, saver, steps.last)
        to_do = [] if signal else steps.to_do
        # A batch is this rank's share of a step's sequences. To make it may take a forward of the
        # base (preferences.py), or answers (rewards.py).
        for step, batch in zip(to_do, task.batches(steps)):
            lr = learning_rate(step, steps.last, job.lr, run)
            for group in optimizer.param_groups:
                group["lr"] = lr
            # Dropout is a function of the seed, the step, the rank and the number of ranks.
            torch.manual_seed((run.seed + step * world.size + world.rank) % 2**63)
            for part in task.parts(batch):  # one, but for rewards.py --updates
                loss = accumulate(runner, part, work.microbatch, world, task.loss)
                count, sizes = task.count(part), task.sizes(part)
                totals = update(optimizer, loss, count, sizes, run.clip, world, step)
            # Loss, count and norm are the last part's. The sizes are the step's: each part of a
            # batch keeps the text_bytes and the lengths of the whole batch.
            metrics = recorder.measure(step, totals, lr, task.finish_measures(totals))
            signal = end_step(task, metrics, totals.signal, recorder, saver, steps.last)
            if signal:  # where a task cannot go on (Task.problem), `batches` ends instead
                break
        if step:
            saver.save(step)  # unless it has been saved
        if task.problem:
            raise UserError(task.problem)

    signal = signal or task.signal
    if saver.newest:  # a signal may come before the first step is done
        print_rank_zero(f"checkpoint: {saver.newest}")
    if signal:
        print_rank_zero(f"stopped at step {step}; the same command with --resume goes on")
    # Under --max-restarts exit code 0 would tell torchrun that this rank has done its work.
    plumbing.endings.end_if_restarted(signal)
    return not signal


def unevaluated_step(run: Run, steps: Steps, world: World) -> dict | None:
    """Return the metrics of the last step done, if a signal or a kill has ended its evaluation."""
    if not steps.done or not is_due(steps.done, run.eval_every, steps.last):
        return None
    return world.broadcast_from_rank_zero(partial(records.unevaluated, run.directory, steps.done))


def end_step(
    task: Task, metrics: dict, signal: int, recorder: records.Recorder, saver: Saver, last: int
) -> int:
    """Record a step, save and evaluate where these are due, and save what is best. Return the
    signal that is to end the run, 0 for none: `signal`, or one that came in the evaluation."""
    run, step = task.run, metrics["step"]
    recorder.write(metrics)  # a run that resumes from this step's checkpoint needs it
    if step == last or is_due(step, run.save_every, last):
        saver.save(step)  # before the evaluation, which may be long
    if not signal and is_due(step, run.eval_every, last):
        results, signal = task.evaluate_and_show(step)
        if recorder.is_new_best(results):
            saver.save(step, best=True)  # if it was saved above, this only links OUT/best to it
        recorder.write(metrics | results)  # last: a kill before it lets a resume evaluate again
    recorder.start_step()
    return signal


def is_due(step: int, every: int, last: int) -> bool:
    """Return whether a step is the last or a multiple of `every`; never if that is 0."""
    return every > 0 and (step % every == 0 or step == last)


def accumulate(
    runner: nn.Module,
    batch: Batch,
    microbatch: int,
    world: World,
    task_loss: Callable | None = None,
) -> Tensor:
    """Run forward and backward on each microbatch of this rank, so many rows of its batch in their
    order; gradients accumulate.

    `runner` is what `parallelize` returned: the model, or DDP, ZeRO-1 or a Pipeline around it. It
    does all the communication of forward and backward. `task_loss` is a task's `loss`: it returns
    the loss of a microbatch, given what the model has returned. None: the model's own loss.
    Returns the sum of the losses, a scalar that is still on the device. In a pipeline all stages
    but the last return 0."""
    microbatches = batch.microbatches(microbatch)
    if world.parallel.pp > 1:
        return runner.accumulate(microbatches, task_loss)
    loss = torch.zeros((), dtype=widest_float(world.device), device=world.device)
    for i, part in enumerate(microbatches):
        # Ranks average gradients in the last microbatch alone (with --reshard all: in every one).
        with gradient_sync(world.parallel, runner, last=i == len(microbatches) - 1):
            part.prepare()  # what a task tells layers before a forward (rewards.py); else nothing
            computed = runner(part.tokens, part.targets, part.positions, documents=part.documents)
            microbatch_loss = task_loss(computed, part) if task_loss else computed
            # The model's own loss (techniques/chunked_loss.py) has computed the gradients of the
            # hidden states and, if it is trained, of the output weight in its forward, so that no
            # logits are kept. Backward goes on from there.
            microbatch_loss.backward()
        loss += microbatch_loss.detach()
    return loss


def update(
    optimizer: Optimizer,
    loss: Tensor,
    count: Tensor,
    sizes: list[int],
    clip: float,
    world: World,
    step: int,
) -> Totals:
    """Normalize the accumulated gradients by the global number of target tokens, clip them, and
    take an optimizer step.

    `loss` is the sum over this rank's batch, `count` the number of its target tokens, or of what
    else a task divides by, and `sizes` are bytes of text, tokens and FLOPs, to be added up over
    ranks. Microbatches and ranks may have different numbers of targets. So we add up sums, and
    divide once by the number of targets of the whole batch: a mean of means would weight tokens
    unequally. labs/mean shows the difference.
    The all-gather also tells all ranks which signal asks one of them to end.
    Raises UserError on all ranks, before the update, if a loss or the gradient is not finite."""
    # This rank's share of the squared norm of the whole gradient: all of the squares of its own
    # shards, 1/k of those that k ranks hold alike (under DDP, all). The shares add up to the whole.
    gradients, squared_norm_share = own_gradients(optimizer, world.size)
    signal = plumbing.endings.asked_to_end()
    rows = world.all_gather_scalars([loss, squared_norm_share, signal, count, *sizes])
    losses, shares, signals, *_ = rows.unbind(1)  # [ranks] each
    # Ranks along tp repeat the loss and the targets. Ranks along pp repeat the targets, but only
    # the last one has a loss.
    parallel = world.parallel
    total_loss = losses.sum() / parallel.tp
    counts = rows[:, 3:].sum(0) / (parallel.tp * parallel.pp)  # of targets, then the sizes
    total_count = counts[0]

    # DDP and FSDP have divided the sum of gradients by n, the ranks with different tokens. We want
    # the sum / targets, so multiply by n / targets.
    n = parallel.replicate * parallel.shard
    scale = n / total_count.clamp(min=1)
    norm = shares.sum().sqrt() * scale
    clipping = (clip / (norm + 1e-6)).clamp(max=1.0) if clip else 1.0  # as clip_grad_norm_ does
    scale_gradients(optimizer, gradients, scale, clipping)

    # An update waits for the device only here, to see before the optimizer's step that all is
    # finite. `health` is not finite if a loss or a gradient is not, or if there are no targets.
    health = (losses + shares).sum() / total_count
    values = [total_loss, norm, signals.max(), health, *counts]
    total_loss, norm, signal, health, *counts = torch.stack(values).tolist()
    if not math.isfinite(health):
        raise UserError(records.describe_not_finite(step, losses))
    # A run from scratch takes Muon, others AdamW, if no flag says otherwise. AdamW updates each
    # weight where it is. Muon updates the matrices of blocks, and needs them whole: ranks exchange
    # their parts (techniques/muon.py).
    optimizer.step()
    zero_gradients(optimizer, world)
    return Totals(total_loss, *map(round, counts), norm, round(signal))


def learning_rate(step: int, last: int, peak: float, run: Run) -> float:
    """Return the learning rate of step 1..last: linear warmup to the peak, then by --lr-schedule.
    wsd (warmup-stable-decay) is constant, and decays linearly over the last third. It and the other
    decays would reach 0 at step last + 1."""
    warmup = max(run.warmup, 1)
    to_the_end = last + 1 - step
    left = to_the_end / max(last + 1 - warmup, 1)  # 1 when the warmup ends
    falls = {
        "wsd": to_the_end / (last / 3),
        "linear": left,
        "cosine": (1 - math.cos(math.pi * min(left, 1))) / 2,
        "constant": 1,
    }
    return peak * min(step / warmup, 1, falls[run.lr_schedule])


if __name__ == "__main__":
    processes.run(main)
