"""Run a script from a copy of the project that has been changed.

    in_copy.py COPY SCRIPT ARGUMENTS ...

The process forgets the modules that the fork server has imported, so that all come from COPY.
"""

import runpy
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent

_, copy, *sys.argv = sys.argv
for name, module in list(sys.modules.items()):
    file = getattr(module, "__file__", None)
    if name != "__main__" and file and file.startswith(f"{ROOT}/") and ".venv" not in file:
        del sys.modules[name]
sys.path.insert(0, copy)
runpy.run_path(f"{copy}/{sys.argv[0]}", run_name="__main__")
