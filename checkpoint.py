"""Save, resume, import, export and merge checkpoints.

    OUT/step-00000100/          a checkpoint
        config.json             model configuration, tokenizer, step, flags of the run; run.json in
                                a LoRA run
        tokenizer.model         a copy, if the tokenizer is a file
        weights/, optimizer/    written by torch.distributed.checkpoint (DCP), each rank its shards
        adapter_*               instead of weights/ in a LoRA run: the adapter in PEFT's format
        SHA256SUMS              written last: a checksum of every file; `sha256sum -c` checks them
    OUT/best                    a link to the checkpoint with the lowest validation loss, if kept

    python checkpoint.py import SRC DST                     Meta's or Hugging Face's files -> ours
    python checkpoint.py export SRC DST --format hf|meta    ours -> Meta's or Hugging Face's files
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
import errno
import math
import os
import shutil
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, replace
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.fsdp import FSDPModule

from files import directories, formats
from files.adapters import (
    gather_adapters,
    is_adapter,
    merged_weights,
    open_adapter,
    save_adapter,
)
from files.directories import check_tokenizer, find_checkpoint, open_weights, read_config
from files.gguf import Q8_0, DType, save_gguf
from files.loading import _weights
from files.loading import load_pretrained as load_pretrained  # for scripts of users
from files.loading import load_weights as load_weights
from files.optimizer_state import optimizer_state
from files.published import small_logits
from files.safetensors import Weights, with_progress_of
from lora import LoRA, adapter_settings, adapters
from model import Llama, LlamaConfig
from plumbing.devices import use_gpu_in_thread
from plumbing.messages import UserError, print_rank_zero
from plumbing.new_files import remove
from plumbing.parser import Parser
from plumbing.processes import note_checkpoint, run
from plumbing.shards import assign_shard, to_local
from text.tokenizer import OtherKind, Tokenizer, load_tokenizer

# ---------------------------------------------------------------------------------- saving a run


def lock_run(out: Path, resume: bool = False) -> Path | None:
    """Lock OUT until this process ends, and return its newest checkpoint, if there is one. Also
    remove what a killed run left half-written. Call it on rank 0 only."""
    directories.lock_directory(out)
    for leftover in out.glob(".step-*"):
        remove(leftover, ignore_errors=True)
    newest = (directories.checkpoints(out) or [None])[-1]
    if not resume and (out / "metrics.jsonl").exists():
        raise UserError(
            f"{out} already holds the record of a run: --resume goes on in it, or choose "
            f"another --out"
        )
    if resume and not newest:
        print(f"warning: nothing to resume in {out}: starting at step 1", file=sys.stderr)
    return newest


class Saver(contextlib.AbstractContextManager):
    """Saves the checkpoints of a run, one at a time, and with --async-save in the background.

    All ranks call every method together. If the model has adapters, only these are saved, and the
    frozen base is named by `flags["init"]`. With --keep above 0 only so many of the newest
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
        flags: dict,  # of the run, which are saved, too
    ):
        self.out, self.model, self.optimizer, self.tokenizer = out, model, optimizer, tokenizer
        self.flags = flags
        self.lora = adapter_settings(model)
        gpu = [torch.cuda.current_device()] if torch.cuda.is_available() else []
        begin = use_gpu_in_thread if gpu else None
        self.thread = ThreadPoolExecutor(1, "save", begin, gpu) if flags.get("async_save") else None
        self.pending: Future | None = None  # the save in the background
        self.newest: Path | None = None  # what `save` has returned last
        # A group of its own, so that the thread's collectives do not mix with those of training.
        # The timeout is long because a disk may be slow.
        self.group = dist.new_group(backend="one_thread_gloo", timeout=timedelta(days=1))
        # Computed now: in the thread, its model would draw random numbers that dropout draws, too.
        small_logits()
        self._check()
        if flags.get("keep_best"):  # try a link: better refused now than at the first best loss
            rank = dist.get_rank()
            self._on_every_rank(lambda: rank == 0 and directories.new_link(out, "best").unlink())
        if directories.checkpoints(out):
            note_checkpoint(directories.checkpoints(out)[-1].name)

    def __exit__(self, *_) -> None:
        self.wait()

    def _check(self) -> None:
        """Raise UserError if the optimizer has state that cannot be saved, if a rank does not find
        OUT, or if OUT has too little space for a checkpoint."""
        is_new = not self.optimizer.state
        weights = adapters(self.model) if self.lora else _weights(self.model)
        state = optimizer_state(self.optimizer)
        if is_new:
            self.optimizer.state.clear()  # as it was: AdamW counts its steps there
        if not state:
            kind = type(self.optimizer).__name__
            print_rank_zero(f"warning: checkpoints hold no state of {kind}", file=sys.stderr)
        sizes = {name: t.nbytes for name, t in (weights | state).items()}
        all_sizes = {}  # in bytes, of the tensors of all ranks
        for of_rank in self._on_every_rank(lambda: sizes):
            all_sizes |= of_rank
        self.size = sum(all_sizes.values())
        self._check_disk()

    def _check_disk(self) -> None:
        """Raise UserError if a rank does not find OUT, or if OUT lacks space for a checkpoint."""
        rank, probe = dist.get_rank(), self.out / ".step-probe"
        try:
            self._on_every_rank(lambda: rank == 0 and probe.mkdir(parents=True, exist_ok=True))
            self._on_every_rank(lambda: (probe / str(rank)).touch())
            disk = shutil.disk_usage(self.out)
        except FileNotFoundError:
            raise UserError(f"--out {self.out} must be on a disk that all nodes share")
        finally:
            if rank == 0:
                shutil.rmtree(probe, ignore_errors=True)
        if disk.free < self.size and disk.total:  # some network disks report zeros
            raise UserError(
                f"a checkpoint takes {self.size / 1e9:.3g} GB, and {disk.free / 1e9:.3g} GB are "
                f"free in --out {self.out}: make room, or choose another --out"
            )

    def save(self, step: int, best: bool = False) -> Path:
        """Save OUT/step-N, unless the last call did, and return its path; OUT/best links to it from
        then on if it is the `best`. Raises UserError on all ranks if one fails, or if a weight is
        not finite."""
        self.wait()
        final = self.out / f"step-{step:08d}"
        if final == self.newest:  # an evaluation has found it to be the best
            self._remove_old(best)
            return final
        self._check_finite(step)
        self.newest = final
        for module in self.model.modules():  # an evaluation may leave FSDP's weights unsharded
            if isinstance(module, FSDPModule):
                module.reshard()
        tensors, factors = {"optimizer": optimizer_state(self.optimizer)}, {}
        if self.lora:
            # In a pipeline, ranks of the same stage have adapters of the same names.
            of_ranks = self._on_every_rank(lambda: tuple(adapters(self.model)))
            first_ranks = [of_ranks.index(of_stage) for of_stage in dict.fromkeys(of_ranks)]
            factors = gather_adapters(self.model, first_ranks, self.group)
        else:
            tensors["weights"] = _weights(self.model)
        if self.thread:
            for named in tensors.values():
                named.update({name: t.to("cpu", copy=True) for name, t in named.items()})
            self.pending = self.thread.submit(self._write, final, step, tensors, factors, best)
        else:
            self._write(final, step, tensors, factors, best)
        return final

    def _check_finite(self, step: int) -> None:
        """Raise UserError if a weight is not finite, or so large that the norm is not: nobody could
        go on from it, and --keep would remove what is better."""
        trained = [to_local(p.detach()) for p in self.model.parameters() if p.requires_grad]
        norm = torch.nn.utils.get_total_norm(trained).item()
        if not math.isfinite(sum(self._on_every_rank(lambda: norm))):
            last = (directories.checkpoints(self.out) or ["none"])[-1]
            raise UserError(
                f"step {step}: the weights are not finite any more, and are not saved. The last "
                f"checkpoint is {last}: --resume goes on from it, with a lower --lr"
            )

    def wait(self) -> None:
        """Wait until the save in the background has ended, and raise its error if it failed."""
        pending, self.pending = self.pending, None
        if pending:
            pending.result()

    def _write(
        self, final: Path, step: int, tensors: dict[str, dict], factors: dict, best: bool
    ) -> None:
        rank, temporary = dist.get_rank(), final.with_name(f".{final.name}")
        started = time.monotonic()
        try:
            self._on_every_rank(lambda: rank == 0 and temporary.mkdir(parents=True, exist_ok=True))
            for name, named in tensors.items():
                dcp.save(named, checkpoint_id=temporary / name, process_group=self.group)
            own_files = temporary.glob(f"*/__{rank}_*")
            digests = {}
            for of_rank in self._on_every_rank(lambda: directories.checksums(temporary, own_files)):
                digests |= of_rank
            self._on_every_rank(lambda: rank == 0 and self._finish(final, step, factors, digests))
        except (OSError, CheckpointException) as error:
            if rank == 0:
                shutil.rmtree(temporary, ignore_errors=True)  # frees the space
            reason, last = directories.failure_reason(error), directories.checkpoints(self.out)
            if os.strerror(errno.EIO) not in reason:
                free = shutil.disk_usage(self.out).free / 1e9
                reason = f"{reason}; {free:,.1f} GB are free there: make room"
            rest = f"The last checkpoint is {last[-1]}: --resume goes on from it" if last else ""
            raise UserError(f"cannot save {final}: {reason}. {rest or 'There is no checkpoint'}")
        saved = f"saved {final}: {self.size / 1e9:.3g} GB in {time.monotonic() - started:.1f} s"
        print_rank_zero(saved, file=sys.stderr)
        self._remove_old(best)

    def _remove_old(self, best: bool) -> None:
        if dist.get_rank() == 0:
            directories.remove_old(self.newest, self.flags.get("keep", 0), best)

    def _on_every_rank(self, work: Callable) -> list:
        """Return work()'s results on all ranks, when all are done; raise on all what one raises."""
        results = [None] * dist.get_world_size()
        try:
            mine = work()
        except Exception as error:
            mine = error
        dist.all_gather_object(results, mine, self.group)
        for result in results:
            if isinstance(result, Exception):
                raise result
        return results

    def _finish(self, final: Path, step: int, factors: dict, digests: dict[str, str]) -> None:
        """Write the adapter and the small files, and rename the directory; on rank 0."""
        temporary = final.with_name(f".{final.name}")
        config = self.model.config
        if self.lora:
            base = Path(self.flags["init"]).resolve()
            save_adapter(temporary, self.lora, config, factors, str(base))
        metadata = {"model": asdict(config), "step": step, "flags": self.flags}
        directories.complete(temporary, metadata, self.tokenizer, digests)
        os.rename(temporary, final)
        directories.sync(self.out)
        note_checkpoint(final.name)


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
    if not lora:
        directories.load_tensors(_weights(model), directory / "weights")
    directories.load_tensors(optimizer_state(optimizer), directory / "optimizer")
    return metadata["step"]


# ---------------------------------------------------------------------- import, export and merge


def import_weights(source: Path, target: Path, tokenizer: str | None) -> None:
    """Write a checkpoint at `target` with the source's weights, in their dtype."""
    source = find_checkpoint(source)
    config, stored = open_weights(source)
    metadata = read_config(source)
    loaded = load_tokenizer(tokenizer) if tokenizer else _tokenizer_of(metadata)
    if loaded:
        check_tokenizer(metadata, loaded)
    write_checkpoint(target, config, stored, loaded, init=str(source.resolve()))


def merge(base: Path, adapter: Path, target: Path, tokenizer: Tokenizer | None) -> None:
    """Write a checkpoint at `target` of a model with an adapter, or that of a run, added."""
    adapter = directories.find_adapter(adapter, base)
    config, stored = open_weights(base)
    merged = merged_weights(stored, adapter, config)
    flags = dict(init=str(base.resolve()), adapter=adapter.name)
    write_checkpoint(target, config, merged, tokenizer, **flags)


def write_checkpoint(
    target: Path, config: LlamaConfig, stored: Weights, tokenizer: Tokenizer | None, **flags
) -> None:
    """Write a checkpoint of step 0 without an optimizer from one process, matrix by matrix."""
    stored = with_progress_of(stored, f"writing {target}")
    with directories.new_directory(target) as temporary:
        directories.save_stored_tensors(stored, temporary / "weights")
        digests = directories.checksums(temporary, (temporary / "weights").glob("__*"))
        metadata = {"model": asdict(config), "step": 0, "flags": flags}
        directories.complete(temporary, metadata, tokenizer, digests)


def export_weights(source: Path, target: Path, format: str, dtype: DType | None) -> None:
    """Write a directory in the format of Hugging Face (`hf`), Meta (`meta`) or llama.cpp (`gguf`).
    Weights keep their dtype if `dtype` is None. Raises UserError for a model that other programs
    would load as another one."""
    source = find_checkpoint(source)
    config, stored = open_weights(source)
    formats.check_is_published(config, stored)
    if dtype == Q8_0 and format != "gguf":
        raise UserError(f"--dtype {Q8_0} is of --format gguf alone: give another one")
    if dtype and format != "gguf":  # which keeps norms in float32
        stored = {name: weight.to(dtype) for name, weight in stored.items()}
    stored = with_progress_of(stored, f"writing {target}")
    tokenizer = _tokenizer_of(read_config(source))
    if format == "gguf" and not tokenizer:
        raise UserError(f"{source} has no tokenizer: import it with --tokenizer FILE, then export")
    with directories.new_directory(target) as temporary:
        if format == "gguf":
            save_gguf(temporary / "model.gguf", config, stored, tokenizer, dtype)
            fields = (*formats.HF_FIELDS, "rope_scaling", "head_dim", "qk_norm", "qkv_bias")
            read_back = LlamaConfig(**{name: getattr(config, name) for name in fields})
        elif format == "meta":  # its files have no max_seq_len
            formats.save_meta(temporary, config, stored)
            read_back = replace(open_weights(temporary)[0], max_seq_len=config.max_seq_len)
        else:
            formats.save_hf(temporary, config, stored, tokenizer)
            read_back, _ = open_weights(temporary)  # also compares names and shapes with model.py's
        if tokenizer and format == "meta":
            tokenizer.save(temporary)
        if read_back != config:
            raise UserError(
                f"--format {format} cannot hold the model in {source}: it would be read back with "
                f"{directories.describe_differences(read_back, config)}"
            )
        directories.sync(*temporary.iterdir(), temporary)


def _tokenizer_of(metadata: dict) -> Tokenizer | None:
    """Return the tokenizer that read_config has found, or None. Prints a warning if it cannot be
    read, such as Llama 2's without the package for it. Raises UserError if it is damaged."""
    try:
        tokenizer = metadata["tokenizer"] and load_tokenizer(metadata["tokenizer"])
    except OtherKind as error:
        print(f"warning: without a tokenizer, as {error}", file=sys.stderr)
        return None
    if tokenizer:
        check_tokenizer(metadata, tokenizer)
    return tokenizer


def main() -> None:
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
    exporter.add_argument("--format", choices=["hf", "meta", "gguf"], required=True,
                          help="files to write: Hugging Face's, Meta's or llama.cpp's")  # fmt: skip
    exporter.add_argument("--dtype", choices=["float32", "bfloat16", "float16", Q8_0],
                          help="dtype of the weights (default: the source's)")  # fmt: skip
    args = parser.parse_args()
    if args.command == "import":
        import_weights(args.source, args.target, args.tokenizer)
    elif args.command == "merge":
        source = find_checkpoint(args.source)
        merge(source, args.adapter, args.target, _tokenizer_of(read_config(source)))
    else:
        dtype = args.dtype and getattr(torch, args.dtype, args.dtype)
        export_weights(args.source, args.target, args.format, dtype)
    print(args.target)


if __name__ == "__main__":
    run(main)
