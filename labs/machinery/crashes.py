"""Kill a rank in the middle of what it changes on disk: for labs/resume/check.py.

What is on disk after a SIGKILL does not depend on luck here: the process ends itself, at a change
that was chosen before.
"""

import io
import json
import os
import signal
import sys
from pathlib import Path
from typing import TextIO

import torch

CHANGES = {"os.rename": "renames", "os.remove": "removes", "os.rmdir": "removes"}
CHANGES |= {"os.mkdir": "makes", "os.link": "links", "os.symlink": "links", "os.truncate": "cuts"}
WRITES = "writes", "opens"  # so begin the changes by which a file is written


def write(notes: TextIO, *what) -> None:
    print(json.dumps(what), file=notes)


class Watched:
    """Notes what this process changes in a directory, from `begin` to `end`. A fatal change kills
    it: when half of a file is written, or before anything else. There is one a process, as Python
    cannot take its hook away again."""

    def __init__(self, directory: Path, notes: TextIO | None = None):
        self.directory, self.notes = directory, notes  # an absolute path without links
        self.changes, self.fatal, self.active = [], None, False
        self.original, torch.save = torch.save, self.save
        sys.addaudithook(self.hook)

    def begin(self, fatal: int | None = None) -> None:
        """`fatal`: the number of the change that kills, counted from 0."""
        self.changes, self.fatal, self.active = [], fatal, True

    def end(self) -> None:
        self.active = False
        if self.fatal is not None:  # there were fewer changes
            self.changes.append("returns from save")
            self.die()

    def hook(self, event: str, args: tuple) -> None:
        """Python calls this before it opens, renames or removes a file."""
        opens = event == "open" and bool((args[2] or 0) & (os.O_WRONLY | os.O_RDWR))
        if not self.active or not (opens or event in CHANGES) or isinstance(args[0], int):
            return
        path = Path(os.fsdecode(args[0]))
        if path.is_absolute() and not path.is_relative_to(self.directory):
            return
        if self.is_fatal("opens" if opens else CHANGES[event], path):
            if opens:
                os.close(os.open(path, args[2], 0o666))  # and writes nothing
            self.die()

    def save(self, obj: object, f: object, *args, **kwargs) -> None:
        """Stands in place of torch.save, which opens files without Python's knowledge."""
        name = getattr(f, "name", None) if hasattr(f, "write") else f
        if self.active and name and self.is_fatal("writes", Path(name)):
            whole = io.BytesIO()
            self.original(obj, whole)
            with open(f, "wb") if f is name else f as target:
                target.write(whole.getvalue()[: whole.tell() // 2])
            self.die()
        self.original(obj, f, *args, **kwargs)

    def is_fatal(self, what: str, path: Path) -> bool:
        """Note a change, and return whether it is the last."""
        if path.is_relative_to(self.directory):
            path = path.relative_to(self.directory)
        self.changes.append(f"{what} {path}")
        self.active = len(self.changes) - 1 != self.fatal
        return not self.active

    def die(self) -> None:
        write(self.notes, "killed", self.changes[-1])
        os.kill(os.getpid(), signal.SIGKILL)
