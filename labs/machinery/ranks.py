"""Run a function on several ranks of this machine, and tell how each of them ended.

Ranks are forks of this process, which has made all imports: they start in milliseconds. They meet
in a file, so no port is taken, and talk over the loopback interface. Each rank writes down every
call of torch.distributed before it makes it. If all ranks do nothing but wait, they are ended, and
these notes tell where.
"""

import contextlib
import faulthandler
import gc
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path, PosixPath
from unittest import mock

import torch
import torch.distributed as dist
from torch.futures import Future

from model import LlamaConfig
from plumbing.joining import register_gloo
from plumbing.messages import UserError

LOOK = 0.05  # seconds between two looks at the ranks
PATIENCE = 100  # looks, after which ranks that only wait are ended
LONGEST = 30  # seconds that a rank may compute
ROOM = 1 << 24  # bytes that results and notes of a check may take
CALLS = """
all_reduce reduce broadcast all_gather all_gather_into_tensor all_gather_object gather scatter
reduce_scatter reduce_scatter_tensor all_to_all all_to_all_single send recv isend irecv barrier
new_group
""".split()
KILLED = "without a result: was it killed, as for memory, or does it call os._exit?"
ENDS = "wait value result synchronize is_completed is_success block_current_stream".split()
FUTURES = "get_future", "get_future_result", "then"  # whose end is that of the call, too


@dataclass
class Ended:
    """How the ranks ended: with results, or because one raised an error, or in a hang."""

    results: list | None = None  # of each rank
    error: "RankError | None" = None
    hangs: bool = False
    returned: list[bool] = field(default_factory=list)  # whether each rank's function did
    calls: list[list["Call"]] = field(default_factory=list)  # of each rank
    lines: list[int | None] = field(default_factory=list)  # of the student's file: where ranks were
    unfinished: list["Call"] = field(default_factory=list)  # asynchronous, and never waited for


@dataclass
class RankError:
    rank: int
    kind: str  # name of the exception's class
    message: str
    line: int | None  # of the student's file


@dataclass
class Call:
    """A call of torch.distributed."""

    name: str
    shape: list[int] | None  # of the first tensor; of new_group, its ranks
    line: int | None  # of the student's file
    second: list[int] | None = None  # shape of the second argument, if it is a tensor


class NotedWork:
    """What an asynchronous call returned. `on_wait` is called when somebody asks for its end.

    It is not a dist.Work: who tests for that has to be given what the call returned."""

    has_future = False  # which may have a callback, that comes before anybody waits

    def __init__(self, work: dist.Work | Future, on_wait: Callable[[], object]):
        self.work, self.on_wait = work, on_wait

    def __getattr__(self, name: str):
        if name in ENDS:
            self.on_wait()
        found = getattr(self.work, name)
        if name in FUTURES:
            self.has_future = True
            return lambda *args: NotedWork(found(*args), self.on_wait)
        return found


def run_ranks(function: Callable[[int], object], size: int, student: Path) -> Ended:
    """Return what function(rank) returned on each of `size` ranks, or how it failed. `student` is
    the file whose lines are reported."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        directory = Path(name)
        if shutil.disk_usage(directory).free < ROOM:
            raise UserError(f"{directory.parent} is full: make room, or set TMPDIR to another one")
        named = [kind for kind in tuple.__subclasses__() if hasattr(kind, "_fields")]
        processes = set()
        for rank in range(size):
            if (process := os.fork()) == 0:
                _be_rank(lambda rank: plain(function(rank), named), rank, size, directory, student)
            processes.add(process)
        hung = _wait(processes, directory)
        _show_output(directory)
        calls = [_read_calls(directory / f"calls-{rank}") for rank in range(size)]
        paths = [directory / f"result-{rank}" for rank in range(size)]
        returned = [path.exists() for path in paths]
        if hung:  # ranks that are killed make others fail
            lines = [_read_line(directory / f"line-{rank}", student) for rank in range(size)]
            return Ended(hangs=True, returned=returned, calls=calls, lines=lines)
        if errors := sorted(directory.glob("error-*")):
            return Ended(error=RankError(**json.loads(errors[0].read_text())), calls=calls)
        if not all(returned):
            error = RankError(returned.index(False), "Ended", KILLED, None)
            return Ended(error=error, calls=calls)
        with torch.serialization.safe_globals([*named, LlamaConfig, PosixPath]):
            results, unfinished = zip(*(torch.load(path, weights_only=True) for path in paths))
        unfinished = [Call(*call) for of_rank in unfinished for call in of_rank]
        return Ended([*results], calls=calls, unfinished=unfinished)


def _be_rank(function: Callable, rank: int, size: int, directory: Path, student: Path) -> None:
    """Be a rank until its end: run the function, and leave its result or its error in a file.

    Who leaves breaks its connections to ranks that still wait for it, which then fail as well. So a
    rank stays until all have their results, or until it is killed."""
    os.dup2(os.open(directory / f"output-{rank}", os.O_WRONLY | os.O_CREAT), 2)
    threading.Thread(target=_end_after, args=(os.getppid(),), daemon=True).start()
    faulthandler.register(signal.SIGUSR1, open(directory / f"line-{rank}", "w"), all_threads=False)
    signal.signal(signal.SIGXCPU, _end_loop)
    with contextlib.suppress(ValueError):  # a limit of the user's is lower
        resource.setrlimit(resource.RLIMIT_CPU, (LONGEST, LONGEST + 5))
    sys.breakpointhook = _no_breakpoint
    gc.freeze()  # what is here already is not looked at when tensors are counted
    try:
        torch.set_num_threads(1)
        # The functions that 2.13 calls deprecated are those that 2.11 has, too.
        warnings.filterwarnings("ignore", ".*is deprecated", FutureWarning)
        register_gloo("127.0.0.1")
        store = dist.FileStore(str(directory / "store"), size)
        dist.init_process_group("one_thread_gloo", store=store, rank=rank, world_size=size)
        with open(directory / f"calls-{rank}", "w", buffering=1) as notes:
            with noted_calls(notes, student) as unfinished:
                result = function(rank)
        torch.save((result, [*unfinished.values()]), directory / f"result-{rank}")
        while len(list(directory.glob("result-*"))) < size:
            time.sleep(0.05)
    except BaseException as error:
        lines = [f.lineno for f in traceback.extract_tb(error.__traceback__)
                 if f.filename == str(student)]  # fmt: skip
        what = RankError(rank, type(error).__name__, str(error), lines[-1] if lines else None)
        temporary = directory / f"part-{rank}"
        temporary.write_text(json.dumps(vars(what)))
        temporary.rename(directory / f"error-{rank}")
        time.sleep(3600)
    sys.stdout.flush()
    os._exit(0)


def _show_output(directory: Path) -> None:
    """Print what ranks wrote to stderr, each line once; but not what gloo says as it aborts, or
    before it raises the same as an error."""
    texts = (path.read_text(errors="replace") for path in sorted(directory.glob("output-*")))
    for line in dict.fromkeys(line for text in texts for line in text.splitlines()):
        if not re.match(r"terminate called|  what\(\):|\[rank\d+\]:\[F.*Gloo|$", line):
            print(line, file=sys.stderr, flush=True)


def plain(value: object, named: list[type]) -> object:
    """Return a result without anything that runs code when it is loaded: of the named tuples only
    those that are `named`, and a tensor of the student's class becomes one of torch's."""
    if isinstance(value, torch.Tensor):
        return value.detach().as_subclass(torch.Tensor)
    if isinstance(value, dict):
        return {plain(key, named): plain(of_key, named) for key, of_key in value.items()}
    if isinstance(value, list | tuple) and not isinstance(value, torch.Size):
        items = [plain(item, named) for item in value]
        if type(value) in named:
            return type(value)(*items)
        return tuple(items) if isinstance(value, tuple) else items
    for kind in (bool, int, float, str):
        if isinstance(value, kind):
            return kind(value)
    if value is None or isinstance(value, torch.Size | torch.dtype | LlamaConfig | Path):
        return value
    raise TypeError(f"a result should have tensors and numbers in it, not a {type(value).__name__}")


def _no_breakpoint(*_) -> None:
    raise RuntimeError("breakpoint() cannot ask several ranks at once: use print")


def _end_loop(*_) -> None:
    seconds, _ = resource.getrlimit(resource.RLIMIT_CPU)
    raise TimeoutError(f"{seconds} seconds of computing: does a loop not end?")


def _end_after(parent: int) -> None:
    """End this rank when the process that started it has ended, even if it waits."""
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


def _read_line(path: Path, student: Path) -> int | None:
    """Return the line of the student's file in which faulthandler found a rank."""
    name = str(student).encode("ascii", "backslashreplace").decode()
    text = path.read_text() if path.exists() else ""
    found = re.search(rf'File "{re.escape(name)}", line (\d+)', text)
    return int(found[1]) if found else None


def _wait(processes: set[int], directory: Path) -> bool:
    """Wait until all ranks have ended, or one has failed, or they hang. Return whether they hung.
    No rank is left then.

    Ranks hang if they have called nothing at PATIENCE looks, and were not computing at these. Looks
    are counted and not seconds: where others use the machine, this process waits for it, too."""
    running = processes
    notes = None
    still = 0
    while running := {process for process in running if not os.waitpid(process, os.WNOHANG)[0]}:
        has_failed = any(directory.glob("error-*"))
        paths = [*directory.glob("calls-*"), *directory.glob("error-*")]
        before = notes
        notes = {path.name: path.stat().st_size for path in paths}
        if notes != before:
            still = 0
        elif has_failed or not computes(running):
            still += 1
        else:  # who only asks again and again whether others have come computes now and then
            still = max(0, still - 1)
        if still > (4 if has_failed else PATIENCE):  # others may tell of the same error
            for kind, seconds in ((signal.SIGUSR1, 0.5), (signal.SIGKILL, 0)):
                for process in running:
                    os.kill(process, kind)
                time.sleep(0 if has_failed else seconds)  # in which ranks write down their lines
            for process in running:
                os.waitpid(process, 0)
            return not has_failed
        time.sleep(LOOK)
    return False


def computes(processes: set[int]) -> bool:
    """Return whether any thread of these processes has a core or a disk, or waits for one. Those
    that sleep wait for other ranks."""
    if sys.platform != "linux":
        command = ["ps", "-o", "state=", "-p", ",".join(map(str, processes))]
        states = subprocess.run(command, stdout=subprocess.PIPE, text=True).stdout
        return any(state in states for state in "RU")
    for path in (p for process in processes for p in Path(f"/proc/{process}/task").glob("*/stat")):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            if path.read_text().rpartition(") ")[2][0] in "RD":
                return True
    return False


def busy() -> str:
    """Return the end of a sentence on a hang that may be none; "" if this machine is not busy."""
    load = os.getloadavg()[0]
    cores = os.cpu_count() or 1
    says = f" Or is the machine busy (load {load:.0f} on {cores} cores)? Then run it again."
    return says if load > 2 * cores else ""


@contextlib.contextmanager
def noted_calls(notes, student: Path) -> Iterator[dict[int, list]]:
    """Within this context, write a line for each call of torch.distributed before it is made.

    Yields the asynchronous calls that were not waited for yet. Of these it knows those that the
    student's file makes itself: a library may test if what it gets is a dist.Work."""
    unfinished = {}

    def noting(name: str, original: Callable) -> Callable:
        def call(*args, **kwargs):
            frame = caller = sys._getframe(1)
            while frame and frame.f_code.co_filename != str(student):
                frame = frame.f_back
            tensors = (a for value in (*args, *kwargs.values())
                       for a in (value if isinstance(value, list) else [value]))  # fmt: skip
            shape = next((list(t.shape) for t in tensors if isinstance(t, torch.Tensor)), None)
            if name == "new_group":
                shape = sorted(kwargs.get("ranks", args[0] if args else None) or [])
            second = next((list(a.shape) for a in args[1:2] if isinstance(a, torch.Tensor)), None)
            noted = [name, shape, frame and frame.f_lineno, second]
            notes.write(json.dumps(noted) + "\n")
            returned = original(*args, **kwargs)
            if not isinstance(returned, dist.Work) or frame is not caller:
                return returned
            unfinished[id(noted)] = noted
            return NotedWork(returned, lambda: unfinished.pop(id(noted), None))

        return call

    with mock.patch.multiple(dist, **{name: noting(name, getattr(dist, name)) for name in CALLS}):
        yield unfinished


def _read_calls(path: Path) -> list[Call]:
    lines = path.read_text().splitlines() if path.exists() else []
    return [Call(*json.loads(line)) for line in lines]
