"""Build a split model from the flags of a run, and say at its start what it will do."""

import argparse
import copy
import pickle
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import nn

import checkpoint
from config import FLAGS, Work
from costs.page import sends
from costs.search import choose_parallel, sent_by_strategy, usable_memory, what_would_fit
from data import Windows, open_windows, tokens_done
from files.directories import newest_undamaged
from model import Llama
from parallel import AFTER_TP, BEFORE_TP, World, parallelize, with_mesh
from plumbing import processes
from plumbing.devices import has_bfloat16, has_triton, use_flash_attention_3
from plumbing.joining import init_distributed
from plumbing.messages import UserError, print_rank_zero
from plumbing.processes import Process
from plumbing.shards import assign_shard, sharded_over, to_local
from runs import records, rules
from runs.changed import check_documents, notes, prediction_note
from runs.equal import check_model
from techniques.technique import Technique
from text.corpora import Reading
from text.exams import Exam
from text.tokenizer import Tokenizer, load_tokenizer


@dataclass(frozen=True)
class Job:
    """The model, how its parameters are initialized, its tokenizer and its data."""

    model: Llama  # on meta until `build`; then this rank's part
    whole: Llama  # an unsplit copy on meta: memory and traffic are predicted from its shapes
    initialize: Callable[[Llama], None]  # gives the model's parameters their first values
    tokenizer: Tokenizer
    train_set: Windows  # or a Packed of text/chat.py, used the same way
    val_set: Windows
    exam: Exam | None = None  # taken at evaluations
    techniques: tuple[Technique, ...] = ()  # beside those of parallel.py


def setup(args: argparse.Namespace) -> Process:
    """Join the other processes and set flags whose defaults depend on the device or other flags.
    Raise UserError for flags that the device cannot compute."""
    process = init_distributed()
    process.check_same_flags(vars(args))
    if args.device == "mps":
        process = on_apple_gpu(args, process)
    device = process.device
    # What all ranks can compute, since nodes may have different GPUs.
    bfloat16 = bool(process.minimum(has_bfloat16(device)))
    triton = bool(process.minimum(has_triton(device)))
    if device.type == "cuda":
        gpu = torch.cuda.get_device_name(device)
        if args.dtype == "bfloat16" and not bfloat16:
            raise UserError(f"--dtype bfloat16: a {gpu} has no bfloat16: leave it out, for float32")
        if args.compile and not triton:
            raise UserError(f"--compile: there is no Triton for this {gpu}: leave it out")
        if not args.dtype and not bfloat16:
            print_rank_zero(f"no bfloat16 for this {gpu}: --dtype float32")
        if args.compile is None and not triton:
            print_rank_zero(f"no Triton for this {gpu}: --no-compile")
    if use_flash_attention_3(device):
        print_rank_zero("attention in bfloat16 is computed by FlashAttention 3")
    args.dtype = args.dtype or ("bfloat16" if bfloat16 else "float32")
    args.compile = triton if args.compile is None else args.compile
    args.optimizer = args.optimizer or ("adamw" if args.init else "muon")
    if args.lr is None:
        args.lr = 0.02 if args.optimizer == "muon" else 5e-3
    return process


# Flags whose only value on an Apple GPU is the default of their field: other values cannot be
# computed, or were never tried.
FIXED_ON_APPLE_GPU = ["dp", "dtype", "compile", "checkpointing", "offload"]
FIXED_ON_APPLE_GPU += [technique.flag for technique in (*BEFORE_TP, *AFTER_TP) if technique.flag]


def on_apple_gpu(args: argparse.Namespace, process: Process) -> Process:
    """Return this process on an Apple GPU (MPS), and set the flags of FIXED_ON_APPLE_GPU."""
    if not torch.backends.mps.is_available():
        raise UserError("--device mps: this torch finds no Apple GPU: leave it out")
    if process.size > 1:
        raise UserError("--device mps is for one process: leave it out, for the CPU")
    for name in FIXED_ON_APPLE_GPU:
        value = "float32" if name == "dtype" else FLAGS[name].default
        if getattr(args, name) not in (None, "auto", value):
            flag = f"--{name.replace('_', '-')}"
            raise UserError(f"--device mps does not work with this {flag}: leave out one of them")
        setattr(args, name, value)
    return replace(process, device=torch.device("mps"))


def prepare_pretraining(args: argparse.Namespace, process: Process) -> Job:
    """Check the flags, open the data, and describe the model."""
    find = partial(checkpoint.find_checkpoint, args.init)
    source = checkpoint.read_config(process.broadcast_from_rank_zero(find)) if args.init else None
    config = rules.choose_model_config(args, source)
    rules.check_training_flags(args, config, process)
    if args.reshard == "adapters":
        raise UserError("--reshard adapters is for finetune_lora.py: here nothing is frozen")
    load = partial(load_tokenizer, rules.choose_tokenizer(args, source))
    tokenizer = process.local_rank_zero_first(load)
    exam = args.exam and Exam(args.exam, tokenizer, config.max_seq_len)
    reading = Reading(args.text_field, args.skip_bad)
    windows = partial(
        open_windows, args.data, tokenizer, args.seq_len, args.document_mask, args.val_data, reading
    )
    train_set, val_set = process.local_rank_zero_first(windows)
    rules.choose_steps(args, len(train_set))
    # Saved with the flags, so that a resumed run notices other data.
    args.data_checksum = process.check_same("the training data", train_set.checksum())
    if source:
        checkpoint.check_tokenizer(source, tokenizer)
        initialize = partial(checkpoint.load_weights, source["directory"])
    else:
        if (args.model or "").startswith("llama3") and tokenizer.vocab_size != config.vocab_size:
            print_rank_zero(
                f"note: {args.model} has {config.vocab_size} tokens, and {tokenizer.name} has "
                f"{tokenizer.vocab_size}: this trains another model; give its --tokenizer"
            )
        config = replace(config, vocab_size=tokenizer.vocab_size)
        initialize = partial(
            Llama.init_weights, seed=args.seed, assign=assign_shard, device=process.device
        )
    with torch.device("meta"):
        model = Llama(config)
    return Job(model, copy.deepcopy(model), initialize, tokenizer, train_set, val_set, exam)


def choose_work(
    args: argparse.Namespace, whole: Llama, packed: bool, process: Process
) -> tuple[Work, str]:
    """Return a step's work, split as the flags or the model's size require, and the reason."""
    work = rules.requested_work(args, whole, process, packed)
    room = process.minimum(usable_memory(process.device))

    def count(choice: Work) -> float:
        return process.broadcast_from_rank_zero(partial(ratio_of_peaks, choice))

    parallel, reason = choose_parallel(work, args.shard, process, room, count)
    process.check_same("the models or their meshes", (whole.config, parallel))
    return replace(work, parallel=parallel), reason


def ratio_of_peaks(work: Work) -> float:
    """Return the counted peak of memory divided by the predicted one, or 1 if the step cannot be
    counted. It is emulated in another process, since this process has real ranks already."""
    print(f"--dp {work.parallel.dp} nearly fills the memory: counting a step", file=sys.stderr)
    command = [sys.executable, "-m", "perf.emulated"]
    root = Path(__file__).resolve().parent.parent
    options = dict(input=pickle.dumps(work), capture_output=True, cwd=root, timeout=300)
    try:
        return float(subprocess.run(command, **options, check=True).stdout)
    except (subprocess.SubprocessError, ValueError) as error:
        print(f"it could not be counted: {error}", file=sys.stderr)
        return 1.0


@torch.no_grad()
def check_equal_replicas(model: nn.Module, world: World) -> None:
    """Raise UserError if replicas have different weights, for example if a second node has other
    files. It compares the norm of the weights that a replica shards, and the sum of NF4's codes."""
    alike = (p for p in model.parameters() if sharded_over(p).keys() <= {"shard", "tp"})
    weights = [to_local(parameter) for parameter in alike]
    norm = torch.nn.utils.get_total_norm([p for p in weights if p.is_floating_point()])
    codes = sum(p.sum() for p in weights if not p.is_floating_point())  # NF4
    pp, replicate = world.parallel.pp, world.parallel.replicate
    norms = world.all_gather_scalars([norm, codes]).view(pp, replicate, -1, 2)
    differs = ((norms - norms[:, :1]).abs() > 1e-6 * norms[:, :1]).any(-1)
    if ranks := differs.flatten().nonzero().flatten().tolist():
        raise UserError(
            f"ranks {ranks} begin with other weights than the first replica: give every node "
            f"the same files; draw weights from generator_for(name, seed), as init_weights does"
        )


def describe_strategies(args: argparse.Namespace, job: Job, process: Process) -> str:
    """Return what a rank would send in a step of fine-tuning under each strategy; "" where ranks do
    not share the sequences."""
    if process.size == args.tp * args.pp:
        return ""
    work = rules.requested_work(args, job.whole, process, packed=True)
    return f"per step, each rank would send: {sent_by_strategy(work, args.shard, process)}"


def build(
    args: argparse.Namespace, job: Job, process: Process, accumulate: Callable
) -> tuple[World, nn.Module, Work]:
    """Split the model; return the World, what a training step calls, and the step's work.
    `accumulate` is train.accumulate, for check_model, which first tries a small model. It is passed
    in because imports run downwards, and train.py is above this file."""
    work, reason = choose_work(args, job.whole, job.train_set.document_mask, process)
    rules.check_work(work, *job.techniques)
    process.check_same("the validation data", job.val_set.checksum())  # or ranks evaluate unequally
    process.check_same("the exams", job.exam and job.exam.questions)
    args.microbatch = work.microbatch  # for train.py, even if the flag was not given
    parallel = work.parallel
    # If a step runs out of memory, this adds a line to its error.
    processes.out_of_memory_advice = partial(what_would_fit, work, process)
    if args.dp == "auto" and process.size > args.tp * args.pp:
        print_rank_zero(f"--dp auto takes {parallel.dp}: {reason}")
    world = with_mesh(process, parallel)
    check_model(job.whole.config, work.seq_len, world, accumulate)
    check_documents(job.whole.config, world)
    if process.size > 1:
        print_rank_zero(records.describe_mesh(world))
        who_sends = "each rank sends" if parallel.pp == 1 else "a rank sends up to"
        traffic = records.describe_traffic(sends(work), parallel)
        print_rank_zero(f"per step, {who_sends} {traffic}")
        print_rank_zero(prediction_note())
    print_rank_zero(notes(job.whole, parallel))
    runner = parallelize(job.model, world, job.initialize)
    check_equal_replicas(job.model, world)
    return world, runner, work


def resume(
    args: argparse.Namespace, newest: Path | None, job: Job, optimizer: torch.optim.Optimizer
) -> int:
    """Load the `newest` checkpoint of a run, if there is one; return the steps it has done."""
    if not newest:
        return 0
    newest = newest_undamaged(newest)
    before = {"token_offset": 0} | checkpoint.read_config(newest)["flags"]  # old runs lack it
    records.warn_about_changed_flags(before, vars(args))
    steps_done = checkpoint.resume(newest, job.model, optimizer, job.tokenizer)
    tokens_read = tokens_done(argparse.Namespace(**before), steps_done)
    args.token_offset = tokens_read - tokens_done(args, steps_done)
    if args.epochs:  # tokens that have been read take no further steps
        args.steps -= args.token_offset // (args.batch * args.seq_len)
        while args.steps in args.skip_steps:  # the last step saves, so it is not left out
            args.steps -= 1
    print_rank_zero(f"resumed from {newest}")
    if steps_done >= args.steps:
        print_rank_zero(f"{args.out} has done its {args.steps} steps; more --steps continue it")
    return steps_done
