"""The record in which a model's file answers all other files, and how that file is found.

model.py is Llama. Another model is one file, here or a student's own, that says what differs:

    a configuration       a subclass of LlamaConfig; its fields are flags, its `build` makes a model
    classes               of Llama, Block, Attention or FeedForward, which do it in another way
    MODEL = Family(...)   what flags, tensor parallelism and files have to know

    torchrun train.py --model mine.py            its first preset
    torchrun train.py --model mine.py:large      another

What classes of layers may say of themselves is listed in techniques/technique.py.

A checkpoint names the file of its model and never brings it: a file of somebody's checkpoint could
run any code. So mine.py must lie in the folder where a command is given, or beside model.py.
"""

import functools
import importlib
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from model import LlamaConfig
from plumbing.messages import UserError

# The files of this folder with a MODEL.
HERE = "llama", "qwen2", "qwen3", "mixtral", "qwen3_moe", "olmo2", "olmo3", "gemma3", "deepseek_v3"
TARGETS = "wq", "wk", "wv", "wo", "w1", "w2", "w3"  # a Llama's matrices that can have an adapter
# A small model of each kind, for the published logits alone (files/published.py). Each part of a
# real model shows in its logits: grouped queries, the epsilon, each range of Llama 3.1's RoPE. It
# has four layers, as some models treat every fourth layer differently.
SMALL = dict(dim=32, n_layers=4, n_heads=4, n_kv_heads=2, ffn_dim=40, vocab_size=64)
SMALL |= dict(norm_eps=0.01, rope_theta=1e6, rope_scaling=8.0)


@dataclass(frozen=True)
class Published:
    """How other programs know a model. "Fields" are those of a Hugging Face config.json, with those
    of its RoPE among them; ours are called the configuration's."""

    logits: tuple[float, ...]  # of the small model, as transformers computes them
    # Module, or parameter -> its name in Hugging Face's files, beside formats.HF_NAMES. {} is the
    # number of an expert, each of which has a matrix of its own there.
    names: dict[str, str] = field(default_factory=dict)
    fields: dict[str, str] = field(default_factory=dict)  # the configuration's -> theirs
    defaults: dict[str, Any] = field(default_factory=dict)  # for missing fields, as transformers
    renamed: dict[str, str] = field(default_factory=dict)  # transformers 5's name -> that of before
    # The only values that work here: others are refused, and these are written.
    supported: dict[str, Any] = field(default_factory=dict)
    absent: tuple[str, ...] = ()  # fields of other models that this one's config.json is not given
    # What null means in a field (None: it is refused). In all others it means a missing field.
    nulls: dict[str, Any] = field(default_factory=dict)
    scaling: dict[str, Any] | None = None  # the only values of a scaled RoPE; None: formats.py's
    # Is called first with the content of a config.json: to write into it in one way what a file may
    # say in several.
    prepare: Callable = lambda content: None
    # Content of a config.json, with the defaults of missing fields -> more of the configuration.
    read: Callable = lambda content: {}
    write: Callable = lambda config: {}  # configuration -> more fields of a config.json
    # (name in a file, configuration) -> what this part of a model is called, if it is not read; ""
    ignored: Callable = lambda name, config: ""
    # Configuration -> beside wq and wk, parameters whose rows RoPE pairs, with their numbers of
    # heads. 0: no rows are paired.
    paired: Callable = lambda config: {}
    unpublished: Callable = lambda config: ""  # why nobody else knows such a configuration, or ""
    # The order of rows of wq and wk in llama.cpp's files, "meta" or "hf"; "": none are written.
    gguf_rows: str = ""
    gguf_names: dict[str, str] = field(default_factory=dict)  # module -> name, beside gguf.NAMES


@dataclass(frozen=True, eq=False)  # so that functions can be cached by family
class Family:
    """The answers of one model's file. Each has a default, which is Llama's."""

    name: str  # the model_type of a config.json; a student's is replaced by the name of its file
    config: type[LlamaConfig]
    presets: dict[str, LlamaConfig] = field(default_factory=dict)
    # Your fields in the SMALL model, by whose logits changed code is noticed (files/published.py):
    # values that fit its sizes and matter within 600 tokens, such as a window of 48.
    small: dict[str, Any] = field(default_factory=dict)
    # () -> {"layers.*.attention.q_norm": style of tensor parallelism}, beside parallel.PLAN or in
    # place of its entries. It is a function, since styles import torch.distributed, which a model
    # alone does not need.
    plan: Callable = lambda: {}
    # Configuration -> names of the matrices that can have an adapter (lora.py).
    targets: Callable = lambda config: TARGETS
    published: Published | None = None  # None: no other program knows the model
    digest: str = ""  # of a student's file, which own_file.py sets

    @property
    def small_config(self) -> LlamaConfig:
        return self.config(**SMALL | self.small)


@functools.cache
def families() -> dict[str, Family]:
    """Return the models of this folder by their file. models/own_file.py adds a student's."""
    return {name: importlib.import_module(f"models.{name}").MODEL for name in HERE}


def family_of(config: LlamaConfig) -> Family:
    """Return the family of a configuration, by its class."""
    for family in families().values():
        if family.config is type(config):
            return family
    raise UserError(f"no MODEL has {type(config).__name__}: give its file as --model FILE.py")


def find_preset(name: str) -> LlamaConfig:
    """Return the configuration that --model names: a preset, FILE.py, or FILE.py:PRESET."""
    path, _, preset = name.partition(":")
    if path.endswith(".py"):
        from models.own_file import load_file  # here, as below: for a student's file alone

        known = load_file(path).presets
        preset = preset or next(iter(known))
    else:
        known = presets()
        preset = name
    if preset not in known:
        raise UserError(f"no preset '{preset}': choose one of {', '.join(known)}")
    return known[preset]


def presets() -> dict[str, LlamaConfig]:
    """Return the configurations of this folder's models by name."""
    found = {}
    for name in HERE:
        found |= families()[name].presets
    return found


def own_fields(kind: type[LlamaConfig]) -> set[str]:
    """Return the names of the fields of a configuration that LlamaConfig has not."""
    return {f.name for f in fields(kind)} - {f.name for f in fields(LlamaConfig)}


def family_named(name: str, digest: str = "") -> Family:
    """Return the family that a checkpoint names. A student's file is loaded by its bare name; a
    loaded one with another name and the same `digest` is the same model."""
    for family in families().values():
        if family.name == name or (digest and family.digest == digest):
            return family
    if name.endswith(".py"):
        from models.own_file import load_file

        return load_file(Path(name).name)
    raise UserError(f"there is no model {name} here: choose one of {', '.join(families())}")
