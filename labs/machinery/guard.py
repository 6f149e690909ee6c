"""Check a submission in a process of its own, and its ranks within limits: for grading.py.

A student's code runs in ranks alone, which are forks of the process that checks. A rank is guarded
before anything else: it may write in the submission's directory, and read what Python and the
project need, but no solution and no other student's file. It may not start programs, signal others
or connect to anything, and has limits of memory and of seconds. The process that checks may read
the solution, and it alone has the pipe for the result.

Linux refuses files itself (Landlock, since 5.13), and signals (since 6.12). Elsewhere, and for all
else, Python's audit hooks stop accidents and simple attempts. Against more, grade in a container
without a network.
"""

import _signal
import contextlib
import ctypes
import json
import multiprocessing
import os
import posix
import resource
import shutil
import signal
import struct
import sys
import tempfile
import time
import traceback
from collections import deque
from collections.abc import Iterator
from multiprocessing import connection
from pathlib import Path
from typing import NamedTuple

import torch

from labs.machinery.checking import check

LABS = Path(__file__).resolve().parent.parent
FORK = multiprocessing.get_context("fork")
MEMORY = 1 << 30  # bytes that a rank may have more than it began with, shared ones too
LIMITS = {resource.RLIMIT_DATA: MEMORY, resource.RLIMIT_FSIZE: 1 << 28}  # bytes, of a rank
REFUSED = """
subprocess.Popen os.system os.exec os.posix_spawn os.spawn os.fork os.forkpty os.killpg
ctypes.dlopen ctypes.dlsym resource.prlimit sqlite3.connect
""".split()
# Which make no event of an audit: signals to others, and memory that no limit of a process counts.
REMOVED = "pidfd_open", "pidfd_send_signal", "memfd_create"
CHANGES = "remove rename rmdir mkdir link symlink chmod chown truncate utime setxattr".split()
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
READABLE = [
    *(Path(prefix, "lib") for prefix in (sys.prefix, sys.base_prefix, "/usr", "/")),
    *"/usr/lib64 /lib64 /etc/ld.so.cache /sys /dev/null /dev/urandom".split(),
    *(Path(torch.__file__).parent.parent, *LABS.parent.glob("*.py"), LABS / "machinery"),
    *(*(path.parent for path in LABS.parent.glob("*/__init__.py")), *LABS.glob("*/check.py")),
]
READABLE = [path for path in (Path(place).resolve() for place in READABLE) if path.exists()]


class NotAllowed(PermissionError):
    """A submission reached for what it may not have."""


def guard(home: Path, cpu_seconds: int) -> None:
    """From here on, let this process, a rank, have one directory, so many seconds of a core, and no
    file that is open now."""
    refused = frozenset(REFUSED)
    changes = frozenset(f"os.{name}" for name in CHANGES)
    own = os.getpid()

    def hook(event: str, args: tuple) -> None:
        if event in refused or (event == "os.kill" and args[0] != own):
            raise NotAllowed(f"a submission may not use {event}")
        if event.startswith("socket.") and event not in ("socket.__new__", "socket.gethostname"):
            raise NotAllowed(f"a submission may not use the network ({event})")
        if event in changes or event == "open":
            writes = event != "open" or (args[2] or 0) & WRITING
            verb, places = ("change", [home]) if writes else ("read", [home, *READABLE])
            paths = args[:1] if event == "open" else args[:2]  # the second of open is its mode
            for name in (path for path in paths if isinstance(path, str | bytes | os.PathLike)):
                path = Path(os.fsdecode(name))
                if not any(map(path.resolve().is_relative_to, places)):
                    raise NotAllowed(f"a submission may not {verb} {path}")

    try:
        os.closerange(3, 1 << 12)
        limits = LIMITS | {resource.RLIMIT_AS: bytes_mapped() + MEMORY}
        for kind, most in limits.items():
            with contextlib.suppress(ValueError):  # it is lower already
                resource.setrlimit(kind, (most, most))
        resource.setrlimit(resource.RLIMIT_CPU, (cpu_seconds, cpu_seconds + 1))
        for module in (os, posix, signal, _signal):
            for name in REMOVED:
                vars(module).pop(name, None)
        if sys.platform == "linux":
            restrict_files(home)
        sys.addaudithook(hook)
    except BaseException:  # no rank without a guard
        traceback.print_exc()
        os._exit(1)


def bytes_mapped() -> int:
    """Return the bytes of this process's addresses, as RLIMIT_AS counts them."""
    path = Path("/proc/self/statm")
    if not path.exists():
        return 1 << 50  # macOS: no limit
    return int(path.read_text().split()[0]) * resource.getpagesize()


def restrict_files(home: Path) -> None:
    """Let Linux refuse this process all other files, also where code opens them that is not
    Python's, all programs, and signals to processes outside."""
    linux = ctypes.CDLL(None)
    create, add, restrict, no_new_privileges = 444, 445, 446, 38
    version = linux.syscall(create, None, 0, 1)
    if version < 1:  # it is switched off
        return
    execute, read_file, read_directory = 1, 4, 8
    every = (1 << min(12 + version, 15)) - 1
    attributes = struct.pack("Q", every)
    if version >= 6:
        network, signals = 0, 2  # the network is for gloo; audit hooks refuse it to the student
        attributes = struct.pack("QQQ", every, network, signals)
    ruleset = linux.syscall(create, attributes, len(attributes), 0)
    rights = {path: read_file | read_directory * path.is_dir() for path in READABLE}
    for path, of_path in (rights | {home: every - execute}).items():
        place = os.open(path, os.O_PATH)
        linux.syscall(add, ruleset, 1, struct.pack("=Qi", of_path, place), 0)
        os.close(place)
    linux.prctl(no_new_privileges, 1, 0, 0, 0)
    linux.syscall(restrict, ruleset, 0)
    os.close(ruleset)


class Job(NamedTuple):
    """A file that is to be checked."""

    lab: str
    file: Path
    seed: int
    sizes: tuple[int, ...]  # numbers of ranks
    seconds: float  # that it has, by the clock
    cpu_seconds: int  # that each of its ranks has, of a core


class Check:
    """A check in a directory where nothing else is: in a fork, which has made all imports."""

    def __init__(self, job: Job):
        self.job, self.deadline = job, time.monotonic() + job.seconds
        self.home = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        self.pipe, result = FORK.Pipe(duplex=False)
        copy = Path(self.home.name).resolve() / f"{job.lab}.py"
        shutil.copyfile(job.file, copy)
        given = job._replace(file=copy), result
        self.process = FORK.Process(target=check_apart, args=given)
        self.process.start()
        os.setpgid(self.process.pid, self.process.pid)  # so that its ranks can be ended with it
        result.close()

    def end(self) -> dict:
        """Return what was found. If nothing was, because its seconds are over or it has ended
        itself, nothing that it wrote is read. It is ended with its ranks."""
        found = failed(f"it took more than {self.job.seconds:.0f} seconds, or ended itself")
        try:
            if self.pipe.poll():
                with contextlib.suppress(EOFError):
                    found = json.loads(self.pipe.recv_bytes())
        finally:  # Ctrl-C leaves no process behind, nor does a submission
            with contextlib.suppress(PermissionError):  # of macOS, if it has ended
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.join()
            self.pipe.close()
            for _ in range(20):  # a rank that is being ended may still write
                shutil.rmtree(self.home.name, ignore_errors=True)
                if not Path(self.home.name).exists():
                    break
                time.sleep(0.05)
            self.home.cleanup()
        for key in ("mistake", "text"):  # without what would act on a terminal
            found[key] = "".join(c for c in found[key] if c.isprintable() or c == "\n")
        return found


def check_guarded(jobs: list[Job], at_once: int = 1) -> Iterator[tuple[int, dict]]:
    """Check files, so many at a time. Yield the place of each in `jobs` and what was found, as they
    end."""
    waiting = deque(enumerate(jobs))
    running = {}
    try:
        while waiting or running:
            while waiting and len(running) < at_once:
                place, job = waiting.popleft()
                running[place] = Check(job)
            first_deadline = min(check.deadline for check in running.values())
            pipes = [check.pipe for check in running.values()]
            connection.wait(pipes, max(0.0, first_deadline - time.monotonic()))
            for place, check in list(running.items()):
                if check.pipe.poll() or time.monotonic() >= check.deadline:
                    yield place, running.pop(place).end()
    finally:
        for check in running.values():
            check.end()


def failed(text: str) -> dict:
    return dict(passed=False, points=0, mistake=text.splitlines()[-1], text=text)


def check_apart(job: Job, result: connection.Connection) -> None:
    """Check the file on all its numbers of ranks, and send what is found. Each fork of this
    process, a rank, is guarded."""
    file = job.file
    os.chdir(file.parent)
    tempfile.tempdir = str(file.parent)
    output = os.open("output", os.O_RDWR | os.O_CREAT)
    for stream in (0, 1, 2):
        os.dup2(output, stream)
    sys.dont_write_bytecode = True  # imports of the student's are not to write
    os.register_at_fork(after_in_child=lambda: guard(file.parent, job.cpu_seconds))
    reports = []
    started = time.monotonic()
    try:
        for size in job.sizes:
            reports.append(check(job.lab, size, job.seed, file))
            if not reports[-1].properties:  # it ended with an error, or hangs
                break
        shown = next((report for report in reports if not report.passed), reports[-1])
        points = sum(line.ok for report in reports for line in report.properties)
        text = shown.text.replace(str(file), file.name)
        found = dict(passed=shown.passed, points=points, mistake=shown.mistake, text=text)
    except Exception:
        found = failed(traceback.format_exc())
    found["seconds"] = time.monotonic() - started
    result.send_bytes(json.dumps(found).encode())
