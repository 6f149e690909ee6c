"""Check one file of a submission in a process of its own, within limits: for grading.py.

The student's code may read and write in its own directory, and read what Python itself reads. It
may not connect to anything, start programs, or read the solutions and other students' files. These
limits are made with audit hooks of Python: they stop accidents and simple attempts. Against someone
who wants to break out, grade in a container without a network.
"""

import contextlib
import json
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

from labs.machinery.checking import check, check_module

LABS = Path(__file__).resolve().parent.parent
LONGEST = 60.0  # seconds for a submission
AT_ONCE = max(1, (os.cpu_count() or 1) // 2)  # submissions: a check runs on two ranks and more
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
STARTS = "subprocess.Popen os.system os.exec os.posix_spawn os.spawn os.fork os.forkpty os.kill"
STARTS = {*STARTS.split(), "os.killpg", "ctypes.dlopen", "ctypes.dlsym"}
CHANGES = {f"os.{name}" for name in "remove rename rmdir mkdir link symlink chmod chown".split()}
CHANGES.add("shutil.rmtree")  # which then names its files by open directories
READABLE = [Path(sys.prefix).resolve(), Path(sys.base_prefix).resolve(), LABS.parent]
READABLE += [Path("/dev"), Path("/proc/self")]


class NotAllowed(Exception):
    """A submission reached for what it may not have."""


def guard(student: Path) -> None:
    """From here on, code in the file `student`, and what it calls, has only its own directory."""
    home = student.parent.resolve()

    def hook(event: str, args: tuple) -> None:
        if event in STARTS:
            what = f"start programs ({event})"
        elif event.startswith("socket.") and event not in ("socket.__new__", "socket.gethostname"):
            what = f"use the network ({event})"
        elif event in CHANGES or event == "open":
            if event != "open" and isinstance(args[-1], int) and args[-1] > 2:
                return  # within a directory that is open
            writes = event in CHANGES or bool((args[2] or 0) & WRITING)
            paths = [Path(os.fsdecode(a)) for a in args[:2] if isinstance(a, str | bytes | Path)]
            paths = paths[:1] if event == "open" else paths  # the second is the mode
            outside = [path for path in paths if not may_use(path.resolve(), home, writes)]
            if not outside:
                return
            what = f"{'change' if writes else 'read'} {outside[0]}"
        else:
            return
        if is_called_by(student, sys._getframe(1)):
            raise NotAllowed(f"a submission may not {what}")

    sys.addaudithook(hook)


def may_use(path: Path, home: Path, writes: bool) -> bool:
    if path.is_relative_to(home):
        return True
    solutions = path.is_relative_to(LABS) and path.name in ("answer.py", "wrong.txt")
    return not writes and not solutions and any(map(path.is_relative_to, READABLE))


def is_called_by(student: Path, frame: FrameType | None) -> bool:
    """Return whether the innermost of these frames that is the student's or a check's is the
    student's. A thread without either was started by a student."""
    while frame:
        name = frame.f_code.co_filename
        if name == str(student):
            return True
        if name.startswith(str(LABS)) and name != __file__:
            return False
        frame = frame.f_back
    return threading.current_thread() is not threading.main_thread()  # one that the student started


def run_guarded(jobs: list[tuple], longest: float = LONGEST) -> Iterator[tuple[int, dict]]:
    """Check files, jobs of (lab, file, seed), several at a time. Yields (index of a job, whether it
    passed, its points, the mistake and the report) as they end: each in a fork, which has made all
    imports already. A fork ends after `longest` seconds, with its ranks."""
    waiting, running = list(enumerate(jobs)), {}
    with tempfile.TemporaryDirectory() as folder:  # elsewhere than the students' files
        try:
            while waiting or running:
                while waiting and len(running) < AT_ONCE:
                    index, job = waiting.pop(0)
                    result = Path(folder, str(index))
                    running[start(*job, result)] = index, result, time.monotonic() + longest
                for process, (index, result, deadline) in list(running.items()):
                    if not os.waitpid(process, os.WNOHANG)[0]:
                        if time.monotonic() < deadline:
                            continue
                        kill(process)
                    del running[process]
                    yield index, read_result(result, longest)
                time.sleep(0.02)
        finally:  # Ctrl-C leaves no process behind
            for process in running:
                kill(process)


def start(lab: str, file: Path, seed: int, result: Path) -> int:
    """Start a check in a fork, which writes its result when all is over: until then no file is open
    that the student's code could write to."""
    if process := os.fork():
        return process
    os.setsid()  # so that it can be ended together with its ranks
    found = in_fork(lab, file, seed)
    result.write_text(json.dumps(found))
    os._exit(0)


def kill(process: int) -> None:
    with contextlib.suppress(ProcessLookupError):  # it has ended, or has no group yet
        os.killpg(process, signal.SIGKILL)
    os.waitpid(process, 0)


def read_result(path: Path, longest: float) -> dict:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):  # it was not written, or not whole
        text = f"it took more than {longest:g} seconds, or ended itself"
        return dict(passed=False, points=0, mistake=text, text=text)


def in_fork(lab: str, file: Path, seed: int) -> dict:
    """Check the file on all its numbers of ranks, guarded."""
    os.chdir(file.parent)
    tempfile.tempdir = str(file.parent)
    output = os.open("output", os.O_WRONLY | os.O_CREAT)
    for stream in (1, 2):
        os.dup2(output, stream)
    sys.dont_write_bytecode = True  # imports of the student's are not to write
    try:
        guard(file)
        reports = []
        for size in check_module(lab).SIZES:
            reports.append(check(lab, size, seed, file))
            if not reports[-1].properties:  # it ended with an error, or hangs
                break
    except Exception:
        text = traceback.format_exc()
        return dict(passed=False, points=0, mistake=text.splitlines()[-1], text=text)
    shown = next((report for report in reports if not report.passed), reports[-1])
    points = sum(line.ok for report in reports for line in report.properties)
    return dict(passed=shown.passed, points=points, mistake=shown.mistake, text=shown.text)
