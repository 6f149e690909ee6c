"""Run a script in a process that may allocate so many megabytes more than it has.

limited_memory.py MEGABYTES SCRIPT ARGUMENTS ...
"""

import re
import resource
import runpy
import sys
from pathlib import Path

import torch  # noqa: F401

ROOT = Path(__file__).resolve().parent.parent.parent

_, megabytes, *sys.argv = sys.argv
data = re.search(r"VmData:\s+(\d+) kB", Path("/proc/self/status").read_text())
limit = 1024 * int(data[1]) + 1_000_000 * int(megabytes)
resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
runpy.run_path(f"{ROOT}/{sys.argv[0]}", run_name="__main__")
