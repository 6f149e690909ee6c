"""Check one file of a submission, within limits, and print the result as JSON: for grading.py.

    python labs/guard.py LAB FILE SEED

The student's code may read and write in its own directory, and read what Python itself reads. It
may not connect to anything, start programs, or read the solutions and other students' files. These
limits are made with audit hooks of Python: they stop accidents and simple attempts. Against someone
who wants to break out, grade in a container without a network.
"""

import sys
from pathlib import Path

LABS = Path(__file__).resolve().parent
sys.path[:0] = [str(LABS.parent), str(LABS)]

import json
import os
from types import FrameType

import torch
from checking import check
from training import check_module

WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
STARTS = "subprocess.Popen os.system os.exec os.posix_spawn os.spawn os.fork os.forkpty os.kill"
STARTS = {*STARTS.split(), "os.killpg", "ctypes.dlopen", "ctypes.dlsym"}
CHANGES = {f"os.{name}" for name in "remove rename rmdir mkdir link symlink chmod chown".split()}
CHANGES.add("shutil.rmtree")  # which then names its files by open directories
READABLE = [Path(sys.prefix), Path(sys.base_prefix), LABS.parent, Path("/dev"), Path("/proc/self")]


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


def main() -> None:
    lab, file, seed = sys.argv[1], Path(sys.argv[2]).resolve(), int(sys.argv[3])
    torch.set_num_threads(1)
    sys.dont_write_bytecode = True  # imports of the student's are not to write
    guard(file)
    reports = []
    for size in check_module(lab).SIZES:
        reports.append(check(lab, size, seed, file))
        if not reports[-1].properties:  # it ended with an error, or hangs
            break
    points = sum(line.ok for report in reports for line in report.properties)
    shown = next((report for report in reports if not report.passed), reports[-1])
    passed = shown.passed
    print(json.dumps(dict(passed=passed, points=points, mistake=shown.mistake, text=shown.text)))


if __name__ == "__main__":
    main()
