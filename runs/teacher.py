"""The teacher of distill.py: what it may be, and how it is loaded beside the student."""

from functools import partial

import torch

from config import ParallelConfig
from files.directories import find_checkpoint, read_config
from files.loading import load_weights
from lora import LoRA, add_adapters
from model import Llama, LlamaConfig
from parallel import World, parallelize, used_techniques
from plumbing.messages import UserError
from plumbing.processes import Process
from runs import rules
from techniques import nf4
from text.tokenizer import Tokenizer, load_tokenizer


def find_teacher(run, process: Process) -> tuple[dict, Llama]:
    """Return what read_config says of --teacher, and the model on meta, frozen."""
    directory = process.broadcast_from_rank_zero(partial(find_checkpoint, run.teacher))
    metadata = read_config(directory)
    with torch.device("meta"):
        model = metadata["model"].build()
        no_adapters = LoRA(targets=())  # but matrices in 4 bits, if they are asked for
        add_adapters(model, no_adapters, run.teacher_bits)
    return metadata, model


def check_teacher(
    run, parallel: ParallelConfig, student: LlamaConfig, tokenizer: Tokenizer, process: Process
) -> None:
    """Raise UserError for a teacher that the student cannot be compared with, or that cannot be
    split as the student is."""
    metadata, model = find_teacher(run, process)
    teacher = f"--teacher {metadata['directory']}"
    if not metadata["tokenizer"]:
        raise UserError(f"{teacher} has no tokenizer to compare: put the student's beside it")
    load = partial(load_tokenizer, metadata["tokenizer"])
    check_vocabulary(process.local_rank_zero_first(load), tokenizer, teacher)
    rows = metadata["model"].vocab_size
    if rows != student.vocab_size:
        problem = f"its output has {rows} rows, the student's {student.vocab_size}"
        raise UserError(f"{teacher} has the same tokens, but {problem}: take another teacher")
    if run.top_k >= rows:
        raise UserError(f"--top-k {run.top_k} is all of {rows} tokens: leave it out")
    if any(technique.gain != 1 for technique in used_techniques(parallel)):
        raise UserError("products in 8 bits would also be the teacher's: leave them out")
    techniques = [nf4.TECHNIQUE] if run.teacher_bits == 4 else []
    work = rules.work_of(run, parallel, model, process)
    try:
        rules.check_batch(work)
        rules.check_work(work, *techniques)
    except UserError as error:
        raise UserError(f"{teacher}: {error}")


def check_vocabulary(theirs: Tokenizer, ours: Tokenizer, teacher: str) -> None:
    """Raise UserError if an id stands for different tokens."""
    ids = sorted(theirs.pieces.keys() | ours.pieces.keys())
    others = [i for i in ids if theirs.pieces.get(i) != ours.pieces.get(i)]
    if others:
        i = others[0]
        its, own = (t.pieces.get(i, b"nothing").decode(errors="replace") for t in (theirs, ours))
        problem = f"id {i} is {its!r}, and {own!r} of the student"
        raise UserError(
            f"{teacher} has another vocabulary: of {len(ids)} ids {len(others)} differ, {problem}"
        )


def load_teacher(run, world: World) -> Llama:
    """Return the teacher, split over ranks as the student is, with its weights."""
    metadata, model = find_teacher(run, world)
    parallelize(model, world, partial(load_weights, metadata["directory"]))
    return model.eval()
