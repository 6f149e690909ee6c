"""Find, open and write the directories that hold a model's weights, or an adapter.

A directory with weights is a checkpoint in our own format (checkpoint.py), or a model in the format
of Meta or Hugging Face (formats.py). The output directory of a run stands for the newest of its
checkpoints.

The weights and the optimizer's state of a checkpoint are written by torch.distributed.checkpoint
(DCP), each as a directory. Its file __RANK_0.distcp holds what that rank has written; .metadata is
the index, which says where in these files each tensor lies. A checkpoint gets its final name last,
after its files have been synced to disk: so it is complete, even if the process is killed.
"""

import fcntl
import hashlib
import itertools
import json
import os
import pickle
import re
import socket
import sys
import time
import warnings
from collections.abc import Iterable
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import CheckpointException, LoadPlan, ReadItem
from torch.distributed.checkpoint.metadata import Metadata

from files.adapters import PEFT_FILES, is_adapter, metadata_file, recorded
from files.formats import checked_config, is_hf, is_meta, note, open_hf, samples_of_weights
from files.published import small_logits, warn_of_other_code
from files.safetensors import StoredTensor, Weights
from lora import LoRA
from model import LlamaConfig
from models.family import families, family_named, family_of
from plumbing.json_files import JsonFile
from plumbing.messages import Progress, UserError, print_rank_zero
from plumbing.new_files import remove
from plumbing.processes import meet
from text.settings import SETTINGS
from text.tokenizer import Tokenizer, find_tokenizer

CHECKSUMS = "SHA256SUMS"
LOCK_SECONDS = 120  # longer than file servers keep the locks of a node that does not answer
warnings.filterwarnings("ignore", "torch.distributed is disabled")  # DCP warns of no_dist=True

# ---------------------------------------------------------------------------------------- finding


def checkpoints(out: Path) -> list[Path]:
    """Return the checkpoints of a run, oldest first."""
    found = [path for path in out.glob("step-*") if re.fullmatch(r"step-\d{8,}", path.name)]
    return sorted(found, key=lambda path: int(path.name.removeprefix("step-")))


def has_weights(directory: Path) -> bool:
    """Return whether this is a checkpoint in our format that holds weights."""
    return (directory / "weights").is_dir()


def find_checkpoint(directory: Path) -> Path:
    """Return the directory with weights: the given one, or the newest checkpoint of a run.

    Raises UserError if neither is one of our checkpoints or a directory of Meta or Hugging Face."""
    for found in (directory, *checkpoints(directory)[-1:]):
        if has_weights(found) or is_meta(found) or is_hf(found):
            if is_adapter(found):
                note(f"{found} holds an adapter, too: --adapter applies it")
            return found
        if is_adapter(found):
            base = JsonFile(found / PEFT_FILES[0]).get("base_model_name_or_path") or "its base"
            raise UserError(
                f"{found} is an adapter: generate.py takes it as --adapter, with {base} as the "
                f"model, and python checkpoint.py merge makes a model of both"
            )
    raise UserError(
        f"no checkpoint in '{directory}': give a run's --out or one of its step-N, or a directory "
        f"with params.json (Meta) or config.json (Hugging Face) and weights"
    )


def find_adapter(directory: Path, base: Path) -> Path:
    """Return the directory with an adapter: the given one, or the newest checkpoint of a run. Warn
    if it was trained beside another model than `base`, as far as can be known."""
    for found in (directory, *checkpoints(directory)[-1:]):
        if is_adapter(found):
            if (found / CHECKSUMS).exists():
                verify(found, "adapter")
            named = str(JsonFile(found / PEFT_FILES[0]).get("base_model_name_or_path") or base)
            if digest := recorded(found, "facts").get("base_digest"):
                is_other = digest != digest_of_weights(base)
                named += ", as it was then"
            elif Path(named).is_dir():
                is_other = find_checkpoint(Path(named)).resolve() != base.resolve()
            else:  # a name on the hub, or a path elsewhere: the directory is likely called the same
                is_other = is_hf(base) and Path(named).name not in base.resolve().parts
            if is_other:
                note(f"the adapter in {found} was trained beside {named}, and not {base}")
            return found
    raise UserError(f"no adapter in '{directory}': give a run of finetune_lora.py, or PEFT's files")


# ---------------------------------------------------------------------------------------- opening


def read_config(directory: Path) -> dict:
    """Return the metadata of a directory from find_checkpoint, or of an adapter's checkpoint.

    `model` is a LlamaConfig, `tokenizer` an argument for load_tokenizer or None, and `directory`
    the directory itself. Our checkpoints also have `tokenizer_hash`, `step`, `flags`, and `logits`,
    by which a warning says that model.py has changed since."""
    if not has_weights(directory) and not (directory / CHECKSUMS).exists():
        config, _ = open_weights(directory)
        file = find_tokenizer(directory)
        return {"model": config, "tokenizer": file and str(file), "directory": directory}
    path = metadata_file(directory)
    verify(directory, path.name, "tokenizer.", *SETTINGS)
    content = JsonFile(path)
    saved = content.checked("model", content["model"], dict)
    digest = content.checked("digest", content.get("digest", ""), str)
    if "family" in content:
        family = of_logits = family_named(content.checked("family", content["family"], str), digest)
    else:
        from files.old_models import family_of_old  # here, since only an old checkpoint needs it

        family = family_of_old(content, saved)
        of_logits = families()["llama"]  # whose logits all old checkpoints have
    default = family.config()
    # Defaults are not checked: a field that somebody has added may have 0, which is refused.
    changed = {name: value for name, value in saved.items() if value != getattr(default, name, ...)}
    content.checked("step", content["step"], int, above=-1)
    content.checked("flags", content["flags"], dict)
    content.checked("tokenizer", content["tokenizer"] or "", str)
    logits = content.checked("logits", content["logits"] or [], list)
    logits = [content.checked("logits", value, float, above=-(2**31)) for value in logits]
    warn_of_other_code(directory, of_logits, tuple(logits) or None, digest)
    config = checked_config(content, family.config, **changed)
    metadata = content | {"model": config, "directory": directory}
    if metadata["tokenizer"] in ("tokenizer.model", "tokenizer.json"):
        metadata["tokenizer"] = str(directory / metadata["tokenizer"])
    return metadata


def check_tokenizer(metadata: dict, tokenizer: Tokenizer) -> None:
    """Raise UserError if a tokenizer does not fit the model whose metadata read_config returned:
    if it is not the model's own or, where that is unknown, has more tokens than the model."""
    directory, vocab_size = metadata["directory"], metadata["model"].vocab_size
    if metadata.get("tokenizer_hash") not in (None, tokenizer.hash):
        raise UserError(
            f"{directory} was trained with another tokenizer than {tokenizer.name}: "
            f"give --tokenizer {metadata['tokenizer']}"
        )
    if tokenizer.vocab_size > vocab_size:
        raise UserError(
            f"tokenizer {tokenizer.name} has {tokenizer.vocab_size} tokens, the model in "
            f"{directory} {vocab_size}: give the --tokenizer it was trained with"
        )


def open_weights(directory: Path) -> tuple[LlamaConfig, Weights]:
    """Return the configuration and the weights of any directory that find_checkpoint returns.

    It does not communicate."""
    if not has_weights(directory):
        if not is_meta(directory):
            return open_hf(directory)
        from files.meta import open_meta  # here, since few directories are Meta's

        return open_meta(directory)
    verify(directory, "weights", alone=True)
    entries = read_index(directory / "weights").state_dict_metadata

    def read(name: str) -> Tensor:
        tensor = torch.empty(entries[name].size, dtype=entries[name].properties.dtype)
        load_tensors({name: tensor}, directory / "weights", alone=True)
        return tensor

    weights = {}
    for name, entry in entries.items():
        shape = tuple(entry.size)
        weights[name] = StoredTensor(entry.properties.dtype, shape, partial(read, name))
    return read_config(directory)["model"], weights


def digest_of_weights(directory: Path) -> str:
    """Return a digest by which other weights are noticed in a directory from find_checkpoint: of
    our files' checksums, or of a sample of the bytes of other files."""
    if not has_weights(directory):
        return hashlib.sha256(samples_of_weights(directory)).hexdigest()
    lines = (directory / CHECKSUMS).read_bytes().splitlines()
    return hashlib.sha256(b"".join(line for line in lines if b" weights/" in line)).hexdigest()


def describe_differences(theirs: LlamaConfig | LoRA, ours: LlamaConfig | LoRA) -> str:
    """Return the fields in which two configurations differ, as in `dim 256, not 512`."""
    if type(theirs) is not type(ours):
        return f"a model of family {family_of(theirs).name}, not {family_of(ours).name}"
    our_fields = asdict(ours)
    differences = []
    for name, value in asdict(theirs).items():
        if value != our_fields[name]:
            differences.append(f"{name} {value}, not {our_fields[name]}")
    return ", ".join(differences)


# -------------------------------------------------------------------------------------- checksums


def checksums(directory: Path, paths: Iterable[Path]) -> dict[str, str]:
    """Return the SHA-256 digests of files by name, relative to a directory."""
    digests = {}
    paths = list(paths)
    size = sum(path.stat().st_size for path in paths)
    progress = Progress(f"checksums in {directory}", size / 1e9, " GB")
    for path in paths:
        digest = hashlib.sha256()
        with open(path, "rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
                progress.add(len(block) / 1e9)
        digests[str(path.relative_to(directory))] = digest.hexdigest()
    return digests


def complete(
    directory: Path, config: LlamaConfig, metadata: dict, tokenizer: Tokenizer | None, digests: dict
) -> None:
    """Turn a directory with weights/ or an adapter into a checkpoint, and flush it to disk.

    Adds to the metadata what the model is, and the logits of its family's small model. Adds the
    tokenizer, a file with the metadata and, last, SHA256SUMS in the format of the
    command sha256sum; its last line is a comment with the digest of those above it. `digests` are
    those of the files in weights/ and optimizer/, which DCP has synced."""
    family = family_of(config)
    of_model = {"model": asdict(config), "family": family.name, "digest": family.digest}
    no_tokenizer = {"tokenizer": None, "tokenizer_hash": None}
    of_tokenizer = tokenizer.save(directory) if tokenizer else no_tokenizer
    metadata = of_model | metadata | of_tokenizer | {"logits": small_logits(family)}
    metadata_file(directory).write_text(json.dumps(metadata, indent=1, default=str), "utf-8")
    small = [path for path in directory.glob("*") if path.is_file()]
    digests = digests | checksums(directory, [*small, *directory.glob("*/.metadata")])
    lines = "".join(f"{digest}  {name}\n" for name, digest in sorted(digests.items()))
    own = hashlib.sha256(lines.encode()).hexdigest()
    (directory / CHECKSUMS).write_text(f"{lines}# complete: {own}\n", "utf-8")
    sync(*directory.glob("*"), directory)


def verify(directory: Path, *prefixes: str, alone: bool = False) -> None:
    """Raise UserError if files whose names begin with one of `prefixes` are missing or damaged.

    Every rank checks all small files. The large files, in weights/ and optimizer/, are divided
    among the ranks; a rank that reads `alone` checks all of them."""
    in_run = directory.name.startswith("step-")
    advice = f"Remove {directory} to use the checkpoint before it" if in_run else "Make it again"
    path = directory / CHECKSUMS
    content = path.read_bytes() if path.is_file() else b""
    *lines, last = content.splitlines(keepends=True) or [b""]
    if last != b"# complete: %s\n" % hashlib.sha256(b"".join(lines)).hexdigest().encode():
        raise UserError(f"{directory} is not complete: {CHECKSUMS} is missing or damaged. {advice}")
    digests = {}
    small, large = [], []
    for line in lines:
        digest, _, name = line.decode(errors="replace").strip().partition("  ")
        digests[name] = digest
        if name.startswith(prefixes):
            files = large if "/" in name else small
            files.append(name)
    if dist.is_initialized() and not alone:
        large = large[dist.get_rank() :: dist.get_world_size()]
    names = small + large
    for name in names:
        if not (directory / name).is_file():
            raise UserError(f"{directory} is not complete: {name} is missing. {advice}")
    for name, digest in checksums(directory, [directory / name for name in names]).items():
        if digest != digests[name]:
            fault = f"its checksum is not that in {CHECKSUMS}"
            raise UserError(f"{directory / name} is damaged: {fault}. {advice}")


def newest_undamaged(saved: list[Path]) -> Path:
    """Return the newest of a run's checkpoints whose files have their checksums. Newer ones get
    another name, and a warning. All ranks call it together, and each reads a share of the files.
    `saved` is the same list on all: their views of a shared disk may differ.

    Raises UserError if all are damaged."""
    *earlier, newest = saved
    mine = ""
    problems = [""] * dist.get_world_size()
    try:
        verify(newest, "")
    except UserError as error:
        mine = str(error)
    meet()
    dist.all_gather_object(problems, mine)
    if not (problem := max(problems)):  # some rank's, or "" if no file is damaged
        return newest
    if not earlier:
        raise UserError(problem)
    aside, fault = newest.with_name(f"damaged-{newest.name}"), problem.partition(". Remove")[0]
    text = f"warning: {fault}. It is now {aside.name}, and the run goes back to {earlier[-1]}"
    print_rank_zero(text, file=sys.stderr)
    if dist.get_rank() == 0:
        remove(aside)  # of the same step, damaged before
        os.rename(newest, aside)
    dist.barrier()
    return newest_undamaged(earlier)


# ------------------------------------------------------------------------------- DCP's directories


def read_index(directory: Path) -> Metadata:
    """Return DCP's index of the tensors in weights/ or optimizer/.

    The index is a pickle, which could run any code when it is loaded. This reader accepts only the
    classes that an index of tensors consists of, and raises UserError for anything else. Call it
    before any function of DCP, which would load the pickle unchecked."""
    path = directory / ".metadata"
    with open(path, "rb") as file:
        try:
            index = _IndexUnpickler(file).load()
            _ = [entry.properties.dtype for entry in index.state_dict_metadata.values()]
            return index
        except Exception as error:  # a damaged pickle can raise nearly anything
            raise UserError(f"{path} holds more than an index of tensors: {error}")


class _IndexUnpickler(pickle.Unpickler):
    ALLOWED = (
        "Metadata MetadataIndex StorageMeta TensorStorageMetadata TensorProperties "
        "ChunkStorageMetadata _MEM_FORMAT_ENCODING _StorageInfo Size _get_layout PosixPath"
    ).split()

    def find_class(self, module: str, name: str):
        allowed = name in self.ALLOWED and module.split(".")[0] in ("torch", "pathlib")
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if allowed or is_dtype:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{module}.{name}")


def load_tensors(tensors: dict[str, Tensor], directory: Path, alone: bool = False) -> None:
    """Fill tensors, or this rank's shards of DTensors, from weights/ or optimizer/ by name.

    All ranks call it together, or one rank `alone`, without communication.
    Raises UserError if the directory lacks a tensor or, unless `alone`, has one more."""
    saved = read_index(directory).state_dict_metadata.keys()
    needed = set(tensors)
    if dist.is_initialized() and not alone:  # in a pipeline, ranks have different ones
        of_ranks = [None] * dist.get_world_size()
        dist.all_gather_object(of_ranks, needed)
        needed = set().union(*of_ranks)
    spare = set() if alone else saved - needed
    for which, names in {"it": needed - saved, "this run": spare}.items():
        if names:
            raise UserError(
                f"cannot load {directory}: {which} lacks {min(names)}; use the flags and the code "
                f"that it was saved with"
            )
    try:
        dcp.load(tensors, checkpoint_id=directory, planner=_LoadWithProgress(), no_dist=alone)
    except CheckpointException as error:
        raise UserError(f"cannot load {directory}: {failure_reason(error)}")


class _LoadWithProgress(dcp.DefaultLoadPlanner):
    """Lets DCP plan as it does, and prints how much of the plan this rank has read."""

    def finish_plan(self, new_plan: LoadPlan) -> LoadPlan:
        self.progress = Progress("loading tensors", len(new_plan.items))
        return super().finish_plan(new_plan)

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        self.progress.add()


def failure_reason(error: OSError | RuntimeError | CheckpointException) -> str:
    """Return in one line why reading or writing failed."""
    if isinstance(error, CheckpointException):
        error, _ = next(iter(error.failures.values()))
    if isinstance(error, OSError):
        return f"{error.strerror}: {error.filename}" if error.filename else str(error)
    kind = "" if isinstance(error, UserError) else f"{type(error).__name__}: "
    return kind + " ".join(str(error).split())


# ---------------------------------------------------------------------------------------- writing


def lock_directory(out: Path) -> None:
    """Make the directory OUT if there is none, and lock it for this process until it ends.

    Raises UserError if OUT cannot be written, or if another run has locked it: two runs would
    remove each other's files. The lock of a node that has died is kept by the server of a network
    disk for a while: the lock of another node is waited for."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        # The file stays open until the process ends: closing it would unlock OUT.
        descriptor = os.open(out / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        reason = "it is a file" if out.is_file() else error.strerror
        raise UserError(f"cannot write to --out {out}: {reason}; give another directory")
    for waited in itertools.count():
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except (BlockingIOError, PermissionError):
            owner = os.pread(descriptor, 200, 0).decode(errors="replace")
            if owner.endswith(f" on {socket.gethostname()}") or waited >= LOCK_SECONDS:
                raise UserError(f"{out} is in use by {owner}: wait for it, or give another --out")
            if not waited:
                line = f"{out} is in use by {owner}: waiting for {LOCK_SECONDS} s at most"
                print(line, file=sys.stderr, flush=True)
            time.sleep(1)
        except OSError as error:
            print(f"warning: {out} is not locked: {error.strerror}", file=sys.stderr)
            break
    os.truncate(descriptor, 0)
    os.write(descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode())


def remove_old(newest: Path, keep: int, is_best: bool) -> None:
    """Let OUT/best link to the newest checkpoint if it is the best so far. With `keep`, remove all
    but so many of the newest, and the best. Print a warning where that fails.

    They are first renamed to hidden names, since half of one must not look complete. Some disks
    refuse to remove files that are being read; the next run removes what is left (lock_run)."""
    link = newest.with_name("best")
    if is_best:
        os.replace(new_link(newest.parent, newest.name), link)
    best = link.resolve().name
    for old in checkpoints(newest.parent)[: -keep or 0]:  # none if `keep` is 0
        hidden = old.with_name(f".{old.name}")
        try:
            if old.name != best:
                os.rename(old, hidden)
                remove(hidden)
        except OSError as error:
            print(f"warning: {old} is not removed: {error}", file=sys.stderr)


def new_link(out: Path, name: str) -> Path:
    """Return a hidden link in OUT to a name, which may then replace OUT/best. Raise UserError where
    the disk has no links, or OUT/best is none, as in a copy of a run."""
    best = out / "best"
    link = out / ".best"
    try:
        if best.exists():
            best.readlink()
        link.unlink(missing_ok=True)
        link.symlink_to(name)
    except OSError as error:
        problem = f"{best} has to be a symbolic link ({error.strerror}): remove it"
        raise UserError(f"{problem}, leave out --keep-best, or give --out on another disk")
    return link


def sync(*paths: Path) -> None:
    """Flush files or directories to disk."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)
