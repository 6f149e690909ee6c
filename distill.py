r"""Train a Llama to predict what a larger one does: distillation from a teacher.

    torchrun distill.py --init out/tiny --teacher out/small          on answers that are given
    torchrun distill.py --init out/tiny --teacher out/small --on-policy --data prompts.jsonl
    torchrun --nproc-per-node 8 distill.py --init ~/Llama-3.2-1B --teacher ~/Llama-3.1-8B-Instruct \
             --data chats.jsonl --seq-len 4096 --batch 64 --microbatch 4 --all-weights

Text tells a model which token followed. A teacher tells it how likely each token would have been
(Hinton et al. 2015, arXiv:1503.02531). The loss of a target is a KL divergence; the losses of all
targets on all ranks are added up, and divided once by their number:

    given answers   sum over v of p_teacher(v) (log p_teacher(v) - log p_student(v))
    --on-policy     sum over v of p_student(v) (log p_student(v) - log p_teacher(v))

The given answers are those of conversations, as finetune_lora.py reads them. With --on-policy the
data are lines with a "prompt", and in each step the student answers --batch of them itself, at
temperature 1, so that it learns where its own answers lead (GKD, Agarwal et al. 2023,
arXiv:2306.13649). The sum over the vocabulary is exact; an estimate by the token that was drawn
would be noisier. Its gradient goes through the distribution at each token, but not through the
sampling: that a token leads to others, at which student and teacher may differ more, is left out.

The teacher, in the dtype of computation or in 4 bits, is split over ranks as the student is. Its
forward runs before a step, and leaves the last hidden state of each token of this rank's sequences;
the loss makes logits of a few tokens at a time. With --top-k K it leaves log p of the K likeliest
tokens, and of all others together, which the loss compares as if they were one token. So the
student learns how much to leave to others, but not to which; without them, only the proportions of
the K would count. This sum is never above the whole one. docs/preferences.md says what helps.
"""

import plumbing.endings  # first, for Ctrl-C during the imports
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from config import Totals
from finetune_lora import Finetuning, Script, finetune, open_conversations
from model import IGNORE
from plumbing import processes
from plumbing.flags import flag
from plumbing.messages import UserError
from plumbing.parser import nonnegative_int
from runs import answers
from runs.each_target import cross_entropies
from runs.scores import evenly_spaced, shared_batches
from runs.task import Task
from runs.teacher import Teacher, find_teacher, load_teacher
from techniques.divergence import forward_kl, reverse_kl
from text.batch import Batch
from text.order import Steps


@dataclass(frozen=True)
class Distilling(Finetuning):
    """Train a Llama to predict what a larger one does: distillation from a teacher."""

    # fmt: off
    teacher: Path = flag(None, "the larger model: a checkpoint, a run, or Meta's or Hugging Face's "
                         "files", "teacher", Path, may_change=True, required=True, metavar="DIR")
    teacher_bits: int = flag(16, "4: keep its blocks' matrices in 4 bits (default: the dtype of "
                             "computation)", "teacher", int, choices=[16, 4])
    top_k: int = flag(0, "its likeliest tokens that the loss compares one by one, 0 for all",
                      "teacher", nonnegative_int)
    on_policy: bool = flag(False, "let the student answer the prompts of --data itself", "teacher")
    chat: bool = flag(False, "with --on-policy: a prompt is a user's message", "teacher")
    max_new_tokens: int = flag(64, "with --on-policy: tokens of an answer at most", "teacher")
    # fmt: on
    used_most = "init teacher data out seq_len batch epochs lr on_policy resume"
    goal = "distilled"
    group = 1  # answers to a prompt, for open_prompts

    @property
    def answers_messages(self) -> bool:
        return self.chat or not self.on_policy

    def check(self) -> None:
        super().check()
        if self.on_policy and (self.dropout or self.train_on_prompt or self.top_k):
            problem = "--dropout, --train-on-prompt and --top-k are for answers that are given"
            raise UserError(f"{problem}: leave out these, or --on-policy")
        if not self.on_policy and self.typed & {"chat", "max_new_tokens"}:
            raise UserError("--chat and --max-new-tokens are for --on-policy: leave them out")


@dataclass
class Distillation(Task):
    """Predict what the teacher does, at the targets of given answers."""

    before_step = "teacher"  # its forward, which bench.py step times

    def __post_init__(self):
        divergence = reverse_kl if self.run.on_policy else forward_kl
        self.teacher = Teacher(load_teacher(self.job, self.world), divergence, self.run.top_k)
        self.batch = None  # the microbatch under way
        self.sums = Counter()  # over targets, by name, since the last finish_measures
        self.job.model.loss = self.sum_of_divergences

    def batches(self, steps: Steps) -> Iterator[Batch]:
        return self.taught(super().batches(steps))

    def taught(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """Yield batches with what the loss needs of the teacher, and free that after their step."""
        for batch in map(self.with_teacher, batches):
            yield batch
            self.batch = None
            batch.target_values.clear()  # the loop still has the batch

    def with_teacher(self, batch: Batch) -> Batch:
        """Return a batch with what the teacher's forward leaves for the loss."""
        left = self.teacher.forward(batch, self.work.microbatch)
        return replace(batch, target_values=left, before_forward=self.begin_microbatch)

    def begin_microbatch(self, batch: Batch) -> None:
        self.batch = batch

    def sum_of_divergences(
        self, hidden: Tensor, weight: Tensor, targets: Tensor, vocabulary
    ) -> Tensor:
        """As the student's `loss`: return the sum of the divergences at all targets, and add what
        is measured to `sums`. An exam, which is of no batch, gets cross entropies."""
        if not self.batch:
            return cross_entropies(hidden, weight, targets, vocabulary)
        left = self.batch.target_values["teacher"]
        compared = self.teacher.compare(left, hidden, weight, vocabulary)
        is_target = targets != IGNORE
        loss, agrees = torch.where(is_target[..., None], compared, 0).unbind(-1)  # [B, T] each
        for name, value in (("loss", loss), ("agrees", agrees), ("targets", is_target)):
            self.sums[name] += value.detach().sum()
        return loss.sum()

    def held_out(self) -> Iterable[Batch]:
        """Return this rank's share of what an evaluation is on."""
        val_set = self.job.val_set
        rows = evenly_spaced(val_set, self.run.eval_windows)
        shares = shared_batches(val_set, rows, self.work.microbatch, self.world)
        return (batch for _, batch in shares)

    @torch.no_grad()
    def evaluate(self) -> Totals:
        self.sums.clear()
        for batch in self.taught(self.held_out()):
            for part in batch.microbatches(self.work.microbatch):
                part.prepare()
                self.job.model(*part.inputs, documents=part.documents)
        return Totals(*self.all_summed("loss", "targets"), 0)

    def finish_measures(self, totals: Totals) -> dict[str, float]:
        """Return the share of targets whose likeliest token is the teacher's, too."""
        agrees, targets = self.all_summed("agrees", "targets")
        self.sums.clear()
        return {"agreement": agrees / targets}


@dataclass
class OnPolicy(Distillation):
    """Predict what the teacher does, at the tokens of answers that the student itself has drawn."""

    before_step = "sampling and teacher"

    def __post_init__(self):
        answers.check_can_sample(self)
        super().__post_init__()

    def batches(self, steps: Steps) -> Iterator[Batch]:
        return self.taught(self.answer_step(step, steps) for step in steps.to_do)

    def answer_step(self, step: int, steps: Steps) -> Batch:
        numbers = steps.order.sequences(step)
        asked = answers.prompts_of_step(self, numbers)
        self.answered = answers.answered(self, asked, numbers, len(asked))
        return self.answered.batch

    def held_out(self) -> Iterable[Batch]:
        self.answered = answers.answered(self, *answers.prompts_of_evaluation(self))
        return [self.answered.batch]

    def finish_measures(self, totals: Totals) -> dict[str, float]:
        return super().finish_measures(totals) | self.answered.measured

    def text_to_show(self, step: int) -> str:
        return self.answered.shown


def open_data(run: Distilling, *given) -> tuple:
    return answers.open_prompts(run, *given) if run.on_policy else open_conversations(run, *given)


def make_task(run: Distilling, *given) -> Distillation:
    return OnPolicy(run, *given) if run.on_policy else Distillation(run, *given)


SCRIPT = Script(Distilling, open_data, make_task, find_teacher)
main = partial(finetune, SCRIPT)

if __name__ == "__main__":
    processes.run(main)
