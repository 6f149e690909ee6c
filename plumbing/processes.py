"""The processes of a run: each one's place, the small messages that they share, and how they fail.

torchrun starts one process for each GPU; `rank` is the only thing that tells them apart. Without
torchrun there is one process, a world of size 1 (joining.py). All ranks share a *store*, a
dictionary that torchrun keeps on the first node: ranks leave messages there without meeting in a
collective.

What can go wrong, and what the user sees:

    a user error             one rank prints one line; every rank exits with code 2
    a rank fails             one line names the rank and its exception; every rank exits with code 1
    a rank dies or freezes   the rank before it misses its heartbeat and names it; all exit
                             (heartbeats.py)
    a deadlock               after STUCK_AFTER a line says who waits for which rank, and where
                             (stuck.py); a collective fails after COLLECTIVE_TIMEOUT, like any
                             rank's failure
    Ctrl-C, torchrun dies    one line, within seconds (endings.py)
    `| head` has read all it wants    nothing; exit code 141, as of other programs

The first rank to fail leaves its line in the store, where all others find it within a second. Every
rank also leaves the line for torchrun, which repeats it at the end of its own report.
"""

import errno
import itertools
import json
import os
import re
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from plumbing import endings, stuck
from plumbing.devices import memory_snapshot
from plumbing.messages import UserError, is_rank_zero

PEER_LOST_TIMEOUT = 4  # HEARTBEAT_TIMEOUT once a connection to some rank has been lost
OF_GLOO = "gloo/transport|Application timeout"  # in errors of its collectives, waited for or not
# Errors of the operating system that a user can fix: permissions, full disks, wrong paths.
USER_FIXABLE = "EACCES EPERM EROFS ENOSPC EDQUOT EFBIG EEXIST ENOTDIR EISDIR ENAMETOOLONG".split()
# FLATLLAMA_CACHE is the path of cache/, TMPDIR that of compiled code.
GIVE = "free some space, or give a path that can be written (also FLATLLAMA_CACHE and TMPDIR)"
ADVICE = dict.fromkeys(USER_FIXABLE, GIVE)
ADVICE |= dict.fromkeys(("EMFILE", "ENFILE"), "raise the limit (ulimit -Hn), or give fewer files")


@dataclass(frozen=True)
class Process:
    """The place of this process among all processes of the run."""

    rank: int
    size: int  # number of processes, the world size
    local_rank: int  # rank within this node
    per_node: int  # processes on a node; if nodes have unequal numbers, what divides them all
    device: torch.device

    def local_rank_zero_first(self, make: Callable):
        """Return make(), which local rank 0 of each node runs before all other ranks.

        For work whose result is cached on disk: the first fill the cache, the others read it."""
        made = make() if self.local_rank == 0 else None
        meet()
        return make() if self.local_rank > 0 else made

    def broadcast_from_rank_zero(self, make: Callable):
        """Return rank 0's make() on every rank, where ranks might see different things."""
        box = [make() if self.rank == 0 else None]
        dist.broadcast_object_list(box, device=torch.device("cpu"))
        return box[0]

    def minimum(self, value: int) -> int:
        """Return the smallest value of all ranks."""
        smallest = torch.tensor(value)
        dist.all_reduce(smallest, dist.ReduceOp.MIN)
        return int(smallest)

    def check_same_flags(self, flags: dict) -> None:
        """Raise UserError where ranks were given different flags, as can happen on two nodes."""
        mine = {name: str(value) for name, value in flags.items()}
        rank_zero = self.broadcast_from_rank_zero(lambda: mine)
        for name, value in mine.items():
            other = rank_zero.get(name)
            if value != other:
                flag = f"--{name.replace('_', '-')}"
                raise UserError(
                    f"rank {self.rank} was started with {flag} {value}, rank 0 with {flag} "
                    f"{other}: give the same command on every node"
                )
        dist.barrier()  # no rank starts before all have compared

    def check_same(self, what: str, value):
        """Return `value`, which describes `what`. Raise UserError where it is not as on rank 0."""
        if self.broadcast_from_rank_zero(lambda: value) != value:
            raise UserError(f"{what} differ between rank 0 and rank {self.rank}: copy the files")
        dist.barrier()
        return value


def processes_on_this_node() -> int:
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


# ------------------------------------------------------------------------------- small messages


def shared_store() -> dist.Store:
    return dist.distributed_c10d._get_default_store()


_meetings = itertools.count()


def meet() -> None:
    """Wait at the store until all ranks are here. Where they read files, each at its pace, a
    collective would give up after COLLECTIVE_TIMEOUT. Between short sleeps Python notices a signal.
    All ranks together ask the store a thousand times a second."""
    if not dist.is_initialized():
        return
    size = dist.get_world_size()
    name = f"meeting {next(_meetings)}"
    shared_store().add(name, 1)
    while shared_store().add(name, 0) < size:
        time.sleep(size / 1000)


def note_checkpoint(name: str) -> None:
    """Let the ranks know from which checkpoint to continue, should one of them die."""
    shared_store().set("newest checkpoint", name)


def newest_checkpoint(store: dist.Store | None = None) -> str:
    """Return the name of the checkpoint to continue from; "" before there is one."""
    store = store or (shared_store() if dist.is_initialized() else dist.HashStore())
    key = "newest checkpoint"
    return store.get(key).decode() if store.check([key]) else ""


def resume_hint(store: dist.Store | None) -> str:
    """Return from which checkpoint to continue, or "" before there is one."""
    newest = newest_checkpoint(store)
    return f"; --resume continues from {newest}" if newest else ""


# ------------------------------------------------------------------------------------------ end


# What `run` advises where memory does not suffice. Who knows better replaces it.
out_of_memory_advice: Callable[[], str] = lambda: "use a smaller model or batch"  # noqa: E731


def memory_of_others(device: torch.device) -> int:
    """Return the bytes of a GPU that other programs hold; those of CUDA itself count, too."""
    if device.type != "cuda":
        return 0
    free, total = torch.cuda.mem_get_info(device)
    return max(0, total - free - torch.cuda.memory_reserved(device))


def out_of_memory() -> UserError:
    text = "out of memory"
    if torch.cuda.is_available():
        total = torch.cuda.get_device_properties().total_memory
        others = memory_of_others(torch.device("cuda", torch.cuda.current_device()))
        text += f" on a GPU of {total / 1e9:.3g} GB"
        if others > 0.05 * total:
            text += f", of which others hold {others / 1e9:.3g} GB (nvidia-smi names them)"
    return UserError(f"{text}: {out_of_memory_advice()}{memory_snapshot()}")


def run(main: Callable[[], None]) -> None:
    """Run a script's main function. A user error ends it with one line and exit code 2 on every
    rank; so does a full or read-only disk."""
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="replace")  # what a terminal lacks
    try:
        main()
    except BaseException as error:
        if isinstance(error, SystemExit) and not dist.is_initialized():
            raise  # --help
        end_because_of(error)
        raise
    if dist.is_initialized():
        shared_store().set(f"rank {dist.get_rank()} is done", "")
        dist.destroy_process_group()


def end_because_of(error: BaseException) -> None:
    """End this process and let all others end with its error. Return if this process is alone with
    an error that is not the user's: then Python prints where it happened."""
    if isinstance(error, KeyboardInterrupt) and is_rank_zero():
        endings.end_interrupted()
    stuck.own_error = error
    store = shared_store() if dist.is_initialized() else None
    error = as_user_error(error, store)
    is_alone = store is None or dist.get_world_size() == 1
    if is_alone and isinstance(error, BrokenPipeError):  # who reads has left, as head does
        endings.end(128 + signal.SIGPIPE, "nobody reads what this prints", show=False)
    if isinstance(error, UserError):
        fail(store, 2, str(error))
    rank = os.environ.get("RANK", 0)
    reason = str(error).split("\n")[0]
    if store is None and isinstance(error, dist.DistError):
        fail(store, 1, f"rank {rank} cannot join the other ranks: {reason}")
    message = f"rank {rank} failed: {type(error).__name__}: {reason}".removesuffix(": ")
    if is_alone and not isinstance(error, SystemExit):  # whose code may be 0
        endings.report(message)
        return
    peer_lost = isinstance(error, dist.DistError) or re.search(OF_GLOO, str(error)) is not None
    fail(store, 1, message, traceback.format_exc(), peer_lost)


def as_user_error(error: BaseException, store: dist.Store | None) -> BaseException:
    """Return a UserError with advice where memory, disk or rights do not suffice, or the error."""
    on_cpu = "DefaultCPUAllocator: can't allocate memory" in str(error)
    if isinstance(error, torch.OutOfMemoryError) or on_cpu:
        return out_of_memory()
    error = getattr(error, "inner_exception", error)  # of torch.compile
    code = errno.errorcode.get(getattr(error, "errno", None))
    if code in ADVICE:
        return UserError(f"{error}: {ADVICE[code]}{resume_hint(store)}")
    return error


def fail(
    store: dist.Store | None, code: int, message: str, details: str = "", peer_lost: bool = False
) -> None:
    """End this process with the code and message of the first rank to fail, which prints the
    message, after its `details`; on every other node the first rank does. Without a store, before
    ranks have met, all fail alike.

    If a peer is lost, the watching threads get some time to find out which rank has failed. If they
    do not, all ranks live, and the message says which one the others waited for."""
    endings.end_if_orphaned()
    rank = os.environ.get("RANK")
    node = os.environ.get("GROUP_RANK")
    show = os.environ.get("LOCAL_RANK", "0") == "0"
    try:
        if peer_lost:
            store.set("peer lost", "")
            try:
                store.wait(["failed"], timedelta(seconds=3 * PEER_LOST_TIMEOUT))
            except dist.DistStoreError:  # nothing was found
                reason = f"{stuck.who_waits(store)}; " if stuck.own_error else ""
                message = f"{reason}{message}{resume_hint(store)}"
        if store:
            mine = json.dumps([code, message, rank, node])
            first = store.compare_set("failed", "", mine).decode()
            code, message, first_rank, first_node = json.loads(first)
            show = first_rank == rank or (show and first_node != node)
            if first != mine:
                details = ""
        elif not show:
            time.sleep(2)  # torchrun ends all ranks when the first has ended: another one prints
    except dist.DistError:  # torchrun on the first node, which kept the store, has gone
        message = "the connection to the first node is lost"
        details = ""
    sys.stdout.flush()
    if show:
        print(details, end="", file=sys.stderr, flush=True)
    endings.end(code, message, show)
