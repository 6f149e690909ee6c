"""Train with your own DDP, of labs/work/ddp.py, in the place of the project's.

    torchrun --nproc-per-node 2 labs/train.py --out out/own-ddp

The flags are those of train.py, which has the same losses. Your function sends gradients in every
backward, and a step is to have one: so give no --microbatch, and no other --dp than ddp.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from torch import Tensor, nn

import parallel
import runs.setup
import train
from labs.machinery.student import read_function
from parallel import World
from plumbing.messages import UserError
from plumbing.processes import run


def student_ddp(model: nn.Module, world: World) -> nn.Module:
    """Let the student's hooks send gradients; and after each backward, wait for them."""
    file = Path(__file__).parent / "work/ddp.py"
    if not file.exists():
        raise UserError("labs/work/ddp.py is not there: python labs/run.py check ddp")
    average_gradients = read_function(file, "average_gradients")
    finish, accumulate = average_gradients(model), train.accumulate

    def accumulate_and_finish(*args) -> Tensor:
        loss = accumulate(*args)
        finish()
        return loss

    train.accumulate = accumulate_and_finish
    return model


if __name__ == "__main__":
    parallel.WRAPPERS["ddp"] = student_ddp
    runs.setup.check_model = lambda *_: None  # it runs a step that does not wait for these hooks
    run(train.main)
