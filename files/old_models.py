"""Tell the family of a checkpoint from before each model had a file of its own.

LlamaConfig then had fields that said what a model is, and its checkpoints name no family."""

from models.family import Family, families, own_fields
from plumbing.json_files import JsonFile
from plumbing.messages import UserError

SWITCHES = {"qkv_bias": False, "qk_norm": False, "n_experts": 0}  # and what switched them off


def family_of_old(content: JsonFile, saved: dict) -> Family:
    """Return the family of an old checkpoint, and remove the switches from the fields of its
    configuration, which it has `saved`."""
    has_bias, has_norms, has_experts = (saved.get(key, off) for key, off in SWITCHES.items())
    if has_bias and (has_norms or has_experts):
        raise UserError(f"{content.path} has qkv_bias beside others: no model here has both")
    if has_experts:
        name = "qwen3_moe" if has_norms else "mixtral"
    elif has_norms:
        name = "qwen3"
    else:
        name = "qwen2" if has_bias else "llama"
    family = families()[name]
    for key in {*SWITCHES, "top_k", "balance"} - own_fields(family.config):
        saved.pop(key, None)
    return family
