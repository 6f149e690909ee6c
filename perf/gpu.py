"""`bench.py gpu`: measure training on one GPU, part by part, for nine minutes at a time.

    python bench.py gpu --out gpu.json --docs docs/measured.md       again: what is missing
    python bench.py gpu --out gpu.json --parts rates loss-1b         these parts alone, anew
    python bench.py gpu --out small.json --rehearse                  on a CPU, with a tiny model

A part is a few command lines of bench.py. Each runs in a process of its own, which frees what it
allocated; if one fails, the others go on. Names of parts begin with what they measure; then come
the model and the tokens of a sequence:

    rates     what the GPU can do: matrix products, copies, attention by row, by document, by mask
    loss      time and memory of the loss: PyTorch's, and ours for several values of LOSS_CHUNK
    step      a training step and its parts, compiled and eager, with each kind of checkpointing
    float8    a compiled step in 8 bits
    peers     a compiled step in turns with transformers' model, and with its bare products
    lora      a LoRA step: eager, compiled, and peft's
    largest   microbatches of 1, 2, 4, ... sequences, to the first that does not fit

Of the models, those up to 3B, and adapters on 8B, take less than 80 GB. --out has the results so
far; all parts take some six runs. One GPU does not communicate, so bucket
sizes and the depth of prefetching are not measured.
"""

import base64
import contextlib
import itertools
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from model import attend
from perf.instruments import (
    check_writable,
    markdown_table,
    megabytes,
    quartiles,
    time_interleaved,
    write_json,
)
from plumbing.processes import UserError
from runs.records import write_atomically
from techniques.float8 import RECIPES, float8_product, has_kernel
from text.batch import Documents

ROOT = Path(__file__).resolve().parent.parent
BUDGET = 540  # seconds of a run; the next one goes on
SHORTEST = 90  # seconds that must be left of it for another command to begin
TITLE = "## On one GPU"

# ------------------------------------------------------------------------------------- the parts

MODELS = {
    "1b-4096": "--model llama3.2-1b --batch 8 --microbatch 2 --seq-len 4096",
    "3b-4096": "--model llama3.2-3b --batch 8 --microbatch 2 --seq-len 4096 --moments bfloat16",
    "8b-4096": "--model llama3.1-8b --batch 4 --microbatch 1 --seq-len 4096 --moments bfloat16",
    "8b-2x4096": "--model llama3.1-8b --batch 8 --microbatch 2 --seq-len 4096 --moments bfloat16",
    "8b-4x4096": "--model llama3.1-8b --batch 8 --microbatch 4 --seq-len 4096 --moments bfloat16",
    "1b-8192": "--model llama3.2-1b --batch 4 --microbatch 1 --seq-len 8192",
    "8b-8192": "--model llama3.1-8b --batch 2 --microbatch 1 --seq-len 8192 --moments bfloat16",
}
STEP = "bench.py step {model} --optimizer adamw --tokenizer TOKENIZER --repeats 5 --checkpointing"
MUON = "--optimizer muon --moments float32"  # train.py's default
COMPARE = "{model} --dtype bfloat16 --repeats 5"
LOSS = "bench.py loss --tokens 8192 --dtype bfloat16 --chunks 256 512 1024 2048 4096 --repeats 5"
# Kind of part -> its command lines by name, in the order of the memory that they take: after one
# for which it did not suffice, the others of the part are left out.
KINDS = {
    "step": {
        f"{how}, checkpointing {checkpointing}": f"{STEP} {checkpointing} {flag}"
        for checkpointing in ("full", "selective", "none")
        for how, flag in (("compiled", "--compile"), ("eager", "--no-compile"))
    }
    | {"compiled, checkpointing selective, Muon": f"{STEP} selective --compile {MUON}"},
    "peers": {
        name: f"bench.py compare compiled {name} {COMPARE}" for name in ("bare", "transformers")
    },
    "float8": {name: f"{STEP} selective --compile --float8 {name}" for name in RECIPES[:2]},
    **{
        kind: {
            name: f"bench.py compare {name} {COMPARE} --lora --rank 16 {flag}"
            for name in ("full", "compiled", "one", "transformers")
        }
        for kind, flag in (("lora", ""), ("lora-nf4", "--base-bits 4"), ("lora-dora", "--dora"))
    },
    **{
        f"largest-{checkpointing}": {
            f"{n} sequences": f"{STEP} {checkpointing} --no-compile --batch {n} --microbatch {n}"
            for n in (1, 2, 4, 8, 16, 32, 64)
        }
        for checkpointing in ("full", "none")
    },
}
ORDER = """
step 1b-4096, step 3b-4096, step 8b-4096, step 8b-2x4096, step 8b-4x4096, lora 8b-4096,
peers 1b-4096, step 8b-8192, step 1b-8192,
largest-full 1b-4096, largest-full 8b-4096, largest-none 1b-4096, largest-none 8b-4096,
float8 8b-2x4096, float8 1b-8192, lora-nf4 8b-4096, lora-dora 8b-4096, lora 8b-8192, lora 1b-4096,
lora 1b-8192, peers 1b-8192,
largest-full 1b-8192, largest-full 8b-8192, largest-none 1b-8192, largest-none 8b-8192
"""
PARTS = {  # in the order in which they are measured
    "rates": {"rates": "-m perf.gpu"},
    "loss-8b": {"loss": f"{LOSS} --dim 4096"},
    "loss-1b": {"loss": f"{LOSS} --dim 2048"},
}
for kind, model in map(str.split, ORDER.split(",")):
    commands = {name: line.format(model=MODELS[model]) for name, line in KINDS[kind].items()}
    PARTS[f"{kind}-{model}"] = commands
REHEARSAL = {  # what is appended to a command; its last value of a flag counts
    "perf.gpu": "--rehearse",
    "loss": "--tokens 64 --vocab-size 512 --repeats 1",
    "step": "--model tiny --batch 2 --microbatch 1 --seq-len 32 --repeats 1 --no-compile "
    "--tokenizer bytes",
    "compare": "--model small --batch 2 --microbatch 1 --seq-len 32 --repeats 1 --dtype float32",
}

# --------------------------------------------------------------------------------- running them


def measure_gpu(out: Path, parts: list[str] | None, docs: Path | None, rehearse: bool) -> str:
    """Measure the parts that --out lacks, or those that --parts names; return them as Markdown."""
    if unknown := set(parts or []) - PARTS.keys():
        raise UserError(f"no part '{min(unknown)}': choose from {', '.join(PARTS)}")
    if docs and not docs.is_file():
        raise UserError(f"--docs {docs}: no such file")
    check_writable({"--out": out})
    report = json.loads(out.read_text()) if out.exists() else {"parts": {}}
    note = measure_parts(report, out, parts, rehearse)
    command = f"python bench.py gpu --out {out.name}{' --rehearse' * rehearse}"
    section = markdown_section(report, command)
    if docs:
        write_atomically(docs, replace_section(docs.read_text(), section))
    return section + note


def measure_parts(report: dict, out: Path, parts: list[str] | None, rehearse: bool) -> str:
    """Run the commands of which the report has no result, or those of `parts`, and write the report
    after each. Of a part, those after one that ran out of memory are left out. Return a note if
    there was no time for all."""
    ends = time.monotonic() + BUDGET
    with tempfile.TemporaryDirectory() as directory:
        write_tokenizer(Path(directory) / "tokenizer.model")
        for part in parts or PARTS:
            results = report["parts"].setdefault(part, {})
            for name, line in PARTS[part].items():
                error = results.get(name, {"error": "not measured yet"}).get("error", "")
                if parts or (error and "out of memory" not in error):
                    if not rehearse and not torch.cuda.is_available():
                        raise UserError(
                            "bench.py gpu needs a GPU: --rehearse runs it in small on a CPU"
                        )
                    left = round(ends - time.monotonic())
                    if left < SHORTEST:
                        rest = f"{part}, {name} on"
                        return f"\n\nno time was left from {rest}: again, without --parts"
                    progress = f"{part}, {name}: {left // 60}:{left % 60:02d} left"
                    print(progress, file=sys.stderr, flush=True)
                    results[name] = run_command(line, Path(directory), rehearse, timeout=left)
                    report["machine"] = describe_gpu()
                    write_json(out, report)
                if "out of memory" in results[name].get("error", ""):
                    break
    return ""


def run_command(line: str, directory: Path, rehearse: bool, timeout: float) -> dict:
    """Return what a command line of PARTS writes to --json, or {"error"}. `directory` has the
    tokenizer, and room for that file."""
    if rehearse:  # without compiled blocks, which take minutes on a CPU
        line = f"{line.replace(' compiled', ' selective')} {REHEARSAL[line.split()[1]]}"
    tokenizer, file = directory / "tokenizer.model", directory / "result.json"
    words = [str(tokenizer) if word == "TOKENIZER" else word for word in line.split()]
    environment = os.environ | ({"CUDA_VISIBLE_DEVICES": ""} if rehearse else {})
    file.unlink(missing_ok=True)
    command = [sys.executable, *words, "--json", str(file)]
    options = dict(cwd=ROOT, env=environment, capture_output=True, text=True, timeout=timeout)
    try:
        process = subprocess.run(command, **options)
    except subprocess.TimeoutExpired:
        return {"error": f"took more than {timeout:.0f} s"}
    if file.exists():
        return json.loads(file.read_text())
    lines = [line for line in process.stderr.splitlines() if "error" in line.lower()]
    return {"error": lines[-1] if lines else f"ended with exit code {process.returncode}"}


def write_tokenizer(file: Path) -> None:
    """Write a tokenizer with as many tokens as Llama 3's: all of one and two bytes, some of three.
    bench.py step trains on text, and its model has as many embeddings as the tokenizer has tokens.
    """
    sequences = (itertools.product(range(256), repeat=n) for n in (1, 2, 3))
    tokens = map(bytes, itertools.islice(itertools.chain(*sequences), 128_000))
    lines = (f"{base64.b64encode(token).decode()} {i}\n" for i, token in enumerate(tokens))
    file.write_text("".join(lines))


def describe_gpu() -> dict:
    """Return the names of the GPU and its driver, without a context on it, and the date."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    line = ""
    with contextlib.suppress(FileNotFoundError):
        line = subprocess.run(query, capture_output=True, text=True).stdout.partition("\n")[0]
    device, _, driver = line.partition(", ")
    found = {"device": device or "cpu", "driver": driver and f"driver {driver}"}
    return found | {"torch": f"torch {torch.__version__}", "date": time.strftime("%Y-%m-%d")}


# ------------------------------------------------------------------------------------- the rates


def measure_rates(rehearse: bool) -> dict:
    """Return seconds and rates of the operations that a training step is made of."""
    device, dtype = torch.device("cuda"), torch.bfloat16
    n, T, document, E, heads, kv_heads = 8192, 8192, 1024, 128, 32, 8
    if rehearse:
        device, dtype, n, T, document, E = torch.device("cpu"), torch.float32, 64, 64, 16, 8
    random = partial(torch.randn, device=device, dtype=dtype)
    a, b, source = random(n, n), random(n, n), random(n * n * 8)
    target, nbytes = torch.empty_like(source), source.nbytes
    on_cpu = torch.empty(source.shape, dtype=dtype, pin_memory=not rehearse)
    steps, work, times = {}, {}, 10  # at a time, so that the start of the first does not count

    def add(name: str, operation: Callable[[], object], amount: float, unit: str) -> None:
        steps[name] = lambda: [operation() for _ in range(times)]
        work[name] = amount, unit

    def add_attention(name: str, rows: int, keys: int, mask: object = None) -> None:
        """Add forward and backward of attention over T tokens in rows, as the model calls it."""
        widths = heads, kv_heads, kv_heads, heads
        q, k, v, grad = (random(rows, T // rows, h, E).requires_grad_() for h in widths)
        # Forward: two products of 2 E for each token, head and key, of which causality leaves half.
        # Backward: 2.5 times as many.
        flops = 3.5 * 2 * T * heads * E * keys
        step = lambda: torch.autograd.grad(attend(q, k, v, mask), (q, k, v), grad)  # noqa: E731
        add(f"attention, {name}", step, flops, "FLOP/s")

    add("matrix product", lambda: a @ b, 2 * n**3, "FLOP/s")
    for recipe in RECIPES:
        if has_kernel(device, dtype, recipe):
            product = partial(float8_product, a, b, recipe)
            add(f"product with rounding to 8 bits, {recipe}", product, 2 * n**3, "FLOP/s")
    add("copy", lambda: target.copy_(source), 2 * nbytes, "bytes/s")
    add("copy to the CPU", lambda: on_cpu.copy_(source, non_blocking=True), nbytes, "bytes/s")
    add("copy from the CPU", lambda: target.copy_(on_cpu, non_blocking=True), nbytes, "bytes/s")
    add_attention(f"{T} tokens", 1, T)
    add_attention(f"rows of {document} tokens", T // document, document)
    blocks = [torch.ones(document, document, device=device).tril()] * (T // document)
    mask = torch.block_diag(*blocks).bool()
    add_attention(f"documents of {document} tokens, by a mask", 1, document, mask)
    starts = torch.arange(0, T + 1, document, dtype=torch.int32, device=device)
    documents = Documents(starts, starts, document, document)
    if documents.have_kernel(dtype, E):
        add_attention(f"documents of {document} tokens, by lengths", 1, document, documents)
    results = {}
    for name, seconds in time_interleaved(steps, 1 if rehearse else 11).items():
        each, (amount, unit) = [total / times for total in seconds], work[name]
        rate = f"{amount / statistics.median(each) / 1e12:,.3g} T{unit}"
        results[name] = {"seconds": quartiles(each), "rate": rate}
    return results


# -------------------------------------------------------------------------------- the document


def replace_section(text: str, section: str) -> str:
    """Return a document with its section TITLE replaced, or with the section at its end."""
    found = re.search(rf"^{TITLE}\n.*?(?=^## |\Z)", text, flags=re.MULTILINE | re.DOTALL)
    if not found:
        return f"{text.rstrip()}\n\n{section}\n"
    return f"{text[: found.start()]}{section}\n\n{text[found.end() :]}".rstrip() + "\n"


def markdown_section(report: dict, command: str) -> str:
    """Return the section: a table for each part that was measured."""
    machine = report.get("machine", {"device": "no GPU"})
    found = ", ".join(filter(None, machine.values()))
    lines = [TITLE, "", f"{found} (`{command}`). Quartiles are in parentheses."]
    for part, results in report["parts"].items():
        rows = [row for name, result in results.items() for row in rows_of(name, result)]
        headings = list(dict.fromkeys(heading for cells in rows for heading in cells))
        table = [[cells.get(heading, "-") for heading in headings] for cells in rows]
        lines += ["", f"**{part}**", "", *markdown_table(headings, table)] if rows else []
    return "\n".join(lines)


CELLS = {  # what a command measures -> how it is shown
    "rate": str,
    "tokens_per_second": "{:,.0f}".format,
    "ratio": "{:.3f}".format,
    "mfu": "{:.1%}".format,
    "causal_mfu": "{:.1%}".format,
    "peak_bytes": megabytes,
    "predicted_peak_bytes": megabytes,
    "first_step": "{:.1f} s".format,
    "time_stamps": "{:.1%}".format,
}


def rows_of(name: str, result: dict) -> list[dict[str, str]]:
    """Return the rows that a command adds to its part's table, each as heading -> cell."""
    if "error" in result:
        return [{"what": name, "seconds": result["error"]}]
    if "parts" in result:  # bench.py step's has one row, others have one of each contestant
        result = {name: result}
    rows = []
    for name, measured in result.get("strategies", result).items():
        seconds = measured["seconds"]
        lower, middle, upper = quartiles(seconds) if "strategies" in result else seconds
        cells = {"what": name, "seconds": f"{middle:.4g} ({lower:.4g}-{upper:.4g})"}
        for key, show in CELLS.items():
            if measured.get(key) is not None:
                cells[key.removesuffix("_bytes").replace("_", " ")] = show(measured[key])
        shares = {part: f"{s / middle:.1%}" for part, s in measured.get("parts", {}).items()}
        rows.append(cells | shares)
    return rows


if __name__ == "__main__":  # a process for the rates alone
    write_json(Path(sys.argv[-1]), measure_rates("--rehearse" in sys.argv))
