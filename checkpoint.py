"""Save, resume, import, export and merge checkpoints.

    OUT/step-00000100/          a checkpoint
        config.json             model configuration, tokenizer, step, flags of the run (of a LoRA
                                run it is named run.json)
        tokenizer.model         a copy, if the tokenizer is a file
        weights/, optimizer/    written by torch.distributed.checkpoint (DCP), each rank its shards
        adapter_*               instead of weights/ in a LoRA run: the adapter in PEFT's format
        SHA256SUMS              written last: a checksum of every file; `sha256sum -c` checks them
    OUT/best                    a link to the checkpoint with the lowest validation loss, if kept

    python checkpoint.py import SRC DST                     Meta's or Hugging Face's files -> ours
    python checkpoint.py export SRC DST --format hf         ours -> Hugging Face's files
    python checkpoint.py export SRC DST --format gguf       ours -> DST/model.gguf for llama.cpp
    python checkpoint.py merge SRC ADAPTER DST              a model with an adapter added -> ours

A save writes to a hidden directory and renames it last. A process that is killed during a save
leaves a hidden directory, which the next run removes; earlier checkpoints are not touched.
OUT must be on a disk that all nodes share, because every rank writes there.

A checkpoint can be resumed on any number of ranks with any sharding: DCP's index says where a saved
shard lies in the full tensor, and every rank reads those that overlap with its own. `--init` and
generate.py also accept a model directory of Meta or Hugging Face (files/formats.py).
"""

import plumbing.endings  # first, for Ctrl-C during the imports
import contextlib
import os
import shutil
import sys
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.fsdp import FSDPModule

from files import directories
from files.adapters import (
    gather_adapters,
    is_adapter,
    open_adapter,
    save_adapter,
)
from files.directories import check_tokenizer, find_checkpoint, read_config
from files.loading import load_pretrained as load_pretrained  # for scripts of users
from files.loading import load_weights as load_weights
from files.loading import weights_of
from files.optimizer_state import optimizer_state
from files.published import small_logits
from files.save_checks import (
    check_disk,
    check_finite,
    check_links,
    checkpoint_bytes,
    on_every_rank,
    on_rank_zero,
    why_not_saved,
)
from lora import LoRA, adapter_settings, adapters
from model import Llama, LlamaConfig
from models.family import family_of
from plumbing.devices import use_gpu_in_thread
from plumbing.messages import UserError, print_rank_zero
from plumbing.new_files import remove
from plumbing.parser import Parser
from plumbing.processes import note_checkpoint, run
from plumbing.shards import assign_shard
from text.vocabulary import Tokenizer

# ---------------------------------------------------------------------------------- saving a run


def lock_run(out: Path, resume: bool = False) -> None:
    """Lock OUT until this process ends, and remove what a killed run left half-written. Raises
    UserError for the record of a run that is not to be resumed. Call it on rank 0 only."""
    directories.lock_directory(out)
    for leftover in out.glob(".step-*"):
        remove(leftover, ignore_errors=True)
    if not resume and (out / "metrics.jsonl").exists():
        raise UserError(
            f"{out} already holds the record of a run: --resume goes on in it, or choose "
            f"another --out"
        )
    if resume and not directories.checkpoints(out):
        print(f"warning: nothing to resume in {out}: starting at step 1", file=sys.stderr)


@dataclass(frozen=True)
class Snapshot:
    """What one save writes."""

    step: int
    final: Path  # the checkpoint's directory
    tensors: dict[str, dict[str, Tensor]]  # directory in it -> this rank's shards by name
    factors: dict[str, Tensor]  # of the adapters, whole: on rank 0, empty on others
    is_best: bool

    @property
    def hidden(self) -> Path:
        """The directory that is written, and renamed last."""
        return self.final.with_name(f".{self.final.name}")


class Saver(contextlib.AbstractContextManager):
    """Saves the checkpoints of a run, one at a time, and with --async-save in the background.

    All ranks call every method together. If the model has adapters, only these are saved, and the
    frozen base is named by `facts["init"]`. With --keep above 0 only so many of the newest
    checkpoints are kept, and the best. Creating a Saver raises UserError if a save would fail, so
    that it is known before step 1. labs/resume saves and resumes by hand.

    In the background, `save` copies this rank's tensors to CPU memory and returns; a thread writes
    the files while training goes on. If the thread fails, the next `save` or `wait` raises its
    error. As a context manager, the Saver waits for the last save at the end."""

    def __init__(
        self,
        out: Path,
        model: Llama,
        optimizer: torch.optim.Optimizer,
        tokenizer: Tokenizer,
        flags: dict,  # what the run was asked, which is saved, too
        facts: dict,  # what it has found out and decided
        newest: Path | None = None,  # the checkpoint that it continues
    ):
        self.out, self.model, self.optimizer, self.tokenizer = out, model, optimizer, tokenizer
        self.flags, self.facts = flags, facts
        self.lora = adapter_settings(model)
        self.thread = saving_thread() if flags.get("async_save") else None
        self.pending: Future | None = None  # the save in the background
        self.newest = newest  # from the first save on, what `save` has returned last
        # A group of its own, so that the thread's collectives do not mix with those of training.
        # The timeout is long because a disk may be slow. plumbing/joining.py registers the backend.
        self.group = dist.new_group(backend="one_thread_gloo", timeout=timedelta(days=1))
        # Every save writes small_logits, by which a reader notices a changed model.py
        # (files/published.py). The function remembers its result. So it is called here: in the
        # thread its model would draw random numbers while dropout draws some, too.
        small_logits(family_of(model.config))
        weights = adapters(model) if self.lora else weights_of(model)
        self.size = checkpoint_bytes(weights, optimizer, self.group)
        check_disk(out, self.size, self.group)
        if flags.get("keep_best"):
            check_links(out, self.group)
        if newest:
            note_checkpoint(newest.name)

    def __exit__(self, *_) -> None:
        self.wait()

    def wait(self) -> None:
        """Wait until the save in the background has ended, and raise its error if it failed."""
        pending = self.pending
        self.pending = None
        if pending:
            pending.result()

    def save(self, step: int, best: bool = False) -> Path:
        """Save OUT/step-N, unless the last call did, and return its path; OUT/best links to it from
        then on if it is the `best`. Raises UserError on all ranks if one fails, or if a weight is
        not finite."""
        self.wait()
        final = self.out / f"step-{step:08d}"
        if final == self.newest:  # saved before; an evaluation may have found it to be the best
            self._link_best_and_remove_old(best)
            return final
        check_finite(self.model, step, self.out, self.group)
        self.newest = final
        tensors, factors = self._tensors()
        snapshot = Snapshot(step, final, tensors, factors, best)
        if self.thread:
            for named in tensors.values():
                named.update({name: t.to("cpu", copy=True) for name, t in named.items()})
            self.pending = self.thread.submit(self._write, snapshot)
        else:
            self._write(snapshot)
        return final

    def _tensors(self) -> tuple[dict[str, dict[str, Tensor]], dict[str, Tensor]]:
        """Return the tensors of a Snapshot, and its factors."""
        for module in self.model.modules():  # an evaluation may leave FSDP's weights unsharded
            if isinstance(module, FSDPModule):
                module.reshard()
        tensors = {"optimizer": optimizer_state(self.optimizer)}
        if not self.lora:
            tensors["weights"] = weights_of(self.model)
            return tensors, {}
        # In a pipeline, ranks of the same stage have adapters of the same names.
        names_of_ranks = on_every_rank(lambda: tuple(adapters(self.model)), self.group)
        first_ranks = {}  # of each stage, by its names
        for rank, names in enumerate(names_of_ranks):
            first_ranks.setdefault(names, rank)
        return tensors, gather_adapters(self.model, [*first_ranks.values()], self.group)

    def _write(self, snapshot: Snapshot) -> None:
        started = time.monotonic()
        hidden = snapshot.hidden
        try:
            on_rank_zero(lambda: hidden.mkdir(parents=True, exist_ok=True), self.group)
            for name, named in snapshot.tensors.items():
                dcp.save(named, checkpoint_id=hidden / name, process_group=self.group)
            own_files = hidden.glob(f"*/__{dist.get_rank()}_*")
            digests = {}
            ranks = on_every_rank(lambda: directories.checksums(hidden, own_files), self.group)
            for own_digests in ranks:
                digests |= own_digests
            on_rank_zero(lambda: self._finish(snapshot, digests), self.group)
        except (OSError, CheckpointException) as error:
            if dist.get_rank() == 0:
                shutil.rmtree(hidden, ignore_errors=True)  # frees the space
            raise UserError(why_not_saved(snapshot.final, error))
        seconds = time.monotonic() - started
        saved = f"saved {snapshot.final}: {self.size / 1e9:.3g} GB in {seconds:.1f} s"
        print_rank_zero(saved, file=sys.stderr)
        self._link_best_and_remove_old(snapshot.is_best)

    def _finish(self, snapshot: Snapshot, digests: dict[str, str]) -> None:
        """Write the adapter and the small files, and rename the directory; on rank 0."""
        config = self.model.config
        if self.lora:
            base = Path(self.facts["init"]).resolve()
            save_adapter(snapshot.hidden, self.lora, config, snapshot.factors, str(base))
        metadata = {"step": snapshot.step, "flags": self.flags, "facts": self.facts}
        directories.complete(snapshot.hidden, config, metadata, self.tokenizer, digests)
        os.rename(snapshot.hidden, snapshot.final)
        directories.sync(self.out)
        note_checkpoint(snapshot.final.name)

    def _link_best_and_remove_old(self, best: bool) -> None:
        if dist.get_rank() == 0:
            directories.remove_old(self.newest, self.flags.get("keep", 0), best)


def saving_thread() -> ThreadPoolExecutor:
    """Return a thread that writes checkpoints. It uses this rank's GPU, if there is one."""
    if torch.cuda.is_available():
        return ThreadPoolExecutor(1, "save", use_gpu_in_thread, [torch.cuda.current_device()])
    return ThreadPoolExecutor(1, "save")


# ---------------------------------------------------------------------------------------- loading


def resume(
    directory: Path, model: Llama, optimizer: torch.optim.Optimizer, tokenizer: Tokenizer
) -> int:
    """Load a run's checkpoint into a model and its optimizer; return its step.

    All ranks call it together. Loads the adapter if the model has one, the weights otherwise.
    Raises UserError if the checkpoint belongs to another model, adapter or tokenizer. Does not
    compare the checksums, which newest_undamaged has done."""

    def check_same(what: str, theirs: LlamaConfig | LoRA, ours: LlamaConfig | LoRA) -> None:
        if theirs != ours:
            differences = directories.describe_differences(theirs, ours)
            raise UserError(
                f"{directory} holds another {what} ({differences}): give the flags it was trained "
                f"with, or another --out"
            )

    metadata, lora = read_config(directory), adapter_settings(model)
    check_same("model", metadata["model"], model.config)
    check_tokenizer(metadata, tokenizer)
    if not (directory / "optimizer").is_dir():
        raise UserError(f"{directory} has weights and no optimizer: --init begins a run with it")
    if is_adapter(directory) != bool(lora):
        adapter = "an adapter: resume it without --all-weights, by the script that saved it"
        whole = "all weights: resume it with --all-weights, or by train.py if that saved it"
        raise UserError(f"{directory} holds {adapter if is_adapter(directory) else whole}")
    if lora:
        saved_lora, stored = open_adapter(directory, model.config)
        check_same("adapter", saved_lora, lora)
        with torch.no_grad():
            for name, factor in adapters(model).items():
                assign_shard(factor, stored[name].read())
    else:
        directories.load_tensors(weights_of(model), directory / "weights")
    directories.load_tensors(optimizer_state(optimizer), directory / "optimizer")
    return metadata["step"]


# ---------------------------------------------------------------------------------- the command


def main() -> None:
    from files.conversion import (
        export_weights,
        import_weights,
        merge_adapter,
        tokenizer_of,
    )
    from files.gguf import Q8_0

    parser = Parser(description="Import, export and merge weights.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="import|export|merge")
    importer = commands.add_parser("import", help="a checkpoint of Meta's or Hugging Face's files")
    exporter = commands.add_parser("export", help="files of a checkpoint for other programs")
    merger = commands.add_parser("merge", help="a checkpoint of a model with an adapter added")
    for command in (importer, exporter, merger):
        command.add_argument("source", type=Path, help="a checkpoint, a run, or a model directory")
        if command is merger:
            command.add_argument("adapter", type=Path, help="a LoRA run, or PEFT's files")
        command.add_argument("target", type=Path, help="a directory that does not exist yet")
    importer.add_argument("--tokenizer", help="tokenizer name or file (default: the source's)")
    exporter.add_argument("--format", choices=["hf", "gguf"], required=True,
                          help="files to write: Hugging Face's or llama.cpp's")  # fmt: skip
    exporter.add_argument("--dtype", choices=["float32", "bfloat16", "float16", Q8_0],
                          help="dtype of the weights (default: the source's)")  # fmt: skip
    args = parser.parse_args()
    if args.target.exists():  # before weights are read
        raise UserError(f"{args.target} exists: give the name of a new directory")
    if args.command == "import":
        import_weights(args.source, args.target, args.tokenizer)
    elif args.command == "merge":
        source = find_checkpoint(args.source)
        merge_adapter(source, args.adapter, args.target, tokenizer_of(read_config(source)))
    else:
        dtype = args.dtype and getattr(torch, args.dtype, args.dtype)
        export_weights(args.source, args.target, args.format, dtype)
    print(args.target)


if __name__ == "__main__":
    run(main)
