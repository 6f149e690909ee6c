r"""Fine-tune a Llama with LoRA: teach it to answer by training thin matrices beside its own.

    torchrun train.py                                            a base model: minutes on a laptop
    torchrun finetune_lora.py --init out/tiny                    teach it to write docstrings
    torchrun --nproc-per-node 2 finetune_lora.py --init out/tiny --out out/two       two processes
    torchrun --nproc-per-node 8 finetune_lora.py --init ~/Llama-3.1-8B --data chats.jsonl \
             --seq-len 4096 --batch 64 --microbatch 4 --lr 2e-4 --rank 16 --merge
    torchrun finetune_lora.py --init ~/Llama-3.1-70B --base-bits 4 --data chats.jsonl        one GPU

The data is JSON, one conversation a line: {"messages": [{"role", "content"}...]}, or instruction,
input and output, or prompt and completion (text/conversations.py). Several conversations share a
row of --seq-len tokens; attention does not cross from one to another. Prompts and padding have no
targets, and padding is a document of its own.

The base is frozen, so it has no gradients. With --dp ddp, the default where a device can hold the
model, a step communicates the gradients of the adapters and nothing else, and more processes make
it faster. On several processes a run first prints what a step would send under each strategy.

Every checkpoint is an adapter in PEFT's format; --merge [best] also writes the merged model. With
--all-weights there is no adapter: all weights are trained, as train.py does. The loop over steps is
train.py's, too; preferences.py, rewards.py and distill.py call `finetune` with tasks of their own.
"""

import plumbing.endings  # first, for Ctrl-C during the imports
import copy
import shlex
import statistics
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import ClassVar, NamedTuple

import torch

import checkpoint
import lora
import train
from config import ParallelConfig
from costs.strategies import sent_by_strategy
from data import list_left_out
from files.adapters import load_adapter as load_adapter  # re-exported for users' scripts
from files.adapters import peft_name, recorded
from files.directories import checkpoints, digest_of_weights, read_config
from files.loading import find_model, load_weights
from model import Llama
from models.family import TARGETS, family_of
from plumbing import processes
from plumbing.flags import flag, other_default
from plumbing.messages import UserError, print_rank_zero
from plumbing.parser import parse
from plumbing.processes import Process
from runs import rules, setup
from runs.flags import DATA, MODEL, Run, rate_flag
from runs.task import Task
from techniques import nf4
from techniques.decoding import generate
from techniques.optimizers import peak_rate
from text.chat import open_samples
from text.conversations import conversations
from text.corpora import Reading
from text.exams import Exam
from text.targets import ANSWER_ROOM, SHOWN
from text.tokenizer import Tokenizer

LORA = "LoRA"  # the heading of its flags in --help

# fmt: off


@dataclass(frozen=True)
class Finetuning(Run):
    """Fine-tune a Llama with LoRA: teach it to answer."""

    init: Path = flag(None, "the base model: a checkpoint, a run, or Meta's or Hugging Face's "
                      "files", MODEL, Path, metavar="DIR", required=True)
    data: tuple[str, ...] = flag(("python",), "JSON lines, files or directories of them (default: "
                                 "python, docstrings to write for functions of the standard "
                                 "library)", DATA, str, nargs="+")
    tokenizer: str | None = flag(None, "name or tokenizer.model file (default: the base model's)",
                                 DATA, may_change=True)
    chat_template: str | None = flag(None, "one of the base's templates, or a file", DATA,
                                     metavar="NAME|FILE")
    seq_len: int = flag(512, "tokens per row; longer samples are cut", DATA)
    train_on_prompt: bool = flag(False, "count the loss of prompts, too", DATA)

    all_weights: bool = flag(False, "train all weights, in place of adapters", LORA)
    rank: int = flag(8, "rank of the adapters", LORA, may_change=True)
    alpha: float = flag(16.0, "adapters' scale is alpha / rank", LORA, may_change=True)
    rslora: bool = flag(False, "adapters' scale is alpha / sqrt(rank)", LORA, may_change=True)
    dropout: float = flag(0.0, "dropout of the adapters' input", LORA, may_change=True)
    targets: tuple[str, ...] = flag(TARGETS, "matrices with an adapter, of a Llama's "
                                    f"{' '.join(TARGETS)} or another model's own (default: all)",
                                    LORA, may_change=True, nargs="+", metavar="MATRIX")
    dora: bool = flag(False, "train the length of each row apart from its direction", LORA)
    base_bits: int = flag(16, "4: keep the blocks' frozen matrices in 4 bits (default: the dtype "
                          "of computation)", LORA, int, choices=[16, 4])
    merge: str | None = flag(None, "write OUT/merged at the end: the model with the last adapter, "
                             "or with the best one", LORA, choices=["last", "best"],
                             may_change=True, nargs="?", const="last")

    steps: int = other_default(Run, "steps", 200)
    lr: float | None = rate_flag("fine-tuning")
    weight_decay: float = other_default(Run, "weight_decay", 0.0)
    warmup: int = other_default(Run, "warmup", 20)
    save_every: int = other_default(Run, "save_every", 100)
    eval_every: int = other_default(Run, "eval_every", 100)

    # fmt: on

    def check(self) -> None:
        super().check()
        of_adapters = "rank alpha dropout rslora targets dora base_bits merge".split()
        given = self.typed.intersection(of_adapters)
        if self.all_weights and (given or self.parallel.reshard == "adapters"):
            names = " ".join(f"--{name}" for name in sorted(given)) or "--reshard adapters"
            names = names.replace("_", "-")
            raise UserError(f"these are for adapters: {names}; leave them out, or --all-weights")
        if self.dropout >= 1:
            raise UserError(f"--dropout {self.dropout:g} drops everything: give a number below 1")
        if self.dora and self.dropout:
            raise UserError("--dora with --dropout would multiply each matrix twice: leave one out")
        if self.alpha == 0:
            raise UserError("--alpha 0 switches the adapters off: give a number above 0")
        if self.merge == "best" and not self.keep_best:
            raise UserError("--merge best is the checkpoint of --keep-best: give it, too")

    @property
    def adapters(self) -> lora.LoRA | None:
        if self.all_weights:
            return None
        settings = self.rank, self.alpha, self.dropout, self.rslora, self.dora
        return lora.LoRA(*settings, self.targets)

    @property
    def answers_messages(self) -> bool:
        """Whether prompts are messages of a user, and not plain text."""
        return True

    @property
    def default_name(self) -> str:
        init = self.init.resolve()
        base = init.parent.name if init.name.startswith("step-") else init.name
        return f"{base}-{self.goal}"

    def digests(self) -> dict[str, str]:
        """Return the digests of files that this run depends on beside its models and its data, by
        the names that Job.digests has for them."""
        return {}

    used_most: ClassVar[str] = "init data out seq_len batch epochs lr rank merge resume"

    kind: ClassVar[str] = "fine-tuning"  # whose rates are in techniques/optimizers.py

    @property
    def goal(self) -> str:
        """The end of the default name."""
        return "full" if self.all_weights else "lora"


class Script(NamedTuple):
    """What differs between the scripts that call `finetune`."""

    flags: type[Finetuning]  # the record of what the script is asked
    open_data: Callable  # (run, tokenizer, Reading) -> what open_samples returns
    task: Callable[..., Task] = Task  # the next token, as in train.py
    # (run, parallel, the base's configuration, its tokenizer, process) -> the teacher of distill.py
    # on meta, and its digest by the name that Job.digests has for it
    find_teacher: Callable = lambda *given: (None, {})


def open_conversations(
    run: Finetuning, tokenizer: Tokenizer, reading: Reading, read: Callable = conversations
) -> tuple:
    """Return what text/chat.py's open_samples does for such a run; `read` is passed on."""
    return open_samples(
        run.data, tokenizer, run.seq_len, run.train_on_prompt, run.val_data, reading, read
    )


def finetune(script: Script) -> None:
    """Train adapters, or all weights, for the task of a script."""
    run = parse(script.flags)
    run.check()
    process, parallel = setup.join(run)
    job, examples = prepare(run, parallel, process, script)
    if process.rank == 0:
        checkpoint.lock_run(run.directory, run.resume)
    print_rank_zero(describe_strategies(run, parallel, job, process))
    world, runner, work = train.split(run, parallel, job, process)
    sample_text = partial(sample_answers, job.model, examples, job.tokenizer)
    task = script.task(run, job, world, work, sample_text)
    finished = train.train(task, runner)
    chat = " --chat" if run.answers_messages else ""
    if run.merge and finished and world.rank == 0:
        merged = merge(run, job)
        print(f"merged:     python generate.py {shlex.quote(str(merged))}{chat}")
    model = shlex.quote(str(run.directory))
    if run.adapters:
        model = f"{shlex.quote(str(job.base))} --adapter {model}"
    if run.base_bits == 4:
        model += " --base-bits 4"
    print_rank_zero(f"generate:   python generate.py {model}{chat}")
    print_rank_zero(f"curves:     python report.py {shlex.quote(str(run.directory))}")


def sample_answers(
    model: Llama, examples: list[tuple[list[int], str]], tokenizer: Tokenizer, step: int
) -> str:
    """Return lines that show what a model answers to the first examples, and a line of means over
    all answers: which share of them ends, how many tokens they have, and which share of tokens they
    have in common with the true answers (the F1 score of two bags of tokens). Tokens are drawn at
    random, since a small model that always takes the likeliest one soon repeats itself."""
    if not examples:
        return "no held-out prompt is short enough to show"
    prompts = [prompt for prompt, _ in examples]
    stop = tokenizer.stop
    answers = generate(model, prompts, ANSWER_ROOM, temperature=0.8, top_p=0.95, stop=stop)
    speaker = f"after {step} steps" if step else "base model"
    lines = []
    scores = []  # of each answer: whether it ends, its tokens, those of the true one, overlap
    for (prompt, truth), answer in zip(examples, answers):
        if len(scores) < SHOWN:
            question = "" if step else tokenizer.decode(prompt)
            lines.append(f"{question}--- {speaker}: {tokenizer.decode(answer)}")
            lines.append(f"--- true answer: {truth}")
        ids = [token for token in answer if token not in stop]
        true_ids = tokenizer.encode(truth)
        n_common = (Counter(ids) & Counter(true_ids)).total()
        overlap = 2 * n_common / max(1, len(ids) + len(true_ids))
        scores.append((len(ids) < len(answer), len(ids), len(true_ids), overlap))
    ended, length, true_length, overlap = map(statistics.mean, zip(*scores))
    score = f"{ended:.0%} end, {length:.1f} tokens (true ones {true_length:.1f}), {overlap:.0%}"
    return "\n".join([*lines, f"--- {speaker}: of {len(scores)} answers {score} in common", "---"])


def describe_strategies(
    run: Finetuning, parallel: ParallelConfig, job: setup.Job, process: Process
) -> str:
    """Return what a rank would send in a step of fine-tuning under each strategy; "" where all
    ranks have the same sequences."""
    if process.size == parallel.tp * parallel.pp:
        return ""
    work = rules.work_of(run, parallel, job.whole, process, packed=True)
    return f"per step, each rank would send: {sent_by_strategy(work, run.parallel.shard, process)}"


def merge(run: Finetuning, job: setup.Job) -> Path:
    """Write OUT/merged, unless --resume found a finished run that has it; return its path."""
    from files.conversion import merge_adapter  # here, since only a run with --merge needs it

    merged = run.directory / "merged"
    if not merged.exists():
        adapter = run.directory / "best" if run.merge == "best" else run.directory
        merge_adapter(job.base, adapter.resolve(), merged, job.tokenizer)
    return merged


def check_merged(run: Finetuning, last_step: int) -> None:
    """Raise UserError if --merge would replace a directory: only this finished run's own merge of
    the same adapter may be there."""
    merged = run.directory / "merged"
    if not run.merge or not merged.exists():
        return
    last = run.directory / f"step-{last_step:08d}"
    adapter = run.directory / "best" if run.merge == "best" else last
    is_finished = run.resume and last.exists()
    merged_before = read_config(merged).get("flags", {}).get("adapter")  # none in others' files
    if not is_finished or merged_before != adapter.resolve().name:
        raise UserError(f"{merged} exists: remove it, or leave out --merge")


def base_of(run: Finetuning) -> Path:
    """Return the directory of the base: --init. If that is a run, which may have newer checkpoints
    by now, a resumed run goes on with the one that it began with. Raise UserError if it is gone."""
    init = recorded(run.directory, "facts").get("init", "")  # old runs have no facts
    name = Path(str(init)).name
    if not checkpoints(run.directory) or not checkpoints(run.init) or name[:5] != "step-":
        return run.init
    if not (run.init / name).is_dir():
        problem = f"this run began with {run.init / name}, which is gone"
        raise UserError(f"{problem}: give a copy of it as --init, or begin another run")
    return run.init / name


def targets_in(model: Llama, asked: tuple[str, ...] = ()) -> tuple[str, ...]:
    """Return the matrices that get an adapter: the `asked` ones, by default all that can have one.
    Raise UserError for a name that no such matrix of the model has."""
    linear = [name for name, layer in model.named_modules() if isinstance(layer, torch.nn.Linear)]
    names = {name.rpartition(".")[2] for name in linear}
    possible = [name for name in family_of(model.config).targets(model.config) if name in names]
    unknown = [name for name in asked if name not in possible]
    if unknown:
        raise UserError(f"--targets {' '.join(unknown)}: choose among {', '.join(possible)}")
    return tuple(name for name in possible if name in (asked or possible))


def prepare(
    run: Finetuning, parallel: ParallelConfig, process: Process, script: Script
) -> tuple[setup.Job, list]:
    """Check the flags, open the data, and build the model on meta, with its adapters.

    Returns the job and some held-out prompts, as (tokens, true answer)."""
    init = process.broadcast_from_rank_zero(partial(base_of, run))
    metadata, tokenizer = find_model(init, run.tokenizer, process, run.chat_template)
    config = metadata["model"]
    techniques = (lora.TECHNIQUE,) if run.adapters else ()
    if run.base_bits == 4:
        techniques += (nf4.TECHNIQUE,)
    rules.check_training_flags(run, parallel, config, process, *techniques)
    given = run, parallel, config, tokenizer, process
    teacher, digest_of_teacher = script.find_teacher(*given)
    with torch.device("meta"):
        model = config.build()
        of_all = "" if run.adapters else " of all weights"
        usual_rate = peak_rate(f"{run.kind}{of_all}", model)
        if run.adapters:
            asked = run.targets if "targets" in run.typed else ()
            targets = targets_in(model, asked)
            lora.add_adapters(model, replace(run.adapters, targets=targets), run.base_bits)
    for name in lora.adapters(model):
        peft_name(name, model.config)  # raises for an adapter that PEFT's format cannot name
    exam = run.exam and Exam(run.exam, tokenizer, config.max_seq_len, chat=run.answers_messages)
    reading = Reading(skip_bad=run.skip_bad)
    train_set, val_set, examples, summary = script.open_data(run, tokenizer, reading)
    last_step = rules.last_step(run, len(train_set))
    check_merged(run, last_step)
    checksum = process.check_same("the training data", train_set.checksum())
    list_left_out(reading, f"conversations-{checksum}")
    print_rank_zero(summary)

    digest = process.broadcast_from_rank_zero(partial(digest_of_weights, metadata["directory"]))
    digests = {"base_digest": digest} | digest_of_teacher
    digests |= process.broadcast_from_rank_zero(run.digests)

    def initialize(model: Llama) -> None:
        load_weights(metadata["directory"], model)  # --base-bits 4: quantized here
        lora.init_adapters(model, run.seed, device=process.device)

    job = setup.Job(
        model=model,
        whole=copy.deepcopy(model),  # parallelize changes the other one
        initialize=initialize,
        tokenizer=tokenizer,
        train_set=train_set,
        val_set=val_set,
        data_checksum=checksum,
        exam=exam,
        lr=usual_rate if run.lr is None else run.lr,
        last_step=last_step,
        base=metadata["directory"],
        digests=digests,
        techniques=techniques,
        teacher=teacher,
    )
    return job, examples


SCRIPT = Script(Finetuning, open_conversations)
main = partial(finetune, SCRIPT)

if __name__ == "__main__":
    processes.run(main)
