"""What a run trains on: batches, their loss, what divides it, and how the model is evaluated.

    train.py          Task                the next token of text
    finetune_lora.py  Task                the next token of answers
    preferences.py    Preferences(Task)   which of two answers is better
    rewards.py        Rewards(Task)       what a program thinks of the model's own answers
    distill.py        Distillation(Task)  what a larger model would say

The loop of train.py calls `begin` and `batches` once each. In each step it takes the next batch,
and splits it by `parts`. For each part it calls `loss` for each microbatch, then `count` and
`sizes`. Then it calls `finish_measures`; and now and then `evaluate_and_show`.
"""

import contextlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial

import torch
from torch import Tensor

from config import Totals, Work
from costs.search import fits_unsharded
from costs.shapes import flops_per_token
from data import local_batch, read_ahead
from parallel import World, weights_gathered
from plumbing.escaped import IN_LINES
from plumbing.messages import print_rank_zero
from runs.flags import Run
from runs.records import described
from runs.scores import Stopped, describe_exam, evaluate, take_exam
from runs.setup import Job
from techniques.decoding import generate
from text.batch import Batch
from text.order import Steps


@dataclass
class Task:
    """Predict the next token.

    sample_text(step) returns text to show at evaluations; all ranks call it."""

    run: Run
    job: Job
    world: World
    work: Work
    sample_text: Callable[[int], str]
    before_step = "data"  # the name that `bench.py step` gives to the time before a step
    # Not given, but set where `batches` ends early, equally on all ranks: a line, which train.py
    # raises after it has saved, or a signal that came meanwhile.
    problem = ""
    signal = 0

    @cached_property
    def whole_model_fits(self) -> bool:
        """Return whether a rank can hold all weights while it generates, gathered only once."""
        return fits_unsharded(self.work, self.world)

    def begin(self, steps: Steps) -> None:
        """Compute what the `steps` need of the model as it was before this training.

        The loop calls it after the optimizer is made. A forward without a backward leaves FSDP's
        weights unsharded; an optimizer made afterwards would hold those, and not the shards."""

    def batches(self, steps: Steps) -> Iterator[Batch]:
        """Yield what this rank trains on in each step that is still to do."""
        read = partial(local_batch, steps.order, self.world, self.job.train_set)
        return read_ahead(read, steps.to_do, self.world.device)

    def loss(self, computed: Tensor, batch: Batch) -> Tensor:
        """Return the loss of a microbatch, a sum, given what the model has returned: here that sum.
        preferences.py and rewards.py let the model return the loss of each target, [B, T], and
        compute theirs from it (runs/each_target.py). distill.py lets it return another sum."""
        return computed

    def parts(self, batch: Batch) -> list[Batch]:
        """Return the parts of a batch, each of which the optimizer takes a step on."""
        return [batch]

    def count(self, batch: Batch) -> Tensor:
        """Return by what a step divides its loss: the number of targets of this rank's batch."""
        return batch.count()

    def sizes(self, batch: Batch) -> list[int]:
        """Return the bytes of text of this rank's batch, its tokens, and the FLOPs to train on
        them."""
        flops = sum(n * flops_per_token(self.work.model, n) for n in batch.lengths)
        return [batch.text_bytes, sum(batch.lengths), flops]

    def finish_measures(self, totals: Totals) -> dict[str, float]:
        """Return by name what is recorded of a step or an evaluation beside its loss, and begin
        anew for the next. All ranks call it together, once after each step and each `evaluate`.
        `totals` are its results, of several updates in a step those of the last. It may raise
        UserError on all ranks."""
        return {"bits_per_byte": totals.bits_per_byte}

    def all_summed(self, *names: str) -> list[float]:
        """Return some of the sums that a task's `loss` adds to `sums`, over all ranks. Those along
        tp have the same rows, which then count tp times: only quotients mean something."""
        return self.world.all_gather_scalars([self.sums[name] for name in names]).sum(0).tolist()

    def text_to_show(self, step: int) -> str:
        """Return the text that an evaluation shows. All ranks call it."""
        return self.sample_text(step)

    def evaluate(self) -> Totals:
        """Return the loss on held-out data. All ranks call it."""
        job, limit = self.job, self.run.eval_windows
        return evaluate(job.model, job.val_set, limit, self.work.microbatch, self.world)

    def evaluate_and_show(self, step: int) -> tuple[dict[str, float | str], int]:
        """Evaluate the model after a step: print the validation loss, an exam's scores and a sample
        of text. Return (results by name, 0), or ({}, signal) if a signal ends the evaluation. All
        ranks call it."""
        model, exam, world = self.job.model, self.job.exam, self.world
        model.eval()
        try:
            totals = self.evaluate()
            measures = self.finish_measures(totals)
            gathered = contextlib.nullcontext()
            if self.whole_model_fits:
                gathered = weights_gathered(model, world.parallel)
            with gathered, torch.compiler.set_stance("force_eager"):  # few tokens
                text = self.text_to_show(step)
                scores = take_exam(model, exam, self.work.microbatch, world)[0] if exam else {}
        except Stopped as stopped:
            print_rank_zero(f"step {step}: the evaluation is given up", file=sys.stderr)
            return {}, stopped.signal
        model.train()
        shown = text.translate(IN_LINES)  # a prompt may have what a terminal would obey
        print_rank_zero(
            f"step {step}: validation loss {totals.mean_loss:.4f}, "
            f"{', '.join(described(measures, 4))}\n{describe_exam(scores)}{shown}"
        )
        results = {f"val_{name}": value for name, value in measures.items()}
        return {"val_loss": totals.mean_loss} | results | {"sample": text} | scores, 0


def sample_text(job: Job, prompt: str, step: int) -> str:
    """Return a prompt and how the model continues it."""
    tokenizer = job.tokenizer
    ids = tokenizer.encode(prompt, bos=True)
    length = max(1, min(64, job.model.config.max_seq_len - len(ids)))
    (tokens,) = generate(
        job.model, [ids], length, temperature=0.8, top_p=0.95, stop=tokenizer.stop, seed=step
    )
    return f"--- {prompt}{tokenizer.decode(tokens)}\n---"
