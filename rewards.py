r"""Train a Llama from rewards: sample answers, make those likelier that beat their group (GRPO).

    torchrun rewards.py --init out/sums --data prompts.jsonl --reward reward.py
    torchrun --nproc-per-node 8 rewards.py --init ~/Llama-3.2-1B-Instruct --chat \
             --data gsm8k.jsonl --reward gsm8k.py --batch 256 --group 16 --microbatch 8 --lr 1e-5

The data are JSON lines with a "prompt". --reward is a Python file with reward(prompt, answer),
which returns a number; it is also given the other fields of the line. A step answers --batch /
--group prompts, each --group times:

    sample      from the weights as they are now, at temperature 1 (generate.py)
    score       an answer's advantage is its reward minus the mean of its group
    update      train.py's, with the loss below, summed over tokens and divided by the answers

        ratio = p(token) / p of the sampler         1, since all answers are new
        loss  = - ratio advantage

Its gradient is that of the mean reward, times (G - 1) / G. GRPO also divides by an answer's length,
so that long wrong answers cost little, and by the deviation of its group, so that prompts count
most that nearly always or never succeed (Shao et al. 2024, arXiv:2402.03300; Liu et al. 2025, "Dr.
GRPO", arXiv:2503.20783). Its clip acts on answers that are used again, and here none is.

The sampler computes p with a cache, token by token, and training at once: a run checks that they
agree. An answer depends on the seed and its number alone, and rewards are gathered, so a step is
the same on any number of ranks. Watch `reward`; `mixed`, the share of groups whose rewards differ,
as others teach nothing; and `end`, the share of answers that end. docs/preferences.md has more.
"""

import plumbing.endings  # first, for Ctrl-C during the imports
import argparse
import contextlib
import math
import runpy
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

import evaluate
from data import tokens_done, window_of
from finetune_lora import fine_tune, prepare
from generate import check_length, generate
from model import IGNORE
from parallel import return_each_loss, unsharded, used_techniques
from plumbing.parser import Parser, positive_int
from plumbing.processes import UserError, run
from runs import setup
from runs.flags import add_finetuning_flags, complete_finetuning
from text.batch import Batch
from text.chat import Rows, encode_prompt
from text.conversations import files_of
from text.corpora import Reading, check_string, document_name, read_records, split_of
from text.tokenizer import Tokenizer

# By how much log p of a token may differ between sampling and training. In bfloat16 it is told.
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
    parser.set_defaults(batch=64, lr=1e-4)
    args = complete_finetuning(parser.parse_args(), "grpo")
    if args.dropout:
        raise UserError("--dropout would train another model than the sampler's: leave it out")
    if args.group < 2 or args.batch % args.group:
        raise UserError(f"--batch {args.batch} must be a multiple of --group, which is 2 or more")
    return args


# --------------------------------------------------------------------------- prompts and rewards


class Prompts:
    """Prompts, each of which is to have a group of answers, and the JSON objects they come from."""

    document_mask = False

    def __init__(self, found: list[tuple[dict, list[int]]], group: int):
        self.found = found
        self.sources = [(len(found) * group, 1)]  # as data.Windows has it

    def __len__(self) -> int:
        return self.sources[0][0]

    def checksum(self) -> int:
        return zlib.crc32(repr(self.found).encode())


def open_prompts(
    data: list[str], tokenizer: Tokenizer, seq_len: int, val_data, reading: Reading, args
) -> tuple[Prompts, Prompts, list, str]:
    """Return prompts to train on and to evaluate on, and what else open_samples does. Held out are
    those of `val_data`, or some by a hash; of a few, none."""
    found, expected = {"train": [], "val": []}, '{"prompt": "..."}'
    for source, wanted in ((data, "train" if val_data else None), (val_data or [], "val")):
        for file in files_of(source, expected):
            for number, where, record in read_records(file, expected, reading):
                with reading.one(where):
                    text = check_string(record.get("prompt"), f'{where}: "prompt" is')
                    ids = tokenizer.encode(text, bos=True)
                    if args.chat:
                        ids = encode_prompt([{"role": "user", "content": text}], tokenizer)
                    check_length(len(ids), args.max_new_tokens, seq_len)
                    split = wanted or split_of(f"{document_name(file)}:{number}")
                    found[split].append((record, ids))
    train, val = found["train"], found["val"] or found["train"]
    if not train:
        raise UserError(f"{' '.join(data)} holds no prompt to train on: give more")
    summary = f"{len(train):,} prompts; {len(val):,} to evaluate on"
    return Prompts(train, args.group), Prompts(val, args.group), [], summary


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


# --------------------------------------------------------------------------------------- the task


class GRPO(evaluate.Task):
    """To answer with high rewards. It is the objective of its batches."""

    def __init__(self, reward: Callable, args: argparse.Namespace, job: setup.Job, world, *others):
        super().__init__(args, job, world, *others)
        if world.parallel.shard > 1 and self.gathered is contextlib.nullcontext:
            told = "sampling needs all weights on each rank, and they do not fit"
            raise UserError(f"{told}: give a larger --tp")
        if any(technique.gain != 1 for technique in used_techniques(world.parallel)):
            raise UserError("products in 8 bits are no sampler's: leave them out")
        return_each_loss(self.model)
        self.sample_text = lambda step: self.shown
        self.reward, self.failure, self.measured = reward, "", {}
        self.gap = torch.zeros((), device=world.device)

    def prepare(self, steps: Iterable[int], batches: Iterator[Batch]) -> Iterator[Batch]:
        return map(self.answered, steps)  # no batch can be read ahead

    def answered(self, step: int) -> Batch:
        """Return this rank's share of a step's answers, with their advantages."""
        args, world, found = self.args, self.world, self.job.train_set.found
        share, started = args.batch // world.data_size, time.perf_counter()
        first = tokens_done(args, step - 1) // args.seq_len + world.data_rank * share
        numbers = range(first, first + share)  # of the run's answers
        asked = [found[window_of(n // args.group, len(found), args.seed)] for n in numbers]
        answers, log_p = self.sample(asked, numbers)
        seconds, stop = time.perf_counter() - started, self.job.tokenizer.stop
        ends, lengths = [a[-1] in stop for a in answers], [len(a) for a in answers]
        rewards, ends, lengths = self.gather(self.score(asked, answers), ends, lengths)
        groups = rewards.view(-1, args.group)
        advantages = (groups - groups.mean(1, keepdim=True)).flatten()
        mixed = (groups != groups[:, :1]).any(1).double()
        measured = dict(reward=rewards, mixed=mixed, end=ends, length=lengths)
        measured = {name: values.mean().item() for name, values in measured.items()}
        self.measured = measured | {"sampling_seconds": seconds}
        own = advantages[world.data_rank * share :][:share]
        rows = Answers([ids for _, ids in asked], answers, log_p, own, self.job.tokenizer)
        return replace(evaluate.batch_of(rows, range(share), world), objective=self)

    def sample(self, asked: list, numbers: Sequence[int]) -> tuple[list[list[int]], Tensor]:
        """Return an answer to each of some prompts, and log p of its tokens [B, tokens]. They are
        drawn from the model's own distribution, since that is the one that is trained."""
        prompts, log_p, args = [ids for _, ids in asked], [], self.args
        options = dict(stop=self.job.tokenizer.stop, seed=args.seed, numbers=numbers, log_p=log_p)
        self.model.eval()
        gathered = unsharded(self.model, self.world.parallel)  # ranks need not draw equally often
        with gathered, torch.compiler.set_stance("force_eager"):  # shapes change with a token
            answers = generate(self.model, prompts, args.max_new_tokens, **options)
        self.model.train()
        return answers, torch.stack(log_p, 1)

    def score(self, asked: list, answers: list[list[int]]) -> list[float]:
        """Return the reward of each answer; NaN where it is no finite number, for all ranks."""
        rewards = []
        for (record, _), text in zip(asked, self.texts_of(answers)):
            try:
                rewards.append(float(self.reward(**record | {"answer": text})))
                failure = "" if math.isfinite(rewards[-1]) else f"returned {rewards[-1]}"
            except Exception as error:
                failure = f"raised {error!r:.200}"
            if failure:
                self.failure = f"reward({record['prompt']!r:.60}, {text!r:.60}) {failure}"
                return [math.nan] * len(answers)
        return rewards

    def texts_of(self, answers: list[list[int]]) -> list[str]:
        """Return the texts of answers. One that does not end is none: it would learn not to."""
        tokenizer, stop = self.job.tokenizer, self.job.tokenizer.stop
        return [tokenizer.decode(answer[:-1] if answer[-1] in stop else []) for answer in answers]

    def gather(self, *columns: list[float]) -> Tensor:
        """Gather columns with a number for each of this rank's answers -> [columns, all answers].
        Of ranks that have the same answers the first is heard: a reward may be random."""
        rows = self.world.all_gather_scalars([self.world.data_rank, *chain(*columns)]).cpu()
        if rows.isnan().any():
            failures = [self.failure] * self.world.size
            if self.world.size > 1:
                dist.all_gather_object(failures, self.failure)
            raise UserError(f"{self.args.reward}: {max(failures)}")
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
            told = f"log p of a token differs by {gap:.2g} between sampling and training"
            raise UserError(f"{told}: model.py computes something else with a cache")
        return self.measured | {"log_ratio": gap}

    def validate(self) -> tuple[dict[str, float], str]:
        """Return the mean reward of an answer to each held-out prompt; as the loss, minus it."""
        found, shares = self.job.val_set.found, self.world.data_size
        limit = min(self.args.eval_windows, len(found))
        numbers = range(self.world.data_rank, math.ceil(limit / shares) * shares, shares)
        asked = [found[number % len(found)] for number in numbers]
        answers, _ = self.sample(asked, [-1 - number for number in numbers])
        (rewards,) = self.gather(self.score(asked, answers))
        shown = zip(asked[: evaluate.SHOWN], self.texts_of(answers))
        self.shown = "\n".join(f"--- {record['prompt']}{text}" for (record, _), text in shown)
        mean = rewards.mean().item()
        return {"val_loss": -mean, "val_reward": mean}, f"reward {mean:.3f}"


def main() -> None:
    args = parse_args()
    process = setup.setup(args)
    try:
        reward = runpy.run_path(str(args.reward))["reward"]
    except Exception as error:
        raise UserError(f"--reward {args.reward} has no function reward: {error!r:.200}")
    job, examples = prepare(args, process, partial(open_prompts, args=args))
    fine_tune(args, process, job, examples, partial(GRPO, reward))


if __name__ == "__main__":
    run(main)
