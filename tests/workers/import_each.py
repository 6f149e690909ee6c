"""Import each module of the arguments in a process that has imported nothing of the project.

Prints a line for each: its name and the project's modules that are imported then. The processes are
forks without the modules that the fork server has imported already, so that PyTorch is imported
once."""

import importlib
import os
import sys

names = sys.argv[1:]
for name in names:
    if os.fork() == 0:
        for imported in sys.modules.keys() & set(names):
            del sys.modules[imported]
        importlib.import_module(name)
        print(name, *sorted(sys.modules.keys() & set(names)), flush=True)
        os._exit(0)
    os.wait()
