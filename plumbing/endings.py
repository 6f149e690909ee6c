"""What ends a process: Ctrl-C and other signals, and the death of the torchrun that started it.

Every script imports this module before all others, since the import of PyTorch takes a second. It
starts a thread that waits for signals and looks once a second whether torchrun still runs. Unlike a
signal handler of Python, a thread can act while the main thread waits in a collective. Imported by
anything else than a script of this project, such as a notebook, the module does nothing.
"""

import contextlib
import importlib.util
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Iterator

from plumbing.escaped import ESCAPED

_ending = threading.RLock()
_left_to_thread = threading.Event()
_received: list[int] = []  # by signals_collected
_started = time.monotonic()
_deadline = float("inf")  # of --time-limit
# What asks a run to save and end: Ctrl-C, torchrun, a closed terminal and Slurm.
SAVING_SIGNALS = signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1


def end(code: int, message: str, show: bool) -> None:
    """End this process at once: Python's usual exit would wait for ranks that are stuck in a
    collective. The message is printed if `show`, and torchrun repeats it in its own report."""
    _ending.acquire()  # for good: the first thread to come here ends the process
    if show:
        with contextlib.suppress(OSError):
            os.write(2, f"error: {message.translate(ESCAPED)}\n".encode(errors="replace"))
    report(message)
    os._exit(code)


def report(message: str) -> None:
    """Leave a message for torchrun, whose report of failed ranks is the last that is printed; ""
    takes it back."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path:
        return
    if not message:
        with contextlib.suppress(OSError):
            os.remove(path)
        return
    import json  # not above: the handler of Ctrl-C is to be there soon

    content = {"message": f"error: {message}", "extraInfo": {"timestamp": int(time.time())}}
    try:
        with open(path, "w", encoding="utf-8") as file:
            json.dump({"message": content}, file)
    except OSError:  # a full disk: torchrun could not read an empty file
        report("")


@contextlib.contextmanager
def ctrl_c_raises() -> Iterator[None]:
    """Let Ctrl-C raise KeyboardInterrupt within a `with` block that has files to remove."""
    before = signal.getsignal(signal.SIGINT)
    if before is _leave_to_thread:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if _left_to_thread.is_set():  # Ctrl-C came before, and the thread is about to end this process
        end_interrupted()
    try:
        yield
    finally:
        if before is _leave_to_thread:
            signal.signal(signal.SIGINT, before)


@contextlib.contextmanager
def signals_collected(time_limit: float = 0) -> Iterator[None]:
    """Let SAVING_SIGNALS, and a `time_limit` in seconds since this process has started, be told by
    asked_to_end, instead of ending the process, within a `with` block. A second SIGINT ends it
    after all. A time limit of 0 is none."""
    global _deadline
    _received.clear()
    _deadline = _started + time_limit if time_limit else float("inf")
    before = {}
    for number in SAVING_SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup ignores SIGHUP: so do we
            before[number] = signal.signal(number, _collect)
    try:
        yield
    finally:
        _deadline = float("inf")
        for number, handler in before.items():
            signal.signal(number, handler)


def asked_to_end() -> int:
    """Return the signal that asks this run to save and end; 0 if none does. SIGALRM stands for the
    time limit, for which no timer is set: the time is compared with the clock."""
    is_late = time.monotonic() > _deadline
    return max(_received, default=int(signal.SIGALRM) if is_late else 0)


def _collect(number: int, frame) -> None:
    if number == signal.SIGINT and number in _received:
        end_interrupted()
    _received.append(number)


def end_interrupted() -> None:
    """End this process because of Ctrl-C."""
    end(128 + signal.SIGINT, "interrupted", show=_is_rank_zero())


def end_if_restarted(number: int) -> None:
    """End this process if the signal was torchrun's, which restarts all ranks as a node comes or
    goes (--max-restarts). Exit code 0 would mean that this rank is done: others would wait."""
    if number == signal.SIGTERM and int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")):
        end(1, "ended to be started again, since the nodes have changed", show=False)


def _is_rank_zero() -> bool:
    return not _is_child and os.environ.get("RANK", "0") == "0"


def end_if_orphaned() -> None:
    """End this process if the one that started it, torchrun or one of our scripts, has died."""
    if _parent and os.getppid() != _parent:
        first_of_node = not _is_child and os.environ.get("LOCAL_RANK", "0") == "0"
        end(1, "torchrun, which started this run, has died", show=first_of_node)


def _leave_to_thread(number: int, frame) -> None:
    """Handle SIGINT in the main thread: set a flag, at which the watching thread ends the process.
    It cannot ask who handles SIGINT: when it looks, that may be another function already."""
    _left_to_thread.set()


def _watch(signals: int) -> None:
    told = False

    def tell(name: str) -> None:
        nonlocal told
        if not told and _is_rank_zero():
            told = True
            with contextlib.suppress(OSError):  # the terminal may have been closed
                os.write(2, f"{name}: this step ends, then a checkpoint is saved\n".encode())

    while True:
        readable, _, _ = select.select([signals], [], [], 1)
        numbers = os.read(signals, 64) if readable else b""
        for number in numbers:
            handler = signal.getsignal(number)
            ours = handler is _leave_to_thread or _left_to_thread.is_set()
            if number == signal.SIGINT and ours:
                end_interrupted()
            if handler is _collect:
                tell(signal.Signals(number).name)
        if time.monotonic() > _deadline:
            tell("--time-limit")
        end_if_orphaned()


_is_child, _parent = False, 0
_root = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))
_script = os.path.realpath(sys.argv[0])
if os.path.dirname(_script) == _root and os.path.isfile(_script):  # that of `python -c` is none
    # Nothing of ours has imported this module yet: Python did, to start a child of our script.
    _is_child = "multiprocessing.spawn" in sys.modules
    if _is_child or "TORCHELASTIC_RUN_ID" in os.environ:  # else this run may outlive its shell
        _parent = os.getppid()
    _reader, _writer = os.pipe()
    os.set_blocking(_writer, False)  # as set_wakeup_fd demands
    signal.set_wakeup_fd(_writer)
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # else SIGINT is ignored
        signal.signal(signal.SIGINT, _leave_to_thread)
    threading.Thread(target=_watch, args=(_reader,), daemon=True).start()
    packages = "torch", "numpy", "tiktoken"
    if missing := [name for name in packages if not importlib.util.find_spec(name)]:
        told = f"not installed here: {', '.join(missing)}: pip install -r requirements.txt"
        end(2, told, show=_is_rank_zero())
