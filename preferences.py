r"""Train a Llama on preferences: of two answers, make the chosen one likelier (DPO).

    torchrun train.py                                            makes a base model
    torchrun finetune_lora.py --init out/tiny --out out/lora --merge   teaches it to answer
    torchrun preferences.py --init out/lora/merged               lets it prefer whole docstrings
    torchrun --nproc-per-node 8 preferences.py --init ~/Llama-3.1-8B-Instruct --data pairs.jsonl \
             --seq-len 4096 --batch 64 --microbatch 1 --lr 5e-6

The data is JSON, a pair a line: {"prompt", "chosen", "rejected"} (text/pairs.py has more formats).

Direct Preference Optimization (Rafailov et al. 2023, arXiv:2305.18290) needs no reward model. It
compares the model with the base, the model as it was before this training. An answer has a high
reward if the model gives it a higher probability than the base does:

    reward = beta (log p(answer | prompt) - log p_base(answer | prompt))
    loss   = -log sigmoid(reward of the chosen answer - reward of the rejected one)

log p sums over the answer's tokens. The base, which others call the reference, is this model with
its adapters off: it takes no memory, but a step runs forward twice. With --all-weights, log p_base
of all answers is computed once, before the first step. The losses of all pairs on all ranks are
added up, and divided once by their number. Both answers of a pair share a row, and neither attends
to the other. --batch and --microbatch count rows, so they never separate a pair. The loop over
steps is train.py's: finetune of finetune_lora.py freezes a base, adds adapters, and calls it with
the Task of this file.

Watch `chosen`, the mean reward of chosen answers, beside the loss. The loss depends only on the
difference of two rewards: both may fall, while answers that are in no pair become likelier.
docs/preferences.md says when such training helps.
"""

import plumbing.endings  # first, for Ctrl-C during the imports
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from config import Totals
from finetune_lora import Finetuning, Script, finetune, open_conversations
from lora import adapters_off
from model import IGNORE
from plumbing import processes
from plumbing.flags import flag, other_default
from plumbing.messages import UserError
from plumbing.parser import positive_float
from runs.each_target import log_p_of_targets, set_loss_of_each_target
from runs.flags import rate_flag
from runs.scores import evenly_spaced, shared_batches
from runs.task import Task
from text.batch import Batch
from text.order import Steps
from text.packing import Packed
from text.pairs import pairs


def sigmoid_loss(margin: Tensor, beta: float) -> Tensor:
    """Return DPO's loss of each pair. `beta` is for ipo_loss."""
    return -F.logsigmoid(margin)


def ipo_loss(margin: Tensor, beta: float) -> Tensor:
    """Return IPO's loss of each pair (Azar et al. 2023, arXiv:2310.12036). Its minimum is at a
    margin of 1/2, not at infinity."""
    return (margin / beta - 1 / (2 * beta)) ** 2


# The loss of a pair is a function of its margin: the chosen answer's reward - the rejected one's. A
# reward is beta times a log ratio. So margin / beta is a difference of log ratios.
LOSSES = {"sigmoid": sigmoid_loss, "ipo": ipo_loss}
MEASURED = ("accuracy", "margin", "chosen", "rejected")  # chosen and rejected are mean rewards


@dataclass(frozen=True)
class Preferring(Finetuning):
    """Train a Llama on preferences: of two answers, make the chosen one likelier (DPO)."""

    # fmt: off
    beta: float = flag(0.1, "factor of rewards: a small one lets the model go further from the "
                       "base", "preferences", positive_float)
    loss: str = flag("sigmoid", "loss of a pair: DPO's sigmoid, or IPO's, which is lowest at a "
                     "margin of 1/2", "preferences", choices=LOSSES)
    # fmt: on
    lr: float | None = rate_flag("preferences")
    steps: int = other_default(Finetuning, "steps", 100)
    eval_every: int = other_default(Finetuning, "eval_every", 50)

    used_most = "init data out seq_len batch epochs lr beta rank resume"
    goal = "dpo"
    kind = "preferences"

    @property
    def references(self) -> int:
        return 0 if self.all_weights else 1

    def check(self) -> None:
        super().check()
        if self.dropout or self.train_on_prompt:
            problem = "--dropout makes rewards random, --train-on-prompt changes nothing here"
            raise UserError(f"{problem}: leave them out")


@dataclass
class Preferences(Task):
    """Prefer chosen answers. labs/preferences writes the loss by hand."""

    before_step = "reference"  # the base's forward, which bench.py step times

    def __post_init__(self):
        self.sums = Counter()  # of `loss` over pairs, by name, since the last finish_measures
        # Its forward returns -log p of each target, [B, T], 0 where there is none, as in prompts.
        # Logits are made for some tokens at a time, and again in backward (runs/each_target.py).
        set_loss_of_each_target(self.job.model)

    def batches(self, steps: Steps) -> Iterator[Batch]:
        yield from map(self.with_base, super().batches(steps))

    def with_base(self, batch: Batch) -> Batch:
        """Return a batch with the base's log p of each target."""
        if self.run.all_weights:
            return batch  # it has it from `begin`
        with adapters_off(self.job.model):  # which also stops gradients
            return replace(batch, target_values={"base_log_p": self.log_p(batch)})

    def log_p(self, batch: Batch) -> Tensor:
        """Return the base's log p of each target, without the dropout that a model may have."""
        model = self.job.model
        in_training = model.training
        model.eval()
        log_p = log_p_of_targets(model, batch, self.work.microbatch)
        model.train(in_training)
        return log_p

    def loss(self, losses: Tensor, batch: Batch) -> Tensor:
        """Return the sum of the losses of a batch's pairs, and add what is measured of them to
        `sums`. `losses` [B, T] are -log p of each target."""
        log_ratio = -losses - batch.target_values["base_log_p"]
        rewards = self.run.beta * sums_of_answers(log_ratio, batch)  # [B, pairs, 2]
        chosen, rejected = rewards.unbind(-1)  # [B, pairs] each
        margin = chosen - rejected
        values = {
            "loss": LOSSES[self.run.loss](margin, self.run.beta),
            "pairs": torch.ones_like(margin),  # their sum is the number of pairs
            "accuracy": margin > 0,
            "margin": margin,
            "chosen": chosen,
            "rejected": rejected,
        }
        is_pair = are_pairs(batch)  # [B, pairs]
        sums = {name: torch.where(is_pair, value, 0).sum() for name, value in values.items()}
        for name, value in sums.items():
            self.sums[name] += value.detach()
        return sums["loss"]

    def count(self, batch: Batch) -> Tensor:
        return are_pairs(batch).sum()

    @torch.no_grad()
    def evaluate(self) -> Totals:
        job, world = self.job, self.world
        self.sums.clear()
        rows = evenly_spaced(job.val_set, self.run.eval_windows)
        for _, batch in shared_batches(job.val_set, rows, self.work.microbatch, world):
            batch = self.with_base(batch)
            losses = job.model(*batch.inputs, documents=batch.documents)
            if losses.ndim:  # other stages than the last of a pipeline have no losses but a 0
                self.loss(losses, batch)
        loss, pairs = self.all_summed("loss", "pairs")
        return Totals(loss, pairs, 0)

    def finish_measures(self, totals: Totals) -> dict[str, float]:
        """Return the means of what is MEASURED over the pairs of all ranks since the last call."""
        pairs, *sums = self.all_summed("pairs", *MEASURED)
        self.sums.clear()
        return {name: value / pairs for name, value in zip(MEASURED, sums)}

    # With --all-weights there are no adapters to switch off. The base is computed before step 1.

    def begin(self, steps: Steps) -> None:
        """With --all-weights: compute the base's log p of the rows that the run reads, and let
        batches of them have it."""
        if not self.run.all_weights:
            return
        train_set, val_set = self.job.train_set, self.job.val_set
        train_rows = steps.rows(train_set.sources)
        val_rows = evenly_spaced(val_set, self.run.eval_windows) if self.run.eval_every else []
        train_set = train_set.with_values(base_log_p=self.base_log_p(train_set, train_rows))
        val_set = val_set.with_values(base_log_p=self.base_log_p(val_set, val_rows))
        self.job = replace(self.job, train_set=train_set, val_set=val_set)

    @torch.no_grad()
    def base_log_p(self, dataset: Packed, rows: Sequence[int]) -> Tensor:
        """Return the base's log p of all targets in some rows, on the CPU: [len(dataset), T], 0 in
        other rows. The model still is the base.

        Each rank fills its own entries of a table [rows, T]. They are at most 0 and all others are
        0, so the minimum over the ranks merges the tables."""
        world, T = self.world, dataset.seq_len
        dtype = torch.promote_types(world.parallel.dtype, torch.float32)
        log_p = torch.zeros(world.parallel.padded(len(rows)), T, dtype=dtype, device=world.device)
        # A rank along cp has some columns of a row: their numbers tell where its log p goes.
        columns = torch.arange(T).expand(len(dataset), T)
        numbered = dataset.with_values(column=columns)
        parts = shared_batches(numbered, rows, self.work.microbatch, world, "computing the base")
        for own_rows, batch in parts:  # own_rows is a slice, so that scatter_ writes into log_p
            log_p[own_rows].scatter_(1, batch.target_values["column"], self.log_p(batch).to(log_p))
        if world.size > 1:
            dist.all_reduce(log_p, dist.ReduceOp.MIN)
        table = torch.zeros(len(dataset), T, dtype=dtype)
        table[rows] = log_p[: len(rows)].cpu()
        return table


def sums_of_answers(x: Tensor, batch: Batch) -> Tensor:
    """Return the sum of x [B, T] over each answer: [B, pairs, 2].

    The documents of a row: chosen 0 | rejected 0 | chosen 1 | rejected 1 | ... | padding, where an
    answer stands after its prompt. Rows with fewer pairs than others are filled up with 0. Of ranks
    that share rows (--cp) the first has the sums, and the others 0."""
    sums = batch.sums_of_documents(x)  # [B, R]; R is a power of 2, and 1 if all rows are padding
    return F.pad(sums, (0, sums.shape[1] % 2)).unflatten(1, (-1, 2))


def are_pairs(batch: Batch) -> Tensor:
    """Return which of a batch's sums_of_answers belong to a pair, not to padding: [B, pairs]."""
    return sums_of_answers((batch.targets != IGNORE).float(), batch)[..., 0] > 0


open_pairs = partial(open_conversations, read=pairs)
SCRIPT = Script(Preferring, open_pairs, Preferences)
main = partial(finetune, SCRIPT)

if __name__ == "__main__":
    processes.run(main)
