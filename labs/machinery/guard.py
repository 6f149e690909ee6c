"""Check a submission in a process of its own, and its ranks within limits: for grading.py.

A student's code runs in ranks alone, which are forks of the process that checks. A rank is guarded
before anything else: it may write in the submission's directory, and read what Python and the
project need, but no solution and no other student's file. It may not start programs or connect to
anything, and has limits of memory and of seconds. The process that checks may read the solution,
and it alone has the pipe for the result.

Linux refuses files itself (Landlock, since 5.13). Elsewhere, and for all else, Python's audit hooks
stop accidents and simple attempts. Against more, grade in a container without a network.
"""

import contextlib
import ctypes
import json
import multiprocessing
import os
import resource
import shutil
import signal
import struct
import sys
import tempfile
import time
import traceback
from multiprocessing import connection
from pathlib import Path

import torch

from labs.machinery.checking import check, check_module

LABS = Path(__file__).resolve().parent.parent
FORK = multiprocessing.get_context("fork")
LIMITS = {resource.RLIMIT_DATA: 2 << 30, resource.RLIMIT_FSIZE: 1 << 28}  # bytes, of a rank
REFUSED = """
subprocess.Popen os.system os.exec os.posix_spawn os.spawn os.fork os.forkpty os.killpg
ctypes.dlopen ctypes.dlsym resource.prlimit sqlite3.connect
""".split()
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


def guard(home: Path) -> None:
    """From here on, let this process, a rank, have one directory; and no file that is open now."""
    refused, changes = frozenset(REFUSED), frozenset(f"os.{name}" for name in CHANGES)
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
        for kind, most in LIMITS.items():
            with contextlib.suppress(ValueError):  # it is lower already
                resource.setrlimit(kind, (most, most))
        if sys.platform == "linux":
            restrict_files(home)
        sys.addaudithook(hook)
    except BaseException:  # no rank without a guard
        traceback.print_exc()
        os._exit(1)


def restrict_files(home: Path) -> None:
    """Let Linux refuse this process all other files, also where code opens them that is not
    Python's, and all programs."""
    linux = ctypes.CDLL(None)
    create, add, restrict, no_new_privileges = 444, 445, 446, 38
    version = linux.syscall(create, None, 0, 1)
    if version < 1:  # it is switched off
        return
    execute, read_file, read_directory, every = 1, 4, 8, (1 << min(12 + version, 15)) - 1
    ruleset = linux.syscall(create, struct.pack("Q", every), 8, 0)
    rights = {path: read_file | read_directory * path.is_dir() for path in READABLE}
    for path, of_path in (rights | {home: every - execute}).items():
        place = os.open(path, os.O_PATH)
        linux.syscall(add, ruleset, 1, struct.pack("=Qi", of_path, place), 0)
        os.close(place)
    linux.prctl(no_new_privileges, 1, 0, 0, 0)
    linux.syscall(restrict, ruleset, 0)
    os.close(ruleset)


def check_guarded(lab: str, file: Path, seed: int, seconds: float) -> dict:
    """Return what the check of a file finds, in a directory where nothing else is: in a fork, which
    has made all imports already. When its seconds are over, it is ended with its ranks, and nothing
    that it wrote is read."""
    pipe, result = FORK.Pipe(duplex=False)
    with tempfile.TemporaryDirectory() as home, contextlib.suppress(EOFError):
        copy = Path(home).resolve() / f"{lab}.py"
        shutil.copyfile(file, copy)
        process = FORK.Process(target=check_apart, args=(lab, copy, seed, result))
        process.start()
        os.setpgid(process.pid, process.pid)  # so that its ranks can be ended with it
        result.close()
        found = failed(f"it took more than {seconds:.0f} seconds, or ended itself")
        try:
            if pipe.poll(seconds):
                found = json.loads(pipe.recv_bytes())
        finally:  # Ctrl-C leaves no process behind, nor does a submission
            with contextlib.suppress(PermissionError):  # of macOS, if it has ended
                os.killpg(process.pid, signal.SIGKILL)
            process.join()
    for key in ("mistake", "text"):  # without what would act on a terminal
        found[key] = "".join(c for c in found[key] if c.isprintable() or c == "\n")
    return found


def failed(text: str) -> dict:
    return dict(passed=False, points=0, mistake=text.splitlines()[-1], text=text)


def check_apart(lab: str, file: Path, seed: int, result: connection.Connection) -> None:
    """Check the file on all its numbers of ranks, and send what is found. Each fork of this
    process, a rank, is guarded."""
    os.chdir(file.parent)
    tempfile.tempdir = str(file.parent)
    output = os.open("output", os.O_RDWR | os.O_CREAT)
    for stream in (0, 1, 2):
        os.dup2(output, stream)
    sys.dont_write_bytecode = True  # imports of the student's are not to write
    os.register_at_fork(after_in_child=lambda: guard(file.parent))
    reports, started = [], time.monotonic()
    try:
        for size in check_module(lab).SIZES:
            reports.append(check(lab, size, seed, file))
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
