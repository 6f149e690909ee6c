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
added up, and divided once by their number. Both answers of a pair share a row. --batch and
--microbatch count rows, so they never separate a pair.

Watch `chosen`, the mean reward of chosen answers, beside the loss. The loss depends only on the
difference of two rewards: both may fall, while answers that are in no pair become likelier.
docs/preferences.md says when such training helps.
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
from plumbing.messages import UserError
from plumbing.parser import Parser, positive_float
from plumbing.processes import run
from runs.flags import add_finetuning_flags, complete_finetuning
from runs.records import Totals
from text.batch import Batch
from text.packing import Packed
from text.pairs import pairs

# The loss of a pair is a function of its margin: the chosen answer's reward - the rejected one's.
LOSSES = {
    "sigmoid": lambda margin, beta: -F.logsigmoid(margin),
    # Azar et al. 2023, arXiv:2310.12036: its minimum is at a margin of 1/2, not at infinity.
    "ipo": lambda margin, beta: (margin / beta - 1 / (2 * beta)) ** 2,
}
MEASURED = ("accuracy", "margin", "chosen", "rejected")  # chosen and rejected are mean rewards


def add_flags(parser: Parser) -> None:
    add_finetuning_flags(parser)
    # fmt: off
    add = parser.add_argument_group("preferences").add_argument
    add("--beta", type=positive_float, default=0.1,
        help="factor of rewards: a small one lets the model go further from the base")
    add("--loss", choices=LOSSES, default="sigmoid",
        help="loss of a pair: DPO's sigmoid, or IPO's, which is lowest at a margin of 1/2")
    # fmt: on
    parser.set_defaults(lr=5e-4, steps=100, eval_every=50)


def complete(args: argparse.Namespace) -> None:
    complete_finetuning(args, "dpo")
    if args.dropout or args.train_on_prompt:
        problem = "--dropout makes rewards random, --train-on-prompt changes nothing here"
        raise UserError(f"{problem}: leave them out")
    args.references = int(not args.all_weights)  # how often a step runs the base forward


@dataclass
class Preferences(evaluate.Prediction):
    """Train a run's model to prefer chosen answers. A batch has this object as its `objective`, and
    calls `loss` and `count` (text/batch.py). labs/preferences writes the loss by hand."""

    before_step = "reference"  # what bench.py step calls the time of `prepare`

    def __post_init__(self):
        self.sums = torch.zeros(2 + len(MEASURED))  # of losses, pairs, and what is MEASURED
        evaluate.return_each_loss(self.job.model)

    def begin(self) -> None:
        if not self.args.references:
            self.keep_base(self.job.train_set)
            self.keep_base(self.job.val_set)

    @torch.no_grad()
    def keep_base(self, dataset: Packed) -> None:
        """Compute the base's log p of all targets while the model still is the base, and let each
        batch of the dataset have its part as `given`."""
        world, rows = self.world, range(len(dataset))
        padding = -len(rows) % world.data_size  # as in shared_batches
        shape = len(rows) + padding, dataset.seq_len
        dtype = torch.promote_types(world.parallel.dtype, torch.float32)
        log_p = torch.zeros(shape, dtype=dtype, device=world.device)
        # At first `given` has column numbers: they tell a rank along cp where its log p goes.
        dataset.given = torch.arange(dataset.seq_len).expand(shape)
        for own_rows, batch in evaluate.shared_batches(dataset, rows, self.args.microbatch, world):
            log_p[own_rows].scatter_(1, batch.given, self.log_p(batch).to(log_p))
        if world.size > 1:
            # Ranks along tp have the same log p, which is below 0; ranks without it have 0.
            dist.all_reduce(log_p, dist.ReduceOp.MIN)
        dataset.given = log_p.cpu()

    def batches(self, steps: Iterable[int]) -> Iterator[Batch]:
        yield from map(self.prepare, super().batches(steps))

    def prepare(self, batch: Batch) -> Batch:
        """Return the batch with this objective, and with the base's log p of each target."""
        if self.args.references:
            with adapters_off(self.job.model):
                batch = replace(batch, given=self.log_p(batch))
        return replace(batch, objective=self)

    def log_p(self, batch: Batch) -> Tensor:
        """Return log p of each target, [B, T]. In a pipeline only the last stage has it and needs
        it; the others return 0."""
        model, parts = self.job.model, batch.microbatches(self.args.microbatch)
        losses = [model(*part.inputs, documents=part.documents) for part in parts]
        return -torch.cat([x.expand_as(part.targets) for x, part in zip(losses, parts)])

    def loss(self, losses: Tensor, batch: Batch) -> Tensor:
        """Return the sum of the losses of a batch's pairs. `losses` [B, T] are -log p of each
        target. Add to `sums`."""
        rewards = self.args.beta * of_answers(-losses - batch.given, batch)  # [B, pairs, 2]
        chosen, rejected = rewards.unbind(-1)  # [B, pairs] each
        margin = chosen - rejected
        pair_losses = LOSSES[self.args.loss](margin, self.args.beta)
        measured = pair_losses, torch.ones_like(margin), margin > 0, margin, chosen, rejected
        sums = torch.where(are_pairs(batch), torch.stack(measured), 0).sum((1, 2))
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
            if losses.ndim:  # other stages than the last of a pipeline have no losses but a 0
                batch.loss(losses)
        loss, pairs = world.all_gather_scalars([*self.sums[:2]]).sum(0).tolist()
        return Totals(loss, pairs, 0)

    def measures(self, totals: Totals) -> dict[str, float]:
        """Return the means of what is MEASURED over the pairs of all ranks since the last call."""
        _, pairs, *sums = self.world.all_gather_scalars([*self.sums]).sum(0).tolist()
        self.sums.zero_()
        return {name: value / pairs for name, value in zip(MEASURED, sums)}


def of_answers(x: Tensor, batch: Batch) -> Tensor:
    """Return the sum of x [B, T] over each answer: [B, pairs, 2]. The documents of a row are the
    chosen and the rejected answer of a pair, those of the next pair, ..., and the padding at its
    end. Rows with fewer pairs than others are filled up with 0."""
    sums = batch.sums_of_documents(x)
    return F.pad(sums, (0, sums.shape[1] % 2)).unflatten(1, (-1, 2))


def are_pairs(batch: Batch) -> Tensor:
    """Return which results of `of_answers` belong to a pair, and not to padding: [B, pairs]."""
    return of_answers((batch.targets != IGNORE).float(), batch)[..., 0] > 0


open_pairs = partial(open_conversations, read=pairs)
SCRIPT = Script(__doc__, add_flags, complete, open_pairs, Preferences)
main = partial(finetune, SCRIPT)

if __name__ == "__main__":
    run(main)
