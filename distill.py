r"""Train a Llama to predict what a larger one does: distillation from a teacher.

    torchrun distill.py --init out/tiny --teacher out/small          on answers that are given
    torchrun distill.py --init out/tiny --teacher out/small --on-policy --data prompts.jsonl
    torchrun --nproc-per-node 8 distill.py --init ~/Llama-3.2-1B --teacher ~/Llama-3.1-8B-Instruct \
             --data chats.jsonl --seq-len 4096 --batch 64 --microbatch 4 --all-weights

A token of text tells a model which token followed. A teacher tells it how likely each token of the
vocabulary would have been (Hinton et al. 2015, arXiv:1503.02531). The loss of a target is a KL
divergence. The losses of all targets on all ranks are added up, and divided once by their number:

    given answers   sum over v of p_teacher(v) (log p_teacher(v) - log p_student(v))
    --on-policy     sum over v of p_student(v) (log p_student(v) - log p_teacher(v))

Given answers are the conversations that finetune_lora.py reads. With --on-policy the data are lines
with a "prompt", and in each step the student answers --batch of them itself, at temperature 1. So
it learns where its own answers lead it (GKD, Agarwal et al. 2023, arXiv:2306.13649). Its loss is
summed over the whole vocabulary, and not estimated by the token that was drawn, so it has less
noise. The gradient goes through the distribution at each token, not through the sampling: that an
earlier token leads to later ones, where student and teacher differ more, is left out.

The teacher's forward runs before a step. What it leaves for the loss is the last hidden state, of
D numbers a token, of this rank's sequences; the loss makes logits of a few tokens at a time. With
--top-k K it leaves log p of the K likeliest tokens, and log p of all others together, which the
loss compares as if they were one token. The student thus learns how much to leave to others, but
not which. Without them its probabilities would only have to be in the right proportion to each
other. The sum never exceeds the whole one, and is 0 only where it agrees with the teacher on all.

The teacher has the student's vocabulary, is frozen, and is split over ranks as the student is, in
the dtype of computation or in 4 bits. docs/preferences.md says when a teacher helps.
"""

import plumbing.endings  # first, for Ctrl-C during the imports
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from config import Totals
from finetune_lora import Finetuning, Script, finetune, open_conversations
from model import IGNORE, Vocabulary
from plumbing import processes
from plumbing.flags import flag, other_default
from plumbing.messages import UserError
from plumbing.parser import nonnegative_int
from plumbing.shards import to_local
from runs.answers import open_prompts, sample
from runs.each_target import cross_entropies, from_logits, hidden_states
from runs.scores import batch_of, evenly_spaced, shared_batches
from runs.task import Task
from runs.teacher import check_teacher, load_teacher
from techniques.divergence import forward_kl, likeliest, reverse_kl, shares_of
from text.batch import Batch
from text.order import Steps, window_of
from text.packing import Rows


@dataclass(frozen=True)
class Distilling(Finetuning):
    """Train a Llama to predict what a larger one does: distillation from a teacher."""

    # fmt: off
    teacher: Path = flag(None, "the larger model: a checkpoint, a run, or Meta's or Hugging Face's "
                         "files", "teacher", Path, required=True, metavar="DIR")
    teacher_bits: int = flag(16, "4: keep its blocks' matrices in 4 bits (default: the dtype of "
                             "computation)", "teacher", int, choices=[16, 4])
    top_k: int = flag(0, "its likeliest tokens that the loss compares one by one, 0 for all",
                      "teacher", nonnegative_int)
    on_policy: bool = flag(False, "let the student answer the prompts of --data itself", "teacher")
    chat: bool = flag(False, "with --on-policy: a prompt is a user's message", "teacher")
    max_new_tokens: int = flag(64, "with --on-policy: tokens of an answer at most", "teacher")
    # fmt: on
    eval_windows: int = other_default(Finetuning, "eval_windows", 128)

    used_most = "init teacher data out seq_len batch epochs lr on_policy resume"
    goal = "distilled"
    group = 1  # answers to a prompt, for open_prompts

    @property
    def answers_messages(self) -> bool:
        return self.chat or not self.on_policy

    def check(self) -> None:
        super().check()
        if self.on_policy and (self.dropout or self.train_on_prompt or self.top_k):
            problem = "--on-policy samples without --dropout, has no --train-on-prompt, and weighs"
            problem += " tokens by the student, whose own may not be in the teacher's --top-k"
            raise UserError(f"{problem}: leave them out")
        if not self.on_policy and self.typed & {"chat", "max_new_tokens"}:
            raise UserError("--chat and --max-new-tokens are for --on-policy: leave them out")


def top_k(hidden: Tensor, weight: Tensor, targets, vocabulary: Vocabulary, k: int) -> Tensor:
    """As a teacher's `loss`: return the ids of the k likeliest tokens, and what shares_of does with
    them, [B, T, 2 k + 1]. float32 holds every id."""

    def of_chunk(logits: Tensor) -> Tensor:
        _, ids = likeliest(logits, k, vocabulary)
        return torch.cat([ids.to(logits.dtype), shares_of(logits, ids, vocabulary)], 1)

    return from_logits(of_chunk, [hidden], [weight])


# ------------------------------------------------------------------------------------- the tasks


@dataclass
class Distillation(Task):
    """Predict what the teacher does, at the targets of given answers."""

    before_step = "teacher"  # its forward, which bench.py step times

    def __post_init__(self):
        self.teacher = load_teacher(self.run, self.world)
        k = self.run.top_k
        self.teacher.loss = partial(top_k, k=k) if k else hidden_states
        self.divergence = reverse_kl if self.run.on_policy else forward_kl
        self.batch = None  # the microbatch under way
        self.sums = Counter()  # over targets, by name, since the last finish_measures
        self.job.model.loss = self.distance

    def batches(self, steps: Steps) -> Iterator[Batch]:
        yield from map(self.with_teacher, super().batches(steps))

    @torch.no_grad()
    def with_teacher(self, batch: Batch) -> Batch:
        """Return a batch with what the teacher's `loss` has made of each token."""
        made = []
        for part in batch.microbatches(self.work.microbatch):
            made.append(self.teacher(*part.inputs, documents=part.documents))
        values = {}
        if made[0].ndim:  # of a pipeline's ranks, the last alone has it, and needs it
            values["teacher"] = torch.cat(made)
        return replace(batch, target_values=values, before_use=partial(setattr, self, "batch"))

    def distance(self, hidden: Tensor, weight: Tensor, targets: Tensor, vocabulary) -> Tensor:
        """As the student's `loss`: return the sum of the divergences at all targets, and add what
        is measured to `sums`. An exam, which is about no batch, gets cross entropies."""
        if not self.batch:
            return cross_entropies(hidden, weight, targets, vocabulary)
        made = self.batch.target_values["teacher"]
        k = self.run.top_k

        def of_logits(student: Tensor, teacher: Tensor) -> Tensor:
            loss = self.divergence(student, teacher, vocabulary)
            return torch.stack([loss, agreement(student, likeliest(teacher, 1, vocabulary)[1])], 1)

        def of_shares(student: Tensor, made: Tensor) -> Tensor:
            ids, log_p = made[:, :k].long(), made[:, k:]
            loss = (log_p.exp() * (log_p - shares_of(student, ids, vocabulary))).sum(1)
            return torch.stack([loss, agreement(student, ids[:, :1])], 1)

        def agreement(student: Tensor, best: Tensor) -> Tensor:
            return (likeliest(student.detach(), 1, vocabulary)[1] == best)[:, 0].to(student.dtype)

        if k:
            of_targets = from_logits(of_shares, [hidden], [weight], made)
        else:
            its_weight = to_local(self.teacher.output.weight)  # FSDP keeps it gathered
            of_targets = from_logits(of_logits, [hidden, made], [weight, its_weight])
        is_target = targets != IGNORE
        loss, agrees = torch.where(is_target[..., None], of_targets, 0).unbind(-1)  # [B, T] each
        for name, value in (("loss", loss), ("agrees", agrees), ("targets", is_target)):
            self.sums[name] += value.detach().sum()
        return loss.sum()

    def held_out(self) -> Iterator[Batch]:
        """Yield this rank's share of what an evaluation is on."""
        val_set = self.job.val_set
        rows = evenly_spaced(val_set, self.run.eval_windows)
        for _, batch in shared_batches(val_set, rows, self.work.microbatch, self.world):
            yield batch

    @torch.no_grad()
    def evaluate(self) -> Totals:
        self.sums.clear()
        for batch in map(self.with_teacher, self.held_out()):
            for part in batch.microbatches(self.work.microbatch):
                part.use()
                self.job.model(*part.inputs, documents=part.documents)
        self.batch = None
        return Totals(*self.all_summed("loss", "targets"), 0)

    def finish_measures(self, totals: Totals) -> dict[str, float]:
        """Return the share of targets whose likeliest token is the teacher's, too."""
        agrees, targets = self.all_summed("agrees", "targets")
        self.sums.clear()
        return {"agreement": agrees / targets}

    def all_summed(self, *names: str) -> list[float]:
        """Return some of the `sums`, over all ranks."""
        return self.world.all_gather_scalars([self.sums[name] for name in names]).sum(0).tolist()


@dataclass
class OnPolicy(Distillation):
    """Predict what the teacher does, at the tokens of answers that the student itself has drawn."""

    before_step = "sampling and teacher"

    def __post_init__(self):
        super().__post_init__()
        if self.world.parallel.shard > 1 and not self.whole_model_fits:
            problem = "sampling needs all weights on each rank, and they do not fit"
            raise UserError(f"{problem}: give a larger --tp")

    def batches(self, steps: Steps) -> Iterator[Batch]:
        prompts = self.job.train_set.samples
        for step in steps.to_do:  # not ahead: a batch needs the latest weights
            numbers = steps.order.sequences(step)
            asked = [prompts[window_of(n, len(prompts), self.run.seed)] for n in numbers]
            yield self.with_teacher(self.answer(asked, numbers, len(asked)))

    def answer(self, asked: list, numbers: Sequence[int], counted: int) -> Batch:
        """Return this rank's share of the answers to prompts, of which the first are counted. The
        number of an answer seeds its random numbers."""
        job, world = self.job, self.world
        started = time.perf_counter()
        own = slice(world.data_rank, None, world.parallel.data_size)  # every so-many-th is its own
        prompts = [ids for ids, _ in asked[own]]
        stop = job.tokenizer.stop
        answers = sample(job.model, prompts, numbers[own], self.run, stop, world.parallel).answers
        rows = []
        for i, prompt, answer in zip(range(len(asked))[own], prompts, answers):
            is_target = [False] * len(prompt) + [i < counted] * len(answer)
            rows.append((prompt + answer, is_target))
        length = sum(map(len, answers))
        ended = sum(answer[-1] in stop for answer in answers)
        slots = length + sum(map(len, prompts)) - len(prompts)  # the last token is a target only
        sums = world.all_gather_scalars([len(rows), length, ended, slots]).sum(0)
        n, length, ended, slots = (sums * world.parallel.data_size / world.size).tolist()
        self.tokens_of_step = round(slots)
        self.measured = {"end": ended / n, "length": length / n}
        self.measured["sampling_seconds"] = time.perf_counter() - started
        _, record = asked[0]
        self.shown = f"--- {record['prompt']}{job.tokenizer.decode(answers[0])}\n---"
        packed = Rows(rows, job.tokenizer)
        return batch_of(packed, range(len(rows)), world)

    def held_out(self) -> Iterator[Batch]:
        prompts = self.job.val_set.samples
        limit = min(self.run.eval_windows, len(prompts))
        padded = self.world.parallel.padded(limit)
        asked = [prompts[i % limit] for i in range(padded)]
        numbers = range(-1, -1 - padded, -1)  # answers of training have none below 0
        yield self.answer(asked, numbers, limit)

    def tokens(self, steps: Steps, step: int) -> int:
        return self.tokens_of_step

    def finish_measures(self, totals: Totals) -> dict[str, float]:
        return super().finish_measures(totals) | self.measured

    def text_to_show(self, step: int) -> str:
        return self.shown


def open_data(run: Distilling, *given) -> tuple:
    """Return conversations or, with --on-policy, prompts."""
    return (open_prompts if run.on_policy else open_conversations)(run, *given)


def make_task(run: Distilling, *given) -> Distillation:
    return (OnPolicy if run.on_policy else Distillation)(run, *given)


SCRIPT = Script(Distilling, open_data, make_task, check_teacher)
main = partial(finetune, SCRIPT)

if __name__ == "__main__":
    processes.run(main)
