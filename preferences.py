r"""Train a Llama on preferences: of two answers, make the better one likelier (DPO).

    torchrun finetune_lora.py --init out/tiny --out out/lora --merge       a model that answers
    torchrun preferences.py --init out/lora/merged                         minutes on a laptop
    torchrun --nproc-per-node 8 preferences.py --init ~/Llama-3.1-8B-Instruct --data pairs.jsonl \
             --seq-len 4096 --batch 64 --microbatch 1 --lr 5e-6

The data are JSON lines, {"prompt", "chosen", "rejected"}, in the layouts of trl and of Anthropic's
hh-rlhf (text/pairs.py). By default they are docstrings, beside worse ones.

The reward of an answer is how much likelier it has become than the base, the model of --init, has
it (Rafailov et al. 2023, arXiv:2305.18290):

    reward = beta (log p(answer | prompt) - log p_base(answer | prompt))
    loss   = -log sigmoid(reward of the chosen answer - reward of the rejected one)

log p is a sum over the answer's tokens. The base is the same model with its adapters switched off:
a second forward, which stores nothing. With --all-weights, its log p of all answers are computed
once, beforehand. A step's loss is a sum over pairs, divided by the pairs of all ranks; a pair lies
within a row, so that no split divides it.

Watch `chosen`: the loss knows the difference of two rewards alone, so that both may fall, while
answers that are in neither become likelier. docs/preferences.md tells when this helps.
"""

import plumbing.endings  # first, for Ctrl-C during the imports
import argparse
import math
from collections.abc import Iterable, Iterator
from dataclasses import replace

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

import evaluate
from finetune_lora import fine_tune, prepare
from lora import adapters_off
from parallel import return_each_loss
from plumbing.parser import Parser, positive_float
from plumbing.processes import UserError, run
from runs import setup
from runs.flags import add_finetuning_flags, complete_finetuning
from text.batch import Batch
from text.pairs import Pairs, open_pairs

# The loss of a pair, given its margin, the reward of the chosen answer minus that of the other one.
LOSSES = {
    "sigmoid": lambda margin, beta: -F.logsigmoid(margin),
    # IPO's margin is to be 1/2, and not as large as possible (Azar et al. 2023, arXiv:2310.12036).
    "ipo": lambda margin, beta: (margin / beta - 1 / (2 * beta)) ** 2,
    # SimPO has no base, and divides log p by the tokens (Meng et al. 2024, arXiv:2405.14734).
    "simpo": lambda margin, beta: -F.logsigmoid(margin - 0.5),
}
MEASURED = ("loss", "accuracy", "margin", "chosen", "rejected")


def parse_args() -> argparse.Namespace:
    parser = Parser(description="Train a Llama on pairs of answers.")
    add_finetuning_flags(parser)
    # fmt: off
    parser.add_argument("--loss", choices=LOSSES, default="sigmoid",
        help="sigmoid: DPO's; ipo, which ends at a margin; simpo, without a base")
    parser.add_argument("--beta", type=positive_float, help="scale of the rewards: the smaller, "
        "the farther a model goes from its base (default: 0.1, with simpo 2)")
    # fmt: on
    parser.set_defaults(lr=5e-4, steps=100, eval_every=50)
    args = complete_finetuning(parser.parse_args(), "dpo")
    args.beta = args.beta or (2.0 if args.loss == "simpo" else 0.1)
    args.references = int(args.loss != "simpo" and not args.all_weights)  # forwards of a step
    if args.dropout or args.train_on_prompt:
        raise UserError("--dropout is noise in rewards, --train-on-prompt adds 0: leave them out")
    return args


def sums_of_answers(x: Tensor, batch: Batch) -> Tensor:
    """Return the sum of x [B, T] over each answer of a batch of Pairs: [B, pairs of a row, 2]."""
    answers = 2 * batch.given.shape[1]
    document = (batch.positions == 0).cumsum(1) - 1  # [B, T]: its number in the row
    sums = x.new_zeros(len(x), answers + 1)  # the last is padding's
    sums = sums.scatter_add(1, document.clamp(max=answers), x)
    return sums[:, :-1].unflatten(1, (-1, 2))


class DPO(evaluate.Task):
    """To prefer the chosen answers. It is the objective of its batches. labs/preferences."""

    def __init__(self, args: argparse.Namespace, job: setup.Job, world, *others):
        super().__init__(args, job, world, *others)
        return_each_loss(self.model)
        self.sums = torch.zeros(len(MEASURED) + 1, device=world.device)  # and the number of pairs
        if args.all_weights and args.loss != "simpo":
            self.keep_reference(job.train_set), self.keep_reference(job.val_set)

    def prepare(self, steps: Iterable[int], batches: Iterator[Batch]) -> Iterator[Batch]:
        return map(self.with_reference, batches)

    def with_reference(self, batch: Batch) -> Batch:
        """Return a batch with its objective, and with the base's log p of each answer."""
        if self.args.references:
            with adapters_off(self.model):
                batch = replace(batch, given=self.log_p(batch))
        return replace(batch, objective=self)

    def log_p(self, batch: Batch) -> Tensor:
        """Return log p of each answer, [B, pairs of a row, 2]. The last stage of a pipeline alone
        has it, and needs it."""
        sums = []
        for part in batch.microbatches(self.args.microbatch):
            losses = self.model(*part.inputs, documents=part.documents)
            if losses.ndim:
                sums.append(-sums_of_answers(*part.whole_rows(losses)))
        return torch.cat(sums) if sums else torch.zeros_like(batch.given)

    @torch.no_grad()
    def keep_reference(self, dataset: Pairs) -> None:
        """Compute the base's log p of all pairs: its weights are there before the first step."""
        rows, world = range(len(dataset)), self.world
        padded = math.ceil(len(rows) / world.data_size) * world.data_size
        wide = torch.promote_types(world.parallel.dtype, torch.float32)
        shape = padded, *dataset.reference_log_p.shape[1:]
        log_p = torch.zeros(shape, dtype=wide, device=world.device)
        for my_rows, batch in evaluate.shared_batches(dataset, rows, self.args.microbatch, world):
            log_p[my_rows] = self.log_p(batch).to(log_p)
        if world.size > 1:
            dist.all_reduce(log_p, dist.ReduceOp.MIN)  # of those, and of the others' zeros
        dataset.reference_log_p = log_p.cpu()

    def __call__(self, losses: Tensor, batch: Batch) -> Tensor:
        """Return the sum of the losses of a batch's pairs, given the losses of targets [B, T]."""
        log_p, beta = -sums_of_answers(losses, batch), self.args.beta
        if self.args.loss == "simpo":
            log_p = log_p / sums_of_answers((batch.targets >= 0).to(log_p), batch).clamp(min=1)
        chosen, rejected = (beta * (log_p - batch.given)).unbind(-1)  # [B, pairs of a row] each
        margin = chosen - rejected
        rows = LOSSES[self.args.loss](margin, beta), margin > 0, margin, chosen, rejected
        is_pair = torch.arange(margin.shape[1], device=margin.device) < batch.units[:, None]
        sums = [torch.where(is_pair, row, 0).sum() for row in rows]
        self.sums = self.sums + torch.stack([*sums, is_pair.sum()]).detach()
        return sums[0]

    def means(self) -> dict[str, float]:
        """Return the means of what is MEASURED over the pairs since the last call."""
        *sums, pairs = self.world.all_gather_scalars([*self.sums]).sum(0).tolist()
        self.sums = torch.zeros_like(self.sums)
        return {name: value / max(pairs, 1) for name, value in zip(MEASURED, sums)}

    def metrics(self) -> dict[str, float]:
        return {name: mean for name, mean in self.means().items() if name != "loss"}

    @torch.no_grad()
    def validate(self) -> tuple[dict[str, float], str]:
        val_set, microbatch = self.job.val_set, self.args.microbatch
        rows = range(min(self.args.eval_windows, len(val_set)))
        for _, batch in evaluate.shared_batches(val_set, rows, microbatch, self.world):
            batch = self.with_reference(batch)
            batch.loss(self.model(*batch.inputs, documents=batch.documents))
        means = self.means()
        told = ", ".join(f"{name} {means[name]:.3f}" for name in MEASURED[1:])
        return {f"val_{name}": mean for name, mean in means.items()}, told


def main() -> None:
    args = parse_args()
    process = setup.setup(args)
    job, examples = prepare(args, process, open_pairs)
    fine_tune(args, process, job, examples, DPO)


if __name__ == "__main__":
    run(main)
