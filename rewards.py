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
import functools
import math
import runpy
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
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
from techniques.chunked_loss import cross_entropies
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


@functools.cache
def load_reward(path: Path) -> Callable:
    """Return the function `reward` of a file, which runs once."""
    try:
        return runpy.run_path(str(path))["reward"]
    except Exception as error:
        raise UserError(f"--reward {path} has no function reward: {error!r:.200}")


# ---------------------------------------------------------------------------- prompts and answers


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
    args: argparse.Namespace, tokenizer: Tokenizer, reading: Reading
) -> tuple[Prompts, Prompts, list, str]:
    """Return prompts to train on and to evaluate on, no examples, and a line that counts them. Held
    out are those of --val-data, or some by a hash; where there are few, none."""
    found, expected = {"train": [], "val": []}, '{"prompt": "..."}'
    sources = [(args.data, "train" if args.val_data else None), (args.val_data or [], "val")]
    for source, wanted in sources:
        for file in files_of(source, expected):
            for number, where, record in read_records(file, expected, reading):
                with reading.one(where):
                    text = check_string(record.get("prompt"), f'{where}: "prompt" is')
                    if "answer" in record:
                        problem = 'has an "answer", which is the model\'s to give'
                        raise UserError(f"{where} {problem}: rename the field")
                    ids = tokenizer.encode(text, bos=True)
                    if args.chat:
                        ids = encode_prompt([{"role": "user", "content": text}], tokenizer)
                    check_length(len(ids), args.max_new_tokens, args.seq_len)
                    split = wanted or split_of(f"{document_name(file)}:{number}")
                    found[split].append((record, ids))
    train, val = found["train"], found["val"] or found["train"]
    if not train:
        raise UserError(f"{' '.join(args.data)} holds no prompt to train on: give more")
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
        return replace(batch, given=given)


# --------------------------------------------------------------------------------------- the task


@dataclass
class Rewards(evaluate.Prediction):
    """The task of a run: to give answers with high rewards. It is the objective of its batches."""

    def __post_init__(self):
        if self.world.parallel.shard > 1 and not self.fits:
            problem = "sampling needs all weights on each rank, and they do not fit"
            raise UserError(f"{problem}: give a larger --tp")
        if any(technique.gain != 1 for technique in used_techniques(self.world.parallel)):
            raise UserError("the sampler has no products in 8 bits: leave out --float8")
        self.job.model.loss = cross_entropies  # of each target: `loss` makes one of them
        self.reward, self.failure, self.measured = load_reward(self.args.reward), "", {}
        self.sample_text = lambda step: self.shown

    def batches(self, steps: Iterable[int]) -> Iterator[Batch]:
        """Yield this rank's answers of each step. No step can be read ahead."""
        for step in steps:
            yield self.answered(step)

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
        self.measured = {name: values.mean().item() for name, values in measured.items()}
        self.measured |= {"sampling_seconds": seconds, "log_ratio": 0.0}
        own = advantages[world.data_rank * share :][:share]
        rows = Answers([ids for _, ids in asked], answers, log_p, own, self.job.tokenizer)
        return replace(evaluate.batch_of(rows, range(share), world), objective=self)

    def sample(self, asked: list, numbers: Sequence[int]) -> tuple[list[list[int]], Tensor]:
        """Return an answer to each of some prompts, and log p of its tokens [B, tokens]. They are
        drawn from the model's own distribution, since that is the one that is trained."""
        prompts, log_p, model = [ids for _, ids in asked], [], self.job.model
        stop, seed = self.job.tokenizer.stop, self.args.seed
        options = dict(stop=stop, seed=seed, numbers=numbers, log_p=log_p)
        in_training = model.training
        model.eval()
        # Ranks may draw different numbers of tokens, so no forward may gather weights.
        with unsharded(model, self.world.parallel), torch.compiler.set_stance("force_eager"):
            answers = generate(model, prompts, self.args.max_new_tokens, **options)
        model.train(in_training)
        return answers, torch.stack(log_p, 1)

    def score(self, asked: list, answers: list[list[int]]) -> list[float]:
        """Return the reward of each answer; NaN where it is no finite number, for all ranks."""
        rewards = []
        for (record, _), text in zip(asked, self.texts_of(answers)):
            try:
                rewards.append(float(self.reward(**record, answer=text)))
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

    def loss(self, losses: Tensor, batch: Batch) -> Tensor:
        """Return the sum of the losses of a batch's answers, given -log p of targets [B, T]."""
        advantage, log_p = batch.given.unbind(-1)
        log_ratio = -losses - log_p  # 0 where there is no target
        gap = log_ratio.detach().abs().max()
        self.measured["log_ratio"] = gap.clamp(min=self.measured["log_ratio"])
        return -(log_ratio.exp() * advantage).sum()

    def count(self, batch: Batch) -> float:
        return len(batch.tokens) / self.world.parallel.cp  # whose ranks share each answer

    def measures(self, totals: Totals) -> dict[str, float]:
        """Return what was measured of the last answers. Raise UserError on all ranks if the model
        that was trained is not the one that answered."""
        measured = self.measured
        if "log_ratio" in measured:
            gap = self.world.all_gather_scalars([measured["log_ratio"]]).max().item()
            if gap > TOLERANCE[self.args.dtype]:
                problem = f"log p of a token differs by {gap:.2g} between sampling and training"
                raise UserError(f"{problem}: model.py computes something else with a cache")
            measured["log_ratio"] = gap
        return measured

    def evaluate(self) -> Totals:
        """Answer each held-out prompt once. The loss is minus the reward."""
        found, shares = self.job.val_set.found, self.world.data_size
        limit = min(self.args.eval_windows, len(found))
        numbers = range(self.world.data_rank, math.ceil(limit / shares) * shares, shares)
        asked = [found[number % len(found)] for number in numbers]
        answers, _ = self.sample(asked, [-1 - number for number in numbers])
        (rewards,) = self.gather(self.score(asked, answers))
        shown = zip(asked[: evaluate.SHOWN], self.texts_of(answers))
        self.shown = "\n".join(f"--- {record['prompt']}{text}" for (record, _), text in shown)
        self.measured = {"reward": rewards.mean().item()}
        return Totals(-rewards.sum().item(), len(rewards), 0)


SCRIPT = Script(add_flags, complete, open_prompts, Rewards)


def main() -> None:
    finetune(SCRIPT)


if __name__ == "__main__":
    run(main)
