"""Run the project's scripts in forks of one process that has made all their imports already.

Imports take longer than what most scripts do in the tests. A line of JSON on stdin, {script,
arguments, nproc, timeout, directory}, starts a run, which writes four files in the directory: `out`
and `err`, its output; `ranks`, the process ids of its ranks; at the end `codes`, their exit codes,
negative for a signal, or null if they had to be killed after `timeout` seconds. Ranks are killed
too when stdin is closed, that is when the tests end.

nproc 0 runs the script as `python script` does. Otherwise ranks find the environment and the store
that torchrun would give them: on one node or, with `nodes`, so many ranks on each.
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
import weakref
from pathlib import Path

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
    for finalizer in weakref.finalize._registry:
        finalizer.atexit = False  # PyTorch's operators would be removed one by one, as slowly
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for agents
    while line := sys.stdin.readline():
        if os.fork() == 0:  # the store starts threads, after which a process must not fork
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            run_agent(**json.loads(line))
            os._exit(0)


def run_agent(
    script: str, arguments: list[str], nproc: int, timeout: float, directory: str, nodes: list[int]
):
    """Fork the ranks, serve their store, and wait for them."""
    listener = socket.create_server(("127.0.0.1", 0))
    address = listener.getsockname()
    ranks = []
    for rank in range(max(nproc, 1)):
        if (process := os.fork()) == 0:
            listener.close()
            redirect(directory)
            if nproc:
                os.environ |= environment_of(rank, nodes or [nproc], *address)
            os._exit(run_script([script, *arguments]))
        os.setpgid(process, process)  # to be killed together with the processes that it starts
        ranks.append(process)
    options = dict(wait_for_workers=False, master_listen_fd=listener.detach())
    store = TCPStore(*address, is_master=True, **options)  # noqa: F841
    write(directory, "ranks", ranks)
    write(directory, "codes", wait(ranks, timeout))


def write(directory: str, name: str, value: list[int] | None) -> None:
    path = Path(directory, name)
    path.with_suffix(".part").write_text(json.dumps(value))
    path.with_suffix(".part").rename(path)  # the file is complete as soon as it exists


def redirect(directory: str) -> None:
    """Send this process's output to files, and give it no input."""
    sys.stdin = open(os.devnull)
    os.dup2(sys.stdin.fileno(), 0)
    for descriptor, name in ((1, "out"), (2, "err")):
        path = os.path.join(directory, name)
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), descriptor)


def environment_of(rank: int, nodes: list[int], host: str, port: int) -> dict[str, str]:
    """Return the environment variables that torchrun sets for a rank of nodes with so many each."""
    places = [(node, local) for node, size in enumerate(nodes) for local in range(size)]
    node, local_rank = places[rank]
    given = dict(
        RANK=rank,
        WORLD_SIZE=len(places),
        GROUP_RANK=node,
        GROUP_WORLD_SIZE=len(nodes),
        LOCAL_RANK=local_rank,
        LOCAL_WORLD_SIZE=nodes[node],
        MASTER_ADDR=host,
        MASTER_PORT=port,
        TORCHELASTIC_USE_AGENT_STORE=True,  # rank 0 does not start a store of its own
    )
    return {name: str(value) for name, value in given.items()}


def run_script(command: list[str]) -> int:
    """Run a script and return its exit code, after all that Python does at exit but one thing.

    It would also free every object, one by one, which takes longer than many a script."""
    sys.argv, code = command, 0
    try:
        runpy.run_path(command[0], run_name="__main__")
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
    tests = select.poll()
    tests.register(0, 0)  # reports only that stdin was closed
    deadline, codes, killed = time.monotonic() + timeout, {}, False
    while len(codes) < len(ranks):
        for rank in set(ranks) - codes.keys():
            ended, status = os.waitpid(rank, os.WNOHANG)
            if ended:
                codes[rank] = os.waitstatus_to_exitcode(status)
        if not killed and (tests.poll(5) or time.monotonic() > deadline):
            killed = True
            for rank in set(ranks) - codes.keys():
                os.killpg(rank, signal.SIGKILL)
    return None if killed else [codes[rank] for rank in ranks]


if __name__ == "__main__":
    main()
