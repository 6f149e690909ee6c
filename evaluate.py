r"""Score a model: the loss of texts, and exams.

    torchrun evaluate.py out/tiny --data held_out.txt               loss and bits per byte
    torchrun evaluate.py out/tiny --exam questions.jsonl            right answers (text/exams.py)
    torchrun evaluate.py DIR --adapter out/tiny-lora --chat --data chats.jsonl
    torchrun --nproc-per-node 8 evaluate.py DIR --dp fsdp --exam questions.jsonl

DIR is a run, one of its checkpoints, or a model directory of Meta or Hugging Face. Training
evaluates with the same functions: runs/scores.py, which says what the scores of an exam are.
"""

import plumbing.endings  # first, for Ctrl-C during the imports
import json
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from config import MAY_CHANGE, ParallelConfig, decided
from data import list_left_out, open_text
from files.adapters import bits_of_base, open_adapter
from files.directories import find_adapter
from files.loading import find_model, load_weights
from generate import ModelToLoad
from lora import LoRA, add_adapters
from model import Llama
from parallel import World, parallelize, with_mesh
from plumbing.devices import has_bfloat16
from plumbing.flags import flag, other_default, values_of, within
from plumbing.joining import init_distributed
from plumbing.messages import UserError, print_rank_zero
from plumbing.new_files import write_atomically
from plumbing.parser import parse, positive_int
from plumbing.processes import Process, run
from runs.flags import Pretraining
from runs.rules import check_batch, check_parallel, check_work, requested_work
from runs.scores import describe_exam, evaluate, take_exam
from runs.setup import choose_work
from techniques import nf4
from text.chat import open_chats
from text.corpora import Reading
from text.exams import ROOM, Exam

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
    json: Path | None = flag(None, "write each question with the model's answer, as JSON lines",
                             type=Path, metavar="FILE")
    # The other flags of ParallelConfig change what is learned.
    parallel: ParallelConfig = within(ParallelConfig, [*MAY_CHANGE, "dtype"],
                                      "how the model is split over ranks")
    # fmt: on

    def check(self) -> None:
        if not self.data and not self.exam:
            raise UserError("nothing to score: give --data, --exam or both")
        if self.json and not self.exam:
            raise UserError("--json is for the answers of an exam: give --exam, too")
        if self.json and self.json.exists():
            before = self.json.read_bytes()
            if b'"log_likelihoods"' not in before and b'"written"' not in before:
                raise UserError(f"--json {self.json} exists, and has no answers: give another name")


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
    with torch.device("meta"):
        model = config.build()
        if adapter or bits == 4:
            add_adapters(model, lora, bits)
    model.requires_grad_(False)
    document = seq_len if asked.chat else 0
    # Without a batch, the step is a microbatch of each share.
    work = requested_work(
        parallel, model, process, None, seq_len, asked.microbatch, document=document
    )
    check_batch(work)
    check_parallel(work, asked.parallel.shard, process)
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
        print_rank_zero(f"{' '.join(asked.data)}: {losses}, {totals.count:,} tokens")
    if exam:
        scores, details = take_exam(model, exam, asked.microbatch, world)
        told = f"{asked.exam}: {len(details):,} questions: {describe_exam(scores)}"
        print_rank_zero(told, end="")
        if asked.json and process.rank == 0:
            write_atomically(asked.json, "".join(f"{json.dumps(row)}\n" for row in details))


if __name__ == "__main__":
    run(main)
