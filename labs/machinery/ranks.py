"""Run a function on several ranks of this machine, and tell how each of them ended.

Ranks are forks of this process, which has made all imports: they start in milliseconds. They meet
in a file, so no port is taken, and talk over the loopback interface. Each rank writes down every
call of torch.distributed before it makes it. If nothing happens for a while, the ranks are ended,
and these notes tell where each of them waits.
"""

import contextlib
import gc
import itertools
import json
import os
import re
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path, PosixPath
from types import FrameType

import torch
import torch.distributed as dist
from torch.futures import Future

from model import LlamaConfig
from plumbing.processes import UserError, register_gloo

PATIENCE = 5.0  # seconds, after which ranks that do nothing are ended
ROOM = 1 << 24  # bytes that results and notes of a check may take
LONGEST = 30.0  # seconds that one may compute without a call of torch.distributed
CALLS = """
all_reduce reduce broadcast all_gather all_gather_into_tensor all_gather_object gather scatter
reduce_scatter reduce_scatter_tensor all_to_all all_to_all_single send recv isend irecv barrier
new_group
""".split()
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
        processes = set()
        named = [kind for kind in tuple.__subclasses__() if hasattr(kind, "_fields")]
        for rank in range(size):
            if (process := os.fork()) == 0:
                _be_rank(lambda rank: plain(function(rank), named), rank, size, directory, student)
            processes.add(process)
        hung = _wait(processes, directory)
        calls = [_read_calls(directory / f"calls-{rank}") for rank in range(size)]
        _show_output(directory)
        if hung:  # ranks that are killed make others fail
            returned = [(directory / f"result-{rank}").exists() for rank in range(size)]
            lines = [_read_line(directory / f"line-{rank}") for rank in range(size)]
            return Ended(hangs=True, returned=returned, calls=calls, lines=lines)
        if errors := sorted(directory.glob("error-*")):
            return Ended(error=RankError(**json.loads(errors[0].read_text())), calls=calls)
        paths = [directory / f"result-{rank}" for rank in range(size)]
        for rank, path in enumerate(paths):
            if not path.exists():
                return Ended(error=RankError(rank, "Ended", "without a result", None), calls=calls)
        with torch.serialization.safe_globals([*named, LlamaConfig, PosixPath]):
            results = [torch.load(path, weights_only=True) for path in paths]
        unfinished = [_read_calls(directory / f"unfinished-{rank}") for rank in range(size)]
        return Ended(
            results, calls=calls, unfinished=[c for of_rank in unfinished for c in of_rank]
        )


def _be_rank(function: Callable, rank: int, size: int, directory: Path, student: Path) -> None:
    """Be a rank until its end: run the function, and leave its result or its error in a file.

    Who leaves breaks its connections to ranks that still wait for it, which then fail as well. So a
    rank stays until all have their results, or until it is killed."""
    output = os.open(directory / f"output-{rank}", os.O_WRONLY | os.O_CREAT)
    os.dup2(output, 2)
    notes = os.getppid(), directory, rank, student
    threading.Thread(target=_watch, args=notes, daemon=True).start()
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
        (directory / f"unfinished-{rank}").write_text("".join(unfinished.values()))
        torch.save(result, directory / f"result-{rank}")
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
    lines = {}
    for path in sorted(directory.glob("output-*")):
        lines |= dict.fromkeys(path.read_text(errors="replace").splitlines())
    for line in lines:
        if not re.match(r"terminate called|  what\(\):|\[rank\d+\]:\[F.*Gloo|$", line):
            print(line, file=sys.stderr, flush=True)


def plain(value: object, named: list[type]) -> object:
    """Return a result without anything that runs code when it is loaded: of the named tuples only
    those that are `named`, and a tensor of the student's class becomes one of torch's."""
    if isinstance(value, torch.Tensor):
        return value.detach().as_subclass(torch.Tensor)
    if isinstance(value, dict):
        return {plain(key, named): plain(of_key, named) for key, of_key in value.items()}
    if isinstance(value, torch.Size):
        return value
    if isinstance(value, list | tuple):
        items = [plain(item, named) for item in value]
        if type(value) in named:
            return type(value)(*items)
        return tuple(items) if isinstance(value, tuple) else items
    for kind in (bool, int, float, str):
        if isinstance(value, kind):
            return kind(value)
    if value is None or isinstance(value, torch.dtype | LlamaConfig | Path):
        return value
    raise TypeError(f"a result should have tensors and numbers in it, not a {type(value).__name__}")


def _no_breakpoint(*_) -> None:
    raise RuntimeError("breakpoint() cannot ask several ranks at once: use print")


def _watch(parent: int, directory: Path, rank: int, student: Path) -> None:
    """Note now and then how long this rank has computed, and in which line of the student's file
    its main thread is. End it when the process that started it has ended, even if it waits."""
    main = threading.main_thread().ident
    while os.getppid() == parent:
        line = _line_of(main, str(student))
        seconds = time.process_time() - time.thread_time()  # but for what this thread takes
        with contextlib.suppress(OSError):  # the directory is gone when all is over
            (directory / f"seconds-{rank}").write_text(f"{seconds:9.3f}")
            (directory / f"line-{rank}").write_text(line)
        time.sleep(0.1)
    os._exit(1)


def _line_of(thread: int, file: str) -> str:
    """Return the line of a file in which a thread is, or ''. Keeps no frame, whose tensors would
    live on. (A frame that ends meanwhile may have something else before it than a frame.)"""
    frame = sys._current_frames().get(thread)
    while isinstance(frame, FrameType) and frame.f_code.co_filename != file:
        frame = frame.f_back
    return str(frame.f_lineno) if isinstance(frame, FrameType) else ""


def _read_line(path: Path) -> int | None:
    return int(text) if path.exists() and (text := path.read_text()) else None


def _wait(processes: set[int], directory: Path) -> bool:
    """Wait until all ranks have ended, or one has failed, or they hang. Return whether they hung.
    No rank is left then.

    Ranks hang if for PATIENCE seconds they have called nothing, and computed for a twentieth of the
    time at most: those that wait compute a little, too. A loop that computes without end gets
    LONGEST, of computing, where many others use the machine; at most four times as long."""
    running, notes, seconds = processes, None, {}
    while running:
        running = {process for process in running if not os.waitpid(process, os.WNOHANG)[0]}
        has_failed = any(directory.glob("error-*"))
        paths = [*directory.glob("calls-*"), *directory.glob("error-*")]
        before, notes = notes, {path.name: path.stat().st_size for path in paths}
        for path in directory.glob("seconds-*"):
            seconds[path.name] = float(path.read_text() or seconds.get(path.name, 0))
        now, total = time.monotonic(), sum(seconds.values())
        if notes != before:
            called = computed = now
            at_call, computed_before = seconds.copy(), total
        elif total > computed_before + 0.05 * (now - computed):
            computed, computed_before = now, total
        longest = max((s - at_call.get(name, 0) for name, s in seconds.items()), default=0)
        hangs = now - computed > PATIENCE or max(longest, (now - called) / 4) > LONGEST
        if has_failed:  # others have a moment to tell of the same error
            hangs = now - called > 0.2
        if running and hangs:
            for process in running:
                os.kill(process, signal.SIGKILL)
            for process in running:
                os.waitpid(process, 0)
            return not has_failed
        time.sleep(0.02)
    return False


@contextlib.contextmanager
def noted_calls(notes, student: Path) -> Iterator[dict[int, str]]:
    """Within this context, write a line for each call of torch.distributed before it is made.

    Yields the lines of asynchronous calls that were not waited for yet. Of these it knows those
    that the student's file makes itself: a library may test if what it gets is a dist.Work."""
    originals = {name: getattr(dist, name) for name in CALLS}
    unfinished, numbers = {}, itertools.count()

    def noting(name: str) -> Callable:
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
            line = json.dumps([name, shape, frame and frame.f_lineno, second]) + "\n"
            notes.write(line)
            returned = originals[name](*args, **kwargs)
            if not isinstance(returned, dist.Work) or frame is not caller:
                return returned
            number = next(numbers)
            unfinished[number] = line
            return NotedWork(returned, lambda: unfinished.pop(number, None))

        return call

    for name in CALLS:
        setattr(dist, name, noting(name))
    try:
        yield unfinished
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)


def _read_calls(path: Path) -> list[Call]:
    lines = path.read_text().splitlines() if path.exists() else []
    return [Call(*json.loads(line)) for line in lines]
