"""`bench.py gpu`: measure training on one GPU, part by part, for nine minutes at a time.

    python bench.py gpu --out gpu.json --docs docs/measured.md       again: what is missing
    python bench.py gpu --out gpu.json --parts rates loss            these parts alone, anew
    python bench.py gpu --out small.json --rehearse                  on a CPU, with a tiny model

Names of parts begin with what they measure; then come the model and the tokens of a sequence:

    rates     what the GPU can do: matrix products, copies, attention by row, by document, by mask
    loss      time and memory of the loss: PyTorch's, and ours for several values of LOSS_CHUNK
    train     a training step: eager and compiled, with each kind of checkpointing, and with
              transformers' model in the same loop
    float8    a compiled step in 8 bits, beside the same in bfloat16
    lora      a LoRA step beside peft's
    step      the parts of a step, as bench.py step measures them
    largest   the largest microbatch that fits, beside the largest that is predicted to fit

Each part runs in a process of its own, which frees what it allocated; if one fails, the others go
on. --out has the results so far. One GPU does not communicate, so bucket sizes and the depth of
prefetching are not measured.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import torch

from perf.gpu_parts import PARTS, rehearsed, start_world
from perf.gpu_report import markdown_section, replace_section
from perf.instruments import describe_machine
from plumbing.processes import UserError
from runs.records import write_atomically

ROOT = Path(__file__).resolve().parent.parent
BUDGET = 540  # seconds of a run; the next one goes on


def measure_gpu(args: argparse.Namespace) -> str:
    """Measure the parts that --out lacks, or those that --parts names; return them as Markdown."""
    if unknown := set(args.parts or []) - PARTS.keys():
        raise UserError(f"no part '{min(unknown)}': choose from {', '.join(PARTS)}")
    if args.docs and not args.docs.is_file():
        raise UserError(f"--docs {args.docs}: no such file")
    if not args.out.parent.is_dir():
        raise UserError(f"--out {args.out}: there is no directory {args.out.parent}; make it first")
    report = json.loads(args.out.read_text()) if args.out.exists() else {"parts": {}}
    done = [name for name, result in report["parts"].items() if "error" not in result]
    wanted = args.parts or [name for name in PARTS if name not in done]
    if wanted and not args.rehearse and not torch.cuda.is_available():
        raise UserError("bench.py gpu needs a GPU: --rehearse runs it in small on a CPU")
    started, left_out = time.monotonic(), []
    for number, name in enumerate(wanted, 1):
        estimates = [PARTS[part].seconds for part in wanted[number - 1 :]]
        rest = BUDGET - round(time.monotonic() - started)
        if estimates[0] > rest:
            left_out.append(name)
            continue
        minutes, seconds = divmod(min(sum(estimates), rest), 60)
        left = f"about {minutes}:{seconds:02d} left"
        print(f"part {number} of {len(wanted)}, {name}: {left}", file=sys.stderr, flush=True)
        part_started = time.monotonic()
        result = run_part(name, args.rehearse, timeout=4 * estimates[0])
        report["machine"] = result.pop("machine", None) or report.get("machine")
        report["parts"][name] = result | {"took": round(time.monotonic() - part_started)}
        write_atomically(args.out, json.dumps(report, indent=1) + "\n")
    command = f"python bench.py gpu --out {args.out.name}{' --rehearse' * args.rehearse}"
    section = markdown_section(report, command)
    if args.docs:
        write_atomically(args.docs, replace_section(args.docs.read_text(), section))
    if left_out:
        section += f"\n\nno time was left for {', '.join(left_out)}: again, without --parts"
    return section


def run_part(name: str, rehearse: bool, timeout: float) -> dict:
    """Return {"results", "machine"} of a part, measured by a new process, or {"error"}."""
    command = [sys.executable, "-m", "perf.gpu", name, *["--rehearse"] * rehearse]
    # Less memory is lost to fragments between tensors of different sizes.
    environment = os.environ | {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    try:
        process = subprocess.run(
            command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, timeout=timeout
        )
    except subprocess.TimeoutExpired:
        return {"error": f"took more than {timeout:.0f} s"}
    if process.returncode:
        return {"error": f"ended with exit code {process.returncode}"}
    return json.loads(process.stdout.splitlines()[-1])


def driver() -> str | None:
    """Return the version of the GPU's driver, None where there is none."""
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(query, capture_output=True, text=True).stdout.split("\n")[0] or None
    except FileNotFoundError:
        return None


def main() -> None:
    """Measure one part, in a process of its own, and print its results as the last line."""
    name, rehearse = sys.argv[1], "--rehearse" in sys.argv
    part = PARTS[name]
    case = rehearsed(part.case) if rehearse else part.case
    result = part.measure(case)
    machine = describe_machine(start_world(case)) | {"driver": driver()}
    torch.distributed.destroy_process_group()
    print(json.dumps({"results": result, "machine": machine}))


if __name__ == "__main__":
    main()
