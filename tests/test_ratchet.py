"""In how many run-time files a technique is named: exactly. The numbers may only fall.

A technique that many files name cannot be changed, or understood, in one place. Counted are its
flags, its field, its functions and classes, and every attribute that only it sets, in code and in
strings, but not in docstrings and comments. Merging files or renaming is no saving. Its own files
count as one, and so do the parts of a file that was divided to lower what an import reaches. A new
technique starts at 6 files or fewer: its own, config.py, parallel.py's list, and what it truly is
elsewhere."""

import ast
import functools
import re
from pathlib import Path

import pytest
from test_layout import FILES

# technique -> the number of files, and a pattern of its words
RATCHET = {
    "float8": (5, r"float8|Float8|8_bits|\brecipes?\b"),
    "4 bits": (8, r"nf4|NF4|4_bits|base_bits|row_scale|base-bits"),
    "LoRA": (26, r"\b_?lora|LoRA|_lora\b|adapters?\b"),
    "context parallelism": (15, r"\bcp\b|cp_mesh|context_parallel|share_sequences|own_tokens"),
    "Muon": (6, r"[mM]uon\b|muon_|_muon"),
    "moments": (5, r"\bmoments\b|moment_bytes|BFloat16AdamW"),
    "async TP": (5, r"async_tp|async-tp|in_chunks|saves_chunks"),
    "offloaded activations": (5, r"offload_activations|offload-activations"),
    "chunked loss": (4, r"chunked_loss|ChunkedLoss|tokens_at_a_time|LOSS_CHUNK"),
    "ZeRO-1": (5, r"zero1|ZeRO1|optimizer_slice"),
    "experts": (7, r"[eE]xperts?\b|Expert|expert_|\bep\b|Router|Grouped|EXCESS"),
    "recomputation": (12, r"checkpointing\b|saved_products|recompute_and"),
}
# file -> the one that it counts as
PART_OF = {
    "files.conversion": "checkpoint",
    "files.loading": "checkpoint",
    "files.save_checks": "checkpoint",
    "costs.plans": "costs.search",
    "costs.strategies": "costs.search",
    "finetune_lora": "lora",
    "runs.teacher": "distill",
    "files.adapters": "lora",
    "techniques.expert_parallel": "techniques.experts",
    "techniques.mixture": "techniques.experts",
    "models.mixtral": "techniques.experts",
    "models.qwen3_moe": "techniques.experts",
    "models.deepseek_v3": "model",  # which has such attributes for Llama
    "techniques.muon": "techniques.optimizers",
    "techniques.bfloat16_moments": "techniques.optimizers",
}


@functools.cache
def code_of(path: Path) -> str:
    """Return the code of a file without its docstrings and comments."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        documented = isinstance(node, ast.Module | ast.FunctionDef | ast.ClassDef)
        if documented and ast.get_docstring(node):
            node.body[0].value.value = ""
    return ast.unparse(tree)


@pytest.mark.parametrize("technique", RATCHET)
def test_no_more_files_name_a_technique(technique):
    files, pattern = RATCHET[technique]
    named = [name for name, path in FILES.items() if re.search(pattern, code_of(path))]
    assert named, "the pattern matches nothing: the technique has other words now"
    counted = {PART_OF.get(name, name) for name in named}
    assert len(counted) == files, counted
