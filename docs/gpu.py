"""Measure what one GPU can tell, in parts of nine minutes, and print what is expected beside it.

    python docs/gpu.py --part A --out gpu.json     what decides: rates, a step of 8B, its kernels
    python docs/gpu.py --part B --out gpu.json     8 bits, full checkpointing, LoRA beside peft
    python docs/gpu.py --part C --out gpu.json     experts, 1B, 70B in 4 bits, some tests
    python docs/gpu.py --part D --out gpu.json     generation, which has not been measured yet
    python docs/gpu.py --part E --out gpu.json     rewards on word problems, likewise
    python docs/gpu.py --part A --dry-run          only lists the commands of a part

A part takes less than nine minutes, and runs its most telling commands first. Each command runs in
a process of its own, which frees its memory and has a time limit; if one fails, the others still
run. Called again, the script runs the commands whose results are missing in gpu.json, or errors. It
may be called from any directory. It needs some 135 GB of GPU memory. Expected are the results of
one NVIDIA H200 on 2026-11-27 (docs/measured.md).
"""

import base64
import itertools
import json
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from config import ParallelConfig, Work  # noqa: E402
from model import PRESETS, attend  # noqa: E402
from parallel import with_mesh  # noqa: E402
from perf import instruments  # noqa: E402
from plumbing.joining import init_distributed  # noqa: E402
from plumbing.messages import UserError  # noqa: E402
from plumbing.parser import Parser  # noqa: E402
from plumbing.processes import run  # noqa: E402
from techniques.bfloat16_moments import BFloat16AdamW  # noqa: E402
from techniques.float8 import E4M3, float8_product, has_float8, product, rounded  # noqa: E402

PART_SECONDS = 530
LEAST_SECONDS = 60  # if less is left of a part, no other command begins

TOKENS = "--batch 8 --microbatch 2 --seq-len 4096"
STEP = (
    f"bench.py step {TOKENS} --dp ddp --tokenizer TOKENIZER --repeats 5 --optimizer adamw --model"
)
STEP_1B = f"{STEP} llama3.2-1b --checkpointing none"
STEP_8B = f"{STEP} llama3.1-8b --moments bfloat16 --compile --checkpointing"
STEP_QWEN = f"{STEP} qwen3-30b-a3b --n-layers 8 --moments bfloat16 --checkpointing"
STEP_MIXTRAL = f"{STEP} mixtral-8x7b --n-layers 4 --moments bfloat16 --checkpointing"
COMPARE = 'bench.py compare "{}" --dtype bfloat16 --repeats 5 --model'
LORA_8B = "llama3.1-8b --batch 8 --seq-len 4096 --lora --rank 16 --microbatch"
QLORA_70B = "llama3.1-70b --batch 1 --seq-len 8192 --lora --base-bits 4 --repeats 2"
WRITE = "bench.py generate --dtype bfloat16 --max-new-tokens 128 --repeats 2 --model"
WRITE_8B = f"{WRITE.replace('generate', 'generate ours compiled')} llama3.1-8b --seq-len 512"
PARTS = {  # of each part: names, commands and expected results
    "A": [
        ("rates", "docs/gpu.py --measure rates", "beside each"),
        ("8B, products saved", f"{STEP_8B} products", "11,653 tokens/s, 60.6 % MFU, 130.1 GB"),
        ("8B, selective", f"{STEP_8B} selective", "10,715 tokens/s, 55.7 % MFU, 119.8 GB"),
        ("kernels of a step of 8B", "docs/gpu.py --measure kernels", "products 1.06 of 1.49 s"),
        ("8B, gathered once", f"{STEP_8B} selective --dp fsdp --reshard none", "10,303 tokens/s"),
    ],
    "B": [
        ("8B, tensorwise", f"{STEP_8B} products --float8 tensorwise", "14,853 tokens/s"),
        ("8B, full", f"{STEP_8B} full --microbatch 4", "10,038 tokens/s, 52.2 % MFU, 116.5 GB"),
        ("8B, rowwise", f"{STEP_8B} products --float8 rowwise", "13,824 tokens/s"),
        ("LoRA of 8B", f"{COMPARE.format('one --compile')} {LORA_8B} 2", "15,277 tokens/s"),
        ("LoRA of 8B by peft", f"{COMPARE.format('transformers')} {LORA_8B} 1", "10,277 tokens/s"),
    ],
    "C": [
        ("experts of Qwen3", f"{STEP_QWEN} none --compile", "58,166 tokens/s, 34.8 % MFU, 89.7 GB"),
        ("the same, selective", f"{STEP_QWEN} selective --compile", "50,148 tokens/s, 71.5 GB"),
        ("experts of Mixtral", f"{STEP_MIXTRAL} none --compile", "35,483 tokens/s, 48.1 % MFU"),
        ("1B", f"{STEP_1B} --compile", "59,343 tokens/s, 54.1 % MFU, 36.2 GB"),
        ("1B, eager", f"{STEP_1B} --no-compile", "46,799 tokens/s, 42.1 GB"),
        ("1B by transformers", f"{COMPARE.format('transformers')} llama3.2-1b {TOKENS}", "42,664"),
        ("70B in 4 bits", f"{COMPARE.format('one --checkpointing full')} {QLORA_70B}", "726"),
        ("tests", "-m pytest -q -m gpu tests/test_gpu_kernels.py tests/test_gpu.py", "none fails"),
    ],
    "D": [
        ("8B, a row", f"{WRITE_8B} --batch 1", "27.9 tokens/s without a graph"),
        ("8B, 8 rows", f"{WRITE_8B} --batch 8", "254 tokens/s without a graph"),
        ("8B, 64 rows", f"{WRITE_8B} --batch 64", "unknown"),
        ("8B in 4 bits", f"{WRITE_8B} --base-bits 4", "unknown"),
        ("1B beside transformers", f"{WRITE} llama3.2-1b --seq-len 512 8192", "unknown"),
    ],
    "E": [("1B by rewards", "docs/gpu.py --measure rewards", "unknown")],
}

# ------------------------------------------------------- measurements that no other command makes

ON_GPU = torch.cuda.is_available()  # without one, sizes are small, so that a CPU tests this script
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
DTYPE = torch.bfloat16 if ON_GPU else torch.float32


def seconds_of(operation, burst: int = 10) -> float:
    """Return the median time of an operation. In a burst, starting the kernels costs no time."""
    bursts = {"burst": lambda: [operation() for _ in range(burst)]}
    rounds = instruments.run_in_turns(bursts, repeats=7)
    return statistics.median(rounds["burst"]["step"]) / burst


def measure_rates() -> dict[str, str]:
    """Return rates of the operations of a training step: FLOP or bytes, in 10^12 a second."""
    n = 8192 if ON_GPU else 64
    head_dim = 128
    rates = {}
    random = partial(torch.randn, device=DEVICE, dtype=DTYPE)

    def add(name: str, operation, amount: float, expected: float) -> None:
        rates[name] = f"{amount / seconds_of(operation) / 1e12:.3g}, expected {expected}"

    a = random(n, n)
    b = random(n, n)
    add("FLOP of a matrix product", lambda: a @ b, 2 * n**3, 723)
    for recipe, *expected in (("tensorwise", 497, 1140, 1280), ("rowwise", 486, 1180, 1310)):
        if has_float8(DEVICE, DTYPE, recipe):
            codes = [rounded(matrix, E4M3, recipe) for matrix in (a, b)]
            compiled = torch.compile(float8_product)
            ways = {
                "with rounding": partial(float8_product, a, b, recipe),
                "with rounding, compiled": partial(compiled, a, b, recipe),
                "of codes": partial(product, *codes, recipe, DTYPE, fast=True),
            }
            for (how, operation), rate in zip(ways.items(), expected):
                add(f"FLOP of a product {how}, {recipe}", operation, 2 * n**3, rate)
    # Of 32 query heads and 8 key/value heads; and the gradient of attention's output.
    q, k, v, grad = [random(1, n, heads, head_dim).requires_grad_() for heads in (32, 8, 8, 32)]
    attention = lambda: torch.autograd.grad(attend(q, k, v, None), (q, k, v), grad)  # noqa: E731
    # Two products in forward and five in backward, 2 n n head_dim FLOP each; the mask leaves half.
    add("FLOP of attention", attention, 7 * n * n * 32 * head_dim, 499)
    weights = [torch.nn.Parameter(random(n // 4, n).float()) for _ in range(8)]
    optimizer = BFloat16AdamW(weights, lr=1e-3, betas=(0.9, 0.95))
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    moved = 20 * sum(weight.numel() for weight in weights)  # 20 bytes a weight: see make_update
    add("bytes of AdamW with moments in bfloat16", optimizer.step, moved, 3.84)
    source = random(8, n, n)
    target = random(8, n, n)
    add("bytes of a copy", lambda: target.copy_(source), 2 * source.nbytes, 4.23)
    return rates


def measure_kernels() -> dict[str, float]:
    """Return the seconds of a step of 8B, and those of the 20 kernels that take longest."""
    name, seq_len = ("llama3.1-8b", 4096) if ON_GPU else ("tiny", 32)
    settings = dict(checkpointing="products", moments="bfloat16")
    parallel = ParallelConfig(dtype=DTYPE, compile=ON_GPU, **settings)
    model = instruments.build_on_meta(PRESETS[name])
    work = Work(model, parallel, 4, 2, seq_len)
    batch = instruments.random_batch(model.config, work.batch, seq_len).to(DEVICE)
    step = instruments.make_step(work, with_mesh(init_distributed(), parallel), batch)
    seconds = {"the step": seconds_of(step, burst=1)}
    with torch.profiler.profile() as profile:
        step()
        if ON_GPU:
            torch.cuda.synchronize()
    events = [event for event in profile.key_averages() if event.device_type.name != "CPU"]
    events.sort(key=lambda event: -event.self_device_time_total)
    return seconds | {event.key: event.self_device_time_total / 1e6 for event in events[:20]}


def measure_rewards() -> dict[str, float]:
    """Train a model of 1B's shape on word problems (docs/problems.py), and then by rewards. Return
    means of its first and its last ten steps, by name."""
    size = "--model llama3.2-1b" if ON_GPU else "--model tiny --dim 32 --n-layers 1"
    text = "--data problems/text.jsonl --tokenizer bytes --document-mask --seq-len 512 --out base"
    steps = "--batch 64 --microbatch 32 --steps 400" if ON_GPU else "--batch 4 --steps 4 --warmup 1"
    answers = "--batch 32 --warmup 1 --steps 2 --max-new-tokens 8"
    if ON_GPU:
        answers = "--batch 256 --microbatch 64 --steps 20 --max-new-tokens 96"
    prompts = "--data problems/prompts.jsonl --seq-len 256 --eval-every 0"
    reward = f"--reward {ROOT / 'docs/three_rewards.py'} --updates 4 --kl 0.01 --out grpo"
    commands = [
        f"{ROOT / 'docs/problems.py'} problems",
        f"{ROOT / 'train.py'} {size} {text} {steps} --eval-every 0",
        f"{ROOT / 'rewards.py'} --init base {prompts} {answers} {reward}",
    ]
    with tempfile.TemporaryDirectory() as directory:
        for command in commands:
            words = [sys.executable, *shlex.split(command)]
            subprocess.run(words, cwd=directory, check=True, stdout=subprocess.DEVNULL)
        lines = (Path(directory) / "grpo/metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    found = {}
    for name in ("reward", "reward_number", "length", "kl", "clipped", "mean_log_ratio",
                 "sampling_seconds", "seconds"):  # fmt: skip
        for when, part in (("first", rows[:10]), ("last", rows[-10:])):
            found[f"{when} {name}"] = statistics.mean(row[name] for row in part)
    return found


MEASURES = dict(rates=measure_rates, kernels=measure_kernels, rewards=measure_rewards)

# ------------------------------------------------------------------------------ running commands


def write_tokenizer(file: Path) -> None:
    """Write a tokenizer with as many tokens as Llama 3's: all of one and two bytes, some of three.
    In bench.py step the tokenizer decides how many embeddings the model has."""
    sequences = (itertools.product(range(256), repeat=n) for n in (1, 2, 3))
    tokens = map(bytes, itertools.islice(itertools.chain(*sequences), 128_000))
    lines = (f"{base64.b64encode(token).decode()} {i}\n" for i, token in enumerate(tokens))
    file.write_text("".join(lines))


def run_command(line: str, directory: Path, timeout: float) -> object:
    """Return what bench.py writes to --json, the last line of any other command, or an error."""
    file = directory / "result.json"
    file.unlink(missing_ok=True)
    words = shlex.split(line.replace("TOKENIZER", str(directory / "tokenizer.model")))
    if words[0] == "bench.py":
        words += ["--json", str(file)]
    options = dict(cwd=ROOT, capture_output=True, text=True, timeout=timeout)
    try:
        process = subprocess.run([sys.executable, *words], **options)
    except subprocess.TimeoutExpired:
        return f"error: it took more than {timeout:.0f} s"
    if file.exists():
        return json.loads(file.read_text())
    if process.returncode:
        return f"error: {(process.stdout + process.stderr).splitlines()[-8:]}"
    return process.stdout.splitlines()[-1]


def run_part(part: str, out: Path) -> None:
    """Run the commands of a part that have no result in the file `out`, and write it after each."""
    ends = time.monotonic() + PART_SECONDS
    results = json.loads(out.read_text()) if out.exists() else {}
    with tempfile.TemporaryDirectory() as directory:
        write_tokenizer(Path(directory) / "tokenizer.model")
        for name, line, expected in PARTS[part]:
            if name in results and not str(results[name]["result"]).startswith("error"):
                continue
            left = ends - time.monotonic()
            if left < LEAST_SECONDS:
                print(f"no time is left for {name} and what follows: the same call goes on")
                return
            result = run_command(line, Path(directory), left)
            where = dict(device=torch.cuda.get_device_name(), torch=torch.__version__)
            results[name] = dict(command=line, result=result, expected=expected) | where
            out.write_text(json.dumps(results, indent=1) + "\n")
            print(f"{name}: {json.dumps(result)}\n    expected: {expected}", flush=True)


def main() -> None:
    parser = Parser(description="Measure what one GPU can tell, with a time limit.")
    parser.add_argument("--part", choices=PARTS, help="the commands to run")
    parser.add_argument("--out", type=Path, metavar="FILE.json", help="file for all results")
    parser.add_argument("--dry-run", action="store_true", help="only list the commands of the part")
    parser.add_argument("--measure", choices=MEASURES, help="measure this in place of a part")
    args = parser.parse_args()
    if args.measure:
        print(json.dumps(MEASURES[args.measure]()))
    elif args.part and args.dry_run:
        for name, line, expected in PARTS[args.part]:
            print(f"{name}: {expected}\n    python {line}")
    elif not (args.part and args.out):
        raise UserError("give --part A --out gpu.json; --part A --dry-run lists the commands")
    elif not ON_GPU:
        raise UserError("docs/gpu.py needs a GPU of CUDA: --dry-run lists its commands")
    else:
        instruments.check_writable("--out", args.out)
        run_part(args.part, args.out)


if __name__ == "__main__":
    run(main)
