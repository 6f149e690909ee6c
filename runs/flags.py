"""Command-line flags: the groups that scripts share."""

import argparse
from functools import partial
from pathlib import Path

from config import FLAGS, add_parallel_flags
from data import add_reading_flags
from lora import TARGETS
from model import PRESETS
from plumbing.parser import (
    duration,
    given_int,
    nonnegative_float,
    nonnegative_int,
    positive_float,
    positive_int,
)
from text.tokenizer import DEFAULT_TOKENIZER

MODEL_SIZES = ("dim", "n_layers", "n_heads", "n_kv_heads", "ffn_dim")  # overridable by flags

# fmt: off


def add_pretraining_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of train.py: model, data, and everything that all training scripts share."""
    model = parser.add_argument_group("model")
    model.add_argument("--model", help=f"preset: {', '.join(PRESETS)} (default: tiny)")
    for name in MODEL_SIZES:
        model.add_argument(f"--{name.replace('_', '-')}", type=positive_int,
                           help=f"{name} of the model, in place of the preset's")
    model.add_argument("--init", type=Path, metavar="DIR",
                       help="initial weights: a checkpoint, or a model directory in Meta's or "
                            "Hugging Face's format (default: random weights)")

    data = parser.add_argument_group("data")
    data.add_argument("--data", nargs="+", default=["python"],
                      help="text files, directories or token files, each with a weight or none, as "
                           "in a=0.7 b=0.3 (default: python, the source of Python's standard "
                           "library)")
    add_reading_flags(data)
    data.add_argument("--tokenizer", help=f"name or tokenizer.model file (default: the one of the "
                                          f"data or of --init, or {DEFAULT_TOKENIZER})")
    data.add_argument("--seq-len", type=positive_int, default=256,
                      help="tokens per sequence (default: %(default)s)")
    data.add_argument("--document-mask", action="store_true",
                      help="no attention across documents that share a sequence")
    data.add_argument("--prompt", default="def",
                      help="prompt of the text samples at evaluations (default: %(default)s)")
    add_training_flags(parser)
    parser.set_defaults(lr=None)  # it depends on the optimizer


def add_finetuning_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of finetune_lora.py: base model, data, LoRA, and what all scripts share."""
    base = parser.add_argument_group("base model")
    base.add_argument("--init", type=Path, metavar="DIR", required=True,
                      help="the base model: a checkpoint, a run, or a model directory in Meta's or "
                           "Hugging Face's format")
    base.add_argument("--tokenizer",
                      help="name or tokenizer.model file (default: the base model's)")

    data = parser.add_argument_group("data")
    data.add_argument("--data", nargs="+", default=["python"],
                      help="JSON lines, files or directories of them (default: python, docstrings "
                           "to write for functions of the standard library)")
    data.add_argument("--skip-bad", action="store_true",
                      help="leave out conversations that cannot be read, and list them in a file")
    data.add_argument("--seq-len", type=positive_int, default=512,
                      help="tokens per row of samples (default: %(default)s)")
    data.add_argument("--long", choices=["truncate", "drop"], default="truncate",
                      help="treatment of samples longer than a row (default: %(default)s)")
    data.add_argument("--train-on-prompt", action="store_true",
                      help="count the loss of prompts too, not of answers alone")

    lora = parser.add_argument_group("LoRA")
    lora.add_argument("--rank", type=positive_int, default=8,
                      help="rank of the adapters (default: %(default)s)")
    lora.add_argument("--alpha", type=nonnegative_float, default=16.0,
                      help="the adapters' scale is alpha / rank (default: %(default)s)")
    lora.add_argument("--rslora", action="store_true", help="the scale is alpha / sqrt(rank)")
    lora.add_argument("--dropout", type=nonnegative_float, default=0.0,
                      help="dropout probability of the adapters' input (default: %(default)s)")
    lora.add_argument("--targets", nargs="+", choices=TARGETS, default=list(TARGETS),
                      metavar="MATRIX",
                      help=f"matrices with an adapter, of {' '.join(TARGETS)} (default: all)")
    lora.add_argument("--dora", action="store_true",
                      help="train the length of each row apart from its direction")
    lora.add_argument("--base-bits", type=int, choices=[16, 4], default=16,
                      help="4: keep the blocks' frozen matrices in 4 bits (default: the dtype of "
                           "computation)")
    lora.add_argument("--merge", nargs="?", choices=["last", "best"], const="last",
                      help="write OUT/merged at the end: the model with the adapter added, the "
                           "last one or that of --keep-best (default of --merge: last)")
    add_training_flags(parser)
    parser.set_defaults(steps=200, warmup=20, weight_decay=0.0, eval_every=100, save_every=100)


def add_optimizer_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags that train.make_optimizer reads."""
    parser.add_argument("--lr", type=nonnegative_float, default=5e-3,
                        help="peak learning rate (default in training: 0.02 with muon, 0.005 with "
                             "adamw); larger models need less")
    parser.add_argument("--weight-decay", type=nonnegative_float, default=0.1,
                        help="weight decay of matrices; norms have none (default: %(default)s)")
    add_parallel_flags(parser, ["optimizer", "moments"])


def add_training_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of every training script: optimizer, parallelism, speed, files of the run."""
    step = parser.add_argument_group("optimizer step")
    step.add_argument("--batch", type=positive_int, default=8,
                      help="sequences per step, over all processes (default: %(default)s)")
    step.add_argument("--microbatch", type=positive_int,
                      help="sequences that a process computes at a time (default: all of its own)")
    step.add_argument("--steps", type=partial(given_int, least=1), default=1150,
                      help="number of optimizer steps (default: %(default)s)")
    step.add_argument("--epochs", type=positive_float,
                      help="in place of --steps: how often the data are read")
    add_optimizer_flags(step)
    step.add_argument("--warmup", type=given_int, default=50,
                      help="steps of linear warmup to the peak (default: %(default)s, even where "
                           "--steps are fewer)")
    step.add_argument("--clip", type=nonnegative_float, default=1.0,
                      help="maximum gradient norm, 0 for no clipping (default: %(default)s)")
    step.add_argument("--seed", type=int, default=0, help="seed of initial weights and data order")

    parallel = parser.add_argument_group("how a step is split over ranks and computed")
    add_parallel_flags(parallel, [name for name in FLAGS if name not in ("optimizer", "moments")])
    run = parser.add_argument_group("run")
    run.add_argument("--device", choices=["auto", "mps"], default="auto",
                     help="auto: GPUs of CUDA, or else the CPU; mps: an Apple GPU, for one process "
                          "(untested) (default: %(default)s)")
    run.add_argument("--out", type=Path, help="output directory of the run (default: out/NAME)")
    run.add_argument("--resume", action="store_true",
                     help="continue from the newest checkpoint in OUT, if there is one")
    run.add_argument("--skip-steps", type=positive_int, nargs="+", default=[], metavar="STEP",
                     help="steps to leave out, as one whose loss is not finite (default: none)")
    run.add_argument("--time-limit", type=duration, default=0, metavar="H:MM",
                     help="save and end after so many hours and minutes (default: never)")
    run.add_argument("--save-every", type=nonnegative_int, default=500,
                     help="steps between checkpoints, 0 for one at the end (default: %(default)s)")
    run.add_argument("--async-save", action="store_true",
                     help="write checkpoints in the background, from a copy in CPU memory")
    run.add_argument("--keep", type=nonnegative_int, default=2,
                     help="number of checkpoints to keep, 0 for all (default: %(default)s)")
    run.add_argument("--keep-best", action="store_true",
                     help="save whenever an evaluation finds the lowest loss so far, keep that "
                          "checkpoint too, and link OUT/best to it")
    run.add_argument("--eval-every", type=nonnegative_int, default=500,
                     help="steps between evaluations, 0 for none (default: %(default)s)")
    run.add_argument("--eval-windows", type=positive_int, default=512,
                     help="validation sequences per evaluation (default: %(default)s)")
    run.add_argument("--val-data", nargs="+",
                     help="data of the same kind to validate on (default: a part of --data)")
    run.add_argument("--exam", type=Path, metavar="FILE",
                     help="questions to ask at evaluations, as JSON lines (text/exams.py)")
    run.add_argument("--profile", action="store_true",
                     help="write a trace of three steps to OUT/trace-RANK.json, for "
                          "chrome://tracing")
