"""Import each module of the arguments in a process that has imported nothing of the project.

Prints a line for each: its name and the project's modules that are imported then. The processes are
forks without the modules that the fork server has imported already, so that PyTorch is imported
once."""

import importlib
import os
import sys

top_level = {name.split(".")[0] for name in sys.argv[1:]}


def imported() -> list[str]:
    return sorted(name for name in sys.modules if name.split(".")[0] in top_level)


for name in sys.argv[1:]:
    if os.fork() == 0:
        for other in imported():
            del sys.modules[other]
        importlib.import_module(name)
        print(name, *imported(), flush=True)
        os._exit(0)
    os.wait()
