"""Check one file of a submission in a process of its own, within limits: for grading.py.

The student's code may read and write in its own directory, and read what Python itself reads. It
may not connect to anything, start programs, or read the solutions and other students' files. These
limits are made with audit hooks of Python: they stop accidents and simple attempts. Against someone
who wants to break out, grade in a container without a network.
"""

import json
import os
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path
from types import FrameType

from checking import check
from training import check_module

LABS = Path(__file__).resolve().parent
LONGEST = 60.0  # seconds for a submission
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
    solutions = path.is_relative_to(LABS / "answers")
    return not writes and not solutions and any(map(path.is_relative_to, READABLE))


def is_called_by(student: Path, frame: FrameType | None) -> bool:
    """Return whether the innermost of these frames that is the student's or a check's is the
    student's."""
    while frame:
        name = frame.f_code.co_filename
        if name == str(student):
            return True
        if name.startswith(str(LABS)) and name != __file__:
            return False
        frame = frame.f_back
    return False


def run_guarded(lab: str, file: Path, seed: int, longest: float = LONGEST) -> dict:
    """Return whether a file passed, its points, the mistake and the report: from a fork, which has
    made all imports already. It ends after `longest` seconds, with its ranks."""
    result = tempfile.TemporaryFile("w+")  # elsewhere than the student's files
    if (process := os.fork()) == 0:
        os.setsid()  # so that it can be ended together with its ranks
        json.dump(in_fork(lab, file, seed), result)
        result.flush()
        os._exit(0)
    started = time.monotonic()
    while not os.waitpid(process, os.WNOHANG)[0]:
        if time.monotonic() - started > longest:
            os.killpg(process, signal.SIGKILL)
            os.waitpid(process, 0)
            break
        time.sleep(0.02)
    with result:
        result.seek(0)
        found = result.read()
    if not found:
        text = f"it took more than {longest:g} seconds, or ended itself"
        return dict(passed=False, points=0, mistake=text, text=text)
    return json.loads(found)


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
