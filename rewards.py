r"""Train a Llama from rewards: sample answers, make those likelier that beat their group (GRPO).

    torchrun rewards.py --init out/sums/base --data prompts.jsonl --reward reward.py
    torchrun --nproc-per-node 8 rewards.py --init ~/Llama-3.2-1B-Instruct --chat \
             --data gsm8k.jsonl --reward gsm8k.py --batch 256 --group 16 --microbatch 8 --lr 1e-5

docs/preferences.md makes such a base. The data are JSON lines with a "prompt". --reward is a Python
file with reward(prompt, answer), which returns a number; it is also given the other fields of the
line. In each step the current weights answer --batch / --group prompts, each of them G = --group
times, at temperature 1. The losses of all tokens on all ranks are added up, and divided once by the
number of answers:

    advantage = reward of the answer - mean reward of its group, the G answers to the same prompt
    ratio     = p(token) / p(token) by the weights that drew it
    loss      = - min(ratio advantage, clip(ratio) advantage)

In the first update after sampling a ratio is 1, but it has the gradient of log p(token). On average
the gradient of the loss is that of the mean reward, times -(G - 1) / G. With --updates N a step's
answers are split into N parts, and the optimizer takes a step on each. From the second on the
weights are no longer those that drew the answers. So ratios are clipped, as in PPO (Schulman et al.
2017, arXiv:1707.06347). A positive advantage drives a ratio up, a negative one drives it down, and
beyond the bound of --clip-ratio on that side a token has no gradient. The upper bound is the wider
one, so that rare tokens can grow (DAPO, Yu et al. 2025, arXiv:2503.14476).

GRPO (Shao et al. 2024, arXiv:2402.03300) also divides by the length of an answer, which makes long
wrong answers cheap, and by the standard deviation of a group's rewards, which favors prompts whose
answers are nearly all right or nearly all wrong. Liu et al. 2025 ("Dr. GRPO", arXiv:2503.20783)
divide by neither, as we do here; --normalize std divides by the standard deviation.

--kl K adds K (r - log r - 1) to the loss of each token, with r = p_base(token) / p(token), where
the base is this model with its adapters off. The mean of r - log r - 1 over drawn tokens estimates
KL(model, base) (Schulman 2020, "k3"). This term is multiplied by the ratio. Else, as tokens are
drawn from the model, its gradient would be that of KL(base, model) (Tang and Munos 2025,
arXiv:2506.09477).

Sampling computes p a token at a time, with a cache, and training computes it for all tokens at
once: a run checks that both agree. In bfloat16 they do so roughly, so a token has the weight
p in training / p in sampling, at most --max-ratio (Yao et al. 2025, "truncated importance
sampling"), where the p in training is that of the weights before the first update.
An answer depends only on the weights, its prompt, the seed and its number, so a step is the same on
any number of ranks. The loop over steps is train.py's: finetune of finetune_lora.py freezes a base,
adds adapters, and calls it with the Task of this file. docs/preferences.md says more.
"""

import plumbing.endings  # first, for Ctrl-C during the imports
import hashlib
import math
import statistics
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from config import Totals
from data import batch_of
from finetune_lora import Finetuning, Script, finetune
from lora import adapters_off
from plumbing import endings, processes
from plumbing.flags import flag, other_default
from plumbing.messages import UserError, is_rank_zero, print_rank_zero, with_progress
from plumbing.parser import nonnegative_float, positive_float
from plumbing.processes import meet, shared_store
from runs.answers import (
    Answers,
    Prompts,
    Sampled,
    check_can_sample,
    open_prompts,
    prompts_of_evaluation,
    prompts_of_step,
    replay,
    sample,
)
from runs.each_target import log_p_of_targets, set_loss_of_each_target
from runs.flags import rate_flag
from runs.scores import Stopped
from runs.task import Task
from text.batch import Batch
from text.order import Steps
from text.targets import SHOWN

# How far rounding takes log p of a token in training from that in sampling, at most.
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-2, torch.bfloat16: math.log(2)}
WARN_ABOVE = 1e-3  # share of a step's tokens that are further, in bfloat16
LEAST_STD = 1e-6  # for --normalize std: what rounding alone makes differ stays small


@dataclass(frozen=True)
class Rewarding(Finetuning):
    """Train a Llama from rewards: make answers likelier that beat their group (GRPO)."""

    # fmt: off
    reward: Path = flag(None, "Python file with a function reward(prompt, answer, **fields)",
                        "rewards", Path, required=True, metavar="FILE")
    chat: bool = flag(False, "a prompt is a user's message", "rewards")
    reward_workers: int = flag(1, "processes that call the function", "rewards", may_change=True)
    group: int = flag(8, "answers to each prompt, of the --batch", "rewards")
    max_new_tokens: int = flag(64, "tokens of an answer at most", "rewards")
    updates: int = flag(1, "steps of the optimizer for the answers of a step, which are split "
                        "into as many parts", "rewards")
    clip_ratio: tuple[float, ...] = flag((0.2, 0.28), "how far below and above 1 the ratio of a "
                                         "token has a gradient (default: 0.2 0.28)", "rewards",
                                         positive_float, nargs=2, metavar="DISTANCE")
    max_ratio: float = flag(2.0, "most that a token may weigh for differing between sampling and "
                            "training", "rewards", positive_float)
    kl: float | None = flag(None, "weight of KL(model, base) in the loss; 0 only measures it "
                            "(default: neither)", "rewards", nonnegative_float)
    normalize: str = flag("none", "what advantages are divided by: none, or std, the standard "
                          "deviation of a group's rewards", "rewards", choices=["none", "std"])
    # fmt: on
    batch: int = other_default(Finetuning, "batch", 64)
    lr: float | None = rate_flag("rewards")

    used_most = "init data reward group max_new_tokens batch steps lr out resume"
    goal = "grpo"
    kind = "rewards"

    @property
    def answers_messages(self) -> bool:
        return self.chat

    @property
    def references(self) -> int:
        return (self.kl is not None) + (self.updates > 1)

    def digests(self) -> dict[str, str]:
        return {"reward_digest": hashlib.sha256(self.reward.read_bytes()).hexdigest()}

    def check(self) -> None:
        super().check()
        if self.dropout or self.train_on_prompt:
            problem = "--dropout trains another model than the one that answers"
            problem += ", and --train-on-prompt changes nothing here"
            raise UserError(f"{problem}: leave them out")
        if self.group < 2 or self.batch % (self.group * self.updates):
            problem = f"--batch {self.batch} must be a multiple of --group"
            if self.updates > 1:
                problem += f" x --updates {self.updates}"
            raise UserError(f"{problem}; --group is {self.group}, and has to be 2 or more")
        if self.clip_ratio[0] >= 1:
            raise UserError("--clip-ratio: the first distance is below 1, as in 0.2 0.28")
        if self.max_ratio < 1:
            raise UserError("--max-ratio is 1 or more, as 2")
        if self.kl is not None and self.all_weights:
            problem = "--kl compares with the base, which --all-weights changes"
            raise UserError(f"{problem}: leave one of them out")


@cache
def reward_processes(path: Path, n: int):
    """Return the n processes that reward answers (runs/reward_process.py). Rank 0 has them."""
    if not path.is_file():
        raise UserError(f"--reward {path}: there is no such file")
    from runs.reward_process import RewardProcesses  # here, since a single rank has them

    started = RewardProcesses(path, n)
    if started.problem:
        raise UserError(f"--reward {path}: the file {started.problem}")
    return started


# --------------------------------------------------------------------------------------- the task


def advantages_of(rewards: Tensor, normalize: str) -> tuple[Tensor, Tensor]:
    """Return the advantage of each answer, given rewards [groups, G], and which groups have any:
    their rewards differ, and none is NaN, which stands for a missing one."""
    is_mixed = (rewards != rewards[:, :1]).any(1) & ~rewards.isnan().any(1)
    advantages = rewards - rewards.mean(1, keepdim=True)
    if normalize == "std":
        advantages = advantages / rewards.std(1, keepdim=True).clamp(min=LEAST_STD)
    return torch.where(is_mixed[:, None], advantages, 0.0), is_mixed


def clipped(log_ratio: Tensor, advantage: Tensor, low: float, high: float) -> tuple[Tensor, Tensor]:
    """Return min(ratio advantage, clip(ratio) advantage) of each token, and which of them are
    clipped: those have no gradient. The logarithm is clipped: exp of a large one is infinite."""
    not_above = log_ratio.clamp(max=math.log(1 + high))
    not_below = log_ratio.clamp(min=math.log(1 - low))
    bounded = torch.where(advantage < 0, not_below, not_above)
    is_clipped = (bounded != log_ratio) & (advantage != 0)
    return bounded.exp() * advantage, is_clipped


def open_prompts_and_rewards(
    run: Rewarding, tokenizer, reading
) -> tuple[Prompts, Prompts, list, str]:
    """Return what open_prompts does; start the processes of rewards first, which may fail."""
    if is_rank_zero():
        reward_processes(run.reward, run.reward_workers)
    return open_prompts(run, tokenizer, reading)


def some_rank_asked_to_end() -> int:
    """Return the signal that asks some rank to save and end, as the watching threads tell each
    other (plumbing/heartbeats.py); 0 if there is none."""
    store = shared_store()
    told = int(store.get("asked to end")) if store.check(["asked to end"]) else 0
    return endings.asked_to_end() or told


class Scored(NamedTuple):
    """What rank 0 knows of the rewards of a step's answers."""

    rewards: Sequence[float]  # of each; NaN where it has none, with --skip-bad
    parts: dict[str, float]  # by name the mean of each part, if rewards have several
    problem: str = ""  # a line, if an answer has no reward
    signal: int = 0  # that has come to some rank meanwhile


@dataclass
class Rewards(Task):
    """Give answers with high rewards (labs/rewards)."""

    before_step = "sampling"

    def __post_init__(self):
        check_can_sample(self)
        set_loss_of_each_target(self.job.model)  # its forward returns -log p [B, T], 0 of prompts
        # Ranks take a step's answers in turn: every data_size-th answer is this rank's.
        self.own = slice(self.world.data_rank, None, self.world.parallel.data_size)
        self.sums = Counter()  # of `loss` over tokens, by name, since the last finish_measures
        # The largest |log p - log p in sampling| of a token since then: by the weights of now, and
        # by those that drew it, where only rounding can make them differ.
        self.largest_now = self.largest_by_rounding = 0.0
        self.measured = {}  # of the newest answers, by name
        self.seconds = {}  # that they took
        self.shown = ""  # of the newest evaluation
        dtype = self.world.parallel.dtype
        self.tolerance = TOLERANCE[dtype]
        self.only_warns = dtype == torch.bfloat16
        self.has_warned = False
        self.prepare_replay()

    def prepare_replay(self) -> None:
        """Let layers with experts keep what they choose in sampling, so that training takes the
        same experts. A model without experts has no such layers."""
        # --tp divides the tokens of a prompt, of which a rank would know its own choices alone.
        self.replays = self.world.parallel.tp == 1
        for layer in self.job.model.modules():
            if hasattr(layer, "keeps_choices"):
                layer.keeps_choices = self.replays
        # Where experts are chosen anew, rounding of float32 may send some tokens to others.
        # (Rounding of float64 does not; in bfloat16 a run only warns.) The whole model is asked for
        # experts: a stage of a pipeline may have none.
        layers = [*self.work.model.modules()]
        are_routed = any(hasattr(layer, "shapes_vary") for layer in layers)  # experts alone have it
        can_replay = any(hasattr(layer, "keeps_choices") for layer in layers)
        chooses_anew = are_routed and not (can_replay and self.replays)
        in_float32 = self.world.parallel.dtype == torch.float32
        self.share_may_be_far = 0.1 if chooses_anew and in_float32 else 0.0  # of a step's tokens

    def batches(self, steps: Steps) -> Iterator[Batch]:
        for step in steps.to_do:  # not ahead: a batch needs the latest weights
            if self.problem:
                return
            try:
                batch = self.batch_of_answers(steps.order.sequences(step))
            except Stopped as stopped:
                self.signal = stopped.signal
                return
            yield batch

    def batch_of_answers(self, numbers: Sequence[int]) -> Batch:
        """Return this rank's share of a step's answers, with their advantages. `numbers` are those
        of the step's answers, counted from the first answer of the run. The number of an answer
        tells which prompt it is to, and seeds its random numbers."""
        run = self.run
        stop = self.job.tokenizer.stop
        asked = prompts_of_step(self, numbers)
        answers, sampled, rewards = self.answer(asked, numbers)
        rewards = rewards.view(-1, run.group)  # answers of a group follow each other
        advantages, is_mixed = advantages_of(rewards, run.normalize)
        advantages = advantages.flatten()
        have_rewards = ~rewards.isnan().any(1)  # [groups]
        if not have_rewards.any():
            self.problem = f"{run.reward}: no group of the step has all its rewards"
            raise Stopped
        self.measured |= {
            "mixed": is_mixed.double().mean().item(),
            "end": statistics.mean(answer[-1] in stop for answer in answers),
            "length": statistics.mean(map(len, answers)),
        }
        # The i-th parts of all ranks' rows together are the i-th of --updates equal parts of the
        # step's groups. A part without rewards is left out: an update would divide by 0 answers.
        self.are_rewarded = have_rewards.view(run.updates, -1).any(1)
        if run.skip_bad:
            self.measured["skipped"] = 1 - have_rewards.double().mean().item()
        # Answers without a reward have no targets. A target has its answer's `advantage`, and
        # `sampled_log_p`; at the first one of an answer `begins` is 1.
        rows = Answers(
            [ids for ids, _ in asked[self.own]],
            sampled.answers,
            sampled.log_p,
            advantages[self.own],
            have_rewards.repeat_interleave(run.group)[self.own].tolist(),
            self.job.tokenizer,
            sampled.choices,
        )
        return self.with_log_p(batch_of(rows, range(len(rows)), self.world))

    def with_log_p(self, batch: Batch) -> Batch:
        """Return a batch with what a loss compares log p of each target with, beside that of
        sampling: that of the base, for --kl, and that before the first of several updates. The base
        chooses its own experts; training takes those of sampling."""
        model, microbatch = self.job.model, self.work.microbatch
        found = {}
        if self.run.kl is not None:
            with adapters_off(model):
                found["base_log_p"] = log_p_of_targets(model, batch, microbatch)
        if self.replays:
            batch.before_forward = partial(replay, model)
        if self.run.updates > 1:
            with torch.no_grad():
                found["old_log_p"] = log_p_of_targets(model, batch, microbatch)
        return replace(batch, target_values=batch.target_values | found)

    def answer(self, asked: list, numbers: Sequence[int]) -> tuple[list, Sampled, Tensor]:
        """Answer prompts, and reward the answers. Ranks share the prompts. Return the answers of
        all ranks, what this rank has sampled, and the rewards of all answers, NaN where one is
        missing; begin `measured` and `seconds`. Rank 0 computes rewards, since they may be random.
        If one fails, or a rank is asked to end, raise Stopped on all ranks."""
        world = self.world
        started = time.perf_counter()
        own_prompts = [ids for ids, _ in asked[self.own]]
        stop = self.job.tokenizer.stop
        given = own_prompts, numbers[self.own], self.run, stop, world
        sampled = sample(self.job.model, *given)
        shares = [None] * world.size
        dist.all_gather_object(shares, (self.own, sampled.answers))
        answers = [None] * len(asked)
        for places, its_answers in shares:
            answers[places] = its_answers
        ended = time.perf_counter()
        found = self.score(asked, answers) if world.rank == 0 else None
        meet()  # rewards may take longer than a collective waits
        scored = world.broadcast_from_rank_zero(lambda: found)
        self.problem = scored.problem
        if scored.problem or scored.signal:
            raise Stopped(scored.signal)
        rewards = torch.tensor(scored.rewards, dtype=torch.float64)
        self.measured = {"reward": rewards.nanmean().item()} | scored.parts
        self.seconds = {
            "sampling_seconds": ended - started,
            "rewarding_seconds": time.perf_counter() - ended,
        }
        return answers, sampled, rewards

    def score(self, asked: list, answers: list[list[int]]) -> Scored:
        """Reward the answers, until one has no reward or a rank is asked to end."""
        run = self.run
        records = [record for _, record in asked]
        texts = [self.text_of(answer) for answer in answers]
        rewards = []
        parts = defaultdict(list)  # name -> values
        workers = reward_processes(run.reward, run.reward_workers)
        replies = workers.replies(records, texts, gives_up=some_rank_asked_to_end)
        for record, text in zip(records, with_progress(texts, "rewarding")):
            reply = next(replies)
            if signal := some_rank_asked_to_end():
                return Scored((), {}, signal=signal)
            problem = reply.get("failed", "")
            if problem and ("ended" in reply or not run.skip_bad):
                call = f"reward({record['prompt']!r:.60}, {text!r:.60})"
                advice = ""
                if "unexpected keyword argument" in problem:
                    advice = ": write reward(prompt, answer, **fields), for a line's other fields"
                return Scored((), {}, f"{run.reward}: {call} {problem}{advice}")
            rewards.append(reply.get("reward", math.nan))
            for name, value in reply.get("parts", {}).items():
                parts[f"reward_{name}"].append(value)
        means = {name: statistics.mean(values) for name, values in parts.items()}
        return Scored(rewards, means)

    def text_of(self, answer: list[int]) -> str:
        """Return the text of an answer, or "" if it does not end: if such answers were rewarded,
        the model would learn not to end."""
        tokenizer = self.job.tokenizer
        return tokenizer.decode(answer[:-1]) if answer[-1] in tokenizer.stop else ""

    def parts(self, batch: Batch) -> list[Batch]:
        parts = batch.microbatches(self.work.sequences)
        return [part for part, is_rewarded in zip(parts, self.are_rewarded) if is_rewarded]

    def loss(self, losses: Tensor, batch: Batch) -> Tensor:
        """Return the sum of the losses of a batch's tokens, given -log p of targets [B, T], and add
        what is measured of them to `sums`. Where there is no target, all values are 0."""
        run, values = self.run, batch.target_values
        log_p = -losses
        old_log_p = values.get("old_log_p", log_p.detach())
        by_rounding = old_log_p - values["sampled_log_p"]  # log p in training - in sampling
        weight = by_rounding.exp().clamp(max=run.max_ratio)
        log_change = log_p - old_log_p  # since the first of several updates
        gain, is_clipped = clipped(log_change, values["advantage"], *run.clip_ratio)
        distance = (log_p.detach() - values["sampled_log_p"]).abs()
        sums = {  # finish_measures divides them by the tokens
            "tokens": batch.count(),
            "far": (by_rounding.abs() > self.tolerance).sum(),
            "mean_log_ratio": distance.sum(),  # of |log(p now / p in sampling)|
            "clipped": is_clipped.sum(),
            "entropy": losses.detach().sum(),  # the mean of -log p over drawn tokens
        }
        if run.kl is not None:
            log_r = values["base_log_p"] - log_p
            k3 = log_r.exp() - log_r - 1
            gain = gain - run.kl * log_change.exp() * k3
            sums["kl"] = k3.detach().sum()
        self.largest_now = distance.max().clamp(min=self.largest_now)
        rounding = by_rounding.abs().max()
        self.largest_by_rounding = rounding.clamp(min=self.largest_by_rounding)
        for name, value in sums.items():
            self.sums[name] = self.sums[name] + value
        return -(weight * gain).sum()

    def count(self, batch: Batch) -> Tensor:
        return batch.target_values["begins"].sum()  # the number of answers

    def finish_measures(self, totals: Totals) -> dict[str, float]:
        """Return what was measured of the last answers. Raise UserError on all ranks if the model
        that was trained is not the one that answered."""
        replay(self.job.model, None)  # from now on experts are chosen anew
        if not self.job.model.training:  # an evaluation has no loss of tokens
            return self.measured
        names = ["clipped", "entropy", "mean_log_ratio"]
        if self.run.kl is not None:
            names.append("kl")
        mine = [self.largest_now, self.largest_by_rounding]
        mine += [self.sums[name] for name in ("tokens", "far", *names)]
        of_ranks = self.world.all_gather_scalars(mine)  # [ranks, values]
        largest, by_rounding = of_ranks[:, :2].amax(0).tolist()
        tokens, far, *sums = of_ranks[:, 2:].sum(0).tolist()
        self.sums.clear()
        self.largest_now = self.largest_by_rounding = 0.0
        self.check_distance(far / tokens, by_rounding)
        means = {name: value / tokens for name, value in zip(names, sums)}
        return self.measured | means | {"log_ratio": largest} | self.seconds

    def check_distance(self, share: float, largest: float) -> None:
        """Raise UserError, or warn in bfloat16, if too large a share of a step's tokens are further
        than rounding takes log p of training from that of sampling. `largest` is the largest
        distance."""
        found = f"log p of {share:.2%} of a step's tokens differs between sampling and training"
        found += f" by more than {self.tolerance:.2g}, at most by {largest:.2g}"
        if self.only_warns and share > WARN_ABOVE and not self.has_warned:
            self.has_warned = True
            bound = "--max-ratio bounds the weight of such tokens"
            print_rank_zero(f"warning: {found}: {bound}", file=sys.stderr)
        if not self.only_warns and share > self.share_may_be_far:
            raise UserError(f"{found}: model.py computes something else with a cache")

    def evaluate(self) -> Totals:
        """Answer each held-out prompt once. The loss is minus the reward."""
        asked, numbers, limit = prompts_of_evaluation(self)
        answers, *_, rewards = self.answer(asked, numbers)
        lines = []
        for (_, record), answer in zip(asked[:SHOWN], answers):
            lines.append(f"--- {record['prompt']}{self.text_of(answer)}")
        self.shown = "\n".join(lines)
        rewards = rewards[:limit]
        if rewards.isnan().all():
            self.problem = f"{self.run.reward}: no answer to a held-out prompt has a reward"
            raise Stopped
        self.measured = {"reward": rewards.nanmean().item()}
        return Totals(-rewards.nansum().item(), limit - int(rewards.isnan().sum()), 0)

    def text_to_show(self, step: int) -> str:
        return self.shown


SCRIPT = Script(Rewarding, open_prompts_and_rewards, Rewards)
main = partial(finetune, SCRIPT)

if __name__ == "__main__":
    processes.run(main)
