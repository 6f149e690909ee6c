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
no memory, and one more forward. The loss is summed over pairs, and divided once by the number of
pairs on all ranks. Both answers of a pair share a row, so --batch and --microbatch, which count
rows, never divide a pair.

Watch `chosen`, the reward of chosen answers, beside the loss. The loss knows the difference of both
rewards alone: both may fall, while answers that are in no pair become likelier.
"""

import plumbing.endings  # first, for Ctrl-C during the imports
import argparse
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

import evaluate
import finetune_lora
from lora import adapters_off
from model import IGNORE
from plumbing.parser import Parser, positive_float
from plumbing.processes import UserError, run
from runs import flags
from runs.records import Totals
from techniques.chunked_loss import cross_entropies
from text.batch import Batch
from text.pairs import pairs

# Loss of a pair, of its margin: the chosen reward - the rejected one.
LOSSES = {
    "sigmoid": lambda margin, beta: -F.logsigmoid(margin),
    # Azar et al. 2023, arXiv:2310.12036: a margin that is large enough is not pulled further.
    "ipo": lambda margin, beta: (margin / beta - 1 / (2 * beta)) ** 2,
}
MEASURED = ("accuracy", "margin", "chosen", "rejected")  # the last two are rewards


def parse_args() -> argparse.Namespace:
    parser = Parser(description="Train a Llama on pairs of answers by DPO.")
    flags.add_finetuning_flags(parser)
    # fmt: off
    add = parser.add_argument_group("preferences").add_argument
    add("--beta", type=positive_float, default=0.1,
        help="factor of rewards: a small one lets the model go further from the base")
    add("--loss", choices=LOSSES, default="sigmoid",
        help="of a pair: sigmoid is DPO's, ipo pulls a margin to 1/2 and no further")
    # fmt: on
    parser.set_defaults(lr=1e-3)
    args = flags.complete_finetuning(parser.parse_args(), "dpo")
    for name in ("dropout", "train_on_prompt"):
        if getattr(args, name):
            flag = f"--{name.replace('_', '-')}"
            raise UserError(f"{flag} would be noise in the rewards of answers: leave it out")
    return args


@dataclass
class Preferences(evaluate.Prediction):
    """The task of a run: to prefer chosen answers. It is also the objective of its batches."""

    def __post_init__(self):
        self.sums = torch.zeros(2 + len(MEASURED))  # of losses and pairs, and of what is MEASURED
        self.job.model.loss = cross_entropies  # of each target: `loss` makes one of them

    def prepare(self, step: int, batch: Batch) -> Batch:
        """Return the batch with this objective and the base's log p of each target."""
        model, microbatches = self.job.model, batch.microbatches(self.args.microbatch)
        with adapters_off(model):
            losses = [model(*part.inputs, documents=part.documents) for part in microbatches]
        # In a pipeline only the last stage has and needs them; the others get 0.
        given = -torch.cat([x.expand_as(p.targets) for x, p in zip(losses, microbatches)])
        return replace(batch, objective=self, given=given)

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
            batch = self.prepare(0, batch)
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


def main() -> None:
    finetune_lora.finetune(parse_args(), pairs, Preferences)


if __name__ == "__main__":
    run(main)
