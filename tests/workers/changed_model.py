"""Run a script of the project with another model.py.

    changed_model.py MODEL SCRIPT ARGUMENTS ...

The process forgets the modules that the fork server has imported, so that all of them import MODEL.
"""

import importlib.util
import runpy
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent

_, path, *sys.argv = sys.argv
for name, module in list(sys.modules.items()):
    file = getattr(module, "__file__", None)
    if name != "__main__" and file and ROOT in Path(file).parents and ".venv" not in file:
        del sys.modules[name]
spec = importlib.util.spec_from_file_location("model", path)
sys.modules["model"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(sys.modules["model"])
runpy.run_path(str(ROOT / sys.argv[0]), run_name="__main__")
