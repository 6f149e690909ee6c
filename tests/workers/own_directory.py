"""Run by torchrun: DIR FLAGS..., train.py with each rank in its own directory DIR/RANK, as nodes
are that share no disk. Relative paths in FLAGS name other files on each rank."""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

import train
from plumbing.processes import run

if __name__ == "__main__":
    os.chdir(Path(sys.argv.pop(1), os.environ["RANK"]))
    run(train.main)
