"""Write files and directories that appear when they are complete, or not at all."""

import contextlib
import errno
import os
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path

from plumbing import endings


@contextlib.contextmanager
def hidden_until_complete(target: Path) -> Iterator[Path]:
    """Yield a hidden path beside `target` to write a file or a directory to, and rename it to
    `target` if nothing was raised. Its name ends with the host and the id of this process: what
    processes that were killed have left in the same directory is removed first."""
    ending = f"-by-{socket.gethostname()}-"
    target.parent.mkdir(parents=True, exist_ok=True)
    for left in target.parent.glob(f".*{ending}*"):
        process = left.name.rpartition(ending)[2]
        if process.isdecimal() and not is_running(int(process)):
            remove(left, ignore_errors=True)
    hidden = target.with_name(f".{target.name}{ending}{os.getpid()}")
    with endings.ctrl_c_raises():
        try:
            yield hidden
            os.replace(hidden, target)
        except OSError as error:
            if error.errno != errno.EIO:  # which may be of a file that was read
                error.filename = error.filename or str(target)
            raise
        finally:
            remove(hidden, ignore_errors=True)


def write_atomically(path: Path, text: str) -> None:
    """Replace a file by a complete new one: a process that is killed leaves the old or the new."""
    with hidden_until_complete(path) as hidden:
        hidden.write_text(text, "utf-8")


def is_running(process: int) -> bool:
    try:
        os.kill(process, 0)
    except OSError as error:
        return error.errno == errno.EPERM  # another user's
    return True


def remove(path: Path, ignore_errors: bool = False) -> None:
    """Remove a file, a directory, or a link and not what it links to, if there is one."""
    with contextlib.suppress(OSError if ignore_errors else FileNotFoundError):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors)
        else:
            path.unlink()
