"""How a model is scored: the loss of each row of some data, and exams. All ranks share the rows.

Training calls these functions between its steps, and evaluate.py calls them for a finished model.
SIGTERM or Ctrl-C ends them early, so that a run can save. An exam has these scores (lm-eval calls
the first two acc and acc_norm):

    accuracy      questions whose right choice has the highest log-likelihood
    normalized    the same, after each log-likelihood is divided by the characters of its choice.
                  Without that short choices win, since they sum over fewer tokens
    exact         questions whose answer is the line that the model writes at temperature 0
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from config import Totals
from data import Windows, batch_of
from model import IGNORE, Llama
from parallel import World
from plumbing import endings
from plumbing.devices import widest_float
from plumbing.messages import with_progress
from techniques.decoding import generate
from text.batch import Batch
from text.packing import Packed


def loss_of_each_row(loss, hidden: Tensor, weight: Tensor, targets: Tensor, vocabulary) -> Tensor:
    """Return the `loss` of each row alone. hidden [B, T, D], targets [B, T] -> [B]."""
    return torch.stack([loss(h, weight, t, vocabulary).sum() for h, t in zip(hidden, targets)])


class Stopped(Exception):
    """Ends what ranks do together, on all of them: some rank has received a signal that asks the
    run to save and end, or the task has a `problem` (runs/task.py), with the signal 0."""

    def __init__(self, signal: int = 0):
        self.signal = signal


def until_signal(items: Iterable) -> Iterator:
    """Yield the items, as all ranks do together. Raise Stopped on all ranks, in place of the next
    item, once some rank is asked to end (plumbing/endings.py)."""
    for item in items:
        signal_number = torch.tensor(endings.asked_to_end())
        if dist.is_initialized() and dist.get_world_size() > 1:
            dist.all_reduce(signal_number, dist.ReduceOp.MAX)
        if signal_number:
            raise Stopped(int(signal_number))
        yield item


def shared_batches(
    dataset: Windows | Packed,
    rows: Sequence[int],
    microbatch: int,
    world: World,
    what: str = "evaluating",
) -> Iterator[tuple[slice, Batch]]:
    """Yield this rank's batches of some rows, and where they stand among the padded rows. `what` is
    the name of the progress.

    Ranks share the rows. Every rank has the same number of batches, as a split model requires: the
    last batch is padded with rows without targets. Ranks take rows in turn, unlike in training,
    where a share is a contiguous part of the batch (data.py): so those that compute at the same
    time have neighbouring rows, which in an exam have similar lengths."""
    shares = world.parallel.data_size
    padded_rows = [*rows, *[None] * (world.parallel.padded(len(rows)) - len(rows))]
    starts = range(world.data_rank, len(padded_rows), microbatch * shares)
    for start in until_signal(with_progress(starts, what)):
        mine = slice(start, start + microbatch * shares, shares)  # every shares-th row
        yield mine, batch_of(dataset, padded_rows[mine], world)


@torch.no_grad()
def row_sums(
    model: Llama, dataset: Windows | Packed, rows: Sequence[int], microbatch: int, world: World
) -> Tensor:
    """Return the loss in nats, the targets and the bytes of text of each row: [len(rows), 3], equal
    on all ranks. The first row of a batch has the bytes of the whole batch, the others 0."""
    tp, pp = world.parallel.tp, world.parallel.pp
    padded = world.parallel.padded(len(rows))
    sums = torch.zeros(padded, 3, dtype=widest_float(world.device), device=world.device)
    whole_loss, model.loss = model.loss, partial(loss_of_each_row, model.loss)
    try:
        for my_rows, batch in shared_batches(dataset, rows, microbatch, world):
            # In a pipeline only the last rank has the losses; the others get 0.
            sums[my_rows, 0] = model(*batch.inputs, documents=batch.documents).to(sums)
            sums[my_rows, 1] = (batch.targets != IGNORE).sum(1).to(sums)
            sums[my_rows.start, 2] = batch.text_bytes
    finally:
        model.loss = whole_loss
    if world.size > 1:
        dist.all_reduce(sums)
    # All ranks along tp added the same losses, all along tp and pp the same targets and bytes.
    return sums[: len(rows)] / sums.new_tensor([tp, tp * pp, tp * pp])


def evaluate(model: Llama, windows: Windows, limit: int, microbatch: int, world: World) -> Totals:
    """Return the loss over at most `limit` evenly spaced windows, shared among the ranks."""
    chosen = evenly_spaced(windows, limit)
    loss, tokens, text_bytes = row_sums(model, windows, chosen, microbatch, world).sum(0).tolist()
    return Totals(loss, round(tokens), round(text_bytes))


def evenly_spaced(windows: Windows, limit: int) -> list[int]:
    n = min(limit, len(windows))
    return [i * len(windows) // n for i in range(n)]


def take_exam(
    model: Llama, exam, microbatch: int, world: World
) -> tuple[dict[str, float], list[dict]]:
    """Return the scores by name, each a fraction of questions answered right; and the questions,
    with the model's log-likelihoods or answer. Ranks share the choices; all write every answer.
    `exam` is an Exam of text/exams.py."""
    rows = range(len(exam.choices))
    loss_of_choices = row_sums(model, exam.choices, rows, microbatch, world)[:, 0]
    losses = iter(loss_of_choices.tolist())
    lines = iter(write_answers(model, exam, microbatch))
    details = []
    marks = defaultdict(list)
    for question in exam.questions:
        answer = question["answer"]
        if choices := question.get("choices"):
            scores = [-next(losses) for _ in choices]
            normalized = [score / len(choice) for score, choice in zip(scores, choices)]
            marks["exam_accuracy"].append(scores.index(max(scores)) == answer)
            marks["exam_normalized"].append(normalized.index(max(normalized)) == answer)
            details.append(question | {"log_likelihoods": scores})
        else:
            line = next(lines)
            marks["exam_exact"].append(line == answer.strip())
            details.append(question | {"written": line})
    return {name: sum(each) / len(each) for name, each in marks.items()}, details


def write_answers(model: Llama, exam, microbatch: int) -> list[str]:
    """Return the first line of the model's answer to each prompt of an exam."""
    tokenizer = exam.tokenizer
    lines = []
    for start in until_signal(range(0, len(exam.prompts), microbatch)):
        prompts = exam.prompts[start : start + microbatch]
        for tokens in generate(model, prompts, exam.room, temperature=0, stop=tokenizer.stop):
            text = tokenizer.decode(token for token in tokens if token not in tokenizer.stop)
            lines.append(text.split("\n")[0].strip())
    return lines


def describe_exam(right: dict[str, float]) -> str:
    """Return the scores of take_exam in a line; "" if there was no exam."""
    shares = (f"{name.replace('_', ' ')} {share:.1%}" for name, share in right.items())
    return f"{', '.join(shares)}\n" if right else ""
