r"""Train a Llama from rewards: sample answers, and make the better ones of a group likelier (GRPO).

    torchrun rewards.py --init out/sums --data prompts.jsonl --reward reward.py
    torchrun --nproc-per-node 8 rewards.py --init ~/Llama-3.2-1B-Instruct --chat \
             --data gsm8k.jsonl --reward gsm8k.py --batch 256 --group 16 --microbatch 8 --lr 1e-5

The data are JSON lines with a "prompt". --reward is a Python file with a function that returns a
number; other fields of the line are given to it by their names:

    def reward(prompt, answer, **others) -> float

A step answers --batch / --group prompts, each --group times:

    sample      from the weights as they are now (generate.py), at temperature 1
    score       by the function; an answer's advantage is its reward minus the mean of its group
    update      train.py's, with this loss, divided by the number of answers:

        loss = - sum over tokens of (p(token) / p of the sampler) advantage

The ratio is 1, since all answers are new, and its gradient is that of log p. So this is the
gradient of the mean reward (times (G - 1) / G, as an answer is in its group's mean). That is why
nothing else is in it. GRPO (Shao et al. 2024, arXiv:2402.03300) also divides by an answer's length,
which makes long wrong answers cheap, and by the standard deviation of its group, which gives weight
to prompts that nearly always or never succeed (Liu et al. 2025, "Dr. GRPO", arXiv:2503.20783). Its
clip acts only where several steps reuse answers.

The sampler computes p with a cache, token by token, and training computes it at once. A run checks
that both are the same, which no approximate kernel would pass.

Answers depend on (seed, number of the answer) alone, and rewards are gathered: so a step is the
same on any number of ranks. Watch `reward`, `mixed`, the share of groups with different rewards,
which alone teach something, and `end`, the share of answers that end by themselves. The loss is
about 0 and says nothing. docs/preferences.md has an example.
"""

import plumbing.endings  # first, for Ctrl-C during the imports
import argparse
import contextlib
import math
import runpy
import time
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor

import evaluate
from data import tokens_done, window_of
from finetune_lora import fine_tune, job_of, open_base
from generate import check_length, generate
from model import IGNORE
from parallel import unsharded
from plumbing.parser import Parser, positive_int
from plumbing.processes import Process, UserError, print_rank_zero, run
from runs import setup
from runs.flags import add_finetuning_flags, complete_finetuning
from techniques.chunked_loss import loss_of_each_target
from text.batch import Batch
from text.chat import Rows, encode_prompt
from text.conversations import files_of
from text.corpora import Reading, check_string, document_name, read_records, split_of
from text.tokenizer import Tokenizer

# By how much log p of a token may differ between sampling and training. bfloat16 rounds: there the
# ratio corrects for it, and it is only recorded.
TOLERANCE = {"float64": 1e-9, "float32": 1e-2, "bfloat16": math.inf}


def parse_args() -> argparse.Namespace:
    parser = Parser(description="Train a Llama from rewards for its own answers.")
    add_finetuning_flags(parser)
    add = parser.add_argument_group("rewards").add_argument
    # fmt: off
    add("--reward", type=Path, required=True, metavar="FILE",
        help="Python file with a function reward(prompt, answer)")
    add("--chat", action="store_true", help="a prompt is a user's message")
    add("--group", type=positive_int, default=8, help="answers to each prompt, of the --batch")
    add("--max-new-tokens", type=positive_int, default=64, help="tokens of an answer at most")
    # fmt: on
    parser.set_defaults(batch=64, lr=1e-4, data=None, seq_len=256)
    args = complete_finetuning(parser.parse_args(), "grpo")
    if not args.data:
        raise UserError('rewards.py needs prompts: give --data, a file with lines {"prompt": ...}')
    if args.dropout:
        raise UserError("--dropout would train another model than the sampler's: leave it out")
    if args.group < 2 or args.batch % args.group:
        raise UserError(f"--batch {args.batch} must be a multiple of --group, which is 2 or more")
    return args


# --------------------------------------------------------------------------- prompts and rewards


class Prompts:
    """Prompts, of which each has a group of answers, and the JSON objects that they come from."""

    document_mask = False

    def __init__(self, records: list[dict], prompts: list[list[int]], tokenizer, group: int):
        self.records, self.prompts, self.tokenizer = records, prompts, tokenizer
        self.sources = [(len(prompts) * group, 1)]  # as data.Windows has it

    def __len__(self) -> int:
        return self.sources[0][0]

    def checksum(self) -> int:
        return zlib.crc32(repr(self.prompts).encode())

    def text_of(self, answer: list[int]) -> str:
        return self.tokenizer.decode(token for token in answer if token not in self.tokenizer.stop)


def open_prompts(args: argparse.Namespace, tokenizer: Tokenizer) -> list[Prompts]:
    """Return prompts to train on and to evaluate on: of --val-data, or held out by a hash, or, of
    few, all."""
    found = {"train": ([], []), "val": ([], [])}
    expected, reading = '{"prompt": "..."}', Reading(skip_bad=args.skip_bad)
    for source, wanted in ((args.data, "train" * bool(args.val_data)), (args.val_data, "val")):
        for file in files_of(source or [], expected):
            for number, where, record in read_records(file, expected, reading):
                text = check_string(record.get("prompt"), f'{where}: "prompt" is')
                asked = [{"role": "user", "content": text}]
                encoded = encode_prompt(asked, tokenizer) if args.chat else None
                records, prompts = found[wanted or split_of(f"{document_name(file)}:{number}")]
                records.append(record)
                prompts.append(encoded or tokenizer.encode(text, bos=True))
    if not found["train"][0]:
        raise UserError(f"{' '.join(args.data)} holds no prompt to train on: give more")
    train, val = found.values()
    val = val if val[0] else train
    return [Prompts(*part, tokenizer, args.group) for part in (train, val)]


class Answers(Rows):
    """A row for each prompt with its answer, whose tokens are the targets. A batch is `given` the
    advantage and the sampler's log p of each target: [B, T, 2]."""

    def __init__(self, prompts, answers, log_p: Tensor, advantages: Tensor, tokenizer: Tokenizer):
        samples = [(p + a, [False] * len(p) + [True] * len(a)) for p, a in zip(prompts, answers)]
        super().__init__(samples, tokenizer)
        self.log_p, self.advantages = log_p.cpu(), advantages.to(log_p.dtype)

    def batch(self, indices: Sequence[int]) -> Batch:
        batch = super().batch(indices)
        is_answer = batch.targets != IGNORE
        given = self.log_p.new_zeros(*is_answer.shape, 2)
        for i, row, at in zip(indices, given, is_answer):
            row[at, 0], row[at, 1] = self.advantages[i], self.log_p[i, : at.sum()]
        return replace(batch, given=given, units=is_answer.any(1))


class Reward:
    """The function of a --reward file, and what it did wrong, if anything."""

    def __init__(self, path: Path):
        self.path, self.failure = path, "a reward was no number on another rank"
        if not path.is_file():
            raise UserError(f"--reward {path} is no file: give one with a function reward")
        try:
            self.function = runpy.run_path(str(path))["reward"]
        except Exception as error:
            raise UserError(f"--reward {path} has no function reward: {error!r}")

    def of(self, record: dict, answer: str) -> float:
        """Return the reward of an answer; NaN where it is no finite number."""
        try:
            reward = self.function(**record | {"answer": answer})
            if isinstance(reward, str) or not math.isfinite(reward):
                raise ValueError(f"it returned {reward!r}")
            return float(reward)
        except Exception as error:
            given = f"reward({record['prompt']!r:.60}, {answer!r:.60})"
            self.failure = f"{self.path}: {given} gave no number: {error!r:.200}"
            return math.nan


# --------------------------------------------------------------------------------------- the task


class GRPO(evaluate.Task):
    """To answer with high rewards. It is the objective of its batches."""

    def __init__(self, reward: Reward, args: argparse.Namespace, job: setup.Job, world, *others):
        super().__init__(args, job, world, *others)
        if world.parallel.shard > 1 and self.gathered is contextlib.nullcontext:
            raise UserError(
                "sampling needs all weights on each rank, and they do not fit: give a larger --tp, "
                "or --base-bits 4"
            )
        self.model.loss, self.reward = loss_of_each_target, reward
        self.sample_text = lambda step: self.shown
        self.measured, self.gap = {}, torch.zeros((), device=world.device)

    def prepare(self, steps: Iterable[int], batches: Iterator[Batch]) -> Iterator[Batch]:
        return map(self.answered, steps)  # no batch can be read ahead

    def answered(self, step: int) -> Batch:
        """Return this rank's share of a step's answers, with their advantages."""
        args, world, data = self.args, self.world, self.job.train_set
        share, started = args.batch // world.data_size, time.perf_counter()
        first = tokens_done(args, step - 1) // args.seq_len + world.data_rank * share
        numbers = range(first, first + share)
        n_prompts = len(data.prompts)
        asked = [window_of(number // args.group, n_prompts, args.seed) for number in numbers]
        answers, log_p = self.sample(data, asked, numbers)
        seconds = time.perf_counter() - started
        ends = [answer[-1] in data.tokenizer.stop for answer in answers]
        lengths = [len(answer) for answer in answers]
        rewards, ends, lengths = self.gather(self.score(data, asked, answers), ends, lengths)
        groups = rewards.view(-1, args.group)
        advantages = (groups - groups.mean(1, keepdim=True)).flatten()
        mixed = (groups != groups[:, :1]).any(1).double()
        measured = dict(reward=rewards, mixed=mixed, end=ends, length=lengths)
        self.measured = {name: values.mean().item() for name, values in measured.items()}
        self.measured["sampling_seconds"] = seconds
        own = advantages[world.data_rank * share :][:share]
        prompts = [data.prompts[i] for i in asked]
        rows = Answers(prompts, answers, log_p, own, data.tokenizer)
        return replace(evaluate.batch_of(rows, range(share), world), objective=self)

    @torch.no_grad()
    def sample(
        self, data: Prompts, asked: list[int], numbers: Sequence[int]
    ) -> tuple[list[list[int]], Tensor]:
        """Return an answer to each prompt `asked`, and log p of its tokens: [B, tokens]. They are
        drawn from the model's own distribution, since that is the one that is trained."""
        prompts, log_p = [data.prompts[i] for i in asked], []
        options = dict(stop=data.tokenizer.stop, seed=self.args.seed, numbers=numbers, log_p=log_p)
        self.model.eval()
        gathered = unsharded(self.model, self.world.parallel)  # ranks need not draw equally often
        with gathered, torch.compiler.set_stance("force_eager"):  # shapes change with a token
            answers = generate(self.model, prompts, self.args.max_new_tokens, **options)
        self.model.train()
        return answers, torch.stack(log_p, 1)

    def score(self, data: Prompts, asked: list[int], answers: list[list[int]]) -> list[float]:
        return [self.reward.of(data.records[i], data.text_of(a)) for i, a in zip(asked, answers)]

    def gather(self, *columns: list[float]) -> Tensor:
        """Gather columns with a number for each of this rank's answers -> [columns, all answers].
        Of ranks that have the same answers the first is heard: a reward may be random."""
        rows = self.world.all_gather_scalars([self.world.data_rank, *chain(*columns)]).cpu()
        if rows.isnan().any():
            raise UserError(self.reward.failure)
        first = [rows[:, 0].tolist().index(rank) for rank in range(self.world.data_size)]
        return rows[first, 1:].unflatten(1, (len(columns), -1)).transpose(0, 1).flatten(1)

    def __call__(self, losses: Tensor, batch: Batch) -> Tensor:
        """Return the sum of the losses of a batch's answers, given -log p of targets [B, T]."""
        advantage, log_p = batch.given.unbind(-1)
        log_ratio = -losses - log_p  # 0 where there is no target
        self.gap = torch.maximum(self.gap, log_ratio.detach().abs().max())
        return -(log_ratio.exp() * advantage).sum()

    def metrics(self) -> dict[str, float]:
        """Return what was measured of the answers. Raise UserError on all ranks if the model that
        was trained is not the one that answered."""
        gap = self.world.all_gather_scalars([self.gap]).max().item()
        self.gap = torch.zeros_like(self.gap)
        if gap > TOLERANCE[self.args.dtype]:
            raise UserError(
                f"log p of a token differs by {gap:.2g} between sampling and training: what has "
                f"changed in model.py computes something else with a cache"
            )
        return self.measured | {"log_ratio": gap}

    def validate(self) -> tuple[dict[str, float], str]:
        """Return the mean reward of an answer to each held-out prompt; as the loss, minus it."""
        data, shares = self.job.val_set, self.world.data_size
        limit = min(self.args.eval_windows, len(data.prompts))
        numbers = range(self.world.data_rank, math.ceil(limit / shares) * shares, shares)
        asked = [number % len(data.prompts) for number in numbers]
        answers, _ = self.sample(data, asked, [-1 - number for number in numbers])
        (rewards,) = self.gather(self.score(data, asked, answers))
        shown = zip(asked[: evaluate.SHOWN], answers)
        lines = (f"--- {data.records[i]['prompt']}{data.text_of(answer)}" for i, answer in shown)
        self.shown, mean = "\n".join([*lines, "---"]), rewards.mean().item()
        return {"val_loss": -mean, "val_reward": mean}, f"reward {mean:.3f}"


def prepare(args: argparse.Namespace, process: Process) -> setup.Job:
    """Check the flags, open the prompts, and build the base model on meta, with adapters."""
    model, tokenizer = open_base(args, process)
    sets = open_prompts(args, tokenizer)
    longest = max(map(len, sets[0].prompts + sets[1].prompts))
    check_length(longest, args.max_new_tokens, model.config.max_seq_len)
    length = math.ceil((longest + args.max_new_tokens) / 8) * 8  # ranks may share a sequence
    if length > args.seq_len:
        raise UserError(f"the longest prompt and its answer are {length} tokens: give --seq-len")
    args.seq_len = length
    job = job_of(args, process, model, tokenizer, *sets)
    trained_on, held_out = (len(part.prompts) for part in sets)
    print_rank_zero(f"{trained_on:,} prompts of at most {longest} tokens; {held_out:,} held out")
    return job


def main() -> None:
    args = parse_args()
    process = setup.setup(args)
    make_task = partial(GRPO, Reward(args.reward))
    fine_tune(args, process, prepare(args, process), [], make_task)


if __name__ == "__main__":
    run(main)
