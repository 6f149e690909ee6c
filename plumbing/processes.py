"""How the processes of a run start, share small messages, fail, and tell the user about it.

torchrun starts one process for each GPU; `rank` is the only thing that tells them apart. Without
torchrun there is one process, a world of size 1. All ranks share a *store*, a dictionary that
torchrun keeps on the first node: ranks leave messages there without meeting in a collective.

What can go wrong, and what the user sees:

    a user error             one rank prints one line; every rank exits with code 2
    a rank fails             one line names the rank and its exception; the others exit with code 1
    a rank dies or freezes   its neighbour misses its heartbeat, names it in one line, and all exit
    a deadlock               a collective fails after COLLECTIVE_TIMEOUT, like any rank's failure

A rank that waits in a collective cannot notice that another has failed. So a thread in each rank
watches the store once a second, and ends its own process when some other rank has failed.
"""

import atexit
import errno
import itertools
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

COLLECTIVE_TIMEOUT = timedelta(minutes=10)  # a collective that waits longer ends the run
HEARTBEAT_TIMEOUT = 20  # seconds without a heartbeat after which a rank counts as dead
PEER_LOST_TIMEOUT = 4  # the same once a connection to some rank has been lost
# Errors of the operating system that a user can fix: permissions, full disks, wrong paths.
USER_FIXABLE_ERRNOS = (
    "EACCES EPERM EROFS ENOSPC EDQUOT EFBIG EEXIST ENOTDIR EISDIR ENAMETOOLONG".split()
)


class UserError(Exception):
    """The user asked for something impossible. The message is one line that says what to do
    instead; `run` prints it without a traceback and exits with code 2."""


# ---------------------------------------------------------------------------------------- start


@dataclass(frozen=True)
class Process:
    """The place of this process among all processes of the run."""

    rank: int
    size: int  # number of processes, the world size
    local_rank: int  # rank within this node
    per_node: int  # processes on a node
    device: torch.device

    def local_rank_zero_first(self, name: str, make: Callable):
        """Return make(), which local rank 0 of each node runs before the other ranks of its node.

        For work whose result is cached on disk: the first rank fills the cache, the others read
        it. They wait at the store, since a collective would give up after COLLECTIVE_TIMEOUT."""
        key = f"{name} made on node {os.environ.get('GROUP_RANK', 0)}"
        if self.local_rank == 0:
            made = make()
            _store().set(key, "")
            return made
        _store().wait([key], timedelta(days=7))
        return make()

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
        if self.rank == 0:
            _store().set("flags", json.dumps(mine))
        rank_zero = json.loads(_store().get("flags"))  # waits until rank 0 has set it
        if different := [name for name in mine if mine[name] != rank_zero.get(name)]:
            ours, theirs = (
                " ".join(f"--{name.replace('_', '-')} {given.get(name)}" for name in different)
                for given in (mine, rank_zero)
            )
            raise UserError(
                f"rank {self.rank} was started with {ours}, rank 0 with {theirs}: give the same "
                f"command on every node"
            )
        dist.barrier()  # no rank starts before all have compared

    def check_same(self, what: str, value: int) -> int:
        """Return `value`, a checksum of `what`. Raise UserError where it is not as on rank 0."""
        if self.rank == 0:
            _store().set(f"checksum of {what}", str(value))
        if _store().get(f"checksum of {what}").decode() != str(value):
            raise UserError(f"{what} differ between rank 0 and rank {self.rank}: copy the files")
        dist.barrier()
        return value


def init_distributed() -> Process:
    """Join the processes that torchrun started; without torchrun, form a world of size 1."""
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    per_node = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    device = torch.device("cpu")
    if torch.cuda.is_available():
        gpus = torch.cuda.device_count()
        if per_node > gpus:
            raise UserError(f"--nproc-per-node {per_node} on a node of {gpus} GPUs: at most {gpus}")
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
    if "RANK" in os.environ:
        store, rank, size = next(dist.rendezvous("env://"))
        # After a restart by torchrun, the store still holds the keys of the previous attempt.
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        store = dist.PrefixStore(f"attempt {attempt}", store)
    else:
        store, rank, size = dist.HashStore(), 0, 1
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(
        backend, store=store, rank=rank, world_size=size, timeout=COLLECTIVE_TIMEOUT
    )
    if size > 1:
        watcher = threading.Thread(target=_watch, args=(_store().clone(), rank, size), daemon=True)
        watcher.start()
        atexit.register(_stop_watching, watcher)
        signal.signal(signal.SIGTERM, _exit_late)
    return Process(rank, size, local_rank, per_node, device)


def print_rank_zero(text: str, **where) -> None:
    """Print on rank 0 only; `where` as for print."""
    if dist.get_rank() == 0:
        print(text, flush=True, **where)


# ------------------------------------------------------------------------------------------ end


def run(main: Callable[[], None]) -> None:
    """Run a script's main function. A user error ends it with one line and exit code 2 on every
    rank; so does a full or read-only disk.

    The first rank to fail prints the message and sets a flag in the store; the other ranks see the
    flag and exit silently, even if the failure interrupted a collective. A dead rank is noticed
    after HEARTBEAT_TIMEOUT; with gloo, which sees lost connections, after PEER_LOST_TIMEOUT."""
    try:
        main()
    except Exception as error:
        if isinstance(error, OSError) and errno.errorcode.get(error.errno) in USER_FIXABLE_ERRNOS:
            error = UserError(f"{error}: free some space, or give a path that can be written")
        if isinstance(error, UserError):
            if _is_first_user_error():
                print(f"error: {error}", file=sys.stderr)
            _exit(2)
        if dist.is_initialized() and _store().add("user errors", 0) > 0:
            _exit(2)
        if dist.is_initialized() and dist.get_world_size() > 1:
            if isinstance(error, dist.DistError) or "gloo/transport" in str(error):
                # Another rank has gone: give the watching threads time to find out which.
                _store().set("peer lost", "")
                time.sleep(3 * PEER_LOST_TIMEOUT)
            _report_failure(
                _store(), f"rank {dist.get_rank()} failed: {type(error).__name__}: {error}"
            )
        raise
    if dist.is_initialized():
        _store().set(f"rank {dist.get_rank()} is done", "")
        dist.destroy_process_group()


def _exit(code: int) -> None:
    """Exit at once: Python's usual exit would wait for ranks that are stuck in a collective."""
    sys.stdout.flush()
    sys.stderr.flush()
    if dist.is_initialized():
        os._exit(code)
    sys.exit(code)


def _is_first_user_error() -> bool:
    """Return whether this rank is the one that prints a user error."""
    if dist.is_initialized():
        return _store().add("user errors", 1) == 1
    return os.environ.get("LOCAL_RANK", "0") == "0"  # before ranks have met, all fail alike


def _report_failure(store: dist.Store, message: str) -> None:
    """Print a failure, unless another rank has printed one, and let all ranks know."""
    if store.add("failures", 1) == 1:
        print(f"error: {message}", file=sys.stderr, flush=True)
    store.set("failed", message)


# ---------------------------------------------------------------------------------- heartbeats


def _watch(store: dist.Store, rank: int, size: int) -> None:
    """Watch the next rank from a thread: send a heartbeat every second, expect the next rank's,
    and end this process when some rank has failed.

    The store serves 7 small requests a second from each rank; training is not disturbed."""
    other, host = (rank + 1) % size, socket.gethostname()
    last_heartbeat, heard_at = b"", time.monotonic()
    for beat in itertools.count():
        try:
            store.set(f"heartbeat of rank {rank}", f"on {host}, {beat}")
            failed, user_error = store.check(["failed"]), store.add("user errors", 0) > 0
            peer_lost = store.check(["peer lost"])
            other_done = store.check([f"rank {other} is done"])
            key = f"heartbeat of rank {other}"
            heartbeat = store.get(key) if store.check([key]) else b""  # get alone would wait
        except dist.DistError:  # torchrun on the first node, which kept the store, has gone
            if not _script_ended.wait(PEER_LOST_TIMEOUT):
                print(f"error: rank {rank} has lost the first node", file=sys.stderr, flush=True)
                os._exit(1)
            return
        if failed or user_error:
            _script_ended.wait(PEER_LOST_TIMEOUT)  # this rank may be about to exit by itself
            os._exit(2 if user_error else 1)
        silence = time.monotonic() - heard_at
        if heartbeat != last_heartbeat or other_done:
            last_heartbeat, heard_at = heartbeat, time.monotonic()
        elif silence > (PEER_LOST_TIMEOUT if peer_lost else HEARTBEAT_TIMEOUT):
            where = heartbeat.decode().split(",")[0]
            message = f"rank {other} {where} has died or is frozen; --resume continues the run"
            _report_failure(store, message)
            os._exit(1)
        if _script_ended.wait(1):
            return


_script_ended = threading.Event()  # set when Python exits; ends the watching thread


def _stop_watching(watcher: threading.Thread) -> None:
    _script_ended.set()
    watcher.join()  # a thread in the middle of a request would crash Python's exit


def _exit_late(signal_number: int, frame) -> None:
    """Handle SIGTERM, which torchrun sends to all ranks when one has died: stay alive until the
    watching threads have found out which. The training loop has a handler of its own."""
    _store().set("peer lost", "")
    time.sleep(PEER_LOST_TIMEOUT + 2)
    os._exit(128 + signal_number)


def _store() -> dist.Store:
    return dist.distributed_c10d._get_default_store()
