"""Started once for all tests: runs the project's scripts in forks of a process that has imported
what they import, which takes longer than what most of them do here.

A line of JSON on stdin, [script, arguments, file for stdout, file for stderr], makes a fork; a line
on stdout gives its exit code."""

import json
import os
import runpy
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

import bench  # noqa: F401
import finetune_lora  # noqa: F401
import generate  # noqa: F401


def main():
    while line := sys.stdin.readline():
        script, arguments, *outputs = json.loads(line)
        child = os.fork()
        if child == 0:
            os.setsid()
            for descriptor, path in zip((1, 2), outputs):
                os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), descriptor)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            sys.argv = [script, *arguments]
            runpy.run_path(script, run_name="__main__")
            return
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


if __name__ == "__main__":
    main()
