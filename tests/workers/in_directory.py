"""Run a script of the project in another directory.

in_directory.py DIRECTORY SCRIPT ARGUMENTS ...       {RANK} in DIRECTORY is this process's rank
"""

import os
import runpy
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent

_, directory, *sys.argv = sys.argv
os.chdir(directory.format_map(os.environ))
runpy.run_path(str(ROOT / sys.argv[0]), run_name="__main__")
