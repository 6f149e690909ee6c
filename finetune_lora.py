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
from data import LEFT_OUT
from files.adapters import check_names
from files.adapters import load_adapter as load_adapter  # re-exported for users' scripts
from generate import generate
from lora import TARGETS, LoRA, add_adapters, init_adapters
from model import Llama
from plumbing.parser import Parser
from plumbing.processes import Process, UserError, meet, print_rank_zero, run
from plumbing.shards import assign_shard
from runs.flags import add_finetuning_flags
from runs.rules import check_training_flags, choose_steps, choose_tokenizer, requested_work
from runs.setup import Job, build, setup
from techniques import nf4
from text.chat import ANSWER_ROOM, SHOWN, encode, open_samples
from text.corpora import Reading
from text.exams import Exam
from text.tokenizer import CACHE, Tokenizer, load_tokenizer
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
    # args.init becomes the directory that was found, and the run's record names it.
    args.init = process.broadcast_from_rank_zero(partial(checkpoint.find_checkpoint, args.init))
    base = checkpoint.read_config(args.init)
    techniques = (lora.TECHNIQUE,) + (nf4.TECHNIQUE,) * (args.base_bits == 4)
    check_training_flags(args, base["model"], process, *techniques)
    if args.rank > base["model"].dim:
        raise UserError(f"--rank {args.rank} exceeds the model width: at most {base['model'].dim}")
    tokenizer = process.local_rank_zero_first(partial(load_tokenizer, choose_tokenizer(args, base)))
    checkpoint.check_tokenizer(base, tokenizer)
    if process.rank == 0:
        note_unseen_end(args.init, tokenizer)
    meet()
    exam = args.exam and Exam(args.exam, tokenizer, base["model"].max_seq_len, chat=True)
    reading = Reading(skip_bad=args.skip_bad)
    options = args.seq_len, args.long, args.train_on_prompt, args.val_data, reading
    train_set, val_set, examples, summary = open_samples(args.data, tokenizer, *options)
    choose_steps(args, len(train_set))
    if args.merge and (merged := args.out / "merged").exists():
        of = checkpoint.read_config(merged)["flags"].get("adapter") if args.resume else None
        last = args.out / f"step-{args.steps:08d}"
        source = args.out / "best" if args.merge == "best" else last
        if of != source.resolve().name or not last.exists():
            raise UserError(f"{merged} exists: remove it, or leave out --merge")
    args.data_checksum = process.check_same("the training data", train_set.checksum())
    if process.rank == 0:
        reading.list_left_out(CACHE / f"conversations-{args.data_checksum}-{LEFT_OUT}")
    print_rank_zero(summary)
    with torch.device("meta"):
        model = Llama(base["model"])
        settings = args.rank, args.alpha, args.dropout, args.rslora, args.dora
        layers = {name.split(".")[-1] for name, _ in model.named_modules()}
        targets = tuple(t for t in args.targets if t in layers)  # a change lacks some
        add_adapters(model, LoRA(*settings, targets), args.base_bits)
    check_names(model)

    def initialize(model: Llama) -> None:
        checkpoint.load_weights(args.init, model)
        init_adapters(model, args.seed, assign_shard, process.device)

    whole = copy.deepcopy(model)
    job = Job(model, whole, initialize, tokenizer, train_set, val_set, exam, techniques)
    return job, examples


def note_unseen_end(directory: Path, tokenizer: Tokenizer) -> None:
    """Print a note if the base was never trained on the token that ends an answer.

    Its row of the output matrix is then as near to the rows of reserved tokens, and of ids without
    a token, as these are to each other: training only pushes them all away. That matrix is frozen,
    so adapters cannot tell such tokens apart."""
    _, stored = checkpoint.open_weights(directory)
    rows = stored.get("output.weight", stored["tok_embeddings.weight"]).read()  # [V, D]
    reserved = [i for name, i in tokenizer.special.items() if "reserved" in name]
    unseen = rows[[*reserved, *range(tokenizer.vocab_size, len(rows))]].float()  # [n, D]
    end = encode([{"role": "assistant", "content": ""}], tokenizer)[0][-1]
    distances = (torch.cat([unseen, rows[[end]].float()]) - unseen.mean(0)).norm(dim=1)
    if len(unseen) > 2 and distances[-1] <= 2 * distances[:-1].max():
        advice = "begin with a model that was trained to chat"
        if end == tokenizer.eos:
            advice += f", or first run train.py --init {directory} on documents, which end with it"
        name = tokenizer.decode([end])
        print(f"note: the base never saw {name}, so answers will hardly end: {advice}")


def sample_answers(
    model: Llama, examples: list[tuple[list[int], str]], tokenizer: Tokenizer, step: int
) -> str:
    """Return lines that show what a model answers to the first examples, and score all answers:
    how many end by themselves, how long they are, and the share of tokens that they have in common
    with the true ones (the F1 score of two bags of tokens). Tokens are drawn as generate.py draws
    them: a small model that always takes the likeliest one soon repeats itself."""
    if not examples:
        return "no held-out prompt is short enough to show"
    prompts, true_answers = zip(*examples)
    options = dict(temperature=0.8, top_p=0.95, stop=tokenizer.stop)  # the defaults of generate.py
    answers = generate(model, prompts, ANSWER_ROOM, **options)
    said = [[token for token in answer if token not in tokenizer.stop] for answer in answers]
    true = [tokenizer.encode(text) for text in true_answers]
    who, lines = f"after {step} steps" if step else "base model", []
    for prompt, answer, truth in list(zip(prompts, answers, true_answers))[:SHOWN]:
        shown = "" if step else tokenizer.decode(prompt)
        lines += [f"{shown}--- {who}: {tokenizer.decode(answer)}", f"--- true answer: {truth}"]
    common = [(Counter(a) & Counter(b)).total() for a, b in zip(said, true)]
    pairs = zip(common, said, true)
    overlap = statistics.mean(2 * n / max(1, len(a) + len(b)) for n, a, b in pairs)
    ended = statistics.mean(len(a) < len(answer) for a, answer in zip(said, answers))
    length, true_length = (statistics.mean(map(len, part)) for part in (said, true))
    score = f"{ended:.0%} end, {length:.1f} tokens (true ones {true_length:.1f}), {overlap:.0%}"
    return "\n".join([*lines, f"--- {who}: of {len(said)} answers {score} in common", "---"])


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
    finished = train(args, world, runner, work, job, newest, sample_text)
    if args.merge and finished and world.rank == 0:
        merged = args.out / "merged"
        if not merged.exists():  # it does if the run had finished before
            source = args.out / "best" if args.merge == "best" else args.out
            adapter = checkpoint.find_adapter(source.resolve())
            checkpoint.merge(args.init, adapter, merged, job.tokenizer)
        print(f"merged:     python generate.py {shlex.quote(str(merged))} --chat")
    base, adapter = (shlex.quote(str(path)) for path in (args.init, args.out))
    flags = "--base-bits 4 --chat" if args.base_bits == 4 else "--chat"
    print_rank_zero(f"generate:   python generate.py {base} --adapter {adapter} {flags}")


if __name__ == "__main__":
    run(main)
