"""From the flags of a run to a model that is split over ranks, and what a run says at its start."""

import argparse
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from torch import nn

from costs.memory import prediction_caveat
from costs.search import choose_parallel, usable_memory, what_would_fit
from costs.traffic import describe_traffic, predict_traffic
from costs.work import Work
from data import Windows
from model import Llama
from parallel import World, parallelize, with_mesh
from plumbing.processes import Process, advise_if_out_of_memory, init_distributed, print_rank_zero
from runs import records
from runs.check_model import (
    Accumulate,
    check_equal_replicas,
    check_model,
    generation_caveat,
    layers_caveat,
)
from runs.rules import requested_work
from text.tokenizer import Tokenizer


@dataclass(frozen=True)
class Job:
    """The model, how its parameters are initialized, its tokenizer and its data."""

    model: Llama  # on meta until `build`; then what this rank has of it
    whole: Llama  # an unsplit copy on meta: memory and traffic are predicted from its shapes
    initialize: Callable[[Llama], None]  # gives the model's parameters their first values
    tokenizer: Tokenizer
    train_set: Windows  # or text/chat.py's Packed, which is used alike
    val_set: Windows


def setup(args: argparse.Namespace) -> Process:
    """Join the other processes and set the flags whose defaults depend on the device or others."""
    process = init_distributed()
    process.check_same_flags(vars(args))
    on_gpu = process.device.type == "cuda"
    args.dtype = args.dtype or ("bfloat16" if on_gpu else "float32")
    args.compile = on_gpu if args.compile is None else args.compile
    args.optimizer = args.optimizer or ("adamw" if args.init else "muon")
    args.lr = args.lr if args.lr is not None else 0.02 if args.optimizer == "muon" else 5e-3
    return process


def build(
    args: argparse.Namespace, job: Job, process: Process, accumulate: Accumulate
) -> tuple[World, nn.Module, Work]:
    """Split the model as the flags, or its size, ask for; return what a training step calls, and
    the step's work. `accumulate` is train.py's, with which a small model is tried first."""
    work = requested_work(args, job.whole, process, packed=job.train_set.document_mask)
    args.microbatch = work.microbatch  # for the run's record
    room = process.minimum(usable_memory(process.device, process.per_node))
    parallel, reason = choose_parallel(work, args.shard, process, room)
    work = replace(work, parallel=parallel)
    advise_if_out_of_memory(partial(what_would_fit, work, process))
    if args.dp == "auto" and process.size > args.tp * args.pp:
        print_rank_zero(f"--dp auto takes {parallel.dp}: {reason}")
    traffic = predict_traffic(work)
    world = with_mesh(process, parallel)
    check_model(job.whole.config, world, accumulate)
    if process.size > 1:
        print_rank_zero(records.describe_mesh(world, work.microbatches))
        which = "each rank sends" if parallel.pp == 1 else "a rank sends up to"
        print_rank_zero(f"per step, {which} {describe_traffic(traffic, parallel)}")
        print_rank_zero(prediction_caveat(job.whole))
    print_rank_zero(generation_caveat(job.whole.config))
    print_rank_zero(layers_caveat(job.whole, parallel.float8))
    runner = parallelize(job.model, world, job.initialize)
    check_equal_replicas(job.model, world)
    return world, runner, work
