"""Command-line flags: the groups that scripts share."""

import argparse
from dataclasses import fields
from functools import partial
from pathlib import Path

from config import FLAGS, add_parallel_flags
from data import add_reading_flags
from lora import TARGETS
from model import PRESETS, LlamaConfig
from plumbing.messages import UserError
from plumbing.parser import (
    Parser,
    duration,
    given_int,
    nonnegative_float,
    nonnegative_int,
    positive_float,
    positive_int,
)
from text.tokenizer import DEFAULT_TOKENIZER

# Fields of LlamaConfig whose flags replace the preset's value: integers and strings.
SIZES = (f for f in fields(LlamaConfig) if type(f.default) in (int, str))
FOLLOW = "vocab_size", "max_seq_len", "head_dim"  # from the tokenizer, or from other fields
MODEL_FLAGS = {f.name: type(f.default) for f in SIZES if f.name not in FOLLOW}

# fmt: off


def parse_pretraining() -> argparse.Namespace:
    """Return the flags of train.py."""
    parser = Parser(description="Train a Llama.")
    add_pretraining_flags(parser)
    args = parser.parse_args()
    args.out = args.out or Path("out") / (args.model or ("tuned" if args.init else "tiny"))
    return args


def add_pretraining_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of train.py: model, data, and everything that all training scripts share."""
    add = parser.add_argument_group("model").add_argument
    add("--model", help=f"preset: {', '.join(PRESETS)} (default: tiny)")
    for name, kind in MODEL_FLAGS.items():
        add(f"--{name.replace('_', '-')}", type=positive_int if kind is int else kind,
            help=f"{name} of the model, in place of the preset's")
    add("--init", type=Path, metavar="DIR",
        help="initial weights: a checkpoint, or Meta's or Hugging Face's files (default: random)")

    data = parser.add_argument_group("data")
    add = data.add_argument
    add("--data", nargs="+", default=["python"],
        help="text files, directories or token files, each with a weight or none, as in a=0.7 "
             "b=0.3 (default: python, the source of Python's standard library)")
    add_reading_flags(data)
    add("--tokenizer",
        help=f"name or file (default: that of the data or of --init, or {DEFAULT_TOKENIZER})")
    add("--seq-len", type=positive_int, default=256, help="tokens per sequence")
    add("--document-mask", action="store_true", help="no attention across documents of a sequence")
    add("--prompt", default="def", help="prompt of the text samples at evaluations")
    add_training_flags(parser)


def complete_finetuning(args: argparse.Namespace, goal: str = "") -> None:
    """Check the flags that need no model, and set the default of --out, which ends with the `goal`
    of the training."""
    of_adapters = args.base_bits == 4 or args.merge or args.dropout or args.dora
    if args.all_weights and (of_adapters or args.reshard == "adapters"):
        names = "--base-bits 4, --merge, --dropout, --dora and --reshard adapters are for adapters"
        raise UserError(f"{names}: leave them out, or --all-weights")
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
    goal = goal or ("full" if args.all_weights else "lora")
    args.out = args.out or Path("out") / f"{name}-{goal}"


def add_finetuning_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of finetune_lora.py: base model, data, LoRA, and what all scripts share."""
    add = parser.add_argument_group("base model").add_argument
    add("--init", type=Path, metavar="DIR", required=True,
        help="the base model: a checkpoint, a run, or Meta's or Hugging Face's files")
    add("--tokenizer", help="name or tokenizer.model file (default: the base model's)")
    add("--chat-template", metavar="NAME|FILE", help="one of the base's templates, or a file")

    add = parser.add_argument_group("data").add_argument
    add("--data", nargs="+", default=["python"],
        help="JSON lines, files or directories of them (default: python, docstrings to write for "
             "functions of the standard library)")
    add("--skip-bad", action="store_true", help="leave out what cannot be read; list it in a file")
    add("--seq-len", type=positive_int, default=512, help="tokens per row; longer samples are cut")
    add("--train-on-prompt", action="store_true", help="count the loss of prompts, too")

    add = parser.add_argument_group("LoRA").add_argument
    add("--all-weights", action="store_true", help="train all weights, in place of adapters")
    add("--rank", type=positive_int, default=8, help="rank of the adapters")
    add("--alpha", type=nonnegative_float, default=16.0, help="adapters' scale is alpha / rank")
    add("--rslora", action="store_true", help="adapters' scale is alpha / sqrt(rank)")
    add("--dropout", type=nonnegative_float, default=0.0, help="dropout of the adapters' input")
    add("--targets", nargs="+", choices=TARGETS, default=list(TARGETS), metavar="MATRIX",
        help=f"matrices with an adapter, of {' '.join(TARGETS)} (default: all)")
    add("--dora", action="store_true", help="train the length of each row apart from its direction")
    add("--base-bits", type=int, choices=[16, 4], default=16,
        help="4: keep the blocks' frozen matrices in 4 bits (default: the dtype of computation)")
    add("--merge", nargs="?", choices=["last", "best"], const="last",
        help="write OUT/merged at the end: the model with the last adapter, or with the best one")
    add_training_flags(parser, lr=5e-3)
    parser.set_defaults(steps=200, warmup=20, weight_decay=0.0, eval_every=100, save_every=100)


def add_training_flags(parser: argparse.ArgumentParser, lr: float | None = None) -> None:
    """Add the flags of every training script: optimizer, parallelism, speed, files of the run.
    Without a default for --lr, it depends on the optimizer."""
    step = parser.add_argument_group("optimizer step")
    add = step.add_argument
    add("--batch", type=positive_int, default=8, help="sequences per step, over all processes")
    add("--microbatch", type=positive_int, help="sequences a rank computes at once (default: all)")
    add("--steps", type=partial(given_int, least=1), default=1150, help="number of optimizer steps")
    add("--epochs", type=positive_float, help="in place of --steps: how often the data are read")
    default = "" if lr else " (default: muon 0.02, adamw 0.005)"
    add("--lr", type=nonnegative_float, default=lr,
        help=f"peak learning rate; larger models need less{default}")
    add("--weight-decay", type=nonnegative_float, default=0.1, help="of matrices; norms have none")
    add_parallel_flags(step, ["optimizer", "moments"])
    add("--warmup", type=given_int, default=50,
        help="steps of linear warmup to the peak, even where --steps are fewer")
    add("--clip", type=nonnegative_float, default=1.0, help="maximum gradient norm, 0 for none")
    add("--seed", type=int, default=0, help="seed of initial weights and data order")

    parallel = parser.add_argument_group("how a step is split over ranks and computed")
    add_parallel_flags(parallel, [name for name in FLAGS if name not in ("optimizer", "moments")])

    add = parser.add_argument_group("run").add_argument
    add("--device", choices=["auto", "mps"], default="auto",
        help="auto: GPUs of CUDA, or else the CPU; mps: an Apple GPU, for one process (untested)")
    add("--out", type=Path, help="output directory of the run (default: out/NAME)")
    add("--resume", action="store_true", help="continue from the newest checkpoint in OUT, if any")
    add("--skip-steps", type=positive_int, nargs="+", default=[], metavar="STEP",
        help="steps to leave out, as one whose loss is not finite (default: none)")
    add("--time-limit", type=duration, default=0, metavar="H:MM",
        help="save and end after so many hours and minutes (default: never)")
    add("--save-every", type=nonnegative_int, default=500,
        help="steps between checkpoints, 0 for one at the end")
    add("--async-save", action="store_true", help="write checkpoints from a copy, while it trains")
    add("--keep", type=nonnegative_int, default=2, help="newest checkpoints to keep, 0 for all")
    add("--keep-best", action="store_true",
        help="also save at the lowest validation loss so far, and keep that as OUT/best")
    add("--eval-every", type=nonnegative_int, default=500,
        help="steps between evaluations, 0 for none")
    add("--eval-windows", type=positive_int, default=512, help="sequences per evaluation")
    add("--val-data", nargs="+", help="validation data of the same kind (default: part of --data)")
    add("--exam", type=Path, metavar="FILE", help="questions to ask at evaluations (text/exams.py)")
    add("--profile", action="store_true", help="trace three steps, in OUT/trace-RANK.json")
    parser.set_defaults(token_offset=0)  # a resume may change it (data.tokens_done)
