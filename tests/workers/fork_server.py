"""Run the project's scripts in forks of one process that has made all their imports already.

Imports take longer than what most scripts do in the tests. A line of JSON on stdin, {script,
arguments, nproc, timeout, out, err}, starts a run; its output goes to the files `out` and `err`.
The answer on stdout is a line with the process ids of its ranks, and a line with their exit codes,
negative for a signal; or null if they had to be killed after `timeout` seconds. They are killed too
when the tests end.

nproc 0 runs the script as `python script` does. Otherwise ranks find the environment and the store
that torchrun would give them.
"""

import atexit
import gc
import json
import os
import runpy
import select
import signal
import socket
import sys
import threading
import time
from pathlib import Path
from typing import NoReturn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

import fsspec  # noqa: F401
import torch._dynamo
import torch.distributed.checkpoint  # noqa: F401
from torch.distributed import TCPStore

import bench  # noqa: F401
import finetune_lora  # noqa: F401
import generate  # noqa: F401


def main() -> None:
    gc.freeze()  # a collection in a fork would copy every page of these objects
    while line := sys.stdin.readline():
        request = json.loads(line)
        agent = os.fork()
        if agent == 0:  # the store starts threads, which must not be in a process that forks again
            launch(request)
            os._exit(0)
        if os.waitpid(agent, 0)[1]:
            print("null", flush=True)


def launch(request: dict) -> None:
    """Fork the ranks and answer with their exit codes."""
    nproc = request["nproc"]
    listener = socket.create_server(("127.0.0.1", 0))
    address = listener.getsockname()
    ranks = []
    for rank in range(max(nproc, 1)):
        if (process := os.fork()) == 0:
            listener.close()
            run_rank(request, rank, *address)
        os.setpgid(process, process)  # to be killed together with the processes that it starts
        ranks.append(process)
    store = TCPStore(  # noqa: F841
        *address, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
    )
    print(ranks, flush=True)
    print(json.dumps(wait(ranks, request["timeout"])), flush=True)


def run_rank(request: dict, rank: int, host: str, port: int) -> NoReturn:
    sys.stdin = open(os.devnull)
    os.dup2(sys.stdin.fileno(), 0)
    for descriptor, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(request[name], os.O_WRONLY | os.O_CREAT | os.O_APPEND), descriptor)
    if nproc := request["nproc"]:
        os.environ |= {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "GROUP_RANK": "0",
            "WORLD_SIZE": str(nproc),
            "LOCAL_WORLD_SIZE": str(nproc),
            "MASTER_ADDR": host,
            "MASTER_PORT": str(port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",  # rank 0 does not start one of its own
        }
    sys.argv = [request["script"], *request["arguments"]]
    os._exit(run_script(request["script"]))


def run_script(script: str) -> int:
    """Run a script and return its exit code, after all that Python does at exit but one thing.

    It would also free every object, one by one, which takes longer than many a script."""
    code = 0
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as stop:
        code = stop.code or 0
        if not isinstance(code, int):
            print(code, file=sys.stderr)
            code = 1
    except BaseException:
        code = 1
        sys.excepthook(*sys.exc_info())
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    return code


def wait(ranks: list[int], timeout: float) -> list[int] | None:
    """Wait until all ranks have ended. Return their exit codes, None if they had to be killed."""
    deadline, codes, killed = time.monotonic() + timeout, {}, False
    while len(codes) < len(ranks):
        for rank in set(ranks) - codes.keys():
            ended, status = os.waitpid(rank, os.WNOHANG)
            if ended:
                codes[rank] = os.waitstatus_to_exitcode(status)
        tests_ended = select.select([0], [], [], 0.01)[0]  # nothing but the end is there to read
        if not killed and (tests_ended or time.monotonic() > deadline):
            killed = True
            for rank in set(ranks) - codes.keys():
                os.killpg(rank, signal.SIGKILL)
    return None if killed else [codes[rank] for rank in ranks]


if __name__ == "__main__":
    main()
