"""Call a user's rewards in processes of their own, to which they may do anything.

A reward may set alarms, seeds and default dtypes, change the directory, read from standard input,
start processes, or end the interpreter. None of this reaches the training: it gets numbers, or a
line that says why there are none. Each process exchanges lines of JSON with ours through pipes:

    {"prompt": "1+1", "answer": "2"} -> reward.py ->  {"reward": 1.0, "parts": {}}
                                                      {"failed": "raised ..."}

If the file has a function `rewards`, it is called once, with a list of each field, and there is a
reply to each answer. A process of a reward ends with ours, whatever has ended that, and so do those
that it has started.

This file imports nothing of ours, so that such a process starts at once and with little memory.
"""

import contextlib
import json
import math
import os
import queue
import runpy
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import TextIO

# As in plumbing/endings.py, which is not imported here.
SAVING_SIGNALS = signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1


class RewardProcesses:
    """The processes in which a file with a function `reward` or `rewards` runs.

    problem: why they cannot be used, or "": "raised ..." if the file did, for example"""

    def __init__(self, path: Path, n: int = 1):
        """Start n processes, each of which runs the file."""
        self.processes = [RewardProcess(path) for _ in range(n)]
        started = [process.reply() for process in self.processes]
        self.takes_all = started[0].get("takes_all", False)
        problems = [reply["failed"] for reply in started if "failed" in reply]
        if self.takes_all and n > 1:
            problems.append("has rewards(prompts, answers), which is called once, by one worker")
        self.problem = problems[0] if problems else ""

    def replies(
        self, records: list[dict], answers: list[str], gives_up: Callable = lambda: False
    ) -> Iterator[dict]:
        """Yield the reply to each answer: its `reward` and the `parts` it is the sum of, or
        `failed`, what its function did instead. `records` have the other arguments. It is {} once
        `gives_up`, called each second, returns true: then the processes are of no more use."""
        if self.takes_all:
            names = dict.fromkeys(name for record in records for name in record)
            given = {name: [record.get(name) for record in records] for name in names}
            given["prompts"] = given.pop("prompt")
            self.processes[0].ask(given | {"answers": answers})
        else:
            for process, record, answer in zip(cycle(self.processes), records, answers):
                process.ask(record | {"answer": answer})
        for process, _ in zip(cycle(self.processes), answers):
            yield process.reply(gives_up)


class RewardProcess:
    def __init__(self, path: Path):
        """Start the process, which runs the file. Its first reply says what the file has."""
        read_by_it, requests = os.pipe()
        replies, written_by_it = os.pipe()
        command = [sys.executable, __file__, path, read_by_it, written_by_it]
        self.process = subprocess.Popen(
            [*map(str, command)],
            pass_fds=[read_by_it, written_by_it],
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # where Ctrl-C does not reach it
        )
        os.close(read_by_it)
        os.close(written_by_it)
        # Threads read and write, since a pipe may be full for as long as a reward takes.
        self.requests = queue.SimpleQueue()  # lines
        self.lines = queue.SimpleQueue()  # of replies
        threading.Thread(target=write_lines, args=(requests, self.requests), daemon=True).start()
        threading.Thread(target=read_lines, args=(replies, self.lines), daemon=True).start()

    def ask(self, given: dict) -> None:
        self.requests.put(json.dumps(given))

    def reply(self, gives_up: Callable = lambda: False) -> dict:
        """Wait for the next reply, which has `ended`, too, if the process has."""
        line = None
        while line is None:
            with contextlib.suppress(queue.Empty):
                line = self.lines.get(timeout=1)
            if line is None and gives_up():
                return {}
        if line:
            return json.loads(line)
        code = self.process.wait()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)  # its forks
        how = f"exit code {code}" if code >= 0 else signal.Signals(-code).name
        return {"failed": f"ended its process with {how}", "ended": True}


def write_lines(pipe: int, lines: queue.SimpleQueue) -> None:
    """Write the lines of a queue into a pipe, until the process that reads it has ended."""
    with contextlib.suppress(BrokenPipeError), open(pipe, "w", encoding="utf-8") as file:
        while True:
            print(lines.get(), file=file, flush=True)


def read_lines(pipe: int, lines: queue.SimpleQueue) -> None:
    """Put the lines of a pipe into a queue, and "" at its end."""
    with open(pipe, encoding="utf-8") as file:
        for line in file:
            lines.put(line)
    lines.put("")


# --------------------------------------------------------------------------- in the other process


def serve(path: str, requests: int, replies: int) -> None:
    """Run the file, and reply to it and to each request."""
    for number in SAVING_SIGNALS:
        signal.signal(number, lambda *_: None)  # they ask the training to end, and this with it
    for pipe in (requests, replies):
        os.set_inheritable(pipe, False)
    leave_guard(requests, replies)
    received = queue.SimpleQueue()
    threading.Thread(target=read_lines, args=(requests, received), daemon=True).start()
    with open(replies, "w", encoding="utf-8") as file:
        let_forks_be(file)

        def reply(**content) -> None:
            try:
                file.write(f"{json.dumps(content)}\n")
                file.flush()
            except BrokenPipeError:  # the training has ended
                end()

        try:
            functions = runpy.run_path(path)
            takes_all = "rewards" in functions
            call = functions.get("rewards" if takes_all else "reward")
            found = {"takes_all": takes_all} if call else {"failed": "has no function reward"}
            reply(**found)
            while line := received.get():  # "" once the training has ended
                given = json.loads(line)
                n = len(given["answers"]) if takes_all else 1
                try:
                    values = in_a_list(call(**given), n) if takes_all else [call(**given)]
                except Exception as error:
                    values = [error] * n
                for value in values:
                    reply(**as_reply(value))
        except BaseException as error:
            if file.closed:  # in a fork
                raise
            reply(failed=f"raised {error!r:.200}", ended=True)
    end()


def leave_guard(requests: int, replies: int) -> None:
    """Fork a guard: a process that ends this one, and those that the reward has started, once the
    training has ended and has closed its end of the pipe. A thread could not: a regular expression
    keeps the GIL. A reward may wait for its children: so the guard is a grandchild."""
    if child := os.fork():
        os.waitpid(child, 0)
        return
    if os.fork():
        os._exit(0)
    os.close(replies)
    closed = select.poll()
    closed.register(requests, 0)  # 0: tell of the writers' end alone, and of no requests
    closed.poll()
    end()


def let_forks_be(replies: TextIO) -> None:
    """Let forks of this process reply nothing, and obey signals, with which a pool ends its own."""
    hold = partial(signal.pthread_sigmask, signal.SIG_BLOCK, SAVING_SIGNALS)
    release = partial(signal.pthread_sigmask, signal.SIG_UNBLOCK, SAVING_SIGNALS)

    def leave() -> None:
        replies.close()
        for number in SAVING_SIGNALS:
            signal.signal(number, signal.SIG_DFL)
        release()

    os.register_at_fork(before=hold, after_in_parent=release, after_in_child=leave)


def in_a_list(values, n: int) -> list:
    """Return n rewards, which may be in an array or a tensor, as a list."""
    if hasattr(values, "tolist"):
        values = values.tolist()
    if not isinstance(values, list | tuple):
        raise TypeError(f"no list of rewards: {values!r:.100}")
    if len(values) != n:
        raise ValueError(f"{len(values)} rewards for {n} answers")
    return [*values]


def as_reply(value) -> dict:
    """Return the reply of what a function has returned for an answer, or raised: a number, or
    numbers by name, which are added up."""
    if isinstance(value, Exception):
        return {"failed": f"raised {value!r:.200}"}
    parts = value if isinstance(value, dict) else {"": value}
    numbers = {}
    for name, part in parts.items():
        if not isinstance(name, str) or not name.isprintable():
            return {"failed": f"returned {name!r:.200}, which is no name of a part"}
        of_which = f"{part!r:.200}" + (f" as {name!r}" if name else "")
        if isinstance(part, bool) or type(part).__name__ in ("bool", "bool_"):  # also numpy's
            return {"failed": f"returned {of_which}, which is no number: write float(...)"}
        try:
            number = math.nan if isinstance(part, str | bytes) else float(part)
        except Exception:
            number = math.nan
        if not math.isfinite(number):
            return {"failed": f"returned {of_which}, which is no finite number"}
        numbers[name] = number
    if not numbers:
        return {"failed": "returned no part of a reward"}
    total = sum(numbers.values())
    if not math.isfinite(total):
        return {"failed": f"returned {value!r:.200}, whose sum is no finite number"}
    return {"reward": total, "parts": numbers if parts is value else {}}


def end() -> None:
    """End this process and those that the reward has started."""
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    _, reward_path, *pipes = sys.argv
    sys.argv = [reward_path]
    sys.path[0] = str(Path(__file__).resolve().parent.parent)
    sys.stdout.reconfigure(line_buffering=True)
    serve(reward_path, *map(int, pipes))
