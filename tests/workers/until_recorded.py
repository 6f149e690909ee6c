"""Run a script of the project in another directory until it has written OUT/config.json.

until_recorded.py DIRECTORY SCRIPT ARGUMENTS ...
"""

import os
import runpy
import sys
from pathlib import Path

from runs import rules
from runs.records import Recorder

ROOT = Path(__file__).resolve().parent.parent.parent
write = Recorder._open


def write_and_end(recorder: Recorder, done: int) -> None:
    write(recorder, done)
    os._exit(0)


Recorder._open = write_and_end
rules.check_steps = lambda run, steps: None  # the data are few, and a user's have more steps
_, directory, *sys.argv = sys.argv
os.chdir(directory)
runpy.run_path(str(ROOT / sys.argv[0]), run_name="__main__")
