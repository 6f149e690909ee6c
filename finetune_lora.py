r"""Fine-tune a Llama with LoRA: train a few small matrices beside its own to answer.

    torchrun train.py                                            a base model: minutes on a laptop
    torchrun finetune_lora.py --init out/tiny                    teach it to write docstrings
    torchrun --nproc-per-node 2 finetune_lora.py --init out/tiny --out out/two       two processes
    torchrun --nproc-per-node 8 finetune_lora.py --init ~/Llama-3.1-8B --data chats.jsonl \
             --seq-len 4096 --batch 64 --microbatch 4 --lr 2e-4 --rank 16 --merge
    torchrun finetune_lora.py --init ~/Llama-3.1-70B --base-bits 4 --data chats.jsonl        one GPU

The data is JSON, one conversation a line: {"messages": [{"role", "content"}...]}, or instruction,
input and output, or prompt and completion (text/chat.py). Several conversations share a row of
--seq-len tokens; attention does not cross from one to another.

The base is frozen, so it has no gradients. With --dp ddp, the default where a copy fits, a step
communicates the gradients of the adapters and nothing else, and more processes make it faster. On
several processes the start of a run prints what a step would communicate under each strategy.

Every checkpoint is an adapter in PEFT's format; --merge also writes the model with it added.
"""

import plumbing.endings  # first, for Ctrl-C during the imports
import argparse
import copy
import shlex
import statistics
from collections import Counter
from functools import partial
from pathlib import Path

import torch

import checkpoint
import lora
from costs.search import sent_by_strategy
from data import LEFT_OUT_FILE
from files.adapters import load_adapter as load_adapter  # re-exported for users' scripts
from files.adapters import peft_name
from files.directories import find_adapter
from generate import find_model, generate
from lora import TARGETS, LoRA, adapters, add_adapters, init_adapters
from model import Llama
from plumbing.parser import Parser
from plumbing.processes import Process, UserError, print_rank_zero, run
from plumbing.shards import assign_shard
from runs.flags import add_finetuning_flags
from runs.rules import check_training_flags, choose_steps, requested_work
from runs.setup import Job, build, setup
from techniques import nf4
from text.chat import ANSWER_ROOM, SHOWN, open_samples
from text.corpora import Reading
from text.exams import Exam
from text.tokenizer import CACHE, Tokenizer
from train import accumulate, train


def parse_args() -> argparse.Namespace:
    parser = Parser(description="Fine-tune a Llama with LoRA.")
    add_finetuning_flags(parser)
    return complete(parser.parse_args())


def complete(args: argparse.Namespace) -> argparse.Namespace:
    """Check the flags that need no model, and set the default of --out."""
    args.targets = [target for target in TARGETS if target in args.targets]
    if args.dropout >= 1:
        raise UserError(f"--dropout {args.dropout:g} drops everything: give a number below 1")
    if args.dora and args.dropout:
        raise UserError("--dora with --dropout would multiply each matrix twice: leave one out")
    if args.alpha == 0:
        raise UserError("--alpha 0 switches the adapters off: give a number above 0")
    if args.merge == "best" and not args.keep_best:
        raise UserError("--merge best is the checkpoint of --keep-best: give it, too")
    init = args.init.resolve()
    name = init.parent.name if init.name.startswith("step-") else init.name
    args.out = args.out or Path("out") / f"{name}-lora"
    return args


def prepare(args: argparse.Namespace, process: Process) -> tuple[Job, list[tuple[list[int], str]]]:
    """Check the flags, open the data, and describe the base model with adapters.

    Returns also some held-out prompts, as (tokens, true answer)."""
    base, tokenizer = find_model(args.init, args.tokenizer, process)
    args.init = base["directory"]  # which may be a run's newest checkpoint: the record names it
    techniques = (lora.TECHNIQUE, nf4.TECHNIQUE) if args.base_bits == 4 else (lora.TECHNIQUE,)
    check_training_flags(args, base["model"], process, *techniques)
    if args.rank > base["model"].dim:
        raise UserError(f"--rank {args.rank} exceeds the model width: at most {base['model'].dim}")
    exam = args.exam and Exam(args.exam, tokenizer, base["model"].max_seq_len, chat=True)
    reading = Reading(skip_bad=args.skip_bad)
    train_set, val_set, examples, summary = open_samples(
        args.data, tokenizer, args.seq_len, args.train_on_prompt, args.val_data, reading
    )
    choose_steps(args, len(train_set))
    if args.merge and (merged := args.out / "merged").exists():
        of = checkpoint.read_config(merged)["flags"].get("adapter") if args.resume else None
        last = args.out / f"step-{args.steps:08d}"
        source = args.out / "best" if args.merge == "best" else last
        if of != source.resolve().name or not last.exists():
            raise UserError(f"{merged} exists: remove it, or leave out --merge")
    args.data_checksum = process.check_same("the training data", train_set.checksum())
    if process.rank == 0:
        reading.list_left_out(CACHE / f"conversations-{args.data_checksum}-{LEFT_OUT_FILE}")
    print_rank_zero(summary)
    with torch.device("meta"):
        model = Llama(base["model"])
        layers = {name.split(".")[-1] for name, _ in model.named_modules()}
        targets = tuple(t for t in args.targets if t in layers)  # a changed model may lack some
        settings = LoRA(args.rank, args.alpha, args.dropout, args.rslora, args.dora, targets)
        add_adapters(model, settings, args.base_bits)
    for name in adapters(model):
        peft_name(name)  # refused before it is trained

    def initialize(model: Llama) -> None:
        checkpoint.load_weights(args.init, model)
        init_adapters(model, args.seed, assign_shard, process.device)

    whole = copy.deepcopy(model)
    job = Job(model, whole, initialize, tokenizer, train_set, val_set, exam, techniques)
    return job, examples


def sample_answers(
    model: Llama, examples: list[tuple[list[int], str]], tokenizer: Tokenizer, step: int
) -> str:
    """Return lines that show what a model answers to the first examples, and score all answers:
    how many end by themselves, how long they are, and the share of tokens that they have in common
    with the true ones (the F1 score of two bags of tokens). Tokens are drawn as generate.py draws
    them: a small model that always takes the likeliest one soon repeats itself."""
    if not examples:
        return "no held-out prompt is short enough to show"
    prompts = [prompt for prompt, _ in examples]
    stop = tokenizer.stop
    answers = generate(model, prompts, ANSWER_ROOM, temperature=0.8, top_p=0.95, stop=stop)
    who = f"after {step} steps" if step else "base model"
    lines, scores = [], []
    for (prompt, truth), answer in zip(examples, answers):
        if len(scores) < SHOWN:
            shown = "" if step else tokenizer.decode(prompt)
            lines += [f"{shown}--- {who}: {tokenizer.decode(answer)}", f"--- true answer: {truth}"]
        said = [token for token in answer if token not in stop]
        true = tokenizer.encode(truth)
        common = (Counter(said) & Counter(true)).total()
        overlap = 2 * common / max(1, len(said) + len(true))
        scores.append((len(said) < len(answer), len(said), len(true), overlap))
    ended, length, true_length, overlap = map(statistics.mean, zip(*scores))
    score = f"{ended:.0%} end, {length:.1f} tokens (true ones {true_length:.1f}), {overlap:.0%}"
    return "\n".join([*lines, f"--- {who}: of {len(scores)} answers {score} in common", "---"])


def main() -> None:
    args = parse_args()
    process = setup(args)
    job, examples = prepare(args, process)
    newest = process.broadcast_from_rank_zero(partial(checkpoint.lock_run, args.out, args.resume))
    if process.size > args.tp * args.pp:
        work = requested_work(args, job.whole, process, packed=True)
        sent = sent_by_strategy(work, args.shard, process)
        print_rank_zero(f"per step, each rank would send: {sent}")
    world, runner, work = build(args, job, process, accumulate)

    sample_text = partial(sample_answers, job.model, examples, job.tokenizer)
    finished = train(args, job, world, runner, work, newest, sample_text)
    if args.merge and finished and world.rank == 0:
        merged = args.out / "merged"
        if not merged.exists():  # it does if the run had finished before
            source = args.out / "best" if args.merge == "best" else args.out
            adapter = find_adapter(source.resolve())
            checkpoint.merge(args.init, adapter, merged, job.tokenizer)
        print(f"merged:     python generate.py {shlex.quote(str(merged))} --chat")
    base, adapter = (shlex.quote(str(path)) for path in (args.init, args.out))
    flags = "--base-bits 4 --chat" if args.base_bits == 4 else "--chat"
    print_rank_zero(f"generate:   python generate.py {base} --adapter {adapter} {flags}")


if __name__ == "__main__":
    run(main)
