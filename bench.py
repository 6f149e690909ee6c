"""Measure the speed, memory and communication of training.

python bench.py limit       a training step beside the bare matrix products of a step
python bench.py lora        a LoRA step beside its bare matrix products, and beside peft's step
python bench.py loss        memory of the chunked loss beside PyTorch's
torchrun --nproc-per-node 4 bench.py compare [one ddp fsdp hsdp] [--lora] [--plot FILE.png]
                            the same step, distributed in different ways
torchrun --nproc-per-node 4 bench.py comm [--out comm.json]
                            latency and bandwidth of the links between ranks
torchrun --nproc-per-node 4 bench.py step [flags of train.py]
                            where the time of a training step goes, and which flag would help
torchrun --nproc-per-node 4 bench.py step-lora --init out/tiny [flags of finetune_lora.py]
                            the same for fine-tuning
torchrun --nproc-per-node 2 bench.py equal --tp 2 [flags of train.py]
                            whether a step is the same as on one process, and if not, where it
                            first differs
python bench.py plan --model llama3.1-70b --gpus 64 [--check]
                            predicted cost of every way to distribute a model over a cluster
python bench.py drill --kills 20 --nproc-per-node 2 [flags of train.py]
                            train, kill ranks and resume: the weights, what failures cost
python bench.py gpu --out gpu.json
                            all that one GPU can tell, for nine minutes at a time
"""

import plumbing.endings  # first, for Ctrl-C during the imports
import argparse
import contextlib
import itertools
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

import finetune_lora
import train
from costs.machines import GPUS, LINKS, assumed_machine
from costs.search import FILTERS
from costs.seconds import measured_machine, read_measurement
from costs.work import Work
from data import read_ahead, row_of
from lora import LoRA
from model import PRESETS
from parallel import with_mesh
from perf.comm import SIZES, measure_comm
from perf.compare import CONTESTANTS, measure_compare
from perf.drill import measure_drill
from perf.gpu import measure_gpu
from perf.instruments import Task, build_on_meta, check_writable
from perf.limit import measure_limit, measure_loss
from perf.plan import Question, plan_cluster
from perf.questions import Run, best_batch
from perf.step import Training, measure_step
from plumbing.devices import has_bfloat16
from plumbing.parser import Parser, nonnegative_float, nonnegative_int, positive_float, positive_int
from plumbing.processes import UserError, init_distributed, print_rank_zero, run
from runs.equal import compare_steps
from runs.flags import (
    add_finetuning_flags,
    add_optimizer_flags,
    add_parallel_flags,
    add_pretraining_flags,
)
from runs.rules import check_meetings, requested_parallel
from runs.setup import build, choose_work, prepare_pretraining, setup

# fmt: off


def add_integers(parser: argparse.ArgumentParser, **flags: tuple[int, str]) -> None:
    """Add flags for integers of at least 1: name -> default, meaning."""
    for name, (default, meaning) in flags.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=positive_int, default=default,
                            help=f"{meaning} (default: %(default)s)")


def add_json_flag(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", type=Path, metavar="FILE", help="file for the results as JSON")


def add_size_flags(
    parser: argparse.ArgumentParser, model: str, batch: int, seq_len: int, repeats: int
) -> None:
    """Add the flags for the size of a step and for the number of its repetitions."""
    parser.add_argument("--model", choices=PRESETS, default=model,
                        help="preset (default: %(default)s)")
    add_integers(parser, batch=(batch, "sequences per step, over all processes"),
                 seq_len=(seq_len, "tokens per sequence"),
                 repeats=(repeats, "rounds of all contestants"))
    add_dtype_flag(parser)
    add_optimizer_flags(parser)
    parser.set_defaults(lr=1e-4)


def add_dtype_flag(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32",
                        help="dtype of computation (default: %(default)s)")


def add_limit_flags(parser: argparse.ArgumentParser) -> None:
    add_size_flags(parser, model="medium", batch=4, seq_len=512, repeats=11)
    parser.add_argument("--compile", action="store_true",
                        help="one more contestant, with compiled blocks")
    parser.add_argument("--operators", action="store_true",
                        help="one more table: the time of each operator in a step")


def add_lora_flags(parser: argparse.ArgumentParser) -> None:
    add_limit_flags(parser)
    add_integers(parser, rank=(8, "rank of the adapters"))


def add_adapter_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--lora", action="store_true",
                        help="train adapters, as finetune_lora.py does, in place of weights")
    add_integers(parser, rank=(8, "with --lora: rank of the adapters"))
    parser.add_argument("--dora", action="store_true",
                        help="with --lora: train the lengths of rows too")
    parser.add_argument("--base-bits", type=int, choices=[16, 4], default=16,
                        help="with --lora: 4 keeps the frozen matrices of the blocks in 4 bits")


def add_loss_flags(parser: argparse.ArgumentParser) -> None:
    add_integers(parser, tokens=(4096, "number of target tokens"), dim=(512, "model width"),
                 vocab_size=(128_256, "entries of the vocabulary"))
    parser.add_argument("--chunks", nargs="+", type=positive_int, default=[], metavar="TOKENS",
                        help="tokens whose logits exist at the same time (default: as in training)")
    parser.add_argument("--repeats", type=nonnegative_int, default=0,
                        help="rounds of timing, for --json (default: %(default)s)")
    add_dtype_flag(parser)
    add_json_flag(parser)


def add_compare_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("contestants", nargs="*", metavar="NAME", type=contestant_name,
                        help=f"contestants, from {', '.join(CONTESTANTS)}. one: rank 0 alone; "
                             "bare: its matrix products alone; transformers: transformers' model "
                             "and peft's adapters; fsdp-X: fsdp with --reshard X; wrong: hsdp that "
                             "shards across nodes; tp: tensor parallelism over all processes; "
                             "async-tp: the same, sending while it multiplies; cp: fsdp whose "
                             "ranks in a node share sequences; pp: a stage on each node, or "
                             "process; selective, full, offloaded, compiled, float8: ddp with that "
                             "checkpointing, with full and offloaded activations, with compiled "
                             "blocks, or with those and products in 8 bits (default: those that "
                             "differ on these processes and fit in memory together)")
    add_size_flags(parser, model="tiny", batch=8, seq_len=128, repeats=5)
    add_integers(parser, microbatch=(1, "sequences that a process computes at a time"))
    add_adapter_flags(parser)
    add_json_flag(parser)
    parser.add_argument("--plot", type=Path, metavar="FILE.png",
                        help="file for the results as a plot; needs matplotlib")


def add_comm_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--sizes", nargs="+", type=positive_int, default=SIZES, metavar="BYTES",
                        help=f"message sizes (default: {' '.join(map(str, SIZES))})")
    parser.add_argument("--out", type=Path, metavar="FILE", help="file for the results as JSON")
    parser.add_argument("--model", choices=PRESETS,
                        help="preset whose microbatch is timed too, for bench.py plan --measured")
    add_integers(parser, repeats=(11, "rounds of all collectives"),
                 microbatch=(1, "sequences of that microbatch"),
                 seq_len=(512, "tokens per sequence of that microbatch"))
    add_optimizer_flags(parser)


def add_step_flags(add_script_flags: Callable, parser: argparse.ArgumentParser) -> None:
    """Add the flags of the script whose step is measured, and some more."""
    add_integers(parser, repeats=(15, "rounds of all measurements"))
    parser.add_argument("--plot", type=Path, metavar="FILE.svg",
                        help="with --pp: draw when each stage computed which microbatch")
    add_json_flag(parser)
    add_script_flags(parser)


def add_gpu_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, metavar="FILE.json", required=True,
                        help="file for the results; parts that it has are not measured again")
    parser.add_argument("--parts", nargs="+", metavar="PART",
                        help="parts to measure anew (default: all that FILE.json lacks)")
    parser.add_argument("--docs", type=Path, metavar="FILE.md",
                        help="document whose section on the GPU is written from the results")
    parser.add_argument("--rehearse", action="store_true",
                        help="run in small, on a CPU; nothing that is measured means anything")


def add_drill_flags(parser: argparse.ArgumentParser) -> None:
    add_integers(parser, kills=(20, "failures"), nproc_per_node=(2, "processes of the training"))
    add_pretraining_flags(parser)


def add_plan_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", choices=PRESETS, help="preset (default: llama3.1-8b)")
    add_integers(parser, gpus=(8, "GPUs of the whole cluster"), per_node=(8, "GPUs of a node"),
                 top=(12, "rows of the table"))
    parser.add_argument("--gpu", default="h100",
                        help=f"{', '.join(GPUS)}; or its peak, memory, memory bandwidth and link "
                             "within a node as TFLOP/s:GB:GB/s:GB/s (default: %(default)s)")
    parser.add_argument("--link", default="400gbit",
                        help=f"link from each GPU to other nodes: {', '.join(LINKS)}, or a speed "
                             "(default: %(default)s)")
    parser.add_argument("--measured", type=Path, metavar="FILE",
                        help="result of bench.py comm --model: plan for that cluster, in place of "
                             "--gpus, --per-node, --gpu, --link, and for that model by default")
    parser.add_argument("--batch", type=batch_sizes, metavar="N|LEAST:MOST|auto",
                        help="sequences per step, over all GPUs (default: 2 per GPU); or the best "
                             "of LEAST, twice as many, and so on to MOST; auto: 1 to 16 per GPU")
    parser.add_argument("--seq-len", type=positive_int, help="tokens per sequence (default: 8192)")
    parser.add_argument("--document-length", type=nonnegative_int, default=0,
                        help="tokens per document, where a sequence holds several and attention "
                             "stays within them; 0 for whole sequences (default: %(default)s)")
    parser.add_argument("--optimizer", choices=["muon", "adamw"], default="adamw",
                        help="muon: for the matrices of the blocks (default: %(default)s)")
    parser.add_argument("--moments", choices=["float32", "bfloat16"], default="float32",
                        help="dtype of AdamW's two moments (default: %(default)s)")
    for name, meaning in dict(
        tokens="days and GPU-hours to train on so many tokens, such as 15e12",
        dollars="with --tokens: the cost, at so many dollars for a GPU and hour",
        mtbf="mean hours between failures of a node: the best --save-every, the time that is lost",
    ).items():
        parser.add_argument(f"--{name}", type=positive_float, help=meaning)
    parser.add_argument("--save-seconds", type=nonnegative_float, default=60.0,
                        help="with --mtbf: for which a save stops training (default: %(default)s)")
    parser.add_argument("--restart-seconds", type=nonnegative_float, default=600.0,
                        help="with --mtbf: from a failure to the next step (default: %(default)s)")
    parser.add_argument("--plot", type=Path, metavar="FILE.svg",
                        help="draw the best plan of a quarter to four times as many GPUs")
    parser.add_argument("--evidence", action="store_true",
                        help="list published runs that are like the best plan, and predictions")
    add_adapter_flags(parser)
    parser.add_argument("--microbatch", type=positive_int,
                        help="only plans with microbatches of so many sequences")
    add_parallel_flags(parser, "Only plans with the values that are given; by default in bfloat16, "
                               "compiled.")
    parser.set_defaults(**dict.fromkeys(FILTERS))
    add_json_flag(parser)
    parser.add_argument("--check", action="store_true",
                        help="emulate a step of rank 0 of the best plan in this process, and "
                             "compare its counted memory and traffic with the prediction")


# fmt: on


def contestant_name(text: str) -> str:
    """Argument type: a name in CONTESTANTS. `choices` would not do: some versions of argparse
    reject the empty list, which stands for no argument, as no choice."""
    if text not in CONTESTANTS:
        raise argparse.ArgumentTypeError(f"expected {', '.join(CONTESTANTS)}, got '{text}'")
    return text


def batch_sizes(text: str) -> tuple[int, int]:
    """Argument type: the least and the most of N or LEAST:MOST; (0, 0) for auto."""
    least, _, most = text.partition(":")
    sizes = (0, 0) if text == "auto" else (positive_int(least), positive_int(most or least))
    if sizes[0] > sizes[1]:
        raise argparse.ArgumentTypeError(f"expected LEAST:MOST, got '{text}': {most}:{least}?")
    return sizes


# ------------------------------------------------------------------------------ the commands


def check_adamw(args: argparse.Namespace) -> None:
    if args.optimizer == "muon":
        raise UserError("this command measures AdamW: leave out --optimizer muon")


def check_same_step(args: argparse.Namespace) -> None:
    if args.dp == "diloco":
        raise UserError(
            "--dp diloco is another training, which this command does not know: --dp hsdp"
        )


def adapters_of(args: argparse.Namespace) -> tuple[LoRA | None, int]:
    """Return what build_on_meta needs for --lora, --rank, --dora and --base-bits."""
    if not args.lora and (args.dora or args.base_bits == 4):
        raise UserError("--dora and --base-bits are for adapters: give --lora, too")
    if args.lora and args.optimizer == "muon":
        raise UserError("--optimizer muon is for whole matrices: leave it out with --lora")
    return LoRA(args.rank, dora=args.dora) if args.lora else None, args.base_bits


def task_of(args: argparse.Namespace, microbatch: int, *adapters) -> Task:
    """Return the step that flags ask for, with `adapters`: a LoRA, and the bits of its base."""
    model = build_on_meta(PRESETS[args.model], *adapters)
    parallel = replace(requested_parallel(args), compile=False)  # --compile adds a contestant
    settings = dict(name=args.model, optimizer_of=partial(train.make_optimizer, args=args))
    settings["on_gpu"] = torch.cuda.is_available()
    return Task(model, parallel, args.batch, microbatch, args.seq_len, **settings)


def limit(args: argparse.Namespace) -> str:
    check_adamw(args)
    adapters = [LoRA(args.rank)] if args.command == "lora" else []
    task = task_of(args, args.batch, *adapters)
    return measure_limit(task, args.repeats, args.compile, args.operators)


def loss(args: argparse.Namespace) -> str:
    sizes = args.tokens, args.dim, args.vocab_size
    return measure_loss(sizes, args.dtype, args.chunks, args.repeats, args.json)


def compare(args: argparse.Namespace) -> str:
    names = "model batch microbatch seq_len lora rank dora base_bits dtype optimizer moments"
    flags = {name: getattr(args, name) for name in names.split()}
    task = task_of(args, args.microbatch, *adapters_of(args))
    return measure_compare(args.contestants, task, args.repeats, flags, args.json, args.plot)


def comm(args: argparse.Namespace) -> str:
    check_adamw(args)
    world, task = with_mesh(init_distributed()), None
    world.check_same_flags(vars(args) | {"nproc_per_node": world.per_node})
    if args.model:  # every rank computes a microbatch
        args.batch = args.microbatch * world.size
        args.dtype = "bfloat16" if has_bfloat16(world.device) else "float32"
        task = task_of(args, args.microbatch)
    return measure_comm(world, args.sizes, args.repeats, args.out, task)


def step(args: argparse.Namespace, prepare: Callable = prepare_pretraining) -> str:
    """Set up a training as a script does, of which `prepare` is, and measure its step."""
    check_same_step(args)
    # Nothing is written, so OUT may be another run's directory, which --resume accepts.
    args.out, args.resume = args.out or Path("out"), True
    if args.plot and args.pp == 1:
        raise UserError("--plot draws a pipeline: give --pp 2 or more, or leave it out")
    if args.device == "mps":
        raise UserError("bench.py step measures GPUs of CUDA, and CPUs: leave out --device mps")
    process = setup(args)
    check_writable({"--plot": args.plot, "--json": args.json})
    # A silenced collective leaves its output uninitialized: often denormal floats, with which a CPU
    # computes slowly. Threads inherit this setting, so it comes before they are started.
    torch.set_flush_denormal(True)
    job = prepare(args, process)
    world, runner, work = build(args, job, process, train.accumulate)
    optimizer = train.make_optimizer(job.model, args)
    for group in optimizer.param_groups:  # throughout, so that the loss stays finite
        group["lr"] = train.learning_rate(1, args)
    read = partial(train.local_batch, args, world, job.train_set)
    with contextlib.closing(read_ahead(read, itertools.count(1), world.device)) as batches:
        training = Training(world, job, runner, optimizer, batches, work, args.clip)
        return measure_step(training, args.repeats, args.plot, args.json)


def step_lora(args: argparse.Namespace) -> str:
    return step(finetune_lora.complete(args), lambda *given: finetune_lora.prepare(*given)[0])


def equal(args: argparse.Namespace) -> str:
    check_same_step(args)
    args.out, args.resume = args.out or Path("out"), True  # nothing is written
    args.dtype, args.compile, args.float8 = "float64", False, "none"
    args.offload = args.offload_activations = False
    process = setup(args)
    job = prepare_pretraining(args, process)
    work, _ = choose_work(args, job.whole, job.train_set.document_mask, process)
    world = with_mesh(process, work.parallel)
    rows = [row_of(i, job.train_set.sources, args.seed) for i in range(args.batch)]
    batches = job.train_set.batch(rows), train.local_batch(args, world, job.train_set, 1)

    def update(model, loss, batch, world):
        return train.update(train.make_optimizer(model, args), loss, batch, 1.0, world, step=1)

    accumulate = partial(train.accumulate, microbatch=work.microbatch)
    given = job.whole.config, job.initialize, *batches, world
    first = compare_steps(*given, accumulate, update)
    return f"the steps differ {first}" if first else "the steps are equal"


def drill(args: argparse.Namespace) -> str:
    own = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for flag in ("--kills", "--nproc-per-node", "--out"):
        own.add_argument(flag)
    _, given = own.parse_known_args(sys.argv[2:])  # the flags of train.py, but for --out
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    script = str(Path(train.__file__))
    command = [*torchrun, f"--nproc-per-node={args.nproc_per_node}", script, *given]
    out, save_every = args.out or Path("out/drill"), args.save_every or args.steps
    return measure_drill(command, out, args.kills, save_every, args.seed)


def plan(args: argparse.Namespace) -> str:
    """Return the output of `bench.py plan`. Defaults are those of the machine that was measured."""
    check_meetings(args)
    torch.set_num_threads(1)  # what runs here is small: threads would wait for each other
    if args.measured:
        report = read_measurement(args.measured)
        machine, defaults = measured_machine(report), report["compute"] | {"compile": False}
        args.gpus = report["ranks"]
    else:
        machine = assumed_machine(args.gpu, args.link, args.per_node, "cudnn")
        defaults = dict(model="llama3.1-8b", seq_len=8192, dtype="bfloat16", compile=True)
    for name in ("model", "seq_len", "dtype", "compile"):
        if getattr(args, name) is None:
            setattr(args, name, defaults[name])
    if args.dtype != defaults["dtype"] and (args.measured or args.gpu.lower() in GPUS):
        raise UserError(
            f"--dtype {args.dtype}: what is known of {machine.name} is its speed in "
            f"{defaults['dtype']}: leave it out, or give that of {args.dtype} as --gpu in numbers"
        )
    adapters, base_bits = adapters_of(args)
    model = build_on_meta(PRESETS[args.model], adapters, base_bits)
    wanted = {name: getattr(args, name) for name in FILTERS}
    parallel = replace(requested_parallel(args), offload=False)  # of parameters: never planned
    if args.dollars and not args.tokens:
        raise UserError("--dollars is for the cost of a run: give --tokens, too")
    auto = args.gpus, 16 * args.gpus
    least, most = (2 * args.gpus,) * 2 if not args.batch else args.batch if args.batch[0] else auto
    questions = []
    while least <= most:
        given = model, parallel, least, 1, args.seq_len, args.document_length, machine.overlaps
        what = machine, args.gpus, wanted, adapters, base_bits
        questions.append(Question(args.model, Work(*given), *what))
        least *= 2
    question, told = best_batch(questions) if len(questions) > 1 else (questions[0], "")
    run = Run(args.tokens, args.dollars, args.mtbf, args.save_seconds, args.restart_seconds)
    asked = args.top, args.json, args.plot, args.check, args.evidence
    return "\n".join(filter(None, [told, plan_cluster(question, run, *asked)]))


COMMANDS = {  # name -> function that adds the flags, function that returns the output
    "limit": (add_limit_flags, limit),
    "lora": (add_lora_flags, limit),
    "loss": (add_loss_flags, loss),
    "compare": (add_compare_flags, compare),
    "comm": (add_comm_flags, comm),
    "step": (partial(add_step_flags, add_pretraining_flags), step),
    "step-lora": (partial(add_step_flags, add_finetuning_flags), step_lora),
    "equal": (add_pretraining_flags, equal),
    "plan": (add_plan_flags, plan),
    "drill": (add_drill_flags, drill),
    "gpu": (
        add_gpu_flags,
        lambda args: measure_gpu(args.out, args.parts, args.docs, args.rehearse),
    ),
}


def main() -> None:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="|".join(COMMANDS))
    for name, (add_flags, _) in COMMANDS.items():
        add_flags(subparsers.add_parser(name))
    args = parser.parse_args()
    _, measure = COMMANDS[args.command]
    print_rank_zero(measure(args))


if __name__ == "__main__":
    run(main)
