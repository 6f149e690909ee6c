r"""Train a Llama on preferences: of two answers, make the chosen one likelier (DPO).

    torchrun train.py                                            a base model
    torchrun finetune_lora.py --init out/tiny --out out/lora --merge             that answers
    torchrun preferences.py --init out/lora/merged               and prefers whole docstrings
    torchrun --nproc-per-node 8 preferences.py --init ~/Llama-3.1-8B-Instruct --data pairs.jsonl \
             --seq-len 4096 --batch 64 --microbatch 1 --lr 5e-6

The data is JSON, a pair a line: {"prompt", "chosen", "rejected"} (text/pairs.py has more formats).

Direct Preference Optimization (Rafailov et al. 2023, arXiv:2305.18290) needs no model of rewards.
The reward of an answer is how much likelier it has become than the base makes it:

    reward = beta (log p(answer | prompt) - log p_base(answer | prompt))
    loss   = -log sigmoid(reward of the chosen answer - reward of the rejected one)

log p sums over the answer's tokens. The base is the same model with its adapters off, so it takes
no memory, and one more forward. With --all-weights, its log p of all answers is computed once,
before the first step. The loss is summed over pairs, and divided once by the number of pairs on all
ranks. Both answers of a pair share a row, so --batch and --microbatch, which count rows, never
divide a pair.

Watch `chosen`, the reward of chosen answers, beside the loss. The loss knows the difference of both
rewards alone: both may fall, while answers that are in no pair become likelier. docs/preferences.md
says when such training helps.
"""

import plumbing.endings  # first, for Ctrl-C during the imports
import argparse
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

import evaluate
from finetune_lora import Script, finetune, open_conversations
from lora import adapters_off
from model import IGNORE
from plumbing.devices import widest_float
from plumbing.parser import Parser, positive_float
from plumbing.processes import UserError, run
from runs.flags import add_finetuning_flags, complete_finetuning
from runs.records import Totals
from text.batch import Batch
from text.chat import Packed
from text.pairs import pairs

# Loss of a pair, of its margin: the chosen reward - the rejected one.
LOSSES = {
    "sigmoid": lambda margin, beta: -F.logsigmoid(margin),
    # Azar et al. 2023, arXiv:2310.12036: a margin that is large enough is not pulled further.
    "ipo": lambda margin, beta: (margin / beta - 1 / (2 * beta)) ** 2,
}
MEASURED = ("accuracy", "margin", "chosen", "rejected")  # the last two are rewards


def add_flags(parser: Parser) -> None:
    add_finetuning_flags(parser)
    # fmt: off
    add = parser.add_argument_group("preferences").add_argument
    add("--beta", type=positive_float, default=0.1,
        help="factor of rewards: a small one lets the model go further from the base")
    add("--loss", choices=LOSSES, default="sigmoid",
        help="of a pair: sigmoid is DPO's, ipo pulls a margin to 1/2 and no further")
    # fmt: on
    parser.set_defaults(lr=5e-4, steps=100, eval_every=50)


def complete(args: argparse.Namespace) -> argparse.Namespace:
    complete_finetuning(args, "dpo")
    if args.dropout or args.train_on_prompt:
        raise UserError("--dropout is noise in rewards, --train-on-prompt adds 0: leave them out")
    args.references = int(not args.all_weights)  # forwards by the base in a step
    return args


@dataclass
class Preferences(evaluate.Prediction):
    """The task of a run: to prefer chosen answers. It is also the objective of its batches.
    labs/preferences writes its loss."""

    before_step = "reference"

    def __post_init__(self):
        self.sums = torch.zeros(2 + len(MEASURED))  # of losses and pairs, and of what is MEASURED
        evaluate.return_each_loss(self.job.model)  # `loss` makes one of them
        if not self.args.references:
            self.keep_base(self.job.train_set)
            self.keep_base(self.job.val_set)

    @torch.no_grad()
    def keep_base(self, dataset: Packed) -> None:
        """Let batches have the base's log p of each target, while the model still is the base."""
        world, rows = self.world, range(len(dataset))
        shape = len(rows) + -len(rows) % world.data_size, dataset.seq_len
        log_p = torch.zeros(shape, dtype=widest_float(world.device), device=world.device)
        dataset.given = torch.arange(dataset.seq_len).expand(shape)  # for now, their columns
        for mine, batch in evaluate.shared_batches(dataset, rows, self.args.microbatch, world):
            log_p[mine].scatter_(1, batch.given, self.log_p(batch).to(log_p))
        if world.size > 1:
            dist.all_reduce(log_p, dist.ReduceOp.MIN)  # 0 is what a rank has not computed
        dataset.given = log_p.to(torch.promote_types(world.parallel.dtype, torch.float32)).cpu()

    def batches(self, steps: Iterable[int]) -> Iterator[Batch]:
        yield from map(self.prepare, super().batches(steps))

    def prepare(self, batch: Batch) -> Batch:
        """Return the batch with this objective, and with the base's log p of each target."""
        if self.args.references:
            with adapters_off(self.job.model):
                batch = replace(batch, given=self.log_p(batch))
        return replace(batch, objective=self)

    def log_p(self, batch: Batch) -> Tensor:
        """Return log p of each target, [B, T]. In a pipeline only the last stage has and needs it;
        the others get 0."""
        model, parts = self.job.model, batch.microbatches(self.args.microbatch)
        losses = [model(*part.inputs, documents=part.documents) for part in parts]
        return -torch.cat([x.expand_as(p.targets) for x, p in zip(losses, parts)])

    def loss(self, losses: Tensor, batch: Batch) -> Tensor:
        """Return the sum of the losses of pairs; add up what is measured. `losses` is -log p of
        each target, [B, T]."""
        rewards = self.args.beta * of_answers(-losses - batch.given, batch)  # [B, pairs, 2]
        chosen, rejected = rewards.unbind(-1)  # [B, pairs] each
        margin = chosen - rejected
        pair_losses = LOSSES[self.args.loss](margin, self.args.beta)
        rows = pair_losses, torch.ones_like(margin), margin > 0, margin, chosen, rejected
        sums = torch.stack([torch.where(are_pairs(batch), row, 0).sum() for row in rows])
        self.sums = self.sums.to(sums) + sums.detach()
        return sums[0]

    def count(self, batch: Batch) -> Tensor:
        return are_pairs(batch).sum()

    @torch.no_grad()
    def evaluate(self) -> Totals:
        args, job, world = self.args, self.job, self.world
        self.sums.zero_()
        rows = evaluate.evenly_spaced(job.val_set, args.eval_windows)
        for _, batch in evaluate.shared_batches(job.val_set, rows, args.microbatch, world):
            batch = self.prepare(batch)
            losses = job.model(*batch.inputs, documents=batch.documents)
            if losses.ndim:  # on the last stage of a pipeline, or without one
                batch.loss(losses)
        loss, pairs = world.all_gather_scalars([*self.sums[:2]]).sum(0).tolist()
        return Totals(loss, pairs, 0)

    def measures(self, totals: Totals) -> dict[str, float]:
        """Return the means of what is MEASURED over the pairs of all ranks since the last call."""
        _, pairs, *sums = self.world.all_gather_scalars([*self.sums]).sum(0).tolist()
        self.sums.zero_()
        return {name: value / pairs for name, value in zip(MEASURED, sums)}


def of_answers(x: Tensor, batch: Batch) -> Tensor:
    """Return the sums of x [B, T] over each answer, [B, pairs, 2]; 0 where a row has fewer."""
    sums = batch.sums_of_documents(x)
    return F.pad(sums, (0, sums.shape[1] % 2)).unflatten(1, (-1, 2))


def are_pairs(batch: Batch) -> Tensor:
    """Return which of the pairs of `of_answers` are no padding: [B, pairs]."""
    return of_answers((batch.targets != IGNORE).float(), batch)[..., 0] > 0


SCRIPT = Script(add_flags, complete, partial(open_conversations, read=pairs), Preferences)


def main() -> None:
    finetune(SCRIPT)


if __name__ == "__main__":
    run(main)
