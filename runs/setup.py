"""Prepare a run: its model, its data and how they are split; and print what the run will do."""

import copy
import pickle
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import torch
from torch import nn

import checkpoint
from config import FLAGS, ParallelConfig, Work, decided
from costs.page import sends
from costs.search import choose_parallel, usable_memory, what_would_fit
from data import Windows, open_windows
from files.directories import check_tokenizer, find_checkpoint, newest_undamaged, read_config
from files.loading import load_weights
from model import Llama
from parallel import AFTER_TP, BEFORE_TP, World, with_mesh
from plumbing import processes
from plumbing.devices import has_bfloat16, has_triton, use_flash_attention_3
from plumbing.flags import all_flags, values_of
from plumbing.joining import init_distributed
from plumbing.messages import UserError, print_rank_zero
from plumbing.processes import Process
from plumbing.shards import assign_shard, sharded_over, to_local
from runs import records, rules
from runs.changed import check_documents, notes, prediction_note
from runs.equal import check_model
from runs.flags import Pretraining, Run
from techniques.optimizers import peak_rate
from techniques.technique import Technique
from text.corpora import Reading
from text.order import Order, Steps
from text.tokenizer import Tokenizer, load_tokenizer


@dataclass(frozen=True)
class Job:
    """What a run trains, on what, and for how long, once its device and its data are known."""

    model: Llama  # on meta until `parallelize`; then this rank's part
    whole: Llama  # an unsplit copy on meta, Work.model: memory and traffic follow from its shapes
    initialize: Callable[[Llama], None]  # gives the model's parameters their first values
    tokenizer: Tokenizer
    train_set: Windows  # or a Packed of text/packing.py, used the same way; or runs/answers.Prompts
    val_set: Windows
    data_checksum: int  # by which a resumed run notices other data
    exam: object | None  # an Exam of text/exams.py, taken at evaluations
    lr: float  # peak learning rate
    last_step: int
    base: Path | None = None  # of fine-tuning: the checkpoint that --init has found
    # By which a resumed run notices that a model or a file which a flag names has changed:
    # base_digest, teacher_digest, reward_digest; and `teacher`, its checkpoint.
    digests: dict[str, str] = field(default_factory=dict)
    techniques: tuple[Technique, ...] = ()  # beside those of parallel.py
    teacher: Llama | None = None  # of distill.py: on meta, whole


def join(run: Run) -> tuple[Process, ParallelConfig]:
    """Join the other processes. Return this one, and the configuration that the run asks for, with
    what depends on the device. Raise UserError for what the device cannot compute."""
    process = init_distributed()
    process.check_same_flags(values_of(run))
    optimizer = "adamw" if run.init else "muon"  # where the run names none
    if run.device == "mps":
        return on_apple_gpu(run, process, optimizer)
    asked, device = run.parallel, process.device
    # What all ranks can compute, since nodes may have different GPUs.
    bfloat16 = bool(process.minimum(has_bfloat16(device)))
    triton = bool(process.minimum(has_triton(device)))
    if device.type == "cuda":
        gpu = torch.cuda.get_device_name(device)
        if asked.dtype == torch.bfloat16 and not bfloat16:
            raise UserError(f"--dtype bfloat16: a {gpu} has no bfloat16: leave it out, for float32")
        if asked.compile and not triton:
            raise UserError(f"--compile: there is no Triton for this {gpu}: leave it out")
        if asked.dtype is None and not bfloat16:
            print_rank_zero(f"no bfloat16 for this {gpu}: --dtype float32")
        if asked.compile is None and not triton:
            print_rank_zero(f"no Triton for this {gpu}: --no-compile")
    if use_flash_attention_3(device):
        print_rank_zero("attention in bfloat16 is computed by FlashAttention 3")
    dtype = torch.bfloat16 if bfloat16 else torch.float32
    return process, decided(asked, dtype=dtype, compile=triton, optimizer=optimizer)


# Flags whose only value on an Apple GPU is the default of their field: other values cannot be
# computed, or were never tried.
FIXED_ON_APPLE_GPU = ["dp", "dtype", "compile", "checkpointing", "offload"]
FIXED_ON_APPLE_GPU += [technique.flag for technique in (*BEFORE_TP, *AFTER_TP) if technique.flag]


def on_apple_gpu(run: Run, process: Process, optimizer: str) -> tuple[Process, ParallelConfig]:
    """Return this process on an Apple GPU (MPS), and the configuration there."""
    if not torch.backends.mps.is_available():
        raise UserError("--device mps: this torch finds no Apple GPU: leave it out")
    if process.size > 1:
        raise UserError("--device mps is for one process: leave it out, for the CPU")
    fixed = {name: FLAGS[name].default for name in FIXED_ON_APPLE_GPU}
    for name, value in fixed.items():
        if getattr(run.parallel, name) not in (None, "auto", value):
            flag = f"--{name.replace('_', '-')}"
            raise UserError(f"--device mps does not work with this {flag}: leave out one of them")
    parallel = decided(replace(run.parallel, **fixed), optimizer=optimizer)
    return replace(process, device=torch.device("mps")), parallel


def prepare_pretraining(run: Pretraining, parallel: ParallelConfig, process: Process) -> Job:
    """Check the flags, open the data, and describe the model."""
    source = None
    if run.init:
        directory = process.broadcast_from_rank_zero(partial(find_checkpoint, run.init))
        source = read_config(directory)
    config = rules.choose_model_config(run, source)
    rules.check_training_flags(run, parallel, config, process)
    if parallel.reshard == "adapters":
        raise UserError("--reshard adapters is for finetune_lora.py: here nothing is frozen")
    load = partial(load_tokenizer, rules.choose_tokenizer(run, source))
    tokenizer = process.local_rank_zero_first(load)
    exam = None
    if run.exam:
        from text.exams import Exam  # here, since few runs take one

        exam = Exam(run.exam, tokenizer, config.max_seq_len)
    reading = Reading(run.text_field, run.skip_bad)
    windows = partial(
        open_windows, run.data, tokenizer, run.seq_len, run.document_mask, run.val_data, reading
    )
    train_set, val_set = process.local_rank_zero_first(windows)
    if source:
        check_tokenizer(source, tokenizer)
        initialize = partial(load_weights, source["directory"])
    else:
        if (run.model or "").startswith("llama3") and tokenizer.vocab_size != config.vocab_size:
            print_rank_zero(
                f"note: {run.model} has {config.vocab_size} tokens, and {tokenizer.name} has "
                f"{tokenizer.vocab_size}: this trains another model; give its --tokenizer"
            )
        config = replace(config, vocab_size=tokenizer.vocab_size)

        def initialize(model: Llama) -> None:
            model.init_weights(run.seed, assign_shard, process.device)

    with torch.device("meta"):
        model = config.build()
    kind = "fine-tuning of all weights" if run.init else f"pretraining with {parallel.optimizer}"
    return Job(
        model=model,
        whole=copy.deepcopy(model),
        initialize=initialize,
        tokenizer=tokenizer,
        train_set=train_set,
        val_set=val_set,
        data_checksum=process.check_same("the training data", train_set.checksum()),
        exam=exam,
        lr=peak_rate(kind, model) if run.lr is None else run.lr,
        last_step=rules.last_step(run, len(train_set)),
    )


def choose_work(work: Work, shard: int | None, process: Process) -> tuple[Work, str]:
    """Return a step split as it is asked for or, with --dp auto, as the model's size requires; and
    the reason. `shard` is the value of --shard, if given."""
    room = process.minimum(usable_memory(process.device))

    def counted_to_predicted(choice: Work) -> float:
        return process.broadcast_from_rank_zero(partial(ratio_of_peaks, choice))

    parallel, reason = choose_parallel(work, shard, process, room, counted_to_predicted)
    process.check_same("the models or their meshes", (work.model.config, parallel))
    return replace(work, parallel=parallel), reason


def ratio_of_peaks(work: Work) -> float:
    """Return the counted peak of memory divided by the predicted one, or 1 if the step cannot be
    counted. Another process runs the step on tensors without contents, and counts their bytes
    (perf/emulated.py): this one has real ranks already."""
    print(f"--dp {work.parallel.dp} nearly fills the memory: counting a step", file=sys.stderr)
    try:
        ended = subprocess.run(
            [sys.executable, "-m", "perf.emulated"],
            input=pickle.dumps(replace(work, teacher=None)),
            capture_output=True,
            cwd=Path(__file__).resolve().parent.parent,
            timeout=300,
            check=True,
        )
        return float(ended.stdout)
    except Exception as error:  # as of a student's class: the prediction stands
        print(f"it could not be counted: {error}", file=sys.stderr)
        return 1.0


@torch.no_grad()
def check_equal_replicas(model: nn.Module, world: World) -> None:
    """Raise UserError if replicas have different weights, for example if a second node has other
    files. It compares the norm of all weights but experts under --ep, and the sum of NF4's codes.
    """
    alike = (p for p in model.parameters() if sharded_over(p).keys() <= {"shard", "tp"})
    weights = [to_local(parameter) for parameter in alike]
    norm = torch.nn.utils.get_total_norm([p for p in weights if p.is_floating_point()])
    codes = sum(p.sum() for p in weights if not p.is_floating_point())  # NF4
    sums = world.all_gather_scalars([norm, codes])  # [ranks, 2]
    # Arranged as the mesh is: [pp, replicate, shard * tp, 2].
    sums = sums.view(world.parallel.pp, world.parallel.replicate, -1, 2)
    first = sums[:, :1]  # those of the first replica: [pp, 1, shard * tp, 2]
    differs = ((sums - first).abs() > 1e-6 * first).any(-1)  # [pp, replicate, shard * tp]
    ranks = differs.flatten().nonzero().flatten().tolist()
    if ranks:
        raise UserError(
            f"ranks {ranks} begin with other weights than the first replica: give every node "
            f"the same files; draw weights from generator_for(name, seed), as init_weights does"
        )


def choose_split(
    run: Run, parallel: ParallelConfig, job: Job, process: Process
) -> tuple[World, Work]:
    """Choose how a step is split, given what the run asks for; return the World and the step."""
    asked = rules.work_of(run, parallel, job.whole, process, job.train_set.document_mask)
    asked = replace(asked, teacher=job.teacher)
    work, reason = choose_work(asked, run.parallel.shard, process)
    rules.check_work(work, *job.techniques)
    process.check_same("the validation data", job.val_set.checksum())  # or ranks evaluate unequally
    process.check_same("the exams", job.exam and job.exam.questions)
    parallel = work.parallel
    # If a step runs out of memory, this adds a line to its error.
    processes.out_of_memory_advice = partial(what_would_fit, work, process)
    if run.parallel.dp == "auto" and process.size > parallel.tp * parallel.pp:
        print_rank_zero(f"--dp auto takes {parallel.dp}: {reason}")
    return with_mesh(process, parallel), work


def check_and_describe(job: Job, work: Work, world: World, accumulate: Callable) -> None:
    """Check that a small model trains on this mesh as model.py says, and print what a step of the
    run sends. `accumulate` is train.accumulate, which check_model calls. It is passed in because
    imports run downwards, and train.py is above this file."""
    parallel = work.parallel
    check_model(job.whole.config, work.seq_len, world, accumulate)
    check_documents(job.whole.config, world, job.train_set.document_mask)
    if world.size > 1:
        print_rank_zero(records.describe_mesh(world))
        who_sends = "each rank sends" if parallel.pp == 1 else "a rank sends up to"
        traffic = records.describe_traffic(sends(work), parallel)
        print_rank_zero(f"per step, {who_sends} {traffic}")
        print_rank_zero(prediction_note(job.whole.config))
    print_rank_zero(notes(job.whole, parallel))


def facts_of(job: Job, work: Work, steps: Steps) -> dict:
    """Return what a run has found out and, for each flag that was left open, the value that was
    chosen; for OUT/config.json and checkpoints."""
    facts = values_of(work.parallel)
    if job.base:
        facts["init"] = str(job.base)
    facts |= job.digests
    return facts | {
        "lr": job.lr,
        "steps": steps.last,
        "microbatch": work.microbatch,
        "data_checksum": job.data_checksum,
        "token_offset": steps.order.token_offset,
    }


def steps_of(run: Run, job: Job, work: Work, saved: list[Path]) -> Steps:
    """Return the steps that a run still has to take after the newest of the `saved` checkpoints
    that is not damaged, if there is one. Warn about flags that make it another experiment."""
    order = Order(run.batch, run.seq_len, run.seed)
    if not saved:
        return Steps(0, job.last_step, run.skip_steps, order)
    undamaged = newest_undamaged(saved)
    config = read_config(undamaged)
    done, last = config["step"], job.last_step
    # Old runs have no facts.
    before = {"token_offset": 0} | config["flags"] | config.get("facts", {})
    old = Order(before["batch"], before["seq_len"], before["seed"], before["token_offset"])
    # How many tokens more the run has read than it would have by the order that it has now. For
    # example, 10 steps of 8 sequences of 256 tokens have read 20,480. With --batch 16 now, 10 steps
    # would have read 40,960: the offset is -20,480.
    offset = old.tokens_done(done) - order.tokens_done(done)
    if run.epochs:  # tokens that have been read take no further steps
        last -= offset // (run.batch * run.seq_len)
        while last in run.skip_steps:  # the last step saves, so it is not left out
            last -= 1
    order = replace(order, token_offset=offset)
    steps = Steps(done, last, run.skip_steps, order, undamaged)
    now = values_of(run) | facts_of(job, work, steps)
    may_change = {name for name, spec in all_flags(type(run)).items() if spec.may_change}
    records.warn_about_changed_flags(before, now, may_change)
    return steps


def resume(steps: Steps, run: Run, job: Job, optimizer: torch.optim.Optimizer) -> None:
    """Load the checkpoint that a run continues, if it does."""
    if not steps.checkpoint:
        return
    checkpoint.resume(steps.checkpoint, job.model, optimizer, job.tokenizer)
    print_rank_zero(f"resumed from {steps.checkpoint}")
    if steps.done >= steps.last:
        done = f"has done its {steps.last} steps; more --steps or --epochs continue it"
        print_rank_zero(f"{run.directory} {done}")
