r"""Train a Llama from rewards: sample answers, make those likelier that beat their group (GRPO).

    torchrun rewards.py --init out/sums --data prompts.jsonl --reward reward.py
    torchrun --nproc-per-node 8 rewards.py --init ~/Llama-3.2-1B-Instruct --chat \
             --data gsm8k.jsonl --reward gsm8k.py --batch 256 --group 16 --microbatch 8 --lr 1e-5

The data are JSON lines with a "prompt". --reward is a Python file with reward(prompt, answer),
which returns a number; it is also given the other fields of the line. A step answers --batch /
--group prompts, each --group times, by the weights as they are, at temperature 1. Its loss is
summed over tokens, and divided once by the number of answers on all ranks:

    advantage = reward of the answer - mean reward of its group
    ratio     = p(token) / p of the sampler                     1, since all answers are new
    loss      = - ratio advantage

Its gradient is that of the mean reward, times (G - 1) / G. GRPO (Shao et al. 2024,
arXiv:2402.03300) also divides by an answer's length, so that long wrong answers cost little, and by
the deviation of its group, so that prompts count most that nearly always or never succeed. Liu et
al. 2025 ("Dr. GRPO", arXiv:2503.20783) leave out both. A clip acts on answers that are used again,
and here none is.

The sampler computes p with a cache, token by token, and training at once: a run checks that they
agree. An answer depends on the seed and its number alone, so a step is the same on any number of
ranks. docs/preferences.md says what to watch, and when rewards help.
"""

import plumbing.endings  # first, for Ctrl-C during the imports
import argparse
import math
import runpy
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import chain
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

import evaluate
from data import tokens_done, window_of
from finetune_lora import Script, finetune
from generate import check_length, generate
from model import IGNORE
from parallel import unsharded, used_techniques
from plumbing.parser import Parser, positive_int
from plumbing.processes import UserError, run
from runs.flags import add_finetuning_flags, complete_finetuning
from runs.records import Totals
from text.batch import Batch
from text.chat import Rows, encode_prompt
from text.conversations import files_of
from text.corpora import Reading, check_string, document_name, read_records, split_of
from text.tokenizer import Tokenizer

# By how much log p of a token may differ between sampling and training. In bfloat16 it is shown.
TOLERANCE = {"float64": 1e-9, "float32": 1e-2, "bfloat16": math.inf}


def add_flags(parser: Parser) -> None:
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


def complete(args: argparse.Namespace) -> argparse.Namespace:
    complete_finetuning(args, "grpo")
    if args.dropout:
        raise UserError("--dropout would train another model than the sampler's: leave it out")
    if args.group < 2 or args.batch % args.group:
        raise UserError(f"--batch {args.batch} must be a multiple of --group, which is 2 or more")
    load_reward(args.reward)
    return args


@cache
def load_reward(path: Path) -> Callable:
    """Return the function `reward` of a file, which runs once."""
    try:
        return runpy.run_path(str(path))["reward"]
    except Exception as error:
        raise UserError(f"--reward {path} has no function reward: {error!r:.200}")


# ---------------------------------------------------------------------------- prompts and answers


def open_prompts(
    args: argparse.Namespace, tokenizer: Tokenizer, reading: Reading
) -> tuple[Rows, Rows, list, str]:
    """Return prompts to train on, each as often as a step answers it, prompts to evaluate on, no
    examples, and a line of counts. A sample is (ids, JSON object). --val-data is held out, or some
    prompts are, by a hash; of a few, none."""
    splits, expected = {"train": [], "val": []}, '{"prompt": "..."}'
    for data, wanted in (args.data, "train" if args.val_data else None), (args.val_data, "val"):
        for file in files_of(data or [], expected):
            for number, where, record in read_records(file, expected, reading):
                with reading.one(where):
                    text = check_string(record.get("prompt"), f'{where}: "prompt" is')
                    if "answer" in record:
                        raise UserError(f'{where}: the "answer" is the model\'s: rename the field')
                    ids = tokenizer.encode(text, bos=True)
                    if args.chat:
                        ids = encode_prompt([{"role": "user", "content": text}], tokenizer)
                    check_length(len(ids), args.max_new_tokens, args.seq_len)
                    split = wanted or split_of(f"{document_name(file)}:{number}")
                    splits[split].append((ids, record))
    if not splits["train"]:
        raise UserError(f"{' '.join(args.data)} holds no prompt to train on: give more")
    train, val = splits["train"], splits["val"] or splits["train"]
    summary = f"{len(train):,} prompts; {len(val):,} to evaluate on"
    train = [each for each in train for _ in range(args.group)]
    return Rows(train, tokenizer), Rows(val, tokenizer), [], summary


class Answers(Rows):
    """A row for each prompt with its answer, whose tokens are the targets. Each is `given` the
    advantage of its answer, the sampler's log p, and whether it is the first: [B, T, 3]."""

    def __init__(self, prompts, answers, log_p: Tensor, advantages: Tensor, tokenizer: Tokenizer):
        samples = [(p + a, [False] * len(p) + [True] * len(a)) for p, a in zip(prompts, answers)]
        super().__init__(samples, tokenizer)
        self.log_p, self.advantages = log_p.cpu(), advantages.to(log_p.dtype)

    def batch(self, indices: Sequence[int]) -> Batch:
        batch = super().batch(indices)
        given = self.log_p.new_zeros(*batch.targets.shape, 3)
        for i, row, is_target in zip(indices, given, batch.targets != IGNORE):
            row[is_target, 0] = self.advantages[i]
            row[is_target, 1] = self.log_p[i, : is_target.sum()]
            row[is_target.nonzero()[0], 2] = 1
        return replace(batch, given=given)


# --------------------------------------------------------------------------------------- the task


@dataclass
class Rewards(evaluate.Prediction):
    """The task of a run: to give answers with high rewards. It is the objective of its batches."""

    before_step = "sampling"

    def __post_init__(self):
        if self.world.parallel.shard > 1 and not self.fits:
            problem = "sampling needs all weights on each rank, and they do not fit"
            raise UserError(f"{problem}: give a larger --tp")
        if any(technique.gain != 1 for technique in used_techniques(self.world.parallel)):
            raise UserError("products in 8 bits would be no sampler's: leave them out")
        evaluate.return_each_loss(self.job.model)  # `loss` makes one of them
        self.sample_text = lambda step: self.shown

    def batches(self, steps: Iterable[int]) -> Iterator[Batch]:
        yield from map(self.answered, steps)  # none can be read ahead

    def answered(self, step: int) -> Batch:
        """Return this rank's share of a step's answers, with their advantages."""
        args, data, stop = self.args, self.job.train_set.samples, self.job.tokenizer.stop
        started, first = time.perf_counter(), tokens_done(args, step - 1) // args.seq_len
        numbers = range(first, first + args.batch)  # of the run's answers
        n_prompts = len(data) // args.group
        groups = (window_of(n // args.group, n_prompts, args.seed) for n in numbers)
        asked = [data[args.group * group] for group in groups]
        answers, log_p, rewards = self.rewarded(asked, numbers)
        groups = rewards.view(-1, args.group)
        advantages = (groups - groups.mean(1, keepdim=True)).flatten()
        self.measured = {
            "reward": rewards.mean().item(),
            "mixed": (groups != groups[:, :1]).any(1).double().mean().item(),
            "end": statistics.mean(answer[-1] in stop for answer in answers),
            "length": statistics.mean(map(len, answers)),
            "sampling_seconds": time.perf_counter() - started,
            "log_ratio": 0.0,  # until `loss` has compared
        }
        own = self.own(len(asked))
        given = answers[own], log_p, advantages[own], self.job.tokenizer
        rows = Answers([ids for ids, _ in asked[own]], *given)
        return replace(evaluate.batch_of(rows, range(len(rows)), self.world), objective=self)

    def own(self, n: int) -> slice:
        """Return which of n answers this rank gives."""
        share = n // self.world.data_size
        return slice(self.world.data_rank * share, (self.world.data_rank + 1) * share)

    def rewarded(self, asked: list, numbers: Sequence[int]) -> tuple[list, Tensor, Tensor]:
        """Answer prompts, of which each rank has its share. Return all answers, log p of the tokens
        of its own [B, tokens], and all rewards. Rank 0 rewards, since a reward may be random."""
        world, own = self.world, self.own(len(asked))
        answers, log_p = self.sample([ids for ids, _ in asked[own]], numbers[own])
        parts = [(world.data_rank, answers)] * world.size
        dist.all_gather_object(parts, parts[0])
        answers = [*chain(*(part for _, part in sorted(dict(parts).items())))]
        rewards = world.broadcast_from_rank_zero(partial(self.score, asked, answers))
        return answers, log_p, torch.tensor(rewards, dtype=torch.float64)

    def sample(self, prompts: list, numbers: Sequence[int]) -> tuple[list[list[int]], Tensor]:
        """Return an answer to each prompt, and log p of its tokens. They are drawn from the model's
        own distribution, since that is the one that is trained."""
        model, log_p, in_training = self.job.model, [], self.job.model.training
        stop, seed = self.job.tokenizer.stop, self.args.seed
        options = dict(stop=stop, seed=seed, numbers=numbers, log_p=log_p)
        model.eval()
        # Ranks may draw different numbers of tokens, so no forward may gather weights.
        with unsharded(model, self.world.parallel), torch.compiler.set_stance("force_eager"):
            answers = generate(model, prompts, self.args.max_new_tokens, **options)
        model.train(in_training)
        return answers, torch.stack(log_p, 1)

    def score(self, asked: list, answers: list[list[int]]) -> list[float]:
        """Return the reward of each answer. Raise UserError where it is no finite number."""
        rewards, reward = [], load_reward(self.args.reward)
        for (_, record), answer in zip(asked, answers):
            text = self.text_of(answer)
            try:
                rewards.append(float(reward(**record, answer=text)))
                if not math.isfinite(rewards[-1]):
                    raise ValueError(f"it returned {rewards[-1]}")
            except Exception as error:
                call = f"reward({record['prompt']!r:.60}, {text!r:.60})"
                raise UserError(f"{self.args.reward}: {call} raised {error!r:.200}")
        return rewards

    def text_of(self, answer: list[int]) -> str:
        """Return the text of an answer. One that does not end is none: it would learn not to."""
        tokenizer = self.job.tokenizer
        return tokenizer.decode(answer[:-1]) if answer[-1] in tokenizer.stop else ""

    def loss(self, losses: Tensor, batch: Batch) -> Tensor:
        """Return the sum of the losses of a batch's answers, given -log p of targets [B, T]."""
        advantage, log_p, _ = batch.given.unbind(-1)
        log_ratio = -losses - log_p  # 0 where there is no target
        gap = log_ratio.detach().abs().max()
        self.measured["log_ratio"] = gap.clamp(min=self.measured["log_ratio"])
        return -(log_ratio.exp() * advantage).sum()

    def count(self, batch: Batch) -> Tensor:
        return batch.given[..., 2].sum()  # of answers

    def measures(self, totals: Totals) -> dict[str, float]:
        """Return what was measured of the last answers. Raise UserError on all ranks if the model
        that was trained is not the one that answered."""
        if "log_ratio" in self.measured:
            gap = self.world.all_gather_scalars([self.measured["log_ratio"]]).max().item()
            if gap > TOLERANCE[self.args.dtype]:
                problem = f"log p of a token differs by {gap:.2g} between sampling and training"
                raise UserError(f"{problem}: model.py computes something else with a cache")
            self.measured["log_ratio"] = gap
        return self.measured

    def evaluate(self) -> Totals:
        """Answer each held-out prompt once. The loss is minus the reward."""
        data, shares = self.job.val_set.samples, self.world.data_size
        limit = min(self.args.eval_windows, len(data))
        numbers = range(-1, -1 - math.ceil(limit / shares) * shares, -1)  # no answer of a step
        asked = [data[(-1 - number) % limit] for number in numbers]  # ranks have equally many
        answers, _, rewards = self.rewarded(asked, numbers)
        shown = zip(asked[: evaluate.SHOWN], answers)
        lines = (f"--- {record['prompt']}{self.text_of(answer)}" for (_, record), answer in shown)
        self.shown, rewards = "\n".join(lines), rewards[:limit]
        self.measured = {"reward": rewards.mean().item()}
        return Totals(-rewards.sum().item(), limit, 0)


SCRIPT = Script(add_flags, complete, open_prompts, Rewards)


def main() -> None:
    finetune(SCRIPT)


if __name__ == "__main__":
    run(main)
