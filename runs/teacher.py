"""The teacher of distill.py: what it may be, how it is loaded beside the student, and compared."""

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from config import ParallelConfig
from files.directories import digest_of_weights, find_checkpoint, read_config
from files.loading import load_weights
from lora import LoRA, add_adapters
from model import Llama, LlamaConfig
from parallel import World, parallelize, used_techniques
from plumbing.messages import UserError, print_rank_zero
from plumbing.processes import Process
from plumbing.shards import to_local
from runs import rules
from runs.each_target import from_logits, hidden_states
from runs.setup import Job
from techniques import nf4
from techniques.divergence import likeliest, shares_of
from text.batch import Batch
from text.tokenizer import Tokenizer, load_tokenizer


def find_teacher(
    run, parallel: ParallelConfig, student: LlamaConfig, tokenizer: Tokenizer, process: Process
) -> tuple[Llama, dict[str, str]]:
    """Return the teacher on meta, frozen; and its directory, of a run the newest checkpoint, as
    `teacher`, with its `teacher_digest`. Raise UserError for one that the student cannot be
    compared with, or that cannot be split as the student is."""
    directory = process.broadcast_from_rank_zero(partial(find_checkpoint, run.teacher))
    metadata = read_config(directory)
    with torch.device("meta"):
        model = metadata["model"].build()
        # Without targets it adds no adapter, but stores matrices in 4 bits, if that is asked for.
        add_adapters(model, LoRA(targets=()), run.teacher_bits)
    teacher = f"--teacher {directory}"
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
    digest = process.broadcast_from_rank_zero(partial(digest_of_weights, directory))
    return model, {"teacher": str(directory), "teacher_digest": digest}


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


class Teacher:
    """A frozen model, split over ranks as the student is, and what its forward leaves for the loss:
    the last hidden state of each token, [B, T, D], or with `top_k` the ids of the likeliest tokens,
    their log p and that of all others together, [B, T, 2 top_k + 1]."""

    def __init__(self, model: Llama, divergence: Callable, top_k: int):
        self.model = model
        self.divergence = divergence  # forward_kl or reverse_kl
        self.top_k = top_k
        model.loss = self.of_likeliest if top_k else hidden_states

    @torch.no_grad()
    def forward(self, batch: Batch, microbatch: int) -> dict[str, Tensor]:
        """Return what is left of a batch, by name. In a pipeline the last stage alone has it, and
        needs it."""
        left = []
        for part in batch.microbatches(microbatch):
            left.append(self.model(*part.inputs, documents=part.documents))
        return {"teacher": torch.cat(left)} if left[0].ndim else {}

    def of_likeliest(self, hidden: Tensor, weight: Tensor, targets, vocabulary) -> Tensor:
        """As the model's `loss`: return ids and log p. float32 holds every id."""

        def of_chunk(logits: Tensor) -> Tensor:
            _, ids = likeliest(logits, self.top_k, vocabulary)
            return torch.cat([ids.to(logits.dtype), shares_of(logits, ids, vocabulary)], 1)

        return from_logits(of_chunk, [hidden], [weight])

    def compare(self, left: Tensor, hidden: Tensor, weight: Tensor, vocabulary) -> Tensor:
        """Return the divergence of each token, and 1 where both have the same likeliest token, else
        0: [B, T, 2]. `left` is what `forward` has left of it; `hidden` and `weight` are the
        student's."""
        k = self.top_k

        def of_logits(student: Tensor, teacher: Tensor) -> Tensor:
            _, best = likeliest(teacher, 1, vocabulary)
            return with_agreement(self.divergence(student, teacher, vocabulary), student, best)

        def of_shares(student: Tensor, left: Tensor) -> Tensor:
            ids, log_p = left[:, :k].long(), left[:, k:]
            log_q = shares_of(student, ids, vocabulary)
            loss = (log_p.exp() * (log_p - log_q)).sum(1)
            return with_agreement(loss, student, ids[:, :1])

        def with_agreement(loss: Tensor, student: Tensor, best: Tensor) -> Tensor:
            _, own = likeliest(student.detach(), 1, vocabulary)
            return torch.stack([loss, (own == best)[:, 0].to(loss.dtype)], 1)

        if k:
            return from_logits(of_shares, [hidden], [weight], left)
        its_weight = to_local(self.model.output.weight)  # FSDP keeps it gathered
        return from_logits(of_logits, [hidden, left], [weight, its_weight])


def load_teacher(job: Job, world: World) -> Llama:
    """Return the frozen model that find_teacher has found, split over ranks as the student is."""
    model, directory = copy.deepcopy(job.teacher), Path(job.digests["teacher"])
    parallelize(model, world, partial(load_weights, directory))
    held = sum(to_local(parameter).nbytes for parameter in model.parameters())
    print_rank_zero(
        f"teacher: {directory}, of which a rank holds {held / 1e9:.3g} GB; what its "
        f"forward sends is in no figure above"
    )
    return model.eval()
