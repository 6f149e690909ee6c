r"""Train a Llama from rewards: sample answers, make those likelier that beat their group (GRPO).

    torchrun rewards.py --init out/sums --data prompts.jsonl --reward reward.py
    torchrun --nproc-per-node 8 rewards.py --init ~/Llama-3.2-1B-Instruct --chat \
             --data gsm8k.jsonl --reward gsm8k.py --batch 256 --group 16 --microbatch 8 --lr 1e-5

The data are JSON lines with a "prompt". --reward is a Python file with reward(prompt, answer),
which returns a number; it is also given the other fields of the line. In each step the current
weights answer --batch / --group prompts, each of them G = --group times, at temperature 1. The
losses of all tokens on all ranks are added up, and divided once by the number of answers:

    advantage = reward of the answer - mean reward of its group, the G answers to the same prompt
    ratio     = p(token) / p by which the token was drawn
    loss      = - ratio advantage

An answer is used in one step only. So a ratio is 1, but it has the gradient of log p(token). On
average the gradient of the loss is that of the mean reward, times -(G - 1) / G. GRPO (Shao et al.
2024, arXiv:2402.03300) clips the ratios of answers that are used in several steps. It also divides
by the length of an answer, which makes long wrong answers cheap, and by the standard deviation of a
group's rewards, which favors prompts whose answers are nearly all right or nearly all wrong. Liu
et al. 2025 ("Dr. GRPO", arXiv:2503.20783) divide by neither, as we do here.

Sampling computes p a token at a time, with a cache, and training computes it for all tokens at
once: a run checks that both agree. An answer depends only on the weights, its prompt, the seed and
its number, so a step is the same on any number of ranks. docs/preferences.md says more.
"""

import plumbing.endings  # first, for Ctrl-C during the imports
import math
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import chain
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from config import Totals
from finetune_lora import Finetuning, Script, finetune
from model import IGNORE
from parallel import used_techniques, weights_at_hand
from plumbing import processes
from plumbing.flags import flag, other_default
from plumbing.messages import UserError, is_rank_zero, with_progress
from plumbing.processes import meet
from runs.flags import rate_flag
from runs.scores import Stopped, batch_of, set_loss_of_each_target
from runs.task import Task
from techniques.decoding import check_length, generate
from text.batch import Batch
from text.conversations import files_of
from text.corpora import Reading, check_string, document_name, read_records, split_of
from text.order import Steps, window_of
from text.packing import Rows
from text.targets import SHOWN, encode_prompt
from text.tokenizer import Tokenizer

# How far log p of a token may differ between sampling and training.
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-2, torch.bfloat16: math.inf}


@dataclass(frozen=True)
class Rewarding(Finetuning):
    """Train a Llama from rewards: make answers likelier that beat their group (GRPO)."""

    # fmt: off
    reward: Path = flag(None, "Python file with a function reward(prompt, answer, **fields)",
                        "rewards", Path, required=True, metavar="FILE")
    chat: bool = flag(False, "a prompt is a user's message", "rewards")
    group: int = flag(8, "answers to each prompt, of the --batch", "rewards")
    max_new_tokens: int = flag(64, "tokens of an answer at most", "rewards")
    # fmt: on
    batch: int = other_default(Finetuning, "batch", 64)
    lr: float | None = rate_flag("rewards")

    used_most = "init data reward group max_new_tokens batch steps lr out resume"
    goal = "grpo"
    task = "rewards"

    @property
    def answers_messages(self) -> bool:
        return self.chat

    def check(self) -> None:
        super().check()
        if self.dropout:
            problem = "--dropout trains another model than the one that answers"
            raise UserError(f"{problem}: leave it out")
        if self.train_on_prompt:
            raise UserError("--train-on-prompt changes nothing here: leave it out")
        if self.group < 2 or self.batch % self.group:
            problem = f"--batch {self.batch} must be a multiple of --group"
            raise UserError(f"{problem}, which is 2 or more")


@cache
def reward_process(path: Path):
    """Return the process that rewards answers (runs/reward_process.py). Rank 0 has one."""
    if not path.is_file():
        raise UserError(f"--reward {path}: there is no such file")
    from runs.reward_process import RewardProcess  # here, since a single rank has one

    process = RewardProcess(path)
    if process.problem:
        raise UserError(f"--reward {path} has no function reward: it {process.problem}")
    return process


# ---------------------------------------------------------------------------- prompts and answers


EXPECTED = '{"prompt": "..."}'  # a line of the data


def open_prompts(
    run: Rewarding, tokenizer: Tokenizer, reading: Reading
) -> tuple[Rows, Rows, list, str]:
    """Return prompts to train on, which have a row for each answer of a group, prompts to evaluate
    on, no examples, and a line of counts. If a hash holds out none of a few prompts, the evaluation
    is on those of training."""
    if is_rank_zero():
        reward_process(run.reward)
    read = partial(read_prompts, run, tokenizer, reading)
    train, val = read(run.data)
    if run.val_data:
        train, val = train + val, [*chain(*read(run.val_data))]
    for data, prompts in ((run.data, train), (run.val_data, val)):
        if data and not prompts:
            raise UserError(
                f"{' '.join(data)} has too few prompts: give more lines like {EXPECTED}"
            )
    val = val or train
    summary = f"{len(train):,} prompts; {len(val):,} to evaluate on"
    return Rows(train, tokenizer, run.group), Rows(val, tokenizer), [], summary


def read_prompts(
    run: Rewarding, tokenizer: Tokenizer, reading: Reading, data: list[str]
) -> tuple[list, list]:
    """Return the prompts to train on, and those that a hash holds out, each as (ids, record)."""
    splits = {"train": [], "val": []}
    for file in files_of(data, EXPECTED):
        for number, where, record in read_records(file, EXPECTED, reading):
            with reading.one(where):
                text = check_string(record.get("prompt"), f'{where}: "prompt" is')
                if "answer" in record:
                    raise UserError(f'{where}: the "answer" is the model\'s: rename the field')
                ids = tokenizer.encode(text, bos=True)
                if run.chat:
                    ids = encode_prompt([{"role": "user", "content": text}], tokenizer)
                check_length(len(ids), run.max_new_tokens, run.seq_len)
                splits[split_of(f"{document_name(file)}:{number}")].append((ids, record))
    return splits["train"], splits["val"]


class Answers(Rows):
    """Rows of a prompt and its answer, whose tokens are the targets. A batch has three values of
    each target, 0 elsewhere: the `advantage` of its answer, `sampled_log_p`, its log p by the
    sampler, and `begins`, 1 for the first target of an answer, since with --cp each rank has a part
    of an answer."""

    def __init__(self, prompts, answers, log_p: Tensor, advantages: Tensor, tokenizer: Tokenizer):
        samples = []
        for prompt, answer in zip(prompts, answers):
            is_target = [False] * len(prompt) + [True] * len(answer)
            samples.append((prompt + answer, is_target))
        super().__init__(samples, tokenizer)
        self.log_p = log_p.cpu()
        self.advantages = advantages.to(log_p.dtype)

    def batch(self, indices: Sequence[int], multiple: int = 1) -> Batch:
        batch = super().batch(indices, multiple)
        is_target = batch.targets != IGNORE
        advantage = self.log_p.new_zeros(batch.targets.shape)
        sampled_log_p, begins = advantage.clone(), advantage.clone()
        for row, i in enumerate(indices):
            columns = is_target[row].nonzero().flatten()
            advantage[row, columns] = self.advantages[i]
            sampled_log_p[row, columns] = self.log_p[i, : len(columns)]
            begins[row, columns[0]] = 1
        values = dict(advantage=advantage, sampled_log_p=sampled_log_p, begins=begins)
        return replace(batch, target_values=values)


# --------------------------------------------------------------------------------------- the task


@dataclass
class Rewards(Task):
    """Give answers with high rewards."""

    before_step = "sampling"

    def __post_init__(self):
        if self.world.parallel.shard > 1 and not self.whole_model_fits:
            problem = "sampling needs all weights on each rank, and they do not fit"
            raise UserError(f"{problem}: give a larger --tp")
        if any(technique.gain != 1 for technique in used_techniques(self.world.parallel)):
            raise UserError("products in 8 bits would differ in sampling: leave them out")
        set_loss_of_each_target(self.job.model)
        # Ranks take a step's answers in turn: every data_size-th answer is this rank's.
        self.own = slice(self.world.data_rank, None, self.world.parallel.data_size)
        self.tokens_of_step = 0
        self.compared = self.far = 0  # tokens that `loss` has seen, and those beyond TOLERANCE
        # Where a router sends tokens to different layers, rounding may send some elsewhere.
        routes = any(hasattr(module, "shapes_vary") for module in self.work.model.modules())
        rounds = self.world.parallel.dtype == torch.float32
        self.may_be_far = 0.1 if routes and rounds else 0.0  # share of a step's tokens

    def batches(self, steps: Steps) -> Iterator[Batch]:
        for step in steps.to_do:  # not ahead: a batch needs the latest weights
            if self.problem:
                return
            try:
                batch = self.batch_of_answers(steps.order.sequences(step))
            except Stopped:  # `problem` says why
                return
            yield batch

    def batch_of_answers(self, numbers: Sequence[int]) -> Batch:
        """Return this rank's share of a step's answers, with their advantages. `numbers` are those
        of the step's answers, counted from the first answer of the run. The number of an answer
        tells which prompt it is to, and seeds its random numbers."""
        run = self.run
        prompts = self.job.train_set.samples
        stop = self.job.tokenizer.stop
        started = time.perf_counter()
        # Answers are counted as sequences are; those of a group follow each other.
        asked = [prompts[window_of(n // run.group, len(prompts), run.seed)] for n in numbers]
        answers, log_p, rewards = self.answer(asked, numbers)
        groups = rewards.view(-1, run.group)
        advantages = (groups - groups.mean(1, keepdim=True)).flatten()
        is_mixed = (groups != groups[:, :1]).any(1)  # rewards of the group differ
        self.measured = {
            "reward": rewards.mean().item(),
            "mixed": is_mixed.double().mean().item(),
            "end": statistics.mean(answer[-1] in stop for answer in answers),
            "length": statistics.mean(map(len, answers)),
            "sampling_seconds": time.perf_counter() - started,
            "log_ratio": 0.0,  # the largest that `loss` has seen in this step
        }
        lengths = [len(ids) + len(answer) for (ids, _), answer in zip(asked, answers)]
        self.tokens_of_step = sum(lengths) - len(lengths)  # the last is a target only
        own_prompts = [ids for ids, _ in asked[self.own]]
        rows = Answers(
            own_prompts, answers[self.own], log_p, advantages[self.own], self.job.tokenizer
        )
        return batch_of(rows, range(len(rows)), self.world)

    def answer(self, asked: list, numbers: Sequence[int]) -> tuple[list, Tensor, Tensor]:
        """Answer prompts, and reward the answers. Ranks share the prompts. Return the answers of
        all ranks, log p of this rank's tokens [B, tokens], and the rewards of all answers. Rank 0
        computes these, since a reward may be random. If one fails, raise Stopped on all ranks."""
        world = self.world
        own_prompts = [ids for ids, _ in asked[self.own]]
        own_answers, log_p = self.sample(own_prompts, numbers[self.own])
        shares = [None] * world.size
        dist.all_gather_object(shares, (self.own, own_answers))
        answers = [None] * len(asked)
        for places, its_answers in shares:
            answers[places] = its_answers
        scored = self.score(asked, answers) if world.rank == 0 else None
        meet()  # rewards may take longer than a collective waits
        rewards, self.problem = world.broadcast_from_rank_zero(lambda: scored)
        if self.problem:
            raise Stopped
        return answers, log_p, torch.tensor(rewards, dtype=torch.float64)

    def sample(self, prompts: list, numbers: Sequence[int]) -> tuple[list[list[int]], Tensor]:
        """Return an answer to each prompt, and log p of its tokens [B, tokens]. They are drawn at
        temperature 1 and without top_k and top_p, from the distribution that is trained."""
        model, run = self.job.model, self.run
        log_p = []  # of each step of the sampling
        in_training = model.training
        model.eval()
        # Compiled blocks would cast their weights for every token, where autocast casts them once.
        compiled = self.world.parallel.compile and not model.compute_dtype
        stance = "default" if compiled else "force_eager"
        # Ranks may run forward different numbers of times, so only the first all-gathers weights.
        with weights_at_hand(model, self.world.parallel), torch.compiler.set_stance(stance):
            answers = generate(
                model,
                prompts,
                run.max_new_tokens,
                stop=self.job.tokenizer.stop,
                seed=run.seed,
                numbers=numbers,
                log_p=log_p,
                compiled=compiled,
            )
        model.train(in_training)
        return answers, torch.stack(log_p, 1)

    def score(self, asked: list, answers: list[list[int]]) -> tuple[list[float], str]:
        """Return the reward of each answer, and a line if one of them has none."""
        process = reward_process(self.run.reward)
        rewards = []
        for (_, record), answer in zip(asked, with_progress(answers, "rewarding")):
            text = self.text_of(answer)
            rewards.append(process.reward(record, text))
            if process.problem:
                call = f"reward({record['prompt']!r:.60}, {text!r:.60})"
                advice = ""
                if "unexpected keyword argument" in process.problem:
                    advice = ": write reward(prompt, answer, **fields), for a line's other fields"
                return [], f"{self.run.reward}: {call} {process.problem}{advice}"
        return rewards, ""

    def text_of(self, answer: list[int]) -> str:
        """Return the text of an answer, or "" if it does not end: if such answers were rewarded,
        the model would learn not to end."""
        tokenizer = self.job.tokenizer
        return tokenizer.decode(answer[:-1]) if answer[-1] in tokenizer.stop else ""

    def loss(self, losses: Tensor, batch: Batch) -> Tensor:
        """Return the sum of the losses of a batch's tokens, given -log p of targets [B, T]."""
        log_ratio = -losses - batch.target_values["sampled_log_p"]  # 0 where there is no target
        gap = log_ratio.detach().abs()
        self.far = self.far + (gap > TOLERANCE[self.world.parallel.dtype]).sum()
        self.compared = self.compared + batch.count()
        self.measured["log_ratio"] = gap.max().clamp(min=self.measured["log_ratio"])
        return -(log_ratio.exp() * batch.target_values["advantage"]).sum()

    def count(self, batch: Batch) -> Tensor:
        return batch.target_values["begins"].sum()  # the number of answers

    def tokens(self, steps: Steps, step: int) -> int:
        return self.tokens_of_step

    def finish_measures(self, totals: Totals) -> dict[str, float]:
        """Return what was measured of the last answers. Raise UserError on all ranks if the model
        that was trained is not the one that answered."""
        if self.job.model.training:  # else this is an evaluation, without a loss of tokens
            mine = [self.measured["log_ratio"], self.far, self.compared]
            gaps, far, compared = self.world.all_gather_scalars(mine).unbind(1)  # [ranks] each
            self.compared = self.far = 0
            gap = gaps.max().item()
            if far.sum() > self.may_be_far * compared.sum():
                problem = f"log p of a token differs by {gap:.2g} between sampling and training"
                raise UserError(f"{problem}: model.py computes something else with a cache")
            self.measured["log_ratio"] = gap
        return self.measured

    def evaluate(self) -> Totals:
        """Answer each held-out prompt once. The loss is minus the reward."""
        prompts = self.job.val_set.samples
        limit = min(self.run.eval_windows, len(prompts))
        padded = self.world.parallel.padded(limit)
        asked = [prompts[i % limit] for i in range(padded)]
        numbers = range(-1, -1 - padded, -1)  # answers of training have none below 0
        answers, _, rewards = self.answer(asked, numbers)
        lines = []
        for (_, record), answer in zip(asked[:SHOWN], answers):
            lines.append(f"--- {record['prompt']}{self.text_of(answer)}")
        self.shown = "\n".join(lines)
        rewards = rewards[:limit]
        self.measured = {"reward": rewards.mean().item()}
        return Totals(-rewards.sum().item(), limit, 0)

    def text_to_show(self, step: int) -> str:
        return self.shown


SCRIPT = Script(Rewarding, open_prompts, Rewards)
main = partial(finetune, SCRIPT)

if __name__ == "__main__":
    processes.run(main)
