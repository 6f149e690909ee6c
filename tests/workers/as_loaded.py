"""Run a script that resumes, and write all that its checkpoint was loaded into.

    as_loaded.py DIRECTORY SCRIPT ARGUMENTS ...

Each rank writes DIRECTORY/RANK.pt before it trains on: `weights` and `optimizer`, whole tensors by
the names that checkpoints give them.
"""

import os
import runpy
import sys
from pathlib import Path

import torch

import checkpoint
from runs.equal import whole_tensor

_, directory, *sys.argv = sys.argv
resume = checkpoint.resume


def resume_and_write(path, model, optimizer, tokenizer) -> int:
    done = resume(path, model, optimizer, tokenizer)
    weights = {name: whole_tensor(parameter) for name, parameter in model.named_parameters()}
    state = {
        f"{name}.{key}": whole_tensor(tensor)
        for group in optimizer.param_groups
        for name, parameter in zip(group["param_names"], group["params"], strict=True)
        for key, tensor in optimizer.state[parameter].items()
    }
    rank = os.environ.get("RANK", 0)
    torch.save({"weights": weights, "optimizer": state}, Path(directory, f"{rank}.pt"))
    return done


checkpoint.resume = resume_and_write
runpy.run_path(str(Path(checkpoint.__file__).with_name(sys.argv[0])), run_name="__main__")
