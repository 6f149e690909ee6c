"""Run a script of the project in another directory.

in_directory.py DIRECTORY SCRIPT ARGUMENTS ...
"""

import os
import runpy
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent

_, directory, *sys.argv = sys.argv
os.chdir(directory)
runpy.run_path(str(ROOT / sys.argv[0]), run_name="__main__")
