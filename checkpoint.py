"""Checkpoints: saved whole or not at all, resumed exactly, loaded anywhere.

    OUT/step-00000100/          a checkpoint
        config.json             model shape, tokenizer, step, flags of the run
        tokenizer.model         a copy, where the tokenizer is a file: nothing else is needed
        weights/, optimizer/    every rank wrote its own part (torch.distributed.checkpoint)
        adapter_*               in place of weights/, where an adapter is learnt: PEFT's files
        SHA256SUMS              written last: a checksum of every file, so `sha256sum -c` works

    python checkpoint.py import SRC DST                       a checkpoint from Meta's or HF's files
    python checkpoint.py export SRC DST --format hf|meta      and back: a model that others load
    python checkpoint.py merge SRC ADAPTER DST                a checkpoint with an adapter added

A save writes to a hidden directory first and renames it last. A process that is killed while it
saves leaves a hidden directory, which the next run removes; earlier checkpoints are untouched.
OUT must be on a disk that all nodes share: every rank writes a part.

Which rank wrote what does not matter to who reads it: parts are stored as pieces of whole tensors,
and every rank reads those that overlap with its own. Weights can also be read from directories that
Meta or Hugging Face made (formats.py): `--init` and generate.py take any of the three.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import pickle
import re
import shutil
import socket
import sys
import warnings
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

import formats
from data import SPLIT, Tokenizer, find_tokenizer, load_tokenizer
from formats import Stored
from lora import (
    PEFT_FILES,
    LoRA,
    adapters,
    gather_adapters,
    is_adapter,
    merge_adapter,
    open_adapter,
    save_adapter,
)
from model import Llama, LlamaConfig, UserError
from parallel import Parser, put_shard, run

SUMS = "SHA256SUMS"
ELSE = "When it is removed, --resume goes on from the checkpoint before it"

# ---------------------------------------------------------------------------------- saving a run


def claim(out: Path) -> Path | None:
    """Make OUT this process's own until it ends, and remove what a killed one left half written;
    its newest checkpoint, if there is one.

    For the first rank alone. Two runs in one OUT would remove each other's files."""
    out.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(out / ".lock", os.O_RDWR | os.O_CREAT, 0o644)  # open until we end
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        owner = os.read(descriptor, 200).decode(errors="replace")
        raise UserError(f"{out} is in use by {owner}: wait for it, or give another --out")
    except OSError as error:
        print(f"warning: {out} is not locked: {error.strerror}", file=sys.stderr)
    os.truncate(descriptor, 0)
    os.write(descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode())
    for leftover in out.glob(".step-*"):
        shutil.rmtree(leftover, ignore_errors=True)
    return (checkpoints(out) or [None])[-1]


class Saver:
    """Writes a run's checkpoints, one at a time; in the background, training goes on meanwhile.

    Every rank calls every method. `keep` > 0 leaves that many of the newest. In the background a
    save costs a copy, in the CPU's memory, of what this rank writes, and the time to make it; the
    files are written by a thread, and what fails there is raised by the next `save` or `wait`. As a
    context it waits at its end. With `lora`, the frozen weights are not written, nor sent: what is
    saved is the adapter, as PEFT has them, for the base that the flags' `init` names.
    """

    def __init__(
        self,
        out: Path,
        model: Llama,
        optimizer: torch.optim.Optimizer,
        tokenizer: Tokenizer,
        flags: dict,
        keep: int = 0,
        background: bool = False,
        lora: LoRA | None = None,
    ):
        self.lora = lora
        self.out, self.model, self.optimizer, self.tokenizer = out, model, optimizer, tokenizer
        self.flags, self.keep = flags, keep
        device = [torch.cuda.current_device()] if torch.cuda.is_available() else []
        begin = torch.cuda.set_device if device else None  # a thread starts on the first GPU
        self.thread = ThreadPoolExecutor(1, None, begin, device) if background else None
        self.pending: Future | None = None
        # The thread's collectives must not meet training's; and a disk may be slow.
        self.group = dist.new_group(backend="gloo", timeout=timedelta(days=1))

    def __enter__(self) -> "Saver":
        return self

    def __exit__(self, *_) -> None:
        self.wait()

    def save(self, step: int) -> Path:
        """Write OUT/step-N. UserError, on every rank, where the disk does not take it."""
        self.wait()
        for module in self.model.modules():  # an evaluation leaves gathered what is used at once
            if isinstance(module, FSDPModule):
                module.reshard()
        state = {"optimizer": _share(_moments(self.model, self.optimizer))}
        factors = gather_adapters(self.model) if self.lora else {}
        if not self.lora:
            state["weights"] = _share(_weights(self.model))
        if self.thread:
            for part in state.values():
                part.update({name: tensor.to("cpu", copy=True) for name, tensor in part.items()})
            self.pending = self.thread.submit(self._write, step, state, factors)
        else:
            self._write(step, state, factors)
        return self.out / f"step-{step:08d}"

    def wait(self) -> None:
        """Until the save that is under way has ended."""
        if self.pending:
            pending, self.pending = self.pending, None
            pending.result()

    def _write(
        self, step: int, state: dict[str, dict[str, Tensor]], factors: dict[str, Tensor]
    ) -> None:
        final, temporary = self.out / f"step-{step:08d}", self.out / f".step-{step:08d}"
        first = dist.get_rank() == 0
        try:
            self._gather(lambda: first and _empty(temporary))
            for part, tensors in state.items():
                dcp.save(tensors, checkpoint_id=temporary / part, process_group=self.group)
            own = temporary.glob(f"*/__{dist.get_rank()}_*")
            sums = self._gather(lambda: checksums(temporary, own))
            self._gather(lambda: first and self._publish(step, temporary, final, factors, sums))
        except (OSError, CheckpointException) as error:
            if first:
                shutil.rmtree(temporary, ignore_errors=True)  # to make room
            free = shutil.disk_usage(self.out).free / 1e9
            last = (checkpoints(self.out) or ["none"])[-1]
            raise UserError(
                f"cannot save {final}: {_reason(error)}; {free:,.1f} GB are free there. The last "
                f"checkpoint is {last}: make room, and --resume goes on from it"
            )
        if first and self.keep:
            for old in checkpoints(self.out)[: -self.keep]:
                _remove(old)

    def _gather(self, work: Callable) -> list:
        """What work() gives on every rank; what it raises on one, it raises on all."""
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

    def _publish(
        self, step: int, temporary: Path, final: Path, factors: dict[str, Tensor], sums: list[dict]
    ) -> None:
        """Complete the directory with what makes it a checkpoint, and give it its name."""
        for part in temporary.glob("*/"):
            stored = read_index(part).storage_data.values()
            if missing := {file.relative_path for file in stored} - set(os.listdir(part)):
                raise UserError(f"{part} lacks {missing}: OUT must be on a disk all nodes share")
        config = self.model.config
        if self.lora:
            save_adapter(temporary, self.lora, config, factors, str(self.flags["init"]))
        sums = {name: digest for part in sums for name, digest in part.items()}
        complete(temporary, config, self.tokenizer, step, self.flags, sums)
        os.rename(temporary, final)
        _sync(self.out)


def _weights(model: Llama) -> dict[str, Tensor]:
    """This rank's part of every weight, under its name, sharing its memory."""
    tensors = {n: tensor for n, tensor in model.state_dict().items() if ".lora_" not in n}
    if model.config.tie_embeddings:
        del tensors["output.weight"]
    return tensors


def _moments(model: Llama, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """What the optimizer remembers of every weight, as NAME.exp_avg, sharing its memory.

    A new optimizer gets its memory by this. Settings, such as weight decay, are not part of it:
    they stay those of the flags."""
    state = get_optimizer_state_dict(model, optimizer)["state"]
    return {f"{name}.{key}": value for name, of in state.items() for key, value in of.items()}


def _share(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """What this rank writes: its shards, and of what every rank holds alike every size-th."""
    rank, size = dist.get_rank(), dist.get_world_size()
    names = enumerate(tensors)
    return {n: tensors[n] for i, n in names if isinstance(tensors[n], DTensor) or i % size == rank}


def _empty(directory: Path) -> None:
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True, exist_ok=True)


def _remove(checkpoint: Path) -> None:
    """Hidden first: a checkpoint that is half removed must not look like one. Where a disk keeps
    files that somebody reads, the next run removes the rest."""
    hidden = checkpoint.with_name(f".{checkpoint.name}")
    try:
        os.rename(checkpoint, hidden)
        shutil.rmtree(hidden)
    except OSError as error:
        print(f"warning: {checkpoint} is not removed: {error}", file=sys.stderr)


def _reason(error: OSError | CheckpointException) -> str:
    """Why it failed. Of a full disk torch may say only that a position is unexpected."""
    if isinstance(error, CheckpointException):
        error, _ = next(iter(error.failures.values()))
    if isinstance(error, OSError):
        return f"{error.strerror}: {error.filename}" if error.filename else str(error)
    kind = "" if isinstance(error, UserError) else f"{type(error).__name__}: "
    return kind + " ".join(str(error).split())


def complete(
    directory: Path,
    config: LlamaConfig,
    tokenizer: Tokenizer | None,
    step: int,
    flags: dict,
    sums: dict[str, str],
) -> None:
    """Make a checkpoint of a directory whose weights are written and have these checksums."""
    about = {
        "model": asdict(config),
        "step": step,
        "flags": flags,
        "tokenizer": tokenizer and tokenizer.name,
        "tokenizer_hash": tokenizer and tokenizer.hash,
    }
    if tokenizer and tokenizer.file:
        tokenizer.save(directory / "tokenizer.model")
        about["tokenizer"] = "tokenizer.model"
    (directory / "config.json").write_text(json.dumps(about, indent=1, default=str))
    others = [*directory.glob("*"), *directory.glob("*/.metadata")]
    sums |= checksums(directory, (path for path in others if path.is_file()))
    lines = "".join(f"{digest}  {name}\n" for name, digest in sorted(sums.items()))
    own = hashlib.sha256(lines.encode()).hexdigest()
    (directory / SUMS).write_text(f"{lines}# complete: {own}\n")
    for path in [*directory.glob("*"), directory]:  # torch has synced what is in weights/
        _sync(path)


def _sync(path: Path) -> None:
    """Make the disk hold what was written under this path, before anything relies on it."""
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


# ------------------------------------------------------------------------- what a checkpoint holds


def checksums(directory: Path, paths: Iterable[Path]) -> dict[str, str]:
    """SHA-256 of files, by their names within a directory."""
    sums = {}
    for path in paths:
        digest = hashlib.sha256()
        with open(path, "rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
        sums[str(path.relative_to(directory))] = digest.hexdigest()
    return sums


def verify(directory: Path, *parts: str, alone: bool = False) -> None:
    """Refuse a checkpoint whose files are not what was written; a rank that finds one ends all.

    `parts` begin the names of the files to look at. Ranks share the work on those in weights/ and
    optimizer/, but for one that reads `alone`; the few small files beside them each looks at."""
    path = directory / SUMS
    content = path.read_bytes() if path.exists() else b""
    *lines, last = content.splitlines(keepends=True) or [b""]
    if last != b"# complete: %s\n" % hashlib.sha256(b"".join(lines)).hexdigest().encode():
        raise UserError(f"{directory} is not complete: {SUMS} is missing or damaged. {ELSE}")
    many = dist.is_initialized() and not alone
    rank, size = (dist.get_rank(), dist.get_world_size()) if many else (0, 1)
    files = dict(line.decode().rstrip("\n").split("  ", 1)[::-1] for line in lines)
    names = [name for name in files if name.startswith(parts)]
    small = [name for name in names if "/" not in name]
    for name in small + [name for name in names if "/" in name][rank::size]:
        file = directory / name
        if not file.exists():
            raise UserError(f"{directory} is not complete: {name} is missing. {ELSE}")
        if checksums(directory, [file]) != {name: files[name]}:
            raise UserError(f"{file} is damaged: its checksum is not the one in {SUMS}. {ELSE}")


def read_index(part: Path) -> Metadata:
    """What torch wrote of which tensors in weights/ or optimizer/, and where their pieces are.

    It is a pickle, which could hold any code. Here only what an index of tensors is made of is let
    through; torch, which reads it without such care, must come after."""
    path = part / ".metadata"
    with open(path, "rb") as file:
        try:
            index = _IndexUnpickler(file).load()
            entries = index.state_dict_metadata.values()
        except Exception as error:  # a damaged pickle can raise nearly anything
            raise UserError(f"{path} holds more than an index of tensors: {error}")
    if not all(isinstance(entry, TensorStorageMetadata) for entry in entries):
        raise UserError(f"{path} is an index of more than tensors")
    return index


class _IndexUnpickler(pickle.Unpickler):
    ALLOWED = (
        "Metadata MetadataIndex StorageMeta TensorStorageMetadata TensorProperties "
        "ChunkStorageMetadata _MEM_FORMAT_ENCODING _StorageInfo Size _get_layout PosixPath"
    ).split()

    def find_class(self, module: str, name: str):
        known = name in self.ALLOWED and module.split(".")[0] in ("torch", "pathlib")
        if known or (module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{module}.{name}")


def checkpoints(out: Path) -> list[Path]:
    """Checkpoints of a run, oldest first; what else a user keeps there is left alone."""
    found = [path for path in out.glob("step-*") if re.fullmatch(r"step-\d{8,}", path.name)]
    return sorted(found, key=lambda path: int(path.name.removeprefix("step-")))


def is_own(directory: Path) -> bool:
    """Whether this is, or was, a checkpoint of ours that holds weights."""
    return (directory / "weights").is_dir()


def find_checkpoint(directory: Path) -> Path:
    """Where weights are: a directory of Meta's or Hugging Face's, a checkpoint's own, or the newest
    of a run's."""
    for found in (directory, *checkpoints(directory)[-1:]):
        if is_own(found) or formats.is_meta(found) or formats.is_hf(found):
            return found
        if is_adapter(found):
            base = formats.Json(found / PEFT_FILES[0]).get("base_model_name_or_path") or "its base"
            raise UserError(
                f"{found} is an adapter: generate.py takes it as --adapter, with {base} as the "
                f"model, and python checkpoint.py merge makes a model of both"
            )
    raise UserError(
        f"no checkpoint in '{directory}': give a run's --out or one of its step-N, or a directory "
        f"with params.json (Meta) or config.json (Hugging Face) and weights"
    )


def find_adapter(directory: Path) -> Path:
    """Where an adapter is: a directory with PEFT's files, or a run's newest checkpoint."""
    for found in (directory, *checkpoints(directory)[-1:]):
        if is_adapter(found):
            if (found / SUMS).exists():
                verify(found, "adapter")
            return found
    raise UserError(f"no adapter in '{directory}': give a run of finetune_lora.py, or PEFT's files")


def read_config(directory: Path) -> dict:
    """`model`, a LlamaConfig; `tokenizer`, as load_tokenizer takes it, or None; `directory`; and of
    a checkpoint of ours `tokenizer_hash`, `step` and `flags`."""
    if not is_own(directory) and not (directory / SUMS).exists():
        config, _ = open_weights(directory)
        file = find_tokenizer(directory)
        return {"model": config, "tokenizer": file and str(file), "directory": directory}
    verify(directory, "config.json", "tokenizer.model")
    about = json.loads((directory / "config.json").read_text())
    about |= {"model": LlamaConfig(**about["model"]), "directory": directory}
    if about["tokenizer"] == "tokenizer.model":
        about["tokenizer"] = str(directory / "tokenizer.model")
    return about


def check_tokenizer(about: dict, tokenizer: Tokenizer) -> None:
    """Refuse a tokenizer that gives the same ids another meaning, or has ids the model lacks."""
    where, ids = about["directory"], about["model"].vocab_size
    if about.get("tokenizer_hash") not in (None, tokenizer.hash):
        raise UserError(
            f"{where} was trained with another tokenizer than {tokenizer.name}: "
            f"give --tokenizer {about['tokenizer']}"
        )
    if tokenizer.vocab_size > ids:
        raise UserError(
            f"tokenizer {tokenizer.name} has {tokenizer.vocab_size} tokens, the model in {where} "
            f"{ids}: give the --tokenizer it was trained with"
        )


def differences(theirs: LlamaConfig | LoRA, ours: LlamaConfig | LoRA) -> str:
    """What sets two of a kind apart, as `dim 256, not 512`."""
    pairs = zip(asdict(theirs).items(), asdict(ours).values())
    return ", ".join(f"{name} {a}, not {b}" for (name, a), b in pairs if a != b)


# ----------------------------------------------------------------------------------------- loading


def resume(
    directory: Path,
    model: Llama,
    optimizer: torch.optim.Optimizer,
    tokenizer: Tokenizer,
    lora: LoRA | None = None,
) -> tuple[int, dict]:
    """Continue from a checkpoint of a run: weights, or with `lora` the adapter, and moments in
    place; its step and flags."""
    about = read_config(directory)
    if about["model"] != model.config:
        raise UserError(
            f"{directory} holds another model ({differences(about['model'], model.config)}): "
            f"give the flags it was trained with, or another --out"
        )
    check_tokenizer(about, tokenizer)
    if not (directory / "optimizer").is_dir():
        raise UserError(f"{directory} has weights and no optimizer: --init begins a run with it")
    verify(directory, "weights", "adapter", "optimizer")
    if is_adapter(directory) != bool(lora):
        raise UserError(f"{directory} is of the other script, train.py or finetune_lora.py")
    if lora:
        found, stored = open_adapter(directory, model.config)
        if found != lora:
            raise UserError(
                f"{directory} holds another adapter ({differences(found, lora)}): give the flags "
                f"it began with, or another --out"
            )
        with torch.no_grad():
            for name, factor in adapters(model).items():
                put_shard(factor, stored[name].read())
    else:
        _load(_weights(model), directory / "weights")
    _load(_moments(model, optimizer), directory / "optimizer")
    return about["step"], about["flags"]


@torch.no_grad()
def load_weights(directory: Path, model: Llama) -> None:
    """Fill a materialised model from a checkpoint of ours, Meta's or Hugging Face's; adapters are
    left as they are.

    Every rank calls it, and takes its part: of our files, what overlaps with it; of others, one
    whole matrix at a time, mapped where its rows are in order."""
    if is_own(directory):
        verify(directory, "weights")
        _load(_weights(model), directory / "weights")
        return
    _, stored = open_weights(directory)
    for name, weight in stored.items():
        put_shard(model.get_parameter(name), weight.read())


def load_pretrained(
    directory: str | Path, dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> Llama:
    """A Llama from a checkpoint (a step's directory, or a run's for its newest), or from a
    directory of Meta's or Hugging Face's."""
    directory = find_checkpoint(Path(directory))
    with torch.device("meta"):
        model = Llama(read_config(directory)["model"]).to(dtype)
    model.to_empty(device=device)
    model.tie_weights()
    load_weights(directory, model)
    return model


def open_weights(directory: Path) -> tuple[LlamaConfig, dict[str, Stored]]:
    """The shape and the weights, still in their files, of any directory find_checkpoint finds. A
    rank reads them by itself."""
    if not is_own(directory):
        is_meta = formats.is_meta(directory)
        return formats.open_meta(directory) if is_meta else formats.open_hf(directory)
    verify(directory, "weights", alone=True)
    entries = read_index(directory / "weights").state_dict_metadata

    def read(name: str) -> Tensor:
        tensor = torch.empty(entries[name].size, dtype=entries[name].properties.dtype)
        _load({name: tensor}, directory / "weights", alone=True)
        return tensor

    return read_config(directory)["model"], {
        name: Stored(entry.properties.dtype, tuple(entry.size), partial(read, name))
        for name, entry in entries.items()
    }


def _load(tensors: dict[str, Tensor], part: Path, alone: bool = False) -> None:
    """Fill tensors, or this rank's shards of them, with what has their names in a part. All ranks
    call it together, or one `alone`."""
    read_index(part)
    try:
        with _no_remarks():
            dcp.load(tensors, checkpoint_id=part, no_dist=alone)
    except CheckpointException as error:
        raise UserError(f"cannot load {part}: {_reason(error)}")


@contextlib.contextmanager
def _no_remarks():
    """Keep torch from remarking that a process works alone."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        yield


# -------------------------------------------------------------------------- to and from other files


class OneByOne(dcp.DefaultSavePlanner):
    """Plans with tensors on `meta`; each is read when it is to be written, and let go of then."""

    def __init__(self, stored: dict[str, Stored]):
        super().__init__()
        self.stored = stored

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        return self.stored[index.fqn].read()


def import_weights(source: Path, target: Path, tokenizer: str | None) -> None:
    """A checkpoint at `target`, of step 0 and without an optimizer, in the source's dtype."""
    source = find_checkpoint(source)
    config, stored = open_weights(source)
    about = read_config(source)
    loaded = load_tokenizer(tokenizer) if tokenizer else _own_tokenizer(about)
    if loaded:
        check_tokenizer(about, loaded)
    write_checkpoint(target, config, stored, loaded)


def merge(base: Path, adapter: Path, target: Path, tokenizer: Tokenizer | None) -> None:
    """A checkpoint at `target` of a model and an adapter beside it, one matrix at a time."""
    config, stored = open_weights(base)
    write_checkpoint(
        target, *merge_adapter(config, stored, *open_adapter(adapter, config)), tokenizer
    )


def write_checkpoint(
    target: Path, config: LlamaConfig, stored: dict[str, Stored], tokenizer: Tokenizer | None
) -> None:
    """Of step 0, without an optimizer; by one process, which holds one matrix at a time."""
    with _new_directory(target) as temporary:
        plan = {k: torch.empty(t.shape, dtype=t.dtype, device="meta") for k, t in stored.items()}
        planner = OneByOne(stored)
        with _no_remarks():
            dcp.save(plan, checkpoint_id=temporary / "weights", planner=planner, no_dist=True)
        sums = checksums(temporary, (temporary / "weights").glob("__*"))
        complete(temporary, config, tokenizer, 0, {}, sums)


def export_weights(source: Path, target: Path, format: str, dtype: torch.dtype | None) -> None:
    """A directory as Hugging Face (`hf`) or Meta (`meta`) have them, in the source's dtype or
    another."""
    source = find_checkpoint(source)
    config, stored = open_weights(source)
    if dtype:
        stored = {
            name: Stored(dtype, weight.shape, lambda read=weight.read: read().to(dtype))
            for name, weight in stored.items()
        }
    tokenizer = _own_tokenizer(read_config(source))
    with _new_directory(target) as temporary:
        if format == "meta":
            formats.save_meta(temporary, config, stored)
        else:
            bos, eos = (tokenizer.bos, list(tokenizer.stop)) if tokenizer else (None, None)
            formats.save_hf(temporary, config, stored, bos, eos)
        if tokenizer and tokenizer.file:
            tokenizer.save(temporary / "tokenizer.model")
            if format == "hf":
                ranks = tokenizer.encoding._mergeable_ranks
                formats.save_tokenizer(temporary, ranks, tokenizer.special, SPLIT)
        for path in [*temporary.iterdir(), temporary]:
            _sync(path)


def _own_tokenizer(about: dict) -> Tokenizer | None:
    """What a directory has of its own, if it is of a kind known here: Llama 2's is not."""
    try:
        return about["tokenizer"] and load_tokenizer(about["tokenizer"])
    except UserError as error:
        print(f"warning: without a tokenizer, as {error}", file=sys.stderr)


@contextlib.contextmanager
def _new_directory(target: Path):
    """A hidden directory to write to, which gets its name when all went well."""
    if target.exists():
        raise UserError(f"{target} exists: give the name of a new directory")
    temporary = target.with_name(f".{target.name}.{os.getpid()}")
    temporary.mkdir(parents=True)
    try:
        yield temporary
        os.rename(temporary, target)
        _sync(target.parent)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def main() -> None:
    parser = Parser(description="Weights from and to the files of others.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="import|export|merge")
    take = commands.add_parser("import", help="make a checkpoint of Meta's or Hugging Face's files")
    give = commands.add_parser("export", help="write Meta's or Hugging Face's files")
    join = commands.add_parser("merge", help="make a checkpoint of a model and an adapter")
    for command in (take, give, join):
        command.add_argument(
            "source", type=Path, help="a checkpoint, a run, or a model's directory"
        )
        if command is join:
            command.add_argument("adapter", type=Path, help="a run of finetune_lora.py, or PEFT's")
        command.add_argument("target", type=Path, help="a directory that does not exist yet")
    take.add_argument("--tokenizer", help="where the source has no tokenizer.model")
    give.add_argument("--format", choices=["hf", "meta"], required=True)
    give.add_argument(
        "--dtype", choices=["float32", "bfloat16", "float16"], help="default: as it is"
    )
    args = parser.parse_args()
    if args.command == "import":
        import_weights(args.source, args.target, args.tokenizer)
    elif args.command == "merge":
        source = find_checkpoint(args.source)
        tokenizer = _own_tokenizer(read_config(source))
        merge(source, find_adapter(args.adapter), args.target, tokenizer)
    else:
        dtype = getattr(torch, args.dtype) if args.dtype else None
        export_weights(args.source, args.target, args.format, dtype)
    print(args.target)


if __name__ == "__main__":
    run(main)
