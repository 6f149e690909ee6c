"""Call a user's reward in a process of its own, to which it may do anything.

A reward may set alarms, seeds and default dtypes, change the directory, read from standard input,
or end the interpreter. None of this reaches the training: it gets a number, or a line that says why
there is none. The two processes exchange lines of JSON through pipes. That of the reward ends with
the other, whatever has ended it.

    {"prompt": "1+1", "answer": "2"} -> reward.py ->  {"reward": 1.0}, or {"failed": "raised ..."}

This file imports nothing of ours, so that the process starts at once and with little memory.
"""

import contextlib
import json
import math
import os
import queue
import runpy
import signal
import subprocess
import sys
import threading
from pathlib import Path


class RewardProcess:
    """The process in which a file with a function `reward` runs.

    problem: what the file or the last call did instead of giving a reward, or "" """

    def __init__(self, path: Path):
        """Start the process, which runs the file."""
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
        self.requests = open(requests, "w", encoding="utf-8")
        self.replies = open(replies, encoding="utf-8")
        self.problem = ""
        self._receive()

    def reward(self, record: dict, answer: str) -> float:
        """Return the reward of an answer, or NaN with a `problem`."""
        request = json.dumps(record | {"answer": answer})
        with contextlib.suppress(BrokenPipeError):  # it has ended, which _receive tells
            print(request, file=self.requests, flush=True)
        return self._receive()

    def _receive(self) -> float:
        line = self.replies.readline()
        if not line:
            code = self.process.wait()
            how = f"exit code {code}" if code >= 0 else signal.Signals(-code).name
            reply = {"failed": f"ended its process with {how}"}
        else:
            reply = json.loads(line)
        self.problem = reply.get("failed", "")
        return reply.get("reward", math.nan)


# --------------------------------------------------------------------------- in the other process


def serve(path: str, requests: int, replies: int) -> None:
    """Run the file, and reply to it and to each request, until the first failure."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, lambda *_: None)  # they ask the training to end, and this with it
    received = queue.SimpleQueue()
    threading.Thread(target=receive, args=(requests, received), daemon=True).start()
    os.set_inheritable(replies, False)
    with open(replies, "w", encoding="utf-8") as file:

        def reply(**content) -> None:
            print(json.dumps(content), file=file, flush=True)

        try:
            reward = runpy.run_path(path)["reward"]
            reply(reward=0.0)  # the file has it
            while True:
                value = float(reward(**received.get()))
                if not math.isfinite(value):
                    raise ValueError(f"it returned {value}")
                reply(reward=value)
        except BaseException as error:
            reply(failed=f"raised {error!r:.200}")


def receive(requests: int, received: queue.SimpleQueue) -> None:
    """Put the requests into a queue, and end this process when no other can follow. The main thread
    could not, in the middle of a reward."""
    os.set_inheritable(requests, False)
    with open(requests, encoding="utf-8") as file:
        for line in file:
            received.put(json.loads(line))
    os._exit(0)


if __name__ == "__main__":
    _, reward_path, *pipes = sys.argv
    sys.argv = [reward_path]
    sys.path[0] = str(Path(__file__).resolve().parent.parent)
    sys.stdout.reconfigure(line_buffering=True)
    serve(reward_path, *map(int, pipes))
