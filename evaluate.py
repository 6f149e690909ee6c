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
import argparse
import contextlib
import json
import statistics
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from config import RESUMABLE, Work, add_parallel_flags
from costs.search import fits_unsharded
from data import Windows, add_reading_flags, list_left_out, local_batch, open_text, read_ahead
from files.adapters import bits_of_base, open_adapter
from files.directories import find_adapter
from files.loading import load_weights
from generate import add_model_flags, find_model, generate
from lora import LoRA, add_adapters
from model import IGNORE, Llama
from parallel import World, parallelize, unsharded, with_mesh
from plumbing.devices import has_bfloat16, widest_float
from plumbing.messages import UserError, print_rank_zero, with_progress
from plumbing.new_files import write_atomically
from plumbing.parser import Parser, positive_int
from plumbing.processes import Process, init_distributed, run
from runs.records import Totals, described
from runs.rules import check_parallel, check_work, requested_work
from runs.setup import Job, choose_work
from techniques import nf4
from techniques.chunked_loss import cross_entropies
from techniques.context_parallel import share_sequences
from text.batch import Batch
from text.chat import ANSWER_ROOM, SHOWN, open_chats
from text.corpora import Reading
from text.exams import ROOM, Exam
from text.packing import Packed, Rows
from text.tokenizer import Tokenizer


def parse_args() -> argparse.Namespace:
    parser = Parser(description="Score a model: the loss of texts, and exams.")
    # fmt: off
    add_model_flags(parser)
    add_reading_flags(parser)
    add = parser.add_argument
    add("--data", nargs="+", help="text files, directories or token files")
    add("--exam", type=Path, metavar="FILE", help="questions, as JSON lines")
    add("--chat", action="store_true",
        help="the data are conversations, and a question is a user's message")
    add("--seq-len", type=positive_int, help="tokens per sequence (default: the run's, or 2048)")
    add("--microbatch", type=positive_int, default=8, help="sequences computed at a time")
    add("--max-new-tokens", type=positive_int, default=ROOM, help="tokens of a written answer")
    add("--details", type=Path, metavar="FILE",
        help="write each question with the model's answer, as JSON lines")
    split = parser.add_argument_group("how the model is split over ranks")
    add_parallel_flags(split, [*RESUMABLE, "dtype"])  # the others change what is learned
    # fmt: on
    args = parser.parse_args()
    if not args.data and not args.exam:
        raise UserError("nothing to score: give --data, --exam or both")
    before = args.details.read_bytes() if args.details and args.details.exists() else None
    if before is not None and b'"log_likelihoods"' not in before and b'"written"' not in before:
        raise UserError(f"--details {args.details} exists, and has no answers: give another name")
    return args


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
    dataset: Windows | Packed, rows: Sequence[int], microbatch: int, world: World
) -> Iterator[tuple[slice, Batch]]:
    """Yield this rank's batches of some rows, and where they stand among the padded rows.

    Ranks share the rows. Every rank has the same number of batches, as a split model requires: the
    last batch is padded with rows without targets."""
    shares = world.data_size
    padded_rows = [*rows, *[None] * (-len(rows) % shares)]
    starts = range(world.data_rank, len(padded_rows), microbatch * shares)
    for start in until_signal(with_progress(starts, "evaluating")):
        mine = slice(start, start + microbatch * shares, shares)
        yield mine, batch_of(dataset, padded_rows[mine], world)


def batch_of(dataset: Windows | Packed, rows: Sequence[int | None], world: World) -> Batch:
    """Return this rank's tokens of some rows, on its device."""
    if isinstance(dataset, Rows):
        dataset.multiple = 2 * world.parallel.cp * world.parallel.tp  # ranks share a row's tokens
    return share_sequences(dataset.batch(rows), world).to(world.device)


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
    losses = iter(row_sums(model, exam.choices, rows, microbatch, world)[:, 0].tolist())
    stop, answers = exam.tokenizer.stop, []
    for start in until_signal(range(0, len(exam.prompts), microbatch)):
        batch = exam.prompts[start : start + microbatch]
        answers += generate(model, batch, exam.room, temperature=0, stop=stop)
    texts = iter(exam.tokenizer.decode(t for t in tokens if t not in stop) for tokens in answers)
    details, marks = [], defaultdict(list)
    for question in exam.questions:
        answer = question["answer"]
        if choices := question.get("choices"):
            scores = [-next(losses) for _ in choices]
            normalized = [score / max(1, len(choice)) for score, choice in zip(scores, choices)]
            marks["exam_accuracy"].append(scores.index(max(scores)) == answer)
            marks["exam_normalized"].append(normalized.index(max(normalized)) == answer)
            details.append(question | {"log_likelihoods": scores})
        else:
            line = next(texts).partition("\n")[0].strip()
            marks["exam_exact"].append(line == answer.strip())
            details.append(question | {"written": line})
    return {name: sum(each) / len(each) for name, each in marks.items()}, details


def describe_exam(right: dict[str, float]) -> str:
    """Return the scores of take_exam in a line; "" if there was no exam."""
    shares = (f"{name.replace('_', ' ')} {share:.1%}" for name, share in right.items())
    return f"{', '.join(shares)}\n" if right else ""


# ------------------------------------------------------------------------- while a run trains


@dataclass
class Prediction:
    """The task of a run says what a step trains on and how the model is evaluated. This one is to
    predict the next token; those of preferences.py and rewards.py are derived from it.

    sample_text(step) returns text to show at evaluations; all ranks call it."""

    args: argparse.Namespace
    job: Job
    world: World
    work: Work
    sample_text: Callable[[int], str]
    before_step = "data"  # the name that `bench.py step` gives to the time before a step

    @cached_property
    def fits(self) -> bool:
        """Return whether a rank can hold all weights while it generates, gathered only once."""
        return fits_unsharded(self.work, self.world)

    def begin(self) -> None:
        """Compute what the task needs of the model as it was before this training.

        The loop calls it after the optimizer is made. A forward without a backward leaves FSDP's
        weights unsharded; an optimizer made afterwards would hold those, and not the shards."""

    def batches(self, steps: Iterable[int]) -> Iterator[Batch]:
        """Yield what this rank trains on in each of the steps."""
        read = partial(local_batch, self.args, self.world, self.job.train_set)
        return read_ahead(read, steps, self.world.device)

    def measures(self, totals: Totals) -> dict[str, float]:
        """Return by name what is recorded of the step or evaluation of `totals` beside its loss."""
        return {"bits_per_byte": totals.bits_per_byte}

    def evaluate(self) -> Totals:
        limit, microbatch = self.args.eval_windows, self.args.microbatch
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
                scores = take_exam(model, exam, self.args.microbatch, world)[0] if exam else {}
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
    lines, scores = [], []
    for (prompt, truth), answer in zip(examples, answers):
        if len(scores) < SHOWN:
            question = "" if step else tokenizer.decode(prompt)
            lines.append(f"{question}--- {speaker}: {tokenizer.decode(answer)}")
            lines.append(f"--- true answer: {truth}")
        ids, true_ids = [token for token in answer if token not in stop], tokenizer.encode(truth)
        n_common = (Counter(ids) & Counter(true_ids)).total()
        overlap = 2 * n_common / max(1, len(ids) + len(true_ids))
        scores.append((len(ids) < len(answer), len(ids), len(true_ids), overlap))
    ended, length, true_length, overlap = map(statistics.mean, zip(*scores))
    score = f"{ended:.0%} end, {length:.1f} tokens (true ones {true_length:.1f}), {overlap:.0%}"
    return "\n".join([*lines, f"--- {speaker}: of {len(scores)} answers {score} in common", "---"])


# ------------------------------------------------------------------------------------ the command


def load_split(args: argparse.Namespace, metadata: dict, process: Process) -> tuple[Llama, World]:
    """Return a model with its weights and adapter, if any, split as the flags ask."""
    config, adapter = metadata["model"], args.adapter
    lora = open_adapter(adapter, config)[0] if adapter else LoRA(targets=())
    bits_in_training = bits_of_base(adapter) if adapter else 16
    bits = min(args.base_bits, bits_in_training)
    techniques = [nf4.TECHNIQUE] if bits == 4 else []
    with torch.device("meta"):
        model = Llama(config)
    bfloat16 = process.minimum(has_bfloat16(process.device))
    args.dtype = args.dtype or ("bfloat16" if bfloat16 else "float32")
    args.batch = args.microbatch * max(1, process.size // (args.tp * args.pp * args.cp))
    requested = requested_work(args, model, process)
    check_parallel(requested, args.shard, process)
    check_work(requested, *techniques)
    with torch.device("meta"):
        if adapter or bits == 4:
            add_adapters(model, lora, bits)
    model.requires_grad_(False)
    work, _ = choose_work(args, model, args.chat, process)
    check_work(work, *techniques)
    world = with_mesh(process, work.parallel)
    parallelize(model, world, partial(load_weights, metadata["directory"], adapter=adapter))
    return model.eval(), world


def main() -> None:
    args = parse_args()
    process = init_distributed()
    process.check_same_flags(vars(args))
    metadata, tokenizer = find_model(args.checkpoint, args.tokenizer, process, args.chat_template)
    args.adapter = args.adapter and find_adapter(args.adapter, metadata["directory"])
    longest = metadata["model"].max_seq_len
    flags = metadata.get("flags", {})  # the run's, to evaluate as it did
    args.seq_len = args.seq_len or flags.get("seq_len", min(2048, longest))
    exam = args.exam and Exam(args.exam, tokenizer, longest, args.max_new_tokens, args.chat)
    process.check_same("the exams", exam and exam.questions)
    dataset = None
    if args.data:
        reading = Reading(args.text_field, args.skip_bad)
        open_plain_text = partial(open_text, document_mask=flags.get("document_mask", False))
        open_data = open_chats if args.chat else open_plain_text
        read = partial(open_data, args.data, tokenizer, args.seq_len, reading)
        dataset = process.local_rank_zero_first(read)
        process.check_same("the data", dataset.checksum())
        list_left_out(reading, "evaluated")
    model, world = load_split(args, metadata, process)
    if dataset:
        totals = evaluate(model, dataset, len(dataset), args.microbatch, world)
        losses = f"loss {totals.mean_loss:.4f}, {totals.bits_per_byte:.4f} bits/byte"
        print_rank_zero(f"{' '.join(args.data)}: {losses}, {totals.tokens:,} tokens")
    if exam:
        scores, details = take_exam(model, exam, args.microbatch, world)
        print_rank_zero(f"{args.exam}: {len(details):,} questions: {describe_exam(scores)}", end="")
        if args.details and process.rank == 0:
            write_atomically(args.details, "".join(f"{json.dumps(row)}\n" for row in details))


if __name__ == "__main__":
    run(main)
