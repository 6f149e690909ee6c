"""What a run trains on: batches, their loss, what divides it, and how the model is evaluated.

    train.py          Task                the next token of text
    finetune_lora.py  Task                the next token of answers
    preferences.py    Preferences(Task)   which of two answers is better
    rewards.py        Rewards(Task)       what a program thinks of the model's own answers

The loop of train.py calls, in this order: `begin` once; in each step `batches`, then `loss` for
each microbatch, then `count`, then `measures`; and `evaluate_and_show` now and then.
"""

import contextlib
import statistics
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial

import torch
from torch import Tensor

from config import Work
from costs.search import fits_unsharded
from data import local_batch, read_ahead
from generate import generate
from model import Llama
from parallel import World, unsharded
from plumbing.messages import print_rank_zero
from runs.flags import Run
from runs.records import Totals, described
from runs.scores import Stopped, describe_exam, evaluate, take_exam
from runs.setup import Job
from text.batch import Batch, as_computed
from text.chat import ANSWER_ROOM, SHOWN
from text.order import Steps
from text.tokenizer import Tokenizer


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

    @cached_property
    def fits(self) -> bool:
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

    loss = staticmethod(as_computed)  # (computed, batch), for each microbatch

    def count(self, batch: Batch) -> Tensor:
        """Return by what a step divides its loss: the number of targets of this rank's batch."""
        return batch.count()

    def measures(self, totals: Totals) -> dict[str, float]:
        """Return by name what is recorded of the step or evaluation of `totals` beside its loss.
        All ranks call it, once for each; it may raise UserError on all of them."""
        return {"bits_per_byte": totals.bits_per_byte}

    def evaluate(self) -> Totals:
        """Return the loss on held-out data. All ranks call it."""
        limit, microbatch = self.run.eval_windows, self.work.microbatch
        return evaluate(self.job.model, self.job.val_set, limit, microbatch, self.world)

    def evaluate_and_show(self, step: int) -> tuple[dict[str, float | str], int]:
        """Evaluate the model after a step: print the validation loss, an exam's scores and a sample
        of text. Return them by name, and 0; or, if a signal ends it, nothing and the signal's
        number. All ranks call it."""
        model, exam, world = self.job.model, self.job.exam, self.world
        model.eval()
        try:
            totals = self.evaluate()
            measures = self.measures(totals)
            gathered = unsharded(model, world.parallel) if self.fits else contextlib.nullcontext()
            with gathered, torch.compiler.set_stance("force_eager"):  # shapes change with a token
                text = self.sample_text(step)
                scores = take_exam(model, exam, self.work.microbatch, world)[0] if exam else {}
        except Stopped as stopped:
            print_rank_zero(f"step {step}: the evaluation is given up", file=sys.stderr)
            return {}, stopped.signal
        model.train()
        print_rank_zero(
            f"step {step}: validation loss {totals.mean_loss:.4f}, "
            f"{', '.join(described(measures, 4))}\n{describe_exam(scores)}{text}"
        )
        results = {f"val_{name}": value for name, value in measures.items()}
        return {"val_loss": totals.mean_loss} | results | {"sample": text} | scores, 0


def sample_text(job: Job, prompt: str, step: int) -> str:
    """Return a prompt and how the model continues it."""
    options = dict(temperature=0.8, top_p=0.95, stop=job.tokenizer.stop, seed=step)
    (tokens,) = generate(job.model, [job.tokenizer.encode(prompt, bos=True)], 64, **options)
    return f"--- {prompt}{job.tokenizer.decode(tokens)}\n---"


def sample_answers(
    model: Llama, examples: list[tuple[list[int], str]], tokenizer: Tokenizer, step: int
) -> str:
    """Return lines that show what a model answers to the first examples, and a line of means over
    all answers: which share of them ends, how many tokens they have, and which share of tokens they
    have in common with the true answers (the F1 score of two bags of tokens). Tokens are drawn at
    random, since a small model that always takes the likeliest one soon repeats itself."""
    if not examples:
        return "no held-out prompt is short enough to show"
    prompts = [prompt for prompt, _ in examples]
    stop = tokenizer.stop
    answers = generate(model, prompts, ANSWER_ROOM, temperature=0.8, top_p=0.95, stop=stop)
    speaker = f"after {step} steps" if step else "base model"
    lines = []
    scores = []  # of each answer: whether it ends, its tokens, those of the true one, overlap
    for (prompt, truth), answer in zip(examples, answers):
        if len(scores) < SHOWN:
            question = "" if step else tokenizer.decode(prompt)
            lines.append(f"{question}--- {speaker}: {tokenizer.decode(answer)}")
            lines.append(f"--- true answer: {truth}")
        ids = [token for token in answer if token not in stop]
        true_ids = tokenizer.encode(truth)
        n_common = (Counter(ids) & Counter(true_ids)).total()
        overlap = 2 * n_common / max(1, len(ids) + len(true_ids))
        scores.append((len(ids) < len(answer), len(ids), len(true_ids), overlap))
    ended, length, true_length, overlap = map(statistics.mean, zip(*scores))
    score = f"{ended:.0%} end, {length:.1f} tokens (true ones {true_length:.1f}), {overlap:.0%}"
    return "\n".join([*lines, f"--- {speaker}: of {len(scores)} answers {score} in common", "---"])
