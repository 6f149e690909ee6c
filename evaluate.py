r"""Score a model: the loss of texts, and exams.

    torchrun evaluate.py out/tiny --data held_out.txt               loss and bits per byte
    torchrun evaluate.py out/tiny --exam questions.jsonl            right answers (text/exams.py)
    torchrun evaluate.py DIR --adapter out/tiny-lora --chat --data chats.jsonl
    torchrun --nproc-per-node 8 evaluate.py DIR --dp fsdp --exam questions.jsonl

DIR is a run, one of its checkpoints, or a model directory of Meta or Hugging Face. Training
evaluates with the same functions. An exam has these scores (lm-eval calls the first two acc and
acc_norm):

    accuracy      questions whose right choice has the highest log-likelihood
    normalized    the same, after each log-likelihood is divided by the characters of its choice.
                  Without that short choices win, since they sum over fewer tokens
    exact         questions whose answer is the line that the model writes at temperature 0
"""

import plumbing.endings  # first, for Ctrl-C during the imports
import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from config import RESUMABLE, ParallelConfig, decided
from data import Windows, list_left_out, open_text
from files.adapters import bits_of_base, open_adapter
from files.directories import find_adapter
from files.loading import load_weights
from generate import ModelToLoad, find_model, generate
from lora import LoRA, add_adapters
from model import IGNORE, Llama
from parallel import World, parallelize, with_mesh
from plumbing.devices import has_bfloat16, widest_float
from plumbing.flags import flag, other_default, values_of, within
from plumbing.joining import init_distributed
from plumbing.messages import UserError, print_rank_zero, with_progress
from plumbing.new_files import write_atomically
from plumbing.parser import parse, positive_int
from plumbing.processes import Process, run
from runs.flags import Pretraining
from runs.records import Totals
from runs.rules import check_parallel, check_work, requested_work
from runs.setup import choose_work
from techniques import nf4
from techniques.chunked_loss import cross_entropies
from techniques.context_parallel import share_sequences
from text.batch import Batch
from text.chat import open_chats
from text.corpora import Reading
from text.exams import ROOM, Exam
from text.packing import Packed, Rows

# fmt: off


@dataclass(frozen=True)
class Evaluation(ModelToLoad):
    """Score a model: the loss of texts, and exams."""

    text_field: str = other_default(Pretraining, "text_field", "text")
    skip_bad: bool = other_default(Pretraining, "skip_bad", False)
    data: tuple[str, ...] | None = flag(None, "text files, directories or token files", nargs="+")
    exam: Path | None = flag(None, "questions, as JSON lines", type=Path, metavar="FILE")
    chat: bool = flag(False, "the data are conversations, and a question is a user's message")
    seq_len: int | None = flag(None, "tokens per sequence (default: the run's, or 2048)",
                               type=positive_int)
    microbatch: int = flag(8, "sequences computed at a time")
    max_new_tokens: int = flag(ROOM, "tokens of a written answer")
    details: Path | None = flag(None, "write each question with the model's answer, as JSON lines",
                                type=Path, metavar="FILE")
    # The other flags of ParallelConfig change what is learned.
    parallel: ParallelConfig = within(ParallelConfig, [*RESUMABLE, "dtype"],
                                      "how the model is split over ranks")
    # fmt: on

    def check(self) -> None:
        if not self.data and not self.exam:
            raise UserError("nothing to score: give --data, --exam or both")
        if self.details and self.details.exists():
            before = self.details.read_bytes()
            if b'"log_likelihoods"' not in before and b'"written"' not in before:
                problem = f"--details {self.details} exists, and has no answers"
                raise UserError(f"{problem}: give another name")


# ---------------------------------------------------------------------------------------- scores


def loss_of_each_row(loss, hidden: Tensor, weight: Tensor, targets: Tensor, vocabulary) -> Tensor:
    """Return the `loss` of each row alone. hidden [B, T, D], targets [B, T] -> [B]."""
    return torch.stack([loss(h, weight, t, vocabulary).sum() for h, t in zip(hidden, targets)])


def return_each_loss(model: Llama) -> None:
    """Let forward return the loss of each target, [B, T], from which a task makes its own loss."""
    model.loss = cross_entropies


class Stopped(Exception):
    """Ends an evaluation: some rank has received a signal that asks the run to save and end."""

    def __init__(self, signal: int):
        self.signal = signal


def until_signal(items: Iterable) -> Iterator:
    """Yield the items, as all ranks do together. Raise Stopped on all ranks, in place of the next
    item, once one of plumbing.endings.SAVING_SIGNALS has been collected on some rank."""
    for item in items:
        signal_number = torch.tensor(max(plumbing.endings.received, default=0))
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
    last batch is padded with rows without targets."""
    shares = world.data_size
    padded_rows = [*rows, *[None] * (-len(rows) % shares)]
    starts = range(world.data_rank, len(padded_rows), microbatch * shares)
    for start in until_signal(with_progress(starts, what)):
        mine = slice(start, start + microbatch * shares, shares)
        yield mine, batch_of(dataset, padded_rows[mine], world)


def batch_of(dataset: Windows | Packed, rows: Sequence[int | None], world: World) -> Batch:
    """Return this rank's tokens of some rows, on its device."""
    if isinstance(dataset, Rows):  # ranks share a row's tokens
        batch = dataset.batch(rows, multiple=2 * world.parallel.cp * world.parallel.tp)
    else:
        batch = dataset.batch(rows)
    return share_sequences(batch, world).to(world.device)


@torch.no_grad()
def row_sums(
    model: Llama, dataset: Windows | Packed, rows: Sequence[int], microbatch: int, world: World
) -> Tensor:
    """Return the loss in nats, the targets and the bytes of text of each row: [len(rows), 3], equal
    on all ranks. The first row of a batch has the bytes of the whole batch, the others 0."""
    tp, pp = world.parallel.tp, world.parallel.pp
    padded = len(rows) + -len(rows) % world.data_size  # as in shared_batches
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
    model: Llama, exam: Exam, microbatch: int, world: World
) -> tuple[dict[str, float], list[dict]]:
    """Return the scores by name, each a fraction of questions answered right; and the questions,
    with the model's log-likelihoods or answer. Ranks share the choices; all write every answer."""
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
            normalized = [score / max(1, len(choice)) for score, choice in zip(scores, choices)]
            marks["exam_accuracy"].append(scores.index(max(scores)) == answer)
            marks["exam_normalized"].append(normalized.index(max(normalized)) == answer)
            details.append(question | {"log_likelihoods": scores})
        else:
            line = next(lines)
            marks["exam_exact"].append(line == answer.strip())
            details.append(question | {"written": line})
    return {name: sum(each) / len(each) for name, each in marks.items()}, details


def write_answers(model: Llama, exam: Exam, microbatch: int) -> list[str]:
    """Return the first line of the model's answer to each prompt of an exam."""
    tokenizer = exam.tokenizer
    lines = []
    for start in until_signal(range(0, len(exam.prompts), microbatch)):
        prompts = exam.prompts[start : start + microbatch]
        for tokens in generate(model, prompts, exam.room, temperature=0, stop=tokenizer.stop):
            text = tokenizer.decode(token for token in tokens if token not in tokenizer.stop)
            line, _, _ = text.partition("\n")
            lines.append(line.strip())
    return lines


def describe_exam(right: dict[str, float]) -> str:
    """Return the scores of take_exam in a line; "" if there was no exam."""
    shares = (f"{name.replace('_', ' ')} {share:.1%}" for name, share in right.items())
    return f"{', '.join(shares)}\n" if right else ""


# ------------------------------------------------------------------------------------ the command


def load_split(
    asked: Evaluation, metadata: dict, seq_len: int, process: Process
) -> tuple[Llama, World]:
    """Return a model with its weights and adapter, if any, split as the flags ask."""
    config, directory = metadata["model"], metadata["directory"]
    adapter = asked.adapter and find_adapter(asked.adapter, directory)
    lora = open_adapter(adapter, config)[0] if adapter else LoRA(targets=())
    bits_in_training = bits_of_base(adapter) if adapter else 16
    bits = min(asked.base_bits, bits_in_training)
    techniques = [nf4.TECHNIQUE] if bits == 4 else []
    bfloat16 = process.minimum(has_bfloat16(process.device))
    parallel = decided(asked.parallel, dtype=torch.bfloat16 if bfloat16 else torch.float32)
    data_ranks = max(1, process.size // (parallel.tp * parallel.pp * parallel.cp))
    with torch.device("meta"):
        model = Llama(config)
    sizes = asked.microbatch * data_ranks, seq_len, asked.microbatch
    document = seq_len if asked.chat else 0
    requested = requested_work(parallel, model, process, *sizes)
    check_parallel(requested, asked.parallel.shard, process)
    check_work(requested, *techniques)
    with torch.device("meta"):
        if adapter or bits == 4:
            add_adapters(model, lora, bits)
    model.requires_grad_(False)
    work = requested_work(parallel, model, process, *sizes, document=document)
    work, _ = choose_work(work, asked.parallel.shard, process)
    check_work(work, *techniques)
    world = with_mesh(process, work.parallel)
    parallelize(model, world, partial(load_weights, directory, adapter=adapter))
    return model.eval(), world


def main() -> None:
    asked = parse(Evaluation)
    asked.check()
    process = init_distributed()
    process.check_same_flags(values_of(asked))
    metadata, tokenizer = find_model(
        asked.checkpoint, asked.tokenizer, process, asked.chat_template
    )
    longest = metadata["model"].max_seq_len
    flags = metadata.get("flags", {})  # the run's, to evaluate as it did
    seq_len = asked.seq_len or flags.get("seq_len", min(2048, longest))
    exam = asked.exam and Exam(asked.exam, tokenizer, longest, asked.max_new_tokens, asked.chat)
    process.check_same("the exams", exam and exam.questions)
    dataset = None
    if asked.data:
        reading = Reading(asked.text_field, asked.skip_bad)
        open_plain_text = partial(open_text, document_mask=flags.get("document_mask", False))
        open_data = open_chats if asked.chat else open_plain_text
        read = partial(open_data, asked.data, tokenizer, seq_len, reading)
        dataset = process.local_rank_zero_first(read)
        process.check_same("the data", dataset.checksum())
        list_left_out(reading, "evaluated")
    model, world = load_split(asked, metadata, seq_len, process)
    if dataset:
        totals = evaluate(model, dataset, len(dataset), asked.microbatch, world)
        losses = f"loss {totals.mean_loss:.4f}, {totals.bits_per_byte:.4f} bits/byte"
        print_rank_zero(f"{' '.join(asked.data)}: {losses}, {totals.tokens:,} tokens")
    if exam:
        scores, details = take_exam(model, exam, asked.microbatch, world)
        n_questions = f"{len(details):,} questions"
        print_rank_zero(f"{asked.exam}: {n_questions}: {describe_exam(scores)}", end="")
        if asked.details and process.rank == 0:
            write_atomically(asked.details, "".join(f"{json.dumps(row)}\n" for row in details))


if __name__ == "__main__":
    run(main)
