"""`bench.py generate`: how fast a model writes, and how far that is from what the machine can do.

    python bench.py generate --model medium --batch 16 --seq-len 128 1024
    python bench.py generate ours compiled --model llama3.1-8b --dtype bfloat16       on a GPU

To draw a token for every row, a step reads the matrices, and the keys and values of all earlier
tokens. The limit is the time to read so many bytes as fast as the machine copies memory.
Contestants continue the same prompts from the same weights by the likeliest token, in turns. The
time until the first token, in which the prompts are read, does not count.
"""

import importlib.util
import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from files.formats import hf_names, to_hf_rows
from files.loading import weights_of
from generate import compile_blocks
from model import Llama, LlamaConfig
from perf.instruments import Instrument, check_writable, fill_randomly, run_in_turns
from perf.reports import describe_machine, markdown_table, quartiles, write_json
from perf.rivals import transformers_model
from plumbing.flags import values_of
from plumbing.messages import UserError
from plumbing.processes import Process
from plumbing.shards import allocate
from techniques.decoding import check_length, stream
from techniques.kv_cache import KVCache

COLUMNS = "prompt, contestant, ms a token, tokens/s, ratio to the first (quartiles), of the limit"
OURS = ("ours", "compiled")


def make_writer(name: str, model: Llama) -> Callable[[list[list[int]], int], list]:
    """Return a function that continues prompts [B][T] by n tokens. It returns the new tokens
    [n][B], and the wall and CPU time at which it had the first of each row."""
    if name in OURS:
        return partial(write, model, name == "compiled")
    if name in ("transformers", "static"):
        return transformers_writer(model, is_static=name == "static")
    raise UserError(f"no contestant {name}: choose from {', '.join(OURS)}, transformers, static")


def write(model: Llama, compiled: bool, prompts: list[list[int]], n: int) -> tuple:
    tokens = []
    with torch.compiler.set_stance("default" if compiled else "force_eager"):
        for step in stream(model, prompts, n, temperature=0, compiled=compiled):
            if not tokens:
                started = time.perf_counter(), time.process_time()
            tokens.append(step)
    return tokens, *started


def transformers_writer(model: Llama, is_static: bool) -> Callable:
    """Return such a function of transformers' generate, with the weights of `model` and a cache
    that grows or, if `is_static`, one of fixed size."""
    parameter = next(model.parameters())
    device = parameter.device
    theirs = transformers_model(model, device).to(parameter.dtype).eval()
    weights = {}
    for name, weight in weights_of(model).items():
        (their_name,) = hf_names(name, model.config, weight.shape)
        weights[their_name] = to_hf_rows(name, model.config, weight)
    theirs.load_state_dict(weights, strict=False)  # a tied matrix has two names there
    theirs.generation_config.eos_token_id = None

    def write(prompts: list[list[int]], n: int) -> tuple:
        started = []

        def note(ids, scores, **_) -> Tensor:  # called when a token of every row is there
            if not started:
                if device.type == "cuda":
                    torch.cuda.synchronize()
                started.extend((time.perf_counter(), time.process_time()))
            return torch.zeros(len(prompts), dtype=torch.bool, device=device)

        ids = torch.tensor(prompts, device=device)
        options = {"cache_implementation": "static"} if is_static else {}
        with torch.no_grad():
            out = theirs.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=n,
                do_sample=False,
                use_cache=True,
                pad_token_id=0,
                disable_compile=True,
                stopping_criteria=[note],
                **options,
            )
        return out[:, ids.shape[1] :].T.tolist(), *started

    return write


class Turn:
    """A contestant's turn, which run_in_turns calls."""

    def __init__(self, writer: Callable, prompts: list[list[int]], n: int):
        self.writer = writer
        self.prompts = prompts
        self.n = n

    def __call__(self) -> Callable[[], dict[str, float]]:
        self.tokens, wall, cpu = self.writer(self.prompts, self.n)
        steps = self.n - 1  # after the first token
        seconds = {
            "token": (time.perf_counter() - wall) / steps,
            "cpu": (time.process_time() - cpu) / steps,
        }
        return lambda: seconds


def default_contestants(model: Llama) -> list[str]:
    is_installed = importlib.util.find_spec("transformers") is not None
    is_unquantized = all(parameter.is_floating_point() for parameter in model.parameters())
    if is_installed and is_unquantized and type(model.config) is LlamaConfig:
        return ["ours", "transformers", "static"]
    return ["ours"]


def measure_generation(asked, model: Llama, process: Process) -> str:
    """Let contestants continue prompts, as bench.py's Generating asks. Return the results as text,
    and write them to --json with the flags. `model` is on meta, and gets random weights."""
    if process.size > 1:
        raise UserError("bench.py generate measures one process: run python, not torchrun")
    check_writable("--json", asked.json)
    if asked.max_new_tokens < 2:
        raise UserError("--max-new-tokens must be 2 or more: the first token does not count")
    batch = asked.batch
    n = asked.max_new_tokens
    check_length(max(asked.seq_len), n, model.config.max_seq_len)
    model.to(asked.parallel.dtype)
    allocate(model, process.device)
    fill_randomly(model)
    model.eval()
    names = asked.contestants or default_contestants(model)
    if "compiled" in names:
        compile_blocks(model)
    writers = {name: make_writer(name, model) for name in names}
    rate = copy_rate(process.device)
    rows = []
    results = []
    for context in asked.seq_len:
        generator = torch.Generator().manual_seed(context)
        vocabulary = model.config.vocab_size
        prompts = torch.randint(vocabulary, (batch, context), generator=generator).tolist()
        turns = {name: Turn(writer, prompts, n) for name, writer in writers.items()}
        rounds = run_in_turns(turns, asked.repeats)
        limit = bytes_of_step(model, batch, context + n // 2) / rate
        of_first = rounds[names[0]]["token"]
        for name in names:
            seconds = rounds[name]["token"]
            median = statistics.median(seconds)
            lower, ratio, upper = quartiles(a / b for a, b in zip(seconds, of_first))
            ratios = f"{ratio:.3f} ({lower:.3f}-{upper:.3f})"
            speed = batch / median
            row = [f"{batch} x {context}", name, f"{median * 1e3:.2f}", f"{speed:,.1f}", ratios]
            rows.append([*row, f"{limit / median:.1%}"])
            result = {
                "context": context,
                "contestant": name,
                "seconds": seconds,
                "cpu_seconds": rounds[name]["cpu"],
                "tokens_per_second": speed,
                "limit_seconds": limit,
                "writes_what_the_first_does": turns[name].tokens == turns[names[0]].tokens,
            }
            results.append(result)
    operators = operators_of_step(model)
    machine = {"copied_bytes_per_second": rate, "operators_of_a_token": operators}
    flags = values_of(asked)
    del flags["json"]
    write_json(asked.json, flags | describe_machine(process) | machine | {"results": results})
    lines = markdown_table(COLUMNS.split(", "), rows)
    lines += [
        "",
        f"memory is copied at {rate / 1e9:,.1f} GB/s, read and written together",
        f"a token of ours takes {operators:,} operators that are no views",
    ]
    differing = {r["contestant"] for r in results if not r["writes_what_the_first_does"]}
    if differing:
        lines.append(f"other tokens than by {names[0]}: {', '.join(sorted(differing))}")
    return "\n".join(lines)


def copy_rate(device: torch.device) -> float:
    """Return the bytes a second that a device reads and writes when it copies memory."""
    size = 2**30 if device.type == "cuda" else 2**27  # larger than most caches
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    rounds = run_in_turns({"copy": lambda: target.copy_(source)}, 5)
    return 2 * size / min(rounds["copy"]["step"])


def bytes_of_step(model: Llama, rows: int, context: int) -> float:
    """Return the bytes that a step has to read, for rows of `context` tokens. Of stacked matrices
    it reads those that tokens use, and each row may use others."""
    read = 0.0
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            if isinstance(module, nn.Embedding) and not model.config.tie_embeddings:
                continue  # of which it reads a row for each token
            used = rows * getattr(module, "used", len(parameter))
            read += min(1.0, used / len(parameter)) * parameter.nbytes
    if model.config.tie_embeddings:
        read -= model.output.weight.nbytes  # which both have
    return read + rows * context * bytes_of_token(model)


@torch.no_grad()
def bytes_of_token(model: Llama) -> int:
    """Return the bytes of a token's keys and values, counted in a cache of one token."""
    one = torch.zeros(1, 1, dtype=torch.int64, device=next(model.parameters()).device)
    cache = KVCache(1)
    with torch.compiler.set_stance("force_eager"):
        model(one, positions=one, cache=cache)
    return sum(layer.k.nbytes + layer.v.nbytes for layer in cache.layers.values())


class Operators(Instrument):
    """Counts the operators that are no views."""

    def __init__(self):
        super().__init__()
        self.number = 0

    def see(self, op, args, kwargs, result: Tensor) -> None:
        self.number += not op.is_view


def operators_of_step(model: Llama) -> int:
    """Return how many operators a token takes, of which nearly each is a kernel of a GPU."""
    steps = stream(model, [[1]], 2, temperature=0)
    next(steps)  # by the prompt
    with Operators() as operators:
        next(steps)
    return operators.number
