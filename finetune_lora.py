r"""Fine-tune a Llama with LoRA: teach it to answer by training thin matrices beside its own.

    torchrun train.py                                            a base model: minutes on a laptop
    torchrun finetune_lora.py --init out/tiny                    teach it to write docstrings
    torchrun --nproc-per-node 2 finetune_lora.py --init out/tiny --out out/two       two processes
    torchrun --nproc-per-node 8 finetune_lora.py --init ~/Llama-3.1-8B --data chats.jsonl \
             --seq-len 4096 --batch 64 --microbatch 4 --lr 2e-4 --rank 16 --merge
    torchrun finetune_lora.py --init ~/Llama-3.1-70B --base-bits 4 --data chats.jsonl        one GPU

The data is JSON, one conversation a line: {"messages": [{"role", "content"}...]}, or instruction,
input and output, or prompt and completion (text/conversations.py). Several conversations share a
row of --seq-len tokens; attention does not cross from one to another.

The base is frozen, so it has no gradients. With --dp ddp, the default where a device can hold the
model, a step communicates the gradients of the adapters and nothing else, and more processes make
it faster. On several processes a run first prints what a step would send under each strategy.

Every checkpoint is an adapter in PEFT's format; --merge [best] also writes the merged model. With
--all-weights there is no adapter: all weights are trained, as train.py does.
"""

import plumbing.endings  # first, for Ctrl-C during the imports
import argparse
import copy
import shlex
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch

import checkpoint
import evaluate
import lora
import train
from data import list_left_out
from files.adapters import load_adapter as load_adapter  # re-exported for users' scripts
from files.adapters import peft_name
from generate import find_model
from model import Llama
from plumbing.messages import UserError, print_rank_zero
from plumbing.parser import Parser
from plumbing.processes import Process, run
from runs import flags, rules, setup
from techniques import nf4
from text.chat import open_samples
from text.conversations import conversations
from text.corpora import Reading
from text.exams import Exam
from text.tokenizer import Tokenizer


class Script(NamedTuple):
    """The parts of `finetune` in which finetune_lora.py, preferences.py and rewards.py differ."""

    docstring: str  # its first line is the first of --help
    add_flags: Callable[[Parser], None]
    complete: Callable[[argparse.Namespace], None]  # checks flags and sets what depends on them
    open_data: Callable  # (flags, tokenizer, Reading) -> what open_samples returns
    make_task: Callable = evaluate.Prediction  # with the fields of Prediction as arguments


def open_conversations(
    args: argparse.Namespace, tokenizer: Tokenizer, reading: Reading, read: Callable = conversations
) -> tuple:
    """Return what text/chat.py's open_samples does for these flags; `read` is passed on."""
    options = args.seq_len, args.train_on_prompt, args.val_data, reading, read
    return open_samples(args.data, tokenizer, *options)


def finetune(script: Script) -> None:
    """Train adapters, or all weights, for the task of a script."""
    parser = Parser(description=script.docstring.partition("\n")[0])
    script.add_flags(parser)
    args = parser.parse_args()
    script.complete(args)
    process = setup.setup(args)
    job, examples = prepare(args, process, script)
    newest = process.broadcast_from_rank_zero(partial(checkpoint.lock_run, args.out, args.resume))
    print_rank_zero(setup.describe_strategies(args, job, process))
    world, runner, work = setup.build(args, job, process, train.accumulate)
    sample_text = partial(evaluate.sample_answers, job.model, examples, job.tokenizer)
    task = script.make_task(args, job, world, work, sample_text)
    finished = train.train(task, runner, newest)
    chat = " --chat" if getattr(args, "chat", True) else ""  # only rewards.py has this flag
    if args.merge and finished and world.rank == 0:
        merged = args.out / "merged"
        if not merged.exists():  # it exists if --resume found a finished run
            source = args.out / "best" if args.merge == "best" else args.out
            checkpoint.merge(args.init, source.resolve(), merged, job.tokenizer)
        print(f"merged:     python generate.py {shlex.quote(str(merged))}{chat}")
    base, out = (shlex.quote(str(path)) for path in (args.init, args.out))
    model = out if args.all_weights else f"{base} --adapter {out}"
    model += " --base-bits 4" if args.base_bits == 4 else ""
    print_rank_zero(f"generate:   python generate.py {model}{chat}")


def prepare(args: argparse.Namespace, process: Process, script: Script) -> tuple[setup.Job, list]:
    """Check the flags, open the data, and build the model on meta, with its adapters.

    Returns the job and some held-out prompts, as (tokens, true answer)."""
    base, tokenizer = find_model(args.init, args.tokenizer, process, args.chat_template)
    args.init = base["directory"]  # records name the checkpoint, also where --init is a run
    techniques = () if args.all_weights else (lora.TECHNIQUE,)
    if args.base_bits == 4:
        techniques += (nf4.TECHNIQUE,)
    rules.check_training_flags(args, base["model"], process, *techniques)
    with torch.device("meta"):
        model = Llama(base["model"])
        layer_names = {name.split(".")[-1] for name, _ in model.named_modules()}
        # A changed model.py may lack some of the targets.
        targets = tuple(name for name in args.targets if name in layer_names)
        settings = lora.LoRA(args.rank, args.alpha, args.dropout, args.rslora, args.dora, targets)
        if not args.all_weights:
            lora.add_adapters(model, settings, args.base_bits)
    for name in lora.adapters(model):
        peft_name(name)  # raises for an adapter that PEFT's format cannot name
    exam = args.exam and Exam(args.exam, tokenizer, base["model"].max_seq_len, chat=True)
    reading = Reading(skip_bad=args.skip_bad)
    train_set, val_set, examples, summary = script.open_data(args, tokenizer, reading)
    rules.choose_steps(args, len(train_set))
    if args.merge and (merged := args.out / "merged").exists():
        last_step = args.out / f"step-{args.steps:08d}"
        adapter = (args.out / "best" if args.merge == "best" else last_step).resolve().name
        is_finished = args.resume and last_step.exists()
        # Only this finished run's own merge of this adapter may exist.
        if not is_finished or checkpoint.read_config(merged)["flags"].get("adapter") != adapter:
            raise UserError(f"{merged} exists: remove it, or leave out --merge")
    args.data_checksum = process.check_same("the training data", train_set.checksum())
    list_left_out(reading, f"conversations-{args.data_checksum}")
    print_rank_zero(summary)

    def initialize(model: Llama) -> None:
        checkpoint.load_weights(args.init, model)
        lora.init_adapters(model, args.seed, device=process.device)

    whole = copy.deepcopy(model)  # parallelize changes the other one
    job = setup.Job(model, whole, initialize, tokenizer, train_set, val_set, exam, techniques)
    return job, examples


SCRIPT = Script(__doc__, flags.add_finetuning_flags, flags.complete_finetuning, open_conversations)
main = partial(finetune, SCRIPT)

if __name__ == "__main__":
    run(main)
