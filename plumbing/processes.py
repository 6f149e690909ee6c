"""How the processes of a run start, share small messages, fail, and tell the user about it.

torchrun starts one process for each GPU; `rank` is the only thing that tells them apart. Without
torchrun there is one process, a world of size 1. All ranks share a *store*, a dictionary that
torchrun keeps on the first node: ranks leave messages there without meeting in a collective.

What can go wrong, and what the user sees:

    a user error             one rank prints one line; every rank exits with code 2
    a rank fails             one line names the rank and its exception; every rank exits with code 1
    a rank dies or freezes   the rank before it misses its heartbeat and names it; all exit
    a deadlock               after STUCK_AFTER a line says who waits for which rank, and where; a
                             collective fails after COLLECTIVE_TIMEOUT, like any rank's failure
    Ctrl-C, torchrun dies    one line, within seconds (plumbing/endings.py)
    `| head` has read all it wants    nothing; exit code 141, as of other programs

A rank that waits in a collective cannot notice that another has failed. So a thread in each rank
watches the store once a second, and ends its own process when some other rank has failed. Every
rank also leaves the line for torchrun, which repeats it at the end of its own report.
"""

import atexit
import contextlib
import ctypes
import errno
import itertools
import json
import math
import os
import re
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from plumbing import endings, stuck
from plumbing.devices import memory_snapshot, take_gpu
from plumbing.messages import UserError, is_rank_zero, print_rank_zero

COLLECTIVE_TIMEOUT = timedelta(minutes=10)  # a collective that waits longer ends the run
HEARTBEAT_TIMEOUT = 20  # seconds without a heartbeat after which a rank counts as dead
PEER_LOST_TIMEOUT = 4  # the same once a connection to some rank has been lost
OF_GLOO = "gloo/transport|Application timeout"  # in errors of its collectives, waited for or not
GRACE = 5  # seconds in which all ranks notice that they are stuck
STUCK_AFTER = 60  # seconds, or five times the last step if that is more, without the end of a step
# Errors of the operating system that a user can fix: permissions, full disks, wrong paths.
USER_FIXABLE = "EACCES EPERM EROFS ENOSPC EDQUOT EFBIG EEXIST ENOTDIR EISDIR ENAMETOOLONG".split()
ADVICE = dict.fromkeys(USER_FIXABLE, "free some space, or give a path that can be written")
ADVICE |= dict.fromkeys(("EMFILE", "ENFILE"), "raise the limit (ulimit -Hn), or give fewer files")


# ---------------------------------------------------------------------------------------- start


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
            if value != (other := rank_zero.get(name)):
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


def register_gloo(address: str | None) -> None:
    """Let init_process_group know `one_thread_gloo`, a gloo backend that runs the collectives of
    its group in one thread.

    By default two threads do. After each collective, its thread assigns the collective's name to a
    string of the group without a lock (as of torch 2.13). If both do so at once, they corrupt the
    heap, and the process crashes sooner or later.

    `address`: where other ranks reach this node. By default it is what the host's name resolves to,
    which on some systems is 127.0.1.1."""

    def one_thread_gloo(store: dist.Store, rank: int, size: int, timeout: timedelta):
        gloo, options = dist.ProcessGroupGloo, dist.ProcessGroupGloo._Options()
        interfaces = filter(None, os.environ.get("GLOO_SOCKET_IFNAME", "").split(","))
        devices = [gloo.create_device(interface=name) for name in interfaces]
        if not devices and address:
            devices = [gloo.create_device(hostname=address)]
        options._devices = devices or [gloo.create_default_device()]
        options._threads, options._timeout = 1, timeout
        return gloo(store, rank, size, options)

    dist.Backend.register_backend("one_thread_gloo", one_thread_gloo, devices=["cpu"])


def processes_on_this_node() -> int:
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def init_distributed() -> Process:
    """Join the processes that torchrun started; without torchrun, form a world of size 1."""
    for name in ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"):  # srun, mpirun
        if "RANK" not in os.environ and int(os.environ.get(name, "1")) > 1:
            raise UserError(
                f"{name} is {os.environ[name]}, and each of these processes would run alone: start "
                f"torchrun, once on each node (docs/cluster.md)"
            )
    local_rank, here = int(os.environ.get("LOCAL_RANK", "0")), processes_on_this_node()
    device = torch.device("cpu")
    if torch.cuda.is_available():
        if here > (gpus := torch.cuda.device_count()):
            raise UserError(f"--nproc-per-node {here} on a node of {gpus} GPUs: at most {gpus}")
        device = torch.device("cuda", local_rank)
        take_gpu(device)
    else:
        keep_freed_memory()
    address = None
    if "RANK" in os.environ:
        if store_is_torchruns := os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            check_restarts()
            address = _own_address(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
        store, rank, size = next(dist.rendezvous("env://"))
        if store_is_torchruns:  # after a restart it still holds the keys of the previous attempt
            attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
            store = dist.PrefixStore(f"attempt {attempt}", store)
    else:
        store, rank, size = dist.HashStore(), 0, 1
    register_gloo(address)
    backend = "cpu:one_thread_gloo,cuda:nccl" if device.type == "cuda" else "one_thread_gloo"
    dist.init_process_group(
        backend, store=store, rank=rank, world_size=size, timeout=COLLECTIVE_TIMEOUT
    )
    if size > 1:
        given = _store().clone(), rank, size
        watcher = threading.Thread(target=_watch_next_rank, args=given, daemon=True)
        watcher.start()
        atexit.register(_stop_watching, watcher)
        signal.signal(signal.SIGTERM, _exit_late)
    of_ranks = [None] * size
    dist.all_gather_object(of_ranks, (here, device.type))  # all ranks are to build the same mesh
    per_node, devices = zip(*of_ranks)
    if len(set(devices)) > 1:
        without = devices.index("cpu")
        raise UserError(f"rank {without} finds no GPU, and others do: see nvidia-smi on its node")
    return Process(rank, size, local_rank, math.gcd(*per_node), device)


def check_restarts() -> None:
    """Raise UserError if torchrun may restart ranks on several nodes, and they would use its store:
    each node counts attempts by itself, so ranks would look for each other under other numbers."""
    several = int(os.environ.get("GROUP_WORLD_SIZE", "1")) > 1
    may_restart = int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")) > 0
    if several and may_restart and os.environ.get("TORCH_DISABLE_SHARE_RDZV_TCP_STORE") != "1":
        raise UserError(
            "--max-restarts on several nodes: first export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 on "
            "each, or ranks do not meet after a restart"
        )


def keep_freed_memory() -> None:
    """Let the C library keep the memory of freed tensors for the next ones. glibc gives large
    blocks back to the system. The next tensor then gets new pages, and the first write to a new
    page takes several times as long as a later one. Other C libraries have no `mallopt`."""
    with contextlib.suppress(AttributeError):
        set_option = ctypes.CDLL(None).mallopt
        set_option(-1, 2**31 - 1)  # M_TRIM_THRESHOLD: free bytes at the end of the heap
        # M_MMAP_THRESHOLD: larger blocks still come from the system. glibc refused more than 32 MiB
        # before 2.35, and then keeps the smallest threshold.
        set_option(-3, 2**30) or set_option(-3, 2**25)


def _own_address(host: str, port: int) -> str:
    """Return this node's address on its way to the first node, to torchrun's store.

    Raise DistNetworkError if torchrun there, whose store exists before any rank starts, has died:
    the store's own client would try again for half an hour."""
    try:
        with socket.create_connection((host, port), timeout=30) as connection:
            return connection.getsockname()[0]
    except OSError as error:
        raise dist.DistNetworkError(f"{error} ({host}, port {port})")


def on_every_rank(work: Callable, group: dist.ProcessGroup) -> list:
    """Return work()'s results on all ranks, when all are done; raise on all what one raises."""
    results = [None] * dist.get_world_size()
    try:
        mine = work()
    except Exception as error:
        mine = error
    dist.all_gather_object(results, mine, group)
    for result in results:
        if isinstance(result, Exception):
            raise result
    return results


def on_rank_zero(work: Callable, group: dist.ProcessGroup) -> None:
    """Let rank 0 do its work(); raise on all ranks what it raises."""
    on_every_rank(lambda: work() if dist.get_rank() == 0 else None, group)


_meetings = itertools.count()


def meet() -> None:
    """Wait at the store until all ranks are here. Where they read files, each at its pace, a
    collective would give up after COLLECTIVE_TIMEOUT."""
    if not dist.is_initialized():
        return
    name = f"meeting {next(_meetings)}"
    if _store().add(name, 1) == dist.get_world_size():
        _store().set(f"{name} is complete", "")
    _store().wait([f"{name} is complete"], timedelta(days=7))


def note_checkpoint(name: str) -> None:
    """Let the ranks know from which checkpoint to continue, should one of them die."""
    _store().set("newest checkpoint", name)


def newest_checkpoint(store: dist.Store | None = None) -> str:
    """Return the name of the checkpoint to continue from; "" before there is one."""
    store = store or (_store() if dist.is_initialized() else dist.HashStore())
    key = "newest checkpoint"
    return store.get(key).decode() if store.check([key]) else ""


_last_step: tuple[int, float, float] | None = None  # number; when it ended; when to report


def note_step(step: int | None, seconds: float = 0.0) -> None:
    """Let the watching thread know that a step has ended, which took so many seconds, or that no
    others follow (None)."""
    global _last_step
    now = time.monotonic()
    _last_step = None if step is None else (step, now, now + max(STUCK_AFTER, 5 * seconds))


# ------------------------------------------------------------------------------------------ end


# What `run` advises where memory does not suffice. Who knows better replaces it.
out_of_memory_advice: Callable[[], str] = lambda: "use a smaller model or batch"  # noqa: E731


def memory_of_others(device: torch.device) -> int:
    """Return the bytes of a GPU that other programs hold; those of CUDA itself count, too."""
    if device.type != "cuda":
        return 0
    free, total = torch.cuda.mem_get_info(device)
    return max(0, total - free - torch.cuda.memory_reserved(device))


def _out_of_memory() -> UserError:
    text = "out of memory"
    if torch.cuda.is_available():
        total = torch.cuda.get_device_properties().total_memory
        others = memory_of_others(torch.device("cuda", torch.cuda.current_device()))
        text += f" on a GPU of {total / 1e9:.3g} GB"
        if others > 0.05 * total:
            text += f", of which others hold {others / 1e9:.3g} GB (nvidia-smi names them)"
    return UserError(f"{text}: {out_of_memory_advice()}{memory_snapshot()}")


_error: BaseException | None = None  # that ends this process, and tells where, if others wait


def run(main: Callable[[], None]) -> None:
    """Run a script's main function. A user error ends it with one line and exit code 2 on every
    rank; so does a full or read-only disk."""
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="replace")  # what a terminal lacks
    try:
        main()
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt) and is_rank_zero():
            endings.end_interrupted()
        if isinstance(error, SystemExit) and not dist.is_initialized():
            raise  # --help
        global _error
        _error = error
        on_cpu = "DefaultCPUAllocator: can't allocate memory" in str(error)
        if isinstance(error, torch.OutOfMemoryError) or on_cpu:
            error = _out_of_memory()
        if isinstance(error, OSError) and (code := errno.errorcode.get(error.errno)) in ADVICE:
            hint = _hint(_store()) if dist.is_initialized() else ""
            error = UserError(f"{error}: {ADVICE[code]}{hint}")
        store = _store() if dist.is_initialized() else None
        if store is None and isinstance(error, BrokenPipeError):  # who reads has left, as head does
            endings.end(128 + signal.SIGPIPE, "nobody reads what this prints", show=False)
        if isinstance(error, UserError):
            _fail(store, 2, str(error))
        rank, reason = os.environ.get("RANK", 0), str(error).split("\n")[0]
        if store is None and isinstance(error, dist.DistError):
            _fail(store, 1, f"rank {rank} cannot join the other ranks: {reason}")
        message = f"rank {rank} failed: {type(error).__name__}: {reason}".removesuffix(": ")
        if store is None or dist.get_world_size() == 1:
            endings.report(message)
            raise
        peer_lost = isinstance(error, dist.DistError) or re.search(OF_GLOO, str(error)) is not None
        _fail(store, 1, message, traceback.format_exc(), peer_lost)
    if dist.is_initialized():
        _store().set(f"rank {dist.get_rank()} is done", "")
        dist.destroy_process_group()


def _fail(
    store: dist.Store | None, code: int, message: str, details: str = "", peer_lost: bool = False
) -> None:
    """End this process with the code and message of the first rank to fail, which prints the
    message, after its `details`; on every other node the first rank does. Without a store, before
    ranks have met, all fail alike.

    If a peer is lost, the watching threads get some time to find out which rank has failed. If they
    do not, all ranks live, and the message says which one the others waited for."""
    endings.end_if_orphaned()
    show, rank = os.environ.get("LOCAL_RANK", "0") == "0", os.environ.get("RANK")
    node = os.environ.get("GROUP_RANK")
    try:
        if peer_lost:
            store.set("peer lost", "")
            try:
                store.wait(["failed"], timedelta(seconds=3 * PEER_LOST_TIMEOUT))
            except dist.DistStoreError:  # nothing was found
                reason = f"{_describe_stuck(store)}; " if _error else ""
                message = f"{reason}{message}{_hint(store)}"
        if store:
            mine = json.dumps([code, message, rank, node])
            first = store.compare_set("failed", "", mine).decode()
            code, message, first_rank, first_node = json.loads(first)
            show = first_rank == rank or (show and first_node != node)
            details = details if first == mine else ""
        elif not show:
            time.sleep(2)  # torchrun ends all ranks when the first has ended: another one prints
    except dist.DistError:  # torchrun on the first node, which kept the store, has gone
        message, details = "the connection to the first node is lost", ""
    sys.stdout.flush()
    if show:
        print(details, end="", file=sys.stderr, flush=True)
    endings.end(code, message, show)


# ---------------------------------------------------------------------------------- heartbeats


def _watch_next_rank(store: dist.Store, rank: int, size: int) -> None:
    """Send a heartbeat every second, expect the next rank's, and end this process when some rank
    has failed. The store serves a few small requests a second from each rank."""
    other, host = (rank + 1) % size, socket.gethostname()
    last_heartbeat, heard_at = b"", time.monotonic()
    reported = told = -1  # the step after which this rank has reported, and rank 0 has printed
    for beat in itertools.count():
        try:
            step, ended_at, report_at = _last_step or (None, 0.0, math.inf)
            where = f"last at step {step or 0}, {stuck.position()[0]}"
            store.set(f"heartbeat of rank {rank}", f"on {host} ({where}), {beat}")
            failed, peer_lost = store.check(["failed"]), store.check(["peer lost"])
            other_done = store.check([f"rank {other} is done"])
            key = f"heartbeat of rank {other}"
            heartbeat = store.get(key) if store.check([key]) else b""  # get alone would wait
            late = time.monotonic() - report_at
            if (late > 0 or peer_lost) and reported != step:
                reported = step
                store.set(f"report of rank {rank}", json.dumps(stuck.report(_error)))
            if rank == 0 and late > GRACE and told != step:
                told, line = step, _describe_stuck(store)
                store.set("stuck", json.dumps([step, line]))
                seconds = time.monotonic() - ended_at
                print_rank_zero(f"no step for {seconds:.0f} s: {line}", file=sys.stderr)
                endings.report(line + _hint(store))  # NCCL may abort this process
            elif told not in (-1, step):  # it has gone on
                told = -1
                endings.report("")
        except dist.DistError:
            failed = True
        if failed:
            if not _script_ended.wait(PEER_LOST_TIMEOUT):  # it may be about to exit by itself
                _fail(store, 1, "")
            return
        silence = time.monotonic() - heard_at
        if heartbeat != last_heartbeat or other_done:
            last_heartbeat, heard_at = heartbeat, time.monotonic()
        elif silence > (PEER_LOST_TIMEOUT if peer_lost else HEARTBEAT_TIMEOUT):
            where = heartbeat.decode().rpartition(",")[0] or "on an unknown host"
            _fail(store, 1, f"rank {other} {where} has died or is frozen{_hint(store)}")
        if _script_ended.wait(1):
            return


def _describe_stuck(store: dist.Store) -> str:
    """Return which rank keeps the others waiting: what rank 0 has found out in this step, so that
    not every rank reads the reports of all; else as the reports have it."""
    step, line = json.loads(store.get("stuck")) if store.check(["stuck"]) else (None, "")
    if _last_step and step == _last_step[0]:
        return line
    keys = {rank: f"report of rank {rank}" for rank in range(dist.get_world_size())}
    found = {rank: json.loads(store.get(key)) for rank, key in keys.items() if store.check([key])}
    return stuck.describe(found)


def _hint(store: dist.Store) -> str:
    """Return from which checkpoint to continue, or "" before there is one."""
    newest = newest_checkpoint(store)
    return f"; --resume continues from {newest}" if newest else ""


_script_ended = threading.Event()  # set when Python exits; ends the watching thread


def _stop_watching(watcher: threading.Thread) -> None:
    _script_ended.set()
    watcher.join()  # a thread in the middle of a request would crash Python's exit


def _exit_late(signal_number: int, frame) -> None:
    """Handle SIGTERM, which torchrun sends to all ranks when one has died: stay alive until the
    watching threads have found out which. The training loop has a handler of its own."""
    message = f"rank {dist.get_rank()} was ended by SIGTERM"
    _fail(_store(), 128 + signal_number, message, peer_lost=True)


def _store() -> dist.Store:
    return dist.distributed_c10d._get_default_store()
