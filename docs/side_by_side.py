"""Set models side by side: what a model has that another has not, and what that costs.

    python docs/side_by_side.py llama3.1-8b qwen3-30b-a3b     two presets in a table
    python docs/side_by_side.py                               the table of docs/models.md anew

Nothing is allocated: weights are counted on `meta`, and the cache by fake tensors.
"""

import argparse
import re
import sys
from dataclasses import asdict
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402

from costs.shapes import flops_per_token  # noqa: E402
from model import LlamaConfig  # noqa: E402
from models.family import HERE, family_of, find_preset  # noqa: E402
from perf.instruments import WithoutInit, build_on_meta  # noqa: E402
from plumbing.processes import run  # noqa: E402
from techniques.kv_cache import KVCache  # noqa: E402

CONTEXT = 8192  # tokens that a token attends to, for its FLOPs
SHOWN = {  # a preset of each family in docs/models.md
    "llama": "llama3.1-8b",
    "qwen2": "qwen2.5-7b",
    "qwen3": "qwen3-8b",
    "mixtral": "mixtral-8x7b",
    "qwen3_moe": "qwen3-30b-a3b",
    "olmo2": "olmo2-7b",
    "olmo3": "olmo3-7b",
    "gemma3": "gemma3-4b",
    "deepseek_v3": "deepseek-v3",
}


# What a block of each family has, by part, for the picture.
ROWS = "year", "norms", "attention", "positions", "feed-forward"
BLOCKS = {
    "llama": ("2024", "before each part", "grouped queries", "RoPE", "SwiGLU"),
    "qwen2": ("2024", "before each part", "biases of q, k, v", "RoPE", "SwiGLU"),
    "qwen3": ("2025", "before each part", "q and k normed", "RoPE", "SwiGLU"),
    "mixtral": ("2024", "before each part", "grouped queries", "RoPE", "8 experts, 2 used"),
    "qwen3_moe": ("2025", "before each part", "q and k normed", "RoPE", "128 experts, 8 used"),
    "olmo2": ("2024", "after each part", "q and k normed", "RoPE", "SwiGLU"),
    "olmo3": ("2025", "after each part", "windows in 3 of 4", "YaRN in full layers", "SwiGLU"),
    "gemma3": ("2025", "before and after", "windows in 5 of 6", "two RoPEs", "GeGLU"),
    "deepseek_v3": ("2024", "before each part", "by latents", "YaRN", "256 experts, 8 used"),
}


def cached_bytes(config: LlamaConfig) -> int:
    """Return the bytes in which KVCache keeps a token, in bfloat16: counted of three tokens."""
    cache = KVCache(3)
    with FakeTensorMode(), WithoutInit(), torch.no_grad():
        model = config.build()
        model(torch.zeros(1, 3, dtype=torch.int64), positions=torch.arange(3)[None], cache=cache)
    kept = [tensor for layer in cache.layers.values() for tensor in (layer.k, layer.v)]
    return 2 * sum(tensor.numel() for tensor in kept) // 3


def in_words(number: float) -> str:
    """Return a number in billions or, below one, in millions."""
    return f"{number / 1e9:,.2f} B" if number >= 1e9 else f"{number / 1e6:,.2f} M"


def facts(config: LlamaConfig) -> dict[str, str]:
    """Return what a table says of a configuration, by row."""
    model = build_on_meta(config)
    forward = flops_per_token(model, CONTEXT) / 3
    return {
        "family": family_of(config).name,
        "parameters": in_words(sum(p.numel() for p in model.parameters())),
        "weights that a token uses": in_words(flops_per_token(model, seq_len=0) / 6),
        "bytes of a cached token": f"{cached_bytes(config):,}",
        f"FLOPs of a token after {CONTEXT:,}": in_words(forward),
    }


def compare(names: list[str]) -> str:
    """Return a table of presets with the rows in which they differ, and a line of the others."""
    configs = [find_preset(name) for name in names]
    columns = []
    for config in configs:
        fields = {key: f"{value:,}" if type(value) is int else str(value)
                  for key, value in asdict(config).items()}  # fmt: skip
        columns.append(facts(config) | fields)
    rows, same = [["", *names]], []
    for key in dict.fromkeys(key for column in columns for key in column):
        values = [column.get(key, "-") for column in columns]
        if len(set(values)) > 1:
            rows.append([key, *values])
        else:
            same.append(f"{key} {values[0]}")
    widths = [max(map(len, column)) for column in zip(*rows)]
    lines = []
    for first, *others in rows:
        cells = [first.ljust(widths[0])]
        cells += [value.rjust(width) for value, width in zip(others, widths[1:])]
        lines.append("  ".join(cells).rstrip())
    return "\n".join([*lines, "", f"the same: {', '.join(same)}"])


def what_differs(name: str) -> str:
    """Return the sentence in the head of a model's file that says what differs from Llama."""
    head = (ROOT / f"models/{name}.py").read_text().split('"""')[1]
    _, _, said = head.partition("What differs from Llama: ")
    without_sources = re.sub(r"\s+\([^)]*\)", "", said.split("\n\n")[0])
    sentence, _, _ = re.sub(r"\s+", " ", without_sources).partition(". ")
    return sentence.strip(" .") or "model.py itself"


def table() -> str:
    """Return the table of docs/models.md: a row for each family."""
    first, *_ = (facts(find_preset(SHOWN[name])) for name in HERE)
    head = ["model", "lines", "what differs from Llama", "of the preset", *[*first][1:]]
    rows = [head, ["---"] * len(head)]
    for name in HERE:
        path = ROOT / f"models/{name}.py"
        numbers = [*facts(find_preset(SHOWN[name])).values()][1:]
        lines = len(path.read_text().splitlines())
        link = f"[{name}](../models/{name}.py)"
        rows.append([link, str(lines), what_differs(name), SHOWN[name], *numbers])
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("presets", nargs="*", help="presets to compare; none: write the page")
    names = parser.parse_args().presets
    if names:
        print(compare(names))
        return
    page = ROOT / "docs/models.md"
    text = page.read_text()
    old = re.search(r"\| model \| lines \|.*\n(\|.*\n)*", text)
    page.write_text(text[: old.start()] + table() + text[old.end() :])


if __name__ == "__main__":
    run(main)
