"""Measure the speed, memory and communication of training.

python bench.py limit [--lora]
                            a training step beside the bare matrix products of a step, and beside
                            transformers' step or peft's
torchrun --nproc-per-node 4 bench.py compare [one ddp fsdp "fsdp --reshard none"] [--lora]
                            the same step, distributed and computed in different ways
torchrun --nproc-per-node 4 bench.py comm [--out comm.json]
                            latency and bandwidth of the links between ranks
torchrun --nproc-per-node 4 bench.py step [flags of train.py]
                            where the time of a training step goes, and which flag would help
torchrun --nproc-per-node 4 bench.py step --lora --init out/tiny [flags of finetune_lora.py]
                            the same for fine-tuning; with --lora preferences or --lora rewards for
                            these scripts
torchrun --nproc-per-node 2 bench.py equal --tp 2 [flags of train.py]
                            whether a step is the same as on one process, and if not, where it
                            first differs
python bench.py plan --model llama3.1-70b --gpus 64 [--check]
                            predicted cost of every way to distribute a model over a cluster
"""

import plumbing.endings  # first, for Ctrl-C during the imports
import argparse
import contextlib
import itertools
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

import finetune_lora
import preferences
import rewards
import train
from config import (
    FLAGS,
    STRATEGIES,
    Work,
    add_parallel_flags,
    in_float64,
    requested_parallel,
    with_optimizer_of,
)
from costs.machines import GPUS, assumed_machine
from costs.plans import FILTERS
from costs.search import with_mesh_sizes
from data import local_batch, row_of
from evaluate import Prediction
from lora import LoRA
from model import PRESETS, Llama
from parallel import with_mesh
from perf.comm import measure_comm
from perf.compare import default_contestants, flags_of_contestant, is_alone, measure_compare
from perf.instruments import Training, build_on_meta, check_writable
from perf.measured import read_measurement
from perf.plan import Question, plan_cluster
from perf.step import measure_step
from plumbing.messages import UserError, print_rank_zero
from plumbing.parser import Parser, nonnegative_int, positive_float, positive_int
from plumbing.processes import Process, init_distributed, run
from runs.equal import compare_steps
from runs.flags import add_pretraining_flags
from runs.rules import check_batch, check_parallel, check_work, requested_work
from runs.setup import build, choose_work, prepare_pretraining, setup
from techniques.optimizers import make_optimizer

SCRIPTS = {module.__name__: module.SCRIPT for module in (finetune_lora, preferences, rewards)}

# fmt: off


def add_json_flag(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", type=Path, metavar="FILE", help="file for the results as JSON")


def add_adapter_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--rank", type=positive_int, default=8, help="with --lora: rank of the adapters")
    add("--dora", action="store_true", help="with --lora: train the lengths of rows too")
    add("--base-bits", type=int, choices=[16, 4], default=16,
        help="with --lora: 4 keeps the frozen matrices of the blocks in 4 bits")


def add_compare_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("contestants", nargs="*", metavar="CONTESTANT",
        help="a name, flags of train.py's parallelism in quotes, or a name and flags, such as "
             f"'fsdp --reshard none'. {', '.join(STRATEGIES)}: values of --dp; wrong: hsdp that "
             "shards across nodes; one: rank 0 alone; bare: its matrix products alone; "
             "transformers: transformers' model and peft's adapters. All are in memory at once "
             "(default for compare: strategies, and ways to keep activations; for limit: bare "
             "transformers one)")
    add("--model", choices=PRESETS, default="tiny", help="preset")
    add("--batch", type=positive_int, default=8, help="sequences per step, over all processes")
    add("--microbatch", type=positive_int, default=1,
        help="sequences that a process computes at a time (default: 1; for limit: all)")
    add("--seq-len", type=positive_int, default=128, help="tokens per sequence")
    add("--repeats", type=positive_int, default=5, help="rounds of all contestants")
    add_parallel_flags(parser, ["dtype"], dtype="float32")
    add("--lora", action="store_true", help="train adapters, as finetune_lora.py does")
    add_adapter_flags(parser)
    add_json_flag(parser)
    parser.set_defaults(dtype="float32")


def add_limit_flags(parser: argparse.ArgumentParser) -> None:
    add_compare_flags(parser)
    contestants = ["bare", "transformers", "one"]
    parser.set_defaults(contestants=contestants, model="medium", batch=4, seq_len=512,
                        microbatch=None, repeats=11)


def add_comm_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--out", type=Path, metavar="FILE", help="file for the results as JSON")
    add("--model", choices=PRESETS,
        help="preset whose microbatch is timed too, for bench.py plan --measured")
    add("--repeats", type=positive_int, default=11, help="rounds of all collectives")
    add("--microbatch", type=positive_int, default=1, help="sequences of that microbatch")
    add("--seq-len", type=positive_int, default=512, help="tokens per sequence of that microbatch")


def add_step_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the script whose step is measured, and some more."""
    add = parser.add_argument
    add("--lora", choices=SCRIPTS, nargs="?", const="finetune_lora",
        help="a step of this script, with its flags, in place of train.py's")
    add("--repeats", type=positive_int, default=15, help="rounds of all measurements")
    add_json_flag(parser)
    if "--lora" in sys.argv:
        after = [*sys.argv, ""][sys.argv.index("--lora") + 1]
        SCRIPTS.get(after, finetune_lora.SCRIPT).add_flags(parser)
    else:
        add_pretraining_flags(parser)


def add_plan_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--model", choices=PRESETS, help="preset (default: llama3.1-8b)")
    add("--gpus", type=positive_int, default=8, help="GPUs of the whole cluster")
    add("--per-node", type=positive_int, default=8, help="GPUs of a node")
    add("--gpu", default="h100", help=f"{', '.join(GPUS)}; or, of another GPU, the peak, memory, "
        "memory bandwidth and link within a node as TFLOP/s:GB:GB/s:GB/s")
    add("--link", default="400gbit",
        help="speed of the link from each GPU to other nodes, such as 400gbit or 50GB")
    add("--measured", type=Path, metavar="FILE",
        help="result of bench.py comm --model: plan for that cluster, in place of --gpus, "
             "--per-node, --gpu, --link, and for its model, unless --model is given")
    add("--batch", type=positive_int, help="sequences per step (default: 2 per GPU)")
    add("--seq-len", type=positive_int, help="tokens per sequence (default: 8192)")
    add("--document-length", type=nonnegative_int, default=0,
        help="tokens per document, where a sequence holds several and attention stays within "
             "them; 0 for whole sequences")
    add("--tokens", type=positive_float,
        help="also print the days and GPU-hours to train on so many tokens, such as 15e12")
    add("--dollars", type=positive_float, help="with --tokens: what an hour of a GPU costs")
    add("--lora", choices=["finetune_lora", "preferences"], nargs="?", const="finetune_lora",
        help="train adapters as this script does, which changes what a step computes")
    add_adapter_flags(parser)
    add("--microbatch", type=positive_int, help="only plans with so many sequences at a time")
    group = parser.add_argument_group("parallelism", "Only plans with the given values.")
    defaults = dict.fromkeys(FILTERS, "all are tried")
    defaults |= dict(dtype="bfloat16", compile="compiled", optimizer="adamw")
    names = [name for name in FLAGS if name != "offload"]  # of parameters: never planned
    add_parallel_flags(group, names, **defaults)
    parser.set_defaults(**dict.fromkeys(FILTERS))
    add("--top", type=positive_int, default=12, help="rows of the table")
    add_json_flag(parser)
    add("--check", action="store_true",
        help="emulate a step of rank 0 of the best plan in this process, and compare its counted "
             "memory and traffic with the prediction")


# fmt: on


# ------------------------------------------------------------------------------ the commands


def model_of(args: argparse.Namespace) -> Llama:
    """Return the model, on meta, that --model, --lora, --rank, --dora and --base-bits ask for."""
    if not args.lora and (args.dora or args.base_bits == 4):
        raise UserError("--dora and --base-bits are for adapters: give --lora, too")
    lora = LoRA(args.rank, dora=args.dora) if args.lora else None
    return build_on_meta(PRESETS[args.model], lora, base_bits=args.base_bits)


def work_of(args: argparse.Namespace, contestant: str, process: Process) -> Work:
    """Return the step of a contestant of limit or compare on these processes."""
    parser = Parser()
    add_parallel_flags(parser)
    parser.set_defaults(dp="ddp", reshard="weights")
    # Flags that a contestant does not have are those of the command.
    flags = flags_of_contestant(contestant).split()
    args = parser.parse_args(flags, argparse.Namespace(**vars(args)))
    process = replace(process, size=1) if is_alone(contestant) else process
    if args.reshard == "adapters" and not args.lora:
        raise UserError("--reshard adapters is for --lora: nothing is frozen without it")
    work = requested_work(args, model_of(args), process)
    check_parallel(work, args.shard, process)
    sizes = process.size, process.per_node, args.shard
    work = replace(work, parallel=with_mesh_sizes(work.parallel, *sizes))
    check_batch(work)
    check_work(work)
    return work


def compare(args: argparse.Namespace) -> str:
    process = init_distributed()
    process.check_same_flags(vars(args))
    check_writable("--json", args.json)
    contestants = args.contestants or default_contestants(process)
    works = {name: work_of(args, name, process) for name in contestants}
    flags = {name: value for name, value in vars(args).items() if name not in ("json", "command")}
    return measure_compare(works, process, args.repeats, flags, args.json)


def comm(args: argparse.Namespace) -> str:
    world = with_mesh(init_distributed())
    world.check_same_flags(vars(args))
    return measure_comm(world, args.model, args.microbatch, args.seq_len, args.repeats, args.out)


def step(args: argparse.Namespace) -> str:
    """Set up a training as train.py or finetune_lora.py does, and measure its step."""
    if args.lora:
        SCRIPTS[args.lora].complete(args)
    # Nothing is written, so OUT may be another run's directory, which --resume accepts.
    args.out, args.resume = args.out or Path("out"), True
    if args.device == "mps":
        raise UserError("bench.py step measures GPUs of CUDA, and CPUs: leave out --device mps")
    process = setup(args)
    check_writable("--json", args.json)
    # A silenced collective leaves its output uninitialized: often denormal floats, with which a CPU
    # computes slowly. Threads inherit this setting, so it comes before they are started.
    torch.set_flush_denormal(True)
    if args.lora:
        job, _ = finetune_lora.prepare(args, process, SCRIPTS[args.lora])
    else:
        job = prepare_pretraining(args, process)
    world, runner, work = build(args, job, process, train.accumulate)
    optimizer = make_optimizer(job.model, world, args.lr, args.weight_decay)
    for group in optimizer.param_groups:  # throughout, so that the loss stays finite
        group["lr"] = train.learning_rate(1, args)
    make_task = SCRIPTS[args.lora].make_task if args.lora else Prediction
    task = make_task(args, job, world, work, None)
    task.begin()
    with contextlib.closing(task.batches(itertools.count(1))) as batches:
        given = runner, optimizer, batches, work.microbatch, args.clip, task.before_step
        training = Training(world, job.model, *given)
        return measure_step(training, work, args.repeats, args.json)


def equal(args: argparse.Namespace) -> str:
    args.out, args.resume = args.out or Path("out"), True  # nothing is written
    process = setup(args)
    job = prepare_pretraining(args, process)
    work, _ = choose_work(args, job.whole, job.train_set.document_mask, process)
    world = with_mesh(process, in_float64(work.parallel))
    rows = [row_of(i, job.train_set.sources, args.seed) for i in range(args.batch)]
    batches = job.train_set.batch(rows), local_batch(args, world, job.train_set, 1)

    def update(model, loss, batch, world):
        world = replace(world, parallel=with_optimizer_of(work.parallel, world.parallel))
        optimizer = make_optimizer(model, world, args.lr, args.weight_decay)
        return train.update(optimizer, loss, batch, 1.0, world, step=1)

    accumulate = partial(train.accumulate, microbatch=work.microbatch)
    first = compare_steps(job.whole.config, job.initialize, *batches, world, accumulate, update)
    return f"the steps differ {first}" if first else "the steps are equal"


def plan(args: argparse.Namespace) -> str:
    """Return the output of `bench.py plan`. Defaults are those of the machine that was measured."""
    torch.set_num_threads(1)  # what runs here is small: threads would wait for each other
    if args.measured:
        report, machine = read_measurement(args.measured)
        args.gpus, defaults = report["ranks"], report["compute"] | {"compile": False}
    else:
        machine = assumed_machine(args.gpu, args.link, args.per_node, "cudnn")
        defaults = dict(model="llama3.1-8b", seq_len=8192, dtype="bfloat16", compile=True)
    for name in ("model", "seq_len", "dtype", "compile"):
        if getattr(args, name) is None:
            setattr(args, name, defaults[name])
    if args.dollars and not args.tokens:
        raise UserError("--dollars is for the cost of a run: give --tokens, too")
    if args.dtype != defaults["dtype"] and (args.measured or args.gpu.lower() in GPUS):
        raise UserError(
            f"--dtype {args.dtype}: what is known of {machine.name} is its speed in "
            f"{defaults['dtype']}: leave it out, or give that of {args.dtype} as --gpu in numbers"
        )
    work = Work(
        model=model_of(args),
        parallel=requested_parallel(args),
        batch=args.batch or 2 * args.gpus,
        microbatch=1,
        seq_len=args.seq_len,
        document=args.document_length,
        on_gpu=machine.overlaps,  # as NCCL does, and not gloo
        references=int(args.lora == "preferences"),
    )
    wanted = {name: getattr(args, name) for name in FILTERS}
    question = Question(args.model, work, machine, args.gpus, wanted)
    return plan_cluster(question, args.top, args.tokens, args.dollars, args.json, args.check)


COMMANDS = {  # name -> function that adds the flags, function that returns the output
    "limit": (add_limit_flags, compare),
    "compare": (add_compare_flags, compare),
    "comm": (add_comm_flags, comm),
    "step": (add_step_flags, step),
    "equal": (add_pretraining_flags, equal),
    "plan": (add_plan_flags, plan),
}


def main() -> None:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="|".join(COMMANDS))
    for name, (add_flags, _) in COMMANDS.items():
        add_flags(subparsers.add_parser(name, allow_abbrev=False))
    args = parser.parse_args()
    _, measure = COMMANDS[args.command]
    print_rank_zero(measure(args))


if __name__ == "__main__":
    run(main)
