"""Check the flags of a training run, and return the configurations that they ask for."""

import itertools
import math
from dataclasses import replace
from pathlib import Path

import torch

from config import STRATEGIES, ParallelConfig, Work
from data import paths_of, tokenizer_of_token_files
from files.directories import checkpoints, describe_differences
from model import Llama, LlamaConfig
from models.family import find_preset
from parallel import refusal
from plumbing.messages import UserError
from plumbing.processes import Process
from runs.flags import Pretraining, Run
from techniques.optimizers import check_betas
from techniques.technique import Technique
from text.corpora import check_there_is_data
from text.tokenizer import DEFAULT_TOKENIZER


def choose_model_config(run: Pretraining, initial: dict | None) -> LlamaConfig:
    """Return the configuration of the --init checkpoint, or of the preset and the size flags.

    `initial` is what read_config returned for --init, None without it."""
    found = initial and initial["model"]
    wanted = found
    if run.model or not found:
        wanted = find_preset(run.model or "tiny")
    given = {name: value for name, value in vars(run.sizes).items() if value is not None}
    if given.keys() & {"dim", "n_heads"}:
        given["head_dim"] = 0  # follows them
    if found:
        given["vocab_size"] = found.vocab_size
    try:
        wanted = replace(wanted, **given)
    except Exception as error:  # a student's configuration may raise any, also without a text
        raise UserError(str(error) or repr(error))
    if found and wanted != found:
        differences = describe_differences(found, wanted)
        raise UserError(f"{run.init} has {differences}: leave out --model and its sizes")
    return wanted


def choose_tokenizer(run: Pretraining, initial: dict | None) -> str:
    """Return the name of the tokenizer: --tokenizer, or that of the data or of --init."""
    if name := run.tokenizer or tokenizer_of_token_files(run.data):
        return name
    if not initial:
        check_there_is_data(paths_of(run.data))  # before the tokenizer is trained
        return DEFAULT_TOKENIZER
    if not initial["tokenizer"]:
        raise UserError(f"{initial['directory']} has no tokenizer.model: give its --tokenizer")
    return initial["tokenizer"]


def requested_work(
    parallel: ParallelConfig,
    model: Llama,
    process: Process,
    batch: int | None,
    seq_len: int,
    microbatch: int | None = None,
    updates: int = 1,
    **more,
) -> Work:
    """Return a step as the flags ask for it: `dp` may still be "auto", and until it is chosen all
    ranks of data parallelism count as replicas. Without a `batch` a step is one microbatch of each
    share. `more` are other fields of Work."""
    data_ranks = max(1, process.size // (parallel.tp * parallel.pp))  # 0 is refused later
    parallel = replace(parallel, replicate=data_ranks)
    return Work(
        model,
        parallel,
        batch or microbatch * parallel.data_size,
        microbatch or batch // updates // parallel.data_size,
        seq_len,
        updates=updates,
        on_gpu=process.device.type == "cuda",
        **more,
    )


def work_of(
    run: Run, parallel: ParallelConfig, model: Llama, process: Process, packed: bool = False
) -> Work:
    """Return the requested_work of a run. `packed`: sequences hold several documents."""
    return requested_work(
        parallel,
        model,
        process,
        run.batch,
        run.seq_len,
        run.microbatch,
        document=run.seq_len if packed else 0,
        references=run.references,
        updates=run.updates,
    )


def check_training_flags(
    run: Run, parallel: ParallelConfig, config: LlamaConfig, process: Process, *more: Technique
) -> None:
    """Raise UserError for flags that cannot work together; the message suggests values. `more` are
    techniques that the script joins to those of parallel.py."""
    if not run.epochs:
        check_steps(run, run.steps)
    if not run.eval_every and (run.keep_best or run.exam):
        raise UserError("--keep-best and --exam need evaluations: give --eval-every")
    with torch.device("meta"):
        model = config.build()
    model.requires_grad_(run.adapters is None)  # a base that has adapters is frozen
    work = work_of(run, parallel, model, process)
    check_parallel(work, run.parallel.shard, process)
    check_batch(work)
    check_work(work, *more)
    check_betas(run.betas, parallel)
    check_out(run.directory, run.resume)


# Files of models, adapters, checkpoints and data. A run does not write into a directory with any.
FOREIGN = "SHA256SUMS params.json adapter_config.json data.json *.safetensors *.bin *.pth *.gguf"


def check_out(out: Path, resume: bool) -> None:
    """Raise UserError for an --out whose files a run would replace."""
    if checkpoints(out) and not resume:
        raise UserError(
            f"{out} already holds a run: --resume continues it, or choose another --out"
        )
    patterns = FOREIGN.split()
    if not checkpoints(out) and not (out / "metrics.jsonl").exists():
        patterns.append("config.json")
    for path in itertools.chain(*map(out.glob, patterns)):
        raise UserError(
            f"--out {out} holds {path.name}, which is of no run: give a run's own directory, or a "
            f"new one"
        )


def check_steps(run: Run, steps: int) -> None:
    """Raise UserError for a warmup, for skipped steps or a profile that do not fit the steps."""
    if run.profile and steps < 5:
        raise UserError("--profile traces steps 3 to 5: give 5 --steps or more")
    longest = steps
    if run.lr_schedule == "wsd":
        longest = steps + 1 - math.ceil(steps / 3)  # then learning_rate decays
    # The default may be longer: first trials are short.
    if "warmup" in run.typed and run.warmup > longest:
        raise UserError(
            f"--warmup {run.warmup} is too long for --steps {steps}: the learning rate would "
            f"not reach --lr; use at most --warmup {longest}"
        )
    last_skipped = max(run.skip_steps, default=0)
    if last_skipped >= steps:
        raise UserError(
            f"--skip-steps {last_skipped} is not before the last step, {steps}, which saves: leave "
            f"it out, or give fewer --steps"
        )


def last_step(run: Run, sequences: int) -> int:
    """Return the number of steps: --steps, or that of --epochs of so many sequences each."""
    if not run.epochs:
        return run.steps
    steps = math.ceil(run.epochs * sequences / run.batch)
    check_steps(run, steps)
    return steps


def check_batch(work: Work) -> None:
    """Raise UserError for sequences that are too long, or that ranks cannot share evenly."""
    longest = work.model.config.max_seq_len
    if work.seq_len > longest:
        raise UserError(
            f"--seq-len {work.seq_len} exceeds the model's maximum: --seq-len {longest}"
        )
    ranks = work.parallel.data_size
    shares = ranks * work.updates
    if work.batch % shares:
        updates = f" in each of {work.updates} updates" if work.updates > 1 else ""
        raise UserError(
            f"--batch {work.batch} is no multiple of the {ranks} ranks that share it{updates}: "
            f"use --batch {math.ceil(work.batch / shares) * shares}"
        )
    if work.sequences % work.microbatch:
        raise UserError(
            f"--microbatch {work.microbatch} does not divide the {work.sequences} sequences of a "
            f"rank (--batch {work.batch} over {ranks} ranks): give a divisor of {work.sequences}"
        )


def check_work(work: Work, *more: Technique) -> None:
    """Raise UserError for a step that cannot be split as it is asked for, also by `more`."""
    if reason := refusal(work, *more):
        raise UserError(reason)


def check_parallel(work: Work, shard: int | None, process: Process) -> None:
    """Raise UserError for a configuration that this model or these processes cannot have.

    `work.parallel.dp` may be "auto"; `shard` is the value of --shard, if given."""
    parallel = work.parallel
    dp = f"--dp {parallel.dp}"
    sizes = f"--tp {parallel.tp} x --pp {parallel.pp}"
    sharded = [f"--dp {name}" for name, entry in STRATEGIES.items() if entry.uses_fsdp]
    in_nodes = [f"--dp {name}" for name, entry in STRATEGIES.items() if entry.copy_spans == "node"]
    data_ranks, rest = divmod(process.size, parallel.tp * parallel.pp)
    if rest:
        raise UserError(
            f"{process.size} processes are no multiple of {sizes}: start a multiple, or give less"
        )
    if parallel.pp == 1 and (parallel.schedule != "1f1b" or parallel.stages_per_rank > 1):
        raise UserError("--schedule and --stages-per-rank are for pipelines: give --pp 2 or more")
    if parallel.offload and dp not in sharded:
        raise UserError(f"--offload is for {' or '.join(sharded)}")
    if parallel.offload and parallel.reshard == "adapters":
        raise UserError("--offload and --reshard adapters exclude each other: give one of them")
    if parallel.reshard not in ("auto", "weights") and parallel.dp != "auto":
        if not parallel.strategy.uses_fsdp:  # DDP with --tp does
            raise UserError(f"--reshard {parallel.reshard} is for {' or '.join(sharded)}")
    if shard and dp not in in_nodes:
        raise UserError(f"--shard {shard} is for {' or '.join(in_nodes)}")
    for flag, number in (("--cp", parallel.cp), ("--shard", shard or 1)):
        if data_ranks % number:
            ranks = f"{data_ranks} ranks of data parallelism, {process.size} processes over {sizes}"
            raise UserError(f"{flag} {number} must divide the {ranks}")
