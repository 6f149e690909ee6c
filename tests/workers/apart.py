"""Train cases of DiLoCo as train_cases.py does, unclipped with plain SGD where a case asks for it.
Arguments: a JSON file of cases, and a file for the results. A case may have "sgd", its learning
rate, and "clip"; with "full" no target is ignored, so that replicas have as many."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import train_cases

from costs.traffic import predict_outer_traffic
from costs.work import Work
from parallel import ParallelConfig
from plumbing.processes import init_distributed, run
from techniques.zero1 import optimizer_parameters

make_optimizer, batch_of, clip = train_cases.make_optimizer, train_cases.batch_of, train_cases.CLIP


def sgd(lr: float):
    def make(model, args):
        return torch.optim.SGD([{"params": [*(named := optimizer_parameters(model)).values()],
                                 "param_names": [*named]}], lr)  # fmt: skip

    return make


def full_batch(packed: bool, seq: int = train_cases.SEQ):
    batch = batch_of(packed, seq)
    targets = batch.tokens.roll(-1, 1)
    return replace(batch, targets=targets)


def main():
    process, results = init_distributed(), []
    for case in json.loads(Path(sys.argv[1]).read_text()):
        train_cases.make_optimizer = sgd(case["sgd"]) if "sgd" in case else make_optimizer
        train_cases.batch_of = full_batch if case.get("full") else batch_of
        train_cases.CLIP = case.get("clip", clip)
        result = train_cases.train(process, case)
        parallel = ParallelConfig(**case["parallel"], dtype=torch.float64)
        model = train_cases.build(case["config"], None)
        result["outer"] = predict_outer_traffic(Work(model, parallel, 8, 1, 13))
        results.append(result)
    if process.rank == 0:
        torch.save(results, sys.argv[2])


if __name__ == "__main__":
    run(main)
