"""Measure the speed, memory and communication of training.

python bench.py limit [--lora]
                            a training step beside its bare matrix products and attention, and
                            beside transformers' step or peft's
torchrun --nproc-per-node 4 bench.py compare [one ddp fsdp "fsdp --reshard none"] [--lora]
                            the same step, distributed and computed in different ways
torchrun --nproc-per-node 4 bench.py step [flags of train.py]
                            where the time of a training step goes, and which flag would help
torchrun --nproc-per-node 4 bench.py step --lora --init out/tiny [flags of finetune_lora.py]
                            the same for fine-tuning; with --lora preferences, --lora rewards or
                            --lora distill for these scripts
torchrun --nproc-per-node 2 bench.py equal --tp 2 [flags of train.py]
                            whether a step is the same as on one process, and if not, where it
                            first differs, and exit code 1
python bench.py generate --seq-len 128 1024
                            how fast a model writes, beside what the memory allows
python bench.py plan --model llama3.1-70b --gpus 64 [--check]
                            predicted cost of every way to distribute a model over a cluster
"""

import plumbing.endings  # first, for Ctrl-C during the imports
import argparse
import contextlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

import train
from config import (
    FLAGS,
    LAYOUTS,
    STRATEGIES,
    ParallelConfig,
    Totals,
    Work,
    decided,
    in_float64,
    with_optimizer_of,
)
from costs.machines import GPUS, assumed_machine
from costs.search import with_mesh_sizes
from data import local_batch
from lora import LoRA
from model import Llama
from models.family import find_preset
from parallel import World, with_mesh
from perf.instruments import Training, build_on_meta, check_writable
from plumbing.flags import as_json, flag, other_default, values_of, within
from plumbing.joining import init_distributed
from plumbing.messages import UserError, print_rank_zero
from plumbing.parser import (
    Parser,
    add_flags,
    parse,
    positive_float,
    positive_int,
    record_of,
)
from plumbing.processes import Process, run
from runs import rules
from runs.equal import compare_steps
from runs.flags import Pretraining, Run, flags_of_pretraining
from runs.rules import check_batch, check_parallel, check_work, requested_work
from runs.setup import choose_work, join, prepare_pretraining, steps_of
from runs.task import Task
from techniques import nf4
from techniques.optimizers import make_optimizer
from text.batch import Batch
from text.order import Order, Steps

SCRIPTS = "finetune_lora", "preferences", "rewards", "distill"  # that `step --lora` measures


def cluster(text: str) -> tuple[int, int]:
    """Argument type: GPUs of a cluster, or NODESxGPUS. Return all GPUs, and those of a node."""
    nodes, x, gpus = text.rpartition("x")
    if x:
        return positive_int(nodes) * positive_int(gpus), positive_int(gpus)
    return positive_int(gpus), min(8, positive_int(gpus))


# fmt: off


@dataclass(frozen=True)
class Report:
    json: Path | None = flag(None, "file for the results as JSON", type=Path, metavar="FILE")


@dataclass(frozen=True)
class Rounds(Report):
    """In each round all contestants take their turn."""

    repeats: int = flag(5, "rounds of all contestants")
    parallel: ParallelConfig = within(ParallelConfig, ["dtype"], shown=dict(dtype="float32"),
                                      dtype=torch.float32)


@dataclass(frozen=True)
class Comparison(Rounds):
    """The same step, distributed and computed in different ways."""

    contestants: tuple[str, ...] = flag((),
        "a name, flags of train.py's parallelism in quotes, or a name and flags, such as "
        f"'fsdp --reshard none'. {', '.join(STRATEGIES)}: values of --dp; wrong: hsdp that "
        "shards across nodes; one: rank 0 alone; bare: its products and attention; transformers: "
        "transformers' model and peft's adapters. All are in memory at once (default for compare: "
        "strategies, and ways to keep activations; for limit: bare transformers one)",
        is_positional=True, nargs="*", metavar="CONTESTANT")
    model: str = flag("tiny", "preset, or FILE.py", metavar="NAME")
    batch: int = flag(8, "sequences per step, over all processes")
    microbatch: int | None = flag(1, "sequences that a process computes at a time (default: 1; "
                                  "for limit: all)", type=positive_int)
    seq_len: int = flag(128, "tokens per sequence")
    lora: bool = flag(False, "train adapters, as finetune_lora.py does")
    rank: int = flag(8, "with --lora: rank of the adapters")
    dora: bool = flag(False, "with --lora: train the lengths of rows too")
    base_bits: int = flag(16, "with --lora: 4 keeps the frozen matrices of the blocks in 4 bits",
                          type=int, choices=[16, 4])


@dataclass(frozen=True)
class Limit(Comparison):
    """A training step beside its bare products and attention, and beside transformers'."""

    contestants: tuple[str, ...] = other_default(Comparison, "contestants",
                                                 ("bare", "transformers", "one"))
    model: str = other_default(Comparison, "model", "medium")
    batch: int = other_default(Comparison, "batch", 4)
    microbatch: int | None = other_default(Comparison, "microbatch", None)
    seq_len: int = other_default(Comparison, "seq_len", 512)
    repeats: int = other_default(Comparison, "repeats", 11)


@dataclass(frozen=True)
class Generating(Rounds):
    """How fast a model writes, beside what the memory allows, and beside transformers."""

    contestants: tuple[str, ...] = flag((),
        "ours, compiled: with compiled blocks, transformers, static: transformers' with a cache "
        "of fixed size (default: ours, and transformers' two where it is installed)",
        is_positional=True, nargs="*", metavar="CONTESTANT")
    model: str = other_default(Comparison, "model", "medium")
    batch: int = flag(1, "prompts that are continued together")
    seq_len: tuple[int, ...] = flag((128, 1024), "tokens of each prompt; several are measured one "
                                    "after the other", type=positive_int, nargs="+")
    max_new_tokens: int = flag(32, "tokens that follow it")
    base_bits: int = flag(16, "4 keeps the matrices of the blocks in 4 bits", type=int,
                          choices=[16, 4])


@dataclass(frozen=True)
class Contestant:
    """The flags of a contestant: of train.py's parallelism."""

    parallel: ParallelConfig = within(ParallelConfig, dp="ddp", reshard="weights")


@dataclass(frozen=True)
class Measurement(Report):
    """Where the time of a training step goes."""

    lora: str | None = flag(None, "a step of this script, with its flags, in place of train.py's",
                            choices=SCRIPTS, nargs="?", const="finetune_lora")
    repeats: int = flag(15, "rounds of all measurements")


@dataclass(frozen=True)
class Plan(Report):
    """Predicted cost of every way to distribute a model over a cluster."""

    model: str = flag("llama3.1-8b", "preset, or FILE.py", metavar="NAME")
    gpus: tuple[int, int] = flag((8, 8), "GPUs of the whole cluster, 8 of them in a node; or "
                                 "NODESxGPUS, as 4x4 (default: 8)", type=cluster)
    gpu: str = flag("h100", f"{', '.join(GPUS)}; or, of another GPU, the peak, memory, memory "
                    "bandwidth and link within a node as TFLOP/s:GB:GB/s:GB/s")
    link: str = flag("400gbit", "speed of the link from each GPU to other nodes, such as 400gbit "
                     "or 50GB")
    batch: int | None = flag(None, "sequences per step (default: 2 per GPU)", type=positive_int)
    seq_len: int = flag(8192, "tokens per sequence")
    tokens: float | None = flag(None, "also print the days and GPU-hours to train on so many "
                                "tokens, such as 15e12", type=positive_float)
    lora: str | None = flag(None, "train adapters as this script does, which changes what a step "
                            "computes", choices=["finetune_lora", "preferences"], nargs="?",
                            const="finetune_lora")
    rank: int = other_default(Comparison, "rank", 8)
    dora: bool = other_default(Comparison, "dora", False)
    base_bits: int = other_default(Comparison, "base_bits", 16)
    microbatch: int | None = flag(None, "only plans with so many sequences at a time",
                                  type=positive_int)
    # Of the layouts all are tried; offloading of parameters is never planned.
    parallel: ParallelConfig = within(
        ParallelConfig, [name for name in FLAGS if name != "offload"],
        "parallelism: only plans with the given values",
        dict.fromkeys(LAYOUTS, "all are tried") | dict(dtype="bfloat16", compile="compiled"),
        **dict.fromkeys(LAYOUTS), dtype=torch.bfloat16, compile=True,
    )
    check: bool = flag(False, "emulate a step of rank 0 of the best plan in this process, and "
                       "compare its counted memory and traffic with the prediction")


# fmt: on


# ------------------------------------------------------------------------------ the commands


def model_of(asked: Comparison | Plan) -> Llama:
    """Return the model, on meta, that --model, --lora, --rank, --dora and --base-bits ask for."""
    model = build_on_meta(find_preset(asked.model))
    lora = LoRA(asked.rank, dora=asked.dora)
    if asked.lora:
        from finetune_lora import targets_in  # here, since few commands ask for adapters

        lora = replace(lora, targets=targets_in(model))
        return build_on_meta(model.config, lora, base_bits=asked.base_bits)
    if lora != LoRA() or asked.base_bits == 4:
        raise UserError("--rank, --dora and --base-bits are for adapters: give --lora, too")
    return model


def work_of(asked: Comparison, contestant: str, process: Process) -> Work:
    """Return the step of a contestant of limit or compare on these processes."""
    from perf.compare import flags_of_contestant, is_alone  # here, as in `compare`

    wanted = parse(Contestant, flags_of_contestant(contestant).split()).parallel
    if wanted.dp == "auto":
        raise UserError(f"{contestant}: a run chooses what --dp auto is: name a strategy, as ddp")
    parallel = decided(wanted, dtype=asked.parallel.dtype)
    if is_alone(contestant):
        process = replace(process, size=1)
    if parallel.reshard == "adapters" and not asked.lora:
        raise UserError("--reshard adapters is for --lora: nothing is frozen without it")
    work = requested_work(
        parallel, model_of(asked), process, asked.batch, asked.seq_len, asked.microbatch
    )
    check_parallel(work, wanted.shard, process)
    parallel = with_mesh_sizes(work.parallel, process.size, process.per_node, wanted.shard)
    work = replace(work, parallel=parallel)
    check_batch(work)
    check_work(work, *[nf4.TECHNIQUE] * (asked.base_bits == 4))
    return work


def compare(asked: Comparison) -> str:
    from perf.compare import default_contestants, measure_compare  # here: few commands need them

    process = init_distributed()
    process.check_same_flags(values_of(asked))
    check_writable("--json", asked.json)
    names = asked.contestants or default_contestants(process)
    works = {name: work_of(asked, name, process) for name in names}
    return measure_compare(works, asked, process)


def write(asked: Generating) -> str:
    from perf.generation import measure_generation  # here, since no other command needs it

    # Without adapters, but with matrices in 4 bits if they are asked for.
    model = build_on_meta(find_preset(asked.model), LoRA(targets=()), base_bits=asked.base_bits)
    return measure_generation(asked, model, init_distributed())


def flags_of_step(words: list[str]) -> type[Run]:
    """Return the flags of the script that `bench.py step` measures, from its command line."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--lora", nargs="?", const=SCRIPTS[0])
    script = parser.parse_known_args(words)[0].lora
    if not script:
        return flags_of_pretraining(words)
    return import_module(script if script in SCRIPTS else SCRIPTS[0]).SCRIPT.flags


def step(asked: Measurement, run: Run) -> str:
    """Set up a training as its script does, and measure its step."""
    run.check()
    if run.updates > 1:
        raise UserError("bench.py step times one update: leave --updates out")
    if run.device == "mps":
        raise UserError("bench.py step measures GPUs of CUDA, and CPUs: leave out --device mps")
    process, parallel = join(run)
    check_writable("--json", asked.json)
    # A silenced collective leaves its output uninitialized: often denormal floats, with which a CPU
    # computes slowly. Threads inherit this setting, so it comes before they are started.
    torch.set_flush_denormal(True)
    run = writing_nothing(run)
    task_of_script = Task
    if asked.lora:
        from finetune_lora import prepare  # here, since train.py's step does not need it

        script = import_module(asked.lora).SCRIPT
        task_of_script = script.task
        job, _ = prepare(run, parallel, process, script)
    else:
        job = prepare_pretraining(run, parallel, process)
    world, runner, work = train.split(run, parallel, job, process)
    optimizer = make_optimizer(job.model, world, job.lr, run.weight_decay, run.betas)
    for group in optimizer.param_groups:  # throughout, so that the loss stays finite
        group["lr"] = train.learning_rate(1, job.last_step, job.lr, run)
    task = task_of_script(run, job, world, work, None)  # it shows no text
    steps = steps_of(run, job, work, saved=[])
    task.begin(steps)
    with contextlib.closing(batches_without_end(task, steps)) as batches:
        training = Training(
            world,
            job.model,
            runner,
            optimizer,
            batches,
            work.microbatch,
            run.clip,
            task.before_step,
            task.loss,
            task.count,
        )
        from perf.step import measure_step  # here, since no other command needs it

        return measure_step(training, work, asked.repeats, asked.json)


def writing_nothing(run: Run) -> Run:
    """Return a run whose check accepts an OUT that holds a run, since nothing is written to it."""
    return replace(run, out=run.out or Path("out"), resume=True)


def batches_without_end(task: Task, steps: Steps) -> Iterator[Batch]:
    """Yield the batches of a run's steps again and again."""
    while True:
        yield from task.batches(steps)


def equal(run: Pretraining) -> str:
    run.check()
    run = writing_nothing(run)
    process, parallel = join(run)
    job = prepare_pretraining(run, parallel, process)
    requested = rules.work_of(run, parallel, job.whole, process, job.train_set.document_mask)
    work, _ = choose_work(requested, run.parallel.shard, process)
    check_work(work)
    world = with_mesh(process, in_float64(work.parallel))
    order = Order(run.batch, run.seq_len, run.seed)
    whole = job.train_set.batch(order.rows(1, job.train_set.sources))
    own = local_batch(order, world, job.train_set, 1)

    def update(model: Llama, loss: Tensor, batch: Batch, world: World) -> Totals:
        world = replace(world, parallel=with_optimizer_of(work.parallel, world.parallel))
        optimizer = make_optimizer(model, world, job.lr, run.weight_decay, run.betas)
        return train.update(optimizer, loss, batch.count(), [0] * 3, 1.0, world, step=1)

    accumulate = partial(train.accumulate, microbatch=work.microbatch)
    first = compare_steps(job.whole.config, job.initialize, whole, own, world, accumulate, update)
    if not first:
        return "the steps are equal"
    print_rank_zero(f"the steps differ {first}")
    dist.barrier()  # torchrun ends all ranks when the first has failed: rank 0 has printed
    plumbing.endings.end(1, first, show=False)


def plan(asked: Plan) -> str:
    from perf.plan import Question, plan_cluster  # here, since no other command needs it

    torch.set_num_threads(1)  # what runs here is small: threads would wait for each other
    gpus, per_node = asked.gpus
    machine = assumed_machine(asked.gpu, asked.link, per_node, "cudnn")
    dtype = as_json(asked.parallel.dtype)
    if dtype != "bfloat16" and asked.gpu.lower() in GPUS:
        raise UserError(
            f"--dtype {dtype}: what is known of {machine.name} is its speed in bfloat16: "
            f"leave it out, or give that of {dtype} as --gpu in numbers"
        )
    work = Work(
        model=model_of(asked),
        parallel=decided(asked.parallel),
        batch=asked.batch or 2 * gpus,
        microbatch=1,
        seq_len=asked.seq_len,
        on_gpu=True,
        references=int(asked.lora == "preferences"),
    )
    wanted = {name: getattr(asked.parallel, name) for name in LAYOUTS}
    wanted["microbatch"] = asked.microbatch
    question = Question(asked.model, work, machine, gpus, wanted)
    return plan_cluster(question, asked.tokens, asked.json, asked.check)


COMMANDS = {  # name -> function that returns the output, the record of its flags
    "limit": (compare, Limit),
    "compare": (compare, Comparison),
    "step": (step, Measurement),  # and the record of the script whose step it is
    "equal": (equal, Pretraining),
    "generate": (write, Generating),
    "plan": (plan, Plan),
}


def parse_command(words: list[str]) -> tuple[Callable, list]:
    """Return the function of a command, and its arguments, the records of its flags."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="|".join(COMMANDS))
    kinds = {name: [kind] for name, (_, kind) in COMMANDS.items()}
    kinds["step"].append(flags_of_step(words))
    if words[:1] == ["equal"]:
        kinds["equal"] = [flags_of_pretraining(words)]
    for name in COMMANDS:
        subparser = subparsers.add_parser(name)
        for kind in kinds[name]:
            add_flags(subparser, kind)
    typed = vars(parser.parse_args(words))
    command = typed.pop("command")
    return COMMANDS[command][0], [record_of(kind, typed) for kind in kinds[command]]


def main() -> None:
    measure, records = parse_command(sys.argv[1:])
    print_rank_zero(measure(*records))


if __name__ == "__main__":
    run(main)
