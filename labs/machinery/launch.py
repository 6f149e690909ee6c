"""Run a script of a copy of the project by torchrun, for labs/clinic.py and labs/race.py."""

import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

from plumbing.messages import UserError


def launch(
    directory: Path, command: list[str], ranks: int, nodes: int = 1, timeout: float | None = None,
    **environment: str,
) -> str:  # fmt: skip
    """Run a script of `directory` on the CPU, as if this machine were so many nodes, and return
    what the first node prints. Raises UserError with the script's own error line, or
    subprocess.TimeoutExpired after so many seconds. SIGTERM raises KeyboardInterrupt, as Ctrl-C
    does, since torchrun would go on."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes", str(nodes)]
    torchrun += ["--nproc-per-node", str(ranks // nodes), "--master-addr", "127.0.0.1"]
    torchrun += ["--master-port", str(port), "--node-rank"]
    threads = str(max(1, 2 // ranks))
    environment = {"OMP_NUM_THREADS": threads, "CUDA_VISIBLE_DEVICES": "", **environment}
    with tempfile.TemporaryFile("w+") as errors:
        handler = signal.signal(signal.SIGTERM, signal.default_int_handler)
        started = [
            subprocess.Popen(
                [*torchrun, str(node), *command],
                cwd=directory,
                env=os.environ | environment,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
            for node in range(nodes)
        ]
        try:
            printed = [node.communicate(timeout=timeout)[0] for node in started]
        except BaseException:  # also Ctrl-C
            for node in started:
                node.terminate()  # torchrun then ends its ranks
            raise
        finally:
            signal.signal(signal.SIGTERM, handler)
        errors.seek(0)
        said = errors.read()
    if any(node.returncode for node in started):
        # The script's own line, or else the last line of a traceback.
        lines = re.findall(r"\berror: (.*)|^(\w*(?:Error|Exception)\b.*)", said, re.MULTILINE)
        raise UserError("".join(lines[0]) if lines else f"{command[0]} failed:\n{said}")
    return printed[0]
