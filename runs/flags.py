"""What a run is asked: frozen records whose fields are the flags of the training scripts.

`Run` has what all scripts share, and `Pretraining` what train.py adds. finetune_lora.py adds
`Finetuning`, from which preferences.py, rewards.py and distill.py derive their own. A record is
parsed once and never changes: what the device, the data and a checkpoint decide is in Job
(runs/setup.py), Steps (text/order.py) and Work (config.py). may_change=True means that no warning
is printed when a resumed run changes a flag: it is still the same experiment, or another check
refuses the change.
"""

import functools
from argparse import ArgumentParser
from dataclasses import dataclass, fields, make_dataclass
from pathlib import Path
from typing import Any, ClassVar

from config import ParallelConfig
from lora import LoRA
from model import LlamaConfig
from models.family import families, find_preset, own_fields, presets
from plumbing.flags import flag, within
from plumbing.messages import UserError
from plumbing.parser import (
    duration,
    nonnegative_float,
    nonnegative_int,
    positive_float,
    positive_int,
)
from techniques.optimizers import rates_in_words
from text.tokenizer import DEFAULT_TOKENIZER

MODEL, DATA, STEP, RUN = "model", "data", "optimizer step", "run"
SPLIT = "how a step is split over ranks and computed"


def rate_flag(*tasks: str):
    """Return the field of --lr. Its help has the rates of these tasks."""
    rates = "; ".join(map(rates_in_words, tasks))
    help = f"peak learning rate (default: by the model's size: {rates})"
    return flag(None, help, STEP, nonnegative_float)


# fmt: off


@dataclass(frozen=True)
class Run:
    """What every training script is asked: initial weights, data, an optimizer step, files."""

    init: Path | None = flag(None, "initial weights: a checkpoint, or Meta's or Hugging Face's "
                             "files (default: random)", MODEL, Path, metavar="DIR")

    data: tuple[str, ...] = flag(("python",), "text files, directories or token files, each with a "
                                 "weight or none, as in a=0.7 b=0.3 (default: python, the source "
                                 "of Python's standard library)", DATA, str, nargs="+")
    skip_bad: bool = flag(False, "leave out what cannot be read; list it in a file", DATA)
    tokenizer: str | None = flag(None, "name or file (default: that of the data or of --init, or "
                                 f"{DEFAULT_TOKENIZER})", DATA, may_change=True)
    seq_len: int = flag(256, "tokens per sequence", DATA)

    batch: int = flag(8, "sequences per step, over all processes", STEP)
    microbatch: int | None = flag(None, "sequences a rank computes at once (default: all)", STEP,
                                  positive_int, may_change=True)
    steps: int = flag(1150, "number of optimizer steps", STEP)
    epochs: float | None = flag(None, "in place of --steps: how often the data are read", STEP,
                                positive_float)
    lr: float | None = rate_flag("pretraining", "fine-tuning")
    lr_schedule: str = flag("wsd", "the rate after the warmup: wsd stays at the peak, and falls in "
                            "the last third; linear and cosine fall at once; all fall to 0",
                            STEP, choices=["wsd", "linear", "cosine", "constant"])
    betas: tuple[float, ...] = flag((0.9, 0.95), "AdamW's beta 1 and beta 2 (default: 0.9 0.95)",
                                    STEP, nonnegative_float, nargs=2, metavar="BETA")
    weight_decay: float = flag(0.1, "of matrices; norms have none", STEP)
    warmup: int = flag(50, "steps of linear warmup to the peak, even where --steps are fewer",
                       STEP, nonnegative_int)
    clip: float = flag(1.0, "maximum gradient norm, 0 for none", STEP)
    seed: int = flag(0, "seed of initial weights and data order", STEP, int)

    parallel: ParallelConfig = within(ParallelConfig, group=SPLIT)

    device: str = flag("auto", "auto: GPUs of CUDA, or else the CPU; mps: an Apple GPU, for one "
                       "process (untested)", RUN, choices=["auto", "mps"], may_change=True)
    out: Path | None = flag(None, "output directory of the run (default: out/NAME)", RUN, Path,
                            may_change=True)
    resume: bool = flag(False, "continue from the newest checkpoint in OUT, if any", RUN,
                        may_change=True)
    skip_steps: tuple[int, ...] = flag((), "steps to leave out, with what is saved and evaluated "
                                       "after them, as one whose loss is not finite (default: "
                                       "none)", RUN, positive_int, nargs="+", metavar="STEP")
    time_limit: int = flag(0, "save and end after so many hours and minutes (default: never)",
                           RUN, duration, may_change=True, metavar="H:MM")
    save_every: int = flag(500, "steps between checkpoints, 0 for one at the end", RUN,
                           nonnegative_int, may_change=True)
    async_save: bool = flag(False, "write checkpoints from a copy, while it trains", RUN,
                            may_change=True)
    keep: int = flag(2, "newest checkpoints to keep, 0 for all", RUN, nonnegative_int)
    keep_best: bool = flag(False, "also save at the lowest validation loss so far, and keep that "
                           "as OUT/best", RUN)
    eval_every: int = flag(500, "steps between evaluations, 0 for none", RUN, nonnegative_int,
                           may_change=True)
    eval_windows: int = flag(512, "sequences per evaluation", RUN, may_change=True)
    val_data: tuple[str, ...] | None = flag(None, "validation data of the same kind (default: part "
                                            "of --data)", RUN, str, may_change=True, nargs="+")
    exam: Path | None = flag(None, "questions to ask at evaluations (text/exams.py)", RUN, Path,
                             may_change=True, metavar="FILE")
    profile: bool = flag(False, "trace three steps, in OUT/trace-RANK.json", RUN, may_change=True)

    typed: frozenset[str] = frozenset()  # names of the flags on the command line

    # The flags with which --help begins.
    used_most: ClassVar[str] = "model init data out seq_len batch steps lr dp resume"
    references: ClassVar[int] = 0  # how often a step runs a base forward (preferences.py)
    updates: ClassVar[int] = 1  # of the optimizer in a step (rewards.py)

    def check(self) -> None:
        """Raise UserError for flags that exclude each other, whatever the model and the data."""
        if {"steps", "epochs"} <= self.typed:
            raise UserError("--steps and --epochs exclude each other: give one of them")

    @property
    def adapters(self) -> LoRA | None:
        """The adapters that are trained; None if all weights are."""
        return None

    @property
    def default_name(self) -> str:
        """The name of the directory in out/, without --out."""
        raise NotImplementedError

    @property
    def directory(self) -> Path:
        """Where the run's files are: OUT."""
        return self.out or Path("out") / self.default_name


FOLLOWING = "vocab_size", "max_seq_len", "head_dim"  # from the tokenizer, or from other fields


@functools.cache
def sizes_of(config: type[LlamaConfig]) -> type:
    """Return the record of a model's sizes: the integers and strings of its configuration."""
    sizes = []
    for f in fields(config):
        kind = type(f.default)
        if kind in (int, str) and f.name not in FOLLOWING:
            help = f"{f.name} of the model, in place of the preset's"
            argument = positive_int if kind is int else str
            if kind is int and f.name in own_fields(config):  # may be 0: its configuration checks
                argument = nonnegative_int
            sizes.append((f.name, f.type, flag(None, help, MODEL, argument, may_change=True)))
    return make_dataclass("Sizes", sizes, frozen=True)


@dataclass(frozen=True)
class Pretraining(Run):
    """Train a Llama."""

    model: str | None = flag(None, f"preset: {', '.join(presets())}; FILE.py or FILE.py:PRESET, a "
                             "model of your own (default: tiny)", MODEL, may_change=True)
    sizes: Any = within(sizes_of(LlamaConfig))
    text_field: str = flag("text", "field of records that holds the text", DATA, metavar="NAME")
    document_mask: bool = flag(False, "no attention across documents of a sequence", DATA)
    prompt: str = flag("def", "prompt of the text samples at evaluations", DATA, may_change=True)

    @property
    def default_name(self) -> str:
        if not self.model:
            return "tuned" if self.init else "tiny"
        file, _, preset = self.model.partition(":")
        return f"{Path(file).name.removesuffix('.py')}-{preset}".rstrip("-")


def flags_of_pretraining(words: list[str]) -> type[Pretraining]:
    """Return Pretraining with the sizes of the model that these words of a command line name: only
    a model with experts has --n-experts.

    Raises UserError for a model that is not found, and for a size of other models."""
    parser = ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--model", nargs="?")
    asked, _ = parser.parse_known_args(words)
    config = type(find_preset(asked.model or "tiny"))
    typed = {word.partition("=")[0] for word in words}
    for family in families().values():
        for size in own_fields(family.config) - own_fields(config):
            option = f"--{size.replace('_', '-')}"
            if family.presets and option in typed:
                preset = next(iter(family.presets))
                raise UserError(f"{option} is of other models: give --model {preset}, or another")
    sizes = sizes_of(config)
    return make_dataclass(
        "Pretraining",
        [("sizes", sizes, within(sizes))],
        bases=(Pretraining,),
        frozen=True,
        namespace={"__doc__": Pretraining.__doc__},
    )
